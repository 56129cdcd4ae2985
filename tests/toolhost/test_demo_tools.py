"""The demo plugin's tools, and what they say to a wrong input."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from .talk import Host, demo, environment, line

Serve = Callable[..., Host]


def output(host: Host, request: bytes) -> Any:
    reply = host.ask(request)
    assert reply["ok"] is True, reply
    return json.loads(reply["output_json"])


def test_echo_returns_its_input_verbatim(serve: Serve) -> None:
    host = serve()
    for text in ["{}", ' {"a" : 1.0} ', "not JSON", "", "\u0000é\U0001f408"]:
        assert host.ask(demo("ECHO", text))["output_json"] == text


def test_sleep_sleeps(serve: Serve) -> None:
    started = time.monotonic()
    assert output(serve(), demo("SLEEP", {"ms": 120})) == {"slept_ms": 120}
    assert time.monotonic() - started >= 0.12


def test_counter_counts_the_calls_of_its_process(serve: Serve) -> None:
    host = serve()
    assert [output(host, demo("COUNTER")) for _ in range(3)] == [
        {"count": n, "pid": host.process.pid} for n in (1, 2, 3)
    ]


def test_blob_is_a_json_string_of_so_many_bytes(serve: Serve) -> None:
    host = serve()
    for size in [2, 3, 1000]:
        text = host.ask(demo("BLOB", {"bytes": size}))["output_json"]
        assert len(text) == size
        assert len(json.loads(text)) == size - 2


def test_word_count_counts_words_in_order_of_frequency(serve: Serve) -> None:
    assert output(serve(), demo("WORD_COUNT", {"text": "b a, B! c_1 Käse käse Käse-猫 ."})) == {
        "total_tokens": 8,
        "unique_tokens": 5,
        "counts": [
            {"word": "käse", "count": 3},
            {"word": "b", "count": 2},
            {"word": "a", "count": 1},
            {"word": "c_1", "count": 1},
            {"word": "猫", "count": 1},
        ],
    }
    assert output(serve(), demo("WORD_COUNT", {"text": " ... "})) == {
        "total_tokens": 0, "unique_tokens": 0, "counts": []
    }  # fmt: skip


@pytest.mark.parametrize(
    ("tool", "wrong", "expected"),
    [
        ("SLEEP", "not JSON", "input_json must be a JSON object"),
        ("SLEEP", "[1]", "input_json must be a JSON object"),
        ("SLEEP", {}, '"ms" must be a whole number from 0 to 3600000'),
        ("SLEEP", {"ms": -1}, '"ms" must be a whole number from 0 to 3600000'),
        ("SLEEP", {"ms": 1.5}, '"ms" must be a whole number from 0 to 3600000'),
        ("SLEEP", {"ms": 2**64 - 1}, '"ms" must be a whole number from 0 to 3600000'),
        ("FAIL", {}, '"error" must be a string'),
        ("BLOB", {"bytes": 1}, '"bytes" must be a whole number from 2 to 268435456'),
        ("WORD_COUNT", {"text": 7}, '"text" must be a string'),
        ("STATE", {"op": "put", "slot": 256, "value": 1}, '"slot" must be a whole number from 0 to 255'),
        ("STATE", {"op": "put", "slot": 1}, '"value" is missing: any JSON value will do'),
        ("STATE", {"op": "swap", "slot": 1}, '"op" must be "put", "get" or "del"'),
    ],
)
def test_a_wrong_input_is_a_tool_error_that_says_what_was_expected(
    serve: Serve, tool: str, wrong: object, expected: str
) -> None:
    reply = serve().ask(demo(tool, wrong))
    assert (reply["ok"], reply["status"], reply["error"]) == (False, "TOOL_ERROR", expected)


def test_a_slot_that_holds_no_json_is_not_passed_off_as_json(serve: Serve) -> None:
    reply = serve().ask(demo("STATE", {"op": "get", "slot": 1}, ds_state={"slots": {"1": {"content_json": "{"}}}))
    assert (reply["status"], reply["error"]) == ("TOOL_ERROR", "slot 1 does not hold JSON")


def write(path: object, text: object = "text") -> bytes:
    return line("AID.FILE.WRITE.v1", {"path": path, "text": text})


def test_file_write_writes_and_replaces_below_the_work_directory(serve: Serve, tmp_path: Path) -> None:
    host = serve(MACHINA_WORK_DIR=str(tmp_path / "w"))
    assert output(host, write("a/b/./c.txt", "héllo\u0000")) == {"path": "a/b/./c.txt", "bytes": 7}
    assert (tmp_path / "w/a/b/c.txt").read_bytes() == "héllo\u0000".encode()
    output(host, write("a/b/c.txt", "two"))
    assert (tmp_path / "w/a/b/c.txt").read_text() == "two"
    assert [path.name for path in (tmp_path / "w/a/b").iterdir()] == ["c.txt"]


def test_file_write_uses_the_directory_work_by_default(where: dict[str, Path], tmp_path: Path) -> None:
    command = [str(where["toolhost"]), "--run", str(where["demo_plugin"]), "AID.FILE.WRITE.v1"]
    request = json.dumps({"input_json": json.dumps({"path": "x", "text": "y"})}).encode()
    subprocess.run(command, input=request, cwd=tmp_path, env=environment(), check=True, capture_output=True)
    assert (tmp_path / "work/x").read_text() == "y"


@pytest.mark.parametrize("path", ["", "/etc/x", "../x", "a/../../x", "a/..", "..", ".", "a/", "a\u0000b", 7])
def test_file_write_refuses_paths_that_lead_elsewhere(serve: Serve, tmp_path: Path, path: object) -> None:
    reply = serve(MACHINA_WORK_DIR=str(tmp_path / "w")).ask(write(path))
    assert reply["status"] == "TOOL_ERROR"
    assert '"path"' in reply["error"]
    assert not any(found.is_file() for found in tmp_path.rglob("*"))


def test_file_write_follows_no_link_out_of_the_work_directory(serve: Serve, tmp_path: Path) -> None:
    outside, work = tmp_path / "outside", tmp_path / "w"
    outside.mkdir()
    work.mkdir()
    (outside / "precious").write_text("old")
    (work / "directory").symlink_to(outside)
    (work / "file").symlink_to(outside / "precious")
    host = serve(MACHINA_WORK_DIR=str(work))
    assert host.ask(write("directory/precious"))["status"] == "TOOL_ERROR"
    assert host.ask(write("directory/sub/x"))["status"] == "TOOL_ERROR"
    assert host.ask(write("file"))["ok"] is True  # replaces the link
    assert (outside / "precious").read_text() == "old"
    assert [path.name for path in outside.iterdir()] == ["precious"]
    assert (work / "file").read_text() == "text"
    assert not (work / "file").is_symlink()


def test_file_write_leaves_nothing_behind_when_it_fails(serve: Serve, tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    (tmp_path / "file").touch()
    host = serve(MACHINA_WORK_DIR=str(tmp_path))
    for path in ["taken", "file/below", "n" * 300]:
        assert host.ask(write(path))["status"] == "TOOL_ERROR"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "taken"]


def test_a_file_size_limit_is_an_error_of_the_write_not_a_crash(where: dict[str, Path], tmp_path: Path) -> None:
    request = json.dumps({"input_json": json.dumps({"path": "x", "text": "y" * 10_000})}).encode()
    command = f"ulimit -f 4; exec {where['toolhost']} --run {where['demo_plugin']} AID.FILE.WRITE.v1"
    done = subprocess.run(
        ["bash", "-c", command],
        input=request,
        capture_output=True,
        env=environment({"MACHINA_WORK_DIR": str(tmp_path)}),
    )
    assert (done.returncode, json.loads(done.stdout)["status"]) == (0, "TOOL_ERROR")
    assert os.listdir(tmp_path) == []
