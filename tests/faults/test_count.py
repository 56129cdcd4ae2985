"""Replies carry no id: a toolhost that says too much or too little must not shift another caller's answers."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from tests.support.toolhosts import scripted

A, B = "AID.A.v1", "AID.B.v1"
ECHO = 'say(output_json=request.get("input_json", ""))'


def serve(start, tmp_path, body, **script):
    """One process, so that everybody's calls share its pipe."""
    binary = scripted(tmp_path, body, **script)
    return start(config=f'[[toolhost]]\nname = "a"\nbinary = "{binary}"\nmin = 1\nmax = 1\ntimeout_seconds = 5\n')


def flood(broker, callers, calls, special):
    """Callers that pipeline at once, each with inputs of its own. What came back of another caller's; and all types."""
    wrong, kinds = [], []
    gate = threading.Barrier(callers)

    def run(me):
        with broker.wire() as wire:
            wire.ask({"aid": B, "input_json": "0"})
            gate.wait()
            for first in range(0, calls, 20):
                names = [f"{me}-{n}" + special(me, n) for n in range(first, first + 20)]
                wire.send(*({"aid": A if "!" in name else B, "input_json": name} for name in names))
                for name, reply in zip(names, wire.replies(20), strict=True):
                    kinds.append(reply.get("type", "ok"))
                    got = reply.get("output_json", name)
                    if not got.startswith(f"{me}-"):
                        wrong.append((name, got))

    threads = [threading.Thread(target=run, args=(me,)) for me in range(callers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return wrong, kinds


def prove(broker, aid, calls=10):
    """Past its probation: from now on it shares a toolhost."""
    for n in range(calls):
        assert broker.ask({"aid": aid, "input_json": str(n)})["output_json"] == str(n)


def test_a_tool_that_begins_to_answer_twice_shifts_nobody_elses_replies(start, tmp_path):
    body = ECHO + '\nif "!" in request.get("input_json", ""): ' + ECHO
    broker = serve(start, tmp_path, body)
    prove(broker, A)
    prove(broker, B)
    wrong, kinds = flood(broker, 6, 200, lambda me, n: "!" if me == 0 and n % 50 == 19 else "")
    assert not wrong
    assert len(kinds) == 1200
    assert broker.counts()["violation"] > 0
    assert broker.ask({"aid": B, "input_json": "7"})["output_json"] == "7"


def test_a_tool_that_begins_to_swallow_requests_shifts_nobody_elses_replies(start, tmp_path):
    broker = serve(start, tmp_path, f'if "!" not in request.get("input_json", ""): {ECHO}')
    prove(broker, A)
    prove(broker, B)
    wrong, kinds = flood(broker, 6, 100, lambda me, n: "!" if me == 0 and n == 39 else "")
    assert not wrong
    assert len(kinds) == 600
    assert broker.counts()["violation"] + broker.counts()["timeout"] > 0
    assert set(kinds) <= {"ok", "bad_reply", "timeout", "crash"}


def test_a_toolhost_that_cannot_be_fenced_serves_one_caller(start, tmp_path):
    """Its refusals do not quote the name, and it answers twice, the second time when another caller may have come."""
    body = """say(output_json=json.dumps(request["input_json"]))
time.sleep(0.03)
say(output_json=json.dumps(request["input_json"] + " again"))"""
    binary = scripted(tmp_path, body, fenced="")
    Path(binary).write_text(Path(binary).read_text().replace('"tool not found: " + aid', '"no"'))
    config = f'[[toolhost]]\nname = "a"\nbinary = "{binary}"\nmin = 1\nmax = 1\n'
    broker = start(config="[breaker]\nin_a_row = 1000\nleast_calls = 1000\n" + config)
    with broker.wire() as one, broker.wire() as two:
        for n in range(5):
            for wire, name in ((one, "one"), (two, "two")):
                reply = wire.ask({"aid": A, "input_json": f"{name} {n}"})
                assert name in reply.get("output_json", name), "the other one's"


@pytest.mark.parametrize("junk", ["print('{\"ok\":true}', flush=True)", "print('noise', flush=True)"])
def test_lines_that_nobody_asked_for_cost_the_toolhost_its_place_not_the_callers_their_answers(start, tmp_path, junk):
    broker = serve(start, tmp_path, f"{ECHO}\nif n == 30: {junk}")
    prove(broker, B)
    wrong, kinds = flood(broker, 4, 100, lambda *_: "")
    assert not wrong
    assert len(kinds) == 400
    broker.eventually(lambda: broker.ask({"aid": B, "input_json": "7"}).get("output_json") == "7")
