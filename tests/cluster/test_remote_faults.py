"""--remote when connections break, brokers lie and callers do not read: nothing runs twice, and each call is answered."""

from __future__ import annotations

import json
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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
