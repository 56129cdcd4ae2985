"""Keys and leases when words to NATS are lost, slow or forgotten: nobody waits for ever, and nothing runs twice."""

from __future__ import annotations

import asyncio
import io
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from broker.bus import Bus
from broker.cluster.keys import Claim, Keys
from broker.cluster.kv import Away, Bucket
from broker.cluster.leases import SharedLeases
from broker.cluster.members import Members
from broker.observe.log import Log
from broker.policy.leases import CONSUMED, Lease, Leases
from tests.support.cluster import Crowd, keyed
from tests.support.line import Line
from tests.support.load import LEASED
from tests.support.nats import NatsServer


@pytest.fixture
def crowd(tmp_path: Path, where: dict[str, str], nats: NatsServer) -> Iterator[Crowd]:
    brokers = Crowd(tmp_path / "brokers", where["include"], nats)
    yield brokers
    brokers.end()


class Member:
    """A broker's part in the cluster, without the broker."""

    def __init__(self, url: str, patience: float = 1.0) -> None:
        self.log = io.StringIO()
        self.bus = Bus(url, "test", Log(self.log))
        self.members = Members(self.bus, "default")
        self.keys = Keys(Bucket(self.bus, "keys", 60.0, 1), self.members, 60.0, patience, Log(self.log))
        self.leases = SharedLeases(Bucket(self.bus, "leases", 60.0, 1), patience)
        self.bus.on_connect(self.keys.connected)

    async def claim(self, key: bytes = b"key") -> Any:
        async with asyncio.timeout(8):
            return await self.keys.claim(key, "T", lambda: True)

    async def __aenter__(self) -> Member:
        await self.bus.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.keys.stop(0.5)
        await self.leases.stop(0.5)
        await self.members.stop()
        await self.bus.stop()


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(scenario(), 30))


