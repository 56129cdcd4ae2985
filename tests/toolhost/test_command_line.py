"""The modes as a user meets them: usage, help, --list, --run and their exit codes."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

Run = Callable[..., subprocess.CompletedProcess[bytes]]
Where = dict[str, Path]
MEGABYTES_10 = 10_485_760


def test_list_is_one_object_sorted_by_aid_without_a_line_end(run: Run, where: Where) -> None:
    done = run("--list", where["demo_plugin"])
    assert done.returncode == 0
    assert done.stdout.startswith(
        b'{"ok":true,"tools":[{"aid":"AID.DEMO.BLOB.v1","name":"blob","deterministic":true,'
        b'"tags":["demo"],"side_effects":["none"],"replay_inputs":[]},{"aid":"AID.DEMO.COUNTER.v1"'
    )
    assert done.stdout.endswith(b"]}")
    aids = [tool["aid"] for tool in json.loads(done.stdout)["tools"]]
    assert aids == sorted(aids)
    assert set(aids) == {
        "AID.FILE.WRITE.v1",
        *(f"AID.DEMO.{name}.v1" for name in ["ECHO", "SLEEP", "COUNTER", "STATE", "FAIL", "BLOB", "WORD_COUNT"]),
    }


def test_run_answers_with_the_whole_state_and_no_line_end(run: Run, where: Where) -> None:
    slot = b'"6":{"type":"t","provenance":"p","content_json":"[1]","size_bytes":3}'
    request = b'{"input_json":"{\\"a\\":1}","ds_state":{"slots":{' + slot + b"}}}"
    done = run("--run", where["demo_plugin"], "AID.DEMO.ECHO.v1", stdin=request)
    assert done.returncode == 0
    assert done.stdout == (
        b'{"ok":true,"status":"OK","output_json":"{\\"a\\":1}","error":"","ds_state":{"slots":{' + slot + b"}}}"
    )


def test_run_tells_a_tools_failure_in_the_reply_not_in_the_exit_code(run: Run, where: Where) -> None:
    done = run("--run", where["demo_plugin"], "AID.DEMO.FAIL.v1", stdin=b'{"input_json":"{\\"error\\":\\"no\\"}"}')
    assert done.returncode == 0
    assert done.stdout == (
        b'{"ok":false,"status":"TOOL_ERROR","output_json":"{}","error":"no","ds_state":{"slots":{}}}'
    )


@pytest.mark.parametrize(
    "arguments",
    [[], ["--serve"], ["--list"], ["--run"], ["--run", "demo"], ["--run", "demo", ""], ["--fly", "demo"],
     ["--list", "demo", "more"]],
    ids=" ".join,
)  # fmt: skip
def test_wrong_usage_is_exit_2_with_json_on_stdout_and_usage_on_stderr(
    run: Run, where: Where, arguments: list[str]
) -> None:
    done = run(*(where["demo_plugin"] if word == "demo" else word for word in arguments))
    assert done.returncode == 2
    reply = json.loads(done.stdout)
    assert reply["ok"] is False
    assert "usage: machina_toolhost --list" in reply["error"]
    assert ("missing aid" in reply["error"]) == (arguments[:2] == ["--run", "demo"])
    assert done.stderr.startswith(b"usage: ")


@pytest.mark.parametrize("mode", ["--list", "--run", "--serve"])
def test_a_plugin_that_does_not_load_is_exit_3(run: Run, tmp_path: Path, mode: str) -> None:
    text = tmp_path / "text.so"
    text.write_text("not a shared object")
    for path, reason in [
        (tmp_path / "none.so", "cannot open plugin"),
        (text, "cannot load plugin"),
        (tmp_path, "not a file"),
    ]:
        done = run(mode, path, *(["AID.X.v1"] if mode == "--run" else []))
        assert done.returncode == 3
        reply = json.loads(done.stdout)
        assert reply["ok"] is False
        assert reason in reply["error"]
        assert str(path) in reply["error"]
        assert done.stdout.endswith(b"}\n" if mode == "--serve" else b"}")


def test_run_of_an_unknown_tool_is_exit_4(run: Run, where: Where) -> None:
    done = run("--run", where["demo_plugin"], "NOPE", stdin=b"{}")
    assert (done.returncode, done.stdout) == (4, b'{"ok":false,"error":"tool not found in plugin: NOPE"}')


@pytest.mark.parametrize("stdin", [b"", b"x", b"[]", b"{}{}", b'"text"', b"\x00", b'{"a":"\xff"}'])
def test_run_of_what_is_no_json_object_is_exit_5(run: Run, where: Where, stdin: bytes) -> None:
    done = run("--run", where["demo_plugin"], "AID.DEMO.ECHO.v1", stdin=stdin)
    assert (done.returncode, done.stdout) == (5, b'{"ok":false,"error":"invalid JSON request on stdin"}')


def test_run_takes_ten_megabytes_and_not_a_byte_more(run: Run, where: Where) -> None:
    frame = b'{"input_json":"%s"}'
    padding = b"x" * (MEGABYTES_10 - len(frame % b""))
    done = run("--run", where["demo_plugin"], "AID.DEMO.ECHO.v1", stdin=frame % padding)
    assert done.returncode == 0
    assert json.loads(done.stdout)["output_json"] == padding.decode()
    done = run("--run", where["demo_plugin"], "AID.DEMO.ECHO.v1", stdin=frame % (padding + b"x"))
    assert (done.returncode, done.stdout) == (5, b'{"ok":false,"error":"request over 10485760 bytes on stdin"}')


def test_version_and_help(run: Run) -> None:
    assert run("--version").stdout == b"machina_toolhost 0.1.0 (plugin ABI 1)\n"
    text = run("--help").stdout.decode()
    for word in ["--list", "--run", "--serve", "MACHINA_LEASE_ENFORCE", "MACHINA_PLUGIN_SHA256", "Exit codes"]:
        assert word in text


def test_the_example_in_help_works(run: Run, where: Where) -> None:
    text = run("--help").stdout.decode()
    example = next(row.strip() for row in text.splitlines() if row.strip().startswith("echo '"))
    example = example.replace("machina_toolhost", str(where["toolhost"])).replace(
        "./demo_plugin.so", str(where["demo_plugin"])
    )
    done = subprocess.run(["sh", "-c", example], capture_output=True, timeout=60)
    assert json.loads(done.stdout)["output_json"] == '{"n":1}'


@pytest.mark.parametrize("closed", [0, 1, 2], ids=["stdin", "stdout", "stderr"])
def test_a_closed_standard_descriptor_is_no_reason_to_crash(where: Where, closed: int) -> None:
    command = f'exec "$0" --run "$1" AID.DEMO.ECHO.v1 {closed}>&-'
    done = subprocess.run(
        ["sh", "-c", command, where["toolhost"], where["demo_plugin"]], input=b"{}", capture_output=True, timeout=60
    )
    assert done.returncode == (5 if closed == 0 else 0)
