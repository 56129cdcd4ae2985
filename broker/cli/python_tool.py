"""`broker python-tool`: namel3ss' local protocol: a request on stdin, its answer on stdout, in the app's folder."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from broker.cli.common import subcommand

INSIDE = "BROKER_PYTHON_TOOL"  # set for the interpreter that runs the tool, until it does


def add(commands: Any) -> None:
    parser = subcommand(
        commands,
        "python-tool",
        "run one Python tool, as namel3ss' own runner does",
        'Reads {"entry":"module:function","payload":…} on stdin and runs it in the current folder, the app\'s root,\n'
        "with its .venv where there is one. Exits with 1 where the request, or the result, is no good.",
    )
    parser.add_argument("--traces", metavar="FILE", help="gets a line about the call (default: BROKER_HTTP_TRACES)")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from broker.runtimes.python import entry

    own = os.path.join(os.getcwd(), ".venv", "bin", "python")
    # An app's interpreter may be a script that leads to us: it is not asked twice.
    has_own = os.access(own, os.X_OK) and INSIDE not in os.environ
    python = own if has_own else sys.executable
    command = (python, str(Path(entry.__file__)))
    environment = {**os.environ, INSIDE: "1"}
    traces = arguments.traces or os.environ.get("BROKER_HTTP_TRACES")
    if not traces:
        os.execve(python, command, environment)
    from broker.runtimes.python import traced

    return traced.run(command, environment, traces, "venv" if has_own else "system")
