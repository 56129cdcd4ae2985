"""A warm interpreter of one app: forks an untouched child for each call. Run by path, with the app root as its cwd.

fd 0 is a socket to the broker, of packets: a letter, then numbers of processes in four bytes each, or JSON.

    f  a child for one call, r one for many; comes with a socket and a stderr   → its pid
    e  the first process is ended with its group                                → its status
    b  no more than the others can                                              → 0
    l  a list of modules, which are imported           → {"unfit":[…],"spoilt":b,"stamps":[…]}
    c  a list of the app's sources, which are compiled, not run    → 0

The (other) processes of f, r, e and b have answered: they are ended, and waited for when there is time.

Nothing but the standard library is used here, and little of it: what is written to in the memory of a fork is copied a
page at a time, so that each module, and each function that runs, makes calls dearer.
"""

from __future__ import annotations

import sys

BEFORE = frozenset(sys.modules)  # what no app's own module can take the place of
HERE = __file__.rpartition("/")[0]
if sys.path[:1] == [HERE]:  # not where PYTHONSAFEPATH is set
    del sys.path[0]

import _socket  # noqa: E402
import atexit  # noqa: E402
import gc  # noqa: E402
import itertools  # noqa: E402
import json  # noqa: E402
import os  # noqa: E402
import signal  # noqa: E402
import site  # noqa: E402
import time  # noqa: E402
from importlib.machinery import SourceFileLoader  # noqa: E402

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any

try:
    import ctypes

    _prctl: Any = ctypes.CDLL(None).prctl
except (ImportError, OSError, AttributeError):  # an interpreter without it: a killed broker's children end later
    _prctl = None

sys.path.insert(0, HERE)
import entry  # type: ignore[import-not-found]  # noqa: E402

del sys.path[0], sys.modules["entry"]  # the app may have a module of that name

PACKET = 1 << 20
NUMBER = 4  # bytes
ENDIAN: Any = sys.byteorder
ROOM_FOR_FDS = _socket.CMSG_SPACE(2 * NUMBER)
TASKS = "/proc/self/task"
DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG
LOOK_SECONDS = 0.05  # between two looks at who is dead
LARGEST_SOURCE = 1 << 18  # bytes that are compiled here
MOST_SOURCES = 4096
REHEARSALS = 16  # until the interpreter has adapted its code to what is done in each call

root = os.getcwd()
by_top: dict[str, list[str]] = {}
compiled: dict[str, tuple[Any, Any]] = {}  # of the app's sources: what the file was, its code
sources: list[str] = []  # that a child has compiled itself
control = _socket.socket(fileno=os.dup(0))


def installed() -> tuple[str, ...]:
    """Where modules lie that are kept warm: the rest is imported anew in each child."""
    places = {os.path.dirname(os.__file__), *getattr(site, "getsitepackages", list)()}
    if site.ENABLE_USER_SITE:
        places.add(site.getusersitepackages())
    return tuple({os.path.join(one, "") for place in places for one in (place, os.path.realpath(place))})


INSTALLED = installed()


def serve() -> None:
    """Until the broker's end closes."""
    children: set[int] = set()
    ending: set[int] = set()
    while True:
        control.settimeout(LOOK_SECONDS if ending else None)
        try:
            data, ancillary, _, _ = control.recvmsg(PACKET, ROOM_FOR_FDS)
        except _socket.timeout:  # before Python 3.10 it is another class than TimeoutError
            bury(ending, children)
            continue
        if not data:
            break
        asked = data[:1]
        fds = numbers(b"".join([content for _, _, content in ancillary]))
        pids = numbers(data[1:]) if asked not in b"lc" else []
        said = 0
        if asked in b"fr":
            said = fork(fds, asked == b"r")
            children.add(said)
        elif asked == b"e":
            said = end(pids[0])
            children.discard(pids.pop(0))
        elif asked == b"c":
            compile_sources(json.loads(data[1:]))
        if asked == b"l":
            unfit, spoilt = load(json.loads(data[1:]))
            control.send(json.dumps({"unfit": unfit, "spoilt": spoilt, "stamps": stamps()}).encode())
        else:
            control.send(said.to_bytes(NUMBER, ENDIAN))
        for fd in fds:
            os.close(fd)
        for pid in pids:
            kill(pid)
            ending.add(pid)
        bury(ending, children)
    for pid in children:
        kill(pid)


