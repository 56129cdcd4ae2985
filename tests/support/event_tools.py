"""Event tools for tests: scripts that say what they are told to say, and what they are in broker.toml."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from broker.runtimes.events.protocol import Event, Stream, Verdict

SPEAKER = """#!{python}
import json, os, signal, sys, time
given = sys.stdin.buffer.readline()
def say(type_, **more):
    os.write(1, json.dumps({{"version": "0", "type": type_, **more}}).encode() + b"\\n")
{body}
"""


def event(type_: str, **members: Any) -> dict[str, Any]:
    return {"version": "0", "type": type_, **members}


def line(type_: str, **members: Any) -> bytes:
    return json.dumps(event(type_, **members)).encode()


DONE = line("done", ok=True) + b"\n"


def played(pieces: list[bytes], exit_code: int | None = 0, most: int = 1 << 20) -> tuple[list[Event], Verdict]:
    """The events and the verdict of a stdout that comes in these pieces."""
    stream = Stream(most, 128)
    events = [one for piece in pieces for one in stream.feed(piece)] + stream.end()
    return events, stream.verdict("was killed by SIGKILL", exit_code)


class Tools:
    """Makes tools in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def tool(self, name: str, body: str, **settings: Any) -> str:
        """A tool whose program has `given` (the line it read), `say(type, …)`, os, sys and time."""
        path = self.folder / f"{name}.py"
        path.write_text(SPEAKER.format(python=sys.executable, body=body))
        path.chmod(0o755)
        return self.entry(name, [str(path)], **settings)

    def entry(self, name: str, command: list[str], **settings: Any) -> str:
        lines = [f"{key} = {_toml(value)}" for key, value in settings.items()]
        return "\n".join([f"[[events]]\nname = {json.dumps(name)}\ncommand = {json.dumps(command)}", *lines, ""])


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {json.dumps(one)}" for key, one in value.items()) + " }"
    return json.dumps(value)


def output(reply: dict[str, Any]) -> dict[str, Any]:
    """What an event tool's reply puts out."""
    found: dict[str, Any] = json.loads(reply["output_json"])
    return found
