"""A message in hand: NATS hears that it is worked on, its claim is renewed, and in the end it is let go of once."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from broker.faces.utp.claims import Claim

if TYPE_CHECKING:
    from nats.aio.msg import Msg


class Hand:
    def __init__(self, message: Msg, every: float) -> None:
        self.message = message
        self.claim: Claim | None = None
        self._every = every
        self._beating = asyncio.create_task(self._beat())

    @property
    def delivered(self) -> int:
        """How often it has come."""
        return int(self.message.metadata.num_delivered)

    @property
    def sequence(self) -> int:
        return int(self.message.metadata.sequence.stream)

    async def _beat(self) -> None:
        from nats.errors import Error

        while True:
            await asyncio.sleep(self._every)
            with contextlib.suppress(Error, OSError):
                await self.message.in_progress()
            if self.claim is not None:
                await self.claim.renew()

    async def done(self) -> None:
        await self._let_go(self.message.ack)

    async def end(self) -> None:
        """It is never to come again."""
        await self._let_go(self.message.term)

    async def give_back(self, seconds: float = 0.0) -> None:
        """Somebody else may have it; or we, later."""
        await self._let_go(lambda: self.message.nak(seconds))

    async def _let_go(self, how: Callable[[], Awaitable[None]]) -> None:
        """Where NATS does not hear of it, it comes again: then what came of it is there already."""
        from nats.errors import Error

        self._beating.cancel()
        with contextlib.suppress(Error, OSError):
            await how()
