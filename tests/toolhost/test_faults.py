"""Every fault does what it says, and our toolhost stands what a plugin can do to it."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from .talk import EMPTY_DELTA, Host, demo, fault, replies, serving

Serve = Callable[..., Host]
Where = dict[str, Path]


def ends(pid: int, within: float) -> bool:
    """Whether the process is gone, or a zombie, in time."""
    until = time.monotonic() + within
    while time.monotonic() < until:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z":
                return True
        except FileNotFoundError:
            return True
        time.sleep(0.01)
    return False


def test_no_fault_tool_is_pure_or_needs_a_lease(where: Where) -> None:
    toolhost, plugin, faults = (str(where[name]) for name in ("toolhost", "fault_plugin", "fault_toolhost"))
    for command in [toolhost, "--list", plugin], [faults, "--list"], [faults, "--list", "any.so"]:
        tools = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)["tools"]
        assert len(tools) == 8
        assert all(tool["aid"].startswith("AID.FAULT.") for tool in tools)
        assert all(not tool["deterministic"] and tool["side_effects"] == ["fault"] for tool in tools)


def test_segv_and_exit_end_the_process(serve: Serve) -> None:
    assert serve("fault_plugin").finish(fault("SEGV"))[:2] == (-signal.SIGSEGV, b"")
    assert serve("fault_plugin").finish(fault("EXIT", {"code": 42}))[:2] == (42, b"")


def test_hang_ends_on_sigterm_and_hang_term_does_not(serve: Serve) -> None:
    for tool, dies in [("HANG", True), ("HANG_TERM", False)]:
        host = serve("fault_plugin")
        host.send(fault(tool))
        time.sleep(0.3)
        host.process.terminate()
        assert ends(host.process.pid, 0.5) is dies


def test_stderr_gets_so_many_bytes_and_the_call_is_answered(serve: Serve) -> None:
    code, out, err = serve("fault_plugin").finish(fault("STDERR", {"bytes": 3_000_001}))
    assert (code, len(err), replies(out)[0]["ok"]) == (0, 3_000_001, True)


def test_a_grandchild_stays_in_the_group_with_the_pipe_open(serve: Serve) -> None:
    host = serve("fault_plugin")
    pid = json.loads(host.ask(fault("GRANDCHILD", {"ms": 30_000}))["output_json"])["pid"]
    host.process.kill()
    host.process.wait()
    assert not ends(pid, 0.2)
    assert host.raw_line(timeout=0.2) == b""  # not even the end of input: the grandchild holds the pipe
    assert os.getpgid(pid) == host.process.pid
    os.killpg(host.process.pid, signal.SIGKILL)
    assert ends(pid, 5)


def test_memory_is_taken_and_given_back_or_kept(serve: Serve) -> None:
    host = serve("fault_plugin")

    def resident() -> int:
        return int(Path(f"/proc/{host.process.pid}/statm").read_text().split()[1]) * 4096 >> 20

    before = resident()
    assert host.ask(fault("MEMORY", {"mb": 50, "keep": True}))["ok"] is True
    assert resident() >= before + 50


def limited(where: Where, plugin: str, megabytes: int) -> list[str]:
    return ["bash", "-c", f"ulimit -v {megabytes * 1024}; exec {where['toolhost']} --serve {where[plugin]}"]


@pytest.mark.usefixtures("limits_hold")
def test_a_tool_that_runs_out_of_memory_is_an_error_not_a_crash(where: Where) -> None:
    with serving(limited(where, "fault_plugin", 300)) as host:
        reply = host.ask(fault("MEMORY", {"mb": 1000}))
        assert (reply["status"], reply["error"]) == ("TOOL_ERROR", "std::bad_alloc")
        assert host.ask(fault("MEMORY", {"mb": 10}))["ok"] is True


@pytest.mark.usefixtures("limits_hold")
def test_a_reply_that_memory_has_no_room_for_is_an_error_and_the_state_stays(where: Where) -> None:
    with serving(limited(where, "demo_plugin", 300)) as host:
        host.ask(demo("STATE", {"op": "put", "slot": 1, "value": 1}))
        reply = host.ask(demo("BLOB", {"bytes": 200_000_000}), timeout=30)
        assert (reply["ok"], reply["status"]) == (False, "TOOL_ERROR")
        assert reply["error"] in ("out of memory while writing the reply", "std::bad_alloc")
        assert reply["ds_state"] == EMPTY_DELTA
        assert '"found":true' in host.ask(demo("STATE", {"op": "get", "slot": 1}))["output_json"]


def test_what_a_tool_prints_goes_to_stderr_and_never_into_a_reply(serve: Serve, where: Where) -> None:
    code, out, err = serve("fault_plugin").finish(fault("STDOUT", {"text": "junk"}) * 2)
    assert (code, len(replies(out)), err.count(b"junk")) == (0, 2, 6)
    done = subprocess.run(
        [where["toolhost"], "--run", where["fault_plugin"], "AID.FAULT.STDOUT.v1"],
        input=b'{"input_json":"{\\"text\\":\\"junk\\"}"}',
        capture_output=True,
    )
    assert json.loads(done.stdout)["ok"] is True


def test_a_tool_that_reads_stdin_eats_no_request(serve: Serve, build: Callable[..., Path]) -> None:
    plugin = build(
        r"""
        #include <iostream>
        #include <unistd.h>
        #include "machina/plugin_api.h"
        static machina::ToolResult reads(const std::string&, machina::DSState&) {
            char buffer[4096];
            const long direct = read(0, buffer, sizeof buffer);
            std::string word;
            return {machina::StepStatus::OK, std::to_string(direct) + (std::cin >> word ? "some" : "none"), ""};
        }
        extern "C" int machina_plugin_abi_version() { return 1; }
        extern "C" void machina_plugin_init(machina::IToolRegistrar* host) {
            std::cout << "loading" << std::endl;
            host->register_tool({"AID.READS.v1", "", true, {}, {"none"}, {}}, reads);
        }
        """
    )
    _, out, err = serve(plugin).finish(b'{"aid":"AID.READS.v1"}\n' * 3)
    assert [reply["output_json"] for reply in replies(out)] == ["0none"] * 3
    assert err == b"loading\n"


def test_a_program_that_a_tool_starts_does_not_inherit_the_protocol(serve: Serve, build: Callable[..., Path]) -> None:
    plugin = build(
        r"""
        #include <cstdlib>
        #include "machina/plugin_api.h"
        static machina::ToolResult lists(const std::string&, machina::DSState&) {
            return {machina::StepStatus::OK, std::to_string(std::system("ls -l /proc/self/fd >&2")), ""};
        }
        extern "C" int machina_plugin_abi_version() { return 1; }
        extern "C" void machina_plugin_init(machina::IToolRegistrar* host) {
            host->register_tool({"AID.LISTS.v1", "", false, {}, {"process"}, {}}, lists);
        }
        """
    )
    _, out, err = serve(plugin).finish(b'{"aid":"AID.LISTS.v1"}\n')
    assert replies(out)[0]["output_json"] == "0"
    descriptors = [row.split(" -> ") for row in err.decode().splitlines() if " -> " in row]
    numbers = {int(left.split()[-1]) for left, _ in descriptors}
    assert numbers == {0, 1, 2, 3}  # 3 is the directory that ls reads
    assert next(right for left, right in descriptors if left.split()[-1] == "0") == "/dev/null"


@pytest.mark.usefixtures("limits_hold")
def test_it_serves_under_machinas_own_limits(where: Where) -> None:

    def limits() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (1024 << 20, 1024 << 20))
        resource.setrlimit(resource.RLIMIT_FSIZE, (16 << 20, 16 << 20))
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))

    with serving([str(where["toolhost"]), "--serve", str(where["demo_plugin"])], preexec_fn=limits) as host:
        assert host.ask(demo("ECHO", "x" * 10_000_000), timeout=30)["ok"] is True


def test_ok_echoes(faults: Host) -> None:
    reply = faults.ask(fault("OK", {"a": 1}))
    assert reply == {"ok": True, "status": "OK", "output_json": '{"a": 1}', "error": "", "ds_state": EMPTY_DELTA}
    assert faults.ask(fault("NOPE"))["error"] == "tool not found: AID.FAULT.NOPE.v1"


def test_junk_is_not_json_and_the_next_reply_is(faults: Host) -> None:
    faults.send(fault("JUNK") + fault("OK"))
    assert faults.raw_line() == b"this is not JSON\n"
    assert faults.reply()["ok"] is True


def test_twice_answers_one_request_twice(faults: Host) -> None:
    faults.send(fault("TWICE") + fault("OK", "last"))
    assert faults.raw_line() == faults.raw_line()
    assert faults.reply()["output_json"] == "last"


def test_half_and_segv_mid_leave_half_a_reply(where: Where) -> None:
    for tool, exit_code in [("HALF", 0), ("SEGV_MID", -signal.SIGSEGV)]:
        with serving([str(where["fault_toolhost"]), "--serve"]) as host:
            code, out, _ = host.finish(fault("OK") + fault(tool) + fault("OK"))
            whole, half = out.split(b"\n")
            assert code == exit_code
            assert half
            assert whole.startswith(half)


def test_half_exits_with_the_code_it_is_given(faults: Host) -> None:
    assert faults.finish(fault("HALF", {"code": 9}))[0] == 9


def test_close_ends_stdout_but_not_the_process(faults: Host) -> None:
    faults.send(fault("CLOSE"))
    assert faults.raw_line() == b""
    assert not ends(faults.process.pid, 0.2)
    assert faults.finish()[0] == 0


def test_oversize_is_a_valid_reply_of_exactly_so_many_bytes(faults: Host) -> None:
    for size in [1_048_576, 1_048_577, 200]:
        faults.send(fault("OVERSIZE", {"bytes": size}))
        raw = faults.raw_line()
        assert len(raw) == size + 1
        assert json.loads(raw)["ok"] is True
    faults.send(fault("OVERSIZE"))
    assert len(faults.raw_line()) == 1_048_577 + 1


def test_late_answers_late(faults: Host) -> None:
    started = time.monotonic()
    assert faults.ask(fault("LATE", {"ms": 300}))["ok"] is True
    assert time.monotonic() - started >= 0.3
