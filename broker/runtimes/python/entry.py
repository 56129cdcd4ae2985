"""One request of namel3ss' local protocol: import module:function, call it, say what came of it.

Run by the app's own interpreter, by path: nothing but the standard library of any Python from 3.8 on is used here.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import sys
import time
from importlib.machinery import SourceFileLoader

TYPE_CHECKING = False  # `typing` is not imported: every fork of an interpreter that has it is dearer
if TYPE_CHECKING:
    from typing import Any

DETAILS = ("code", "detail", "http_status", "retryable")  # attributes of an error that has a code
SETTLED_SECONDS = 2.0  # bytecode remembers its source's age in whole seconds


class Outcome:
    """What came of a call."""

    __slots__ = ("code", "ok", "text")

    def __init__(self, ok: bool, text: str, code: int = 0) -> None:
        self.ok = ok
        self.text = text  # the result, or {"type", "message"}, as JSON
        self.code = code  # what the local protocol's process exits with

    def document(self, version: Any) -> str:
        """As namel3ss' own runner writes it."""
        member = "result" if self.ok else "error"
        ok = "true" if self.ok else "false"
        return f'{{"ok": {ok}, "{member}": {self.text}, "protocol_version": {json.dumps(version)}}}'


def failed(error: BaseException, code: int = 0, whole: bool = False) -> Outcome:
    """`whole`: with what else the error says of itself, where it has a code."""
    said = {"type": error.__class__.__name__, "message": str(error)}
    text = json.dumps(said)
    if whole and isinstance(getattr(error, "code", None), str):
        try:
            text = json.dumps({**said, **{name: getattr(error, name, None) for name in DETAILS}}, allow_nan=False)
        except Exception:  # it is the tool's own, and need not be JSON
            text = json.dumps({**said, "code": error.code})  # type: ignore[attr-defined]
    return Outcome(False, text, code)


def read(stream: Any) -> tuple[Any, Outcome | None]:
    """A whole request; or why it is none."""
    try:
        return json.loads(stream.read()), None
    except Exception as error:
        return {}, failed(error, 1)


def answer(asked: dict[str, Any]) -> Outcome:
    entry = asked.get("entry")
    if not isinstance(entry, str):
        return failed(ValueError("Missing entry"), 1)
    if ":" not in entry:
        return failed(ValueError("Invalid entry"), 1)
    return call(entry, asked.get("payload"))


def call(entry: str, payload: Any, within: str = "", ours: bool = False) -> Outcome:
    """`within`: the app root outside of which nothing is run. `ours`: not for namel3ss' local protocol, which has no
    details of errors. sys.exit and the like are the caller's to see."""
    module_name, _, name = entry.partition(":")
    try:
        if within:
            find_within(module_name, within)
        module = importlib.import_module(module_name)
        function = getattr(module, name)
        if not callable(function):
            raise TypeError("Entry target is not callable")
        if within and not defined_within(function, module, within):
            raise PermissionError(f"{entry} is not defined in a module of the app's own")
        result = function(payload)
    except Exception as error:
        return failed(error, whole=ours)
    try:
        return Outcome(True, json.dumps(result, default=_plain))
    except Exception as error:
        return failed(error, 1)


def _plain(value: Any) -> Any:
    """A Decimal that is whole is an integer, another one its digits, without an exponent."""
    decimal = sys.modules.get("decimal")  # whoever has one has imported it
    if decimal is not None and isinstance(value, decimal.Decimal):
        whole = value == value.to_integral_value()
        return int(value) if whole else format(value.normalize(), "f")
    raise TypeError(f"Object of type {type(value)} is not JSON serializable")


# --- only the app's own ----------------------------------------------------------------------------------------------


def find_within(module: str, root: str) -> None:
    """Before anything of it is run: is it a module of the app's own, all the way down?"""
    from importlib.util import find_spec

    parts = module.split(".")
    if not all(part.isidentifier() for part in parts):
        raise PermissionError(f"{module!r} is no name of a module")
    for count in range(1, len(parts) + 1):  # finding a module imports its parents, which have been found to be ours
        name = ".".join(parts[:count])
        try:
            spec = find_spec(name)
        except ValueError:  # __main__ and the like
            raise PermissionError(f"{name} is not a module of the app's own") from None
        if spec is None:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        if not spec.has_location and spec.submodule_search_locations is not None and count < len(parts):
            continue  # folders only, perhaps of others, too: there is nothing in them that could be run
        if not spec.has_location or not is_within(str(spec.origin), root):
            raise PermissionError(f"{name} is not a module of the app's own")


def defined_within(function: Any, module: Any, root: str) -> bool:
    """In this module, or in another one of the app's own that this one has it from."""
    while isinstance(function, functools.partial):
        function = function.func
    home = getattr(function, "__module__", None)
    if home != module.__name__:
        module = sys.modules.get(home) if isinstance(home, str) else None
    file = getattr(module, "__file__", None)
    return isinstance(file, str) and is_within(file, root)


def is_within(path: str, root: str) -> bool:
    """Below the app root, and in no virtual environment there."""
    place, root = os.path.realpath(path), os.path.realpath(root)
    if not place.startswith(root.rstrip(os.sep) + os.sep):
        return False
    place = os.path.dirname(place)
    while place != root:
        if os.path.basename(place) in ("site-packages", "dist-packages", ".venv"):
            return False
        if os.path.exists(os.path.join(place, "pyvenv.cfg")):
            return False
        place = os.path.dirname(place)
    return True


# --- as a program ----------------------------------------------------------------------------------------------------


def mind_edits() -> None:
    """Two edits within a second look alike to bytecode: that of a file as young as that is not kept."""
    write = SourceFileLoader.set_data

    def set_data(self: Any, path: str, data: Any, **more: Any) -> None:
        if time.time() - os.stat(self.path).st_mtime > SETTLED_SECONDS:
            write(self, path, data, **more)

    SourceFileLoader.set_data = set_data  # type: ignore[method-assign]


def write_all(fd: int, data: bytes) -> None:
    left = memoryview(data)
    while left:
        left = left[os.write(fd, left) :]


def main() -> int:
    """The request on stdin, the answer on what was stdout: whatever the tool writes there goes to stderr."""
    here = os.path.dirname(__file__)
    sys.path[:1] = [os.getcwd()] if sys.path[:1] == [here] else [os.getcwd(), *sys.path[:1]]
    os.environ.pop("BROKER_PYTHON_TOOL", None)
    mind_edits()
    private, process = os.dup(1), os.getpid()
    os.dup2(2, 1)
    sys.stdin.reconfigure(encoding="utf-8", errors="strict")  # type: ignore[union-attr]
    asked, outcome = read(sys.stdin)
    if not isinstance(asked, dict):
        raise TypeError("the request is not a JSON object")
    outcome = outcome or answer(asked)
    sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__  # whatever the tool has put there
    if os.getpid() == process:  # a fork of the tool's may get here, too
        write_all(private, outcome.document(asked.get("protocol_version", 1)).encode())
    os.close(private)
    return outcome.code


if __name__ == "__main__":
    sys.exit(main())
