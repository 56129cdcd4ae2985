"""What the parts of the hot path cost: `make bench`. Figures are of one batch of 64 lines, as a read brings them."""

from __future__ import annotations

import pytest

from broker._native import ffi, lib
from broker.model import Tool, ToolInfo, Work
from broker.policy.admission import Queue
from broker.policy.breaker import Breaker, Settings, State
from broker.policy.idempotency import Cache, key_of, new_entry
from broker.policy.leases import Leases

LINES = 64
PLAIN = b"".join(b'{"aid":"AID.DEMO.ECHO.v1","input_json":"{\\"n\\":%d}"}\n' % n for n in range(LINES))
WITH_IDS = b"".join(b'{"id":%d,"aid":"AID.DEMO.ECHO.v1","input_json":"{\\"n\\":%d}"}\n' % (n, n) for n in range(LINES))
IDS = b"".join(b"%d\n" % n for n in range(LINES))
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


def test_frame_a_megabyte(benchmark, wire):
    """64 lines of 16 KB: of short ones, the calls into C from here would cost more than the framing."""
    framer, _, _, _ = wire
    lines = (b"x" * (16 * 1024 - 1) + b"\n") * LINES
    line = ffi.new("tb_line *")
    counts = []

    def frame():
        lib.tb_framer_feed(framer, lines, len(lines))
        found = 0
        while lib.tb_framer_next(framer, line) == lib.TB_LINE:
            found += 1
        counts.append(found)

    benchmark(frame)
    assert set(counts) == {LINES}


@pytest.mark.parametrize("ids", [b"", IDS], ids=["plain", "ids spliced in"])
def test_take_a_batch_of_replies(benchmark, wire, ids):
    framer, _, batch, _ = wire
    taken = ffi.new("tb_taken *")
    lines = REPLY * LINES

    def take():
        lib.tb_framer_feed(framer, lines, len(lines))
        lib.tb_take(framer, batch, LINES, b"", 0, ids or ffi.NULL, len(ids), 128, taken)

    benchmark(take)
    assert (taken.succeeded, taken.ids_used) == (LINES, len(ids))


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


def test_a_breaker_counts_a_success(benchmark):
    breaker = Breaker(Settings())
    benchmark(lambda: breaker.succeeded(1, 1.0))
    assert breaker.state is State.CLOSED


def test_a_breaker_trips_and_is_reset(benchmark):
    breaker = Breaker(Settings(in_a_row=1))

    def cycle():
        breaker.failed("crash", 1.0)
        breaker.reset()

    benchmark(cycle)
    assert breaker.trips > 0


class Somebody:
    """A caller with room for all of its replies."""

    def full(self, work):  # noqa: ARG002
        return False


def test_eight_callers_take_turns_in_the_queue(benchmark):
    """Figures are of 64 calls, each waiting on its own."""
    tool = Tool(0, ToolInfo("AID.X.v1"), None, 1.0, Breaker(Settings()))
    callers = [Somebody() for _ in range(8)]
    queue = Queue()
    works = [Work(tool, b"{}\n", 1, None, callers[n % 8], None, 1.0) for n in range(LINES)]

    def cycle():
        for work in works:
            queue.push(work, 1.0)
        (lane,) = queue
        while lane.lines:
            lane.pop(1)
        queue.turn(lane)

    benchmark(cycle)
    assert not queue
