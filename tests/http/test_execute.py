"""POST /v1/tools/execute: every answer is a ToolResult; every tool of every runtime is there."""

from __future__ import annotations

import json
import threading
import time

import pytest

from tests.support.command import broker_command
from tests.support.http import answer_on, until_the_end
from tests.support.toolhosts import listing, scripted

MEMBERS = {"artifacts", "exit_code", "metrics", "solver", "status", "stderr", "stdout", "summary"}


def is_tool_result(answer, status, code=None):
    assert answer.status == status, answer.body
    assert set(answer.json) - {"output"} == MEMBERS
    assert answer.json["metrics"]["request_id"] == answer.headers["x-request-id"]
    if code:
        assert answer.json["metrics"]["error_code"] == code
        assert answer.json["exit_code"] == 1
        assert "output" not in answer.json
    return answer.json


def test_a_machina_tools_output_is_the_results_output(web):
    result = is_tool_result(web.execute("AID.DEMO.WORD_COUNT.v1", {"text": "to be or not to be"}), 200)
    assert result["output"]["total_tokens"] == 6
    assert (result["solver"], result["stdout"], result["exit_code"]) == ("AID.DEMO.WORD_COUNT.v1", "", 0)
    assert result["metrics"]["duration_ms"] > 0


def test_an_input_arrives_verbatim(web):
    given = '{ "a" : [1, 2.50, "\\u00e9\\n"],\n  "big": 12345678901234567890 }'
    body = '{"tool":"AID.DEMO.ECHO.v1","input":' + given + "}"
    answer = web.ask("POST", "/v1/tools/execute", body)
    assert given.encode() in answer.body


def test_a_failing_tool_is_a_500_with_its_words(web):
    result = is_tool_result(web.execute("AID.DEMO.FAIL.v1", {"error": "no such luck"}), 500, "tool_error")
    assert result["stderr"] == "no such luck"
    job = web.get(f"/v1/jobs/{result['metrics']['job_id']}").json
    assert (job["status"], job["error"]) == ("failed", {"code": "tool_error", "message": "no such luck"})


@pytest.mark.parametrize(
    ("body", "stderr"),
    [
        ("", "Missing request body."),
        ("{", "Failed to decode request JSON."),
        ("[]", "Failed to decode request JSON."),
        ('{"input":{}}', "Failed to decode request JSON."),
        ('{"tool":7}', "Failed to decode request JSON."),
        ('{"tool":"echo_json","context":{"limits":{"timeout_ms":1}}}', "Failed to decode request JSON."),
        ('{"tool":"echo_json","input":' + "[" * 200 + "]" * 200 + "}", "Failed to decode request JSON."),
        ('{"tool":"  "}', "Missing required field: tool."),
    ],
)
def test_what_is_no_request_is_refused_before_there_is_a_job(web, body, stderr):
    result = is_tool_result(web.ask("POST", "/v1/tools/execute", body or None), 400, "invalid_request")
    assert result["stderr"] == stderr
    assert result["solver"] == "unknown"
    assert "job_id" not in result["metrics"]


def test_a_body_over_the_cap_is_refused_and_the_connection_goes_on(web):
    big = b'{"tool":"echo_json","input":{"message":"' + b"x" * 2_000_000 + b'"}}'
    is_tool_result(web.ask("POST", "/v1/tools/execute", big), 413, "payload_too_large")
    with web.socket() as wire:
        head = b"POST /v1/tools/execute HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n"
        small = b'{"tool":"echo_json","input":{"message":"hi"}}'
        wire.sendall(head % len(big) + big + head % len(small) + small)
        received = b""
        while received.count(b"HTTP/1.1 ") < 2 or not received.endswith(b"}"):
            received += wire.recv(65536)
    assert received.startswith(b"HTTP/1.1 413")
    assert b"HTTP/1.1 200 OK" in received


def test_the_cap_holds_for_a_body_whose_length_nobody_has_said(web):
    with web.socket() as wire:
        wire.sendall(b"POST /v1/tools/execute HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n")
        for _ in range(33):
            wire.sendall(b"10000\r\n" + b"x" * 65536 + b"\r\n")
        assert answer_on(wire).status == 413


