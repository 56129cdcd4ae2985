"""Machina's dispatcher, with warm toolhosts behind it: `from machina_dispatch import run_machina_toolhost`.

Calls go to the daemon where MACHINA_BROKER_SOCKET is set, else to toolhosts in this process, as broker.toml and the
MACHINA_* variables say. A tool that no plugin has is run as before: `<MACHINA_ROOT>/build/machina_cli tool_exec <AID>`.

    python -m broker.machina_dispatch SCRIPT [ARGUMENT…]

runs a program of an existing Machina tree, whose own `machina_dispatch` then calls through here; `install()` does the
same from within.
"""

from __future__ import annotations

import os
import re
import sys
import threading
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from broker.client.embedded import Embedded
    from broker.client.sync import Client
    from broker.errors import Refusal
    from broker.settings import OneShot

__all__ = [
    "CHAIN_RECIPES",
    "TOOL_ALIASES",
    "execute_chain",
    "install",
    "reset",
    "resolve_alias",
    "run_machina_tool",
    "run_machina_toolhost",
    "uninstall",
    "validate_aid",
]

NAME = "machina_dispatch"
FUNCTION = "run_machina_toolhost"

# Which of our codes is which of the seed's types; everything else is on our side.
TYPES = {
    "timeout": "timeout",
    "crash": "crash",
    "bad_reply": "parse_error",
    "reply_too_large": "parse_error",
    "not_found": "not_found",
    "tool_error": "tool_error",
}

_AID = re.compile(r"AID\.[A-Z][A-Z0-9_]*(\.[A-Z][A-Z0-9_]*)*\.v[0-9]+")


# --- calls ------------------------------------------------------------------------------------------------------------


def run_machina_toolhost(aid: str, inputs: dict[str, Any]) -> str | dict[str, Any]:
    """The tool's output_json, or `{"error": True, "aid": …, "type": …, "detail": …}`. Never raises.

    >>> run_machina_toolhost("AID.DEMO.ECHO.v1", {"hello": "world"})
    '{"hello":"world"}'
    >>> run_machina_toolhost("AID.NO.SUCH.v1", {})["type"]
    'not_found'
    """
    try:
        return (_way or _find_way())(aid, inputs)
    except Exception as error:
        return _our_error(aid, error)


def run_machina_tool(
    aid: str,
    inputs: dict[str, Any],
    force_code: bool = False,  # noqa: ARG001
    allow_net: bool = False,  # noqa: ARG001
    _caller_approved: bool = False,
) -> str | dict[str, Any]:
    """The same, by any name that the tool has. (The other arguments are for tools of a Machina tree's own.)"""
    return run_machina_toolhost(resolve_alias(aid), inputs)


def execute_chain(chain_name: str, inputs: dict[str, Any]) -> list[dict[str, Any]]:
    """Runs the steps of CHAIN_RECIPES[chain_name], each (tool, function of the inputs), until one fails."""
    recipe = CHAIN_RECIPES.get(chain_name)
    if not recipe:
        return [{"error": f"unknown chain: {chain_name}"}]
    results = []
    for aid, input_of in recipe:
        output = run_machina_tool(aid, input_of(inputs))
        results.append({"tool": aid, "output": output})
        if isinstance(output, dict) and output.get("error"):
            break
    return results


CHAIN_RECIPES: dict[str, list[tuple[str, Callable[[dict[str, Any]], dict[str, Any]]]]] = {}

# --- names ------------------------------------------------------------------------------------------------------------


def validate_aid(aid: str) -> tuple[bool, str]:
    """Whether it is an AID, and what is wrong with it if not.

    >>> validate_aid("AID.FILE.READ.v1")
    (True, 'valid')
    >>> validate_aid("file_read")
    (False, "'file_read' doesn't match AID.DOMAIN.ACTION.vN pattern")
    """
    if not aid:
        return False, "empty AID"
    if not _AID.fullmatch(aid):
        return False, f"{aid!r} doesn't match AID.DOMAIN.ACTION.vN pattern"
    return True, "valid"


class _Aliases(dict[str, str]):
    """Other names of tools: those of broker.toml's [alias], read when somebody asks, and what is added here."""

    _read = False

    def __missing__(self, name: str) -> str:
        if not self._read:
            self._read = True
            from broker import config

            for alias, aid in config.load(None, {}, os.environ).config.alias.items():
                self.setdefault(alias, aid)
            return self.get(name, name)
        return name


