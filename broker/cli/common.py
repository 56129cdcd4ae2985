"""What subcommands share: where the broker is, one question and its answer, and plain words when there is none."""

from __future__ import annotations

import argparse
import os
import socket
import sys
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from broker import addresses, config
from broker.errors import ConfigError


class Unreachable(Exception):
    """No broker answers; the message says what to do."""


def subcommand(commands: Any, name: str, summary: str, description: str, epilog: str = "") -> argparse.ArgumentParser:
    """A subcommand whose --help keeps the line breaks of its examples."""
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=summary,
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    return parser


def add_call(parser: argparse.ArgumentParser, tool: str, *, key: str, lease: str, session: str) -> None:
    """A call, as the line protocol has it; in words of their own where commands differ."""
    parser.add_argument("aid", metavar="AID", help=tool)
    parser.add_argument("json", metavar="JSON", nargs="?", default="{}", help="its input; - reads stdin (default: {})")
    parser.add_argument("--timeout", metavar="SECONDS", type=float, help="how long the tool may run")
    parser.add_argument("--key", metavar="KEY", help=key)
    parser.add_argument("--lease", metavar="TOKEN", help=lease)
    parser.add_argument("--session", metavar="NAME", help=session)


def call_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """The request object. What is wrong is a ValueError that says what to write."""
    try:
        text = sys.stdin.read() if arguments.json == "-" else arguments.json
        msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeError) as error:
        raise ValueError(f"the input is not JSON: {error} (quote it for the shell: '{{\"key\":1}}')") from None
    call: dict[str, Any] = {"aid": arguments.aid, "input_json": text}
    if arguments.timeout is not None:
        if not 0 < arguments.timeout < 1e6:
            raise ValueError("--timeout must be a number of seconds above 0")
        call["timeout_ms"] = max(1, round(arguments.timeout * 1000))
    given = {"idempotency_key": arguments.key, "_lease_token": arguments.lease, "session": arguments.session}
    return call | {name: value for name, value in given.items() if value is not None}


def add_socket(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--socket",
        metavar="PATH",
        help="the broker's socket (default: BROKER_SERVER_SOCKET, broker.toml, then per user)",
    )
    parser.add_argument("--config", metavar="FILE", help="broker.toml (default: ./broker.toml, then ~/.config)")


def socket_path(arguments: argparse.Namespace) -> str:
    loaded = config.load(arguments.config, {("server", "socket"): arguments.socket}, os.environ)
    return loaded.config.server.socket or addresses.default_socket(os.environ)


def ask(path: str, request: bytes, seconds: float = 330.0, hear: Callable[[bytes], bool] = lambda _: False) -> bytes:
    """Sends one line, waits for its one reply; `hear` takes lines that come before it."""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(seconds)
            connection.connect(path)
            connection.sendall(request + b"\n")
            connection.shutdown(socket.SHUT_WR)
            with connection.makefile("rb") as replies:
                reply: bytes = replies.readline()
                while reply and hear(reply):
                    reply = replies.readline()
    except (FileNotFoundError, ConnectionRefusedError):
        raise Unreachable(
            f"no broker is serving {path}; start one with `broker serve` (or name it: --socket)"
        ) from None
    except PermissionError:
        raise Unreachable(f"{path} belongs to another user; only the owner of a broker can use its socket") from None
    except TimeoutError:
        raise Unreachable(f"the broker at {path} gave no answer within {seconds:g} s") from None
    except OSError as error:
        raise Unreachable(f"the broker at {path} cannot be reached: {error.strerror or error}") from None
    if not reply:
        raise Unreachable(f"the broker at {path} closed the connection without an answer; is it stopping?")
    return reply


def operate(arguments: argparse.Namespace, aid: str, **members: Any) -> dict[str, Any]:
    """A question to the operator's socket, found from the callers'."""
    path = socket_path(arguments)
    if not path.endswith(addresses.OPERATOR):
        path = addresses.operator_socket(path)
    reply: dict[str, Any] = msgspec.json.decode(ask(path, msgspec.json.encode({"aid": aid, **members}), 10.0))
    if not reply.get("ok"):
        raise Unreachable(str(reply.get("error")))
    return reply


def printable(text: str, keep: str = "") -> str:
    """What a tool says is no command to a terminal."""
    return "".join(one if one.isprintable() or one in keep else " " for one in text)


def fail(error: Exception, code: int = 1) -> int:
    print(f"broker: {error}", file=sys.stderr)
    return code


Trouble = (Unreachable, ConfigError)


def table(rows: Sequence[tuple[Any, ...]], head: tuple[str, ...]) -> str:
    """Columns, left-aligned text and right-aligned numbers."""
    cells = [head, *([str(cell) for cell in row] for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(head))]
    numeric = [bool(rows) and all(isinstance(row[i], int | float) for row in rows) for i in range(len(head))]
    lines = []
    for row in cells:
        padded = [row[i].rjust(widths[i]) if numeric[i] else row[i].ljust(widths[i]) for i in range(len(head))]
        lines.append("  ".join(padded).rstrip())
    return "\n".join(lines)
