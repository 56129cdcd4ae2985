"""A process for each call, as Machina's own machina_dispatch does it."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from benchmarks.harness.controls import ECHO
from benchmarks.peers.peer import Call, Peer
from broker import where


@contextmanager
def opened() -> Iterator[Call]:
    command = [where.toolhost(), "--run", where.demo_plugin(), ECHO]

    def call(inputs: dict[str, Any]) -> str:
        line = json.dumps({"input_json": json.dumps(inputs), "ds_state": {"slots": {}}}) + "\n"
        done = subprocess.run(command, input=line, capture_output=True, text=True, timeout=30, check=True)
        output: str = json.loads(done.stdout)["output_json"]
        return output

    yield call


PEER = Peer(
    name="process per call",
    how="`subprocess.run` of our `machina_toolhost --run`, `json` both ways; a thread for each call under way",
    threads=opened,
)
