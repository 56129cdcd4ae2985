"""A peer that answers each line at once with the same words: what is left to measure is the client itself.

python -m broker.bench.mirror SOCKET BYTES      replies of so many bytes, until it is ended
"""

from __future__ import annotations

import select
import socket
import sys

from broker.bench.model import Lost
from broker.bench.wire import Connection

FRAME = b'{"ok":true,"status":"OK","output_json":"%s","error":""}\n'


def main(argv: list[str]) -> int:
    path, size = argv[0], int(argv[1])
    reply = FRAME % (b"x" * max(0, size - len(FRAME % b"")))
    poll = select.epoll()
    peers: dict[int, Connection] = {}
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(path)
        listener.listen(1024)
        poll.register(listener.fileno(), select.EPOLLIN)
        print("mirror ready", flush=True)
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
                    peer.begin(peer.receive().count(b"\n") if what & ~select.EPOLLOUT else 0)
                except Lost:
                    peers.pop(fd).close()
                    continue
                if peer.blocked is not was:
                    poll.modify(fd, select.EPOLLIN | (select.EPOLLOUT if peer.blocked else 0))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
