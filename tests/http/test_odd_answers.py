"""What tools may say, leave behind and be made to say, and what their callers then see."""

from __future__ import annotations

import json
import sys
import threading
import time

import pytest

REPLIES = {
    "surrogate_name": {"output_json": "{}"},
    "linked_folder": {"output_json": "{}"},
    "output_number": {"output_json": 7},
    "error_number": {"ok": False, "status": "TOOL_ERROR", "error": 7},
    "error_null": {"ok": False, "status": "TOOL_ERROR", "error": None},
    "code_own": {"ok": False, "status": "TOOL_ERROR", "error": "no", "code": "ERR_CUSTOM"},
}
TOOL = """
import json, os, sys
name = sys.argv[-1]
folder = os.environ.get("BROKER_JOB_DIR", "")
if folder and name == "surrogate_name":
    for file in (b"\\xff.txt", b"good.txt"):
        open(folder.encode() + b"/" + file, "wb").close()
if folder and name == "linked_folder":
    os.rmdir(folder)
    os.symlink("/etc", folder)
print(json.dumps({"ok": True, "status": "OK", **json.load(open(sys.argv[1]))[name]}))
"""


@pytest.fixture
def odd(start_web, tmp_path):
    (tmp_path / "tool.py").write_text(TOOL)
    (tmp_path / "replies.json").write_text(json.dumps(REPLIES))
    command = json.dumps([sys.executable, str(tmp_path / "tool.py"), str(tmp_path / "replies.json")])
    config = "".join(f'[[oneshot]]\nname = "{name}"\ncommand = {command}\n' for name in REPLIES)
    return start_web(config=config)[1]


def test_files_with_names_that_no_answer_can_hold_are_passed_over(odd):
    answer = odd.execute("surrogate_name", {})
    assert (answer.status, [one["name"] for one in answer.json["artifacts"]]) == (200, ["good.txt"])


def test_a_folder_that_has_become_a_link_is_empty(odd):
    answer = odd.execute("linked_folder", {})
    assert (answer.status, answer.json["artifacts"]) == (200, [])
    files = odd.get(f"/v1/jobs/{answer.json['metrics']['job_id']}/artifacts").json["files"]
    assert {one["name"] for one in files} == {"request.json", "result.json", "summary.json"}


@pytest.mark.parametrize("tool", ["output_number", "error_number"])
def test_a_reply_with_members_of_the_wrong_type_is_the_tools_mistake(odd, tool):
    answer = odd.execute(tool, {})
    assert (answer.status, answer.json["metrics"]["error_code"]) == (500, "bad_reply")
    job = odd.get(f"/v1/jobs/{answer.json['metrics']['job_id']}").json
    assert (job["status"], job["error"]["code"]) == ("failed", "bad_reply")
    found = odd.ask("POST", "/tools", {"tool_name": tool, "payload": {}})
    assert (found.status, found.json["ok"]) == (200, False)


def test_an_error_may_be_null(odd):
    assert odd.execute("error_null", {}).json["metrics"]["error_code"] == "tool_error"


def test_a_retry_under_a_key_hears_of_the_same_error(start_web, where, odd):
    for _ in range(2):
        assert odd.execute("code_own", {}, idempotency_key="k").json["metrics"]["error_code"] == "ERR_CUSTOM"
    _, web = start_web("--plugin", where["demo_plugin"], "--plugin", where["fault_plugin"])
    for _ in range(3):
        answer = web.execute("AID.FAULT.SEGV.v1", {}, idempotency_key="crash")
        assert (answer.status, answer.json["metrics"]["error_code"]) == (500, "crash")
    limits = {"timeout_ms": 100, "max_stdout_bytes": 1, "max_stderr_bytes": 100, "max_artifact_bytes": 1}
    limits |= {"max_artifacts": 1, "max_summary_characters": 280}
    for _ in range(2):
        sleep = web.execute("AID.DEMO.SLEEP.v1", {"ms": 2000}, idempotency_key="slow", context={"limits": limits})
        assert (sleep.status, sleep.json["metrics"]["error_code"]) == (504, "timeout")
    asked = {"tool_name": "AID.FAULT.SEGV.v1", "payload": {}, "idempotency_key": "n3"}
    kinds = [web.ask("POST", "/tools", asked).json["error"]["type"] for _ in range(2)]
    assert kinds == ["crash", "crash"]


def test_limits_beyond_all_bounds_are_none(web):
    names = ("timeout_ms", "max_stdout_bytes", "max_stderr_bytes", "max_artifact_bytes", "max_artifacts")
    limits = dict.fromkeys((*names, "max_summary_characters"), 10**400)
    assert web.execute("AID.DEMO.ECHO.v1", {"n": 1}, context={"limits": limits}).json["output"] == {"n": 1}


@pytest.mark.parametrize("character", ["\U0001f1e6", "e\u0301", "\u200d"])
def test_no_summary_takes_long_to_cut(web, character):
    """Flags are pairs: each one used to be counted from the first."""
    said = json.dumps({"status": "ok", "summary": character * (800_000 // len(character.encode()))}, ensure_ascii=False)
    begin = time.monotonic()
    answer = web.ask("POST", "/v1/tools/execute", f'{{"tool":"AID.DEMO.ECHO.v1","input":{said}}}')
    assert time.monotonic() - begin < 2
    assert answer.json["summary"].endswith("...") or character == "\u200d"


def test_an_echo_is_no_larger_than_any_tools_output(web):
    assert web.execute("echo_json", {"message": "x" * 4000, "n": 64}).status == 200
    for message, n in (("x" * 100_000, 64), ("x" * 1_900_000, 1)):
        answer = web.execute("echo_json", {"message": message, "n": n})
        assert (answer.status, answer.json["metrics"]["error_code"]) == (500, "reply_too_large")
        assert "limits.reply_bytes" in answer.json["stderr"]
    assert web.execute("echo_json", {"message": "x"}).status == 200


def test_what_waits_is_asked_again_when_its_callers_rights_are_narrowed(start_web, where, tmp_path):
    def config(tools: str) -> str:
        return f"""
        [[toolhost]]
        name = "d"
        plugins = ["{where["demo_plugin"]}"]
        min = 1
        max = 1
        [[principal]]
        name = "http:anonymous"
        tools = [{tools}]
        """

    served, web = start_web(config=config('"*"'))
    found = []
    running = threading.Thread(target=web.execute, args=("AID.DEMO.SLEEP.v1", {"ms": 1500}))
    running.start()
    time.sleep(0.3)
    waiting = threading.Thread(target=lambda: found.append(web.execute("AID.DEMO.COUNTER.v1", {})))
    waiting.start()
    job = web.ask("POST", "/v1/jobs", {"tool_name": "AID.DEMO.COUNTER.v1"}).json["job_id"]
    served.eventually(lambda: served.status()["waiting"] == 2)
    (file,) = tmp_path.glob("broker*.toml")
    file.write_text(config('"AID.DEMO.SLEEP.v1", "AID.DEMO.ECHO.v1"'))
    with served.operator() as wire:
        assert wire.ask({"aid": "_reload"})["ok"]
    waiting.join()
    running.join()
    assert (found[0].status, found[0].json["metrics"]["error_code"]) == (403, "forbidden")
    assert web.get(f"/v1/jobs/{job}").json["error"]["code"] == "forbidden"
