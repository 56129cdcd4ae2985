"""One invocation: a process, its input, and its lines as they come. Blocking; for a thread."""

from __future__ import annotations

import contextlib
import os
import select
import time
from collections.abc import Callable
from typing import NamedTuple

from broker.pool import process
from broker.pool.process import PIPE_BYTES, Process, Spec
from broker.pool.verdicts import STDERR_KEPT
from broker.runtimes.events.protocol import Event, Stream, Verdict
from broker.runtimes.oneshot import CHUNK, no_deadly_pipes, write_some

LINGER_SECONDS = 2.0  # to exit in, after `done`
TERM_SECONDS = 1.0  # between SIGTERM and SIGKILL

Told = Callable[[Process], object]
Hear = Callable[[list[Event], float], str]
Over = Callable[["Ended"], object]


class Late(Exception):
    """The time was up while somebody was waited for."""

    def __init__(self, problem: str | None = None) -> None:
        super().__init__()
        self.problem = problem  # with the events, as `hear` tells it; None: they have not been heard


class Ended(NamedTuple):
    verdict: Verdict
    summary: str
    said: bytes  # on stderr, the last of it
    late: bool  # it was not waited for any longer


def invoke(
    spec: Spec, line: bytes, seconds: float, stream: Stream, hear: Hear, born: Told, gone: Told, over: Over
) -> None:
    """`hear` is given events as they come, and the time until which it may make the tool wait; what it answers, if
    anything, is wrong with them. `over` is told what has become of it at once, also if the process has yet to end."""
    child = process.spawn(spec)
    born(child)
    try:
        with no_deadly_pipes():
            conversation = _Conversation(child, line, time.monotonic() + seconds, stream, hear)
            over(conversation.run())
            conversation.end()
    finally:
        child.kill()
        while not child.reap():
            time.sleep(0.0005)
        gone(child)
        child.close()


class _Conversation:
    def __init__(self, child: Process, line: bytes, deadline: float, stream: Stream, hear: Hear) -> None:
        self._child = child
        self._left = memoryview(line)
        self._deadline = deadline
        self._stream = stream
        self._hear = hear
        self._said = bytearray()
        self._lingers = False  # it is done: from now on it has less time
        self._poller = select.poll()
        for fd in (child.stdout, child.stderr, child.pidfd):
            self._poller.register(fd, select.POLLIN)
        self._poller.register(child.stdin, select.POLLOUT)

    def run(self) -> Ended:
        try:
            while (wait := self._deadline - time.monotonic()) > 0:
                if self._turn(wait) or self._stream.violation:
                    return self._ended()
        except Late:
            pass
        if self._lingers:
            self._stream.violation = f"Process did not exit within {LINGER_SECONDS:g} s after done"
            return self._ended()
        return self._ended(late=True)

    def _turn(self, wait: float) -> bool:
        """Whatever is ready. Was it the last of it?"""
        child = self._child
        ready = {fd for fd, _ in self._poller.poll(wait * 1000 + 1)}
        if child.stdin in ready:
            self._left = write_some(child, self._left, self._poller)
        if child.stderr in ready:
            self._note(self._read(child.stderr))
        if child.stdout in ready:
            data = self._read(child.stdout)
            self._listen(self._stream.feed(data) if data else self._stream.end())
        if child.pidfd not in ready or not child.reap():
            return False
        self._read_dry()
        return True

    def _read(self, fd: int) -> bytes:
        data = os.read(fd, CHUNK)
        if not data:
            self._poller.unregister(fd)
        return data

    def _note(self, said: bytes) -> None:
        self._said += said
        del self._said[:-STDERR_KEPT]

    def _read_dry(self) -> None:
        """What it has left in the pipes; no more than they hold, since somebody else may go on writing."""
        for fd, take in ((self._child.stderr, self._note), (self._child.stdout, self._feed)):
            left = PIPE_BYTES
            with contextlib.suppress(BlockingIOError):
                while left > 0 and not self._stream.violation and (data := os.read(fd, CHUNK)):
                    left -= len(data)
                    take(data)
        self._listen(self._stream.end())

    def _feed(self, data: bytes) -> None:
        self._listen(self._stream.feed(data))

    def end(self) -> None:
        """It is asked to end, where it has not; what it still says is not heard."""
        child, deadline = self._child, time.monotonic() + TERM_SECONDS
        if child.status is None:
            child.terminate()
        while not child.reap() and (wait := deadline - time.monotonic()) > 0:
            for fd, _ in self._poller.poll(wait * 1000 + 1):
                if fd in (child.stdout, child.stderr):
                    self._read(fd)
                elif fd == child.stdin:
                    self._left = write_some(child, self._left[:0], self._poller)

    def _listen(self, events: list[Event]) -> None:
        stream, problem = self._stream, ""
        if events:
            try:
                problem = self._hear(events, self._deadline)
            except Late as late:
                if stream.done is None or late.problem is None:
                    raise
                problem = late.problem  # it has said all: it was only its caller that took so long
        stream.violation = stream.violation or problem
        if stream.done is not None and not self._lingers:
            self._lingers = True
            self._deadline = time.monotonic() + LINGER_SECONDS

    def _ended(self, *, late: bool = False) -> Ended:
        child, stream = self._child, self._stream
        code = None
        if child.status is not None and child.status != process.STOLEN and os.WIFEXITED(child.status):
            code = os.WEXITSTATUS(child.status)
        verdict = stream.verdict(child.how_it_ended(), code)
        return Ended(verdict, stream.summary, bytes(self._said), late)
