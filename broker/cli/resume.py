"""`broker resume`: lets calls go that `broker pause` has made wait."""

from __future__ import annotations

import argparse
from typing import Any

from broker.cli.common import Trouble, add_socket, fail, operate, subcommand
from broker.cli.pause import describe


def add(commands: Any) -> None:
    parser = subcommand(
        commands,
        "resume",
        "let calls of a paused tool or pool go",
        "Calls that `broker pause NAME` has made wait go on.",
    )
    parser.add_argument("name", metavar="NAME", help="what was paused, or * for everything")
    add_socket(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    try:
        print(describe(operate(arguments, "_resume", name=arguments.name)))
    except Trouble as error:
        return fail(error)
    return 0
