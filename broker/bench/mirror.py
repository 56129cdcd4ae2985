"""A peer that answers at once with the same words: what is left to measure is the client itself.

python -m broker.bench.mirror SOCKET BYTES      each line with replies of so many bytes, until it is ended
python -m broker.bench.mirror - BYTES LINES     over HTTP, requests of so many lines; it says on which port
"""

from __future__ import annotations

import select
import socket
import sys

from broker.bench.model import Lost
from broker.bench.wire import Connection

ANSWER = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
FRAME = b'{"ok":true,"status":"OK","output_json":"%s","error":""}\n'


def main(argv: list[str]) -> int:
    path, size = argv[0], int(argv[1])
    lines = int(argv[2]) if path == "-" else 1
    reply = FRAME % (b"x" * max(0, size - len(FRAME % b"")))
    if path == "-":
        reply = ANSWER % (len(reply), reply)
    poll = select.epoll()
    peers: dict[int, Connection] = {}
    with _listen(path) as listener:
        poll.register(listener.fileno(), select.EPOLLIN)
        print("mirror ready", "" if path != "-" else listener.getsockname()[1], flush=True)
        while True:
            for fd, what in poll.poll():
                if fd == listener.fileno():
                    peer = Connection(listener.accept()[0], reply)
                    peers[peer.socket.fileno()] = peer
                    poll.register(peer.socket.fileno(), select.EPOLLIN)
                    continue
                peer = peers[fd]
                was = peer.blocked
                try:
                    peer.answered += peer.receive().count(b"\n") if what & ~select.EPOLLOUT else 0  # lines, here
                    peer.begin(peer.answered // lines - peer.started)
                except Lost:
                    peers.pop(fd).close()
                    continue
                if peer.blocked is not was:
                    poll.modify(fd, select.EPOLLIN | (select.EPOLLOUT if peer.blocked else 0))


def _listen(path: str) -> socket.socket:
    if path == "-":
        listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # those that are accepted have it, too
        return listener
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(path)
    listener.listen(1024)
    return listener


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
