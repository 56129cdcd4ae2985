"""The processes of one section: started for it, in a folder of its own, and ended with it, whatever happens."""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from benchmarks.harness.controls import SOURCES, Controls, Failed

START_SECONDS = 30.0
STOP_SECONDS = 5.0
PR_SET_PDEATHSIG = 1

_prctl = ctypes.CDLL(None).prctl


def _die_with(parent: int) -> Callable[[], None]:
    def prepare() -> None:
        _prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)

    return prepare


class Member:
    """One of them: what it says on stdout is for us, its last words are in a file."""

    ready = b""  # its first line

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self.process = process
        self._log = log

    def hear(self, seconds: float) -> bytes:
        """Its next line. Raises Failed if it has ended, or takes too long."""
        assert self.process.stdout is not None
        ready = select.select([self.process.stdout], [], [], seconds)[0]
        line = self.process.stdout.readline() if ready else b""
        if not line:
            said = self._log.read_text(errors="replace").strip().splitlines()
            raise Failed(said[-1] if said else "it has ended" if ready else f"it says nothing for {seconds:g} s")
        return line

    def ask(self, line: bytes, seconds: float) -> bytes:
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # why it has ended is more to the point
            self.process.stdin.write(line + b"\n")
            self.process.stdin.flush()
        return self.hear(seconds)


class Crew:
    def __init__(self, controls: Controls) -> None:
        self._controls = controls
        self._temporary = tempfile.TemporaryDirectory(prefix="broker-benchmarks-")
        self.folder = Path(self._temporary.name)
        self._running: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, *exc: object) -> None:
        try:
            for process in self._running:
                process.terminate()  # a worker ends whom it has started, too
            for process in self._running:
                try:
                    process.wait(STOP_SECONDS)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
                for pipe in (process.stdin, process.stdout):
                    if pipe is not None:
                        with contextlib.suppress(OSError):
                            pipe.close()
        finally:
            self._temporary.cleanup()

    def environ(self, **extra: str) -> dict[str, str]:
        """Ours, without what would reach a broker; files that it keeps land in the folder."""
        kept = {name: text for name, text in os.environ.items() if not name.startswith(("BROKER_", "MACHINA_"))}
        return {**kept, "HOME": str(self.folder), "XDG_RUNTIME_DIR": str(self.folder), **extra}

    def file(self, name: str, text: str) -> str:
        path = self.folder / name
        path.write_text(text)
        return str(path)

    def start(self, command: list[str], **extra: str) -> Member:
        """Starts a process, and waits for its first line: it is ready."""
        log = self.folder / f"{len(self._running)}.log"
        with open(log, "wb") as stderr:
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                cwd=self.folder,
                env=self.environ(**extra),
                start_new_session=True,
                preexec_fn=_die_with(os.getpid()),
            )
        self._running.append(process)
        member = Member(process, log)
        member.ready = member.hear(START_SECONDS)
        return member

    def broker(self, config: str, name: str = "broker") -> tuple[str, int]:
        """Its socket and its pid."""
        path, member = self._serve(config, name)
        return path, member.process.pid

    def web(self, config: str, name: str = "web") -> tuple[str, int]:
        """A broker with HTTP: its socket and its port."""
        path, member = self._serve(config, name, "--http", "127.0.0.1:0")
        place = next(word for word in member.ready.split() if word.startswith(b"http://"))
        return path, int(place.rpartition(b":")[2])

    def _serve(self, config: str, name: str, *more: str) -> tuple[str, Member]:
        path = str(self.folder / f"{name}.sock")
        serve = ["serve", "--config", self.file(f"{name}.toml", config), "--socket", path, "--log", "error", *more]
        return path, self.start([sys.executable, "-m", "broker", *serve])

    def uvicorn(self) -> int:
        """A bare echo app: its port."""
        return int(self.start([sys.executable, str(SOURCES / "echo.py")]).ready)

    def relay(self, *child: str, name: str = "relay") -> str:
        """Its socket."""
        path = str(self.folder / f"{name}.sock")
        self.start([self._controls["relay"], path, *child])
        return path