async def until(check: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not check():
            await asyncio.sleep(0.01)


async def hold(line: Line) -> None:
    """From now on what the server says waits."""
    line.from_held = True
    await asyncio.sleep(0.05)


async def start(claim: Claim) -> None:
    claim.may_start()
    await claim.settled()
    assert claim.started, claim.problem


def test_a_claim_whose_answer_was_lost_does_not_hold_its_key(nats):
    async def scenario() -> None:
        with Line(nats.port) as line:
            async with Member(line.url) as cut, Member(nats.url) as other:
                assert isinstance(await cut.claim(b"first"), Claim)  # the bucket is there
                await hold(line)  # what it says is heard, and it does not know
                with pytest.raises(Away):
                    await cut.claim()
                line.from_held = False
                assert isinstance(await other.claim(), Claim)

    run(scenario)


def test_a_claim_that_arrives_after_it_was_given_up_does_not_hold_its_key(nats):
    async def scenario() -> None:
        with Line(nats.port) as line:
            async with Member(line.url) as cut, Member(nats.url) as other:
                first = await cut.claim(b"first")
                claim = Claim(cut.keys, first.name.replace("0", "1"), "late", "T", 0)
                cut.keys.free(claim)
                await asyncio.sleep(0.3)
                late = cut.keys._written("claimed", "late", "T")
                kv = await other.bus.client.jetstream().key_value("keys")
                with pytest.raises(Exception, match="sequence"):
                    await kv.update(claim.name, late, last=0)

    run(scenario)


def test_calls_that_nats_never_heard_of_leave_nothing_behind(nats):
    async def scenario() -> None:
        async with Member(nats.url) as one:
            await one.claim(b"first")
            nats.kill()
            await until(lambda: not one.bus.connected)
            for n in range(3):
                with pytest.raises(Away):
                    await one.claim(str(n).encode())
            assert not one.keys._tasks
            nats.start()
            await until(lambda: one.bus.connected)

    run(scenario)


def test_a_call_that_runs_keeps_its_key_when_nats_comes_back_without_its_store(nats):
    async def scenario() -> None:
        async with Member(nats.url, 5.0) as one, Member(nats.url, 5.0) as other:
            claim = await one.claim()
            await start(claim)
            nats.kill()
            nats.forget()
            nats.start()
            await until(lambda: one.bus.connected and other.bus.connected)
            await until(lambda: not one.keys._tasks)
            waiting = asyncio.create_task(other.claim())
            await asyncio.sleep(0.3)
            assert not waiting.done(), "it runs elsewhere"
            one.keys.finish(claim, b'{"ok":true}')
            assert await waiting == b'{"ok":true}'

    run(scenario)


def test_what_came_of_a_call_is_kept_though_the_store_was_lost_while_it_ran(nats):
    async def scenario() -> None:
        async with Member(nats.url, 5.0) as one, Member(nats.url, 5.0) as other:
            claim = await one.claim()
            await start(claim)
            one.keys._running.clear()  # it ends before it could be said again
            nats.kill()
            nats.forget()
            nats.start()
            one.keys.finish(claim, b'{"ok":true}')
            await until(lambda: one.bus.connected and other.bus.connected and not one.keys._tasks)
            assert await other.claim() == b'{"ok":true}'

    run(scenario)


def test_a_lease_whose_taking_was_not_answered_comes_back(nats):
    async def scenario() -> None:
        with Line(nats.port) as line:
            async with Member(line.url) as cut, Member(nats.url) as other:
                lease = Leases().issue("T", 1, 60.0, "me", time.monotonic())
                await cut.leases.publish(lease)
                read = cut.leases._bucket.get

                async def read_then_hold(key: str, patience: float) -> Any:
                    found = await read(key, patience)
                    cut.leases._bucket.get = read  # type: ignore[method-assign]
                    await hold(line)
                    return found

                cut.leases._bucket.get = read_then_hold  # type: ignore[method-assign]
                with pytest.raises(Away):
                    await cut.leases.reserve(lease.token, "T", 1)
                assert await other.leases.reserve(lease.token, "T", 1) == CONSUMED
                line.from_held = False
                await until(lambda: not cut.leases._tasks)
                assert isinstance(await other.leases.reserve(lease.token, "T", 1), Lease)

    run(scenario)


def test_leases_that_were_used_do_not_fill_the_table_of_a_cluster(crowd):
    one = crowd.start(env={"MACHINA_LEASE_ENFORCE": "1"})
    with one.operator() as wire:
        tokens = [
            wire.ask({"aid": "_lease.issue", "tool_aid": LEASED, "ttl_ms": 300_000})["token_id"] for _ in range(20)
        ]
        for n, token in enumerate(tokens):
            assert one.ask({"aid": LEASED, "input_json": f"r{n} 0 ok", "_lease_token": token})["ok"]
        counts = wire.ask({"aid": "_lease.gc"})
        assert (counts["active"], counts["issued"], counts["consumed"]) == (0, 20, 20)
        assert one.status()["leases"]["active"] == 0


def test_a_shared_table_of_leases_is_never_full():
    leases = Leases(most=3)
    for _ in range(10):
        leases.issue("T", 1, 300.0, "me", 0.0, shared=True)
    assert leases.gc(0.0).active == 3


def test_two_brokers_that_race_for_keys_run_each_once(crowd):
    pair = [crowd.start(), crowd.start()]
    hits: list[int] = []

    def ask(broker: Any) -> None:
        with broker.wire(60) as wire:
            wire.send(*[keyed(f"k{n}", id=n) for n in range(500)])
            hits.append(sum("idempotent_hit" in reply for reply in wire.replies(500)))

    threads = [threading.Thread(target=ask, args=(pair[n % 2],)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sum(hits) == 1500
    assert set(crowd.runs().values()) == {1}
    assert len(crowd.runs()) == 500


def test_callers_who_hang_up_while_they_wait_leave_nothing(crowd):
    one, other = crowd.start(), crowd.start()
    with one.wire() as first:
        first.send(keyed("k", 1500))
        one.eventually(lambda: crowd.runs()["k"] == 1)
        for _ in range(20):
            with other.wire() as wire:
                wire.send(keyed("k", 1500), keyed("k", 1500))
        with other.wire() as wire:
            assert wire.ask(keyed("k", 1500))["idempotent_hit"]
        assert first.reply()["ok"]
    other.eventually(lambda: other.status()["cluster"]["waiting_calls"] == 0)
    assert other.status()["waiting"] == 0
    assert crowd.runs() == {"k": 1}
