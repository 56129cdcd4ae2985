"""--remote when connections break, brokers lie, callers do not read: nothing runs twice, each call is answered."""

from __future__ import annotations

import json
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from broker.faces.nats.recall import MOST_BYTES, Recall
from tests.cluster.test_remote import ECHO, demo, front, names, remote
from tests.support.cluster import Crowd, keyed
from tests.support.event_tools import Tools
from tests.support.line import Line
from tests.support.load import LEASED, LEDGER
from tests.support.nats import Client, NatsServer


@pytest.fixture
def crowd(tmp_path: Path, where: dict[str, str], nats: NatsServer) -> Iterator[Crowd]:
    brokers = Crowd(tmp_path / "brokers", where["include"], nats)
    yield brokers
    brokers.end()


def test_a_call_is_not_moved_while_its_broker_has_yet_to_come_back_to_nats(crowd, nats):
    pair = [crowd.start(), crowd.start()]
    here = front(crowd)
    here.eventually(lambda: len(remote(here)) == 2)
    with here.wire() as wire:
        wire.send({"aid": LEDGER, "input_json": "slow 2500 ok"})
        here.eventually(lambda: crowd.runs()["slow"] == 1)
        for one in pair:
            one.process.send_signal(signal.SIGSTOP)
        nats.kill()
        nats.start()
        here.eventually(lambda: here.status()["cluster"]["connected"])
        time.sleep(0.5)
        for one in pair:
            one.process.send_signal(signal.SIGCONT)
        assert wire.reply()["ok"]
    assert crowd.runs() == {"slow": 1}


def test_whoever_was_cut_off_is_asked_again_for_what_it_has_said_meanwhile(crowd, nats):
    """Only the broker that runs the call loses its connection: nobody but it knows."""
    with Line(nats.port) as line:
        crowd.start(url=line.url)
        here = front(crowd)
        with here.wire() as wire:
            wire.send({"aid": LEDGER, "input_json": "cut 500 ok"})
            here.eventually(lambda: crowd.runs()["cut"] == 1)
            line.from_held = line.to_held = True  # its reply goes into a connection that breaks
            time.sleep(0.8)
            line.cut()
            line.from_held = line.to_held = False
            assert wire.reply()["ok"]
            assert crowd.runs() == {"cut": 1}


def test_what_a_broker_may_have_forgotten_is_never_said_not_to_have_come():
    recall = Recall()
    assert recall.certain(40.0), "nothing was forgotten"
    recall.begin("a")
    recall.end("a", b"x" * MOST_BYTES, None)
    recall.begin("b")
    recall.end("b", b"x", None)
    assert not recall.knows("a")
    assert recall.knows("b")
    assert not recall.certain(1.0)


def test_a_server_that_was_frozen_makes_nobody_gone(crowd, nats):
    one, other = crowd.start(), crowd.start()
    here = front(crowd)
    here.eventually(lambda: len(remote(here)) == 2)
    with here.wire() as wire, one.wire() as first, other.wire() as second:
        wire.send({"aid": LEDGER, "input_json": "far 8000 ok"})
        first.send(keyed("k", 8000))
        one.eventually(lambda: len(crowd.runs()) == 2)
        second.send(keyed("k", 8000))
        time.sleep(0.3)
        nats.pause()
        time.sleep(6.0)
        nats.go_on()
        assert first.reply()["ok"]
        assert wire.reply()["ok"]
        assert second.reply()["ok"]
    assert crowd.runs() == {"far": 1, "k": 1}


class Liar:
    """A member of the cluster, as far as anybody can hear, that says what a test wants it to."""

    def __init__(self, url: str, endpoints: list[dict[str, str]], said: list[tuple[bytes, dict[str, str]]]) -> None:
        self.client = Client(url)
        self.heard: list[str] = []
        self._said = said
        self._info = {
            "type": "io.nats.micro.v1.info_response",
            "name": "toolhost-broker",
            "id": "liar",
            "version": "0.0.1",
            "metadata": {"cluster": "default"},
            "endpoints": [{"name": "x", "subject": "x", "queue_group": "q", "metadata": one} for one in endpoints],
        }
        self.client.run(self._join())

    async def _join(self) -> None:
        nats = self.client.nats

        async def info(message: Any) -> None:
            await message.respond(json.dumps(self._info).encode())

        async def call(message: Any) -> None:
            self.heard.append(message.headers["Broker-Call"])
            for payload, headers in self._said:
                await nats.publish(message.reply, payload, headers=headers or None)

        await nats.subscribe("$SRV.INFO.toolhost-broker", cb=info)
        await nats.subscribe("broker_calls.default.liar", cb=call)
        await self.beat(b'{"load":"heavy","changes":-1,"draining":7}')

    async def beat(self, words: bytes) -> None:
        await self.client.nats.publish("broker_members.default.liar", words)

    def close(self) -> None:
        self.client.close()


def known(aid: str, **more: Any) -> dict[str, str]:
    return {"tool": aid, "timeout": "30", "info": json.dumps({"aid": aid, **more})}


