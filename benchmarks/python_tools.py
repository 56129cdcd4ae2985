"""What a call of a Python tool costs, beside starting Python for each call.

    python -m benchmarks.python_tools [ROUNDS] [CALLS]

One tool imports nothing, the other what a heavy library imports (here: fifty modules of the standard library and
msgspec, psutil, uvloop). Rounds are interleaved; each row is the median of the rounds' medians, with their range. The
control is a bare `python -c` that does what namel3ss' runner does: reads the request, imports the tool, calls it.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from broker import Client

HEAVY = """
asyncio concurrent.futures csv ctypes dataclasses decimal difflib doctest email.mime.text email.parser
fractions ftplib gettext gzip hashlib hmac html.parser http.client http.cookiejar http.server imaplib inspect
logging.config logging.handlers lzma mailbox multiprocessing.pool optparse pdb pickle platform poplib pydoc
random shelve smtplib sqlite3 ssl statistics tarfile tempfile tokenize unittest.mock urllib.request uuid
wsgiref.simple_server xml.dom.minidom xml.etree.ElementTree xmlrpc.client zipfile msgspec psutil uvloop
"""
CONTROL = (
    "import importlib, json, sys; asked = json.load(sys.stdin); sys.path.insert(0, '.');"
    "module, name = asked['entry'].split(':');"
    "result = getattr(importlib.import_module(module), name)(asked['payload']); print(json.dumps({'result': result}))"
)
GOALS = {"light": 10, "heavy": 20}


def main(rounds: int, calls: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        _app(root)
        process = _serve(root)
        try:
            with Client(str(root / "socket")) as client:
                for name, goal in GOALS.items():
                    for _ in range(5):  # what it imports is warm after the first
                        client.call(name, {"n": 1})
                    time.sleep(1)
                    warm, cold, busy = [], [], []
                    for _ in range(rounds):
                        warm.append(median(partial(client.call, name, {"n": 1}), calls, pause=0.02))
                        cold.append(median(partial(start, root, name), max(5, calls // 10)))
                        busy.append(rate(client, name, calls))
                    tell(f"{name}, warm", warm, "ms")
                    tell(f"{name}, back to back", busy, "ms")
                    tell(f"{name}, Python", cold, "ms")
                    for words, ours in (("times faster", warm), ("back to back, times", busy)):
                        ratios = [slow / quick for quick, slow in zip(ours, cold, strict=True)]
                        tell(f"{name}, {words}", ratios, f"   goal ≥ {goal}")
        finally:
            process.terminate()
            process.wait(20)


def _app(root: Path) -> None:
    (root / "app").mkdir()
    body = "def run(payload):\n    return payload\n"
    (root / "app" / "light.py").write_text(body)
    (root / "app" / "heavy.py").write_text("".join(f"import {name}\n" for name in HEAVY.split()) + body)
    tools = "".join(f'[[python.tools]]\nname = "{name}"\nentry = "{name}:run"\n' for name in GOALS)
    (root / "broker.toml").write_text(f'[[python]]\napp_root = "{root / "app"}"\n{tools}')


def _serve(root: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "broker", "serve", "--socket", "socket", "--config", "broker.toml"]
    environment = {**os.environ, "HOME": str(root)}
    process = subprocess.Popen(command, cwd=root, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert process.stdout is not None
    assert process.stdout.readline().startswith(b"broker ready")
    return process


def start(root: Path, name: str) -> None:
    asked = json.dumps({"entry": f"{name}:run", "payload": {"n": 1}})
    subprocess.run(
        [sys.executable, "-c", CONTROL], input=asked.encode(), cwd=root / "app", capture_output=True, check=True
    )


def median(call: Callable[[], object], calls: int, pause: float = 0.0) -> float:
    """Milliseconds, one after the other, with a pause between them in which a fork can be done ahead."""
    took = []
    for _ in range(calls):
        begun = time.perf_counter()
        call()
        took.append(time.perf_counter() - begun)
        time.sleep(pause)
    return statistics.median(took) * 1000


def rate(client: Client, name: str, calls: int) -> float:
    """Milliseconds a call, without a pause."""
    begun = time.perf_counter()
    for _ in range(calls):
        client.call(name, {"n": 1})
    return (time.perf_counter() - begun) / calls * 1000


def tell(what: str, figures: list[float], unit: str) -> None:
    print(
        f"{what:26} {statistics.median(figures):8.2f} {unit}   ({min(figures):.2f} to {max(figures):.2f})", flush=True
    )


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 5, int(sys.argv[2]) if len(sys.argv) > 2 else 100)
