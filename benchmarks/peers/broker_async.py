"""Ours, over the socket, from coroutines: `AsyncClient`, all policy on."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from benchmarks.harness.controls import ECHO
from benchmarks.peers.peer import Call, Peer
from benchmarks.peers.private import broker
from broker import AsyncClient


@asynccontextmanager
async def opened() -> AsyncIterator[Call]:
    with broker() as path:
        async with AsyncClient(path) as client:

            async def call(asked: dict[str, Any]) -> str:
                return (await client.call(ECHO, asked)).output_json

            yield call


PEER = Peer(
    name="broker, `AsyncClient`",
    how="over the Unix socket, all policy on, on uvloop; a coroutine for each call under way",
    ours=True,
    coroutines=opened,
)
