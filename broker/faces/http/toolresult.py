"""AutoSage's ToolResult: what it is made of, and how a call's limits cut it. Pure."""

from __future__ import annotations

import contextlib
import itertools
import re
import unicodedata
from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType

from broker.jobs import route, type_of

Metrics = dict[str, Any]
JOBS_FILE = re.compile(r"/v1/jobs/job_[0-9]{4,15}/artifacts/[^/?#.][^/?#]*")


class Artifact(Struct):
    """A file of a job, in the order of its members' names, as all of AutoSage's answers are."""

    bytes: int
    mime_type: str
    name: str
    path: str


class ToolResult(Struct):
    """What became of a call."""

    artifacts: list[Artifact]
    exit_code: int
    metrics: Metrics
    output: Raw | UnsetType
    solver: str
    status: str
    stderr: str
    stdout: str
    summary: str


class Declared(Struct):
    """An artifact as a tool tells of it."""

    name: str
    bytes: int = 0
    mime_type: str = ""
    path: str = ""


class Short(Struct, forbid_unknown_fields=True):
    """A ToolResult as a tool writes it. An output that has these members alone, these two at least, is one;"""

    status: str
    summary: str
    solver: str = ""
    stdout: str = ""
    stderr: str = ""
    exit_code: int = 0
    artifacts: list[Declared] = []
    metrics: Metrics = {}
    output: Raw | UnsetType = UNSET


class Whole(Struct):
    """so is one that has all of them, and others beside them."""

    status: str
    summary: str
    solver: str
    stdout: str
    stderr: str
    exit_code: int
    artifacts: list[Declared]
    metrics: Metrics
    output: Raw | UnsetType = UNSET


Number = int | float  # 32.0 is whole
LARGEST = 1 << 53  # of a limit: more is as good as none


class AskedLimits(Struct):
    """A call's own: all six, or none."""

    timeout_ms: Number
    max_stdout_bytes: Number
    max_stderr_bytes: Number
    max_artifact_bytes: Number
    max_artifacts: Number
    max_summary_characters: Number

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if value != value // 1:
                raise ValueError(f"{name} is not a whole number")

    def bounds(self) -> Limits:
        return Limits(*(max(-LARGEST, min(int(getattr(self, name)), LARGEST)) for name in self.__struct_fields__))


class Limits(NamedTuple):
    timeout_ms: int = 30_000
    max_stdout_bytes: int = 1_000_000
    max_stderr_bytes: int = 1_000_000
    max_artifact_bytes: int = 25_000_000
    max_artifacts: int = 64
    max_summary_characters: int = 280


DEFAULT = Limits()

encode = msgspec.json.Encoder().encode
_short = msgspec.json.Decoder(Short)
_whole = msgspec.json.Decoder(Whole)


def may_be_one(output: str) -> bool:
    """Cheaper than a closer look."""
    return '"summary"' in output and '"status"' in output


def reported(output: str, solver: str, job: str) -> ToolResult | None:
    """The ToolResult that an output is, if it is one."""
    said = _decoded(output, _whole, _short) if '"exit_code"' in output else _decoded(output, _short)
    if said is None:
        return None
    artifacts = [
        Artifact(max(0, one.bytes), one.mime_type or type_of(one.name), one.name, _place(one, job))
        for one in said.artifacts
    ]
    return ToolResult(
        artifacts=artifacts,
        exit_code=said.exit_code,
        metrics=said.metrics,
        output=UNSET if said.output is UNSET or bytes(said.output) == b"null" else said.output,
        solver=said.solver.strip() or solver,
        status=said.status,
        stderr=said.stderr,
        stdout=said.stdout,
        summary=said.summary,
    )


def _decoded(output: str, *decoders: msgspec.json.Decoder[Any]) -> Any:
    for decoder in decoders:
        with contextlib.suppress(msgspec.DecodeError):
            return decoder.decode(output)
    return None


def _place(one: Declared, job: str) -> str:
    """Where it is to be had: among this job's files, or those of the job whose answer is repeated; nowhere else."""
    return one.path if JOBS_FILE.fullmatch(one.path) else route(job, one.name)


def failed(solver: str, summary: str, stderr: str, code: str, metrics: Metrics) -> ToolResult:
    """An error of ours, or one that a tool has thrown."""
    return ToolResult(
        artifacts=[],
        exit_code=1,
        metrics={**metrics, "error_code": code},
        output=UNSET,
        solver=solver,
        status="error",
        stderr=stderr,
        stdout="",
        summary=summary,
    )


# --- limits -----------------------------------------------------------------------------------------------------------


def limit(result: ToolResult, limits: Limits) -> None:
    """Cuts what is over the limits; metrics and the summary's note say what was cut."""
    notes: list[str] = []
    result.stdout, lost = _cut_bytes(result.stdout, limits.max_stdout_bytes)
    if lost:
        result.metrics["stdout_truncated_bytes"] = lost
        notes.append("stdout truncated")
    result.stderr, lost = _cut_bytes(result.stderr, limits.max_stderr_bytes)
    if lost:
        result.metrics["stderr_truncated_bytes"] = lost
        notes.append("stderr truncated")
    summary = _cut_characters(result.summary, limits.max_summary_characters)
    if summary is not result.summary:
        result.summary = summary
        result.metrics["summary_truncated"] = True
        notes.append("summary truncated")
    if result.artifacts:
        fitting = [one for one in result.artifacts if one.bytes <= limits.max_artifact_bytes]
        if removed := len(result.artifacts) - len(fitting):
            result.metrics["artifacts_removed_oversize"] = removed
            notes.append("oversize artifacts removed")
        result.artifacts = fitting[: max(0, limits.max_artifacts)]
        if removed := len(fitting) - len(result.artifacts):
            result.metrics["artifacts_removed_count_cap"] = removed
            notes.append("artifact count capped")
    if notes:
        noted = f"{result.summary} [limits: {', '.join(notes)}]"
        result.summary = _cut_characters(noted, limits.max_summary_characters)


def _cut_bytes(text: str, most: int) -> tuple[str, int]:
    """Cut before a character that does not fit whole, and how many bytes went."""
    if not text or len(text) * 4 <= most:
        return text, 0
    whole = text.encode("utf-8", "replace")
    if len(whole) <= most:
        return text, 0
    kept = whole[: max(0, most)].decode("utf-8", "ignore")
    return kept, len(whole) - len(kept.encode())


def _cut_characters(text: str, most: int) -> str:
    """Characters as readers see them: an accent, or a joined emoji, is none of its own."""
    if len(text) <= most:
        return text
    most = max(0, most)
    begins = range(len(text)) if text.isascii() else list(itertools.islice(_beginnings(text), most + 1))
    if len(begins) <= most:
        return text
    return text[: begins[max(0, most - 3)]] + "..."


def _beginnings(text: str) -> Iterator[int]:
    """Where each character begins. One pass: whoever writes a summary must not choose how long this takes."""
    before, flags = "", 0  # halves of flags in a row
    for at, one in enumerate(text):
        half = "\U0001f1e6" <= one <= "\U0001f1ff"
        if not (at and (_continues(before, one) or (half and flags % 2))):
            yield at
        before, flags = one, flags + 1 if half else 0


def _continues(before: str, one: str) -> bool:
    """This code point belongs to the character before it."""
    if one.isascii():
        return (before == "\r" and one == "\n") or before == "\u200d"
    return (
        before == "\u200d"
        or one in "\u200d\u20e3"
        or "\U0001f3fb" <= one <= "\U0001f3ff"
        or unicodedata.category(one) in ("Mn", "Me", "Mc")
    )
