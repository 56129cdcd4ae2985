"""One broker for all tests of the clients."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.conftest import Brokers, Served
from tests.support.config import toolhost


@pytest.fixture(scope="package")
def broker(tmp_path_factory: pytest.TempPathFactory, where: dict[str, str]) -> Iterator[Served]:
    brokers = Brokers(tmp_path_factory.mktemp("clients"))
    yield brokers.start(
        "--tcp",
        "127.0.0.1:0",
        config="[breaker]\nin_a_row = 1000\nleast_calls = 1000\n"
        + toolhost("d", where["demo_plugin"], where["fault_plugin"], max=4),
    )
    brokers.end()
