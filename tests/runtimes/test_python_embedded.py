"""[[python]] in the caller's own process: the same answers, each call as fresh, and nothing left behind."""

from __future__ import annotations

import json
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

from broker import Embedded
from broker.client.failures import CallFailed
from tests.support.python_app import TOOLS, python_app, python_config

VECTORS = json.loads((Path(__file__).parent.parent / "vectors" / "namel3ss_local.json").read_text())
FUNCTIONS = [line[4 : line.index("(")] for line in TOOLS.splitlines() if line.startswith("def ")]


@pytest.fixture(scope="module")
def app(tmp_path_factory):
    return python_app(tmp_path_factory.mktemp("app"))


def make(folder, text, **environ):
    file = folder / "broker.toml"
    file.write_text(text)
    return Embedded(file=str(file), environ={**os.environ, **environ})


@pytest.fixture(scope="module")
def tools(tmp_path_factory, app):
    """With all tools, for tests that only call them."""
    more = '[[python.tools]]\nname = "no_module"\nentry = "tools.nope:run"\n[breaker]\nin_a_row = 1000\nshare = 1\n'
    with make(tmp_path_factory.mktemp("embedded"), python_config(app, *FUNCTIONS, "nope", "CONST") + more) as made:
        yield made


def failure(tools, name, inputs=None, **more):
    with pytest.raises(CallFailed) as failed:
        tools.call(name, inputs or {}, **more)
    return failed.value


def family():
    return psutil.Process().children(recursive=True)


@pytest.mark.parametrize("vector", VECTORS, ids=lambda vector: vector["id"])
def test_what_namel3ss_records_comes_out(tools, vector):
    asked, expected = json.loads(vector["stdin"]), vector["expect"]["stdout_json"]
    name = {"tools.nope:run": "no_module"}.get(asked["entry"], asked["entry"].partition(":")[2])
    if expected["ok"]:
        assert tools.call(name, asked["payload"]).output == expected["result"]
    else:
        failed = failure(tools, name, asked["payload"])
        assert (failed.code, failed.text) == ("tool_error", expected["error"]["message"] or "status TOOL_ERROR")


@pytest.mark.parametrize(
    ("name", "code", "words"),
    [
        ("leaves", "crash", "exited with code 3"),
        ("exits", "crash", "exited with code 4; it said: last words"),
        ("segfaults", "crash", "killed by SIGSEGV"),
        ("a_set", "tool_error", "Object of type <class 'set'> is not JSON serializable"),
    ],
)
def test_failures_say_what_they_are(tools, name, code, words):
    failed = failure(tools, name)
    assert failed.code == code
    assert words in str(failed)
    assert tools.call("greet", {"name": "Ada"}).output["ok"]


def test_nothing_leaks_from_call_to_call(tools):
    outputs = [tools.call("counted", {}).output for _ in range(5)]
    assert [output["count"] for output in outputs] == [1] * 5
    assert len({output["pid"] for output in outputs}) == 5


def test_an_edit_is_seen_by_the_next_call(tmp_path):
    source = "def run(payload):\n    return {}\n"
    root = python_app(tmp_path / "app", source.format(0))
    with make(tmp_path, python_config(root, "run")) as tools:
        for number in range(6):
            (root / "tools" / "vec.py").write_text(source.format(number))
            assert tools.call("run", {}).output == number


def test_a_process_may_be_used_again_where_the_app_wants_that(tmp_path, app):
    with make(tmp_path, python_config(app, "counted", "exits", reuse=True)) as tools:
        assert [tools.call("counted", {}).output["count"] for _ in range(3)] == [1, 2, 3]
        assert failure(tools, "exits").code == "crash"
        assert tools.call("counted", {}).output["count"] == 1


def test_a_timeout_ends_all_that_the_call_has_started(tmp_path, app):
    with make(tmp_path, python_config(app, "loops", "greet", timeout_seconds=0.5)) as tools:
        begun = time.monotonic()
        assert failure(tools, "loops", {"file": str(tmp_path / "pid")}).code == "timeout"
        assert time.monotonic() - begun < 3
        pid = int((tmp_path / "pid").read_text())
        while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() - begun < 10
            time.sleep(0.01)
        assert tools.call("greet", {"name": "Ada"}).output["ok"]


def test_a_tools_own_timeout_and_a_calls_own_hold(tmp_path, app):
    with make(tmp_path, python_config(app, "sleeps") + "timeout_seconds = 0.3\n") as tools:
        assert "within 0.3 s" in str(failure(tools, "sleeps", {"seconds": 5}))
        assert "within 0.2 s" in str(failure(tools, "sleeps", {"seconds": 5}, timeout=0.2))


def test_so_many_calls_run_side_by_side_and_the_next_one_waits_its_time(tmp_path, app):
    config = "[limits]\nqueue_seconds = 0.3\n" + python_config(app, "sleeps", max=2)
    with make(tmp_path, config) as tools, ThreadPoolExecutor(3) as threads:
        tools.call("sleeps", {"seconds": 0})
        begun = time.monotonic()
        calls = [threads.submit(tools.call, "sleeps", {"seconds": 1}) for _ in range(3)]
        outcomes = [call.exception() for call in calls]
        assert time.monotonic() - begun < 1.9
        assert sorted(outcome.code if outcome else "" for outcome in outcomes) == ["", "", "overloaded"]


