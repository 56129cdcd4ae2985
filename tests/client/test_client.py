"""The clients, blocking and asyncio, against real brokers, and what they do when those go away."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import uvloop

from broker import AsyncClient, Client
from broker.client import failures
from tests.support.command import broker_command
from tests.support.config import toolhost
from tests.support.toolhosts import scripted

ECHO, SLEEP, COUNTER = "AID.DEMO.ECHO.v1", "AID.DEMO.SLEEP.v1", "AID.DEMO.COUNTER.v1"


def tcp(broker):
    return f"127.0.0.1:{broker.ready.split('tcp:127.0.0.1:')[1].split()[0]}"


class Blocking:
    """The asyncio client with the blocking one's face, so that one test is for both."""

    def __init__(self, address, run, **more):
        self._run = run
        self._client = None
        self._arguments = (address, more)

    def __enter__(self):
        self._runner = self._run()
        self._runner.__enter__()
        self._client = AsyncClient(self._arguments[0], **self._arguments[1])
        return self

    def __exit__(self, *exc):
        self._runner.run(self._client.close())
        self._runner.__exit__(*exc)

    def call(self, *args, **kwargs):
        return self._runner.run(self._client.call(*args, **kwargs))

    def call_many(self, calls):
        return self._runner.run(self._client.call_many(calls))

    def tools(self):
        return self._runner.run(self._client.tools())


def on_uvloop():
    return asyncio.Runner(loop_factory=uvloop.new_event_loop)


KINDS = {
    "threads": Client,
    "asyncio": lambda address, **more: Blocking(address, asyncio.Runner, **more),
    "uvloop": lambda address, **more: Blocking(
        address, lambda: asyncio.Runner(loop_factory=uvloop.new_event_loop), **more
    ),
}


@pytest.fixture(params=KINDS)
def connect(request):
    return KINDS[request.param]


@pytest.mark.parametrize("way", ["unix", "tcp"])
def test_a_call_returns_the_output_and_failures_are_typed(broker, connect, way):
    with connect(broker.path if way == "unix" else tcp(broker)) as tools:
        assert tools.call(ECHO, {"n": [1, "é", None]}).output == {"n": [1, "é", None]}
        assert tools.call(ECHO, input_json=" 7").output_json == " 7"
        with pytest.raises(failures.NotFound) as caught:
            tools.call("AID.NO.v1")
        assert not caught.value.ran
        with pytest.raises(failures.Timeout, match=r"0\.2 s") as late:
            tools.call(SLEEP, {"ms": 5000}, timeout=0.2)
        assert late.value.ran
        with pytest.raises(failures.ToolError, match="oh no"):
            tools.call("AID.DEMO.FAIL.v1", {"error": "oh no"})
        with pytest.raises(failures.Crash):
            tools.call("AID.FAULT.EXIT.v1")
        with pytest.raises(failures.TooLarge):
            tools.call(ECHO, {"x": "x" * 11_000_000})
        assert len(tools.call(ECHO, {"x": "x" * 900_000}).output["x"]) == 900_000
        assert ECHO in {tool["aid"] for tool in tools.tools()}


def test_many_calls_are_under_way_at_once_and_come_back_in_order(broker, connect):
    with connect(broker.path) as tools:
        begin = time.monotonic()
        calls = [(ECHO, {"n": n}) for n in range(1000)]
        calls[500] = ("AID.NO.v1", {})
        results = tools.call_many(calls)
        assert time.monotonic() - begin < 5
    assert isinstance(results[500], failures.NotFound)
    assert [r.output["n"] for n, r in enumerate(results) if n != 500] == [n for n in range(1000) if n != 500]


def test_states_stay_with_their_client(broker, connect):
    def state(tools, op, **more):
        inputs = {"op": op, "slot": 3, "value": "mine"} if op == "put" else {"op": op, "slot": 3}
        return tools.call("AID.DEMO.STATE.v1", inputs, **more).output

    with connect(broker.path) as one, connect(broker.path) as two:
        state(one, "put", ds_state={"slots": {}})
        assert state(one, "get", ds_state={"delta": True})["found"]
        assert not state(two, "get", ds_state={"delta": True})["found"]
        assert not state(one, "get")["found"]


def test_keys_and_leases_travel(start, where, tmp_path, connect):
    broker = start(
        config="[lease]\nenforce = true\n"
        + toolhost("d", where["demo_plugin"], env={"MACHINA_WORK_DIR": str(tmp_path / "work")})
    )
    file = {"path": "a.txt", "text": "hi"}
    with connect(broker.path) as tools:
        with pytest.raises(failures.LeaseRequired) as caught:
            tools.call("AID.FILE.WRITE.v1", file)
        assert caught.value.more["tier"] == 1
        token = broker_command(tmp_path, "lease", "issue", "AID.FILE.WRITE.v1", "--socket", broker.path).stdout.strip()
        assert not tools.call("AID.FILE.WRITE.v1", file, lease_token=token, idempotency_key="k").idempotent_hit
        assert tools.call("AID.FILE.WRITE.v1", file, idempotency_key="k").idempotent_hit
        with pytest.raises(failures.LeaseRejected) as rejected:
            tools.call("AID.FILE.WRITE.v1", file, lease_token=token)
        assert rejected.value.more["reason"] == "lease already consumed"


def test_a_token_is_shown_on_tcp(start, where, tmp_path, connect):
    token = broker_command(tmp_path, "token", "new", "me").stdout.strip()
    broker = start("--plugin", where["demo_plugin"], "--tcp", "127.0.0.1:0")
    with connect(tcp(broker), token=token) as tools:
        assert tools.call(ECHO, {"n": 1}).output == {"n": 1}
    with connect(tcp(broker), token="tbk_wrong") as tools, pytest.raises(failures.Forbidden, match="no such token"):
        tools.call(ECHO)
    with connect(tcp(broker)) as tools, pytest.raises(failures.Forbidden, match="_auth"):
        tools.call(ECHO)


