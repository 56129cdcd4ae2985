"""The Machina face: listens on Unix sockets and TCP, and knows its connections."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import grp
import os
import socket
import stat
import struct
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Protocol

from broker import errors
from broker.dispatch import Dispatcher
from broker.errors import ConfigError, Refusal
from broker.faces.machina.connection import Connection
from broker.faces.machina.linger import linger
from broker.faces.tcp import bind
from broker.observe.log import Log
from broker.policy.rights import Book
from broker.pool.core import Core
from broker.registry import Registry
from broker.settings import Limits
from broker.tokens import Door

BACKLOG = 1024
ACCEPTS_A_ROUND = 64

Answer = dict[str, Any] | Refusal
LOOK_SECONDS = 0.5  # between two looks at who is slow


class Control(Protocol):
    """Words to the broker itself."""

    async def __call__(self, asker: Connection, aid: str, line: bytes) -> Answer: ...

    def authenticate(self, connection: Connection, line: bytes) -> Answer: ...


class MachinaFace:
    def __init__(
        self,
        core: Core,
        dispatcher: Dispatcher,
        limits: Limits,
        max_connections: int,
        rights: Book,
        log: Log,
        control: Control,
        on_hang_up: Callable[[Connection], None],
        on_room: Callable[[], None],
        refreshed: Callable[[], Awaitable[object] | None],
        door: Door,
    ) -> None:
        self.core = core
        self.dispatcher = dispatcher
        self.limits = limits
        self.control = control
        self.rights = rights
        self.connections: set[Connection] = set()
        self.door = door
        self.on_room = on_room  # called when a caller has read what it had not
        self.refreshed = refreshed  # what somebody has to wait for who asks for an unknown tool
        self._on_hang_up = on_hang_up
        self._most = max_connections
        self._next_look = 0.0
        self.log = log
        self._listeners: list[socket.socket] = []
        self._paths: list[str] = []
        self._locks: list[int] = []

    @property
    def registry(self) -> Registry:
        return self.dispatcher.registry

    # --- listening --------------------------------------------------------------------------------------------------

    def listen_unix(self, path: str, *, operator: bool, group: str = "") -> None:
        """A socket that only this user, or also a group, can reach, in a directory that is not open to others."""
        members = _group(group) if group else -1
        _private_directory(Path(path).parent, members)
        self._locks.append(_lock(path))
        with contextlib.suppress(FileNotFoundError):
            if not stat.S_ISSOCK(os.lstat(path).st_mode):
                raise ConfigError(f"--socket {path} is there already and is not a socket; choose another")
            os.unlink(path)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        before = os.umask(0o177)
        try:
            listener.bind(path)
        except OSError as error:
            hint = " (a socket's path may have 107 bytes: choose a shorter --socket)" if len(path) > 107 else ""
            raise ConfigError(f"cannot listen on {path}: {error.strerror or error}{hint}") from None
        finally:
            os.umask(before)
        self._paths.append(path)
        if group:
            _share(path, members, 0o660, group)
        self._listen(listener, operator)

    def listen_tcp(self, text: str, *, trusted: bool) -> tuple[str, int]:
        listener, _ = bind(text, "--tcp", trusted=trusted)
        self._listen(listener, operator=False)
        bound = listener.getsockname()
        return bound[0], bound[1]

    def _listen(self, listener: socket.socket, operator: bool) -> None:
        listener.setblocking(False)
        listener.listen(BACKLOG)
        self._listeners.append(listener)
        self.core.loop.add_reader(listener.fileno(), self._on_accept, listener, operator)

    def _on_accept(self, listener: socket.socket, operator: bool) -> None:
        for _ in range(ACCEPTS_A_ROUND):
            try:
                sock, _ = listener.accept()
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    self.log.error("cannot accept", reason=os.strerror(error.errno), connections=len(self.connections))
                    self._rest(listener, operator)
                return
            self._welcome(sock, operator)

    def _rest(self, listener: socket.socket, operator: bool) -> None:
        """Out of descriptors: those who wait stay in the backlog for a second."""
        fd = listener.fileno()
        self.core.loop.remove_reader(fd)

        def again() -> None:
            if listener in self._listeners:
                self.core.loop.add_reader(fd, self._on_accept, listener, operator)

        self.core.loop.call_later(1.0, again)

    def _welcome(self, sock: socket.socket, operator: bool) -> None:
        sock.setblocking(False)
        if len(self.connections) >= self._most and not operator:
            refusal = Refusal(
                errors.OVERLOADED, f"there are {self._most} connections already (server.max_connections)", retry_after=1
            )
            with contextlib.suppress(OSError):
                sock.send(refusal.line(None))
            linger(sock, self.core.loop)
            return
        if sock.family == socket.AF_UNIX:
            _, uid, _ = struct.unpack("iII", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
            principal = f"uid:{uid}"
        else:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            principal = "tcp:anonymous"
        self.connections.add(Connection(self, sock, principal, operator))

    # --- ending -----------------------------------------------------------------------------------------------------

    def hung_up(self, connection: Connection) -> None:
        self.connections.discard(connection)
        self.dispatcher.hung_up(connection)
        self._on_hang_up(connection)

    def use_rights(self, rights: Book) -> None:
        """From now on: also for those who are here."""
        self.rights = rights
        for connection in self.connections:
            connection.set_rights()

    def expire(self, now: float) -> None:
        """Callers that closed while they had something outstanding; those too slow, or no longer welcome."""
        for connection in [c for c in self.connections if c.vanished()]:
            connection.close()
        if now >= self._next_look:
            self._next_look = now + LOOK_SECONDS
            for connection in list(self.connections):
                connection.look(now)

    def stop_accepting(self) -> None:
        for listener in self._listeners:
            self.core.loop.remove_reader(listener.fileno())
            listener.close()
        self._listeners.clear()
        for path in self._paths:
            with contextlib.suppress(OSError):
                os.unlink(path)

    def close(self) -> None:
        for connection in list(self.connections):
            connection.close()
        for lock in self._locks:
            os.close(lock)


def _private_directory(directory: Path, members: int) -> None:
    """Makes it, for us (and a group) alone; one that exists must be ours if it is one that we would have made."""
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = directory.lstat()
    except OSError as error:
        raise ConfigError(
            f"cannot make {directory} for the socket: {error.strerror}; choose another --socket"
        ) from None
    if directory.name.startswith("toolhost-broker"):
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
            raise ConfigError(f"{directory} belongs to somebody else; choose another --socket")
        if members >= 0:
            _share(str(directory), members, 0o710, str(members))
        elif found.st_mode & 0o077:
            directory.chmod(0o700)


def _group(name: str) -> int:
    try:
        return int(name) if name.isdecimal() else grp.getgrnam(name).gr_gid
    except KeyError:
        raise ConfigError(f"server.socket_group = {name!r}: there is no such group") from None


def _share(path: str, members: int, mode: int, name: str) -> None:
    try:
        os.chown(path, -1, members)
        os.chmod(path, mode)
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be opened to group {name}: {error.strerror}; are you a member of it? (server.socket_group)"
        ) from None


def _lock(path: str) -> int:
    """One broker a socket: the lock, not the socket's file, says whether one is alive."""
    try:
        fd = os.open(path + ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigError(f"cannot write {path}.lock: {error.strerror}; choose another --socket") from None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        pid = os.read(fd, 32).decode(errors="replace").strip() or "?"
        os.close(fd)
        raise ConfigError(
            f"another broker (pid {pid}) is serving {path}; stop it (kill {pid}) or choose another --socket"
        ) from None
    os.ftruncate(fd, 0)
    os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
    return fd
