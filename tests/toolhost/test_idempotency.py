"""The toolhost's own cache, for those who use it alone: a repeated key gets the first result and runs nothing."""

from __future__ import annotations

import time
from collections.abc import Callable

from .talk import Host, demo, line

Serve = Callable[..., Host]


def count(host: Host, key: object) -> str:
    output: str = host.ask(demo("COUNTER", idempotency_key=key))["output_json"]
    return output


def test_a_hit_repeats_the_result_marked_and_without_state(serve: Serve) -> None:
    host = serve()
    request = demo("STATE", {"op": "put", "slot": 1, "value": 1}, idempotency_key="k")
    host.ask(request)
    host.send(request)
    assert host.raw_line() == (
        b'{"ok":true,"status":"OK","output_json":"{\\"slot\\":1,\\"stored\\":true}","error":"",'
        b'"idempotent_hit":true,"ds_state":{}}\n'
    )


def test_a_failure_is_repeated_as_a_failure(serve: Serve) -> None:
    host = serve()
    host.ask(demo("FAIL", {"error": "no"}, idempotency_key="k"))
    host.send(demo("FAIL", {"error": "another"}, idempotency_key="k"))
    assert host.raw_line() == (
        b'{"ok":false,"status":"TOOL_ERROR","output_json":"{}","error":"no","idempotent_hit":true,"ds_state":{}}\n'
    )


def test_a_key_counts_for_one_tool_only(serve: Serve) -> None:
    host = serve()
    host.ask(demo("ECHO", idempotency_key="k"))
    assert "count" in count(host, "k")


def test_no_key_and_the_empty_key_are_no_key(serve: Serve) -> None:
    host = serve()
    assert count(host, "") != count(host, "")
    assert host.ask(demo("COUNTER"))["output_json"] != host.ask(demo("COUNTER"))["output_json"]


def test_a_result_is_forgotten_after_its_time(serve: Serve) -> None:
    host = serve(MACHINA_IDEMP_TTL_MS="150")
    first = count(host, "k")
    assert count(host, "k") == first
    time.sleep(0.2)
    assert count(host, "k") != first


def test_the_time_counts_from_completion(serve: Serve) -> None:
    host = serve(MACHINA_IDEMP_TTL_MS="300")
    slow = demo("SLEEP", {"ms": 400}, idempotency_key="k")
    host.ask(slow)
    assert host.ask(slow)["idempotent_hit"] is True


def test_of_1024_results_the_least_recently_used_goes_first(serve: Serve) -> None:
    host = serve()
    first = count(host, "0")
    second = count(host, "1")
    for key in range(2, 1024):
        count(host, str(key))
    assert count(host, "0") == first  # used again, so "1" is next to go
    count(host, "one more")
    assert count(host, "0") == first
    assert count(host, "1") != second


def test_a_refusal_is_not_remembered(serve: Serve) -> None:
    host = serve(MACHINA_LEASE_ENFORCE="1")
    request = line("AID.FILE.WRITE.v1", "{}", idempotency_key="k")
    assert host.ask(request)["error"] == "lease_required"
    assert "idempotent_hit" not in host.ask(request)


def test_a_setting_that_is_no_number_is_reported_and_ignored(serve: Serve) -> None:
    host = serve(MACHINA_IDEMP_TTL_MS="soon")
    first = count(host, "k")
    assert count(host, "k") == first
    assert b"MACHINA_IDEMP_TTL_MS=soon is not a whole number" in host.finish()[2]
