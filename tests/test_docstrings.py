"""The examples in docstrings are run as they stand."""

from __future__ import annotations

import doctest
import importlib
import os

import pytest

MODULES = [
    "broker.autopilot.menu",
    "broker.autopilot.runner",
    "broker.autopilot.selection",
    "broker.bench.histogram",
    "broker.client.aio",
    "broker.client.embedded",
    "broker.client.sync",
    "broker.machina_dispatch",
]


@pytest.mark.parametrize("name", MODULES)
def test_examples(name, shared, monkeypatch, tmp_path):
    for variable in [name for name in os.environ if name.startswith(("BROKER_", "MACHINA_"))]:
        monkeypatch.delenv(variable)
    monkeypatch.chdir(tmp_path)
    result = doctest.testmod(importlib.import_module(name), extraglobs={"address": shared.path})
    assert result.attempted
    assert not result.failed
