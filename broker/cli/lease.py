"""`broker lease`: the operator gives out, lists and takes back single-use permissions."""

from __future__ import annotations

import argparse
import math
from typing import Any

from broker.cli.common import Trouble, add_socket, fail, operate, subcommand, table

EPILOG = """\
examples:
  TOKEN=$(broker lease issue AID.FILE.WRITE.v1)
  broker call AID.FILE.WRITE.v1 '{"path":"a.txt","text":"hi"}' --lease "$TOKEN"
  broker lease issue '*' --tier 1 --ttl 60

A lease opens one tool (or * within its tier) once, for 1 to 300 seconds. It is asked for where the broker was started
with MACHINA_LEASE_ENFORCE=1 or [lease] enforce = true.
"""


def add(commands: Any) -> None:
    parser = subcommand(
        commands,
        "lease",
        "issue, list, revoke single-use permissions",
        "The operator's: gives out, lists and takes back single-use permissions.",
        EPILOG,
    )
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    issue = actions.add_parser("issue", help="print a new token")
    issue.add_argument("aid", metavar="AID", help="the tool, or * for any tool within --tier")
    issue.add_argument("--tier", type=int, choices=range(4), help="default: the tool's own")
    issue.add_argument("--ttl", type=float, metavar="SECONDS", help="1 to 300 (default: 10)")
    issue.set_defaults(run=_issue)
    listing = actions.add_parser("list", help="show the leases that are alive")
    listing.set_defaults(run=_list)
    revoke = actions.add_parser("revoke", help="take one back, by token or fingerprint")
    revoke.add_argument("name", metavar="TOKEN")
    revoke.set_defaults(run=_revoke)
    gc = actions.add_parser("gc", help="forget expired leases and show the counts")
    gc.set_defaults(run=_gc)
    for action in (issue, listing, revoke, gc):
        add_socket(action)


def _issue(arguments: argparse.Namespace) -> int:
    members: dict[str, Any] = {"tool_aid": arguments.aid}
    if arguments.tier is not None:
        members["tier"] = arguments.tier
    if arguments.ttl is not None:
        if not math.isfinite(arguments.ttl):
            return fail(ValueError("--ttl must be a number of seconds, 1 to 300"), 2)
        members["ttl_ms"] = arguments.ttl * 1000
    try:
        print(operate(arguments, "_lease.issue", **members)["token_id"])
    except Trouble as error:
        return fail(error)
    return 0


def _list(arguments: argparse.Namespace) -> int:
    try:
        leases = operate(arguments, "_lease.list")["leases"]
    except Trouble as error:
        return fail(error)
    rows = [
        (one["fingerprint"], one["tool_aid"], one["tier"], one["expires_in_seconds"], one["issuer"]) for one in leases
    ]
    print(table(rows, ("FINGERPRINT", "TOOL", "TIER", "EXPIRES IN S", "ISSUER")))
    return 0


def _revoke(arguments: argparse.Namespace) -> int:
    try:
        print("revoked", operate(arguments, "_lease.revoke", name=arguments.name)["fingerprint"])
    except Trouble as error:
        return fail(error)
    return 0


def _gc(arguments: argparse.Namespace) -> int:
    try:
        counts = operate(arguments, "_lease.gc")
    except Trouble as error:
        return fail(error)
    print(", ".join(f"{counts[name]} {name}" for name in ("active", "issued", "consumed", "rejected")))
    return 0
