"""`broker where`: the places of everything that was installed, as JSON."""

from __future__ import annotations

import argparse
from typing import Any

import msgspec

from broker import addresses, where
from broker.cli.common import Trouble, add_socket, fail, socket_path, subcommand


def add(commands: Any) -> None:
    parser = subcommand(
        commands, "where", "print where things are, as JSON", "Prints where the installed parts and sockets are."
    )
    add_socket(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    try:
        socket = socket_path(arguments)
    except Trouble as error:
        return fail(error, 2)
    places = {
        "toolhost": where.toolhost(),
        "fault_toolhost": where.fault_toolhost(),
        "demo_plugin": where.demo_plugin(),
        "fault_plugin": where.fault_plugin(),
        "include": where.include(),
        "socket": socket,
        "operator_socket": addresses.operator_socket(socket),
    }
    print(msgspec.json.format(msgspec.json.encode(places)).decode())
    return 0
