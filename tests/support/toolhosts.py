"""Toolhosts in a few lines of Python, for what no real one would do."""

from __future__ import annotations

import json
import os
from pathlib import Path

FRAME = """#!/usr/bin/env python3
import json, os, sys, time
def say(**members):
    sys.stdout.write(json.dumps({{"ok": True, "status": "OK", "error": "", **members}}) + "\\n")
    sys.stdout.flush()
if sys.argv[1] == "--list":
    if len(sys.argv) > 2:
        print(open(sys.argv[2]).read())
    else:
        print('{{"ok":true,"tools":[{{"aid":"AID.A.v1"}},{{"aid":"AID.B.v1"}}]}}', end="")
    sys.exit()
{before}
n = 0
for line in sys.stdin:
    request = json.loads(line)
    aid = request["aid"]
    if aid.startswith("_"):
        print(json.dumps({{"ok": False, "error": "tool not found: " + aid}}), flush=True)
        {fenced}
        continue
    n += 1
    {body}
"""


def scripted(folder: Path, body: str, *, before: str = "", fenced: str = "pass", name: str = "host") -> str:
    """A toolhost with tools AID.A.v1 and AID.B.v1, or those that its plugin, a file of JSON, names (`listing`); `body`
    answers a request, the n-th of its process."""
    path = folder / name
    path.write_text(FRAME.format(body=body.replace("\n", "\n    "), before=before, fenced=fenced))
    path.chmod(0o755)
    return str(path)


def listing(path: Path, **tools: list[str]) -> str:
    """A plugin for `scripted`: its tools (A is AID.A.v1) and their side effects. Replaces what was there at once."""
    described = [{"aid": f"AID.{name}.v1", "side_effects": effects} for name, effects in tools.items()]
    draft = path.with_suffix(".draft")
    draft.write_text(json.dumps({"ok": True, "tools": described}))
    os.replace(draft, path)
    return str(path)
