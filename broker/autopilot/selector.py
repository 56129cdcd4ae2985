"""A selector that is a program: it is told the situation on stdin and prints one block; with timeout and breaker."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

import msgspec

from broker.autopilot.runner import SelectorFailed, Situation
from broker.autopilot.selection import LONGEST
from broker.policy.breaker import Breaker, Settings, State
from broker.pool.process import SpawnError, Spec
from broker.runtimes.oneshot import LATE, TOO_LONG, run_process


class ExternalSelector:
    """Starts the command for every selection.

    What it prints is a selection, also a wrong one. That it crashes, hangs or says far too much is a failure; after
    three in a row it is left alone for a while, and the run ends.
    """

    def __init__(self, command: Sequence[str], *, timeout: float = 10.0, breaker: Settings | None = None) -> None:
        self._command = tuple(command)
        self._timeout = timeout
        self._breaker = Breaker(breaker or Settings(in_a_row=3))

    def __call__(self, situation: Situation) -> str:
        now = time.monotonic()
        probe = 0
        if self._breaker.state is not State.CLOSED:
            probe = self._breaker.may_probe(now)
            if not probe:
                wait = self._breaker.wait(now)
                raise SelectorFailed(f"it has failed too often, last: {self._breaker.last_reason}", retry_in=wait)
        try:
            text = self._ask(msgspec.json.encode(situation) + b"\n")
        except SelectorFailed as failed:
            if probe:
                self._breaker.probe_failed(probe, str(failed), time.monotonic())
            else:
                self._breaker.failed(str(failed), time.monotonic())
            raise
        if probe:
            self._breaker.probe_passed(probe)
        self._breaker.succeeded(1, time.monotonic())
        return text

    def _ask(self, line: bytes) -> str:
        name = os.path.basename(self._command[0])
        try:
            spec = Spec(self._command, dict(os.environ), fenced=False)
            child, output, said, ended = run_process(spec, line, self._timeout, LONGEST)
        except SpawnError as error:
            raise SelectorFailed(str(error)) from None
        if ended == LATE:
            raise SelectorFailed(f"{name} did not choose within {self._timeout:g} s")
        if ended == TOO_LONG:
            raise SelectorFailed(f"{name} said more than {LONGEST} bytes")
        if child.status != 0:
            words = said.decode(errors="replace").strip()[-400:]
            raise SelectorFailed(f"{name} {child.how_it_ended()}" + (f"; it said: {words}" if words else ""))
        return output.decode(errors="replace")
