"""[[oneshot]]: a tool that is a command, behind the same gates as all others."""

from __future__ import annotations

import json
import signal
import time

import psutil
import pytest

from tests.support.command import broker_command

REPLY = {"ok": True, "status": "OK", "output_json": '"NAME"', "error": "", "ds_state": {"slots": {}}}
SAYS = "cat > /dev/null; printf '%s' '" + json.dumps(REPLY).replace("NAME", "'$1'") + "'"
SHOT = "AID.SHOT.v1"


@pytest.fixture
def command(tmp_path):
    """A command that runs this shell script; what it is in broker.toml."""

    def command(body=SAYS, **settings):
        path = tmp_path / "command"
        path.write_text(f"#!/bin/sh\necho x >> {tmp_path}/ran\n{body}\n")
        path.chmod(0o755)
        lines = [f"{key} = {json.dumps(value)}" for key, value in settings.items()]
        return "\n".join([f'[[oneshot]]\nname = "{SHOT}"\ncommand = ["{path}"]', *lines, ""])

    return command


def ran(tmp_path):
    return len((tmp_path / "ran").read_text().splitlines()) if (tmp_path / "ran").exists() else 0


def test_it_is_called_like_any_tool(start, command, tmp_path):
    broker = start(config=command(tags=["x"]))
    with broker.wire() as wire:
        wire.send(*({"aid": SHOT, **more} for more in ({}, {"id": {"a": 1}}, {"idempotency_key": "k"})))
        replies = wire.replies(3)
        assert wire.ask({"aid": SHOT, "idempotency_key": "k"})["idempotent_hit"]
    assert [reply["output_json"] for reply in replies] == [f'"{SHOT}"'] * 3
    assert [reply["id"] for reply in replies if "id" in reply] == [{"a": 1}]
    assert ran(tmp_path) == 3
    tools = broker.ask({"aid": "_tools"})["tools"]
    assert [(tool["aid"], tool["tags"]) for tool in tools] == [(SHOT, ["x"])]


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        ("sleep 60 & sleep 60", "timeout"),
        ("echo oops >&2; exit 3", "crash"),
        ("kill -9 $$", "crash"),
        ("echo junk", "bad_reply"),
        ("true", "bad_reply"),
        ("head -c 3000000 /dev/zero", "reply_too_large"),
    ],
)
def test_faults(start, command, body, kind):
    broker = start(config="[breaker]\nin_a_row = 2\n" + command(body, timeout_seconds=0.5))
    replies = [broker.ask({"aid": SHOT, "id": n}) for n in range(3)]
    assert [reply["type"] for reply in replies] == [kind, kind, "breaker_open"]
    assert "oops" in replies[0]["error"] or "oops" not in body


def test_as_many_run_at_once_as_may_and_the_rest_waits(start, command):
    broker = start(config="[limits]\nqueue_seconds = 1\n" + command("sleep 0.7\n" + SAYS, max=2))
    with broker.wire() as wire:
        wire.send(*({"aid": SHOT, "id": n} for n in range(6)))
        kinds = [reply.get("type", "ok") for reply in wire.replies(6)]
    assert sorted(kinds) == ["ok"] * 4 + ["overloaded"] * 2
    assert broker.status()["queued_bytes"] == 0


def test_gates_are_asked(start, command):
    broker = start(config="[lease]\nenforce = true\n" + command(side_effects=["file_write"]))
    assert broker.ask({"aid": SHOT})["type"] == "lease_required"
    with broker.operator() as operator:
        token = operator.ask({"aid": "_lease.issue", "tool_aid": SHOT})["token_id"]
    assert broker.ask({"aid": SHOT, "_lease_token": token})["ok"]
    assert broker.ask({"aid": SHOT, "_lease_token": token})["reason"] == "lease already consumed"


def test_it_ends_with_the_broker(start, command, tmp_path):
    broker = start(config="[server]\ndrain_seconds = 0.5\n" + command("sleep 60"))
    with broker.wire() as wire:
        wire.send({"aid": SHOT, "id": 1})
        broker.eventually(lambda: ran(tmp_path) == 1)
        family = psutil.Process(broker.process.pid).children(recursive=True)
        assert family
        broker.process.send_signal(signal.SIGTERM)
        assert wire.reply()["type"] in ("crash", "draining")
    assert broker.process.wait(10) == 0
    assert not psutil.wait_procs(family, timeout=2)[1]


def test_a_reload_takes_it_out_and_puts_it_back(start, command, tmp_path):
    with_it = command("sleep 0.5\n" + SAYS)
    broker = start(config=with_it)
    with broker.wire() as wire:
        wire.send({"aid": SHOT})
        time.sleep(0.2)
        (tmp_path / "broker0.toml").write_text("")
        assert broker_command(tmp_path, "reload", "--socket", broker.path).returncode == 0
        assert wire.reply()["ok"], "what runs may end"
        assert wire.ask({"aid": SHOT})["type"] == "not_found"
        (tmp_path / "broker0.toml").write_text(with_it)
        assert broker_command(tmp_path, "reload", "--socket", broker.path).returncode == 0
        assert wire.ask({"aid": SHOT})["ok"]


def test_mistakes_are_named(command, tmp_path):
    file = tmp_path / "b.toml"
    for text, words in (
        ('[[oneshot]]\nname = "a"\ncommand = []\n', "command is a list"),
        ('[[oneshot]]\nname = "_a"\ncommand = ["x"]\n', "no name for a tool"),
        (command() * 2, "two tools are called"),
        ('[[oneshot]]\nname = "a"\ncomand = ["x"]\n', "did you mean `command`?"),
    ):
        file.write_text(text)
        done = broker_command(tmp_path, "serve", "--check", "--config", str(file))
        assert done.returncode == 2
        assert words in done.stderr
    file.write_text(command())
    assert SHOT in broker_command(tmp_path, "serve", "--check", "--config", str(file)).stdout
