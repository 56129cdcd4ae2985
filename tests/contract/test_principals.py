"""CONTRACT §7: who a caller is, what it may do, and how long it is believed."""

from __future__ import annotations

import grp
import os
import stat
import time
from pathlib import Path

import pytest

from tests.conftest import Wire
from tests.support.command import broker_command
from tests.support.config import toolhost

ECHO = "AID.DEMO.ECHO.v1"
COUNTER = "AID.DEMO.COUNTER.v1"
WRITE = "AID.FILE.WRITE.v1"
US = f"uid:{os.getuid()}"


def address(broker):
    return "127.0.0.1", int(broker.ready.split("tcp:127.0.0.1:")[1].split()[0])


def auth(token):
    return {"aid": "_auth", "token": token}


@pytest.fixture
def token(tmp_path):
    return broker_command(tmp_path, "token", "new", "ci").stdout.strip()


@pytest.fixture
def tcp(start, where, token):  # noqa: ARG001
    return start(
        "--tcp",
        "127.0.0.1:0",
        config='[[principal]]\nname = "token:ci"\ntools = ["AID.DEMO.E*", "AID.FILE.*"]\ntiers = [0]\noperator = true\n'
        + toolhost("d", where["demo_plugin"]),
    )


def test_tokens_are_shown_once_and_kept_hashed(token, tmp_path):
    assert token.startswith("tbk_")
    assert token not in next(Path(tmp_path).rglob("tokens.json")).read_text()
    assert "ci" in broker_command(tmp_path, "token", "list").stdout
    again = broker_command(tmp_path, "token", "new", "ci")
    assert again.returncode == 1
    assert "broker token revoke ci" in again.stderr


def test_a_tcp_caller_is_nobody_until_it_shows_a_token(tcp):
    with Wire(address(tcp)) as wire:
        assert wire.ask({"aid": ECHO})["type"] == "forbidden"
        assert wire.ask({"aid": "_tools"})["type"] == "forbidden"
        assert wire.ask(auth("tbk_wrong"))["type"] == "forbidden"
        assert wire.ended()


def test_a_token_names_its_caller_and_rights_hold(tcp, token):
    with Wire(address(tcp)) as wire:
        assert wire.ask(auth(token))["principal"] == "token:ci"
        assert wire.ask({"aid": ECHO})["ok"]
        assert wire.ask({"aid": COUNTER})["type"] == "forbidden"
        assert wire.ask({"aid": WRITE})["type"] == "forbidden"
        assert [tool["aid"] for tool in wire.ask({"aid": "_tools"})["tools"]] == [ECHO]
        assert wire.ask({"aid": "_lease.gc"})["ok"], "the configuration makes it an operator"
    assert tcp.call(COUNTER)["ok"], "the owner of the socket may call everything"


def test_calls_may_follow_the_token_without_waiting_for_its_answer(tcp, token):
    with Wire(address(tcp)) as wire:
        wire.send(auth(token), *({"aid": ECHO, "id": n} for n in range(50)))
        assert wire.reply()["principal"] == "token:ci"
        assert all(reply["ok"] for reply in wire.replies(50))


def test_a_revoked_token_is_not_believed_any_longer_and_opens_nothing(tcp, token, tmp_path):
    with Wire(address(tcp)) as wire:
        wire.ask(auth(token))
        assert broker_command(tmp_path, "token", "revoke", "ci").returncode == 0
        last = wire.reply()
        assert (last["type"], last["error"]) == ("forbidden", "the token of token:ci has been revoked")
        assert wire.ended()
    with Wire(address(tcp)) as wire:
        assert wire.ask({"aid": ECHO})["type"] == "forbidden", "no token is left, and still nobody comes in without"


def test_a_tokens_file_that_cannot_be_read_changes_nothing(tcp, token, tmp_path):
    next(Path(tmp_path).rglob("tokens.json")).write_text("{")
    with Wire(address(tcp)) as wire:
        assert wire.ask(auth(token))["ok"]
        assert wire.ask({"aid": ECHO})["ok"]


def test_operators_words_are_refused_on_the_callers_socket_whatever_the_rights(start, where):
    broker = start(config=f'[[principal]]\nname = "{US}"\noperator = true\n' + toolhost("d", where["demo_plugin"]))
    refused = broker.ask({"aid": "_lease.issue", "tool_aid": WRITE})
    assert refused["type"] == "forbidden"
    assert refused["error"].endswith(".operator")