def test_nobody_there_is_said_in_words_and_nothing_ran(tmp_path, connect):
    with connect(str(tmp_path / "none.sock")) as tools, pytest.raises(failures.Unavailable) as caught:
        tools.call(ECHO)
    assert "is `broker serve` running?" in str(caught.value)
    assert not caught.value.ran


def test_a_broker_that_comes_back_is_found_again(start, where, connect):
    first = start("--plugin", where["demo_plugin"])
    with connect(first.path) as tools:
        tools.call(ECHO)
        first.stop()
        with pytest.raises(failures.Unavailable):
            tools.call(ECHO)
        second = start("--plugin", where["demo_plugin"])
        os.symlink(second.path, first.path)
        assert tools.call(ECHO, {"n": 1}).output == {"n": 1}


class Cutting(threading.Thread):
    """Stands before a broker, and cuts each connection behind its n-th request, as soon as that has been passed on."""

    def __init__(self, target, path, cut_behind):
        super().__init__(daemon=True)
        self._target, self._left = target, cut_behind
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(path)
        self._listener.listen()
        self.start()

    def run(self):
        while True:
            caller, _ = self._listener.accept()
            threading.Thread(target=self._serve, args=(caller,), daemon=True).start()

    def _serve(self, caller):
        with caller, socket.socket(socket.AF_UNIX) as broker, caller.makefile("rb") as lines:
            broker.connect(self._target)
            answers = broker.makefile("rb")
            for line in lines:
                broker.sendall(line)
                self._left -= 1
                if self._left == 0:
                    time.sleep(0.1)
                    return
                caller.sendall(answers.readline())


@pytest.mark.parametrize("keyed", [False, True])
def test_a_call_that_may_have_run_is_repeated_only_under_a_key(start, tmp_path, connect, keyed):
    body = 'open("ran", "a").write("x")\nsay(output_json="1")'
    broker = start(config=toolhost("h", binary=scripted(tmp_path, body), cwd=str(tmp_path)))
    path = str(tmp_path / "p.sock")
    Cutting(broker.path, path, 2)
    with connect(path) as tools:
        tools.call("AID.A.v1")
        if keyed:
            assert tools.call("AID.A.v1", idempotency_key="k").idempotent_hit
        else:
            with pytest.raises(failures.Unavailable, match="may have run") as caught:
                tools.call("AID.A.v1")
            assert caught.value.ran
        tools.call("AID.A.v1")
    assert len((tmp_path / "ran").read_text()) == 3


def test_threads_share_a_client(broker):
    def some(thread):
        return all(tools.call(ECHO, {"t": thread, "n": n}).output == {"t": thread, "n": n} for n in range(200))

    with Client(broker.path) as tools, ThreadPoolExecutor(8) as threads:
        assert all(threads.map(some, range(8)))
        assert len(tools._idle) <= 8


def test_a_forked_child_has_connections_of_its_own(broker):
    with Client(broker.path) as tools:
        tools.call(ECHO)
        pid = os.fork()
        if pid == 0:
            try:
                os._exit(0 if all(tools.call(ECHO, {"n": n}).output == {"n": n} for n in range(100)) else 1)
            except BaseException:
                os._exit(2)
        assert all(tools.call(ECHO, {"p": n}).output == {"p": n} for n in range(100))
        assert os.waitpid(pid, 0)[1] == 0


def test_a_cancelled_call_is_forgotten_and_the_connection_goes_on(broker):
    async def main():
        async with AsyncClient(broker.path) as tools:
            slow = asyncio.create_task(tools.call(SLEEP, {"ms": 300}))
            await asyncio.sleep(0.1)
            slow.cancel()
            with pytest.raises(asyncio.CancelledError):
                await slow
            replies = [await tools.call(ECHO, {"n": n}) for n in range(5)]
            await asyncio.sleep(0.4)
            replies.append(await tools.call(ECHO, {"n": 5}))
            assert not tools._connection.pending
            return [reply.output["n"] for reply in replies]

    assert asyncio.run(main()) == [0, 1, 2, 3, 4, 5]


def test_ctrl_c_ends_a_blocking_call(broker):
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job's is ignored
    with Client(broker.path) as tools:
        timer = threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGINT))
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            tools.call(SLEEP, {"ms": 5000})
        assert tools.call(ECHO, {"n": 1}).output == {"n": 1}


def test_a_refusal_at_the_door_is_passed_on(start, where, connect):
    broker = start("--plugin", where["demo_plugin"], env={"BROKER_SERVER_MAX_CONNECTIONS": "1"})
    with broker.wire() as wire:
        wire.ask({"aid": ECHO})
        with connect(broker.path) as tools, pytest.raises(failures.BrokerFault) as caught:
            tools.call(ECHO)
        assert "max_connections" in str(caught.value)
        assert not caught.value.ran


def test_every_row_of_the_table_has_its_exception():
    from broker import errors

    kinds = [value for value in vars(errors).values() if isinstance(value, errors.Kind)]
    assert len(kinds) == 16
    for kind in kinds:
        assert failures.BY_CODE[kind.code].kind is kind
        party = {"caller": failures.CallerFault, "broker": failures.BrokerFault, "tool": failures.ToolFault}
        assert issubclass(failures.BY_CODE[kind.code], party[kind.fault.value])
    assert json.dumps(sorted(failures.BY_CODE))
