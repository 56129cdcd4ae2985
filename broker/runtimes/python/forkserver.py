"""A warm interpreter of one app: forks an untouched child for each call. Run by path, with the app root as its cwd.

fd 0 is a socket to the broker: requests and answers are packets of JSON. Nothing but the standard library is used here.

    {"do":"fork","reuse":b} + a socket and a stderr   → {"pid":n}
    {"do":"reap","pid":n}                             → {"status":n}     its group is killed first
    {"do":"load","modules":[…]}                       → {"unfit":[…],"spoilt":b,"stamps":[…]}

With any of them, "bury":[pid…] are reaped when it has been answered: children that have answered, too, and are ending.
"""

from __future__ import annotations

import sys

BEFORE = frozenset(sys.modules)  # what no app's own module can take the place of
HERE = sys.path.pop(0)

import array  # noqa: E402
import atexit  # noqa: E402
import contextlib  # noqa: E402
import gc  # noqa: E402
import importlib.machinery  # noqa: E402
import importlib.util  # noqa: E402
import json  # noqa: E402
import os  # noqa: E402
import signal  # noqa: E402
import site  # noqa: E402
import socket  # noqa: E402
import sysconfig  # noqa: E402
import threading  # noqa: E402
from typing import Any  # noqa: E402

try:
    import ctypes

    _prctl: Any = ctypes.CDLL(None).prctl
except (ImportError, OSError, AttributeError):  # an interpreter without it: a killed broker's children end later
    _prctl = None

_spec = importlib.util.spec_from_file_location("_toolhost_broker_entry", os.path.join(HERE, "entry.py"))
assert _spec is not None
assert _spec.loader is not None
entry: Any = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(entry)

PACKET = 1 << 20
DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG

root = os.getcwd()
by_top: dict[str, list[str]] = {}
control = socket.socket(fileno=os.dup(0))


def installed() -> tuple[str, ...]:
    """Where modules lie that are kept warm: the rest is imported anew in each child."""
    found = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    found |= set(getattr(site, "getsitepackages", list)())
    return tuple(os.path.realpath(place) + os.sep for place in found if place)


INSTALLED = installed()


def serve() -> None:
    """Until the broker's end closes."""
    children: set[int] = set()
    while True:
        data, ancillary, _, _ = control.recvmsg(PACKET, socket.CMSG_SPACE(2 * 4))
        if not data:
            break
        asked = json.loads(data)
        fds = array.array("i")
        for _, _, content in ancillary:
            fds.frombytes(content[: len(content) - len(content) % fds.itemsize])
        if asked["do"] == "fork":
            pid = fork(fds, asked["reuse"])
            children.add(pid)
            said: Any = {"pid": pid}
        elif asked["do"] == "reap":
            children.discard(asked["pid"])
            said = {"status": end(asked["pid"])}
        elif asked["do"] == "load":
            unfit, spoilt = load(asked["modules"])
            said = {"unfit": unfit, "spoilt": spoilt, "stamps": stamps()}
        else:
            said = {}
        for fd in fds:
            os.close(fd)
        control.send(json.dumps(said).encode())
        for pid in asked["bury"]:
            children.discard(pid)
            end(pid)
    for pid in children:
        end(pid)


def end(pid: int) -> int:
    """Until here it was at most a zombie, whose pid and group nobody else can have."""
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(pid, signal.SIGKILL)
    return os.waitpid(pid, 0)[1]


# --- warm ------------------------------------------------------------------------------------------------------------


def is_installed(module: Any) -> bool:
    """Outside the app, in a place where nobody edits."""
    file = getattr(module, "__file__", None)
    return isinstance(file, str) and os.path.realpath(file).startswith(INSTALLED)


def load(modules: list[str]) -> tuple[list[str], bool]:
    """Imports them here. Which had better not be; and whether one of them has spoilt us."""
    unfit, spoilt = [], False
    for name in modules:
        if name in sys.modules:
            continue
        before = set(sys.modules)
        try:
            importlib.import_module(name)
        except BaseException:  # whatever it is, the call will see it, too
            unfit.append(name)
        if threading.active_count() > 1 or any(of_app(one) for one in set(sys.modules) - before):
            unfit.append(name)
            spoilt = True
            break
    remember()
    gc.collect()
    gc.freeze()
    return unfit, spoilt


