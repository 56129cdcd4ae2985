"""What reviewers found in the embedded path and the clients."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from broker import AsyncClient, Client, Embedded
from broker.client import failures
from tests.support.config import toolhost
from tests.support.toolhosts import listing, scripted

ECHO, SLEEP = "AID.DEMO.ECHO.v1", "AID.DEMO.SLEEP.v1"
A, B = "AID.A.v1", "AID.B.v1"


def program(tmp_path, body, **environment):
    """Runs a program around an Embedded; what it prints."""
    script = tmp_path / "program.py"
    head = "import json, os, random, signal, sys, threading, time\nfrom broker import Embedded\n"
    head += "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a background job's is ignored
    script.write_text(head + textwrap.dedent(body))
    done = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=tmp_path,
        env={"HOME": str(tmp_path), "PATH": os.environ["PATH"], **environment},
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return done.stdout


@pytest.fixture
def make(tmp_path):
    made = []

    def one(text, **more):
        file = tmp_path / f"broker{len(made)}.toml"
        file.write_text(text)
        environ = {"HOME": str(tmp_path), "PATH": os.environ["PATH"]}
        made.append(Embedded(file=str(file), environ=environ, **more))
        return made[-1]

    yield one
    for embedded in made:
        embedded.close()


def code(tools, aid, inputs=None, **more):
    try:
        tools.call(aid, inputs, **more)
    except failures.CallFailed as failed:
        return failed.code
    return "ok"


def test_signals_that_raise_at_any_moment_hurt_nobody_else(tmp_path):
    body = """
    class Stop(Exception): pass
    def stop(*_): raise Stop
    signal.signal(signal.SIGALRM, stop)
    tools = Embedded()
    errors, wrong, over = [], [], threading.Event()
    def other(name):
        n = 0
        while not over.is_set():
            n += 1
            try:
                if tools.call("AID.DEMO.ECHO.v1", {"t": name, "n": n}).output != {"t": name, "n": n}: wrong.append(n)
            except Exception as error:
                errors.append(repr(error))
    crew = [threading.Thread(target=other, args=(name,)) for name in "ab"]
    for one in crew: one.start()
    end = time.monotonic() + 4
    stopped = 0
    more = [{}, {"timeout": 5.0}, {"key": True}, {"ds_state": {"slots": {}}}]
    while time.monotonic() < end:
        try:
            signal.setitimer(signal.ITIMER_REAL, random.uniform(0.00002, 0.003))
            while True:
                extra = dict(random.choice(more))
                if extra.pop("key", None): extra["idempotency_key"] = str(random.randrange(20))
                try: tools.call("AID.DEMO.ECHO.v1", {"x": 1}, **extra)
                except Stop: raise
                except Exception as error:
                    if "interrupted while the tool ran" not in str(error): errors.append(repr(error))
        except Stop:
            stopped += 1
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    over.set()
    for one in crew: one.join()
    for n in range(20):
        try: tools.call("AID.DEMO.ECHO.v1", {"n": n}, idempotency_key=str(n))
        except Exception as error:
            if "interrupted while the tool ran" not in str(error): errors.append(repr(error))
        tools.call("AID.DEMO.ECHO.v1", {"n": n}, ds_state={"slots": {}})
    print(json.dumps([stopped > 50, wrong, errors]))
    """
    assert json.loads(program(tmp_path, body)) == [True, [], []]


def test_forks_while_other_threads_call(tmp_path):
    body = """
    tools = Embedded()
    over = threading.Event()
    errors = []
    def other():
        while not over.is_set():
            try: tools.call("AID.DEMO.ECHO.v1", {"n": 1}, idempotency_key=str(random.random()))
            except Exception as error: errors.append(repr(error))
    crew = [threading.Thread(target=other) for _ in range(3)]
    for one in crew: one.start()
    ends = []
    for n in range(60):
        pid = os.fork()
        if pid == 0:
            try:
                signal.alarm(20)
                good = tools.call("AID.DEMO.ECHO.v1", {"n": n}).output == {"n": n}
                if n % 3 == 0:
                    inner = os.fork()
                    if inner == 0:
                        os._exit(0 if tools.call("AID.DEMO.ECHO.v1", {"i": n}).output == {"i": n} else 1)
                    good = good and os.waitpid(inner, 0)[1] == 0
                tools.close()
                os._exit(0 if good else 1)
            except BaseException:
                os._exit(2)
        ends.append(os.waitpid(pid, 0)[1])
    over.set()
    for one in crew: one.join()
    print(json.dumps([sorted(set(ends)), errors]))
    """
    assert json.loads(program(tmp_path, body)) == [[0], []]


def test_an_interrupt_while_it_waits_gives_back_what_the_call_had(tmp_path, where):
    (tmp_path / "broker.toml").write_text(
        "[lease]\nenforce = true\n" + toolhost("d", where["demo_plugin"], min=1, max=1)
    )
    body = """
    tools = Embedded()
    token = tools.issue_lease("AID.FILE.WRITE.v1", ttl=60)
    slow = threading.Thread(target=tools.call, args=("AID.DEMO.SLEEP.v1", {"ms": 1500}))
    slow.start()
    time.sleep(0.5)
    threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    file = {"path": "a.txt", "text": "x"}
    try:
        tools.call("AID.FILE.WRITE.v1", file, lease_token=token, idempotency_key="k")
    except KeyboardInterrupt:
        pass
    slow.join()
    print(tools.call("AID.FILE.WRITE.v1", file, lease_token=token, idempotency_key="k").idempotent_hit)
    """
    assert program(tmp_path, body, MACHINA_WORK_DIR=str(tmp_path / "work")) == "False\n"


def test_a_breaker_that_opens_while_calls_are_on_their_way_answers_them(make, where):
    tools = make(toolhost("f", where["fault_plugin"], max=2))
    for _ in range(5):
        with ThreadPoolExecutor(32) as threads:
            calls = [threads.submit(code, tools, "AID.FAULT.EXIT.v1", timeout=5.0) for _ in range(48)]
            assert {call.result(20) for call in calls} <= {"crash", "breaker_open"}
        tools.dispatcher.reset_breaker(tools.dispatcher.registry.get("AID.FAULT.EXIT.v1"))


def test_a_slow_start_keeps_nobody_from_a_warm_toolhost(make, tmp_path):
    before = 'os.path.exists("warm") and time.sleep(5)\nopen("warm", "w")'
    host = scripted(tmp_path, 'time.sleep(0.05)\nsay(output_json="1")', before=before)
    tools = make(toolhost("h", binary=host, cwd=str(tmp_path), min=1, max=2))
    tools.call(A)
    with ThreadPoolExecutor(2) as threads:
        begin = time.monotonic()
        list(threads.map(lambda _: tools.call(A), range(20)))
        assert time.monotonic() - begin < 4


def test_a_toolhost_whose_thread_reads_a_new_plugin_for_long_is_not_lost(make, tmp_path, monkeypatch):
    monkeypatch.setattr("broker.pool.fleet.LOST_SECONDS", 0.3)
    monkeypatch.setattr("broker.pool.fleet.LOOK_SECONDS", 0.1)
    plugin = listing(tmp_path / "tools.json", A=[])
    host = scripted(tmp_path, 'say(output_json="1")')
    tools = make(toolhost("h", plugin, binary=host, min=2, max=2))
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda _: tools.call(A), range(20)))
        text = (tmp_path / "host").read_text()
        slow = 'if sys.argv[1] == "--list":'
        (tmp_path / "host").write_text(text.replace(slow, slow + "\n    time.sleep(1.5)"))
        (tmp_path / "tools.json").write_text("not a plugin")
        assert {reply.output for reply in threads.map(lambda _: tools.call(A), range(40))} == {1}
    assert tools.runtimes[0].fleet.counts["started"] == 2, "the old ones go on"


def test_an_answer_does_not_wait_for_the_proof_that_it_was_the_only_one(make, tmp_path):
    host = scripted(tmp_path, 'say(output_json="1")\ntime.sleep(2)')
    tools = make(toolhost("h", binary=host, min=1, max=4))
    begin = time.monotonic()
    tools.call(A)
    assert time.monotonic() - begin < 1


def test_an_embedded_that_is_forgotten_leaves_nothing(where):
    before = len(psutil.Process().children()), threading.active_count(), psutil.Process().num_fds()
    for _ in range(3):
        Embedded(plugins=[where["demo_plugin"]]).call(ECHO)
    deadline = time.monotonic() + 5
    while True:
        gc.collect()
        after = len(psutil.Process().children()), threading.active_count(), psutil.Process().num_fds()
        if all(now <= then for now, then in zip(after, before, strict=True)):
            break
        assert time.monotonic() < deadline, (before, after)
        time.sleep(0.02)


def test_closing_in_the_middle_of_everything_leaves_nothing(where):
    children = psutil.Process().children
    for _ in range(15):
        tools = Embedded(plugins=[where["demo_plugin"]])
        with ThreadPoolExecutor(6) as threads:
            calls = [threads.submit(code, tools, ECHO) for _ in range(200)]
            time.sleep(0.02)
            tools.close()
            assert {call.result(10) for call in calls} <= {"ok", "crash", "draining"}
    assert not [child for child in children() if "toolhost" in child.name()]
    with pytest.raises(failures.Draining, match="has been closed"):
        tools.issue_lease(ECHO)


def test_a_tool_that_was_a_command_becomes_a_plugins(make, tmp_path):
    from broker.settings import OneShot

    plugin = listing(tmp_path / "tools.json", A=[])
    host = scripted(tmp_path, "say(output_json=json.dumps('plugin'))")
    command = tmp_path / "command"
    command.write_text('#!/bin/sh\necho \'{\n"status": "OK",\n"output_json": "\\"command\\""\n}\'\n')
    command.chmod(0o755)
    tools = make(toolhost("h", plugin, binary=host), fallback=lambda aid: OneShot(name=aid, command=[str(command)]))
    assert [tools.call(aid).output for aid in (A, B)] == ["plugin", "command"]
    listing(tmp_path / "tools.json", A=[], B=[])
    assert [tools.call(aid).output for aid in (A, B)] == ["plugin", "plugin"]
    assert code(tools, "AID.X.v1\0y") == "not_found"


def test_commands_are_looked_up_and_do_not_kill_by_sigpipe(tmp_path):
    (tmp_path / "broker.toml").write_text(
        '[[oneshot]]\nname = "AID.S.v1"\ncommand = ["sh", "-c", "exec 0<&-; sleep 0.2; echo {}"]\n'
    )
    body = """
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    tools = Embedded()
    try: tools.call("AID.S.v1", {"x": "x" * 5_000_000})
    except Exception as error: print(error.code)
    """
    assert program(tmp_path, body) == "tool_error\n"


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_keyed_call_is_not_repeated_at_another_broker(start, tmp_path, kind):
    """The broker is killed while the call runs, and another one takes its place: it does not know the key."""
    body = 'open("ran", "a").write("x")\ntime.sleep(1)\nsay(output_json="1")'
    text = toolhost("h", binary=scripted(tmp_path, body), cwd=str(tmp_path), min=1)
    first, second = start(config=text), start(config=text)
    path = tmp_path / "now.sock"
    path.symlink_to(first.path)

    def turn():
        draft = tmp_path / "next.sock"
        draft.symlink_to(second.path)
        os.replace(draft, path)
        first.process.send_signal(signal.SIGKILL)

    timer = threading.Timer(0.5, turn)
    timer.start()

    def call():
        if kind == "sync":
            with Client(str(path)) as tools:
                return tools.call(A, idempotency_key="k")
        return asyncio.run(AsyncClient(str(path)).call(A, idempotency_key="k"))

    with pytest.raises(failures.Unavailable) as caught:
        call()
    timer.join()
    assert caught.value.ran
    time.sleep(0.3)
    assert len((tmp_path / "ran").read_text()) == 1


def test_an_async_client_survives_its_loop(broker):
    tools = AsyncClient(broker.path)
    for n in range(3):
        assert asyncio.run(tools.call(ECHO, {"n": n})).output == {"n": n}


def test_an_async_client_that_cannot_log_in_leaves_no_connection(tmp_path):
    async def main():
        async def silent(reader, writer):
            await reader.read()
            writer.close()

        server = await asyncio.start_unix_server(silent, str(tmp_path / "s.sock"))
        tools = AsyncClient(str(tmp_path / "s.sock"), token="x", connect_timeout=0.1)
        before = psutil.Process().num_fds()
        for _ in range(5):
            with pytest.raises(failures.CallFailed) as caught:
                await tools.call(ECHO)
            assert not caught.value.ran
        await asyncio.sleep(0.1)
        assert psutil.Process().num_fds() <= before + 1
        server.close()

    asyncio.run(main())


def test_white_space_and_odd_members_in_replies_are_read(start, tmp_path):
    good = '{"ok":true,\\r"status":"OK","output_json":"1"}\\n'
    odd = '{"ok":false,"type":"timeout","text":"x","self":1,"aid":"y","error":"late"}\\n'
    body = f"sys.stdout.write('{good}' if aid == 'AID.A.v1' else '{odd}')\nsys.stdout.flush()"
    broker = start(config=toolhost("h", binary=scripted(tmp_path, body)))
    with Client(broker.path) as tools:
        assert tools.call(A).output == 1
        assert [reply.output for reply in tools.call_many([(A, {}), (A, {})])] == [1, 1]
        with pytest.raises(failures.Timeout, match="late") as caught:
            tools.call(B)
        assert caught.value.more == {"text": "x", "self": 1}
