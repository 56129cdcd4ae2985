"""A Python app for tests, with every kind of tool, and what it is in broker.toml."""

from __future__ import annotations

import json
from pathlib import Path

TOOLS = """
import ctypes, decimal, os, signal, subprocess, sys, threading, time
from os import system

CONST = 1
count = 0

def greet(payload):
    return {"message": f"Hello {payload['name']}", "ok": True}

def fail(payload):
    raise ValueError("Missing input")

def keyerr(payload):
    raise KeyError("nope")

def empty_msg(payload):
    raise RuntimeError

class Boom(Exception):
    pass

def custom(payload):
    raise Boom("custom text")

def echo(payload):
    return payload

def counted(payload):
    global count
    count += 1
    return {"count": count, "pid": os.getpid()}

def raw(payload):
    os.write(1, b"raw words\\n")
    return "fine"

def prints(payload):
    print("printed words")
    subprocess.run(["echo", "from a child"])
    return "fine"

def leaves(payload):
    sys.exit(3)

def exits(payload):
    print("last words", file=sys.stderr)
    os._exit(4)

def interrupts(payload):
    raise KeyboardInterrupt

def lets_go(payload):
    os.closerange(3, 256)

def dies(payload):
    os.kill(os.getpid(), signal.SIGKILL)

def segfaults(payload):
    ctypes.string_at(0)

def loops(payload):
    child = subprocess.Popen(["sleep", "600"])
    with open(payload["file"], "w") as file:
        file.write(str(child.pid))
    while True:
        pass

def sleeps(payload):
    time.sleep(payload["seconds"])
    return "slept"

def a_set(payload):
    return {1, 2}

def decimals(payload):
    return [decimal.Decimal("3.0"), decimal.Decimal("1.5")]

def nan(payload):
    return [float("nan")]

def recurses(payload):
    return recurses(payload)

def nested(payload):
    value = []
    for _ in range(100_000):
        value = [value]
    return value

def big(payload):
    return "x" * payload["bytes"]

def later(payload):
    def write():
        time.sleep(0.2)
        with open(payload["file"], "w") as file:
            file.write("written")
    threading.Thread(target=write).start()
    return "fine"

def parent(payload):
    return os.getppid()
"""


def python_app(root: Path, source: str = TOOLS, module: str = "vec") -> Path:
    """An app with one module in its package `tools`."""
    (root / "tools").mkdir(parents=True, exist_ok=True)
    (root / "tools" / "__init__.py").touch()
    (root / "tools" / f"{module}.py").write_text(source)
    return root


def python_config(root: Path, *functions: str, prefix: str = "", module: str = "vec", **settings: object) -> str:
    """A tool for each function, called by its name."""
    lines = [f'[[python]]\napp_root = "{root}"', *(f"{key} = {json.dumps(value)}" for key, value in settings.items())]
    for function in functions:
        lines.append(f'[[python.tools]]\nname = "{prefix}{function}"\nentry = "tools.{module}:{function}"')
    return "\n".join(lines) + "\n"
