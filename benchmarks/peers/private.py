"""A broker of one's own, with the configuration that the worker was given (BROKER_CONFIG)."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def broker() -> Iterator[str]:
    """Its socket."""
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/broker.sock"
        command = [sys.executable, "-m", "broker", "serve", "--socket", path, "--log", "error"]
        process = subprocess.Popen(command, stdout=subprocess.PIPE)
        try:
            assert process.stdout is not None
            if not process.stdout.readline():
                raise RuntimeError("the broker did not start")
            yield path
        finally:
            process.terminate()
            process.wait()
