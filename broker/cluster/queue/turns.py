"""Callers' questions to NATS: so many at once, since its answers to more of them would come too late for all."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

from broker import errors
from broker.bus import Bus
from broker.errors import Refusal

AT_ONCE = 64

Answer = dict[str, Any] | Refusal


class Turns:
    def __init__(self, bus: Bus, patience: float, longest: float) -> None:
        self._bus = bus
        self._patience = patience  # while NATS is away
        self._longest = longest  # while others are served
        self._free = asyncio.Semaphore(AT_ONCE)

    async def take(self, ask: Callable[[], Awaitable[Answer]]) -> Answer:
        end = time.monotonic() + self._longest
        while not await self._turn(min(self._patience, end - time.monotonic())):
            if not self._bus.connected:
                return Refusal(errors.UNAVAILABLE, f"NATS ({self._bus.place}) does not answer", retry_after=1)
            if time.monotonic() >= end:
                text = f"it waited {self._longest:g} s for its turn to ask NATS (limits.queue_seconds)"
                return Refusal(errors.OVERLOADED, text, retry_after=1)
        try:
            return await ask()
        finally:
            self._free.release()

    async def _turn(self, seconds: float) -> bool:
        try:
            async with asyncio.timeout(seconds):
                return await self._free.acquire()
        except TimeoutError:
            return False