def test_names_may_be_patterns_and_a_reload_changes_rights_of_those_who_are_here(start, where, tmp_path):
    broker = start(
        config='[[principal]]\nname = "uid:*"\ntools = ["AID.DEMO.ECHO.*"]\n' + toolhost("d", where["demo_plugin"])
    )
    with broker.wire() as wire, broker.operator() as operator:
        wire.send(*({"aid": aid, "id": n} for n, aid in enumerate([ECHO, ECHO, COUNTER, ECHO])))
        replies = {reply["id"]: reply for reply in wire.replies(4)}
        assert [replies[n]["ok"] for n in range(4)] == [True, True, False, True]
        assert replies[2]["type"] == "forbidden"
        file = tmp_path / "broker0.toml"
        file.write_text(file.read_text().replace("ECHO", "COUNTER"))
        assert operator.ask({"aid": "_reload"})["ok"]
        assert wire.ask({"aid": ECHO})["type"] == "forbidden"
        assert wire.ask({"aid": COUNTER})["ok"]


def test_a_group_may_call_but_not_operate(start, where, tmp_path):
    group = grp.getgrgid(os.getgid()).gr_name
    broker = start(config=f'[server]\nsocket_group = "{group}"\n' + toolhost("d", where["demo_plugin"]))
    callers, operators = os.stat(broker.path), os.stat(broker.path + ".operator")
    assert stat.S_IMODE(callers.st_mode) == 0o660
    assert callers.st_gid == os.getgid()
    assert stat.S_IMODE(operators.st_mode) == 0o600
    assert stat.S_IMODE(os.stat(tmp_path / "b0.sock.lock").st_mode) == 0o600


def test_a_group_that_does_not_exist_is_named(tmp_path):
    file = tmp_path / "group.toml"
    file.write_text('[server]\nsocket_group = "nobody-is-in-this"\n')
    done = broker_command(tmp_path, "serve", "--socket", str(tmp_path / "s"), "--config", str(file))
    assert done.returncode == 2
    assert "server.socket_group = 'nobody-is-in-this': there is no such group" in done.stderr


# --- slow writers ---


def test_a_line_that_does_not_end_is_not_waited_for_for_ever(start, where):
    broker = start(config="[limits]\nline_seconds = 1\n" + toolhost("d", where["demo_plugin"]))
    with broker.wire() as slow, broker.wire() as idle, broker.wire() as busy:
        slow.send(b'{"aid":')
        for _ in range(30):  # whole lines and pauses are nobody's fault
            assert busy.ask({"aid": ECHO})["ok"]
            time.sleep(0.1)
        refused = slow.reply()
        assert refused["type"] == "bad_request"
        assert "limits.line_seconds" in refused["error"]
        assert slow.ended()
        assert idle.ask({"aid": ECHO})["ok"]


def test_a_tcp_caller_that_never_shows_a_token_loses_its_place(start, where, token):  # noqa: ARG001
    broker = start("--tcp", "127.0.0.1:0", config="[limits]\nline_seconds = 1\n" + toolhost("d", where["demo_plugin"]))
    with Wire(address(broker)) as wire:
        assert "no token was shown" in wire.reply()["error"]
        assert wire.ended()


def test_long_lines_on_their_way_are_bounded_in_all(start, where):
    broker = start(config="[limits]\nqueue_bytes = 8000000\n" + toolhost("d", where["demo_plugin"]))
    wires = [broker.wire() for _ in range(4)]
    for wire in wires:
        wire.send(b'{"aid":"AID.DEMO.COUNTER.v1","input_json":"' + b"x" * 2_500_000)
    refused = [wire for wire in wires if not wire.quiet(0.5)]
    assert len(refused) == 1
    reply = refused[0].reply()
    assert (reply["type"], reply["retry_after"]) == ("overloaded", 1)
    assert "limits.queue_bytes" in reply["error"]
    for wire in wires:
        wire.send(b'"}\n', {"aid": ECHO, "id": 1})
    for wire in wires:
        assert all(wire.reply()["ok"] for _ in range(1 if wire in refused else 2)), "the connection goes on"
        wire.socket.close()
