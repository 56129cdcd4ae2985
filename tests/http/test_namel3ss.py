"""namel3ss' service runner: its client's own request, and every error as a body that it understands."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

VECTORS = json.loads((Path(__file__).parent.parent / "vectors" / "namel3ss_service.json").read_text())
SENT = VECTORS["request_as_sent"]


def ask(web, body, path="/tools", status=200):
    headers = {name: value for name, value in SENT["headers"].items() if name not in ("Content-Length", "Host")}
    answer = web.ask("POST", path, body, headers)
    assert answer.status == status
    assert answer.headers["content-type"] == "application/json"
    return answer.json


def asking(tool, payload=None, **more):
    return {**SENT["body_json"], "tool_name": tool, "payload": payload or {}, **more}


def test_a_tool_is_called_by_its_name(web):
    found = ask(web, asking("AID.DEMO.WORD_COUNT.v1", {"text": "a b a"}))
    assert (found["ok"], found["result"]["total_tokens"], found["protocol_version"]) == (True, 3, 1)


def test_the_clients_request_for_a_tool_that_is_not_there_is_an_error_it_can_show(web):
    found = ask(web, SENT["body"])
    assert found == {"ok": False, "error": {"type": "ToolNotFound", "message": "tool not found: greeter"}}


@pytest.mark.parametrize("body", ["", "{", "[]", '{"payload":{}}', "\ufeff{}", '{"tool_name":7}'])
def test_what_is_no_request_is_an_error_too(web, body):
    found = ask(web, body or b"", status=400)
    assert (found["ok"], found["error"]["type"]) == (False, "ValueError")


def test_a_tools_own_error_keeps_its_words(web):
    found = ask(web, asking("AID.DEMO.FAIL.v1", {"error": "Missing input"}))
    assert found["error"] == {"type": "ToolError", "message": "Missing input"}


def test_the_client_hears_of_a_timeout_before_it_gives_up(web):
    begin = time.monotonic()
    found = ask(web, asking("AID.DEMO.SLEEP.v1", {"ms": 5000}, timeout_ms=1000))
    assert found["error"]["type"] == "TimeoutError"
    assert time.monotonic() - begin < 1.0


def test_the_handshake_promises_nothing_that_is_not_kept(web):
    body = {"protocol_version": 1, "tool_name": "greeter", "runner": "service", "required_guarantees": []}
    assert ask(web, body, "/capabilities/handshake") == {"ok": True, "enforcement": "none", "supported_guarantees": []}
    body["required_guarantees"] = ["no_network"]
    assert ask(web, body, "/capabilities/handshake")["ok"] is False


def test_the_handshake_takes_what_the_client_sends(web):
    """An object: what is false in it is not required."""
    body = {"protocol_version": 1, "tool_name": "greeter", "runner": "service"}
    none = {"no_network": False, "no_subprocess": False}
    found = ask(web, {**body, "required_guarantees": none}, "/capabilities/handshake")
    assert found == {"ok": True, "enforcement": "none", "supported_guarantees": {}}
    some = {"no_network": True, "no_subprocess": False, "secrets_allowed": []}
    found = ask(web, {**body, "required_guarantees": some}, "/capabilities/handshake")
    assert found["ok"] is False
    assert found["error"]["message"] == "the broker does not enforce: no_network, secrets_allowed"


def test_the_path_is_the_operators_to_choose(start_web, where):
    _, web = start_web("--plugin", where["demo_plugin"], env={"BROKER_HTTP_TOOLS_PATH": "/n3/tools"})
    assert ask(web, asking("AID.DEMO.ECHO.v1", {"n": 1}), "/n3/tools")["result"] == {"n": 1}
