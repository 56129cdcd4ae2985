"""[[python]]: functions of an app as tools, each call in an untouched process, whatever they do."""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from broker import Client
from tests.conftest import Brokers
from tests.support.command import broker_command
from tests.support.python_app import TOOLS, python_app, python_config

VECTORS = json.loads((Path(__file__).parent.parent / "vectors" / "namel3ss_local.json").read_text())
FUNCTIONS = [line[4 : line.index("(")] for line in TOOLS.splitlines() if line.startswith("def ")]


@pytest.fixture(scope="module")
def app(tmp_path_factory):
    return python_app(tmp_path_factory.mktemp("app"))


@pytest.fixture(scope="module")
def served(tmp_path_factory, app):
    """One broker with all tools, for tests that only call them."""
    brokers = Brokers(tmp_path_factory.mktemp("python"))
    config = "[limits]\nreply_bytes = 11000000\nrequest_bytes = 11000000\n[breaker]\nin_a_row = 1000\nshare = 1\n"
    more = '[[python.tools]]\nname = "no_module"\nentry = "tools.nope:run"\n'
    yield brokers.start(config=config + python_config(app, *FUNCTIONS, "nope", "CONST") + more)
    brokers.end()


def forkservers(broker):
    """Those that are alive."""
    found = []
    for one in psutil.Process(broker.process.pid).children():
        with contextlib.suppress(psutil.Error):
            found += [one] if any("forkserver" in word for word in one.cmdline()) else []
    return found


def python_tool(root, text, tmp_path):
    return subprocess.run(
        [sys.executable, "-m", "broker", "python-tool"],
        input=text,
        capture_output=True,
        text=True,
        check=False,
        cwd=root,
        env={"HOME": str(tmp_path), "PATH": "/usr/bin:/bin"},
    )


# --- the local protocol ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("vector", VECTORS, ids=lambda vector: vector["id"])
def test_what_namel3ss_records_is_what_python_tool_writes(app, tmp_path, vector):
    done = python_tool(app, vector["stdin"], tmp_path)
    assert (done.stdout, done.returncode) == (vector["expect"]["stdout_text"], vector["expect"]["exit_code"])


@pytest.mark.parametrize(
    ("request_text", "code", "written"),
    [
        ("{", 1, "JSONDecodeError"),
        ("{}", 1, '"message": "Missing entry"'),
        ('{"entry": 7}', 1, '"message": "Missing entry"'),
        ('{"entry": "tools.vec"}', 1, '"message": "Invalid entry"'),
        ('{"entry": "tools.vec:a_set", "payload": {}}', 1, "Object of type <class 'set'> is not JSON serializable"),
        ('{"entry": "tools.vec:echo:more", "payload": {}}', 0, "has no attribute 'echo:more'"),
        ('{"entry": "tools.vec:echo", "payload": "é", "protocol_version": 7}', 0, '"\\u00e9", "protocol_version": 7}'),
        ('{"entry": "tools.vec:decimals", "payload": {}}', 0, '[3, "1.5"]'),
        ('{"entry": "tools.vec:nan", "payload": {}}', 0, "[NaN]"),
        ('{"entry": "tools.vec:raw", "payload": {}}', 0, '{"ok": true, "result": "fine", "protocol_version": 1}'),
        ('{"entry": "tools.vec:prints", "payload": {}}', 0, '{"ok": true, "result": "fine", "protocol_version": 1}'),
        ('{"entry": "tools.vec:recurses", "payload": {}}', 0, '"type": "RecursionError"'),
        ('{"entry": "tools.vec:nested", "payload": {}}', 1, '"type": "RecursionError"'),
    ],
)
def test_python_tool_ends_as_namel3ss_runner_does(app, tmp_path, request_text, code, written):
    done = python_tool(app, request_text, tmp_path)
    assert written in done.stdout
    assert done.returncode == code
    json.loads(done.stdout)


@pytest.mark.parametrize(
    ("request_text", "code"),
    [
        ("[]", 1),
        ('{"entry": "tools.vec:leaves"}', 3),
        ('{"entry": "tools.vec:exits"}', 4),
        ('{"entry": "tools.vec:interrupts"}', -2),
        ('{"entry": "tools.vec:dies"}', -9),
    ],
)
def test_python_tool_says_nothing_where_namel3ss_runner_says_nothing(app, tmp_path, request_text, code):
    done = python_tool(app, request_text, tmp_path)
    assert (done.stdout, done.returncode) == ("", code)


