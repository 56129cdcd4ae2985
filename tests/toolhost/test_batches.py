"""When replies are written: one write for a batch of quick pure calls, and never a finished reply that waits."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import threading
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
// Quick and harmless until the input is "now": by then the toolhost holds replies in front of it.
template <void (*act)()>
static ToolResult armed(const std::string& input, DSState& state) {
    if (input == "now") act();
    return ok(input, state);
}
static void hang() { for (;;) pause(); }
static void segv() { raise(SIGSEGV); }
static void exit_now() { std::exit(7); }
static void terminate() noexcept { throw 1; }
static int overflow(volatile int depth) { volatile char big[4096]; big[0] = 1; return overflow(depth + 1) + big[0]; }
static void stack() { overflow(0); }
static void thread_crash() { std::thread(segv).join(); }
template <void (*act)()>
static void fork_and() {
    const pid_t child = fork();
    if (child == 0) act();
    waitpid(child, nullptr, 0);
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
    add("HANG", true, {"none"}, armed<hang>);
    add("SEGV", true, {"none"}, armed<segv>);
    add("ABORT", true, {"none"}, armed<abort>);
    add("EXIT", true, {"none"}, armed<exit_now>);
    add("TERMINATE", true, {"none"}, armed<terminate>);
    add("STACK", true, {"none"}, armed<stack>);
    add("THREAD", true, {"none"}, armed<thread_crash>);
    add("FORK_EXIT", true, {"none"}, armed<fork_and<exit_now>>);
    add("FORK_CRASH", true, {"none"}, armed<fork_and<abort>>);
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
        [str(where["toolhost"]), "--serve", str(plugin)],
        stdin=stdin.fileno(),
        stdout=stdout.fileno(),
        stderr=subprocess.DEVNULL,
        env=environment(),
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


def all_attempts(requests: socket.socket, writes: socket.socket, batch: bytes, until: list[int]) -> list[list[int]]:
    """Sends the batch until it is answered in the expected writes; a busy machine makes quick tools look slow."""
    total = batch.count(b"\n")
    attempts: list[list[int]] = []
    while len(attempts) < 500 and (not attempts or attempts[-1] != until):
        requests.send(batch)
        attempts.append(lines_of_each_write(writes, total))
    return attempts


def test_a_batch_of_quick_pure_calls_is_answered_with_one_write(where: Where, mixed: Path) -> None:
    with packets(where, mixed) as (requests, writes):
        warm_up(requests, writes, line("PURE"))
        assert all_attempts(requests, writes, line("PURE") * 64, until=[64])[-1] == [64]


@pytest.mark.parametrize("tool", ["RANDOM", "SILENT", "WRITES", "BOTH"])
def test_a_call_that_is_not_pure_finds_the_wire_clear_and_is_answered_at_once(
    where: Where, mixed: Path, tool: str
) -> None:
    with packets(where, mixed) as (requests, writes):
        warm_up(requests, writes, line("PURE"))
        warm_up(requests, writes, line(tool))
        batch = line("PURE") * 3 + line(tool) * 2 + line("PURE") * 3
        attempts = all_attempts(requests, writes, batch, until=[3, 1, 1, 3])
        assert attempts[-1] == [3, 1, 1, 3]
        for counts in attempts:  # whatever else is split: nothing joins a call that is not pure
            borders = {sum(counts[: i + 1]) for i in range(len(counts))}
            assert {3, 4, 5} <= borders


def test_refusals_join_a_batch(where: Where, mixed: Path) -> None:
    with packets(where, mixed) as (requests, writes):
        warm_up(requests, writes, line("PURE"))
        batch = line("PURE") + b"x\n" + line("NOPE") + b"{}\n" + line("PURE")
        assert all_attempts(requests, writes, batch, until=[5])[-1] == [5]


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


def writes_for_a_slow_reader(host: Host, calls: int) -> int:
    sender = threading.Thread(target=host.send, args=(demo("ECHO") * calls,))
    sender.start()
    assert host.process.stdout
    received = 0
    while received < calls:
        time.sleep(0.001)
        received += os.read(host.process.stdout.fileno(), 16_384).count(b"\n")
    sender.join()
    counters = Path(f"/proc/{host.process.pid}/io").read_text().splitlines()
    return next(int(row.split()[1]) for row in counters if row.startswith("syscw"))


@pytest.mark.usefixtures("limits_hold")
def test_a_slow_reader_does_not_make_quick_tools_look_slow(serve: Serve) -> None:
    attempts = [writes_for_a_slow_reader(serve(), 20_000) for _ in range(3)]
    assert min(attempts) < 250  # some 40 when nothing else runs, hundreds if waiting for the reader counted


def test_a_large_reply_does_not_overtake_held_ones(serve: Serve) -> None:
    requests = [demo("BLOB", {"bytes": size}) for size in [10, 100, 70_000, 10, 65_000, 10, 3_000_000, 10] * 5]
    code, out, _ = serve().finish(b"".join(requests))
    assert code == 0
    assert [len(reply["output_json"]) for reply in replies(out)] == [10, 100, 70_000, 10, 65_000, 10, 3_000_000, 10] * 5


def test_replies_before_a_call_that_is_not_pure_have_been_written(serve: Serve) -> None:
    host = serve("fault_plugin")
    host.send(fault("MEMORY", {"mb": 0}) * 50 + fault("HANG"))
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


def warmed_up(host: Host, tool: str) -> Host:
    """With a toolhost that knows both tools as quick, so that it holds replies in front of them."""
    for _ in range(100):
        host.ask(line("PURE"))
        host.ask(line(tool))
    return host


@pytest.mark.parametrize("tool", CRASHES)
def test_only_the_call_that_crashed_is_lost(serve: Serve, mixed: Path, tool: str) -> None:
    host = warmed_up(serve(mixed), tool)
    code, out, _ = host.finish(line("PURE", {"n": 1}) * 20 + line(tool, "now") + line("PURE", {"n": 2}) * 20)
    assert code == CRASHES[tool]
    assert [reply["output_json"] for reply in replies(out)] == ['{"n": 1}'] * 20


@pytest.mark.parametrize("tool", ["FORK_EXIT", "FORK_CRASH"])
def test_a_forked_child_never_writes_its_parents_replies(serve: Serve, mixed: Path, tool: str) -> None:
    host = warmed_up(serve(mixed), tool)
    for _ in range(10):  # one fork makes the tool slow, and then nothing is held in front of it
        host.send(line("PURE") * 5 + line(tool, "now") + line(tool) * 200)
        for _ in range(206):
            assert host.reply()["ok"] is True
    assert host.finish()[1] == b""


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
