"""What the broker says of itself: `broker tools` and `broker status`."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from broker import __version__
from broker.model import Tool
from broker.observe.latency import BOUNDS, summary
from broker.pool import process
from broker.runtimes.python.nursery import RUNNING
from broker.runtimes.python.server import Child

if TYPE_CHECKING:
    from broker.policy.leases import Lease
    from broker.pool.pool import Pool
    from broker.runtimes.python.app import App
    from broker.server import Broker


def tools(tools: Iterable[Tool]) -> list[dict[str, Any]]:
    return [
        {
            "aid": tool.name,
            "name": tool.info.name,
            "deterministic": tool.info.deterministic,
            "side_effects": tool.info.side_effects,
            "tags": tool.info.tags,
            "tier": tool.tier,
            "replay_inputs": tool.info.replay_inputs,
        }
        for tool in tools
    ]


def report(broker: Broker) -> dict[str, Any]:
    report: dict[str, Any] = broker.log.hidden.value(_report(broker))
    return report


def _report(broker: Broker) -> dict[str, Any]:
    now = time.monotonic()
    broker.dispatcher.catch_up_all()
    return {
        "version": __version__,
        "pid": os.getpid(),
        "uptime_seconds": round(now - broker.started, 1),
        "socket": broker.socket,
        "http": broker.http.url if broker.http is not None else "",
        "connections": len(broker.face.connections),
        "sessions": len(broker.dispatcher.sessions),
        "idempotency": {
            "entries": len(broker.dispatcher.cache),
            "bytes": broker.dispatcher.cache.size,
            "hits": broker.dispatcher.cache.hits + broker.core.board.hits,
        },
        "leases": broker.dispatcher.leases.gc(now)._asdict(),
        "leases_alive": leases(broker.dispatcher.leases.alive(now), now),
        "processes": broker.core.processes,
        "calls_per_second": round(broker.rate),
        "waiting": sum(pool.queue.lines for pool in broker.equipment.everything())
        + sum(room.calls for room in broker.dispatcher.rooms),
        "waiting_for_sessions": broker.dispatcher.waiting.calls,
        "queued_bytes": broker.core.queued_bytes + sum(room.size for room in broker.dispatcher.rooms),
        "draining": broker.dispatcher.draining,
        **({"cluster": broker.cluster.status()} if broker.cluster is not None else {}),
        **({"utp": broker.utp.status()} if broker.utp is not None else {}),
        "paused": sorted(broker.equipment.pauses.names),
        "refused": dict(broker.dispatcher.refused),
        "recent": broker.dispatcher.recent.report(),
        "bounds_seconds": BOUNDS,
        "tools": [
            {
                "aid": tool.name,
                "calls": tool.calls,
                "failed": tool.failed,
                "recent_us": round(tool.stats.cost * 1e6, 1),
                "latency": summary(tool),
                "paused": tool.paused,
                "breaker": tool.breaker.state.value,
                "breaker_trips": tool.breaker.trips,
                "breaker_reason": tool.breaker.last_reason,
                "next_probe_seconds": round(tool.breaker.wait(now), 1),
            }
            for tool in broker.registry
            if tool.calls
        ],
        "pools": pools(broker, now),
    }


def pools(broker: Broker, now: float) -> list[dict[str, Any]]:
    """Those of toolhosts, and the apps whose functions are tools."""
    found = [
        _pool(pool, runtime.source, runtime.problem, now)
        for runtime in broker.equipment.runtimes
        for pool in runtime.pools.values()
    ]
    return found + [_app(app, now) for app in broker.equipment.apps]


def leases(leases: Iterable[Lease], now: float) -> list[dict[str, Any]]:
    """Those that can be used; of their tokens only the fingerprints."""
    return [
        {
            "fingerprint": lease.fingerprint,
            "tool_aid": lease.tool,
            "tier": lease.tier,
            "expires_in_seconds": round(lease.expires - now, 1),
            "issuer": lease.issuer,
        }
        for lease in leases
    ]


def _pool(pool: Pool, source: str, problem: str, now: float) -> dict[str, Any]:
    return {
        "name": pool.name,
        "kind": "toolhost",
        "source": source,
        "state": "broken" if pool.starts.broken else "ready" if pool.ready else "starting",
        "reason": pool.starts.broken or problem or pool.last_reason,
        "min": pool.settings.min,
        "max": pool.settings.max,
        "waiting": pool.queue.lines,
        "counts": pool.counts,
        "processes": [
            {
                "pid": host.process.pid,
                "state": state,
                "calls": host.line.calls,
                "in_flight": host.line.inflight,
                "age_seconds": round(now - host.born, 1),
                "rss_mb": round(process.resident(host.process.pid) / (1024 * 1024), 1),
            }
            for state, hosts in (("ready", pool.ready), ("starting", pool.starting), ("leaving", pool.leaving))
            for host in hosts
        ],
    }


def _app(app: App, now: float) -> dict[str, Any]:
    """Its fork server, the children that wait for a call, and those that have one."""
    program, nursery = app.program, app.program.nursery
    processes = []
    for state, one in nursery.processes():
        pid, calls = (one.pid, one.calls) if isinstance(one, Child) else (one.process.pid, one.forks)
        row = {"pid": pid, "state": state, "calls": calls, "in_flight": int(state == RUNNING)}
        resident = round(process.resident(pid) / (1024 * 1024), 1)
        processes.append({**row, "age_seconds": round(now - one.born, 1), "rss_mb": resident})
    broken = nursery.starts.broken
    return {
        "name": app.root,
        "kind": "python",
        "source": program.python,
        "state": "broken" if broken else "ready" if processes else "starting",
        "reason": broken or program.last_reason,
        "min": 0,
        "max": app.settings.max,
        "waiting": app.queue.lines,
        "counts": {**nursery.counts, **program.calls},
        "processes": processes,
    }
