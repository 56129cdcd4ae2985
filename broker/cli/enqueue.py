"""`broker enqueue`: a call that outlives brokers; its id on stdout, or with --wait its output."""

from __future__ import annotations

import argparse
import sys
from typing import Any

import msgspec

from broker.cli.common import Trouble, Unreachable, add_call, add_socket, ask, call_of, fail, socket_path, subcommand

EPILOG = """\
examples:
  broker enqueue AID.DEMO.ECHO.v1 '{"hello":"world"}'          prints the call's id as soon as NATS has kept it
  broker enqueue AID.DEMO.ECHO.v1 '{}' --id order-17           again, and it is still one call
  broker enqueue AID.DEMO.SLEEP.v1 '{"ms":2000}' --wait        waits, then prints the output as `broker call` does
  broker queue result order-17                                 what has come of it, from any broker of the cluster
  broker queue status                                          what waits (the operator's)

The call waits on NATS until a broker of the cluster that has the tool can run it; it survives the death of brokers and
of NATS. It runs at most once: a call that may have run when its broker died is reported (crash), and is run again only
where an operator says so (`broker queue requeue ID --force`), or the tool's [[toolhost]] has it in `rerun`.

Exit codes: 0 it is queued, or with --wait the output is on stdout; 1 it is not, or the call failed; 2 wrong usage;
3 with --wait SECONDS, there is no result yet.
"""
ROUND_SECONDS = 60.0  # of waiting, then it is asked again
NOT_YET = 3


def add(commands: Any) -> None:
    parser = subcommand(
        commands,
        "enqueue",
        "queue a call that survives brokers and NATS",
        "Puts a call into the cluster's queue, which NATS keeps.",
        EPILOG,
    )
    add_call(
        parser,
        "the tool's name; one that no broker has yet may be queued, too",
        key="idempotency key, beside the id",
        lease="lease token; it has to be alive when the call runs",
        session="a session at the broker that runs it",
    )
    parser.add_argument(
        "--id", metavar="ID", help="the call's name: the same one is the same call (default: a new one)"
    )
    parser.add_argument(
        "--wait",
        metavar="SECONDS",
        nargs="?",
        type=float,
        const=float("inf"),
        help="for the result, so long (without a number: until there is one)",
    )
    add_socket(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    try:
        call = call_of(arguments)
    except ValueError as error:
        return fail(error, 2)
    if arguments.wait is not None and not arguments.wait >= 0:
        return fail(ValueError("--wait must be a number of seconds, or nothing"), 2)
    if arguments.id is not None:
        call["id"] = arguments.id
    try:
        path = socket_path(arguments)
        queued = put(path, call)
        if arguments.wait is None:
            print(queued["call_id"])
            if not queued["known"]:
                print(f"broker: no broker that is known here has {arguments.aid}: it waits for one", file=sys.stderr)
            return 0
        return show(path, queued["call_id"], arguments.wait)
    except Trouble as error:
        return fail(error)


def put(path: str, call: dict[str, Any]) -> dict[str, Any]:
    reply: dict[str, Any] = msgspec.json.decode(ask(path, msgspec.json.encode({"aid": "_enqueue", "call": call})))
    if not reply["ok"]:
        again = f"; its id is {reply['call_id']}" if "call_id" in reply else ""
        raise Unreachable(f"{reply.get('type')}: {reply.get('error')}{again}")
    return reply


def show(path: str, call_id: str, seconds: float) -> int:
    """The result, when there is one: as `broker call` would show it."""
    while True:
        wait = min(seconds, ROUND_SECONDS)
        asked = {"aid": "_result", "call_id": call_id, "wait_ms": wait * 1000}
        reply: dict[str, Any] = msgspec.json.decode(ask(path, msgspec.json.encode(asked)))
        if not reply["ok"]:
            raise Unreachable(f"{reply.get('type')}: {reply.get('error')}")
        if "result" in reply:
            return _shown(reply)
        seconds -= wait
        if seconds <= 0:
            hint = "" if reply.get("known", True) else "; no broker that is known here has its tool"
            print(f"broker: {call_id} is {reply['state']}, and has no result yet{hint}", file=sys.stderr)
            return NOT_YET


def _shown(reply: dict[str, Any]) -> int:
    result = reply["result"]
    succeeded = result.get("status", "OK" if result.get("ok") else "") == "OK"
    if succeeded:
        print(result.get("output_json", ""))
    else:
        kind = result.get("type", result.get("status", "error"))
        more = f" ({result['reason']})" if result.get("reason") else ""
        again = "; `broker queue requeue ID` puts it back" if reply["state"] == "dead" else ""
        print(f"broker: {kind}: {result.get('error', '')}{more}{again}", file=sys.stderr)
    return 0 if succeeded else 1
