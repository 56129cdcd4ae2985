"""`broker token`: who may call over TCP and HTTP."""

from __future__ import annotations

import argparse
import time
from typing import Any

from broker.cli.common import fail, subcommand, table
from broker.errors import ConfigError
from broker.tokens import Tokens, default_path

EPILOG = """\
examples:
  broker token new ci              prints the token, once; callers are then known as token:ci
  broker token revoke ci

Give it fewer rights in broker.toml:
  [[principal]]
  name = "token:ci"
  tools = ["AID.DEMO.*"]
  tiers = [0]
"""


def add(commands: Any) -> None:
    parser = subcommand(
        commands,
        "token",
        "make, list, revoke the tokens of TCP and HTTP callers",
        "Tokens of callers that are not on this machine's private socket. Kept as their SHA-256.",
        EPILOG,
    )
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    new = actions.add_parser("new", help="make a token and print it, once")
    new.add_argument("name", metavar="NAME")
    new.set_defaults(run=_new)
    listing = actions.add_parser("list", help="show the names of all tokens")
    listing.set_defaults(run=_list)
    revoke = actions.add_parser("revoke", help="a token is not taken any more")
    revoke.add_argument("name", metavar="NAME")
    revoke.set_defaults(run=_revoke)


def _new(arguments: argparse.Namespace) -> int:
    try:
        print(Tokens(default_path()).new(arguments.name))
    except ConfigError as error:
        return fail(error)
    return 0


def _list(arguments: argparse.Namespace) -> int:  # noqa: ARG001
    try:
        tokens = Tokens(default_path()).all()
    except ConfigError as error:
        return fail(error)
    day = [time.strftime("%Y-%m-%d %H:%M", time.localtime(token.created)) for token in tokens]
    print(table([(token.name, made) for token, made in zip(tokens, day, strict=True)], ("NAME", "MADE")))
    return 0


def _revoke(arguments: argparse.Namespace) -> int:
    try:
        Tokens(default_path()).revoke(arguments.name)
    except ConfigError as error:
        return fail(error)
    print("revoked", arguments.name)
    return 0
