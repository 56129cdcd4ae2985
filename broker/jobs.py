"""Jobs: every call over HTTP is one, kept on disk behind its answer; files of its are in a folder of its own.

Records are rows of one SQLite file, written by a thread many at a time: a folder of four files for each call would cost
more than the call. What has not been written yet is read from memory.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import sqlite3
import stat
import threading
import time
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec
from msgspec import Struct

from broker.errors import ConfigError
from broker.model import Place
from broker.observe.log import Log

UNESCAPED = "!$&'()*+,-./=@_~"  # in a path, as AutoSage's clients know it, beside letters and digits
TYPES = {
    "json": "application/json",
    "log": "text/plain; charset=utf-8",
    "txt": "text/plain; charset=utf-8",
    "cir": "text/plain; charset=utf-8",
    "mesh": "text/plain; charset=utf-8",
    "csv": "text/csv; charset=utf-8",
    "vtk": "model/vtk",
}
ID = re.compile(r"job_([0-9]{4,15})")
BEHIND_BYTES = 64 * 1024 * 1024  # not written yet: then nobody gets a new job
BLOCK = 1000  # numbers that are promised at a time: none is given out twice, also after a crash
EXPIRE_SECONDS = 30.0
LARGEST_ARTIFACT = 25_000_000
COLUMNS = (
    "tool TEXT, created REAL, started REAL, finished REAL, status TEXT, summary TEXT,"
    " request BLOB, response BLOB, error BLOB, who TEXT, size INTEGER"
)
ROW = "number, tool, created, started, finished, status, summary, request, response, error, who"

QUEUED, RUNNING, SUCCEEDED, FAILED = "queued", "running", "succeeded", "failed"
INTERRUPTED = msgspec.json.encode(
    {"code": "interrupted", "message": "The broker stopped while this job was under way."}
)


class Job(Struct, gc=False):
    """One call: what was asked, and what became of it."""

    number: int
    tool: str
    created: float
    started: float = 0.0
    finished: float = 0.0
    status: str = QUEUED
    summary: str | None = None
    request: bytes = b""
    response: bytes = b""  # the ToolResult
    error: bytes = b""  # {"code", "message"} where it failed
    who: str = ""  # whose it is: a principal

    @property
    def id(self) -> str:
        return f"job_{self.number:04d}"

    def size(self) -> int:
        return 200 + len(self.request) + len(self.response) + len(self.error)


class Jobs:
    def __init__(self, directory: Path, seconds: float, most_bytes: int, log: Log) -> None:
        self.directory = directory
        self._seconds = seconds
        self._most_bytes = most_bytes
        self._log = log
        self._running: dict[int, Job] = {}
        self._lock = threading.Lock()
        self._unsaved: dict[int, Job] = {}
        self._saving: dict[int, Job] = {}
        self._unsaved_bytes = 0
        self._wake = threading.Event()
        self._stop = False
        self._trouble = ""
        self._next = 1
        self._promised = 0
        self._size = 0
        self._lock_fd = -1
        self._reader: sqlite3.Connection | None = None
        self._thread = threading.Thread(target=self._write_behind, name="broker-jobs", daemon=True)

    # --- start and end ----------------------------------------------------------------------------------------------

    def open(self) -> None:
        try:
            self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock_fd = os.open(self.directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise self._cannot(error.strerror or str(error)) from None
        try:
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise self._cannot("another broker is using it") from None
        try:
            self._reader = self._connect()
            self._prepare(self._reader)
        except sqlite3.Error as error:
            raise self._cannot(str(error)) from None
        self._thread.start()

    def _cannot(self, why: str) -> ConfigError:
        return ConfigError(f"jobs cannot be kept in {self.directory}: {why}; choose another folder (http.jobs)")

    def _connect(self) -> sqlite3.Connection:
        connection = sqlite3.connect(self.directory / "jobs.sqlite", isolation_level=None, check_same_thread=False)
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA synchronous=NORMAL")  # a power cut may lose the last moments, never the file
        return connection

    def _prepare(self, connection: sqlite3.Connection) -> None:
        """The tables, the next number, and what became of those that were under way."""
        connection.execute("PRAGMA auto_vacuum=INCREMENTAL")
        connection.execute(f"CREATE TABLE IF NOT EXISTS jobs (number INTEGER PRIMARY KEY, {COLUMNS})")
        connection.execute("CREATE TABLE IF NOT EXISTS promised (number INTEGER)")
        highest, self._size = connection.execute(
            "SELECT coalesce(max(number), 0), coalesce(sum(size), 0) FROM jobs"
        ).fetchone()
        promised = connection.execute("SELECT coalesce(max(number), 0) FROM promised").fetchone()[0]
        folders = [int(found[1]) for name in os.listdir(self.directory) if (found := ID.fullmatch(name))]
        self._next = max(highest, promised, *folders, 0) + 1
        connection.execute(
            "UPDATE jobs SET status = ?, finished = ?, error = ? WHERE status IN (?, ?)",
            (FAILED, time.time(), INTERRUPTED, QUEUED, RUNNING),
        )

    def close(self) -> None:
        """What is unsaved is written first."""
        if self._reader is None:
            return
        self._stop = True
        self._wake.set()
        self._thread.join()
        with contextlib.suppress(sqlite3.Error):  # the next number is known: none need be skipped
            self._reader.execute("DELETE FROM promised")
            self._reader.execute("INSERT INTO promised VALUES (?)", (self._next - 1,))
        self._reader.close()
        self._reader = None
        os.close(self._lock_fd)

    # --- a job's life -----------------------------------------------------------------------------------------------

    def new(self, tool: str, request: bytes, summary: str | None, who: str) -> Job:
        number, self._next = self._next, self._next + 1
        if number > self._promised:
            self._promise(number + BLOCK)
        job = self._running[number] = Job(number, tool, time.time(), summary=summary, request=request, who=who)
        return job

    def _promise(self, number: int) -> None:
        self._promised = number
        assert self._reader is not None
        try:
            self._reader.execute("INSERT INTO promised VALUES (?)", (number,))
        except sqlite3.Error as error:
            self._complain(str(error))

    def start(self, job: Job) -> None:
        job.status, job.started = RUNNING, time.time()

    def succeed(self, job: Job, response: bytes, summary: str) -> None:
        self._end(job, SUCCEEDED)
        job.response, job.summary = response, summary
        self.save(job)

    def fail(self, job: Job, code: str, message: str, response: bytes = b"") -> None:
        self._end(job, FAILED)
        job.response, job.summary = response, None
        job.error = msgspec.json.encode({"code": code, "message": message})
        self.save(job)

    def _end(self, job: Job, status: str) -> None:
        job.finished = time.time()
        job.started = job.started or job.created
        job.status = status

    def save(self, job: Job) -> None:
        """As it is now; soon on disk, at once to be read."""
        if job.finished:
            self._running.pop(job.number, None)
        with self._lock:
            self._unsaved[job.number] = msgspec.structs.replace(job) if not job.finished else job
            self._unsaved_bytes += job.size()
        if not self._wake.is_set():
            self._wake.set()

    def behind(self) -> bool:
        """The disk is slower than the calls: whoever wants a job has to wait."""
        return self._unsaved_bytes > BEHIND_BYTES

    def get(self, name: str) -> Job | None:
        found = ID.fullmatch(name)
        if found is None or name != f"job_{int(found[1]):04d}":
            return None
        number = int(found[1])
        job = self._running.get(number)
        if job is None:
            with self._lock:
                job = self._unsaved.get(number) or self._saving.get(number)
        return job or self._read(number)

    def _read(self, number: int) -> Job | None:
        assert self._reader is not None
        try:
            row = self._reader.execute(f"SELECT {ROW} FROM jobs WHERE number = ?", (number,)).fetchone()
        except sqlite3.Error as error:
            self._complain(str(error))
            return None
        return Job(*row) if row else None

    # --- files of a job ---------------------------------------------------------------------------------------------

    def folder(self, job: Job) -> Path:
        return self.directory / job.id

    def place(self, job: Job, largest: int = LARGEST_ARTIFACT) -> Place:
        return Place(job.id, str(self.folder(job)), largest)

    def files(self, job: Job) -> dict[str, int]:
        """What is in its folder: plain files with plain names, and their sizes."""
        found = {}
        try:
            with os.scandir(self.folder(job)) as entries:
                for entry in entries:
                    if is_plain(entry.name) and entry.is_file(follow_symlinks=False):
                        found[entry.name] = entry.stat(follow_symlinks=False).st_size
        except OSError:
            pass
        return found

    def open_file(self, job: Job, name: str) -> int | None:
        """A descriptor of one of them. No link is followed, and nothing but a plain file is opened."""
        if not is_plain(name):
            return None
        try:
            folder = os.open(self.folder(job), os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
        except (OSError, ValueError):
            return None
        finally:
            os.close(folder)
        if stat.S_ISREG(os.fstat(fd).st_mode):
            return fd
        os.close(fd)
        return None

    # --- the thread -------------------------------------------------------------------------------------------------

    def _write_behind(self) -> None:
        connection = self._connect()
        expired = 0.0
        while not self._stop or self._unsaved:
            self._wake.wait(EXPIRE_SECONDS)
            self._wake.clear()
            with self._lock:
                self._saving, self._unsaved = self._unsaved, {}
                size, self._unsaved_bytes = self._unsaved_bytes, 0
            try:
                self._store(connection, list(self._saving.values()))
                if time.monotonic() > expired + EXPIRE_SECONDS:
                    expired = time.monotonic()
                    self._expire(connection)
            except (sqlite3.Error, OSError) as error:  # a full disk must not stop calls; the newest are still here
                self._complain(str(error))
                self._keep_for_later(size)
                if self._stop:
                    break
                time.sleep(1.0)
            else:
                self._trouble = ""
            self._saving = {}
            if not self._stop:
                time.sleep(0.02)  # many at a time
        connection.close()

    def _store(self, connection: sqlite3.Connection, jobs: list[Job]) -> None:
        if not jobs:
            return
        rows = []
        for job in jobs:
            size = job.size() + sum(self.files(job).values())
            rows.append((*msgspec.structs.astuple(job), size))
            self._size += size
        with _transaction(connection):
            connection.executemany(f"INSERT OR REPLACE INTO jobs VALUES ({', '.join('?' * len(rows[0]))})", rows)

    def _keep_for_later(self, size: int) -> None:
        """As many as memory may hold; the oldest are lost."""
        with self._lock:
            if self._unsaved_bytes + size <= BEHIND_BYTES // 2:
                self._unsaved = {**self._saving, **self._unsaved}
                self._unsaved_bytes += size

    def _expire(self, connection: sqlite3.Connection) -> None:
        """By age, then by size, the oldest first."""
        self._remove(connection, "finished > 0 AND finished < ?", time.time() - self._seconds)
        while self._size > self._most_bytes:
            before = self._size
            some = "SELECT number FROM jobs WHERE finished > 0 ORDER BY number LIMIT 100"
            oldest = connection.execute(some).fetchall()
            if not oldest:
                break
            self._remove(connection, "finished > 0 AND number <= ?", oldest[-1][0])
            if self._size >= before:
                break
        connection.execute("PRAGMA incremental_vacuum")

    def _remove(self, connection: sqlite3.Connection, which: str, value: Any) -> None:
        gone = connection.execute(f"SELECT number FROM jobs WHERE {which}", (value,)).fetchall()
        if not gone:
            return
        for (number,) in gone:
            shutil.rmtree(self.directory / f"job_{number:04d}", ignore_errors=True)
        connection.execute(f"DELETE FROM jobs WHERE {which}", (value,))
        self._size = connection.execute("SELECT coalesce(sum(size), 0) FROM jobs").fetchone()[0]

    def _complain(self, why: str) -> None:
        if why != self._trouble:
            self._trouble = why
            self._log.error("jobs cannot be kept on disk", folder=str(self.directory), reason=why)


@contextlib.contextmanager
def _transaction(connection: sqlite3.Connection) -> Any:
    connection.execute("BEGIN")
    try:
        yield
    except BaseException:
        with contextlib.suppress(sqlite3.Error):
            connection.execute("ROLLBACK")
        raise
    connection.execute("COMMIT")


def is_plain(name: str) -> bool:
    """A file's name that leads nowhere else."""
    odd = not name or name.startswith(".") or len(name.encode("utf-8", "surrogateescape")) > 255
    return not odd and not any(part in name for part in ("/", "\\", "..", "\0"))


def route(job: str, name: str) -> str:
    """Where a file of a job's is to be had over HTTP."""
    return f"/v1/jobs/{job}/artifacts/{quote(name, safe=UNESCAPED)}"


def type_of(name: str) -> str:
    """By the name's ending."""
    _, dot, ending = name.rpartition(".")
    return TYPES.get(ending.lower() if dot else "", "application/octet-stream")
