"""`broker status`: pools, processes, queue, rates."""

from __future__ import annotations

import argparse
import time
from typing import Any

import msgspec

from broker.cli.common import Trouble, add_socket, fail, operate, subcommand, table

SHOWN = 5  # of the last errors; --json has more


def add(commands: Any) -> None:
    parser = subcommand(
        commands, "status", "show pools, processes, queue and rates", "Shows what a running broker is doing."
    )
    parser.add_argument("--json", action="store_true", help="for machines")
    add_socket(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    try:
        report = operate(arguments, "_status")
    except Trouble as error:
        return fail(error)
    if arguments.json:
        print(msgspec.json.encode(report).decode())
    else:
        print(_text(report))
    return 0


def _text(report: dict[str, Any]) -> str:
    state = "draining" if report["draining"] else "serving"
    lines = [
        f"broker {report['version']}, pid {report['pid']}, {state} on {report['socket']} "
        f"for {report['uptime_seconds']:g} s",
        f"{report['connections']} connections, {report['sessions']} sessions, {report['processes']} processes, "
        f"{report['waiting']} calls waiting, {report['calls_per_second']:g} calls/s",
    ]
    if report["paused"]:
        lines.append(f"paused: {', '.join(report['paused'])} (`broker resume NAME` lets it go)")
    if "cluster" in report:
        queue = report["cluster"]["queue"]
        lines.append(
            f"queue of the cluster: {queue['calls']} calls, {queue['running_here']} of them here, {queue['dead']} dead"
        )
    for pool in report["pools"]:
        size = f"pool {pool['name']}: {pool['state']}, {pool['min']} to {pool['max']} processes"
        if pool["kind"] == "python":
            size = f"app {pool['name']}: {pool['state']}, up to {pool['max']} calls at once"
        lines += ["", f"{size}  ({pool['source']})"]
        counts = [f"{key} {value}" for key, value in pool["counts"].items() if value]
        lines.append(f"  {pool['waiting']} waiting" + (f"; {', '.join(counts)}" if counts else ""))
        if pool["reason"]:
            lines.append(f"  last trouble: {pool['reason']}")
        rows = [
            (p["pid"], p["state"], p["calls"], p["in_flight"], p["age_seconds"], p["rss_mb"]) for p in pool["processes"]
        ]
        if rows:
            text = table(rows, ("PID", "STATE", "CALLS", "IN FLIGHT", "AGE S", "RSS MB"))
            lines += ["  " + line for line in text.splitlines()]
    if "utp" in report:
        lines += ["", *_utp(report["utp"])]
    if report["tools"]:
        lines += ["", _tools(report["tools"])]
    for tool in report["tools"]:
        if tool["breaker"] != "closed":
            lines.append(
                f"{tool['aid']}: next probe in {tool['next_probe_seconds']:g} s; last: {tool['breaker_reason']}"
            )
    if report["recent"]:
        lines += ["", "last errors:", *(f"  {_error(one)}" for one in report["recent"][-SHOWN:])]
    return "\n".join(lines)


def _utp(utp: dict[str, Any]) -> list[str]:
    """CommonGround's targets, and the commands that no agent hears of."""
    lines = [f"utp: {utp['store']['kind']} {utp['store']['place']}" + ("" if utp["store"]["ready"] else ", not there")]
    if utp["trouble"]:
        lines.append(f"  waiting: {utp['trouble']}")
    rows = []
    for one in utp["targets"]:
        counts = ", ".join(f"{name} {value}" for name, value in one["counts"].items())
        rows.append((one["target"], one["tool"], one["state"], one["in_hand"], counts, one["reason"]))
    text = table(rows, ("TARGET", "TOOL", "STATE", "IN HAND", "COUNTS", "REASON"))
    lines += ["  " + line.rstrip() for line in text.splitlines()]
    for one in utp["given_up"][-SHOWN:]:
        clock = time.strftime("%H:%M:%S", time.localtime(one["time"]))
        lines.append(f"  given up: {clock}  {one['subject']} (message {one['sequence']}): {one['reason']}")
    return lines


def _tools(tools: list[dict[str, Any]]) -> str:
    """A row for each face that a tool was called through; what is the tool's as a whole stands in the first one."""
    rows: list[tuple[Any, ...]] = []
    for tool in tools:
        mine, breaker = (tool["aid"], tool["calls"], tool["failed"]), tool["breaker"]
        for face, times in tool["latency"].items() or [("", {"p50_ms": "", "p99_ms": ""})]:
            rows.append((*mine, face, times["p50_ms"], times["p99_ms"], breaker))
            mine, breaker = ("", "", ""), ""
    return table(rows, ("TOOL", "CALLS", "FAILED", "FACE", "P50 MS", "P99 MS", "BREAKER"))


def _error(one: dict[str, Any]) -> str:
    clock = time.strftime("%H:%M:%S", time.localtime(one["time"]))
    times = f" ({one['count']} times)" if one["count"] > 1 else ""
    return f"{clock}  {one['tool']}  {one['code']}{times}: {one['reason']}"
