"""`broker pause`: calls of a tool or of a pool wait, until they are resumed."""

from __future__ import annotations

import argparse
from typing import Any

from broker.cli.common import Trouble, add_socket, fail, operate, subcommand


def add(commands: Any) -> None:
    parser = subcommand(
        commands,
        "pause",
        "let calls of a tool or pool wait",
        "New calls wait, for as long as limits.queue_seconds lets them; those that run finish.\n"
        "`broker resume NAME` lets them go, `broker status` shows what is paused.",
    )
    parser.add_argument("name", metavar="NAME", help="a tool, a pool, or * for all of them")
    add_socket(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    try:
        print(describe(operate(arguments, "_pause", name=arguments.name)))
    except Trouble as error:
        return fail(error)
    return 0


def describe(reply: dict[str, Any]) -> str:
    names = ", ".join(reply["paused"])
    return f"paused: {names}" if names else "nothing is paused"
