"""A toolhost's program: its binary, the private copy of its plugin, and the tools that `--list` tells of."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import select
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec

from broker import where
from broker._native import lib
from broker.errors import ConfigError
from broker.manifest import beside, cards, described
from broker.model import ToolInfo
from broker.observe.log import Log
from broker.pool import process
from broker.pool.process import Rlimits, SpawnError, Spec
from broker.settings import Card, Config, Limits, Toolhost

LIST_SECONDS = 10.0
LOOK_SECONDS = 0.1
LIST_BYTES = 16 * 1024 * 1024
MB = 1024 * 1024
AID = re.compile(r"AID(\.[A-Z][A-Z0-9_]*)+\.v[0-9]+")


class Listing(msgspec.Struct):
    ok: bool
    tools: list[ToolInfo] = []
    error: str = ""


class Plugin:
    """A plugin's file, as it was when it was read: later changes to it cannot reach a running toolhost."""

    def __init__(self, source: Path, private: Path, pin: str | None) -> None:
        self.source = source
        self._private = private
        self._pin = pin.lower() if pin else None
        self.stamp: tuple[int, ...] = (0, 0, 0, 0)  # as tb_stamp has it

    def changed(self) -> bool:
        """A file that is missing for a moment has not changed: the next one will."""
        try:
            return self._look() != self.stamp
        except OSError:
            return False

    def watch(self) -> int:
        """A descriptor that tells of changes from now on (tb_watch); -1: each look has to be at the file itself."""
        source = str(self.source)
        if os.path.realpath(source) != source:  # a link may be turned elsewhere, and no watch sees that
            return -1
        return max(-1, lib.tb_watch(os.fsencode(source)))

    def _look(self) -> tuple[int, ...]:
        found = os.stat(self.source)
        return found.st_mtime_ns, found.st_ctime_ns, found.st_size, found.st_ino

    def copy(self) -> Path:
        """Makes the private copy, named by its content, and checks the pin on what was copied."""
        try:
            self.stamp = self._look()
            content = self.source.read_bytes()
        except OSError as error:
            raise ConfigError(f"plugin {self.source} cannot be read: {error.strerror}") from None
        digest = hashlib.sha256(content).hexdigest()
        if self._pin and digest != self._pin:
            raise ConfigError(
                f"plugin {self.source} is pinned to sha256 {self._pin} and has {digest}; it is not loaded"
            )
        directory = self._private / digest[:16]
        copy = directory / self.source.name
        try:
            if not copy.exists():
                directory.mkdir(mode=0o700, parents=True, exist_ok=True)
                fd, draft = tempfile.mkstemp(dir=directory)  # two may copy at once
                with os.fdopen(fd, "wb") as file:
                    file.write(content)
                os.chmod(draft, 0o500)
                os.rename(draft, copy)
        except OSError as error:
            raise ConfigError(f"plugin {self.source} cannot be copied to {directory}: {error.strerror}") from None
        return copy


