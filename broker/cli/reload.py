"""`broker reload`: reads broker.toml and the plugins again, without dropping a call."""

from __future__ import annotations

import argparse
from typing import Any

from broker.cli.common import Trouble, add_socket, fail, operate, subcommand


def add(commands: Any) -> None:
    parser = subcommand(
        commands,
        "reload",
        "read broker.toml and the plugins again",
        "Reads the configuration again. What is unchanged keeps its processes; a mistake changes nothing.",
    )
    add_socket(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    try:
        print(operate(arguments, "_reload")["result"])
    except Trouble as error:
        return fail(error)
    return 0
