"""What an operator sees of targets, and says about who may call."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import Served
from tests.support.command import broker_command
from tests.support.commonground import Project, SQLite
from tests.support.nats import NatsServer
from tests.support.waiting import eventually
from tests.utp.conftest import Stage

RIGHTS = """
[[principal]]
name = "utp:proj_narrow"
tools = ["word_count"]
"""


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Stage, Served]]:
    folder = tmp_path_factory.mktemp("watched")
    with NatsServer(folder / "nats") as nats:
        stage = Stage(folder, nats, SQLite(folder / "utp.sqlite3"))
        broker = stage.serving(stage.start("", "--http", "127.0.0.1:0", config=RIGHTS))
        stage.project.ask("tc", {"value": 1})
        stage.project.say(b"junk")
        eventually(lambda: bool(stage.project.reports("tc")) and bool(stage.status()["given_up"]))
        yield stage, broker
        stage.end()


def got(broker: Served, path: str) -> str:
    with urllib.request.urlopen(broker.status()["http"] + path, timeout=10) as answer:
        return str(answer.read().decode())


def test_the_command_line_shows_targets_counts_and_what_was_given_up(
    watched: tuple[Stage, Served], tmp_path: Path
) -> None:
    text = broker_command(tmp_path, "status", "--socket", watched[1].path).stdout
    assert "utp: sqlite" in text
    (row,) = [line.split() for line in text.splitlines() if line.startswith("  oracle ")]
    assert row[:4] == ["oracle", "oracle", "serving", "0"]
    assert "success 1" in text
    assert "given up: " in text
    assert "nobody can be told of it: it is not JSON" in text


def test_metrics_count_commands(watched: tuple[Stage, Served]) -> None:
    text = got(watched[1], "/metrics")
    assert 'broker_utp_commands_total{outcome="success",target="oracle"} 1.0' in text
    assert 'broker_utp_commands_total{outcome="buried",target="oracle"} 1.0' in text
    assert 'broker_utp_up{target="word_count"} 1.0' in text


def test_everybody_s_status_has_no_names_of_agents(watched: tuple[Stage, Served]) -> None:
    assert "given_up" not in json.loads(got(watched[1], "/status"))["utp"]


def test_a_project_s_rights_are_those_of_a_principal(watched: tuple[Stage, Served]) -> None:
    stage, _ = watched
    assert isinstance(stage.tables, SQLite)
    narrow = Project(stage.tables, stage.project.client, "proj_narrow")
    narrow.ask("refused", {"value": 1})
    eventually(lambda: bool(narrow.reports("refused")))
    assert narrow.results("refused")[0]["content"]["error"]["code"] == "auth_failed"
    narrow.ask("allowed", {"mode": "map", "text": "a b", "top_k": 1}, "word_count")
    eventually(lambda: bool(narrow.reports("allowed")))
    assert narrow.results("allowed")[0]["content"]["status"] == "success"


def test_check_names_targets_and_hides_passwords(tmp_path: Path) -> None:
    file = tmp_path / "broker.toml"
    file.write_text("""
        nats.url = "nats://me:pa55word@n"
        utp.store = "postgres"
        utp.dsn = "postgresql://me:pa55word@db/cg?password=pa55word"
        utp.targets.count = "AID.DEMO.WORD_COUNT.v1"
        utp.targets.nowhere = { tool = "no_such_tool" }
        """)
    done = broker_command(tmp_path, "serve", "--check", "--config", str(file))
    assert "[utp.targets] count = AID.DEMO.WORD_COUNT.v1\n" in done.stdout
    assert "[utp.targets] nowhere = no_such_tool  (there is no such tool here)" in done.stdout
    assert "dsn = 'postgresql://db/cg'" in done.stdout
    assert "pa55word" not in done.stdout + done.stderr


@pytest.mark.parametrize("file", ["/proc/nowhere/utp.sqlite3", "not-a-database"])
def test_a_file_that_cannot_be_the_store_stops_the_start(tmp_path: Path, file: str) -> None:
    (tmp_path / "not-a-database").write_text("words, " * 1000)
    with NatsServer(tmp_path / "nats") as nats:
        stage = Stage(tmp_path / "stage", nats, SQLite(tmp_path / file))
        text = stage.refused("--nats", nats.url)
    assert f"{file} cannot be used: " in text
    assert "(utp.dsn)" in text
