"""A TCP line between a broker and its NATS server, that a test can cut, hold up, or make slow in either direction."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time

QUIET = 0.02


class Line:
    """Listens on a free port of this machine; each connection goes on to `target`."""

    def __init__(self, target: int) -> None:
        self.delay = 0.0  # seconds, of each chunk
        self.to_held = False  # what is said to the server waits; so does,
        self.from_held = False  # what it says
        self.dead = False  # nobody gets through
        self._target = target
        self._closed = False
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    @property
    def url(self) -> str:
        return f"nats://127.0.0.1:{self._listener.getsockname()[1]}"

    def cut(self) -> None:
        """All connections break; the next ones get through."""
        pairs, self._pairs = self._pairs, []
        for pair in pairs:
            for one in pair:
                _break(one)

    def _accept(self) -> None:
        while not self._closed:
            if not select.select([self._listener], [], [], QUIET)[0]:
                continue
            with contextlib.suppress(OSError):
                near, _ = self._listener.accept()
                if self.dead:
                    near.close()
                    continue
                far = socket.create_connection(("127.0.0.1", self._target))
                self._pairs.append((near, far))
                for one, other, to in ((near, far, True), (far, near, False)):
                    thread = threading.Thread(target=self._pass_on, args=(one, other, to), daemon=True)
                    self._threads.append(thread)
                    thread.start()

    def _pass_on(self, source: socket.socket, sink: socket.socket, to: bool) -> None:
        try:
            while not self._closed:
                if (self.to_held if to else self.from_held) or not select.select([source], [], [], QUIET)[0]:
                    time.sleep(QUIET / 10)
                    continue
                data = source.recv(65536)
                if not data:
                    break
                if self.delay:
                    time.sleep(self.delay)
                sink.sendall(data)
        except OSError:
            pass
        _break(source)
        _break(sink)

    def __enter__(self) -> Line:
        return self

    def __exit__(self, *exc: object) -> None:
        self._closed = True
        self._listener.close()
        self.cut()
        for thread in self._threads:
            thread.join(5)


def _break(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
