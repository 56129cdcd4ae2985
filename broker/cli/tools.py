"""`broker tools`: what can be called."""

from __future__ import annotations

import argparse
from typing import Any

import msgspec

from broker.cli.common import Trouble, add_socket, ask, fail, socket_path, subcommand, table


def add(commands: Any) -> None:
    parser = subcommand(commands, "tools", "list the tools that can be called", "Lists the tools of a running broker.")
    parser.add_argument("--json", action="store_true", help="for machines")
    add_socket(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    try:
        reply = msgspec.json.decode(ask(socket_path(arguments), b'{"aid":"_tools"}', 10.0))
    except Trouble as error:
        return fail(error)
    tools: list[dict[str, Any]] = reply.get("tools", [])
    if arguments.json:
        print(msgspec.json.encode(tools).decode())
        return 0
    rows = [
        (
            tool["aid"],
            tool["name"],
            "yes" if tool["deterministic"] else "no",
            ", ".join(tool["side_effects"]),
            tool["tier"],
            ", ".join(tool["tags"]),
        )
        for tool in tools
    ]
    print(table(rows, ("AID", "NAME", "DETERMINISTIC", "SIDE EFFECTS", "TIER", "TAGS")))
    return 0
