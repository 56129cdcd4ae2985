"""A small real task on autopilot: count the words of a text, keep the counts in the DSState, write a report to a file.

    python examples/autopilot.py [FILE]            the selector is a function in this program
    python examples/autopilot.py --external [FILE] the selector is a process of its own (this script, again)

The tools run in this process (`Embedded`); with MACHINA_BROKER_SOCKET set, through the daemon there. A run is written
to a log, then replayed: deterministic tools run again, the others are taken from the log.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from broker import Client, Embedded
from broker.autopilot import ExternalSelector, RunLog, Runner, replay

COUNT, KEEP, WRITE = "AID.DEMO.WORD_COUNT.v1", "AID.DEMO.STATE.v1", "AID.FILE.WRITE.v1"


def choose(situation: dict[str, Any]) -> str:
    """What to do next, from what came of the step before. (A model would sit here.)"""
    sids = {row["aid"]: row["sid"] for row in situation["menu"]}
    last = situation["last"]
    if last is not None and last["error"] is not None:
        return "<ASK_SUP><END>"
    after = last["aid"] if last is not None else None
    if after is None:
        return f"<PICK><{sids[COUNT]}><END>"
    if after == COUNT:
        counts = json.loads(last["output_json"])
        patch = {"op": "put", "slot": 6, "value": {"total": counts["total_tokens"], "top": counts["counts"][:3]}}
        return f"<PICK><{sids[KEEP]}><INP>{json.dumps(patch)}</INP><END>"
    if after == KEEP:
        kept = situation["inputs"]["value"]
        words = ", ".join(f"{one['word']} ({one['count']})" for one in kept["top"])
        patch = {"path": "report.txt", "text": f"{kept['total']} words, most of all {words}\n"}
        return f"<PICK><{sids[WRITE]}><INP>{json.dumps(patch)}</INP><END>"
    return "<NOOP><END>"


def main(arguments: list[str]) -> int:
    if arguments[:1] == ["--select"]:
        print(choose(json.load(sys.stdin)))
        return 0
    external = arguments[:1] == ["--external"]
    files = arguments[1:] if external else arguments
    text = Path(files[0] if files else __file__).read_text()
    folder = Path(os.environ.setdefault("MACHINA_WORK_DIR", tempfile.mkdtemp(prefix="autopilot-")))
    log = RunLog(folder / "run.jsonl")
    selector: Any = ExternalSelector([sys.executable, __file__, "--select"]) if external else in_process
    socket = os.environ.get("MACHINA_BROKER_SOCKET")
    with Client(socket) if socket else Embedded() as tools:
        outcome = Runner(tools, selector, log=log).run({"text": text})
        for step in outcome.steps:
            print(f"{step.number}. {step.aid or 'no such tool'}: {step.error or (step.output_json or '')[:70]}")
        print(f"ended: {outcome.reason} {outcome.detail}".rstrip())
        again = replay(log.path, tools)
        print(f"replayed: {again.run} run again, {again.taken} taken from the log, same: {again.same}")
    print(f"the run is in {log.path}")
    return 0 if outcome.reason == "noop" and again.same else 1


def in_process(situation: Any) -> str:
    import msgspec

    return choose(msgspec.to_builtins(situation))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