TOOL_ALIASES: dict[str, str] = _Aliases()


def resolve_alias(name: str) -> str:
    """The tool's own name; a name that is nobody's alias is returned as it is."""
    try:
        return TOOL_ALIASES[name]
    except Exception:  # a broken broker.toml is reported by the call itself
        return name


# --- errors -----------------------------------------------------------------------------------------------------------


def _toolhost_error(aid: str, error_type: str, detail: str) -> dict[str, Any]:
    return {"error": True, "aid": aid, "type": error_type, "detail": detail}


def _refused(aid: str, code: str, text: str, reason: str = "") -> dict[str, Any]:
    kind = TYPES.get(code)
    if kind is not None:
        return _toolhost_error(aid, kind, text)
    return _toolhost_error(aid, "exception", f"{code}: {text}" + (f" ({reason})" if reason else ""))


def _our_error(aid: str, error: Exception) -> dict[str, Any]:
    from broker.client.failures import CallFailed
    from broker.errors import ConfigError, MissingFile

    if isinstance(error, MissingFile):
        return _toolhost_error(aid, "not_found", str(error))
    if isinstance(error, CallFailed):
        return _refused(aid, error.code, error.text, str(error.more.get("reason", "")))
    code = "config" if isinstance(error, ConfigError) else "bad_request" if _is_input(error) else "internal"
    text = str(error) if code == "config" else f"{type(error).__name__}: {error}"
    return _toolhost_error(aid, "exception", f"{code}: {text}")


def _is_input(error: Exception) -> bool:
    """The inputs cannot be written as JSON."""
    return isinstance(error, TypeError | ValueError | RecursionError)


# --- where calls go ---------------------------------------------------------------------------------------------------

Way = Callable[[str, Any], "str | dict[str, Any]"]

_way: Way | None = None
_finding = threading.Lock()
_inside: Embedded | None = None
_outside: Client | None = None
_tree: ModuleType | None = None  # the Machina tree's own dispatcher, once installed


def _environment() -> Mapping[str, str]:
    """Ours; what it leaves open is as the Machina tree that we are installed in has it."""
    environment = dict(os.environ)
    root, seconds = getattr(_tree, "MACHINA_ROOT", None), getattr(_tree, "_TOOLHOST_TIMEOUT", None)
    if root:
        environment.setdefault("MACHINA_ROOT", str(root))
    if seconds:
        environment.setdefault("MACHINA_TOOLHOST_TIMEOUT", str(seconds))
    return environment


def _find_way() -> Way:
    """At the first call: a daemon, or toolhosts of our own."""
    global _way, _inside, _outside
    with _finding:
        if _way is None:
            environment = _environment()
            socket = environment.get("MACHINA_BROKER_SOCKET")
            if socket:
                from broker.client.sync import Client

                _outside = Client(socket)
                _way = _through(_outside, environment)
            else:
                from broker.client.embedded import Embedded

                _inside = Embedded(environ=environment, fallback=_fallback(environment))
                _way = _within(_inside)
        return _way


def _fallback(environment: Mapping[str, str]) -> Callable[[str], OneShot] | None:
    """What Machina's own dispatcher does for every call, for the tools that no plugin has."""
    root = environment.get("MACHINA_ROOT")
    if not root:
        return None
    from broker.settings import OneShot

    command = os.path.join(root, "build", "machina_cli")
    return lambda aid: OneShot(name=aid, command=[command, "tool_exec"], cwd=root)


def _within(embedded: Embedded) -> Way:
    from broker.client.reply import decode, decode_output, failed
    from broker.client.request import encode, input_text

    plain = embedded.plain

    def call(aid: str, inputs: Any) -> str | dict[str, Any]:
        try:
            text = encode(inputs).decode()
        except TypeError:
            text = input_text(inputs)
        line = plain(aid, text)
        if not isinstance(line, bytes):
            return _refused_by(aid, line)
        output = decode_output(line)
        if output.status == "OK" and output.output_json.__class__ is str:
            return output.output_json
        wire = decode(line)
        return wire.text() if wire.succeeded() else _our_error(aid, failed(aid, wire, line))

    return call


