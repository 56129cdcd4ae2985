"""`broker queue`: results of queued calls; what waits, what is dead, and back with it."""

from __future__ import annotations

import argparse
import time
from typing import Any

import msgspec

from broker.cli.common import Trouble, add_socket, fail, operate, socket_path, subcommand, table
from broker.cli.enqueue import show

EPILOG = """\
examples:
  broker queue result order-17              what has come of a call of yours
  broker queue status                       what waits and runs, by tool
  broker queue dead                         what did not end well, and why
  broker queue requeue order-17             once more, as if it had just come
  broker queue requeue --all                all that have certainly not run
  broker queue requeue order-17 --force     one that may have run: that runs it again

`broker enqueue` puts calls into the queue. `status`, `dead` and `requeue` are the operator's.

Exit codes: 0 done; 1 it failed, the reason is on stderr; 2 wrong usage; 3 there is no result yet.
"""
LONGEST = 60  # characters of a reason in the table


def add(commands: Any) -> None:
    parser = subcommand(
        commands,
        "queue",
        "results of queued calls; what waits, what is dead",
        "Looks after the calls that NATS keeps for the cluster.",
        EPILOG,
    )
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    result = actions.add_parser("result", help="what has come of a call: its output, as `broker call` prints it")
    result.add_argument("id", metavar="ID")
    result.add_argument("--wait", metavar="SECONDS", nargs="?", type=float, const=float("inf"), default=0.0)
    result.set_defaults(run=_result)
    status = actions.add_parser("status", help="what waits and runs, by tool")
    status.add_argument("--json", action="store_true", help="for machines")
    status.set_defaults(run=_status)
    dead = actions.add_parser("dead", help="calls that did not end well, the oldest first")
    dead.add_argument("--limit", metavar="N", type=int, default=100, help="at most so many (default: 100)")
    dead.add_argument("--json", action="store_true", help="for machines: all that is known, the original included")
    dead.set_defaults(run=_dead)
    requeue = actions.add_parser("requeue", help="put dead calls back")
    requeue.add_argument("id", metavar="ID", nargs="?", help="one of them")
    requeue.add_argument("--all", action="store_true", help="all of them")
    requeue.add_argument("--force", action="store_true", help="also what may have run: that runs it again")
    requeue.add_argument("--lease", metavar="TOKEN", help="a new lease token, where the old one has expired")
    requeue.set_defaults(run=_requeue)
    for action in (result, status, dead, requeue):
        add_socket(action)


def _result(arguments: argparse.Namespace) -> int:
    try:
        return show(socket_path(arguments), arguments.id, arguments.wait)
    except Trouble as error:
        return fail(error)


def _status(arguments: argparse.Namespace) -> int:
    try:
        queue = operate(arguments, "_queue.status")["queue"]
    except Trouble as error:
        return fail(error)
    if arguments.json:
        print(msgspec.json.encode(queue).decode())
        return 0
    print(f"{queue['queued']} queued, {queue['running']} running, {queue['dead']} dead; {queue['bytes']} bytes")
    if queue["tools"]:
        rows = [
            (one["tool"], one["queued"], one["running"], "" if one["brokers"] else "no broker takes them")
            for one in queue["tools"]
        ]
        print(table(rows, ("TOOL", "QUEUED", "RUNNING", "")))
    if queue["others"]:
        print(f"{queue['others']} for tools that no broker knows")
    return 0


def _dead(arguments: argparse.Namespace) -> int:
    try:
        dead = operate(arguments, "_queue.dead", limit=arguments.limit)["dead"]
    except Trouble as error:
        return fail(error)
    if arguments.json:
        print(msgspec.json.encode(dead).decode())
        return 0
    rows = [
        (
            time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(one["time"])),
            one["call_id"],
            one["tool"],
            one["type"],
            "may have run" if one["may_have_run"] else "has not run",
            one["reason"] if len(one["reason"]) <= LONGEST else one["reason"][: LONGEST - 1] + "…",
        )
        for one in dead
    ]
    print(table(rows, ("DIED", "ID", "TOOL", "TYPE", "", "REASON")) if rows else "no dead calls")
    return 0


def _requeue(arguments: argparse.Namespace) -> int:
    if bool(arguments.id) == arguments.all:
        return fail(ValueError("say which: an ID (`broker queue dead` shows them), or --all"), 2)
    members: dict[str, Any] = {"all": True} if arguments.all else {"call_id": arguments.id}
    if arguments.lease is not None:
        members["lease"] = arguments.lease
    try:
        done = operate(arguments, "_queue.requeue", force=arguments.force, **members)
    except Trouble as error:
        return fail(error)
    print(f"requeued {len(done['requeued'])}")
    for one in done["left"]:
        print(f"left where it is: {one['call_id']}: {one['why']}")
    return 0
