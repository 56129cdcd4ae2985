"""`broker utp`: definitions of tools, as the agents of a CommonGround project know them."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from broker.cli.common import Trouble, add_socket, fail, operate, subcommand, table

EPILOG = """\
examples:
  broker utp tool add search.yaml --project proj_1
  broker utp tool list --project proj_1

A definition (docs/utp-tools.md has all of it):
  tool_name: search
  description: Searches the web.
  target_subject: cg.v1r3.{project_id}.{channel_id}.cmd.tool.jina.search
  after_execution: suspend            # or terminate
  parameters:                         # a JSON Schema; each array says what its items are
    type: object
    properties: {q: {type: string}}
    required: [q]
  options:
    jina: {mode: search}

The broker checks and writes it, into the store that [utp] names. One of the same name is written over. HTTP takes
the same file: curl -F file=@search.yaml http://127.0.0.1:8080/projects/proj_1/tools
"""


def add(commands: Any) -> None:
    parser = subcommand(
        commands,
        "utp",
        "define tools for CommonGround's agents",
        "The operator's: definitions of tools of a CommonGround project.",
        EPILOG,
    )
    kinds = parser.add_subparsers(metavar="KIND", required=True)
    actions = kinds.add_parser("tool", help="definitions of tools").add_subparsers(metavar="ACTION", required=True)
    new = actions.add_parser("add", help="check a definition and write it")
    new.add_argument("file", metavar="FILE", help="YAML, or - for what comes in")
    new.add_argument("--create-project", action="store_true", help="make the project, too (in a store of our own)")
    new.set_defaults(run=_add)
    listing = actions.add_parser("list", help="show the definitions that there are")
    listing.set_defaults(run=_list)
    for action in (new, listing):
        action.add_argument("--project", metavar="ID", required=True, help="whose agents know the tool")
        add_socket(action)


def _add(arguments: argparse.Namespace) -> int:
    try:
        text = _read(arguments.file)
        asked = {"project": arguments.project, "file": text, "make_project": arguments.create_project}
        tool = operate(arguments, "_utp.tool.add", **asked)["tool"]
    except OSError as error:
        return fail(ValueError(f"{arguments.file} cannot be read: {error.strerror}"))
    except UnicodeDecodeError as error:
        return fail(ValueError(f"{arguments.file} is not UTF-8 (byte {error.start})"))
    except Trouble as error:
        return fail(error)
    print(f"{tool['project_id']}: {tool['tool_name']} → {tool['target_subject']}")
    return 0


def _read(file: str) -> str:
    if file == "-":
        return sys.stdin.buffer.read().decode()
    with open(file, "rb") as opened:
        return opened.read().decode()


def _list(arguments: argparse.Namespace) -> int:
    try:
        tools = operate(arguments, "_utp.tool.list", project=arguments.project)["tools"]
    except Trouble as error:
        return fail(error)
    columns = ("tool_name", "after_execution", "target_subject", "description")
    rows = [tuple(one[column] or "" for column in columns) for one in tools]
    print(table(rows, ("TOOL", "AFTER EXECUTION", "TARGET SUBJECT", "DESCRIPTION")))
    return 0
