"""Jobs: every call over HTTP is one, kept on disk behind its answer; files of its are in a folder of its own.

A thread writes the records, many at a time: a folder of files for each call would cost more than the call. What has not
been written yet is read from memory.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import stat
import threading
import time
from pathlib import Path
from urllib.parse import quote

import msgspec
from msgspec import Struct

from broker.errors import ConfigError
from broker.journal import Journal
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
SEGMENT_BYTES = 4 * 1024 * 1024
BLOCK = 1000  # numbers that are promised at a time: none is given out twice, also after a crash
PAUSE_SECONDS = 0.02  # between two writes: many at a time
EXPIRE_SECONDS = 30.0
RETRY_SECONDS = 1.0
LARGEST_ARTIFACT = 25_000_000

QUEUED, RUNNING, SUCCEEDED, FAILED = "queued", "running", "succeeded", "failed"


class Job(Struct, gc=False, array_like=True):
    """One call: what was asked, and what became of it."""

    number: int
    tool: str
    who: str  # whose it is: a principal
    created: float
    started: float = 0.0
    finished: float = 0.0
    status: str = QUEUED
    summary: str | None = None
    request: str = ""
    response: str = ""  # the ToolResult
    error: str = ""  # {"code", "message"} where it failed
    filed: bool = False  # there may be files in its folder

    @property
    def id(self) -> str:
        return f"job_{self.number:04d}"

    def size(self) -> int:
        return 200 + len(self.request) + len(self.response)


_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(Job).decode


class Jobs:
    def __init__(self, directory: Path, seconds: float, most_bytes: int, log: Log) -> None:
        self.directory = directory
        self._seconds = seconds
        self._most_bytes = most_bytes
        self._log = log
        self._journal = Journal(directory, min(SEGMENT_BYTES, most_bytes // 8 + 1), seconds / 8, most_bytes // 8 + 1)
        self._running: dict[int, Job] = {}
        self._lock = threading.Lock()
        self._unsaved: dict[int, Job] = {}
        self._saving: dict[int, Job] = {}
        self._unsaved_bytes = 0
        self._files_bytes = 0
        self._wake = threading.Event()
        self._stop = False
        self._trouble = ""
        self._next = 1
        self._promised = 0
        self._lock_fd = self._promise_fd = -1
        self._thread = threading.Thread(target=self._write_behind, name="broker-jobs", daemon=True)

    # --- start and end ----------------------------------------------------------------------------------------------

    def open(self) -> None:
        try:
            self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock_fd = os.open(self.directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._promise_fd = os.open(self.directory / "promised", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            promised = int(os.pread(self._promise_fd, 32, 0) or b"0")
            folders = {int(found[1]) for name in os.listdir(self.directory) if (found := ID.fullmatch(name))}
            self._next = max(self._journal.open(), promised, *folders, 0) + 1
            self._files_bytes = sum(sum(self._files(number).values()) for number in folders)
        except BlockingIOError:
            raise self._cannot("another broker is using it") from None
        except (OSError, ValueError) as error:
            raise self._cannot(getattr(error, "strerror", None) or str(error)) from None
        self._thread.start()

    def _cannot(self, why: str) -> ConfigError:
        return ConfigError(f"jobs cannot be kept in {self.directory}: {why}; choose another folder (http.jobs)")

    def close(self) -> None:
        """What is unsaved is written first."""
        if not self._thread.is_alive():
            return
        self._stop = True
        self._wake.set()
        self._thread.join()
        self._promise(self._next - 1)  # the next number is known: none need be skipped
        os.close(self._promise_fd)
        os.close(self._lock_fd)

    # --- a job's life -----------------------------------------------------------------------------------------------

    def new(self, tool: str, request: str, summary: str | None, who: str) -> Job:
        number, self._next = self._next, self._next + 1
        if number > self._promised:
            self._promise(number + BLOCK)
        job = self._running[number] = Job(number, tool, who, time.time(), summary=summary, request=request)
        return job

    def _promise(self, number: int) -> None:
        self._promised = number
        try:
            os.pwrite(self._promise_fd, b"%-20d\n" % number, 0)
        except OSError as error:
            self._complain(error)

    def start(self, job: Job) -> None:
        job.status, job.started = RUNNING, time.time()

    def succeed(self, job: Job, response: bytes, summary: str) -> None:
        job.response, job.summary = response.decode(), summary
        self._end(job, SUCCEEDED)

    def fail(self, job: Job, code: str, message: str, response: bytes = b"") -> None:
        job.response, job.summary = response.decode(), None
        job.error = _encode({"code": code, "message": message}).decode()
        self._end(job, FAILED)

    def _end(self, job: Job, status: str) -> None:
        job.finished = time.time()
        job.started = job.started or job.created
        job.status = status
        self._running.pop(job.number, None)
        self.save(job)

    def save(self, job: Job) -> None:
        """As it is now; soon on disk, at once to be read."""
        with self._lock:
            self._unsaved[job.number] = job if job.finished else msgspec.structs.replace(job)
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
        row = self._journal.find(number)
        if row is None:
            return None
        job = _decode(row)
        if not job.finished:  # and it is not under way
            job.status, job.finished, job.summary = FAILED, job.created, None
            job.error = '{"code":"interrupted","message":"The broker stopped before this job had ended."}'
        return job

    # --- files of a job ---------------------------------------------------------------------------------------------

    def place(self, job: Job, largest: int = LARGEST_ARTIFACT) -> Place:
        """From now on there may be files."""
        job.filed = True
        return Place(job.id, str(self.directory / job.id), largest)

    def files(self, job: Job) -> dict[str, int]:
        """What is in its folder: plain files with plain names, and their sizes."""
        return self._files(job.number) if job.filed else {}

    def _files(self, number: int) -> dict[str, int]:
        found: dict[str, int] = {}
        folder = self._folder(number)
        if folder is None:
            return found
        try:
            with contextlib.suppress(OSError), os.scandir(folder) as entries:
                for entry in entries:
                    if is_plain(entry.name) and entry.is_file(follow_symlinks=False):
                        found[entry.name] = entry.stat(follow_symlinks=False).st_size
        finally:
            os.close(folder)
        return found

    def _folder(self, number: int) -> int | None:
        """A descriptor of it, where it is a folder and no link to one."""
        path = self.directory / f"job_{number:04d}"
        try:
            return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            return None

    def open_file(self, job: Job, name: str) -> int | None:
        """A descriptor of one of them. No link is followed, and nothing but a plain file is opened."""
        folder = self._folder(job.number) if is_plain(name) else None
        if folder is None:
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
        looked = 0.0
        while not self._stop or self._unsaved:
            self._wake.wait(EXPIRE_SECONDS)
            self._wake.clear()
            with self._lock:
                self._saving, self._unsaved = self._unsaved, {}
                size, self._unsaved_bytes = self._unsaved_bytes, 0
            try:
                self._write(list(self._saving.values()))
                if time.monotonic() > looked + EXPIRE_SECONDS:
                    looked = time.monotonic()
                    self._expire()
            except Exception as error:  # a full disk, or a mistake of ours, must not stop calls
                self._complain(error)
                self._keep_for_later(size)
                if self._stop:
                    break
                time.sleep(RETRY_SECONDS)
                self._wake.set()
            else:
                self._trouble = ""
            self._saving = {}
            if not self._stop:
                time.sleep(PAUSE_SECONDS)
        with contextlib.suppress(OSError):
            self._journal.close()

    def _write(self, jobs: list[Job]) -> None:
        if jobs:
            files = sum(sum(self.files(job).values()) for job in jobs if job.filed and job.finished)
            self._journal.append([(job.number, _encode(job)) for job in jobs], files)
            self._files_bytes += files

    def _keep_for_later(self, size: int) -> None:
        """As many as memory may hold; the oldest are lost."""
        with self._lock:
            if self._unsaved_bytes + size <= BEHIND_BYTES // 2:
                self._unsaved = {**self._saving, **self._unsaved}
                self._unsaved_bytes += size

    def _expire(self) -> None:
        """By age, then by size, the oldest first."""
        while (
            self._journal.expired(time.time() - self._seconds)
            or self._journal.size + self._files_bytes > self._most_bytes
        ):
            numbers = self._journal.drop_oldest()
            if not numbers:
                break
            for number in numbers:
                if files := self._files(number):
                    self._files_bytes -= sum(files.values())
                shutil.rmtree(self.directory / f"job_{number:04d}", ignore_errors=True)

    def _complain(self, error: Exception) -> None:
        why = getattr(error, "strerror", None) or repr(error)
        if why != self._trouble:
            self._trouble = why
            self._log.error("jobs cannot be kept on disk", folder=str(self.directory), reason=why)


def is_plain(name: str) -> bool:
    """A file's name that leads nowhere else, and can be written in an answer."""
    try:
        odd = not name or name.startswith(".") or len(name.encode()) > 255
    except UnicodeEncodeError:
        return False
    return not odd and not any(part in name for part in ("/", "\\", "..", "\0"))


def route(job: str, name: str) -> str:
    """Where a file of a job's is to be had over HTTP."""
    return f"/v1/jobs/{job}/artifacts/{quote(name, safe=UNESCAPED)}"


def type_of(name: str) -> str:
    """By the name's ending."""
    _, dot, ending = name.rpartition(".")
    return TYPES.get(ending.lower() if dot else "", "application/octet-stream")
