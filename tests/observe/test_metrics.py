"""GET /metrics, and the times in the status: what was called is counted once, under the face that it came through."""

from __future__ import annotations

import json
import time

from prometheus_client.parser import text_string_to_metric_families

from tests.observe.conftest import Site

ECHO, SLEEP, FAIL, EXIT = "AID.DEMO.ECHO.v1", "AID.DEMO.SLEEP.v1", "AID.DEMO.FAIL.v1", "AID.FAULT.EXIT.v1"


def scraped(site):
    """All samples, by name and labels; none may stand there twice."""
    answer = site.get("/metrics")
    assert answer.status == 200
    assert answer.headers["content-type"].startswith("text/plain")
    found = {}
    for family in text_string_to_metric_families(answer.body.decode()):
        for sample in family.samples:
            key = sample.name, *sorted(sample.labels.items())
            assert key not in found
            found[key] = sample.value
    return found


def of(name, /, **labels):
    return (name, *sorted(labels.items()))


def count(metrics, aid, face):
    return metrics.get(of("broker_call_seconds_count", aid=aid, face=face), 0)


def test_calls_are_counted_once_under_the_face_they_came_through(site):
    with site.broker.wire() as wire:
        lines = [{"aid": ECHO, "id": n, "inputs": {"n": n}} for n in range(200)]
        wire.send(*lines)
        wire.replies(200)
        wire.ask({"aid": ECHO, "idempotency_key": "k"})
        assert wire.ask({"aid": ECHO, "idempotency_key": "k"})["idempotent_hit"], "that one runs nothing"
        wire.ask({"aid": ECHO, "ds_state": {"slots": {}}})
        wire.ask({"aid": FAIL, "inputs": {"error": "x"}})
    for n in range(7):
        assert site.call(ECHO, n=n).status == 200
    found = scraped(site)
    assert count(found, ECHO, "machina") == 202
    assert count(found, ECHO, "http") == 7
    assert found[of("machina_tool_ok_total", aid=ECHO)] == 209
    assert found[of("machina_tool_fail_total", aid=ECHO)] == 0
    assert found[of("machina_tool_fail_total", aid=FAIL)] == 1
    seconds = sum(found[of("broker_call_seconds_sum", aid=ECHO, face=face)] for face in ("machina", "http"))
    assert found[of("machina_tool_duration_ms_total", aid=ECHO)] == seconds * 1000 > 0
    assert found[of("broker_call_seconds_bucket", aid=ECHO, face="http", le="+Inf")] == 7


def test_a_call_is_counted_in_the_bucket_of_its_time(site):
    site.broker.call(SLEEP, ms=120)
    site.call(SLEEP, ms=120)
    found = scraped(site)
    for face in ("machina", "http"):
        assert found[of("broker_call_seconds_bucket", aid=SLEEP, face=face, le="0.1")] == 0
        assert found[of("broker_call_seconds_bucket", aid=SLEEP, face=face, le="2.5")] == 1
        assert 0.12 <= found[of("broker_call_seconds_sum", aid=SLEEP, face=face)] < 2.5
    (tool,) = site.broker.status()["tools"]
    for face in ("machina", "http"):
        latency = tool["latency"][face]
        assert (latency["count"], sum(latency["buckets"])) == (1, 1)
        assert 100 < latency["p50_ms"] <= latency["p99_ms"] <= 2500


def test_calls_of_commands_and_of_the_brokers_own_tools_are_timed_too(start):
    reply = '{"ok":true,"status":"OK","output_json":"1","error":""}'
    name = 'odd "name"\\ with\nall {that}'
    command = ["sh", "-c", f"echo '{reply}'"]
    config = f"[[oneshot]]\nname = {json.dumps(name)}\ncommand = {json.dumps(command)}\n"
    site = Site(start("--http", "127.0.0.1:0", config=config))
    assert site.broker.call(name)["ok"]
    assert site.call("echo_json", message="x").status == 200
    found = scraped(site)
    assert count(found, name, "machina") == count(found, "echo_json", "http") == 1
    assert 0 < found[of("broker_call_seconds_sum", aid=name, face="machina")] < 5


def test_pools_breakers_refusals_and_the_process_are_there(site):
    with site.broker.wire() as wire:
        for _ in range(6):
            wire.ask({"aid": EXIT})
        wire.ask({"aid": "AID.NO.v1"})
        wire.ask(b"junk\n")
        found = scraped(site)
    assert found[of("broker_pool_crashes_total", pool="fault")] == 5
    assert found[of("broker_pool_starts_total", pool="fault")] >= 5
    assert found[of("broker_pool_processes", pool="demo", state="ready")] >= 1
    assert found[of("broker_pool_resident_bytes", pool="demo")] > 1e5
    assert found[of("broker_pool_up", pool="demo")] == 1
    assert found[of("broker_breaker_state", aid=EXIT)] == 2
    assert found[of("broker_breaker_trips_total", aid=EXIT)] == 1
    assert found[of("broker_refused_calls_total", code="crash")] == 5
    assert found[of("broker_refused_calls_total", code="breaker_open")] == 1
    assert found[of("broker_refused_calls_total", code="not_found")] == 1
    assert found[of("broker_refused_calls_total", code="bad_request")] == 1
    assert found[of("broker_connections", face="machina")] == 1
    assert found[of("broker_connections", face="http")] == 1
    for name in ("process_resident_memory_bytes", "process_cpu_seconds_total", "process_open_fds"):
        assert found[of(name)] > 0
    assert found[of("broker_leases_issued_total")] == 0
    assert any(key[0] == "broker_build_info" for key in found)


def test_what_is_paused_and_what_waits_is_shown(site, token):
    assert site.ask("POST", "/operator/pause", {"name": "demo"}, token).status == 200
    with site.broker.wire() as wire:
        wire.send(*({"aid": ECHO, "id": n} for n in range(30)))
        site.broker.eventually(lambda: site.broker.status()["waiting"] == 30)
        found = scraped(site)
        assert found[of("broker_paused", name="demo")] == 1
        assert found[of("broker_pool_waiting_calls", pool="demo")] == found[of("broker_waiting_calls")] == 30
        assert found[of("broker_queued_bytes")] > 0
        assert site.ask("POST", "/operator/resume", {"name": "demo"}, token).json()["paused"] == []
        wire.replies(30)
    assert scraped(site)[of("broker_waiting_calls")] == 0


def test_counters_never_fall(site):
    before = scraped(site)
    with site.broker.wire() as wire:
        for _ in range(3):
            wire.ask({"aid": ECHO})
        time.sleep(0.05)
        after = scraped(site)
    falling = [key for key, value in before.items() if key[0].endswith(("_total", "_bucket")) and after[key] < value]
    assert not falling
