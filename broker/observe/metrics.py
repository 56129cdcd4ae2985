"""The broker in Prometheus' text: asked of the live broker at each scrape, nothing is kept twice."""

from __future__ import annotations

import os
import platform
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from broker import __version__
from broker.observe import status
from broker.observe.latency import BOUNDS, counted
from broker.policy.breaker import State
from broker.pool import process
from broker.runtimes.python.nursery import LEAVING, RUNNING, SERVER, WAITING

if TYPE_CHECKING:
    from prometheus_client import Metric

    from broker.server import Broker

BREAKERS = {State.CLOSED: 0, State.PROBING: 1, State.OPEN: 2}
EDGES = [*(f"{bound:g}" for bound in BOUNDS), "+Inf"]
EVENTS = {  # of a pool, as its counts call them
    "started": ("starts", "Toolhosts that were started."),
    "crash": ("crashes", "Toolhosts that died while they had a call."),
    "timeout": ("timeouts", "Calls that ran into their timeout."),
    "violation": ("violations", "Times that a toolhost broke the protocol."),
    "moved": ("moved_calls", "Calls that were given to another toolhost, because theirs died before it came to them."),
    "recycled": ("recycled", "Toolhosts that were replaced in good time, for their age, size or number of calls."),
    "forked": ("forks", "Processes that an app's fork server has forked for calls."),
    "died": ("deaths", "Fork servers that died."),
}
STATES = {"toolhost": ("starting", "ready", "leaving"), "python": (SERVER, WAITING, RUNNING, LEAVING)}


def exposition(broker: Broker) -> tuple[bytes, str]:
    """The body, and its content type."""
    from prometheus_client import CONTENT_TYPE_LATEST
    from prometheus_client.exposition import generate_latest

    return generate_latest(_Live(broker)), CONTENT_TYPE_LATEST


