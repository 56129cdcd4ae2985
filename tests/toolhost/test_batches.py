"""When replies are written: one write for a batch of quick pure calls, and never a finished reply that waits."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from .talk import Host, demo, environment, fault, line, replies

Serve = Callable[..., Host]
Where = dict[str, Path]

MIXED_PLUGIN = r"""
#include <csignal>
#include <cstdlib>
#include <pthread.h>
#include <thread>
#include <unistd.h>
#include <sys/wait.h>
#include "machina/plugin_api.h"
using machina::DSState;
using machina::ToolResult;
static ToolResult ok(const std::string& input, DSState&) { return {machina::StepStatus::OK, input, ""}; }
static ToolResult hang(const std::string&, DSState&) { for (;;) pause(); }
static ToolResult segv(const std::string&, DSState&) { raise(SIGSEGV); return {}; }
static ToolResult abort_now(const std::string&, DSState&) { abort(); }
static ToolResult exit_now(const std::string&, DSState&) { std::exit(7); }
static ToolResult terminate(const std::string&, DSState&) noexcept { throw 1; }
static int overflow(volatile int depth) { volatile char big[4096]; big[0] = 1; return overflow(depth + 1) + big[0]; }
static ToolResult stack(const std::string&, DSState&) { return {machina::StepStatus::OK, std::to_string(overflow(0)), ""}; }
static ToolResult thread_crash(const std::string&, DSState&) {
    std::thread([] { raise(SIGSEGV); }).join();
    return {};
}
static ToolResult fork_exit(const std::string&, DSState&) {
    const pid_t child = fork();
    if (child == 0) std::exit(0);
    waitpid(child, nullptr, 0);
    return {machina::StepStatus::OK, "{}", ""};
}
static ToolResult fork_crash(const std::string&, DSState&) {
    const pid_t child = fork();
    if (child == 0) abort();
    waitpid(child, nullptr, 0);
    return {machina::StepStatus::OK, "{}", ""};
}
extern "C" int machina_plugin_abi_version() { return 1; }
extern "C" void machina_plugin_init(machina::IToolRegistrar* host) {
    const auto add = [&](const char* aid, bool deterministic, std::vector<std::string> effects, machina::ToolFnPtr fn) {
        host->register_tool({aid, aid, deterministic, {}, effects, {}}, fn);
    };
    add("PURE", true, {"none"}, ok);
    add("RANDOM", false, {"none"}, ok);
    add("SILENT", true, {}, ok);
    add("WRITES", true, {"file_write"}, ok);
    add("BOTH", true, {"none", "none"}, ok);
    // Faults that call themselves pure: only these can meet replies that are held.
    add("HANG", true, {"none"}, hang);
    add("SEGV", true, {"none"}, segv);
    add("ABORT", true, {"none"}, abort_now);
    add("EXIT", true, {"none"}, exit_now);
    add("TERMINATE", true, {"none"}, terminate);
    add("STACK", true, {"none"}, stack);
    add("THREAD", true, {"none"}, thread_crash);
    add("FORK_EXIT", true, {"none"}, fork_exit);
    add("FORK_CRASH", true, {"none"}, fork_crash);
}
"""


@pytest.fixture
def mixed(build: Callable[..., Path]) -> Path:
    return build(MIXED_PLUGIN, "-pthread", "-O0")


@contextmanager
def packets(where: Where, plugin: Path) -> Iterator[tuple[socket.socket, socket.socket]]:
    """Requests and replies over sockets that keep the borders of each write: one packet received is one write."""
    requests, stdin = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    writes, stdout = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in (requests, stdin, writes, stdout):
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            end.setsockopt(socket.SOL_SOCKET, option, 1 << 20)
    process = subprocess.Popen(
        [where["toolhost"], "--serve", plugin], stdin=stdin, stdout=stdout, stderr=subprocess.DEVNULL, env=environment()
    )
    stdin.close()
    stdout.close()
    writes.settimeout(10)
    try:
        yield requests, writes
    finally:
        process.kill()
        process.wait()
        requests.close()
        writes.close()


def lines_of_each_write(writes: socket.socket, total: int) -> list[int]:
    counts: list[int] = []
    while sum(counts) < total:
        counts.append(writes.recv(1 << 20).count(b"\n"))
        assert counts[-1], "it ended early"
    return counts


def warm_up(requests: socket.socket, writes: socket.socket, request: bytes) -> None:
    """Until the toolhost knows that the tool is quick."""
    for _ in range(100):
        requests.send(request)
        writes.recv(1 << 20)


def test_a_batch_of_quick_pure_calls_is_answered_with_few_writes(where: Where, mixed: Path) -> None:
    with packets(where, mixed) as (requests, writes):
        warm_up(requests, writes, line("PURE"))
        attempts = []
        for _ in range(10):
            requests.send(line("PURE") * 64)
            attempts.append(len(lines_of_each_write(writes, 64)))
        assert min(attempts) == 1  # a busy machine may make a reply too old to wait


@pytest.mark.parametrize("tool", ["RANDOM", "SILENT", "WRITES", "BOTH"])
def test_a_call_that_is_not_pure_finds_the_wire_clear_and_is_answered_at_once(
    where: Where, mixed: Path, tool: str
) -> None:
    with packets(where, mixed) as (requests, writes):
        warm_up(requests, writes, line("PURE"))
        warm_up(requests, writes, line(tool))
        attempts = []
        for _ in range(10):
            requests.send(line("PURE") * 3 + line(tool) * 2 + line("PURE") * 3)
            attempts.append(lines_of_each_write(writes, 8))
        assert min(attempts, key=len) == [3, 1, 1, 3]
        for counts in attempts:  # whatever else is split: nothing joins a call that is not pure
            borders = {sum(counts[: i + 1]) for i in range(len(counts))}
            assert {3, 4, 5} <= borders


def test_refusals_join_a_batch(where: Where, mixed: Path) -> None:
    with packets(where, mixed) as (requests, writes):
        warm_up(requests, writes, line("PURE"))
        attempts = []
        for _ in range(10):
            requests.send(line("PURE") + b"x\n" + line("NOPE") + b"{}\n" + line("PURE"))
            attempts.append(lines_of_each_write(writes, 5))
        assert [5] in attempts


def test_leases_are_answered_at_once(where: Where, mixed: Path) -> None:
    with packets(where, mixed) as (requests, writes):
        requests.send(line("_lease.gc") + line("_lease.issue", tool_aid="*") + line("PURE"))
        assert lines_of_each_write(writes, 3) == [1, 1, 1]


def test_a_finished_reply_does_not_wait_for_a_slow_call(where: Where) -> None:
    with packets(where, where["demo_plugin"]) as (requests, writes):
        warm_up(requests, writes, demo("ECHO"))
        for _ in range(2):  # the first time nothing is known of the tool, the second time that it is slow
            requests.send(demo("ECHO") + demo("SLEEP", {"ms": 500}))
            sent = time.monotonic()
            assert writes.recv(1 << 20).count(b"\n") == 1
            assert time.monotonic() - sent < 0.4
            writes.recv(1 << 20)


def test_replies_do_not_wait_while_many_calls_run(where: Where) -> None:
    with packets(where, where["demo_plugin"]) as (requests, writes):
        warm_up(requests, writes, demo("ECHO"))
        requests.send(demo("ECHO") + demo("BLOB", {"bytes": 300_000}) * 50 + demo("ECHO"))
        assert writes.recv(1 << 20).count(b"\n") <= 2


def test_a_large_reply_does_not_overtake_held_ones(serve: Serve) -> None:
    requests = [demo("BLOB", {"bytes": size}) for size in [10, 100, 70_000, 10, 65_000, 10, 3_000_000, 10] * 5]
    code, out, _ = serve().finish(b"".join(requests))
    assert code == 0
    assert [len(reply["output_json"]) for reply in replies(out)] == [10, 100, 70_000, 10, 65_000, 10, 3_000_000, 10] * 5


def test_replies_before_a_hanging_call_have_been_written(serve: Serve, mixed: Path) -> None:
    host = serve(mixed)
    host.send(line("PURE") * 50 + line("HANG"))
    for _ in range(50):
        assert host.reply()["ok"] is True


CRASHES = {
    "SEGV": -signal.SIGSEGV,
    "ABORT": -signal.SIGABRT,
    "EXIT": 7,
    "TERMINATE": -signal.SIGABRT,
    "STACK": -signal.SIGSEGV,
    "THREAD": -signal.SIGSEGV,
}


@pytest.mark.parametrize("tool", CRASHES)
def test_only_the_call_that_crashed_is_lost(serve: Serve, mixed: Path, tool: str) -> None:
    host = serve(mixed)
    code, out, _ = host.finish(line("PURE", {"n": 1}) * 20 + line(tool) + line("PURE", {"n": 2}) * 20)
    assert code == CRASHES[tool]
    assert [reply["output_json"] for reply in replies(out)] == ['{"n": 1}'] * 20


@pytest.mark.parametrize("tool", ["FORK_EXIT", "FORK_CRASH"])
def test_a_forked_child_never_writes_its_parents_replies(serve: Serve, mixed: Path, tool: str) -> None:
    _, out, _ = serve(mixed).finish((line("PURE") * 5 + line(tool)) * 20)
    assert len(replies(out)) == 120


def test_a_plugins_crash_keeps_the_replies_before_it(serve: Serve) -> None:
    code, out, _ = serve("fault_plugin").finish(fault("MEMORY", {"mb": 1}) * 3 + fault("SEGV") + fault("MEMORY"))
    assert code == -signal.SIGSEGV
    assert len(replies(out)) == 3


def test_a_signal_from_outside_still_ends_it(serve: Serve) -> None:
    for number in [signal.SIGTERM, signal.SIGABRT, signal.SIGSEGV]:
        host = serve()
        host.ask(demo("ECHO"))
        os.kill(host.process.pid, number)
        assert host.process.wait(10) == -number
