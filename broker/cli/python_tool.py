"""`broker python-tool`: namel3ss' local protocol: a request on stdin, its answer on stdout, in the app's folder."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from broker.cli.common import subcommand


def add(commands: Any) -> None:
    parser = subcommand(
        commands,
        "python-tool",
        "run one Python tool, as namel3ss' own runner does",
        'Reads {"entry":"module:function","payload":…} on stdin and runs it in the current folder, the app\'s root,\n'
        "with its .venv where there is one. Exits with 1 where the request, or the result, is no good.",
    )
    parser.set_defaults(run=run)


def run(_: argparse.Namespace) -> int:
    from broker.runtimes.python import entry

    own = os.path.join(os.getcwd(), ".venv", "bin", "python")
    python = own if os.access(own, os.X_OK) else sys.executable
    os.execv(python, [python, str(Path(entry.__file__))])