def of_app(name: str) -> bool:
    module = sys.modules.get(name)
    file = getattr(module, "__file__", None)
    return isinstance(file, str) and not is_installed(module) and os.path.realpath(file).startswith(root + os.sep)


def stamps() -> list[Any]:
    """The folders of packages as they are: what is installed or removed changes them."""
    return [[place, os.stat(place).st_mtime_ns] for place in INSTALLED if os.path.isdir(place)]


def make_way() -> None:
    """The app's own modules come first, as if nothing had been imported here."""
    for file in os.listdir(root):
        for name in by_top.get(file.partition(".")[0], ()):
            sys.modules.pop(name, None)


def remember() -> None:
    """What was imported here, by its first name."""
    by_top.clear()
    for name in sys.modules:
        top = name.partition(".")[0]
        if top not in BEFORE:
            by_top.setdefault(top, []).append(name)


def rehearse() -> None:
    """Does once, for nothing, what a call does: pages of memory that it writes to are ours before the call comes."""
    sys.path.insert(0, HERE)
    entry.call("rehearsal:run", json.loads('{"a": [1, "b", null]}'), ours=True)
    del sys.path[0], sys.modules["rehearsal"]
    sys.path_importer_cache.pop(HERE, None)
    is_installed(json)


# --- a child ---------------------------------------------------------------------------------------------------------


def fork(fds: Any, reuse: bool) -> int:
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        if _prctl is not None:
            _prctl(DIE_WITH_PARENT, signal.SIGKILL, 0, 0, 0)
            if os.getppid() != parent:
                os._exit(1)
        os.setsid()
        control.close()
        wire = socket.socket(fileno=os.dup(fds[0]))
        nothing = os.open(os.devnull, os.O_RDWR)
        os.dup2(nothing, 0)
        os.dup2(fds[1], 2)
        os.dup2(2, 1)
        for fd in (nothing, *fds):
            os.close(fd)
        code = live(wire, reuse)
    except SystemExit as request:
        code = exit_code(request)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    flush()
    os._exit(code)


def live(wire: socket.socket, reuse: bool) -> int:
    """One call, or one after the other."""
    known: frozenset[str] = frozenset()
    reseed()
    rehearse()
    while True:
        head = receive(wire, 8)
        if head is None:
            return 0
        size, more = int.from_bytes(head[:4], "big"), int.from_bytes(head[4:], "big")
        asked, given = receive(wire, size), receive(wire, more)
        if asked is None or given is None:
            return 0
        if not known:
            make_way()
            sys.path.insert(0, root)
            known = frozenset(sys.modules)
        outcome = run(json.loads(asked), given)
        if not reuse:
            getattr(threading, "_shutdown", bool)()  # as at the end of a program: its threads, then its last words
            atexit._run_exitfuncs()
        flush()
        learned = [] if reuse else [name for name in list(sys.modules) if name not in known]
        modules = [name for name in learned if is_installed(sys.modules[name])]
        text = outcome.text.encode()
        said = json.dumps({"ok": outcome.ok, "size": len(text), "modules": modules}).encode()
        wire.sendall(said + b"\n" + text)
        if not reuse:
            return 0


def run(asked: Any, given: bytes) -> Any:
    try:
        payload = json.loads(given)
    except (ValueError, RecursionError) as error:
        return entry.failed(ValueError(f"the input cannot be read as JSON: {error}"))
    return entry.call(asked["entry"], payload, root if asked["guarded"] else "", ours=True)


def receive(wire: socket.socket, size: int) -> bytes | None:
    data = bytearray()
    while len(data) < size:
        part = wire.recv(min(size - len(data), PACKET))
        if not part:
            return None
        data += part
    return bytes(data)


def reseed() -> None:
    """Chance is not to be the same in every child; the standard library sees to its own."""
    numpy = sys.modules.get("numpy.random")
    if numpy is not None:
        numpy.seed()


def exit_code(request: SystemExit) -> int:
    if request.code is None:
        return 0
    if isinstance(request.code, int):
        return request.code & 0xFF
    sys.stderr.write(f"{request.code}\n")
    return 1


def flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()


if __name__ == "__main__":
    os.dup2(2, 1)
    entry.mind_edits()
    serve()
