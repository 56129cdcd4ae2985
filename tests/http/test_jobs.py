"""Jobs: made by each call, readable at once, kept over restarts, and never a way to other files."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from pathlib import Path

import pytest

from broker.errors import ConfigError
from broker.jobs import Jobs
from broker.model import Place
from broker.observe.log import Log
from broker.runtimes.builtin import write_text_artifact
from tests.support.http import Web


def test_a_job_runs_in_the_background_and_can_be_asked_for(web):
    made = web.ask("POST", "/v1/jobs", {"tool_name": " AID.DEMO.SLEEP.v1 ", "input": {"ms": 300}}).json
    assert set(made) == {"job_id", "status"}
    assert made["status"] == "queued"
    waiting = web.get(f"/v1/jobs/{made['job_id']}").json
    assert (waiting["status"], waiting["summary"]) == ("running", "Input keys: ms")
    deadline = time.monotonic() + 5
    while (job := web.get(f"/v1/jobs/{made['job_id']}").json)["status"] == "running" and time.monotonic() < deadline:
        time.sleep(0.02)
    assert job["status"] == "succeeded"
    assert job["result"]["metrics"]["job_id"] == made["job_id"]
    assert job["created_at"] <= job["started_at"] < job["finished_at"]


def test_who_waits_waits_as_long_as_asked(web):
    slow = {"tool_name": "AID.DEMO.SLEEP.v1", "input": {"ms": 400}, "mode": "sync"}
    assert web.ask("POST", "/v1/jobs", {**slow, "wait_ms": 50}).json["status"] == "running"
    done = web.ask("POST", "/v1/jobs", {**slow, "wait_ms": 5000}).json
    assert (done["status"], done["job"]["status"]) == ("succeeded", "succeeded")


@pytest.mark.parametrize(
    ("body", "code", "message"),
    [
        (None, "invalid_request", "Missing request body."),
        ("{", "invalid_request", "Invalid JSON body."),
        ('{"tool_name":"echo_json","mode":"later"}', "invalid_request", "Invalid JSON body."),
        ('{"tool_name":" "}', "invalid_request", "Missing required field: tool_name."),
        ('{"tool_name":"nope"}', "unknown_tool", "Unsupported tool: nope."),
    ],
)
def test_what_is_no_job_is_refused(web, body, code, message):
    answer = web.ask("POST", "/v1/jobs", body)
    assert answer.status == 400
    assert (answer.json["error"]["code"], answer.json["error"]["message"]) == (code, message)


def test_the_files_of_a_job_are_listed_by_name_and_served(web):
    made = web.execute("write_text_artifact", {"text": "hé", "filename": "a b.csv"}).json
    job = made["metrics"]["job_id"]
    files = web.get(f"/v1/jobs/{job}/artifacts").json["files"]
    assert [one["name"] for one in files] == ["a b.csv", "request.json", "result.json", "summary.json"]
    for one in files:
        answer = web.get(one["path"])
        assert (answer.status, len(answer.body)) == (200, one["bytes"])
        assert answer.headers["content-type"] == one["mime_type"]
    request = web.get(f"/v1/jobs/{job}/artifacts/request.json").json
    assert request == {"tool": "write_text_artifact", "input": {"text": "hé", "filename": "a b.csv"}}
    assert web.get(f"/v1/jobs/{job}/artifacts/result.json").json["filename"] == "a b.csv"


def test_a_large_artifact_is_streamed_whole(web):
    text = "0123456789" * 150_000
    made = web.execute("write_text_artifact", {"text": text}).json
    assert web.get(made["artifacts"][0]["path"]).body.decode() == text


NAMES = ["..", "%2e%2e", "%2e%2e%2frecords", "..%2f..%2flock", "%2fetc%2fpasswd", "%00", ".hidden", "a%5cb", "%ff"]
NAMES += ["x" * 300]


@pytest.mark.parametrize("name", NAMES, ids=lambda name: name[:20])
def test_no_name_leads_out_of_a_jobs_folder(web, name):
    job = web.execute("write_text_artifact", {"text": "x"}).json["metrics"]["job_id"]
    assert web.get(f"/v1/jobs/{job}/artifacts/{name}").status == 404


@pytest.mark.parametrize("job", ["job_9999", "job_1", "job_00001", "..", "%2e%2e", "job_0001%2f..", "", "x" * 500])
def test_no_job_is_found_under_odd_names(web, job):
    web.execute("echo_json", {"message": "x"})
    for path in (f"/v1/jobs/{job}", f"/v1/jobs/{job}/artifacts"):
        answer = web.get(path)
        assert answer.status == 404
        assert answer.json["error"]["code"] == "not_found"


def jobs_folder(folder: Path, web: Web) -> Path:
    return folder / ".local" / "state" / "toolhost-broker" / f"jobs-{web.port}"


def test_links_in_a_jobs_folder_are_neither_listed_nor_followed(start_web, where, tmp_path):
    _, web = start_web("--plugin", where["demo_plugin"])
    job = web.execute("write_text_artifact", {"text": "x"}).json["metrics"]["job_id"]
    folder = jobs_folder(tmp_path, web) / job
    os.symlink("/etc/passwd", folder / "link.txt")
    os.mkfifo(folder / "fifo.txt")
    (folder / "folder.txt").mkdir()
    names = {one["name"] for one in web.get(f"/v1/jobs/{job}/artifacts").json["files"]}
    assert names == {"note.txt", "request.json", "result.json", "summary.json"}
    for name in ("link.txt", "fifo.txt", "folder.txt"):
        assert web.get(f"/v1/jobs/{job}/artifacts/{name}").status == 404
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "note.txt").write_text("secret")
    for one in folder.iterdir():
        one.rmdir() if one.is_dir() and not one.is_symlink() else one.unlink()
    folder.rmdir()
    os.symlink(elsewhere, folder)
    assert web.get(f"/v1/jobs/{job}/artifacts/note.txt").status == 404


def test_jobs_and_their_numbers_outlive_the_broker_also_when_it_is_killed(start_web, where):
    served, web = start_web("--plugin", where["demo_plugin"])
    port = f"127.0.0.1:{web.port}"
    first = web.execute("write_text_artifact", {"text": "kept"}).json
    running = web.ask("POST", "/v1/jobs", {"tool_name": "AID.DEMO.SLEEP.v1", "input": {"ms": 9000}}).json["job_id"]
    assert (first["metrics"]["job_id"], running) == ("job_0001", "job_0002")
    time.sleep(0.2)
    os.kill(served.process.pid, signal.SIGKILL)
    served.process.wait()
    served, web = start_web("--plugin", where["demo_plugin"], "--http", port)
    assert web.get(first["artifacts"][0]["path"]).body == b"kept"
    assert web.get("/v1/jobs/job_0001").json["status"] == "succeeded"
    lost = web.get(f"/v1/jobs/{running}").json
    assert (lost["status"], lost["error"]["code"]) == ("failed", "interrupted")
    after = web.execute("echo_json", {"message": "x"}).json["metrics"]["job_id"]
    assert int(after.removeprefix("job_")) > 2  # what a killed broker has promised is not given out again
    assert served.stop() == 0
    _, web = start_web("--plugin", where["demo_plugin"], "--http", port)
    following = web.execute("echo_json", {"message": "x"}).json["metrics"]["job_id"]
    assert int(following.removeprefix("job_")) == int(after.removeprefix("job_")) + 1


def test_two_brokers_do_not_share_a_folder_of_jobs(store, tmp_path):
    store()
    with pytest.raises(ConfigError, match=r"another broker is using it; choose another folder \(http\.jobs\)"):
        Jobs(tmp_path / "jobs", 1e6, 1 << 30, Log()).open()


def test_a_commands_files_are_artifacts_of_its_job(start_web, tmp_path):
    script = tmp_path / "files.sh"
    script.write_text('#!/bin/sh\necho one >"$BROKER_JOB_DIR/one.log"\nprintf \'{"output_json":"{}","status":"OK"}\'\n')
    script.chmod(0o755)
    _, web = start_web(config=f'[[oneshot]]\nname = "util_files"\ncommand = ["{script}"]\n')
    (artifact,) = web.execute("util_files", {}).json["artifacts"]
    assert (artifact["name"], artifact["bytes"]) == ("one.log", 4)
    assert web.get(artifact["path"]).body == b"one\n"


# --- the store on its own ---------------------------------------------------------------------------------------------


@pytest.fixture
def store(tmp_path):
    made = []

    def begin(seconds: float = 1e6, most: int = 1 << 30) -> Jobs:
        jobs = Jobs(tmp_path / "jobs", seconds, most, Log())
        jobs.open()
        made.append(jobs)
        return jobs

    yield begin
    for jobs in made:
        jobs.close()


def ended(jobs: Jobs, count: int, size: int = 10) -> list[str]:
    names = []
    for _ in range(count):
        job = jobs.new("a tool", '{"n":1}', None, "somebody")
        jobs.succeed(job, b"x" * size, "done")
        names.append(job.id)
    return names


def written(jobs: Jobs) -> None:
    deadline = time.monotonic() + 10
    while (jobs._unsaved or jobs._saving) and time.monotonic() < deadline:
        time.sleep(0.01)


def test_a_job_is_found_before_and_after_it_is_written(store):
    jobs = store()
    names = ended(jobs, 3000)
    assert all(jobs.get(name).summary == "done" for name in names[::97])
    written(jobs)
    assert all(jobs.get(name).summary == "done" for name in names[::97])
    assert jobs.get("job_9999") is None


def test_old_jobs_are_removed_with_their_files_when_there_is_too_much(store, tmp_path):
    jobs = store(most=200_000)
    first = jobs.new("a tool", "{}", None, "somebody")
    folder = Path(jobs.place(first).folder)
    folder.mkdir()
    (folder / "file.txt").write_bytes(b"x" * 1000)
    jobs.succeed(first, b"{}", "done")
    for _ in range(30):
        last = ended(jobs, 50, size=200)[-1]
        written(jobs)
    jobs._expire()
    assert jobs.get(first.id) is None
    assert not folder.exists()
    assert jobs.get(last).summary == "done"
    assert sum(one.stat().st_size for one in (tmp_path / "jobs").glob("records-*")) < 260_000


def test_files_count_however_short_their_jobs_records_are(store):
    jobs = store(most=1_000_000)
    for _ in range(40):
        job = jobs.new("a tool", "{}", None, "somebody")
        folder = Path(jobs.place(job).folder)
        folder.mkdir()
        (folder / "file.bin").write_bytes(b"x" * 100_000)
        jobs.succeed(job, b"{}", "done")
        written(jobs)
    jobs._expire()
    kept = [folder for folder in jobs.directory.glob("job_*") if any(folder.iterdir())]
    assert 5 <= len(kept) <= 10
    assert jobs.get(job.id).summary == "done"


def test_jobs_of_a_broker_with_little_to_do_go_with_age_too(store):
    jobs = store(seconds=0.4)
    name = ended(jobs, 1)[0]
    written(jobs)
    time.sleep(0.6)
    jobs._expire()
    assert jobs.get(name) is None


def test_a_file_that_could_not_be_written_leaves_nothing(tmp_path, monkeypatch):
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="No space"):
        write_text_artifact({"text": "x"}, Place("job_0001", str(tmp_path / "job"), 100))
    assert list((tmp_path / "job").iterdir()) == []


def test_a_line_that_a_crash_has_cut_is_passed_over(store, tmp_path):
    jobs = store()
    names = ended(jobs, 5)
    jobs.close()
    (records,) = (tmp_path / "jobs").glob("records-*")
    content = records.read_bytes()
    torn = records.with_name("records-000001.ndjson")
    records.rename(torn)
    torn.write_bytes(content[: content.rindex(b"\n", 0, -1) + 20])
    again = store()
    assert again.get(names[0]).summary == "done"
    assert again.get(names[4]) is None
    assert again.new("a tool", "{}", None, "somebody").number == 6


def test_a_full_disk_stops_no_call_and_is_said_once(tmp_path, capsys):
    jobs = Jobs(tmp_path / "jobs", 1e6, 1 << 30, Log())
    jobs.open()
    real, full = os.write, [True]

    def write(fd, data):
        if full[0] and re.search("records-", os.readlink(f"/proc/self/fd/{fd}")):
            raise OSError(28, "No space left on device")
        return real(fd, data)

    os.write = write
    try:
        names = ended(jobs, 10)
        time.sleep(0.3)
        assert all(jobs.get(name) is not None for name in names)
        full[0] = False
        deadline = time.monotonic() + 10
        while not list((tmp_path / "jobs").glob("records-*")) or jobs._unsaved or jobs._saving:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        jobs.close()
    finally:
        os.write = real
    said = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [one["reason"] for one in said] == ["No space left on device"]
    again = Jobs(tmp_path / "jobs", 1e6, 1 << 30, Log())
    again.open()
    assert all(again.get(name) is not None for name in names)
    again.close()