def test_chunked_bodies_and_those_that_wait_to_be_asked_for_are_read(web):
    body = b'{"tool":"echo_json","input":{"message":"hi"}}'
    chunked = b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\n\r\n"
    begin = b"POST /v1/tools/execute HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
    assert b'"message":"hi"' in web.raw(begin + b"transfer-encoding: chunked\r\n\r\n" + chunked)
    with web.socket() as wire:
        wire.sendall(begin + b"expect: 100-continue\r\ncontent-length: %d\r\n\r\n" % len(body))
        assert wire.recv(65536).startswith(b"HTTP/1.1 100")
        wire.sendall(body)
        assert b'"message":"hi"' in until_the_end(wire)


def test_requests_may_arrive_byte_by_byte_and_pipelined(web):
    body = b'{"tool":"AID.DEMO.ECHO.v1","input":{"n":%d}}'
    request = b"POST /v1/tools/execute HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n%b"
    with web.socket() as wire:
        for byte in request % (len(body % 7), body % 7):
            wire.sendall(bytes([byte]))
        assert answer_on(wire).json["output"] == {"n": 7}
        wire.sendall(b"".join(request % (len(body % n), body % n) for n in range(8)))
        received = b""
        while received.count(b'"summary"') < 8 or not received.endswith(b"}"):
            received += wire.recv(65536)
    places = [received.index(b'"output":{"n":%d}' % n) for n in range(8)]
    assert places == sorted(places)


def test_heads_that_are_sent_again_are_read_as_before(web):
    """And nothing else is taken for them."""

    def request(given: bytes, extra: bytes = b"") -> bytes:
        body = b'{"tool":"AID.DEMO.ECHO.v1","input":' + given + b"}"
        head = b"POST /v1/tools/execute HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n%b\r\n"
        return head % (len(body), extra) + body

    with web.socket() as wire:
        replies = wire.makefile("rb")

        def answer() -> tuple[bytes, bytes]:
            head = b""
            while not head.endswith(b"\r\n\r\n"):
                head += replies.readline()
            length = int(next(line for line in head.split(b"\r\n") if line.startswith(b"content-length")).split()[1])
            return head, replies.read(length)

        for n in range(10, 20):
            wire.sendall(request(b"%d" % n))
            assert b'"output":%d,' % n in answer()[1]
        wire.sendall(request(b"20", b"x-request-id: mine\r\n"))
        assert b"x-request-id: mine" in answer()[0]
        wire.sendall(request(b"21"))
        assert b"x-request-id: mine" not in answer()[0]
        whole = request(b"22")
        wire.sendall(whole[:-1])  # one byte is missing
        time.sleep(0.05)
        wire.sendall(whole[-1:] + request(b"23")[:60])
        assert b'"output":22,' in answer()[1]
        wire.sendall(request(b"23")[60:])
        assert b'"output":23,' in answer()[1]
        wire.sendall(request(b"24") + request(b"25"))
        assert [answer()[1].partition(b'"output":')[2][:2] for _ in range(2)] == [b"24", b"25"]
        wire.sendall(request(b"26", b"idempotency-key: a\r\n"))
        answer()
        wire.sendall(request(b"27", b"idempotency-key: a\r\n"))
        assert b'"output":26,' in answer()[1]
        wire.sendall(request(b"28", b"authorization: Bearer x\r\n"))
        assert answer()[0].startswith(b"HTTP/1.1 403")
        wire.sendall(request(b"29"))
        assert b'"output":29,' in answer()[1]


def test_a_half_closed_caller_still_gets_its_answer(web):
    body = b'{"tool":"AID.DEMO.SLEEP.v1","input":{"ms":200}}'
    with web.socket() as wire:
        head = b"POST /v1/tools/execute HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n" % len(body)
        wire.sendall(head + body)
        wire.shutdown(1)
        assert until_the_end(wire).startswith(b"HTTP/1.1 200")