def test_python_tool_uses_the_apps_own_virtual_environment(tmp_path):
    root = python_app(tmp_path / "app", "import sys\ndef run(payload):\n    return sys.prefix\n")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", root / ".venv"], check=True)
    done = python_tool(root, '{"entry": "tools.vec:run"}', tmp_path)
    assert json.loads(done.stdout)["result"] == str(root / ".venv")


@pytest.mark.parametrize("vector", VECTORS, ids=lambda vector: vector["id"])
def test_the_same_comes_out_of_the_daemon(served, vector):
    asked, expected = json.loads(vector["stdin"]), vector["expect"]["stdout_json"]
    name = {"tools.nope:run": "no_module"}.get(asked["entry"], asked["entry"].partition(":")[2])
    reply = served.call(name, **asked["payload"])
    assert reply["ok"] is expected["ok"]
    if reply["ok"]:
        assert json.loads(reply["output_json"]) == expected["result"]
    else:
        error = {"type": reply["code"], "message": reply["error"]}
        assert (reply["status"], error) == ("TOOL_ERROR", expected["error"])


# --- whatever a tool does --------------------------------------------------------------------------------------------


def test_what_is_printed_stays_off_the_protocol(served):
    assert [served.call(name)["output_json"] for name in ("raw", "prints")] == ['"fine"'] * 2


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("leaves", "exited with code 3"),
        ("exits", "exited with code 4; it said: last words"),
        ("interrupts", "exited with code 1; it said"),
        ("dies", "killed by SIGKILL"),
        ("lets_go", "exited with code 1; it said"),
        ("segfaults", "killed by SIGSEGV"),
    ],
)
def test_a_process_that_ends_without_an_answer_is_a_crash(served, name, words):
    reply = served.call(name)
    assert reply["type"] == "crash"
    assert words in reply["error"]
    assert served.call("greet", name="Ada")["ok"]


@pytest.mark.parametrize(
    ("name", "code", "words"),
    [
        ("a_set", "TypeError", "Object of type <class 'set'> is not JSON serializable"),
        ("recurses", "RecursionError", "maximum recursion depth"),
        ("nested", "RecursionError", "recursion"),
    ],
)
def test_a_result_that_cannot_be_said_is_the_tools_error(served, name, code, words):
    reply = served.call(name)
    assert (reply["ok"], reply["status"], reply["code"]) == (False, "TOOL_ERROR", code)
    assert words in reply["error"]


def test_nan_is_written_as_python_writes_it(served):
    assert served.call("nan")["output_json"] == "[NaN]"
    with Client(served.path) as client:
        assert math.isnan(client.call("nan").output[0])


def test_decimals_become_what_namel3ss_makes_of_them(served):
    assert json.loads(served.call("decimals")["output_json"]) == [3, "1.5"]


def test_input_that_is_not_json_is_the_callers_mistake(served):
    reply = served.ask({"aid": "echo", "input_json": "{"})
    assert (reply["ok"], reply["code"]) == (False, "ValueError")
    assert "cannot be read as JSON" in reply["error"]


def test_ten_megabytes_go_in_and_out(served):
    text = "y" * 10_000_000
    assert json.loads(served.call("echo", text=text)["output_json"]) == {"text": text}
    assert served.call("big", bytes=11_500_000)["type"] == "reply_too_large"


def test_threads_of_a_call_end_before_it_is_answered(served, tmp_path):
    assert served.call("later", file=str(tmp_path / "file"))["ok"]
    assert (tmp_path / "file").read_text() == "written"


def test_a_loop_is_ended_in_time_with_all_that_it_started(start, app, tmp_path):
    broker = start(config=python_config(app, "loops", "greet", timeout_seconds=1))
    begun = time.monotonic()
    reply = broker.call("loops", file=str(tmp_path / "pid"))
    assert reply["type"] == "timeout"
    assert time.monotonic() - begun < 3
    pid = int((tmp_path / "pid").read_text())
    broker.eventually(lambda: not psutil.pid_exists(pid))
    assert broker.call("greet", name="Ada")["ok"]


