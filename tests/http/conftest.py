"""Brokers with HTTP."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.conftest import Brokers, Served, Start
from tests.support.http import Web

StartWeb = Callable[..., tuple[Served, Web]]


@pytest.fixture
def start_web(start: Start) -> StartWeb:
    """`start_web("--plugin", path, config="…")`: the broker and its HTTP face."""

    def begin(*arguments: str, **more: object) -> tuple[Served, Web]:
        served = start("--http", "127.0.0.1:0", *arguments, **more)
        return served, Web(served.ready)

    return begin


@pytest.fixture(scope="module")
def web(tmp_path_factory: pytest.TempPathFactory, where: dict[str, str]) -> Iterator[Web]:
    """One broker with the demo tools, for tests that only talk to it."""
    brokers = Brokers(tmp_path_factory.mktemp("web"))
    yield Web(brokers.start("--http", "127.0.0.1:0", "--plugin", where["demo_plugin"]).ready)
    brokers.end()
