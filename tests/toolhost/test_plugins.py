"""Loading: which plugins are refused and in which words, and that Machina's binary interface is ours."""

from __future__ import annotations

import hashlib
import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from .talk import Host, demo, line

Serve = Callable[..., Host]
Build = Callable[..., Path]
Run = Callable[..., subprocess.CompletedProcess[bytes]]
Where = dict[str, Path]

# Written from the description of version 1 alone, without our headers: what a compiled plugin of Machina's looks like.
REDECLARED_ABI = r"""
#include <cstdint>
#include <string>
#include <unordered_map>
#include <vector>
namespace machina {
enum class StepStatus { OK, INVALID_PICK, TOOL_ERROR, BREAKER_TRIP };
struct ToolResult { StepStatus status = StepStatus::OK; std::string output_json; std::string error; };
struct Artifact { std::string type; std::string content_json; std::string provenance; size_t size_bytes = 0; };
struct DSState { std::unordered_map<uint8_t, Artifact> slots; };
struct ToolDesc {
    std::string aid;
    std::string name;
    bool deterministic = true;
    std::vector<std::string> tags;
    std::vector<std::string> side_effects;
    std::vector<std::string> replay_inputs;
};
using ToolFnPtr = ToolResult (*)(const std::string& input_json, DSState& state);
struct IToolRegistrar {
    virtual ~IToolRegistrar() {}
    virtual void register_tool(const ToolDesc&, ToolFnPtr) = 0;
};
}
"""

MACHINA_PLUGIN = (
    REDECLARED_ABI
    + r"""
static machina::ToolResult every_field(const std::string& input, machina::DSState& state) {
    std::string seen = "none";
    const auto found = state.slots.find(200);
    if (found != state.slots.end()) {
        const machina::Artifact& a = found->second;
        seen = a.type + "|" + a.content_json + "|" + a.provenance + "|" + std::to_string(a.size_bytes);
        state.slots.erase(found);
    }
    for (uint8_t slot = 0; slot < 100; ++slot) {
        state.slots[slot] = {"type of a length beyond the small string", "{}", "provenance", slot};
    }
    return {machina::StepStatus::BREAKER_TRIP, input + " " + seen, "an error text that is long enough for the heap"};
}
extern "C" int machina_plugin_abi_version() { return 1; }
extern "C" uint32_t machina_plugin_capabilities() { return 1u << 0 | 1u << 6; }
extern "C" void machina_plugin_init(machina::IToolRegistrar* host) {
    machina::ToolDesc d;
    d.aid = "AID.MACHINA.EVERY_FIELD.v1";
    d.name = "every field, with a name beyond the small string";
    d.deterministic = false;
    d.tags = {"tag.one", "tag.two"};
    d.side_effects = {"none"};
    d.replay_inputs = {"clock"};
    host->register_tool(d, &every_field);
}
"""
)

TOOL = r"""
#include <new>
#include <stdexcept>
#include "machina/plugin_api.h"
static machina::ToolResult ok(const std::string&, machina::DSState&) { return {machina::StepStatus::OK, "{}", ""}; }
"""
ABI = 'extern "C" int machina_plugin_abi_version() { return 1; }\n'


def init(body: str) -> str:
    return f'extern "C" void machina_plugin_init(machina::IToolRegistrar* host) {{ (void)host; {body} }}\n'


PLAIN = TOOL + init('host->register_tool({"AID.PLAIN.v1", "", true, {}, {"none"}, {}}, ok);')


def refusal(run: Run, plugin: Path, **env: str) -> str:
    done = run("--list", plugin, **env)
    assert done.returncode == 3
    reply = json.loads(done.stdout)
    assert set(reply) == {"ok", "error"}
    error: str = reply["error"]
    return error


def test_a_plugin_built_from_the_description_of_the_abi_loads_and_every_field_arrives(
    serve: Serve, build: Build, run: Run
) -> None:
    plugin = build(MACHINA_PLUGIN, "-O2", include=False)
    assert json.loads(run("--list", plugin).stdout)["tools"] == [
        {
            "aid": "AID.MACHINA.EVERY_FIELD.v1",
            "name": "every field, with a name beyond the small string",
            "deterministic": False,
            "tags": ["tag.one", "tag.two"],
            "side_effects": ["none"],
            "replay_inputs": ["clock"],
        }
    ]
    sent = {"type": "T", "content_json": "C", "provenance": "P", "size_bytes": 42}
    reply = serve(plugin).ask(line("AID.MACHINA.EVERY_FIELD.v1", "input", ds_state={"slots": {"200": sent}}))
    assert (reply["ok"], reply["status"]) == (False, "BREAKER_TRIP")
    assert reply["output_json"] == "input T|C|P|42"
    assert reply["error"] == "an error text that is long enough for the heap"
    assert reply["ds_state"]["removed_slots"] == [200]
    assert [slot["size_bytes"] for slot in reply["ds_state"]["slots"].values()] == list(range(100))


