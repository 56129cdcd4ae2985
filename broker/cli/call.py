"""`broker call`: one call, its output on stdout."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Any

import msgspec

from broker.cli.common import Trouble, add_call, add_socket, ask, call_of, fail, printable, socket_path, subcommand

EPILOG = """\
examples:
  broker call AID.DEMO.ECHO.v1 '{"hello":"world"}'
  broker call AID.DEMO.SLEEP.v1 '{"ms":2000}' --timeout 1
  generate-input | broker call AID.DEMO.WORD_COUNT.v1 -
  broker call light_torch '{}' --stream --session evening    an event tool, heard while it runs

Exit codes: 0 the tool's output is on stdout; 1 the call failed, the reason is on stderr; 2 wrong usage.
"""


def add(commands: Any) -> None:
    parser = subcommand(
        commands, "call", "call a tool and print its output", "Calls a tool once and prints its output.", EPILOG
    )
    add_call(
        parser,
        "the tool's name, as `broker tools` shows it",
        key="idempotency key",
        lease="lease token",
        session="the session whose state event tools build on",
    )
    parser.add_argument("--stream", action="store_true", help="show on stderr what the tool tells while it runs")
    parser.add_argument("--raw", action="store_true", help="print the whole reply line instead of the output")
    add_socket(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    try:
        request = call_of(arguments)
    except ValueError as error:
        return fail(error, 2)
    hear: Callable[[bytes], bool] = _silence
    if arguments.stream:
        request |= {"id": 1, "stream": True}
        hear = _listener()
    try:
        line = ask(socket_path(arguments), msgspec.json.encode(request), hear=hear)
    except Trouble as error:
        return fail(error)
    reply: dict[str, Any] = msgspec.json.decode(line)
    succeeded = reply.get("status", "OK" if reply.get("ok") else "") == "OK"
    if arguments.raw or (succeeded and "output_json" not in reply):
        print(line.decode().rstrip("\n"))
    elif succeeded:
        print(reply.get("output_json", ""))
    else:
        kind = reply.get("type", reply.get("status", "error"))
        hint = "; `broker tools` shows what there is" if kind == "not_found" else ""
        reason = reply.get("reason")
        detail = reply.get("detail")
        more = "".join(f" ({extra})" for extra in (reason, detail) if extra)
        print(printable(f"broker: {kind}: {reply.get('error', '')}{more}{hint}", "\n\t"), file=sys.stderr)
    return 0 if succeeded else 1


def _silence(line: bytes) -> bool:  # noqa: ARG001
    return False


def _listener() -> Callable[[bytes], bool]:
    """Imported when it is asked for: a plain call is to be quick."""
    from broker.cli.events import Paper, told
    from broker.client.streaming import event_in

    paper = Paper(sys.stderr)

    def hear(line: bytes) -> bool:
        event = event_in(line)
        if event is not None:
            paper.line("", *told(event))
        return event is not None

    return hear
