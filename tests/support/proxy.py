"""A fault proxy between a caller and the broker: it splits, delays, stalls and cuts the bytes of both directions."""

from __future__ import annotations

import contextlib
import random
import select
import socket
import threading
import time
from dataclasses import dataclass
from pathlib import Path

QUIET = 0.05


@dataclass
class Trouble:
    """What may happen to each chunk that passes, as a probability."""

    split: float = 0.0  # it goes on in pieces, down to single bytes
    delay: float = 0.0  # up to `most` seconds later
    stall: float = 0.0  # nothing passes, in this direction, for `most` seconds
    cut: float = 0.0  # both ends lose the connection, in the middle of the chunk
    most: float = 0.02


class FaultProxy:
    """Listens on `path`; every connection goes on to `target`."""

    def __init__(self, path: Path, target: str, trouble: Trouble, seed: int = 0) -> None:
        self.path = str(path)
        self.trouble = trouble
        self.counts = {"connections": 0, "splits": 0, "delays": 0, "stalls": 0, "cuts": 0}
        self._target = target
        self._random = random.Random(seed)
        self._closed = False
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(self.path)
        self._listener.listen(128)
        self._threads: list[threading.Thread] = []
        self._start(self._accept)

    def __enter__(self) -> FaultProxy:
        return self

    def __exit__(self, *exc: object) -> None:
        self._closed = True
        self._listener.close()
        for thread in self._threads:
            thread.join(5)

    def _start(self, target, *arguments) -> None:
        thread = threading.Thread(target=target, args=arguments, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while not self._closed:
            if not select.select([self._listener], [], [], QUIET)[0]:
                continue
            with contextlib.suppress(OSError):
                caller, _ = self._listener.accept()
                broker = socket.socket(socket.AF_UNIX)
                broker.connect(self._target)
                self.counts["connections"] += 1
                self._start(self._pass_on, caller, broker)
                self._start(self._pass_on, broker, caller)

    def _pass_on(self, source: socket.socket, sink: socket.socket) -> None:
        try:
            while not self._closed:
                if not select.select([source], [], [], QUIET)[0]:
                    continue
                data = source.recv(65536)
                if not data:
                    sink.shutdown(socket.SHUT_WR)
                    return
                if not self._mangle(data, sink):
                    _break(source)
                    _break(sink)
                    return
        except OSError:  # the other direction has cut it
            _break(source)
            _break(sink)

    def _mangle(self, data: bytes, sink: socket.socket) -> bool:
        trouble, dice = self.trouble, self._random
        if dice.random() < trouble.cut:
            self.counts["cuts"] += 1
            sink.sendall(data[: dice.randrange(len(data))])
            return False
        if dice.random() < trouble.stall:
            self.counts["stalls"] += 1
            time.sleep(trouble.most)
        if dice.random() < trouble.delay:
            self.counts["delays"] += 1
            time.sleep(dice.random() * trouble.most)
        if dice.random() < trouble.split:
            self.counts["splits"] += 1
            while data:
                size = dice.choice((1, 1, 2, 7, 100, len(data)))
                sink.sendall(data[:size])
                data = data[size:]
        else:
            sink.sendall(data)
        return True


def _break(connection: socket.socket) -> None:
    """For both ends and both directions. It is closed when the last thread has let go of it, so that no descriptor is
    taken for another's."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