def test_a_key_runs_its_tool_once(tmp_path):
    body = f"import time\ndef once(payload):\n    open({str(tmp_path / 'ran')!r}, 'a').write('x'); time.sleep(0.2)\n"
    with make(tmp_path, python_config(python_app(tmp_path / "app", body), "once")) as tools:
        with ThreadPoolExecutor(4) as threads:
            calls = [threads.submit(tools.call, "once", {}, idempotency_key="k") for _ in range(4)]
            assert sorted(call.result().idempotent_hit for call in calls) == [False, True, True, True]
        assert (tmp_path / "ran").read_text() == "x"


def test_processes_that_have_answered_are_gone_and_so_is_a_fork_server_that_has_died(tmp_path, app):
    with make(tmp_path, python_config(app, "parent", "greet")) as tools:
        before = psutil.Process(tools.call("parent", {}).output)
        for _ in range(5):
            tools.call("greet", {"name": "Ada"})
        deadline = time.monotonic() + 5
        while len(before.children()) != 2 or any(one.status() == psutil.STATUS_ZOMBIE for one in before.children()):
            assert time.monotonic() < deadline, "two that wait, and nobody else"
            time.sleep(0.01)
        before.kill()
        while before.status() != psutil.STATUS_ZOMBIE:
            time.sleep(0.01)
        assert tools.call("parent", {}).output != before.pid
        while before.is_running():
            tools.call("greet", {"name": "Ada"})
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_closing_ends_what_runs_and_all_processes(tmp_path, app):
    before = family()
    tools = make(tmp_path, python_config(app, "loops"))
    with ThreadPoolExecutor(1) as threads:
        call = threads.submit(tools.call, "loops", {"file": str(tmp_path / "pid")})
        while not (tmp_path / "pid").exists():
            time.sleep(0.005)
        tools.close()
        assert call.exception(10).code == "crash"
    assert failure(tools, "loops").code == "draining"
    assert not psutil.wait_procs([one for one in family() if one not in before], timeout=3)[1]


def test_an_interrupted_call_leaves_no_process_and_the_next_one_is_answered(tmp_path, app):
    def ring(*_):
        raise KeyboardInterrupt

    with make(tmp_path, python_config(app, "loops", "greet")) as tools:
        assert tools.call("greet", {"name": "Ada"}).output["ok"]
        before = signal.signal(signal.SIGALRM, ring)
        try:
            for number in range(6):
                signal.setitimer(signal.ITIMER_REAL, 0.002 * 3**number)  # in the middle of anything
                with pytest.raises(KeyboardInterrupt):
                    tools.call("loops", {"file": str(tmp_path / f"pid{number}")})
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
        assert tools.call("greet", {"name": "Eve"}).output["message"] == "Hello Eve"
        deadline = time.monotonic() + 5
        for file in tmp_path.glob("pid*"):
            while file.read_text() and psutil.pid_exists(int(file.read_text())):
                assert time.monotonic() < deadline
                time.sleep(0.01)


def test_a_fork_has_interpreters_of_its_own_and_takes_none_of_ours(tmp_path, app):
    with make(tmp_path, python_config(app, "parent", "greet")) as tools:
        ours = tools.call("parent", {}).output
        reader, writer = os.pipe()
        pid = os.fork()
        if not pid:
            try:
                os.write(writer, json.dumps([tools.call("parent", {}).output for _ in range(2)]).encode())
                tools.close()
            finally:
                os._exit(0)
        os.close(writer)
        with os.fdopen(reader) as file:
            theirs = json.load(file)
        os.waitpid(pid, 0)
        assert theirs[0] == theirs[1] != ours
        assert tools.call("parent", {}).output == ours, "its end was not ours"


def test_threads_that_call_while_others_fork_are_all_answered(tmp_path, app):
    with make(tmp_path, python_config(app, "echo")) as tools:
        stop = threading.Event()

        def fork():
            while not stop.is_set():
                if pid := os.fork():
                    os.waitpid(pid, 0)
                else:
                    os._exit(0)
                time.sleep(0.002)

        forking = threading.Thread(target=fork)
        forking.start()
        with ThreadPoolExecutor(4) as threads:
            outputs = list(threads.map(lambda n: tools.call("echo", {"n": n}).output, range(40)))
        stop.set()
        forking.join()
        assert outputs == [{"n": n} for n in range(40)]


def test_machinas_dispatcher_has_them_too(tmp_path, app):
    (tmp_path / "broker.toml").write_text(python_config(app, "greet", "fail", "exits"))
    script = (
        "from broker.machina_dispatch import run_machina_toolhost as run\n"
        "print([run('greet', {'name': 'Ada'}), run('fail', {})['type'], run('exits', {})['type']])\n"
    )
    environ = {"HOME": str(tmp_path), "PATH": os.environ["PATH"]}
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, env=environ, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == str(['{"message": "Hello Ada", "ok": true}', "tool_error", "crash"])


def test_the_end_of_the_program_is_the_end_of_its_processes(tmp_path, app):
    config = python_config(app, "parent")
    (tmp_path / "broker.toml").write_text(config)
    script = "from broker import Embedded\nprint(Embedded().call('parent', {}).output, flush=True)\n"
    for ending in ("", "import os\nos.kill(os.getpid(), 9)\n"):
        done = subprocess.run(
            [sys.executable, "-c", script + ending],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
            timeout=20,
        )
        deadline = time.monotonic() + 5
        while psutil.pid_exists(int(done.stdout)):
            assert time.monotonic() < deadline
            time.sleep(0.01)