class Program:
    """What one pool runs: a [[toolhost]] with one of its plugins, or without any."""

    def __init__(
        self, settings: Toolhost, plugin: str | None, limits: Limits, private: Path, cards: Mapping[str, Card]
    ) -> None:
        self.settings = settings
        self.limits = limits
        self._cards = cards
        self.binary = settings.binary or where.toolhost()
        self.source = plugin or self.binary  # what messages call it
        self.name = settings.name
        self._given_up = threading.Event()
        self.plugin: Plugin | None = None
        if plugin is not None:
            source = Path(plugin).absolute()
            self.plugin = Plugin(source, private, settings.sha256.get(source.name))
            if len(settings.plugins) > 1:
                self.name = f"{settings.name}/{source.stem}"

    @property
    def identity(self) -> tuple[str, str, bytes]:
        """Two programs of one identity can stand in for each other."""
        return self.source, self.binary, msgspec.json.encode(self.settings)

    def stamp(self) -> tuple[int, ...]:
        """What the plugin's file was when it was learned."""
        return self.plugin.stamp if self.plugin is not None else (0, 0, 0, 0)

    def changed(self) -> bool:
        """The plugin's file is another one than when it was learned."""
        return self.plugin is not None and self.plugin.changed()

    def learn(self, log: Log) -> tuple[Spec, list[ToolInfo]]:
        """Copies the plugin and asks the toolhost for its tools. Blocking: not for the loop's thread."""
        arguments = (str(self.plugin.copy()),) if self.plugin else ()
        served = []
        for tool in self._list(self._spec("--list", arguments, cpu=int(LIST_SECONDS))):
            if tool.aid.startswith("_"):
                raise ConfigError(f"{self.source}: {tool.aid!r} is no name for a tool: `_…` are the broker's own words")
            if self.plugin and not AID.fullmatch(tool.aid):
                log.warning("tool left out: its name is not an AID, AID.<PART>….v<N>", aid=tool.aid, plugin=self.source)
            else:
                served.append(tool)
        manifest = beside(self.plugin.source) if self.plugin else {}
        return self._spec("--serve", arguments), described(served, manifest, self._cards)

    def give_up(self) -> None:
        """Whatever `learn` is waiting for, it stops."""
        self._given_up.set()

    def _spec(self, mode: str, arguments: tuple[str, ...], cpu: int = -1) -> Spec:
        extra = dict(self.settings.env)
        if self.plugin is not None:  # what stood beside the plugin is still found
            beside = [str(self.plugin.source.parent), os.environ.get("LD_LIBRARY_PATH", "")]
            extra.setdefault("LD_LIBRARY_PATH", ":".join(filter(None, beside)))
        if self.settings.capabilities is not None:
            extra["MACHINA_PLUGIN_CAPS"] = ",".join(self.settings.capabilities) or "0"
        limits = self.limits
        rlimits = Rlimits(
            limits.rlimit_as_mb * MB or -1,
            limits.rlimit_fsize_mb * MB or -1,
            limits.rlimit_nofile or -1,
            limits.rlimit_nproc or -1,
            cpu,
        )
        environment = process.environment(os.environ, extra)
        return Spec((self.binary, mode, *arguments), environment, self.settings.cwd or None, rlimits)

    def _list(self, spec: Spec) -> list[ToolInfo]:
        try:
            output, words, ended = _run(spec, LIST_SECONDS, self._given_up)
        except SpawnError as error:
            raise ConfigError(f"toolhost {self.settings.name}: {error}") from None
        command = f"{self.binary} --list {self.source if self.plugin else ''}".strip()
        said = f"; it said: {words}" if words else ""
        if not output:
            hint = "" if self.plugin else "; does it need a plugin (--plugin)?"
            raise ConfigError(f"`{command}` {ended} and printed nothing{said}{hint}")
        try:
            listing = msgspec.json.decode(output, type=Listing)
        except msgspec.DecodeError as error:
            shown = output[:120].decode(errors="replace")
            raise ConfigError(f"`{command}` printed {shown!r}, which is not a list of tools: {error}{said}") from None
        if not listing.ok:
            raise ConfigError(f"`{command}` says: {listing.error}")
        return listing.tools


def private_directory(parent: Path | None = None) -> Path:
    """For our copies of plugins. What a broker that was killed has left there is removed."""
    parent = parent or Path(tempfile.gettempdir())
    for left in parent.glob("toolhost-plugins-*-*"):
        pid = left.name.split("-")[2]
        with contextlib.suppress(OSError):
            if left.stat().st_uid == os.getuid() and pid.isdecimal() and not os.path.exists(f"/proc/{pid}"):
                shutil.rmtree(left, ignore_errors=True)
    return Path(tempfile.mkdtemp(prefix=f"toolhost-plugins-{os.getpid()}-", dir=parent))


def remove_directory(directory: Path) -> None:
    shutil.rmtree(directory, ignore_errors=True)


def programs(settings: Config, private: Path) -> Iterator[Program]:
    """All that a configuration names."""
    said = cards(settings)
    for host in settings.toolhost:
        plugins: list[str | None] = [*host.plugins] or [None]
        for plugin in plugins:
            yield Program(host, plugin, settings.limits, private, said)


def _run(spec: Spec, seconds: float, given_up: threading.Event) -> tuple[bytes, str, str]:
    """Runs a command to its end: its output, its last words, and how it ended. Blocking."""
    child = process.spawn(spec)
    child.close_stdin()
    output, words = bytearray(), bytearray()
    collect = {child.stdout: output, child.stderr: words}
    deadline = time.monotonic() + seconds
    poller = select.poll()
    for fd in (child.stdout, child.stderr, child.pidfd):
        poller.register(fd, select.POLLIN)
    ended = f"did not end within {seconds:g} s"
    try:
        while (left := deadline - time.monotonic()) > 0 and len(output) <= LIST_BYTES and not given_up.is_set():
            ready = {fd for fd, _ in poller.poll(min(left, LOOK_SECONDS) * 1000)}
            idle = True
            for fd in ready & collect.keys():
                if data := os.read(fd, 65536):
                    collect[fd] += data
                    idle = False
                else:
                    poller.unregister(fd)
            if idle and child.pidfd in ready and child.reap():  # a grandchild may hold the pipes for ever
                ended = child.how_it_ended()
                break
        return bytes(output), words[-400:].decode(errors="replace").strip(), ended
    finally:
        child.kill()
        while not child.reap():
            time.sleep(0.001)
        child.close()