def test_a_calls_own_timeout_is_kept(web):
    limits = {"timeout_ms": 100, "max_stdout_bytes": 1, "max_stderr_bytes": 100, "max_artifact_bytes": 1}
    limits |= {"max_artifacts": 1, "max_summary_characters": 280}
    answer = web.execute("AID.DEMO.SLEEP.v1", {"ms": 3000}, context={"limits": limits})
    is_tool_result(answer, 504, "timeout")


def test_keys_by_header_or_field_run_a_call_once(web):
    first = web.execute("AID.DEMO.COUNTER.v1", {}, headers={"Idempotency-Key": "once"}).json["output"]
    assert web.execute("AID.DEMO.COUNTER.v1", {}, headers={"Idempotency-Key": "once"}).json["output"] == first
    assert web.execute("AID.DEMO.COUNTER.v1", {}, idempotency_key="once").json["output"] == first
    assert web.execute("AID.DEMO.COUNTER.v1", {}, idempotency_key="another").json["output"] != first


def test_an_artifact_asked_for_twice_under_one_key_is_the_first_one(web):
    first = web.execute("write_text_artifact", {"text": "one"}, idempotency_key="file").json
    again = web.execute("write_text_artifact", {"text": "two"}, idempotency_key="file").json
    assert again["artifacts"] == first["artifacts"]
    assert web.get(again["artifacts"][0]["path"]).body == b"one"


def test_leases_by_header_or_field_open_a_tool_once(start_web, where):
    served, web = start_web("--plugin", where["demo_plugin"], env={"MACHINA_LEASE_ENFORCE": "1"})
    given = {"path": "a.txt", "text": "x"}
    is_tool_result(web.execute("AID.FILE.WRITE.v1", given), 403, "lease_required")

    def issue() -> str:
        with served.operator() as wire:
            return wire.ask({"aid": "_lease.issue", "tool_aid": "AID.FILE.WRITE.v1"})["token_id"]

    token = issue()
    assert web.execute("AID.FILE.WRITE.v1", given, headers={"Broker-Lease": token}).status == 200
    is_tool_result(web.execute("AID.FILE.WRITE.v1", given, _lease_token=token), 403, "lease_rejected")
    assert web.execute("AID.FILE.WRITE.v1", given, _lease_token=issue()).status == 200


def test_state_belongs_to_a_session_and_else_to_nobody(web):
    put = {"op": "put", "slot": 3, "value": {"mine": True}}
    get = {"op": "get", "slot": 3}
    named = {"Broker-Session": "s1"}
    full = {"slots": {}}
    delta = {"delta": True, "slots": {}}
    assert web.execute("AID.DEMO.STATE.v1", put, ds_state=full, headers=named).status == 200
    found = web.execute("AID.DEMO.STATE.v1", get, ds_state=delta, headers=named)
    assert "mine" in json.dumps(found.json["output"])
    for headers in ({}, {"Broker-Session": "s2"}):
        other = web.execute("AID.DEMO.STATE.v1", get, ds_state=delta, headers=headers)
        assert "mine" not in json.dumps(other.json.get("output"))


def test_what_a_tool_leaves_in_its_state_is_an_artifact(web):
    result = web.execute("AID.DEMO.STATE.v1", {"op": "put", "slot": 9, "value": {"kept": 1}}).json
    (artifact,) = result["artifacts"]
    assert (artifact["name"], artifact["mime_type"]) == ("ds9.json", "application/json")
    assert json.loads(web.get(artifact["path"]).body) == {"kept": 1}


