"""What brokers that died have left behind of calls that are over is swept away, and nothing else."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from broker.bus import Bus
from broker.cluster.members import Members
from broker.cluster.objects import Objects
from broker.cluster.queue.marks import Marks
from broker.cluster.queue.names import Names
from broker.cluster.queue.records import Letter
from broker.cluster.queue.results import Results
from broker.cluster.queue.store import Store
from broker.cluster.queue.sweep import Sweep
from broker.observe.log import Log
from broker.settings import Queue


def letter(call_id: str, sequence: int = 0) -> Letter:
    return Letter(call_id, "AID.X.v1", "uid:0", "", b"{}", sequence=sequence)


async def swept(url: str) -> dict[str, Any]:
    bus = Bus(url, "test", Log())
    names = Names("sweep")
    store = Store(bus, names, Queue(), 1)
    members = Members(bus, "sweep")
    await bus.start()
    try:
        results = Results(bus, names, Queue(), 1, 5.0)
        dead_broker, this = Marks(store, results, "gone", 5.0), Marks(store, results, members.me, 5.0)
        objects = Objects(bus, names.requests, 1, 5.0, None)
        waiting = letter("waiting")
        kept = await store.publish(names.call("AID.X.v1", waiting.name), b"", waiting.headers("w"), 5.0)
        await dead_broker.write(letter("waiting", kept.seq), "started", 0, 0, "")
        await dead_broker.write(letter("over", 99), "started", 0, 0, "")
        await this.write(letter("ours", 99), "started", 0, 0, "")
        for call in ("waiting", "over"):
            await objects.put(b"x" * 300_000, f"{letter(call).name}.")
        members._since = time.monotonic() - 60  # we have been listening for long enough
        sweep = Sweep(bus, names, store, members, objects, 5.0)
        young = await sweep.sweep(time.time() - 60)
        count = await sweep.sweep(time.time() + 60)
        await asyncio.sleep(0.3)
        marks = {one: (await this.find(letter(one).name))[0] is not None for one in ("waiting", "over", "ours")}
        left = [name.partition(".")[0] for name, _ in await objects.names()]
        return {"young": young, "count": count, "marks": marks, "objects": left == [letter("waiting").name]}
    finally:
        await members.stop()
        await bus.stop()


def test_only_what_belongs_to_no_call_is_swept(nats):
    found = asyncio.run(swept(nats.url))
    assert found == {
        "young": 0,
        "count": 2,
        "marks": {"waiting": True, "over": False, "ours": True},
        "objects": True,
    }
