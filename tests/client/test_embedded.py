"""A broker in the caller's own process: the same promises, kept by threads."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from broker import Embedded
from broker.client import failures
from tests.support.config import toolhost
from tests.support.toolhosts import listing, scripted

ECHO, SLEEP, COUNTER = "AID.DEMO.ECHO.v1", "AID.DEMO.SLEEP.v1", "AID.DEMO.COUNTER.v1"
A, B = "AID.A.v1", "AID.B.v1"
WRITE = "AID.FILE.WRITE.v1"


@pytest.fixture
def make(tmp_path):
    """Embedded brokers from a piece of broker.toml; nothing may be left of them."""
    made = []

    def one(text="", **more):
        file = tmp_path / f"broker{len(made)}.toml"
        file.write_text(text)
        environ = {"HOME": str(tmp_path), "PATH": os.environ["PATH"], **more}
        made.append(Embedded(file=str(file), environ=environ))
        return made[-1]

    yield one
    for embedded in made:
        embedded.close()
    _, alive = psutil.wait_procs([child for child in psutil.Process().children() if is_toolhost(child)], timeout=2)
    assert not alive


def is_toolhost(child):
    try:
        return "toolhost" in " ".join(child.cmdline())
    except psutil.Error:  # it is a zombie, or gone
        return False


@pytest.fixture
def demo(make, where):
    return make(toolhost("d", where["demo_plugin"]))


def pids(embedded):
    return [host.process.pid for runtime in embedded.runtimes for host in runtime.fleet._hosts]


def code(embedded, aid, inputs=None, **more):
    try:
        embedded.call(aid, inputs, **more)
    except failures.CallFailed as failed:
        return failed.code
    return "ok"


def hosted(folder, body, plugin=None, **settings):
    settings = {"cwd": str(folder), **settings}
    return toolhost("h", *([plugin] if plugin else []), binary=scripted(folder, body), **settings)


# --- what comes back --------------------------------------------------------------------------------------------------


def test_a_call_returns_the_output_and_failures_are_typed(demo):
    reply = demo.call(ECHO, {"n": [1, "é", None]})
    assert reply.output == {"n": [1, "é", None]}
    assert reply.output_json == '{"n":[1,"é",null]}'
    assert demo.call(ECHO, input_json="7").output == 7
    with pytest.raises(failures.NotFound, match=r"tool not found: AID\.NO\.v1"):
        demo.call("AID.NO.v1")
    with pytest.raises(failures.ToolError, match="oh no") as caught:
        demo.call("AID.DEMO.FAIL.v1", {"error": "oh no"})
    assert caught.value.ran
    with pytest.raises(failures.ReplyTooLarge, match=r"limits\.reply_bytes"):
        demo.call("AID.DEMO.BLOB.v1", {"bytes": 2_000_000})
    with pytest.raises(failures.TooLarge, match=r"limits\.request_bytes"):
        demo.call(ECHO, {"x": "x" * 11_000_000})
    assert demo.call(COUNTER, {"x": '"' * 4_000_000}).output["count"] > 0, "escapes do not count"
    assert demo.call(ECHO, {}).output == {}
    assert {tool["aid"] for tool in demo.tools()} >= {ECHO, SLEEP, WRITE}


def test_states_belong_to_their_session(demo):
    def state(op, value=None, **more):
        inputs = {"op": op, "slot": 3} | ({} if value is None else {"value": value})
        return demo.call("AID.DEMO.STATE.v1", inputs, **more).output

    state("put", "mine", ds_state={"slots": {}}, session="a")
    assert state("get", ds_state={"delta": True}, session="a")["found"]
    assert not state("get", ds_state={"delta": True}, session="b")["found"]
    assert not state("get")["found"]


def test_duplicates_of_a_key_run_once_also_while_the_first_runs(demo):
    with ThreadPoolExecutor(16) as threads:
        calls = [threads.submit(demo.call, SLEEP, {"ms": 200}, idempotency_key="k") for _ in range(16)]
        replies = [call.result() for call in calls]
    assert sum(not reply.idempotent_hit for reply in replies) == 1
    with ThreadPoolExecutor(8) as threads:
        calls = [threads.submit(demo.call, COUNTER, {}, idempotency_key="c") for _ in range(50)]
        assert len({call.result().output_json for call in calls}) == 1


def test_leases_are_asked_for_and_their_holder_is_the_operator(make, where, tmp_path):
    tools = make(
        "[lease]\nenforce = true\n"
        + toolhost("d", where["demo_plugin"], env={"MACHINA_WORK_DIR": str(tmp_path / "work")})
    )
    file = {"path": "a.txt", "text": "hi"}
    assert code(tools, WRITE, file) == "lease_required"
    token = tools.issue_lease(WRITE)
    with ThreadPoolExecutor(16) as threads:
        outcomes = list(threads.map(lambda _: code(tools, WRITE, file, lease_token=token), range(16)))
    assert sorted(outcomes) == ["lease_rejected"] * 15 + ["ok"]
    log = [json.loads(line)["what"] for line in next(tmp_path.rglob("audit.jsonl")).read_text().splitlines()]
    assert log.count("lease_used") == 1
    assert log.count("lease_rejected") == 15


def test_rights_of_the_configuration_hold(make, where):
    us = f'[[principal]]\nname = "uid:{os.getuid()}"\ntools = ["AID.DEMO.ECHO.v1"]\n'
    tools = make(us + toolhost("d", where["demo_plugin"]))
    assert [code(tools, ECHO), code(tools, COUNTER)] == ["ok", "forbidden"]
    assert [tool["aid"] for tool in tools.tools()] == [ECHO]


# --- faults -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "inputs", "expected"),
    [
        ("SEGV", {}, "crash"),
        ("EXIT", {"code": 3}, "crash"),
        ("HANG", {}, "timeout"),
        ("HANG_TERM", {}, "timeout"),
        ("STDERR", {"bytes": 3_000_000}, "ok"),
        ("GRANDCHILD", {}, "ok"),
        ("STDOUT", {"text": "junk"}, "ok"),
        ("JUNK", {}, "bad_reply"),
        ("HALF", {}, "crash"),
        ("CLOSE", {}, "crash"),
        ("OVERSIZE", {}, "reply_too_large"),
        ("SEGV_MID", {}, "crash"),
        ("TWICE", {}, "ok"),
    ],
)
def test_each_fault_costs_its_own_call(make, where, fault, inputs, expected):
    tools = make(
        toolhost("d", where["demo_plugin"], where["fault_plugin"], max=2)
        + f'[[toolhost]]\nname = "wire"\nbinary = "{where["fault_toolhost"]}"\nmax = 2\n'
    )
    for n in range(3):
        assert code(tools, f"AID.FAULT.{fault}.v1", inputs, timeout=0.5) == expected
        assert tools.call(ECHO, {"n": n}).output == {"n": n}


def test_a_toolhost_that_was_killed_while_idle_is_nobodys_crash(demo):
    demo.call(ECHO)
    for pid in pids(demo):
        os.kill(pid, signal.SIGKILL)
    time.sleep(0.05)
    assert demo.call(ECHO, {"n": 1}).output == {"n": 1}


def test_the_breaker_opens_and_waiting_threads_are_answered(make, where):
    tools = make("[breaker]\nopen_seconds = 2\n" + toolhost("f", where["fault_plugin"], max=2))
    with ThreadPoolExecutor(32) as threads:
        outcomes = list(threads.map(lambda _: code(tools, "AID.FAULT.EXIT.v1"), range(64)))
    assert set(outcomes) == {"crash", "breaker_open"}
    assert outcomes.count("crash") <= 7
    time.sleep(2.3)
    assert code(tools, "AID.FAULT.EXIT.v1") == "crash", "the probe"
    assert code(tools, "AID.FAULT.EXIT.v1") == "breaker_open"


def test_a_toolhost_that_does_not_start_is_not_started_in_a_loop(make, tmp_path):
    tools = make(hosted(tmp_path, "pass") + "[limits]\nqueue_seconds = 3\n")
    (tmp_path / "host").write_text("#!/bin/sh\necho broken >&2\nexit 3\n")
    begin = time.monotonic()
    with pytest.raises(failures.Unavailable, match="broken"):
        tools.call(A)
    assert time.monotonic() - begin < 3
    assert tools.runtimes[0].fleet.counts["started"] <= 6


def test_a_full_pool_answers_overloaded_after_a_while(make, where):
    tools = make("[limits]\nqueue_seconds = 0.3\n" + toolhost("d", where["demo_plugin"], min=1, max=1))
    tools.call(ECHO)
    with ThreadPoolExecutor(3) as threads:
        slow = threads.submit(code, tools, SLEEP, {"ms": 900})
        time.sleep(0.1)
        assert code(tools, ECHO) == "overloaded"
        assert slow.result() == "ok"
    assert code(tools, ECHO) == "ok"


def marked(path, mark, **tools):
    """A plugin whose toolhost answers with the mark."""
    draft = path.with_suffix(".new")
    described = json.loads(Path(listing(draft, **tools)).read_text())
    draft.write_text(json.dumps({**described, "error": mark}))
    os.replace(draft, path)
    return str(path)


SAYS_ITS_MARK = 'say(output_json=json.dumps(json.load(open(sys.argv[2]))["error"]))'


def test_a_plugin_can_be_replaced_and_the_next_call_uses_it(make, tmp_path):
    path = tmp_path / "tools.json"
    plugin = marked(path, "first", A=[])
    tools = make("[lease]\nenforce = true\n" + hosted(tmp_path, SAYS_ITS_MARK, plugin, min=1, max=3))
    with ThreadPoolExecutor(3) as threads:
        for n in range(20):
            marked(path, str(n), A=[])
            assert {reply.output for reply in threads.map(lambda _: tools.call(A), range(3))} == {str(n)}
    text = path.read_text().replace('"19"', '"in place"')
    path.write_text(text)
    assert tools.call(A).output == "in place"
    path.write_text("no list of tools")
    assert tools.call(A).output == "in place", "the old one goes on"
    assert "not a list of tools" in tools.runtimes[0].fleet.problem
    path.unlink()
    assert tools.call(A).output == "in place"
    marked(path, "x", A=["file_write"])
    assert code(tools, A) == "lease_required", "the tool is another one now"
    marked(path, "x", B=[])
    assert [code(tools, B), code(tools, A)] == ["ok", "not_found"]


def test_a_link_to_a_plugin_can_be_turned_elsewhere(make, tmp_path):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        marked(tmp_path / name / "tools.json", name, A=[])
    (tmp_path / "now").symlink_to("one")
    tools = make(hosted(tmp_path, SAYS_ITS_MARK, str(tmp_path / "now" / "tools.json")))
    assert tools.call(A).output == "one"
    (tmp_path / "next").symlink_to("two")
    os.replace(tmp_path / "next", tmp_path / "now")
    assert tools.call(A).output == "two"


def test_a_toolhost_that_enforces_leases_on_its_own_is_given_them(make, where, tmp_path):
    env = {"MACHINA_LEASE_ENFORCE": "1", "MACHINA_WORK_DIR": str(tmp_path / "work")}
    tools = make(toolhost("d", where["demo_plugin"], env=env))
    for n in range(5):
        tools.call(WRITE, {"path": f"{n}.txt", "text": "x"})
    assert len(list((tmp_path / "work").iterdir())) == 5


# --- threads, forks, loops, signals -----------------------------------------------------------------------------------


def test_many_threads_get_their_own_answers(demo):
    def some(thread):
        return all(demo.call(ECHO, {"t": thread, "n": n}).output == {"t": thread, "n": n} for n in range(300))

    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(some, range(8)))


def test_a_tool_that_begins_to_answer_twice_gives_nobody_anothers_answer(make, tmp_path):
    body = """say(output_json=json.dumps(request["input_json"]))