def test_a_schema_is_enforced_with_the_path_to_what_is_wrong(start_web, where):
    config = f"""
    [[toolhost]]
    name = "demo"
    plugins = ["{where["demo_plugin"]}"]

    [[tool]]
    name = "AID.DEMO.ECHO.v1"
    description = "Says it again."
    stability = "deprecated"
    tags = ["Echo", "util"]
    version = "7"
    examples = [{{ title = "One", input = {{ n = 1 }} }}]
    [tool.schema]
    type = "object"
    required = ["items"]
    [tool.schema.properties.items]
    type = "array"
    items = {{ type = "object", properties = {{ n = {{ type = "integer", maximum = 9 }} }} }}
    """
    served, web = start_web(config=config)
    (shown,) = web.get("/v1/tools?stability=Deprecated%20&tags=x,echo").json["tools"]
    assert (shown["description"], shown["version"], shown["tags"]) == ("Says it again.", "7", ["Echo", "util"])
    assert shown["examples"] == [{"title": "One", "input": {"n": 1}}]
    assert shown["input_schema"]["required"] == ["items"]
    assert web.execute("AID.DEMO.ECHO.v1", {"items": [{"n": 9}]}).status == 200
    refused = is_tool_result(web.execute("AID.DEMO.ECHO.v1", {"items": [{"n": 1}, {"n": 10}]}), 400, "invalid_input")
    assert refused["stderr"].startswith("input.items[1].n: ")
    by_line = served.call("AID.DEMO.ECHO.v1", items=7)
    assert (by_line["type"], by_line["status"]) == ("bad_request", "INVALID_PICK")
    assert by_line["error"].startswith("input.items: ")
    assert web.get("/v1/tools?tags=nobody").json == {"tools": []}


def test_a_manifest_beside_the_plugin_describes_its_tools(start_web, tmp_path):
    plugin = listing(tmp_path / "tools.so", A=["none"], B=["none"])
    said = {"AID.A.v1": {"description": "Says A.", "schema": {"required": ["n"]}}, "AID.B.v1": {"tags": ["b"]}}
    (tmp_path / "tools.tools.json").write_text(json.dumps({"tools": said}))
    host = scripted(tmp_path, 'say(output_json="{}")')
    overlay = '[[tool]]\nname = "AID.A.v1"\ndescription = "Says A, twice."\n[[tool]]\nname = "AID.C.v1"\n'
    served, web = start_web("--toolhost", host, "--plugin", plugin, config=overlay)
    a, b = (tool for tool in web.get("/v1/tools").json["tools"] if tool["name"].startswith("AID."))
    assert (a["description"], a["input_schema"]) == ("Says A, twice.", {"required": ["n"]})
    assert b["tags"] == ["b"]
    assert '"n" is a required property' in web.execute("AID.A.v1", {}).json["stderr"]
    assert web.execute("AID.B.v1", {}).status == 200
    log = served.log.read_text()
    assert "[[tool]] is about a tool that is not there" in log
    assert "AID.C.v1" in log


def test_an_unusual_name_is_remarked_on_and_works(start_web, tmp_path):
    script = tmp_path / "tool.sh"
    script.write_text('#!/bin/sh\necho \'{"status":"OK","output_json":"1"}\'\n')
    script.chmod(0o755)
    names = ("CamelCase", "io_report", "circuits.simulate")
    config = "".join(f'[[oneshot]]\nname = "{name}"\ncommand = ["{script}"]\n' for name in names)
    served, web = start_web(config=config)
    assert [web.execute(name, {}).json["output"] for name in names] == [1, 1, 1]
    remarks = [line for line in served.log.read_text().splitlines() if "unusual name" in line]
    assert [json.loads(line)["aid"] for line in remarks] == ["CamelCase"]


@pytest.mark.parametrize(
    ("schema", "said"),
    [('{ type = "objekt" }', "is no JSON Schema"), ('{ "$ref" = "http://127.0.0.1:1/x" }', "is not looked up")],
)
def test_a_schema_that_is_none_stops_the_start(tmp_path, where, schema, said):
    config = tmp_path / "b.toml"
    config.write_text(f'[[tool]]\nname = "AID.DEMO.ECHO.v1"\nschema = {schema}\n')
    flags = ("--config", str(config), "--plugin", where["demo_plugin"], "--socket", str(tmp_path / "b.sock"))
    result = broker_command(tmp_path, "serve", *flags)
    assert result.returncode == 2
    assert said in result.stderr
    assert "AID.DEMO.ECHO.v1" in result.stderr