def test_our_headers_have_the_names_that_machinas_plugins_use(build: Build, run: Run) -> None:
    plugin = build(
        r"""
        #include "machina/plugin_api.h"
        #include "machina/registry.h"
        #include "machina/state.h"
        #include "machina/tools.h"
        static_assert(MACHINA_ABI_VERSION == 1);
        static_assert((machina::CAP_FILE_READ | machina::CAP_FILE_WRITE | machina::CAP_SHELL | machina::CAP_NETWORK |
                       machina::CAP_MEMORY | machina::CAP_GENESIS | machina::CAP_GPU) == 0x7f);
        static_assert(machina::CAP_NONE == 0 && machina::CAP_ALL == 0xffffffffu);
        static_assert((uint8_t)machina::DSSlot::DS7 == 7);
        static machina::ToolResult hello(const std::string&, machina::DSState& ds_tmp) {
            machina::Artifact a;
            a.type = "text";
            ds_tmp.slots[(uint8_t)machina::DSSlot::DS0] = a;
            return {machina::StepStatus::OK, a.content_json, ""};
        }
        extern "C" int machina_plugin_abi_version() { return MACHINA_ABI_VERSION; }
        extern "C" uint32_t machina_plugin_capabilities() { return machina::CAP_FILE_READ | machina::CAP_GPU; }
        extern "C" void machina_plugin_init(machina::IToolRegistrar* host) {
            machina::ToolFn as_function = hello;
            machina_plugin_init_fn with_typedef = &machina_plugin_init;
            (void)as_function, (void)with_typedef;
            host->register_tool(machina::ToolDesc{"AID.RUNTIME.HELLO.v1"}, &hello);
        }
        """,
        "-Wall", "-Wextra", "-Werror", "-Wno-missing-field-initializers",
    )  # fmt: skip
    assert run("--list", plugin).returncode == 0


def test_a_plugin_without_an_abi_version_is_refused_unless_told_otherwise(build: Build, run: Run) -> None:
    plugin = build(PLAIN)
    assert refusal(run, plugin) == (
        f"plugin missing machina_plugin_abi_version() export: {plugin} (set MACHINA_PLUGIN_ABI_LAX=1 to allow)"
    )
    assert run("--list", plugin, MACHINA_PLUGIN_ABI_LAX="1").returncode == 0


def test_a_plugin_of_another_abi_version_is_always_refused(build: Build, run: Run) -> None:
    plugin = build(PLAIN + ABI.replace("1", "2"))
    assert refusal(run, plugin, MACHINA_PLUGIN_ABI_LAX="1") == f"ABI version mismatch: host=1 plugin=2 for {plugin}"


def test_a_plugin_that_asks_for_more_than_is_allowed_is_refused(build: Build, run: Run) -> None:
    greedy = build(PLAIN + ABI + 'extern "C" uint32_t machina_plugin_capabilities() { return 0x0e; }\n')
    assert refusal(run, greedy, MACHINA_PLUGIN_CAPS="file_write") == (
        "plugin capabilities exceed allowed mask: "
        "declared=0x0000000e allowed=0x00000002 excess=0x0000000c (shell, network)"
    )
    for enough in ["file_write,shell,network", "0xe", "14", "0xc,file_write", "all", ""]:
        assert run("--list", greedy, MACHINA_PLUGIN_CAPS=enough).returncode == 0
    assert "excess=0x0000000e" in refusal(run, greedy, MACHINA_PLUGIN_CAPS="none")


def test_a_plugin_that_declares_nothing_counts_as_asking_for_everything(build: Build, run: Run) -> None:
    plugin = build(PLAIN + ABI)
    assert run("--list", plugin).returncode == 0
    assert "it declares none, which counts as all" in refusal(run, plugin, MACHINA_PLUGIN_CAPS="file_read")


@pytest.mark.parametrize("wrong", ["files", "file_read,", "-1", "0x", "0x1ffffffff", "file_read network"])
def test_a_list_of_capabilities_that_is_none_refuses_every_plugin(run: Run, where: Where, wrong: str) -> None:
    assert "MACHINA_PLUGIN_CAPS: unknown capability" in refusal(run, where["demo_plugin"], MACHINA_PLUGIN_CAPS=wrong)


def test_a_pinned_plugin_loads_only_if_its_hash_is_the_pin(run: Run, serve: Serve, where: Where) -> None:
    pin = hashlib.sha256(where["demo_plugin"].read_bytes()).hexdigest()
    for spelling in [pin, pin.upper()]:
        assert run("--list", where["demo_plugin"], MACHINA_PLUGIN_SHA256=spelling).returncode == 0
    assert serve(MACHINA_PLUGIN_SHA256=pin).ask(demo("ECHO"))["ok"] is True
    for wrong in ["0" * 64, pin[:-1], pin + "0", "x"]:
        assert refusal(run, where["demo_plugin"], MACHINA_PLUGIN_SHA256=wrong) == (
            f"plugin SHA-256 mismatch: expected={wrong} actual={pin} for {where['demo_plugin']}"
        )


