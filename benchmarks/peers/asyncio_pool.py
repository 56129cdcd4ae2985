"""A naive pool: toolhosts as asyncio subprocesses, `json`, one call at a time in each, no policy at all."""

from __future__ import annotations

import asyncio
import json
import os
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from benchmarks.harness.controls import ECHO
from benchmarks.peers.peer import Call, Peer
from broker import where


@asynccontextmanager
async def opened() -> AsyncIterator[Call]:
    idle: asyncio.Queue[Process] = asyncio.Queue()
    command = (where.toolhost(), "--serve", where.demo_plugin())
    processes = [await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE) for _ in range(_cores())]
    for process in processes:
        idle.put_nowait(process)

    async def call(inputs: dict[str, Any]) -> str:
        process = await idle.get()
        try:
            assert process.stdin is not None
            assert process.stdout is not None
            line = {"aid": ECHO, "input_json": json.dumps(inputs), "ds_state": {"slots": {}}}
            process.stdin.write(json.dumps(line).encode() + b"\n")
            output: str = json.loads(await process.stdout.readline())["output_json"]
        finally:
            idle.put_nowait(process)
        return output

    try:
        yield call
    finally:
        for process in processes:
            process.kill()
            await process.wait()


def _cores() -> int:
    return len(os.sched_getaffinity(0))


PEER = Peer(
    name="naive asyncio pool",
    how="our `machina_toolhost --serve`, a process for each core, asyncio's subprocess streams on uvloop, `json` both "
    "ways, an `asyncio.Queue` of idle processes",
    coroutines=opened,
)