def test_a_tools_own_timeout_comes_first(start, app):
    broker = start(config=python_config(app, "sleeps") + "timeout_seconds = 0.3\n")
    assert "within 0.3 s" in broker.call("sleeps", seconds=5)["error"]


def test_calls_run_side_by_side(served):
    with ThreadPoolExecutor(6) as threads:
        begun = time.monotonic()
        replies = list(threads.map(lambda _: served.call("sleeps", seconds=0.5), range(6)))
    assert all(reply["ok"] for reply in replies)
    assert time.monotonic() - begun < 2.5


def test_replies_carry_their_callers_ids(served):
    with served.wire() as wire:
        wire.send(*({"id": n, "aid": "echo", "input_json": str(n)} for n in range(20)))
        replies = wire.replies(20)
    assert {reply["id"]: json.loads(reply["output_json"]) for reply in replies} == {n: n for n in range(20)}


# --- fresh -----------------------------------------------------------------------------------------------------------


def test_nothing_leaks_from_call_to_call(served):
    replies = [json.loads(served.call("counted")["output_json"]) for _ in range(5)]
    assert [reply["count"] for reply in replies] == [1] * 5
    assert len({reply["pid"] for reply in replies}) == 5


def test_an_edit_is_seen_by_the_next_call(start, tmp_path):
    source = "def run(payload):\n    return {}\n"
    root = python_app(tmp_path / "app", source.format(0))
    broker = start(config=python_config(root, "run"))
    for number in range(8):
        (root / "tools" / "vec.py").write_text(source.format(number))
        assert broker.call("run")["output_json"] == str(number)


def test_an_edit_is_seen_of_a_source_that_has_been_compiled_ahead(start, tmp_path):
    source = "import sys\nfrom tools.other import VALUE\ndef run(payload):\n    return VALUE\n"
    root = python_app(tmp_path / "app", source)
    python_app(root, "VALUE = 1\n", "other")
    broker = start(config=python_config(root, "run"))
    time.sleep(2.1)  # from then on it is no fresh edit
    for _ in range(3):
        assert broker.call("run")["output_json"] == "1"
        time.sleep(0.05)
    python_app(root, "VALUE = 2\n", "other")
    assert broker.call("run")["output_json"] == "2"
    (root / "tools" / "other.py").unlink()
    assert broker.call("run")["code"] == "ModuleNotFoundError"
    (root / "tools" / "new.py").write_text("VALUE = 3\n")
    (root / "tools" / "new.py").rename(root / "tools" / "other.py")
    assert broker.call("run")["output_json"] == "3"


def test_two_apps_may_have_packages_of_the_same_name(start, tmp_path):
    config = ""
    for name in ("one", "two"):
        root = python_app(tmp_path / name, f"def run(payload):\n    return '{name}'\n")
        config += python_config(root, "run", prefix=name)
    broker = start(config=config)
    assert [broker.call(f"{name}run")["output_json"] for name in ("one", "two", "one")] == ['"one"', '"two"', '"one"']


def test_what_is_imported_from_elsewhere_is_kept_warm_and_the_apps_own_is_not(start, tmp_path):
    body = """
        import sys
        BEFORE = {name for name in ("decimal", "tools.other") if name in sys.modules}
        import decimal
        import tools.other
        def run(payload):
            return sorted(BEFORE)
        """
    root = python_app(tmp_path / "app", "\n".join(line[8:] for line in body.splitlines()))
    python_app(root, "", "other")
    broker = start(config=python_config(root, "run"))
    assert broker.call("run")["output_json"] == "[]"
    broker.eventually(lambda: broker.call("run")["output_json"] == '["decimal"]')


def test_a_module_of_the_apps_comes_before_a_warm_one_of_the_same_name(start, tmp_path):
    root = python_app(
        tmp_path / "app", "import colorsys\ndef run(payload):\n    return getattr(colorsys, 'OWN', None)\n"
    )
    broker = start(config=python_config(root, "run"))
    assert broker.call("run")["output_json"] == "null"
    time.sleep(0.3)
    (root / "colorsys.py").write_text("OWN = 1\n")
    assert broker.call("run")["output_json"] == "1"