def test_a_broker_that_speaks_nonsense_hurts_only_its_own_calls(crowd, nats, where):
    wrong = [
        {"tool": "T.NAN", "timeout": "nan", "info": "{}"},
        known("_status"),
        known("T.SCHEMA", input_schema={"type": "nonsense"}),
        known("T.LIES"),
        known("T.LIVE", live=True),
    ]
    said = [(b"[1]", {}), (b'{"a":\n1}', {}), (b'{"ok":true,"status":"OK","output_json":"{}"', {})]
    liar = Liar(nats.url, wrong, said)
    crowd.start(config=demo(where))
    here = front(crowd, ECHO)
    here.eventually(lambda: "T.LIES" in names(here))
    assert "T.NAN" not in names(here)
    assert "_status" not in names(here)
    assert here.ask({"aid": "_status"})["type"] == "forbidden"
    beating = threading.Thread(target=lambda: [liar.client.run(liar.beat(b"?")) or time.sleep(0.5) for _ in range(8)])
    beating.start()
    with here.wire() as wire:
        for n, tool in enumerate(("T.LIES", "T.LIES", "T.SCHEMA", "T.LIVE")):
            wire.send({"aid": tool, "inputs": {}, "id": n})
            reply = wire.reply()
            assert (reply["id"], reply["type"]) == (n, "bad_reply")
        refused = {"error": 7, "type": "overloaded", "kind": 1, "ran": 2, "text": 3}
        for words in (b"nonsense", b'"x"', json.dumps(refused).encode()):
            liar._said[:] = [(words, {"Broker-Ran": "1"})]
            assert wire.ask({"aid": "T.LIES", "inputs": {}})["ok"] is False
        assert wire.ask({"aid": ECHO, "input_json": "[1]"})["output_json"] == "[1]"
    beating.join()
    liar.close()


def test_a_token_opens_a_tool_elsewhere_where_only_that_broker_asks_for_one(crowd):
    crowd.start(env={"MACHINA_LEASE_ENFORCE": "1"})
    here = front(crowd, LEASED)
    call = {"aid": LEASED, "input_json": "leased 0 ok"}
    assert here.ask(call)["type"] == "lease_required"
    with here.operator() as wire:
        token = wire.ask({"aid": "_lease.issue", "tool_aid": LEASED})["token_id"]
    assert here.ask({**call, "_lease_token": token})["ok"]
    assert here.ask({**call, "_lease_token": token})["reason"] == "lease already consumed"
    assert crowd.runs()["leased"] == 1


def test_a_large_call_that_a_broker_would_not_run_goes_to_the_next_one(crowd, where):
    one, _ = crowd.start(config=demo(where)), crowd.start(config=demo(where))
    here = front(crowd, ECHO)
    here.eventually(lambda: len(remote(here)) == 2)
    Path(one.process.args[-1]).write_text("")  # type: ignore[union-attr,index]
    text = json.dumps({"text": "y " * 600_000})
    with one.operator() as wire:
        assert wire.ask({"aid": "_reload"})["ok"]
    with here.wire() as wire:
        for n in range(4):
            wire.send({"aid": "AID.DEMO.WORD_COUNT.v1", "input_json": text, "id": n})
        assert [reply for reply in wire.replies(4) if not reply["ok"]] == []


def test_a_caller_that_does_not_read_its_events_stops_the_tool_that_is_elsewhere(crowd, tmp_path):
    body = 'for n in range(100000):\n  say("log", level="info", message="x" * 1000)\nsay("done", ok=True)'
    crowd.start(config=Tools(tmp_path).tool("chatty", body, timeout_seconds=60.0), tools=False)
    here = front(crowd, "chatty")
    before = psutil.Process(here.process.pid).memory_info().rss
    with here.wire() as wire:
        wire.send({"aid": "chatty", "id": 1, "stream": True, "inputs": {}})
        wire.reply()
        time.sleep(3.0)
        grown = psutil.Process(here.process.pid).memory_info().rss - before
        assert grown < 30_000_000, grown
        lines = 1
        while "event" in wire.reply():
            lines += 1
        assert lines == 100001


def test_tools_that_are_too_many_for_one_message_are_known_all_the_same(crowd, tmp_path):
    script = tmp_path / "seven"
    script.write_text('#!/bin/sh\necho \'{"ok":true,"status":"OK","output_json":"7"}\'\n')
    script.chmod(0o755)
    config = ""
    for n in range(12):
        config += f'[[oneshot]]\nname = "T.{n}"\ncommand = ["{script}"]\nside_effects = ["exec"]\n'
        config += f'[[tool]]\nname = "T.{n}"\ndescription = "{"x" * 100_000}"\n'
    crowd.start(config=config, tools=False)
    here = front(crowd, "T.11")
    assert {tool["tier"] for tool in here.ask({"aid": "_tools"})["tools"]} == {2}
    assert here.ask({"aid": "T.3", "inputs": {}})["output_json"] == "7"
