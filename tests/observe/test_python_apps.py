"""Python apps in the status, the metrics and the health: their processes, and what has become of them."""

from __future__ import annotations

import threading

import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.support.command import broker_command
from tests.support.http import Web
from tests.support.python_app import python_app, python_config


@pytest.fixture
def start_web(start):
    def run(config):
        broker = start("--http", "127.0.0.1:0", config=config)
        return broker, Web(broker.ready)

    return run


def app_of(broker):
    (found,) = (pool for pool in broker.status()["pools"] if pool["kind"] == "python")
    return found


def states(broker):
    return sorted(one["state"] for one in app_of(broker)["processes"])


def sample(web, name, **labels):
    families = text_string_to_metric_families(web.get("/metrics").body.decode())
    samples = [one for family in families for one in family.samples if one.name == name and one.labels == labels]
    assert len(samples) == 1, name
    return samples[0].value


def test_an_operator_sees_fork_servers_waiting_children_and_running_calls(start_web, tmp_path):
    root = python_app(tmp_path / "app")
    broker, web = start_web(config=python_config(root, "sleeps", "exits", "greet", max=3))
    broker.eventually(lambda: states(broker) == ["fork server", "waiting", "waiting"])
    report = app_of(broker)
    assert (report["name"], report["state"], report["max"]) == (str(root), "ready", 3)
    assert all(psutil.pid_exists(one["pid"]) and one["rss_mb"] > 1 for one in report["processes"])
    threads = [threading.Thread(target=broker.call, args=("sleeps",), kwargs={"seconds": 1.5}) for _ in range(4)]
    for thread in threads:
        thread.start()
    broker.eventually(lambda: states(broker).count("running") == 3 and app_of(broker)["waiting"] == 1)
    assert sample(web, "broker_pool_processes", pool=str(root), state="running") == 3
    assert sample(web, "broker_pool_waiting_calls", pool=str(root)) == 1
    shown = broker_command(tmp_path, "status", "--socket", broker.path).stdout
    assert f"app {root}: ready, up to 3 calls at once" in shown
    assert shown.count("running") == 3
    for thread in threads:
        thread.join()
    assert broker.call("exits")["type"] == "crash"
    server = next(one["pid"] for one in app_of(broker)["processes"] if one["state"] == "fork server")
    psutil.Process(server).kill()
    psutil.wait_procs([psutil.Process(server)] if psutil.pid_exists(server) else [], 5)
    assert broker.call("greet", name="Ada")["ok"]
    report = app_of(broker)
    counts = report["counts"]
    assert (counts["started"], counts["died"], counts["crash"], counts["timeout"]) == (2, 1, 1, 0)
    assert counts["forked"] >= 6
    assert "last words" in report["reason"]
    assert "last words" not in web.get("/status").body.decode(), "whoever may call is told no tool's words"
    assert sample(web, "broker_pool_deaths_total", pool=str(root)) == 1
    assert sample(web, "broker_pool_forks_total", pool=str(root)) >= counts["forked"]
    assert sample(web, "broker_pool_up", pool=str(root)) == 1


def test_a_broker_whose_only_app_does_not_start_is_not_ready(start_web, tmp_path):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho no such luck >&2\nexit 7\n")
    python.chmod(0o755)
    root = python_app(tmp_path / "app")
    broker, web = start_web(config=python_config(root, "greet", python=str(python)))
    assert broker.call("greet", name="Ada")["type"] == "unavailable"
    assert app_of(broker)["state"] == "broken"
    answer = web.get("/readyz")
    assert answer.status == 503
    assert str(root) in answer.body.decode()
    assert sample(web, "broker_pool_up", pool=str(root)) == 0
