"""`broker breaker`: closes a circuit breaker before its time."""

from __future__ import annotations

import argparse
from typing import Any

from broker.cli.common import Trouble, add_socket, fail, operate, subcommand


def add(commands: Any) -> None:
    parser = subcommand(
        commands,
        "breaker",
        "close a tool's circuit breaker",
        "A tool whose toolhosts fail too often is left alone for a while; `broker status` shows which.",
    )
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    reset = actions.add_parser("reset", help="let calls of a tool through again")
    reset.add_argument("aid", metavar="AID")
    add_socket(reset)
    reset.set_defaults(run=_reset)


def _reset(arguments: argparse.Namespace) -> int:
    try:
        reply = operate(arguments, "_breaker.reset", name=arguments.aid)
    except Trouble as error:
        return fail(error)
    print(f"{reply['aid']}: was {reply['was']}, now {reply['now']}")
    return 0