def bury(ending: set[int], children: set[int]) -> None:
    """Those that are dead by now."""
    for pid in list(ending):
        if os.waitpid(pid, os.WNOHANG)[0]:
            ending.discard(pid)
            children.discard(pid)


def numbers(data: bytes) -> list[int]:
    whole = len(data) - len(data) % NUMBER
    return [int.from_bytes(data[at : at + NUMBER], ENDIAN) for at in range(0, whole, NUMBER)]


def kill(pid: int) -> None:
    """With its group. Until it is waited for it is at most a zombie, whose numbers nobody else can have."""
    for one in (os.killpg, os.kill):
        try:  # noqa: SIM105
            one(pid, signal.SIGKILL)
        except OSError:
            pass


def end(pid: int) -> int:
    kill(pid)
    return os.waitpid(pid, 0)[1]


# --- warm ------------------------------------------------------------------------------------------------------------


def is_installed(module: Any) -> bool:
    """Outside the app, in a place where nobody edits."""
    file = getattr(module, "__file__", None)
    return isinstance(file, str) and file.startswith(INSTALLED)


def load(modules: list[str]) -> tuple[list[str], bool]:
    """Imports them here. Which had better not be; and whether one of them has spoilt us."""
    unfit, spoilt = [], False
    for name in modules:
        if name in sys.modules:
            continue
        before = len(sys.modules)
        try:
            __import__(name)
        except BaseException:  # whatever it is, the call will see it, too
            unfit.append(name)
        if not can_fork() or any(of_app(one) for one in newest(len(sys.modules) - before)):
            unfit.append(name)
            spoilt = True
            break
    remember()
    sys.path_importer_cache[root] = finder_of(root)
    gc.collect()
    gc.freeze()
    return unfit, spoilt


def identity(path: str) -> Any:
    found = os.stat(path)
    return found.st_mtime_ns, found.st_ctime_ns, found.st_size, found.st_ino


def compile_sources(paths: list[str]) -> None:
    """Those that have not been edited just now: two edits within a moment look alike."""
    for path in paths:
        try:
            before = identity(path)
            settled = time.time() - max(before[:2]) / 1e9 > entry.SETTLED_SECONDS
            if settled and before[2] <= LARGEST_SOURCE and len(compiled) < MOST_SOURCES:
                with open(path, "rb") as file:
                    code = SourceFileLoader("", path).source_to_code(file.read(), path)
                if identity(path) == before:
                    compiled[path] = before, code
        except Exception:  # whatever it is, the call has seen it, too
            continue
    gc.freeze()


def remember_code() -> None:
    """Modules of the app are run in each child, from code that has been compiled once."""
    usual = SourceFileLoader.get_code

    def get_code(self: Any, fullname: str) -> Any:
        path = self.path
        kept = compiled.get(path)
        if kept is not None and kept[0] == identity(path):
            return kept[1]
        if not path.startswith(INSTALLED):
            sources.append(path)
        return usual(self, fullname)

    SourceFileLoader.get_code = get_code  # type: ignore[method-assign]


def can_fork() -> bool:
    """There are no threads that a child would miss. Those that end before a fork, and come back when they are needed,
    are seen to by their library (OpenBLAS, which comes with numpy, does that)."""
    if len(os.listdir(TASKS)) == 1:
        return True
    pid = os.fork()
    if not pid:
        os._exit(0)
    os.waitpid(pid, 0)
    return len(os.listdir(TASKS)) == 1


def newest(count: int) -> list[str]:
    """Modules that were imported last. (To look at the names of all would be to touch a page of memory for each.)"""
    return list(itertools.islice(reversed(sys.modules), max(0, count)))[::-1]


def finder_of(place: str) -> Any:
    """What will look for modules there; it has not looked yet."""
    for hook in sys.path_hooks:
        try:
            return hook(place)
        except ImportError:
            continue
    return None


def of_app(name: str) -> bool:
    module = sys.modules.get(name)
    file = getattr(module, "__file__", None)
    return isinstance(file, str) and not is_installed(module) and os.path.realpath(file).startswith(root + os.sep)


def stamps() -> list[Any]:
    """The folders of packages as they are: what is installed or removed changes them."""
    places = sorted({os.path.realpath(place) for place in INSTALLED})
    return [[place, os.stat(place).st_mtime_ns] for place in places if os.path.isdir(place)]


def remember() -> None:
    """What was imported here, by its first name."""
    by_top.clear()
    for name in sys.modules:
        top = name.partition(".")[0]
        if top not in BEFORE:
            by_top.setdefault(top, []).append(name)


