"""gRPC in Python: a unary call whose messages are JSON text, over a Unix socket.

python -m benchmarks.peers.grpc_unix SOCKET      the server
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import msgspec

from benchmarks.peers.peer import Call, Many, Peer, in_order, inputs

METHOD = "/benchmark.Tools/Echo"
THREADS = 4


@contextmanager
def opened() -> Iterator[Call]:
    import grpc

    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/grpc.sock"
        server = subprocess.Popen([sys.executable, "-m", __spec__.name, path], stdout=subprocess.PIPE)
        try:
            assert server.stdout is not None
            server.stdout.readline()
            with grpc.insecure_channel(f"unix:{path}") as channel:
                ask = channel.unary_unary(METHOD)  # bytes as they are

                def call(asked: dict[str, Any]) -> bytes:
                    answer: bytes = ask(msgspec.json.encode(asked))
                    return answer

                call.future = ask.future  # type: ignore[attr-defined]
                yield call
        finally:
            server.kill()
            server.wait()


def many(call: Call) -> Many:
    begin = call.future  # type: ignore[attr-defined]
    return in_order(lambda number: begin(msgspec.json.encode(inputs(number))))


def serve(path: str) -> None:
    import grpc

    def echo(asked: bytes, _: Any) -> bytes:
        return msgspec.json.encode(msgspec.json.decode(asked))

    server = grpc.server(ThreadPoolExecutor(THREADS))
    handlers = {"Echo": grpc.unary_unary_rpc_method_handler(echo)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("benchmark.Tools", handlers),))
    server.add_insecure_port(f"unix:{path}")
    server.start()
    print("ready", flush=True)
    server.wait_for_termination()


PEER = Peer(
    name="gRPC in Python",
    how=f"grpcio's synchronous client and server ({THREADS} threads), generic handlers with bytes (no protobuf), "
    "msgspec's JSON, one channel over a Unix socket; many under way: futures. Chosen for its calls/s in one short "
    "trial of each: a `grpc.aio` server, with and without uvloop, had fewer, and so had 1 thread, at a little less "
    "latency",
    needs=("grpcio",),
    threads=opened,
    many=many,
)

if __name__ == "__main__":
    serve(sys.argv[1])