def own_environment(root):
    """The app's own .venv; where its packages lie."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", root / ".venv"], check=True)
    return next((root / ".venv" / "lib").glob("python*/site-packages"))


def test_a_package_that_is_replaced_is_seen_by_the_next_call_and_costs_no_call_that_runs(start, tmp_path):
    source = "import sys, time\nwarm = 'pack' in sys.modules\nimport pack\n"
    source += "def run(payload):\n    time.sleep(payload['seconds'])\n    return [pack.VERSION, warm]\n"
    root = python_app(tmp_path / "app", source)
    packages = own_environment(root)
    (packages / "pack.py").write_text("VERSION = 1\n")
    broker = start(config=python_config(root, "run"))
    broker.eventually(lambda: broker.call("run", seconds=0)["output_json"] == "[1, true]")
    with broker.wire() as wire:
        wire.send({"aid": "run", "inputs": {"seconds": 1}})
        time.sleep(0.3)
        (packages / "pack.py").write_text("VERSION = 22\n")
        (packages / "pack-2.dist-info").mkdir()
        assert json.loads(broker.call("run", seconds=0)["output_json"])[0] == 22
        assert wire.reply()["output_json"] == "[1, true]"
    broker.eventually(lambda: len(forkservers(broker)) == 1)


def test_a_package_that_starts_a_thread_is_not_kept_warm(start, tmp_path):
    source = "import sys\nwarm = [name for name in ('good', 'bad') if name in sys.modules]\nimport bad, good\n"
    root = python_app(tmp_path / "app", source + "def run(payload):\n    return [warm, bad.thread.is_alive()]\n")
    packages = own_environment(root)
    (packages / "good.py").touch()
    body = "import threading, time\nthread = threading.Thread(target=time.sleep, args=(1000,), daemon=True)\n"
    (packages / "bad.py").write_text(body + "thread.start()\n")
    broker = start(config=python_config(root, "run"))
    broker.eventually(lambda: json.loads(broker.call("run")["output_json"]) == [["good"], True])


def test_a_process_may_be_used_again_where_the_app_wants_that(start, app):
    broker = start(config=python_config(app, "counted", "fail", "exits", reuse=True))
    replies = [json.loads(broker.call("counted")["output_json"]) for _ in range(3)]
    assert [reply["count"] for reply in replies] == [1, 2, 3]
    assert broker.call("fail")["code"] == "ValueError"
    assert json.loads(broker.call("counted")["output_json"])["count"] == 4
    assert broker.call("exits")["type"] == "crash"
    assert json.loads(broker.call("counted")["output_json"])["count"] == 1


# --- processes -------------------------------------------------------------------------------------------------------


def test_a_killed_fork_server_costs_the_calls_under_way_and_no_others(start, app):
    broker = start(config=python_config(app, "sleeps", "greet"))
    answers = []
    thread = threading.Thread(target=lambda: answers.append(broker.call("sleeps", seconds=30)))
    thread.start()
    time.sleep(0.5)
    (server,) = forkservers(broker)
    server.send_signal(signal.SIGKILL)
    thread.join(10)
    assert answers[0]["type"] == "crash"
    assert broker.call("greet", name="Ada")["ok"]
    assert forkservers(broker)[0].pid != server.pid


def test_an_interpreter_that_does_not_start_is_said_to_be_unavailable(start, app, tmp_path):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho no such luck >&2\nexit 7\n")
    python.chmod(0o755)
    broker = start(config=python_config(app, "greet", python=str(python)))
    reply = broker.call("greet", name="Ada")
    assert reply["type"] == "unavailable"
    assert "no such luck" in reply["error"]


def test_what_runs_may_end_when_the_broker_stops(start, app):
    broker = start(config=python_config(app, "sleeps"))
    with broker.wire() as wire:
        wire.send({"aid": "sleeps", "inputs": {"seconds": 1}})
        time.sleep(0.3)
        broker.process.send_signal(signal.SIGTERM)
        assert json.loads(wire.reply()["output_json"]) == "slept"
    assert broker.process.wait(10) == 0


def test_nothing_is_left_behind(start, app, tmp_path):
    broker = start(config="[server]\ndrain_seconds = 0.3\n" + python_config(app, "loops"))
    with broker.wire() as wire:
        wire.send({"aid": "loops", "inputs": {"file": str(tmp_path / "pid")}})
        broker.eventually(lambda: (tmp_path / "pid").exists())
        family = psutil.Process(broker.process.pid).children(recursive=True)
        assert len(family) >= 3
        broker.process.send_signal(signal.SIGTERM)
        assert wire.reply()["type"] in ("crash", "draining")
    assert broker.process.wait(10) == 0
    assert not psutil.wait_procs(family, timeout=2)[1]


def test_a_killed_broker_leaves_nothing_behind_either(start, app):
    broker = start(config=python_config(app, "sleeps"))
    with broker.wire() as wire:
        wire.send({"aid": "sleeps", "inputs": {"seconds": 60}})
        time.sleep(0.5)
        family = psutil.Process(broker.process.pid).children(recursive=True)
        broker.process.kill()
        assert not psutil.wait_procs(family, timeout=5)[1]


def test_a_reload_keeps_what_has_not_changed_warm(start, app, tmp_path):
    config = python_config(app, "greet")
    broker = start(config=config)
    assert broker.call("greet", name="Ada")["ok"]
    (server,) = forkservers(broker)
    file = tmp_path / "broker0.toml"
    file.write_text(config + f'[[oneshot]]\nname = "x"\ncommand = ["{os.devnull}"]\n')
    assert broker_command(tmp_path, "reload", "--socket", broker.path).returncode == 0
    assert [one.pid for one in forkservers(broker)] == [server.pid]
    file.write_text(python_config(app, "fail"))
    assert broker_command(tmp_path, "reload", "--socket", broker.path).returncode == 0
    assert broker.call("greet", name="Ada")["type"] == "not_found"
    assert broker.call("fail")["code"] == "ValueError"
    broker.eventually(lambda: len(forkservers(broker)) == 1)


def test_a_schema_is_asked_before_the_tool(start, app):
    schema = 'schema = { type = "object", required = ["name"] }\n'
    broker = start(config=python_config(app, "greet") + schema)
    assert broker.call("greet")["type"] == "bad_request"
    assert broker.call("greet", name="Ada")["ok"]


def test_a_paused_tool_waits(start, app, tmp_path):
    broker = start(config=python_config(app, "greet"))
    assert broker_command(tmp_path, "pause", "greet", "--socket", broker.path).returncode == 0
    with broker.wire() as wire:
        wire.send({"aid": "greet", "inputs": {"name": "Ada"}})
        assert wire.quiet(0.3)
        assert broker_command(tmp_path, "resume", "greet", "--socket", broker.path).returncode == 0
        assert wire.reply()["ok"]


def test_it_is_faster_than_starting_python_for_each_call(served):
    def best(function):
        return min(timed(function) for _ in range(7))

    def timed(function):
        begun = time.monotonic()
        function()
        time_taken = time.monotonic() - begun
        time.sleep(0.02)
        return time_taken

    with served.wire() as wire:
        ours = best(lambda: wire.ask({"aid": "greet", "inputs": {"name": "Ada"}}))
    started = best(lambda: subprocess.run([sys.executable, "-c", "pass"], check=True))
    assert ours * 3 < started, f"{ours * 1000:.1f} ms, Python alone {started * 1000:.1f} ms"


def test_mistakes_are_named(app, tmp_path):
    file = tmp_path / "b.toml"
    for text, words in (
        ('[[python]]\napp_root = "/nowhere/at/all"\n', "no such folder"),
        (python_config(app, "greet") * 2, "two [[python]] have the app root"),
        (python_config(app, "greet", "greet"), "two tools are called greet"),
        (python_config(app, "greet") + '[[oneshot]]\nname = "greet"\ncommand = ["x"]\n', "two tools are called greet"),
        (python_config(app, python="/nowhere/python"), "is no interpreter"),
        (python_config(app) + '[[python.tools]]\nname = "x"\nentry = "tools.vec"\n', "write module:function"),
        (python_config(app, "greet") + "timeout = 3\n", "timeout_seconds"),
    ):
        file.write_text(text)
        done = broker_command(tmp_path, "serve", "--check", "--config", str(file))
        assert done.returncode == 2, done.stdout
        assert words in done.stderr
    file.write_text(python_config(app, "greet"))
    shown = broker_command(tmp_path, "serve", "--check", "--config", str(file)).stdout
    assert "greet = tools.vec:greet, 10 s" in shown