if n % 7 == 0: say(output_json='"again"')"""
    tools = make("[breaker]\nin_a_row = 100000\nleast_calls = 100000\n" + hosted(tmp_path, body, max=4))
    wrong = []

    def some(thread):
        for n in range(100):
            text = json.dumps([thread, n])
            try:
                output = tools.call(A, input_json=text).output
            except failures.CallFailed:
                continue
            if output != text and thread not in json.loads(output):
                wrong.append((text, output))

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(some, ["a", "b", "c", "d"]))
    assert not wrong
    assert tools.runtimes[0].fleet.counts["violation"] > 0


def test_after_a_fork_both_sides_go_on_and_share_nothing(demo):
    demo.call(COUNTER, idempotency_key="k")
    ours = set(pids(demo))
    pid = os.fork()
    if pid == 0:
        try:
            reply = demo.call(COUNTER, idempotency_key="k")
            good = not reply.idempotent_hit and reply.output["count"] == 1 and not set(pids(demo)) & ours
            demo.close()
            os._exit(0 if good else 1)
        except BaseException:
            os._exit(2)
    assert demo.call(ECHO, {"n": 1}).output == {"n": 1}
    assert os.waitpid(pid, 0)[1] == 0
    assert demo.call(COUNTER, idempotency_key="k").idempotent_hit
    assert set(pids(demo)) == ours


def _in_a_pool(n):
    from broker.machina_dispatch import run_machina_toolhost

    return run_machina_toolhost(ECHO, {"n": n})


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_multiprocessing(method):
    with multiprocessing.get_context(method).Pool(2) as pool:
        assert pool.map(_in_a_pool, range(20)) == [f'{{"n":{n}}}' for n in range(20)]


def test_it_can_be_called_from_within_a_running_loop(demo):
    async def main():
        direct = demo.call(ECHO, {"n": 0}).output["n"]
        rest = await asyncio.gather(*(asyncio.to_thread(demo.call, ECHO, {"n": n}) for n in range(1, 20)))
        return [direct, *(reply.output["n"] for reply in rest)]

    assert asyncio.run(main()) == list(range(20))


PROGRAM = """
import os, signal, sys, threading, time
from broker import Embedded
signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job's is ignored
tools = Embedded()
tools.call("AID.DEMO.ECHO.v1")
{body}
"""


def run(body, home, **more):
    environment = {"HOME": str(home), "PATH": os.environ["PATH"]}
    command = [sys.executable, "-c", PROGRAM.format(body=body)]
    return subprocess.run(command, capture_output=True, text=True, timeout=30, env=environment, check=False, **more)


def toolhosts_of(home):
    return [p for p in psutil.process_iter(["environ"]) if (p.info["environ"] or {}).get("HOME") == str(home)]


def test_nothing_is_left_at_exit_and_exit_is_quick(tmp_path):
    begin = time.monotonic()
    done = run("threading.Thread(target=lambda: tools.call('AID.DEMO.SLEEP.v1', {'ms': 100})).start()", tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert time.monotonic() - begin < 5
    assert not toolhosts_of(tmp_path)


def test_nothing_is_left_when_the_program_is_killed(tmp_path):
    assert run("os.kill(os.getpid(), signal.SIGKILL)", tmp_path).returncode == -signal.SIGKILL
    deadline = time.monotonic() + 3
    while toolhosts_of(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not toolhosts_of(tmp_path)


def test_ctrl_c_interrupts_a_call_and_the_next_one_works(tmp_path):
    body = """
threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
begin = time.monotonic()
try:
    tools.call("AID.DEMO.SLEEP.v1", {"ms": 20000})
except KeyboardInterrupt:
    print(time.monotonic() - begin < 2, tools.call("AID.DEMO.ECHO.v1", {"n": 1}).output)
"""
    done = run(body, tmp_path)
    assert (done.stdout, done.stderr) == ("True {'n': 1}\n", "")


def test_a_signal_that_is_handled_does_not_end_a_call(tmp_path):
    body = """
signal.signal(signal.SIGALRM, lambda *_: print("tick"))
signal.setitimer(signal.ITIMER_REAL, 0.1)
print(tools.call("AID.DEMO.SLEEP.v1", {"ms": 400}).output)
"""
    assert run(body, tmp_path).stdout == "tick\n{'slept_ms': 400}\n"


def test_a_program_in_which_sigpipe_is_deadly_outlives_its_toolhosts(tmp_path):
    body = """
signal.signal(signal.SIGPIPE, signal.SIG_DFL)
for n in range(20):
    for runtime in tools.runtimes:
        for host in list(runtime.fleet._hosts):
            os.kill(host.process.pid, signal.SIGKILL)
    try:
        tools.call("AID.DEMO.COUNTER.v1", {"x": "x" * 5_000_000}, timeout=5)
    except Exception as error:
        assert error.code == "crash", error