def _through(client: Client, environment: Mapping[str, str]) -> Way:
    from broker.client.failures import NotFound
    from broker.client.request import input_text

    fallback = _fallback(environment)

    def call(aid: str, inputs: Any) -> str | dict[str, Any]:
        text = input_text(inputs)
        try:
            return client.call(aid, input_json=text).output_json
        except NotFound:
            if fallback is None:
                raise
            return _without_toolhosts(environment, fallback)(aid, inputs)

    return call


def _without_toolhosts(environment: Mapping[str, str], fallback: Callable[[str], OneShot]) -> Way:
    """For tools that the daemon does not have: commands only, in this process."""
    global _inside
    from broker.client.embedded import Embedded

    with _finding:
        if _inside is None:
            _inside = Embedded(file=os.devnull, environ=environment, fallback=fallback)
        return _within(_inside)


def _refused_by(aid: str, refusal: Refusal) -> dict[str, Any]:
    return _refused(aid, refusal.kind.code, refusal.text, str(refusal.extra.get("reason", "")))


def _after_fork() -> None:
    """Another thread may have held the lock, or been importing what we need: in the child it never ends."""
    global _finding
    _finding = threading.Lock()
    for name, module in list(sys.modules.items()):
        if name.startswith("broker.") and getattr(getattr(module, "__spec__", None), "_initializing", False):
            del sys.modules[name]


os.register_at_fork(after_in_child=_after_fork)


def reset() -> None:
    """Ends what calls went through; the next one looks at the environment and broker.toml again."""
    global _way, _inside, _outside
    with _finding:
        ended = [one for one in (_inside, _outside) if one is not None]
        _way = _inside = _outside = None
    for one in ended:
        one.close()


# --- in an existing Machina tree --------------------------------------------------------------------------------------

_originals: dict[ModuleType, Any] = {}  # a tree's dispatcher, and what its function was


class _Hook:
    """Sees to a tree's `machina_dispatch` as soon as it is imported."""

    busy = False

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:  # noqa: ARG002
        if name != NAME or self.busy:
            return None
        from importlib import util

        self.busy = True
        try:
            spec = util.find_spec(name)
        finally:
            self.busy = False
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            _replace_in(sys.modules.get(NAME, module))

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


_hook = _Hook()


def install() -> None:
    """From now on, a Machina tree's own `machina_dispatch` calls its toolhosts through here, wherever its function has
    been imported already; if the tree is imported later, from then on."""
    if _hook not in sys.meta_path:
        sys.meta_path.insert(0, _hook)
    module = sys.modules.get(NAME)
    if module is not None:
        _replace_in(module)


def uninstall() -> None:
    """Everything is as it was before `install()`."""
    global _tree
    if _hook in sys.meta_path:
        sys.meta_path.remove(_hook)
    for original in _originals.values():
        _swap(run_machina_toolhost, original)
    _originals.clear()
    if _tree is not None:
        _tree = None
        reset()


def _replace_in(tree: ModuleType) -> None:
    global _tree
    original = getattr(tree, FUNCTION, None)
    if original is None or original is run_machina_toolhost:
        return
    _tree = tree
    reset()
    _originals[tree] = original
    _swap(original, run_machina_toolhost)


def _swap(old: Any, new: Any) -> None:
    """Wherever a module has imported it, by whatever name. Our own modules keep theirs."""
    for module in list(sys.modules.values()):
        members = getattr(module, "__dict__", None)
        if not isinstance(members, dict) or members.get("__name__") == __name__ or members is globals():
            continue
        for name in [name for name, value in list(members.items()) if value is old]:
            members[name] = new


def main(arguments: list[str]) -> int:
    """`python -m broker.machina_dispatch SCRIPT …`"""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(__doc__ or "")
        return 0 if arguments else 2
    import runpy

    from broker import machina_dispatch  # not `__main__`: there is one of it

    script = arguments[0]
    if script != "-m" and not os.path.exists(script):
        print(f"{NAME}: {script} does not exist; give the path of a Python script, or -m MODULE", file=sys.stderr)
        return 2
    machina_dispatch.install()
    if script == "-m":
        sys.argv = arguments[1:]
        sys.path.insert(0, os.getcwd())
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        sys.path.insert(0, os.path.dirname(os.path.abspath(script)))
        runpy.run_path(script, run_name="__main__")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