def test_echo_json_is_lenient_where_integrations_depend_on_it(web):
    for n, count in ((0, 1), (65, 64), (-5, 1), (3, 3)):
        result = is_tool_result(web.execute("echo_json", {"message": " x ", "n": n, "more": True}), 200)
        assert result["output"] == {"message": "x", "repeat": ["x"] * count}
    assert "duration_ms" not in result["metrics"]
    for given, text in (
        (None, "echo_json requires an input object."),
        ([], "echo_json input must be an object."),
        ({"message": " "}, "message must be a non-empty string."),
    ):
        assert is_tool_result(web.execute("echo_json", given), 400, "invalid_input")["stderr"] == text
    for given, path in (({}, "message"), ({"message": 7}, "message"), ({"message": "x", "n": "2"}, "n")):
        assert is_tool_result(web.execute("echo_json", given), 400, "invalid_input")["stderr"].startswith(
            f"input.{path}"
        )


def test_the_shipped_tools_answer_on_the_socket_too(start_web, where):
    served, web = start_web("--plugin", where["demo_plugin"])
    reply = served.call("echo_json", message="hi")
    assert json.loads(reply["output_json"])["repeat"] == ["hi"]
    written = json.loads(served.call("write_text_artifact", text="hello")["output_json"])
    assert web.get(written["artifacts"][0]["path"]).status == 404  # it is another principal's
    refused = served.call("write_text_artifact", text=7)
    assert (refused["ok"], refused["status"]) == (False, "INVALID_PICK")


def test_tools_are_sorted_and_each_has_a_schema(web):
    tools = web.get("/v1/tools").json["tools"]
    names = [tool["name"] for tool in tools]
    assert names == sorted(names)
    assert {"echo_json", "write_text_artifact", "AID.DEMO.ECHO.v1"} <= set(names)
    assert all(tool["input_schema"] and tool["description"] for tool in tools)
    assert [tool["name"] for tool in tools if tool["stability"] == "stable"] == ["echo_json", "write_text_artifact"]


def test_too_many_at_once_are_told_to_come_again(start_web, where):
    _, web = start_web("--plugin", where["demo_plugin"], env={"BROKER_HTTP_MAX_CALLS": "2"})
    threads = [threading.Thread(target=web.execute, args=("AID.DEMO.SLEEP.v1", {"ms": 1500})) for _ in range(2)]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + 5
    while (answer := web.execute("echo_json", {"message": "x"})).status == 200 and time.monotonic() < deadline:
        time.sleep(0.02)
    result = is_tool_result(answer, 429, "too_many_requests")
    assert (result["solver"], result["stderr"]) == ("unknown", "too_many_requests")
    assert answer.headers["retry-after"] == "1"
    assert web.ask("POST", "/v1/jobs", {"tool_name": "echo_json"}).json["error"]["code"] == "too_many_requests"
    for thread in threads:
        thread.join()
    assert web.execute("echo_json", {"message": "x"}).status == 200


def test_an_open_breaker_says_when_to_come_again(start_web, where):
    _, web = start_web("--plugin", where["demo_plugin"], "--plugin", where["fault_plugin"])
    for _ in range(5):
        is_tool_result(web.execute("AID.FAULT.SEGV.v1", {}), 500, "crash")
    answer = web.execute("AID.FAULT.SEGV.v1", {})
    is_tool_result(answer, 503, "breaker_open")
    assert int(answer.headers["retry-after"]) >= 1
    assert web.execute("AID.DEMO.ECHO.v1", {}).status == 200


def test_a_trace_goes_on_under_a_span_of_our_own(web):
    trace = "00-" + "ab" * 16 + "-" + "cd" * 8 + "-01"
    answer = web.execute("AID.DEMO.ECHO.v1", {}, headers={"traceparent": trace})
    found = answer.headers["traceparent"]
    assert found[:36] == trace[:36]
    assert found[36:52] != trace[36:52]
    assert "traceparent" not in web.execute("AID.DEMO.ECHO.v1", {}, headers={"traceparent": "nonsense"}).headers
