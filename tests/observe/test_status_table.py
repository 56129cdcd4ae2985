"""`broker status`, as a table."""

from __future__ import annotations

from broker.cli.status import _tools


def test_calls_through_two_faces_are_not_shown_twice():
    times = {"p50_ms": 0.1, "p99_ms": 0.2}
    latency = {"machina": times, "http": times}
    text = _tools([{"aid": "AID.A.v1", "calls": 7, "failed": 1, "breaker": "closed", "latency": latency}])
    assert text.count("AID.A.v1") == text.count(" 7 ") == text.count("closed") == 1
    assert "machina" in text
    assert "http" in text