class _Live:
    """What prometheus_client calls a collector."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker

    def collect(self) -> Iterator[Metric]:
        self._broker.dispatcher.catch_up_all()
        yield from self._tools()
        yield from self._pools()
        yield from self._policy()
        yield from self._queue()
        yield from self._load()
        yield from self._commands()
        yield from self._process()

    def _tools(self) -> Iterator[Metric]:
        from prometheus_client.core import HistogramMetricFamily

        tools = [tool for tool in self._broker.registry if tool.calls]
        latencies = {tool: counted(tool) for tool in tools}
        spent = {tool: sum(seconds for _, seconds in latencies[tool].values()) * 1000 for tool in tools}
        failed = ((tool.name, tool.failed) for tool in tools)
        yield _counter(
            "machina_tool_ok", "Calls that went well.", "aid", ((tool.name, tool.calls - tool.failed) for tool in tools)
        )
        yield _counter("machina_tool_fail", "Calls that failed: errors of the tool's own, and faults.", "aid", failed)
        yield _counter(
            "machina_tool_duration_ms",
            "Milliseconds from when toolhosts were given calls until their replies were taken, of all calls together.",
            "aid",
            ((tool.name, spent[tool]) for tool in tools),
        )
        histogram = HistogramMetricFamily(
            "broker_call_seconds",
            "From when a toolhost was given a call until its reply was taken, by the face that the call came through.",
            labels=("aid", "face"),
        )
        for tool in tools:
            for face, (buckets, seconds) in latencies[tool].items():
                histogram.add_metric((tool.name, face), _cumulative(buckets), seconds)
        yield histogram
        yield _gauge(
            "broker_breaker_state",
            "0 closed, 1 half open, 2 open.",
            "aid",
            ((tool.name, BREAKERS[tool.breaker.state]) for tool in tools),
        )
        yield _counter(
            "broker_breaker_trips",
            "Times that the tool's breaker has opened.",
            "aid",
            ((tool.name, tool.breaker.trips) for tool in tools),
        )

    def _pools(self) -> Iterator[Metric]:
        from prometheus_client.core import GaugeMetricFamily

        pools = status.pools(self._broker, time.monotonic())
        processes = GaugeMetricFamily("broker_pool_processes", "Toolhosts, by state.", labels=("pool", "state"))
        sums: Counter[tuple[str, str]] = Counter()  # several of one name (pools of two toolhosts may have it) are one
        memory: defaultdict[str, float] = defaultdict(float)
        cpu: defaultdict[str, float] = defaultdict(float)
        for pool in pools:
            name: str = pool["name"]
            memory[name] += 0.0
            cpu[name] += 0.0
            sums.update({(name, state): 0 for state in STATES[pool["kind"]]})
            sums.update((name, host["state"]) for host in pool["processes"])
            for host in pool["processes"]:
                memory[name] += process.resident(host["pid"])
                cpu[name] += process.processor_seconds(host["pid"])
        for labels, number in sums.items():
            processes.add_metric(labels, number)
        yield processes
        yield _gauge("broker_pool_resident_bytes", "Memory of its toolhosts.", "pool", memory.items())
        yield _gauge("broker_pool_cpu_seconds", "Processor time of its toolhosts that are alive.", "pool", cpu.items())
        up = ((pool["name"], pool["state"] != "broken") for pool in pools)
        yield _gauge("broker_pool_up", "0 where its toolhosts do not start.", "pool", up)
        waiting = ((pool["name"], pool["waiting"]) for pool in pools)
        yield _gauge("broker_pool_waiting_calls", "Calls in its queue.", "pool", waiting)
        for key, (name, words) in EVENTS.items():
            counted = [(pool["name"], pool["counts"][key]) for pool in pools if key in pool["counts"]]
            yield _counter(f"broker_pool_{name}", words, "pool", counted)

    def _policy(self) -> Iterator[Metric]:
        broker, dispatcher = self._broker, self._broker.dispatcher
        cache, leases = dispatcher.cache, dispatcher.leases.gc(time.monotonic())
        yield _one("broker_cache_entries", "Keys that are kept.", len(cache))
        yield _one("broker_cache_bytes", "Bytes of their answers.", cache.size)
        yield _total(
            "broker_cache_hits", "Calls that were answered with what is kept.", cache.hits + broker.core.board.hits
        )
        yield _one("broker_leases_active", "Leases that can be used.", leases.active)
        yield _total("broker_leases_issued", "Leases that were issued.", leases.issued)
        yield _total("broker_leases_consumed", "Leases that were used.", leases.consumed)
        yield _total("broker_leases_rejected", "Times that a lease opened nothing.", leases.rejected)
        yield _one("broker_sessions", "Sessions that have a state.", len(dispatcher.sessions))
        yield _counter(
            "broker_refused_calls", "Calls that the broker answered itself.", "code", dispatcher.refused.items()
        )
        paused = ((name, 1) for name in sorted(broker.equipment.pauses.names))
        yield _gauge("broker_paused", "1: calls of it wait until they are resumed.", "name", paused)

    def _queue(self) -> Iterator[Metric]:
        """Of durable calls: how many the cluster has, as it was a moment ago; what this broker did with them."""
        if self._broker.cluster is None:
            return
        brief = self._broker.cluster.queue.brief()
        yield _one("broker_queue_calls", "Calls in the cluster's queue, those that run included.", brief["calls"])
        yield _one("broker_queue_dead_calls", "Calls among the cluster's dead.", brief["dead"])
        yield _one("broker_queue_running_here", "Queued calls that this broker has now.", brief["running_here"])
        ended = ((how, brief[how]) for how in ("done", "dead_here", "refused"))
        yield _counter("broker_queue_ended", "Queued calls that this broker is done with.", "how", ended)

    def _load(self) -> Iterator[Metric]:
        broker = self._broker
        room = broker.dispatcher.waiting
        connections = {"machina": len(broker.face.connections)}
        if broker.http is not None:
            connections["http"] = broker.http.connections()
        yield _gauge("broker_connections", "Callers that are connected.", "face", connections.items())
        waiting = sum(pool.queue.lines for pool in broker.equipment.everything()) + room.calls
        yield _one("broker_waiting_calls", "Calls that wait for a toolhost, or for their session.", waiting)
        yield _one("broker_queued_bytes", "Bytes of calls that wait.", broker.core.queued_bytes + room.size)

    def _commands(self) -> Iterator[Metric]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        if self._broker.utp is None:
            return
        words = "Commands of CommonGround's agents, by what became of them."
        ended = CounterMetricFamily("broker_utp_commands", words, labels=("target", "outcome"))
        in_hand = GaugeMetricFamily("broker_utp_in_hand", "Commands that are being worked on.", labels=("target",))
        up = GaugeMetricFamily("broker_utp_up", "0 where a target does not get its commands.", labels=("target",))
        for one in self._broker.utp.status()["targets"]:
            for outcome, count in one["counts"].items():
                ended.add_metric((one["target"], outcome), count)
            in_hand.add_metric((one["target"],), one["in_hand"])
            up.add_metric((one["target"],), one["state"] == "serving")
        yield from (ended, in_hand, up)

    def _process(self) -> Iterator[Metric]:
        uptime = time.monotonic() - self._broker.started
        yield _one("process_resident_memory_bytes", "Memory of the broker itself.", process.resident(os.getpid()))
        yield _total("process_cpu_seconds", "Processor time of the broker itself.", time.process_time())
        yield _one("process_open_fds", "Descriptors that the broker has open.", len(os.listdir("/proc/self/fd")))
        yield _one("broker_uptime_seconds", "Since when it has been running.", uptime)
        versions = {"version": __version__, "python": platform.python_version()}
        from prometheus_client.core import InfoMetricFamily

        yield InfoMetricFamily("broker_build", "Which broker this is.", versions)


def _cumulative(buckets: Iterable[int]) -> list[tuple[str, float]]:
    total, found = 0, []
    for edge, count in zip(EDGES, buckets, strict=True):
        total += count
        found.append((edge, float(total)))
    return found


def _counter(name: str, words: str, label: str, values: Iterable[tuple[str, float]]) -> Metric:
    from prometheus_client.core import CounterMetricFamily

    return _filled(CounterMetricFamily(name, words, labels=(label,)), values)


def _gauge(name: str, words: str, label: str, values: Iterable[tuple[str, float]]) -> Metric:
    from prometheus_client.core import GaugeMetricFamily

    return _filled(GaugeMetricFamily(name, words, labels=(label,)), values)


def _filled(family: Any, values: Iterable[tuple[str, float]]) -> Metric:
    """Several of one name (pools of two toolhosts may have the same) are one."""
    sums: defaultdict[str, float] = defaultdict(float)
    for name, value in values:
        sums[name] += value
    for name, value in sums.items():
        family.add_metric((name,), value)
    metric: Metric = family
    return metric


def _one(name: str, words: str, value: float) -> Metric:
    from prometheus_client.core import GaugeMetricFamily

    return GaugeMetricFamily(name, words, value)


def _total(name: str, words: str, value: float) -> Metric:
    from prometheus_client.core import CounterMetricFamily

    return CounterMetricFamily(name, words, value)
