"""A process for each call: `<command> <tool>`, the request on its stdin, one JSON object on its stdout."""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import time
from collections.abc import Callable, Iterator

import msgspec

from broker import errors
from broker.errors import Refusal
from broker.model import Caller, Judge, Place, Policy, Ticket, Tool, ToolInfo, Work
from broker.pool import process, verdicts
from broker.pool.fleet import Shared
from broker.pool.process import Process, SpawnError, Spec
from broker.pool.threads import AGAIN
from broker.settings import Limits
from broker.settings import OneShot as Settings
from broker.ticket import is_error

CHUNK = 65536
LATE, TOO_LONG = "late", "too long"

Told = Callable[[Process], object]


def describe(settings: Settings) -> ToolInfo:
    effects, tags = tuple(settings.side_effects), tuple(settings.tags)
    return ToolInfo(settings.name, settings.name, settings.deterministic, tags, effects, files=True)


def run_command(
    settings: Settings,
    limits: Limits,
    aid: str,
    line: bytes,
    seconds: float,
    born: Told = lambda _: None,
    gone: Told = lambda _: None,
    place: Place | None = None,
) -> bytes | Refusal:
    """The one object that it prints, or what went wrong. Blocking; whoever wants to end it is told of the process."""
    program = shutil.which(settings.command[0])
    if program is None:
        name = os.path.basename(settings.command[0])
        return Refusal(errors.NOT_FOUND, f"{name} not found at {settings.command[0]} (is it built, and executable?)")
    if "\0" in aid:
        return Refusal(errors.NOT_FOUND, f"tool not found: {aid!r}")
    command = (program, *settings.command[1:], aid)
    environment = {**os.environ, **settings.env}
    if place is not None:
        os.makedirs(place.folder, mode=0o700, exist_ok=True)
        environment |= {"BROKER_JOB_ID": place.job, "BROKER_JOB_DIR": place.folder}
    spec = Spec(command, environment, settings.cwd or None, fenced=False)
    try:
        child, output, said, ended = run_process(spec, line, seconds, limits.reply_bytes, born, gone)
    except SpawnError as error:
        return Refusal(errors.NOT_FOUND, f"{aid}: {error}")
    if ended == LATE:
        return verdicts.timeout(aid, seconds)
    if ended == TOO_LONG:
        return verdicts.oversize(aid, limits.reply_bytes)
    return _verdict(aid, child, output, said)


def run_process(
    spec: Spec, line: bytes, seconds: float, most: int, born: Told = lambda _: None, gone: Told = lambda _: None
) -> tuple[Process, bytes, bytes, str]:
    """The process, ended; its output, its last words, and LATE or TOO_LONG if it was not waited for."""
    child = process.spawn(spec)
    born(child)
    try:
        with no_deadly_pipes():
            return child, *_converse(child, line, seconds, most)
    finally:
        child.kill()
        while not child.reap():
            time.sleep(0.0005)
        gone(child)
        child.close()


class OneShot:
    """A runtime without warm processes, whose calls are run by the threads that bring them."""

    def __init__(self, settings: Settings, shared: Shared, outgrown: Callable[[Tool], bool] | None = None) -> None:
        self.source = " ".join(settings.command)
        self.timeout = settings.timeout_seconds or shared.limits.timeout_seconds
        self._settings = settings
        self._shared = shared
        self._outgrown = outgrown  # somebody else has the tool now

    def submit(self, work: Work, now: float) -> None:
        """The thread that brought the work runs it."""
        work.caller.run_here(work, now)  # type: ignore[attr-defined]

    def revise(self, judge: Judge, index: int | None = None) -> None:
        """Nobody waits here."""

    def run_plain(self, tool: Tool, line: bytes, caller: Caller) -> bytes | Refusal:  # noqa: ARG002
        return self._run(tool, line, tool.timeout, None)

    def run(self, work: Work) -> bytes | Refusal:
        return self._run(work.tool, work.lines, work.timeout, work.ticket)

    def _run(self, tool: Tool, line: bytes, seconds: float, ticket: Ticket | None) -> bytes | Refusal:
        shared = self._shared
        if self._outgrown is not None and self._outgrown(tool):
            return AGAIN
        if ticket is not None:
            with shared.lock:
                ticket.handed_over()
        outcome = run_command(self._settings, shared.limits, tool.name, line, seconds)
        with shared.lock:
            count(shared.policy, tool, outcome)
        return outcome


def count(policy: Policy, tool: Tool, outcome: bytes | Refusal) -> None:
    """What the breaker has to know of it."""
    now = time.monotonic()
    if isinstance(outcome, bytes):
        policy.answered(tool, 1, int(not is_error(outcome)), now)
    elif outcome.ran:
        tool.calls += 1
        tool.failed += 1
        policy.failed(tool, outcome.kind, outcome.text, now)


def _verdict(aid: str, child: Process, output: bytes, said: bytes) -> bytes | Refusal:
    if child.status != 0:
        words = [text.decode(errors="replace").strip() for text in (output, said)]
        detail = "\n".join(filter(None, words))[-2000:]
        ended = f"{aid}: its process {child.how_it_ended()}"
        return Refusal(errors.CRASH, f"{ended}{verdicts.SAID}{detail}" if detail else ended)
    text = output.strip()
    for candidate in (text, text.split(b"\n", 1)[0]):  # all of it, in as many lines as it likes; or the first line
        try:
            if isinstance(msgspec.json.decode(candidate), dict):
                return (msgspec.json.format(candidate, indent=-1) if b"\n" in candidate else candidate) + b"\n"
        except msgspec.DecodeError:
            pass
    return verdicts.bad_reply(aid, verdicts.junk(text[:160]) if text else "printed nothing")


def _converse(child: Process, line: bytes, seconds: float, most: int) -> tuple[bytes, bytes, str]:
    """Its output, its last words, and why it was not waited for, if so. Ends with the process, not with its pipes."""
    deadline = time.monotonic() + seconds
    output, said, left = bytearray(), bytearray(), memoryview(line)
    poller = select.poll()
    for fd in (child.stdout, child.stderr, child.pidfd):
        poller.register(fd, select.POLLIN)
    poller.register(child.stdin, select.POLLOUT)
    while (wait := deadline - time.monotonic()) > 0:
        ready = {fd for fd, _ in poller.poll(wait * 1000 + 1)}
        if child.stdin in ready:
            left = write_some(child, left, poller)
        dry = True
        for fd, kept in ((child.stdout, output), (child.stderr, said)):
            if fd in ready:
                data = os.read(fd, CHUNK)
                kept += data
                dry = dry and not data
                if not data:
                    poller.unregister(fd)
        del said[: -verdicts.STDERR_KEPT]
        if len(output) > most + 2 or len(output.rstrip(b"\r\n")) > most:
            return bytes(output), bytes(said), TOO_LONG
        if dry and child.pidfd in ready and child.reap():
            return bytes(output), bytes(said), ""
    return bytes(output), bytes(said), LATE


@contextlib.contextmanager
def no_deadly_pipes() -> Iterator[None]:
    """A program may have SIGPIPE end it: a command that does not read must not take it along."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGPIPE})
    try:
        yield
    finally:
        if signal.SIGPIPE not in before:
            signal.sigtimedwait({signal.SIGPIPE}, 0)
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


def write_some(child: Process, left: memoryview, poller: select.poll) -> memoryview:
    try:
        left = left[os.write(child.stdin, left) :]
    except BlockingIOError:
        return left
    except OSError:  # it does not want to know
        left = left[:0]
    if not left:
        poller.unregister(child.stdin)
        child.close_stdin()
    return left
