"""The end of a connection whose caller may still have something to read."""

from __future__ import annotations

import asyncio
import socket

LINGER_SECONDS = 1.0  # for a caller to read its last replies before the connection is torn down


def linger(sock: socket.socket, loop: asyncio.AbstractEventLoop) -> None:
    """A close on unread input throws away what the caller has not read yet: so its input is read away, for a while."""
    fd = sock.fileno()

    def over() -> None:
        if sock.fileno() >= 0:
            loop.remove_reader(fd)
            sock.close()

    def read_away() -> None:
        try:
            if not sock.recv(65536):
                over()
        except BlockingIOError:
            pass
        except OSError:
            over()

    try:
        sock.shutdown(socket.SHUT_WR)
    except OSError:
        sock.close()
        return
    loop.add_reader(fd, read_away)
    loop.call_later(LINGER_SECONDS, over)
