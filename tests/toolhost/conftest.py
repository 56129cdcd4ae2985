"""Where the built toolhost is, and toolhosts that end with their test."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from broker import where as places

from .talk import Host, compile_plugin, environment, serving

INCLUDE = Path(__file__).resolve().parents[2] / "toolhost" / "include"


@pytest.fixture(scope="session")
def where() -> dict[str, Path]:
    """What is installed; or, with TOOLHOST_BUILD, what was built below that directory (a sanitized build, say)."""
    build = os.environ.get("TOOLHOST_BUILD")

    def find(name: str, installed: str) -> Path:
        if not build:
            return Path(installed)
        found = sorted(path for path in Path(build).resolve().rglob(name) if path.is_file())
        assert found, f"no {name} below {build}"
        return found[0]

    return {
        "toolhost": find("machina_toolhost", places.toolhost()),
        "fault_toolhost": find("fault_toolhost", places.fault_toolhost()),
        "demo_plugin": find("demo_plugin.so", places.demo_plugin()),
        "fault_plugin": find("fault_plugin.so", places.fault_plugin()),
        "include": INCLUDE,
    }


@pytest.fixture
def limits_hold(where: dict[str, Path]) -> None:
    """For tests of memory: AddressSanitizer takes what it likes, and aborts where others throw bad_alloc."""
    if b"libasan" in subprocess.run(["ldd", where["toolhost"]], capture_output=True).stdout:
        pytest.skip("a sanitized build")


@pytest.fixture
def serve(where: dict[str, Path]) -> Iterator[Callable[..., Host]]:
    """serve("demo_plugin", env…) is a serving toolhost; also takes the path of a plugin."""
    with contextlib.ExitStack() as stack:

        def start(plugin: str | Path = "demo_plugin", **env: str) -> Host:
            path = where[plugin] if isinstance(plugin, str) else plugin
            return stack.enter_context(serving([str(where["toolhost"]), "--serve", str(path)], env))

        yield start


@pytest.fixture
def faults(where: dict[str, Path]) -> Iterator[Host]:
    """A serving fault_toolhost."""
    with serving([str(where["fault_toolhost"]), "--serve"]) as host:
        yield host


@pytest.fixture
def run(where: dict[str, Path]) -> Callable[..., subprocess.CompletedProcess[bytes]]:
    """run("--list", plugin, stdin=…, env…) is machina_toolhost, once."""

    def start(*arguments: str | Path, stdin: bytes = b"", **env: str) -> subprocess.CompletedProcess[bytes]:
        command = [str(where["toolhost"]), *map(str, arguments)]
        return subprocess.run(command, input=stdin, capture_output=True, timeout=60, env=environment(env))

    return start


@pytest.fixture(scope="session")
def build(where: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """build(source) is a plugin, compiled; `include=None` without our headers."""
    directory = tmp_path_factory.mktemp("plugins")
    built: dict[object, Path] = {}

    def start(source: str, *flags: str, include: bool = True) -> Path:
        key = (source, flags, include)
        if key not in built:
            built[key] = compile_plugin(
                source, directory / f"plugin{len(built)}.so", where["include"] if include else None, *flags
            )
        return built[key]

    return start
