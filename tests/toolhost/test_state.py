"""The session's state: what a caller sends replaces or builds, what a tool changed comes back as a delta."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from .talk import EMPTY_DELTA, Host, demo, line

Serve = Callable[..., Host]


def put(slot: int, value: object, **members: object) -> bytes:
    return demo("STATE", {"op": "put", "slot": slot, "value": value}, **members)


def get(slot: int, **members: object) -> bytes:
    return demo("STATE", {"op": "get", "slot": slot}, **members)


def delete(slot: int, **members: object) -> bytes:
    return demo("STATE", {"op": "del", "slot": slot}, **members)


def artifact(content: str, **fields: object) -> dict[str, Any]:
    return {"type": "json", "provenance": "demo", "content_json": content, "size_bytes": len(content)} | fields


def found(host: Host, slot: int, **members: object) -> bool:
    return '"found":true' in host.ask(get(slot, **members))["output_json"]


def test_a_reply_has_the_slots_that_changed_and_the_slots_that_went(serve: Serve) -> None:
    host = serve()
    host.send(put(6, [1]))
    assert host.raw_line() == (
        b'{"ok":true,"status":"OK","output_json":"{\\"slot\\":6,\\"stored\\":true}","error":"",'
        b'"ds_state":{"delta":true,"slots":{"6":{"type":"json","provenance":"demo","content_json":"[1]",'
        b'"size_bytes":3}},"removed_slots":[]}}\n'
    )
    assert host.ask(put(6, [1]))["ds_state"] == EMPTY_DELTA
    assert host.ask(put(255, 2))["ds_state"] == EMPTY_DELTA | {"slots": {"255": artifact("2")}}
    assert host.ask(delete(6))["ds_state"] == EMPTY_DELTA | {"removed_slots": [6]}
    assert host.ask(delete(6))["ds_state"] == EMPTY_DELTA


def test_the_state_stays_from_one_line_to_the_next(serve: Serve) -> None:
    host = serve()
    host.ask(put(0, {"a": 1}))
    host.ask(demo("ECHO"))
    assert host.ask(get(0))["output_json"] == '{"slot":0,"found":true,"value":{"a":1}}'
    assert host.ask(get(1))["output_json"] == '{"slot":1,"found":false,"value":null}'


def test_a_whole_state_replaces_and_an_empty_one_empties(serve: Serve) -> None:
    host = serve()
    host.ask(put(1, 1))
    host.ask(demo("ECHO", ds_state={"slots": {"2": artifact("2")}}))
    assert (found(host, 1), found(host, 2)) == (False, True)
    assert not found(host, 2, ds_state={"slots": {}})
    host.ask(put(3, 3))
    assert not found(host, 3, ds_state={})


def test_a_delta_builds_on_what_is_there(serve: Serve) -> None:
    host = serve()
    host.ask(put(1, 1))
    host.ask(put(2, 2))
    reply = host.ask(demo("ECHO", ds_state={"delta": True, "slots": {"3": artifact("3")}, "removed_slots": [2]}))
    assert reply["ds_state"] == EMPTY_DELTA  # against the state after the caller's own was applied
    assert [found(host, slot) for slot in (1, 2, 3)] == [True, False, True]
    assert not found(host, 1, ds_state={"delta": "true", "slots": {}})  # only true is true: this one is whole


def test_a_tool_may_undo_what_the_caller_just_sent(serve: Serve) -> None:
    reply = serve().ask(delete(4, ds_state={"slots": {"4": artifact("4")}}))
    assert reply["ds_state"] == EMPTY_DELTA | {"removed_slots": [4]}


def test_keys_that_are_no_slot_are_passed_over(serve: Serve) -> None:
    host = serve()
    slots = {key: artifact("1") for key in ["-1", "256", "01", "x", "", "1.0", "9" * 30]}
    reply = host.ask(put(5, 5, ds_state={"slots": slots}))
    assert list(reply["ds_state"]["slots"]) == ["5"]


def test_the_callers_state_holds_even_if_its_call_is_refused(serve: Serve) -> None:
    # Machina's pool sends differences to what this process last held: none of them may get lost.
    host = serve()
    assert host.ask(line("NOPE", ds_state={"slots": {"8": artifact("8")}}))["ok"] is False
    assert found(host, 8)


def test_what_a_failing_tool_changed_is_told(serve: Serve, build: Callable[..., Path]) -> None:
    plugin = build(
        r"""
        #include <stdexcept>
        #include "machina/plugin_api.h"
        static machina::ToolResult fails(const std::string&, machina::DSState& state) {
            state.slots[9].type = "half done";
            throw std::runtime_error("broke in the middle");
        }
        extern "C" int machina_plugin_abi_version() { return 1; }
        extern "C" void machina_plugin_init(machina::IToolRegistrar* host) {
            host->register_tool({"AID.FAILS.v1", "", true, {}, {"none"}, {}}, fails);
        }
        """
    )
    reply = serve(plugin).ask(line("AID.FAILS.v1"))
    assert (reply["ok"], reply["status"], reply["error"]) == (False, "TOOL_ERROR", "broke in the middle")
    assert list(reply["ds_state"]["slots"]) == ["9"]


def test_all_slots_at_once(serve: Serve) -> None:
    host = serve()
    slots = {str(slot): artifact(str(slot)) for slot in range(256)}
    reply = host.ask(delete(255, ds_state={"slots": slots}))
    assert reply["ds_state"] == EMPTY_DELTA | {"removed_slots": [255]}
    assert all(found(host, slot) for slot in (0, 9, 10, 99, 100, 254))
