"""Real brokers for tests: started as users start them, and checked at the end for what they leave behind."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from broker import where as places

Start = Callable[..., "Served"]


class Wire:
    """A caller's connection, line by line."""

    def __init__(self, address: str | tuple[str, int], timeout: float = 20.0) -> None:
        family = socket.AF_UNIX if isinstance(address, str) else socket.AF_INET
        self.socket = socket.socket(family, socket.SOCK_STREAM)
        self.socket.settimeout(timeout)
        self.socket.connect(address)
        self._buffer = b""

    def __enter__(self) -> Wire:
        return self

    def __exit__(self, *exc: object) -> None:
        self.socket.close()

    def send(self, *requests: Any) -> None:
        """Objects are encoded; bytes go as they are, line end and all."""
        self.socket.sendall(
            b"".join(one if isinstance(one, bytes) else json.dumps(one).encode() + b"\n" for one in requests)
        )

    def raw(self) -> bytes:
        """The next reply line, without its end; empty when the connection has ended."""
        while b"\n" not in self._buffer:
            data = self.socket.recv(1 << 20)
            if not data:
                rest, self._buffer = self._buffer, b""
                return rest
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line

    def reply(self) -> dict[str, Any]:
        line = self.raw()
        assert line, "the broker closed the connection"
        return json.loads(line)

    def replies(self, count: int) -> list[dict[str, Any]]:
        return [self.reply() for _ in range(count)]

    def ask(self, request: Any) -> dict[str, Any]:
        self.send(request)
        return self.reply()

    def quiet(self, seconds: float = 0.1) -> bool:
        """Nothing more arrives."""
        return not self._buffer and not select.select([self.socket], [], [], seconds)[0]

    def ended(self) -> bool:
        return self.raw() == b""


class Served:
    """A running `broker serve`."""

    def __init__(self, process: subprocess.Popen[bytes], path: str, log: Path, ready: str) -> None:
        self.process = process
        self.path = path
        self.log = log
        self.ready = ready

    def wire(self, timeout: float = 20.0) -> Wire:
        return Wire(self.path, timeout)

    def operator(self) -> Wire:
        return Wire(self.path + ".operator")

    def ask(self, request: Any) -> dict[str, Any]:
        with self.wire() as wire:
            return wire.ask(request)

    def call(self, aid: str, **inputs: Any) -> dict[str, Any]:
        return self.ask({"aid": aid, "input_json": json.dumps(inputs)})

    def status(self) -> dict[str, Any]:
        with self.operator() as wire:
            return wire.ask({"aid": "_status"})

    def toolhosts(self) -> list[int]:
        return [p["pid"] for pool in self.status()["pools"] for p in pool["processes"]]

    def counts(self) -> dict[str, int]:
        """Summed over the pools."""
        totals: dict[str, int] = {}
        for pool in self.status()["pools"]:
            for key, value in pool["counts"].items():
                totals[key] = totals.get(key, 0) + value
        return totals

    def eventually(self, check: Callable[[], bool], seconds: float = 10.0) -> None:
        deadline = time.monotonic() + seconds
        while not check():
            assert time.monotonic() < deadline, "did not happen in time"
            time.sleep(0.02)

    def stop(self) -> int:
        """SIGTERM, as an operator would; then nothing may be left."""
        family = psutil.Process(self.process.pid).children(recursive=True) if self.process.poll() is None else []
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(timeout=30)
        _, alive = psutil.wait_procs(family, timeout=2)
        assert not alive, f"left behind: {alive}"
        return code


@pytest.fixture(scope="session")
def where() -> dict[str, str]:
    return {
        "toolhost": places.toolhost(),
        "fault_toolhost": places.fault_toolhost(),
        "demo_plugin": places.demo_plugin(),
        "fault_plugin": places.fault_plugin(),
        "include": places.include(),
    }


class Brokers:
    """Starts brokers in a folder, and ends them all."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._running: list[Served] = []

    def start(self, *arguments: str, config: str | None = None, env: dict[str, str] | None = None) -> Served:
        number = len(self._running)
        path = str(self._folder / f"b{number}.sock")
        log = self._folder / f"log{number}"
        command = [sys.executable, "-m", "broker", "serve", "--socket", path, *arguments]
        if config is not None:
            file = self._folder / f"broker{number}.toml"
            file.write_text(config)
            command += ["--config", str(file)]
        environment = {k: v for k, v in os.environ.items() if not k.startswith(("BROKER_", "MACHINA_"))}
        environment.update(env or {}, HOME=str(self._folder), XDG_RUNTIME_DIR=str(self._folder))
        with open(log, "wb") as stderr:
            process = subprocess.Popen(
                command,
                stdout=subprocess.PIPE,
                stderr=stderr,
                env=environment,
                cwd=self._folder,
                start_new_session=True,
            )
        assert process.stdout is not None
        ready = process.stdout.readline().decode()
        served = Served(process, path, log, ready)
        self._running.append(served)
        assert ready.startswith("broker ready"), f"{ready!r}\n{log.read_text()}"
        return served

    def end(self) -> None:
        """All of them, whatever is wrong with one."""
        wrong = []
        for served in self._running:
            try:
                code = served.stop()
                text = served.log.read_text()
                if code not in (0, -signal.SIGKILL) or "Traceback" in text or "internal error" in text:
                    wrong.append(f"exit code {code}\n{text}")
            except (AssertionError, subprocess.TimeoutExpired) as error:
                wrong.append(str(error))
            finally:
                with contextlib.suppress(OSError):
                    os.killpg(served.process.pid, signal.SIGKILL)
        assert not wrong, "\n".join(wrong)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts brokers: `start("--plugin", path, config="…", env={…})`."""
    brokers = Brokers(tmp_path)
    yield brokers.start
    brokers.end()


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory, where: dict[str, str]) -> Iterator[Served]:
    """One broker with the demo tools, for tests that only talk to it."""
    brokers = Brokers(tmp_path_factory.mktemp("shared"))
    yield brokers.start("--plugin", where["demo_plugin"])
    brokers.end()


@pytest.fixture
def demo(start: Start, where: dict[str, str]) -> Served:
    return start("--plugin", where["demo_plugin"])


@pytest.fixture
def faulty(start: Start, where: dict[str, str]) -> Served:
    """Demo and fault plugins, and the toolhost that breaks the protocol itself."""
    return start(
        config=f"""
        [[toolhost]]
        name = "plugins"
        plugins = ["{where["demo_plugin"]}", "{where["fault_plugin"]}"]
        max = 4

        [[toolhost]]
        name = "wire"
        binary = "{where["fault_toolhost"]}"
        max = 4
        """
    )