print("alive")
"""
    assert run(body, tmp_path).stdout == "alive\n"


def test_a_program_that_reaps_all_children_itself_confuses_nobody(tmp_path):
    body = """
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
for n in range(5):
    for runtime in tools.runtimes:
        for host in list(runtime.fleet._hosts):
            os.kill(host.process.pid, signal.SIGKILL)
    time.sleep(0.05)
    print(tools.call("AID.DEMO.ECHO.v1", {"n": n}).output["n"])
"""
    assert run(body, tmp_path).stdout == "0\n1\n2\n3\n4\n"


def test_processes_above_the_minimum_leave_and_old_ones_are_recycled(make, where):
    tools = make(toolhost("d", where["demo_plugin"], min=1, max=4, idle_seconds=0.5, max_calls=50))
    fleet = tools.runtimes[0].fleet
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda _: tools.call(SLEEP, {"ms": 150}), range(8)))
    assert len(fleet._hosts) >= 3
    time.sleep(2.1)
    for _ in range(80):
        tools.call(ECHO)
    time.sleep(0.3)
    tools.call(ECHO)
    assert len(fleet._hosts - set(fleet._leaving)) == 1
    assert fleet.counts["recycled"] >= 1


def test_descriptors_and_memory_stay_where_they_are(make, where):
    tools = make(
        "[breaker]\nin_a_row = 100000\nleast_calls = 100000\n"
        + toolhost("d", where["demo_plugin"], where["fault_plugin"])
    )
    me = psutil.Process()

    def round_of_calls():
        for _ in range(10):
            code(tools, "AID.FAULT.EXIT.v1")
        for n in range(2000):
            tools.call(ECHO, {"n": n})

    round_of_calls()
    descriptors, memory = me.num_fds(), me.memory_info().rss
    for _ in range(3):
        round_of_calls()
    assert me.num_fds() <= descriptors + 4
    assert me.memory_info().rss < memory + 8_000_000


def test_closing_answers_those_who_wait_and_those_who_come(make, where):
    tools = make(toolhost("d", where["demo_plugin"], min=1, max=1))
    tools.call(ECHO)
    with ThreadPoolExecutor(4) as threads:
        calls = [threads.submit(code, tools, SLEEP, {"ms": 5000}) for _ in range(4)]
        time.sleep(0.3)
        tools.close()
        assert sorted(call.result(5) for call in calls) == ["crash", "draining", "draining", "draining"]
    assert code(tools, ECHO) == "draining"


def test_a_one_shot_command_is_a_tool(make, tmp_path):
    command = tmp_path / "command"
    reply = {"ok": True, "status": "OK", "output_json": '"NAME"', "error": ""}
    command.write_text("#!/bin/sh\nread line\necho '" + json.dumps(reply).replace("NAME", "'$1'") + "'\n")
    command.chmod(0o755)
    tools = make(f'[[oneshot]]\nname = "AID.SHOT.v1"\ncommand = ["{command}"]\n')
    assert tools.call("AID.SHOT.v1").output == "AID.SHOT.v1"
    assert "AID.SHOT.v1" in {tool["aid"] for tool in tools.tools()}
    for body, expected in (("sleep 60", "timeout"), ("exit 3", "crash"), ("echo junk", "bad_reply")):
        command.write_text(f"#!/bin/sh\n{body}\n")
        assert code(tools, "AID.SHOT.v1", timeout=0.5) == expected