def test_a_pin_is_checked_before_any_code_of_the_plugin_runs(build: Build, run: Run) -> None:
    plugin = build(
        PLAIN + ABI + "#include <unistd.h>\n__attribute__((constructor)) static void early() { _exit(99); }\n"
    )
    assert run("--list", plugin).returncode == 99
    assert "SHA-256 mismatch" in refusal(run, plugin, MACHINA_PLUGIN_SHA256="0" * 64)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ('throw std::runtime_error("no licence");', "no licence"),
        ("throw std::bad_alloc();", "std::bad_alloc"),
        ("throw 7;", "unknown exception"),
        (
            'host->register_tool({"AID.A.v1"}, ok); host->register_tool({"AID.A.v1"}, ok);',
            "tool registered twice: AID.A.v1",
        ),
        ('host->register_tool({"AID.A.v1"}, nullptr);', "tool without a function: AID.A.v1"),
        ('host->register_tool({"", "nameless"}, ok);', "a tool without an AID: nameless"),
        ('host->register_tool({"_lease.issue"}, ok);', "names with a leading _ are the host's: _lease.issue"),
    ],
)
def test_a_plugin_whose_init_fails_is_refused_with_the_reason(build: Build, run: Run, body: str, reason: str) -> None:
    plugin = build(TOOL + ABI + init(body))
    assert refusal(run, plugin) == f"plugin init failed: {plugin}: {reason}"


def test_a_plugin_without_init_is_refused(build: Build, run: Run) -> None:
    plugin = build(TOOL + ABI)
    assert refusal(run, plugin) == f"plugin missing machina_plugin_init() export: {plugin}"


def test_a_name_that_is_no_aid_is_accepted_with_a_warning(build: Build, run: Run, serve: Serve) -> None:
    plugin = build(TOOL + ABI + init('host->register_tool({"lower.case"}, ok);'))
    done = run("--list", plugin)
    assert done.returncode == 0
    assert b"warning: lower.case does not look like AID.<PART>.v<N>" in done.stderr
    assert serve(plugin).ask(line("lower.case"))["ok"] is True


def test_a_plugin_finds_libraries_beside_it(build: Build, run: Run, tmp_path: Path) -> None:
    source = tmp_path / "helper.cpp"
    source.write_text("int help() { return 1; }")
    subprocess.run(["g++", "-shared", "-fPIC", source, "-o", tmp_path / "libhelper.so"], check=True)
    plugin = build(
        TOOL + "int help();\n" + ABI.replace("1", "help()") + init(""),
        f"-L{tmp_path}", "-lhelper", "-Wl,-rpath,$ORIGIN",
    )  # fmt: skip
    moved = tmp_path / "plugin.so"
    moved.write_bytes(plugin.read_bytes())
    assert run("--list", moved).returncode == 0


def test_a_plugin_is_found_by_a_bare_name(where: Where) -> None:
    done = subprocess.run(
        [where["toolhost"], "--list", where["demo_plugin"].name], cwd=where["demo_plugin"].parent, capture_output=True
    )
    assert done.returncode == 0


THROWING = (
    TOOL
    + r"""
#include <cstdlib>
static machina::ToolResult throws(const std::string& input, machina::DSState&) {
    if (input == "text") throw std::runtime_error("what went wrong");
    if (input == "memory") throw std::bad_alloc();
    if (input == "number") throw 7;
    if (input == "huge") return {machina::StepStatus::OK, std::string(std::size_t{1} << 60, 'x'), ""};
    if (input == "status") return {static_cast<machina::StepStatus>(99), "{}", "made up"};
    return {machina::StepStatus::INVALID_PICK, input, ""};
}
"""
    + ABI
    + init('host->register_tool({"AID.THROWS.v1", "", true, {}, {"none"}, {}}, throws);')
)


@pytest.mark.parametrize(
    ("thrown", "status", "error"),
    [
        ("text", "TOOL_ERROR", "what went wrong"),
        ("memory", "TOOL_ERROR", "std::bad_alloc"),
        ("number", "TOOL_ERROR", "the tool threw something that is no std::exception"),
        ("status", "TOOL_ERROR", "made up"),
        ("other", "INVALID_PICK", ""),
    ],
)
def test_whatever_a_tool_throws_is_its_result(
    build: Build, serve: Serve, run: Run, thrown: str, status: str, error: str
) -> None:
    plugin = build(THROWING)
    host = serve(plugin)
    for reply in [
        host.ask(line("AID.THROWS.v1", thrown)),
        host.ask(line("AID.THROWS.v1", thrown)),
        json.loads(run("--run", plugin, "AID.THROWS.v1", stdin=b'{"input_json":"%s"}' % thrown.encode()).stdout),
    ]:
        assert (reply["ok"], reply["status"], reply["error"]) == (False, status, error)


@pytest.mark.usefixtures("limits_hold")
def test_an_allocation_beyond_all_bounds_is_an_error_not_a_crash(build: Build, serve: Serve) -> None:
    host = serve(build(THROWING))
    reply = host.ask(line("AID.THROWS.v1", "huge"))
    assert (reply["ok"], reply["status"]) == (False, "TOOL_ERROR")
    assert host.ask(line("AID.THROWS.v1", "other"))["status"] == "INVALID_PICK"
