"""A job, and its files: those that every job has, and those that its tool has left."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from broker.faces.caller import Asker
from broker.faces.http.files import sent
from broker.faces.http.records import papers, record
from broker.faces.http.request import Request, Response, answered, trouble
from broker.jobs import Job, Jobs, route, type_of

if TYPE_CHECKING:
    from broker.faces.http.app import App


class JobFiles:
    def __init__(self, jobs: Jobs) -> None:
        self._jobs = jobs

    def add_routes(self, app: App) -> None:
        app.route("GET", "/v1/jobs/*", self.job)

    async def job(self, request: Request) -> Response:
        parts = [part for part in request.raw_path.split("/") if part]  # v1, jobs, ID, artifacts, NAME
        name = _decoded(parts[2]) if len(parts) > 2 else ""
        if len(parts) not in (3, 4, 5) or (len(parts) > 3 and parts[3] != "artifacts"):
            return trouble(404, "not_found", "Unknown route.")
        job = self._jobs.get(name)
        if job is None or not _may_see(request.asker, job):
            return trouble(404, "not_found", f"Job not found: {name}.", job_id=name)
        if len(parts) == 3:
            return answered(record(job))
        if len(parts) == 4:
            return answered({"job_id": job.id, "files": self._files(job)})
        return await self._file(job, _decoded(parts[4]))

    def _files(self, job: Job) -> list[dict[str, Any]]:
        sizes = self._jobs.files(job) | {name: len(content) for name, content in papers(job).items()}
        return [
            {"name": name, "path": route(job.id, name), "mime_type": type_of(name), "bytes": size}
            for name, size in sorted(sizes.items())
        ]

    async def _file(self, job: Job, name: str) -> Response:
        nosniff = ((b"x-content-type-options", b"nosniff"),)
        kind = type_of(name).encode()
        paper = papers(job).get(name)
        if paper is not None:
            return Response(200, paper, kind, nosniff)
        fd = self._jobs.open_file(job, name)
        if fd is None:
            return trouble(404, "not_found", f"Artifact not found: {name}.", job_id=job.id, artifact_name=name)
        return sent(fd, kind, nosniff)


def _decoded(part: str) -> str:
    return unquote(part, errors="replace")


def _may_see(asker: Asker, job: Job) -> bool:
    """Jobs are their callers', and the operator's."""
    return asker.operator or job.who == asker.principal
