"""One broker for all tests of `broker bench`, and the command as a user has it."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.conftest import Brokers, Served

# A background job's Ctrl-C is ignored, and that is inherited; a user's is not.
COMMAND = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from broker.cli import main
sys.exit(main())
"""

Bench = Callable[..., subprocess.Popen[str]]


def begin(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    """`broker bench …` in an empty folder."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("BROKER_", "MACHINA_"))}
    environment.update(HOME=str(folder), XDG_RUNTIME_DIR=str(folder))
    return subprocess.Popen(
        [sys.executable, "-c", COMMAND, "bench", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder,
        env=environment,
    )


@pytest.fixture(scope="package")
def broker(tmp_path_factory: pytest.TempPathFactory, where: dict[str, str]) -> Iterator[Served]:
    brokers = Brokers(tmp_path_factory.mktemp("bench"))
    yield brokers.start("--plugin", where["demo_plugin"])
    brokers.end()


@pytest.fixture(scope="package")
def web(tmp_path_factory: pytest.TempPathFactory, where: dict[str, str]) -> Iterator[Served]:
    """One that serves HTTP, too."""
    brokers = Brokers(tmp_path_factory.mktemp("bench-web"))
    yield brokers.start("--http", "127.0.0.1:0", "--plugin", where["demo_plugin"])
    brokers.end()


@pytest.fixture(scope="package")
def url(web: Served) -> str:
    return next(word for word in web.ready.split() if word.startswith("http://"))


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return functools.partial(begin, tmp_path)
