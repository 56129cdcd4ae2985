"""The `broker` command: one file a subcommand."""

from __future__ import annotations

import argparse
import sys

from broker import __version__

EPILOG = """\
first steps:
  broker serve                                   serve the demo tools on the default socket
  broker tools                                   what can be called
  broker call AID.DEMO.ECHO.v1 '{"hello":1}'     call one
  broker status                                  pools, processes, queue, rates
  broker bench                                   what a call costs on this machine
"""


def main(argv: list[str] | None = None) -> int:
    from broker.cli import (
        bench,
        breaker,
        call,
        enqueue,
        lease,
        pause,
        plan,
        python_tool,
        queue,
        reload,
        resume,
        serve,
        status,
        token,
        tools,
        utp,
        where,
    )

    parser = argparse.ArgumentParser(
        prog="broker",
        description="Keeps tool processes warm and pooled, behind one policy.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"toolhost-broker {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for command in (
        serve,
        call,
        enqueue,
        queue,
        plan,
        tools,
        status,
        lease,
        token,
        breaker,
        pause,
        resume,
        reload,
        utp,
        bench,
        where,
        python_tool,
    ):
        command.add(commands)
    arguments, unknown = parser.parse_known_args(argv)
    if unknown:  # the usage that helps is the subcommand's
        commands.choices[arguments.command].error(f"unknown: {' '.join(unknown)}")
    try:
        return int(arguments.run(arguments))
    except BrokenPipeError:  # `broker tools | head`
        sys.stderr.close()
        return 0
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    raise SystemExit(main())
