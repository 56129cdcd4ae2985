"""The controls: small C programs that show what the machine can do at best. Compiled when they are needed."""

from __future__ import annotations

import importlib.metadata
import subprocess
from pathlib import Path

import msgspec
from msgspec import Struct

SOURCES = Path(__file__).resolve().parents[1] / "controls"
NAMES = ("fixed", "http", "lines", "pipeline", "relay", "roundtrip")
OPTIONS = ("-O2", "-Wall", "-Wextra")
READ_ONLY = (
    "-DYYJSON_DISABLE_WRITER=1",
    "-DYYJSON_DISABLE_INCR_READER=1",
    "-DYYJSON_DISABLE_UTILS=1",
)  # compiles faster
ECHO = "AID.DEMO.ECHO.v1"
MESSAGE = "hello"


class Failed(Exception):
    """What was to be measured did not work; the words say why."""


class Load(Struct):
    """What pipeline.c and http.c say of a run."""

    calls: int
    per_second: float
    p50_us: float
    p99_us: float
    wrong: int
    failed: int


def build(name: str, folder: Path) -> str:
    """The program's path."""
    built = folder / name
    command = ["cc", *OPTIONS, "-o", str(built), str(SOURCES / f"{name}.c")]
    if name == "lines":
        yyjson = _yyjson()
        library = folder / "yyjson.o"
        _cc("cc", "-O2", "-w", *READ_ONLY, "-c", "-o", str(library), str(yyjson / "yyjson.c"))
        command += [*READ_ONLY, "-isystem", str(yyjson), str(library)]
    said = _cc(*command)
    if said:
        raise Failed(f"{name}.c does not compile without warnings: {said.splitlines()[0]}")
    return str(built)


def _yyjson() -> Path:
    """The source that cmake/yyjson.cmake builds our toolhost with."""
    try:
        found = Path(str(importlib.metadata.distribution("yyjson").locate_file("yyjson")))
    except importlib.metadata.PackageNotFoundError:
        raise Failed("yyjson's source is missing: pip install yyjson") from None
    return found


def _cc(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise Failed("there is no C compiler (cc)") from None
    if done.returncode:
        raise Failed(f"{Path(command[-1]).name} does not compile: {(done.stderr.splitlines() or ['?'])[0]}")
    return done.stderr


class Controls:
    """All of them, each built once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._built: dict[str, str] = {}

    def __getitem__(self, name: str) -> str:
        if name not in self._built:
            self._built[name] = build(name, self._folder)
        return self._built[name]

    def roundtrip(self, calls: int, line: str, *command: str, prefix: tuple[str, ...] = ()) -> float:
        """The median in microseconds, nothing between a C program and the toolhost."""
        return float(_said([*prefix, self["roundtrip"], str(calls), line, *command]).split()[0])

    def load(
        self,
        target: str,
        calls: int | str,
        depth: int,
        connections: int = 1,
        how: str = "plain",
        *,
        payload: int = 0,
        aid: str = ECHO,
        command: tuple[str, ...] = (),
    ) -> Load:
        """Calls over a socket (or, with "-", a command's pipes); every reply is checked, and none may be wrong."""
        shape = map(str, (calls, depth, connections, how, payload))
        return _load([self["pipeline"], target, aid, *shape, *command])

    def http(self, port: int, calls: int | str, connections: int, tool: str = ECHO) -> Load:
        """POSTs as AutoSage's clients make them; whoever answers has to bring the message back."""
        echoed = f'"message":"{MESSAGE}"'
        shape = map(str, (calls, connections))
        return _load(
            [self["http"], str(port), "/v1/tools/execute", *shape, f'{{"tool":"{tool}","input":{{{echoed}}}}}', echoed]
        )


def _load(command: list[str]) -> Load:
    load = msgspec.json.decode(_said(command), type=Load)
    if load.wrong or load.failed or not load.calls:
        raise Failed(f"{load.failed} calls failed and {load.wrong} replies were wrong, of {load.calls}")
    return load


def _said(command: list[str]) -> str:
    """Its own session: Ctrl-C is ours, and ends it by way of us."""
    done = subprocess.run(command, capture_output=True, text=True, check=False, start_new_session=True)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise Failed(f"{Path(command[0]).name}: {last}")
    return done.stdout
