"""A caller in C that keeps many calls under way and checks every reply."""

from __future__ import annotations

import json
import subprocess

import psutil
import pytest

from benchmarks.harness.controls import build


@pytest.fixture(scope="session")
def pipeline(tmp_path_factory):
    return build("pipeline", tmp_path_factory.mktemp("c"))


def run(pipeline, served, calls, depth, connections, *more):
    command = [pipeline, served.path, "AID.DEMO.ECHO.v1", *map(str, (calls, depth, connections)), *more]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert (result["calls"], result["wrong"], result["failed"]) == (calls, 0, 0), done.stderr
    return result


@pytest.mark.parametrize("mode", ["plain", "ids", "keys"])
@pytest.mark.parametrize("connections", [1, 8])
def test_every_reply_is_its_own_at_any_depth(demo, pipeline, connections, mode):
    for depth, calls in ((1, 2_000), (16, 20_000), (64, 50_000), (256, 50_000)):
        run(pipeline, demo, calls, depth, connections, mode)


def test_long_lines_keep_their_place_among_short_ones(demo, pipeline):
    run(pipeline, demo, 400, 16, 4, "plain", "100000")
    run(pipeline, demo, 2000, 32, 4, "ids", "5000")


def test_memory_does_not_grow_with_the_number_of_calls(demo, pipeline):
    broker = psutil.Process(demo.process.pid)
    run(pipeline, demo, 10_000, 64, 4)
    before = broker.memory_info().rss
    run(pipeline, demo, 400_000, 64, 4)
    assert broker.memory_info().rss <= before * 1.1