def shadowed() -> list[str]:
    """Modules that had better not have been imported here: the app has its own of these names, which come first."""
    return [name for file in os.listdir(root) for name in by_top.get(file.partition(".")[0], ())]


def rehearse() -> None:
    """Does once, for nothing, what a call does: pages of memory that it writes to are ours before the call comes."""
    sys.path.insert(0, HERE)
    report(run({"entry": "rehearsal:run", "guarded": False}, b'{"a": [1, "b", null]}'), newest(1))
    flush()
    del sys.path[0], sys.modules["rehearsal"]
    sources.clear()
    sys.path_importer_cache.pop(HERE, None)
    try:  # noqa: SIM105
        shadowed()
    except OSError:
        pass


# --- a child ---------------------------------------------------------------------------------------------------------


def fork(fds: list[int], reuse: bool) -> int:
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
        nothing = os.open(os.devnull, os.O_RDWR)
        os.dup2(nothing, 0)
        os.dup2(fds[1], 2)
        os.dup2(2, 1)
        os.close(nothing)
        os.close(fds[1])
        wire = _socket.socket(fileno=fds[0])  # open until we have ended: its end is taken for ours
        code = live(wire, reuse)
    except SystemExit as request:
        code = exit_code(request)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    flush()
    os._exit(code)


def live(wire: _socket.socket, reuse: bool) -> int:
    """One call, or one after the other."""
    known, process = 0, os.getpid()
    reseed()
    if not is_asked(wire):
        rehearse()
    while True:
        head = receive(wire, 8)
        if head is None:
            return 0
        size, more = int.from_bytes(head[:4], "big"), int.from_bytes(head[4:], "big")
        asked, given = receive(wire, size), receive(wire, more)
        if asked is None or given is None:
            return 0
        outcome = None
        if not known:
            outcome = enter()
            known = len(sys.modules)
        outcome = outcome or run(json.loads(asked.decode()), given)
        if os.getpid() != process:  # the tool has forked, and it is not us who were asked
            return 0
        if not reuse:  # as at the end of a program: its threads, then its last words
            getattr(sys.modules.get("threading"), "_shutdown", bool)()
            atexit._run_exitfuncs()
        flush()
        wire.sendall(report(outcome, [] if reuse else newest(len(sys.modules) - known)))
        sources.clear()
        if not reuse:
            receive(wire, 1)  # whoever waits for this wakes up on our processor: our end is not to keep it waiting
            return 0


def is_asked(wire: _socket.socket) -> bool:
    """There is a request already."""
    try:
        return bool(wire.recv(1, _socket.MSG_PEEK | _socket.MSG_DONTWAIT))
    except OSError:
        return False


def receive(wire: _socket.socket, size: int) -> bytes | None:
    data = b""
    while len(data) < size:
        part = wire.recv(min(size - len(data), PACKET))
        if not part:
            return None
        data = data + part if data else part
    return data


def enter() -> Any:
    """The app, as it is now. What a call comes to that finds none."""
    try:
        os.chdir(root)
        for name in shadowed():
            sys.modules.pop(name, None)
    except OSError as error:
        return entry.failed(error)
    sys.path.insert(0, root)
    return None


def run(asked: Any, given: bytes) -> Any:
    try:
        payload = json.loads(given.decode())
    except (ValueError, RecursionError) as error:
        return entry.failed(ValueError(f"the input cannot be read as JSON: {error}"))
    try:
        return entry.call(asked["entry"], payload, root if asked["guarded"] else "", ours=True)
    except Exception as worse:  # what the tool has raised is its own class
        return entry.failed(RuntimeError(f"the tool's error has no message: {worse.__class__.__name__}"))


def report(outcome: Any, learned: Iterable[str]) -> bytes:
    text: bytes = outcome.text.encode()
    modules = [name for name in learned if is_installed(sys.modules.get(name))]
    head = json.dumps({"ok": outcome.ok, "size": len(text), "modules": modules, "sources": sources[:MOST_SOURCES]})
    return head.encode() + b"\n" + text


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
        try:  # noqa: SIM105
            stream.flush()
        except Exception:  # it may be anything that the tool has put there
            pass


if __name__ == "__main__":
    os.dup2(2, 1)
    entry.mind_edits()
    remember_code()
    remember()
    compile_sources([os.path.join(HERE, "rehearsal.py")])
    for _ in range(REHEARSALS):
        rehearse()
    serve()
