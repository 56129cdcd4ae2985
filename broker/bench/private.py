"""Processes that only this run needs, in a folder of its own: they end with it, even if it is killed."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from types import TracebackType

from broker import where
from broker.errors import ConfigError

START_SECONDS = 20.0
STOP_SECONDS = 5.0
# PR_SET_PDEATHSIG: SIGTERM when the parent ends; if it has ended before that was asked for, nothing is begun.
LAUNCH = """
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, 15, 0, 0, 0)
parent, module, sys.argv[0] = int(sys.argv[1]), sys.argv[2], sys.argv[3]
del sys.argv[1:4]
if os.getppid() == parent:
    from importlib import import_module
    sys.exit(import_module(module).main(sys.argv[1:]))
"""


class Private:
    """A temporary folder, and who lives in it."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="toolhost-broker-bench-")
        self._running: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Private:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            for process in self._running:
                process.send_signal(signal.SIGTERM)
            for process in self._running:
                try:
                    process.wait(STOP_SECONDS)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
        finally:
            self._folder.cleanup()

    @property
    def config(self) -> str:
        """A configuration that says nothing, so that the user's is not read."""
        path = Path(self._folder.name, "broker.toml")
        path.touch()
        return str(path)

    @staticmethod
    def environ() -> dict[str, str]:
        return {name: text for name, text in os.environ.items() if not name.startswith(("BROKER_", "MACHINA_"))}

    def broker(self, *, http: bool = False) -> tuple[str, str]:
        """A broker with the demo tools; its socket, and its URL if it is to have one."""
        path = os.path.join(self._folder.name, "broker.sock")
        serve = ["serve", "--socket", path, "--plugin", where.demo_plugin(), "--log", "error"]
        more = ["--http", "127.0.0.1:0"] if http else []
        ready = self._start("broker.cli", *serve, "--config", self.config, *more)
        return path, next((word for word in ready.split() if word.startswith("http://")), "")

    def mirror(self, size: int) -> str:
        """A peer whose replies have so many bytes; its socket."""
        path = os.path.join(self._folder.name, "mirror.sock")
        self._start("broker.bench.mirror", path, str(size))
        return path

    def http_mirror(self, size: int, lines: int) -> int:
        """The same over HTTP, where requests have so many lines; its port."""
        return int(self._start("broker.bench.mirror", "-", str(size), str(lines)).split()[-1])

    def _start(self, module: str, *arguments: str) -> str:
        """What it says when it is ready."""
        log = Path(self._folder.name, f"{len(self._running)}.log")
        with open(log, "wb") as stderr:
            process = subprocess.Popen(
                [sys.executable, "-c", LAUNCH, str(os.getpid()), module, os.path.abspath(sys.argv[0]), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=stderr,
                cwd=self._folder.name,
                env={**self.environ(), "BROKER_HTTP_JOBS": os.path.join(self._folder.name, "jobs")},
                start_new_session=True,  # Ctrl-C is ours; it gets SIGTERM from us
            )
        self._running.append(process)
        assert process.stdout is not None
        if select.select([process.stdout], [], [], START_SECONDS)[0] and (ready := process.stdout.readline()):
            return ready.decode()
        said = log.read_text(errors="replace").strip().splitlines()
        raise ConfigError(f"a private {module} could not be started: {said[-1] if said else 'it says nothing'}")
