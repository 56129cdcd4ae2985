"""What the parts of the hot path cost: `make bench`. Figures are of one batch of 64 lines, as a read brings them."""

from __future__ import annotations

import pytest

from broker._native import ffi, lib
from broker.model import Tool, ToolInfo, Work
from broker.policy.breaker import Breaker, Settings
from broker.policy.idempotency import Cache, key_of, new_entry
from broker.policy.leases import Leases

LINES = 64
PLAIN = b"".join(b'{"aid":"AID.DEMO.ECHO.v1","input_json":"{\\"n\\":%d}"}\n' % n for n in range(LINES))
WITH_IDS = b"".join(b'{"id":%d,"aid":"AID.DEMO.ECHO.v1","input_json":"{\\"n\\":%d}"}\n' % (n, n) for n in range(LINES))
REPLY = (
    b'{"ok":true,"status":"OK","output_json":"{\\"n\\":1}","error":"",'
    b'"ds_state":{"delta":true,"slots":{},"removed_slots":[]}}\n'
)


@pytest.fixture
def wire():
    framer = ffi.gc(lib.tb_framer_new(10 << 20), lib.tb_framer_free)
    tools = ffi.gc(lib.tb_tools_new(), lib.tb_tools_free)
    batch = ffi.gc(lib.tb_batch_new(), lib.tb_batch_free)
    lib.tb_tools_put(tools, b"AID.DEMO.ECHO.v1", 16, 0)
    lib.tb_tools_open(tools, 0, 1)
    return framer, tools, batch, ffi.new("tb_view *")


@pytest.mark.parametrize("lines", [PLAIN, WITH_IDS], ids=["plain", "ids"])
def test_scan_a_batch(benchmark, wire, lines):
    framer, tools, batch, view = wire

    def scan():
        lib.tb_framer_feed(framer, lines, len(lines))
        lib.tb_scan(framer, tools, batch, 4096, 128, view)

    benchmark(scan)
    assert view.count == 1


def test_take_a_batch_of_replies(benchmark, wire):
    framer, _, batch, _ = wire
    taken = ffi.new("tb_taken *")
    lines = REPLY * LINES

    def take():
        lib.tb_framer_feed(framer, lines, len(lines))
        lib.tb_take(framer, batch, LINES, b"", 0, ffi.NULL, 0, 128, taken)

    benchmark(take)
    assert taken.succeeded == LINES


def test_split_a_batch(benchmark):
    tool = Tool(0, ToolInfo("AID.X.v1"), None, 1.0, Breaker(Settings()))

    def split():
        Work(tool, PLAIN, LINES, None, None, None, 1.0).take(32)

    benchmark(split)


def test_a_keyed_call_through_the_cache(benchmark):
    cache = Cache(60.0, 1024, 1 << 26)
    numbers = iter(range(1 << 40))

    def call():
        key = key_of("uid:0", "AID.X.v1", str(next(numbers)))
        if cache.find(key, 1.0) is None:
            entry = new_entry(key)
            cache.begin(entry)
            cache.finish(entry, REPLY, 1.0)

    benchmark(call)


def test_a_lease_from_issue_to_use(benchmark):
    leases = Leases()

    def cycle():
        lease = leases.issue("AID.X.v1", 1, None, "uid:0", 1.0)
        leases.use(leases.reserve(lease.token, "AID.X.v1", 1, 2.0))

    benchmark(cycle)
