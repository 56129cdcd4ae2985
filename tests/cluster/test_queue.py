"""Durable calls: queued, run once by whichever broker has the tool, results by id; what is dead, and back with it."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from broker import AsyncClient, Client
from broker.client.failures import BadRequest, NotFound
from tests.support.cluster import Crowd
from tests.support.command import broker_command
from tests.support.config import toolhost
from tests.support.load import LEASED, LEDGER
from tests.support.nats import Client as Plain
from tests.support.nats import NatsServer
from tests.support.queue import SOON, dead, enqueue, operate, queued, result

Pair = tuple[Crowd, Any, Any]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory, where: dict[str, str], shared_nats: NatsServer) -> Iterator[Pair]:
    """Two brokers; the second one has the demo tools, too."""
    crowd = Crowd(tmp_path_factory.mktemp("brokers"), where["include"], shared_nats)
    large = "[limits]\nreply_bytes = 8000000\n"
    demo = toolhost("demo", where["demo_plugin"])
    yield crowd, crowd.start("--http", "127.0.0.1:0", config=SOON), crowd.start(config=SOON + large + demo)
    crowd.end()


@pytest.fixture
def crowd(tmp_path: Path, where: dict[str, str], shared_nats: NatsServer) -> Iterator[Crowd]:
    """Brokers of a test's own, which names their cluster."""
    brokers = Crowd(tmp_path / "brokers", where["include"], shared_nats)
    yield brokers
    brokers.end()


@pytest.fixture
def plain(shared_nats: NatsServer) -> Iterator[Plain]:
    client = Plain(shared_nats.url)
    yield client
    client.close()


# --- in, and out ------------------------------------------------------------------------------------------------------


def test_a_queued_call_runs_once_and_any_broker_tells_its_result(pair):
    crowd, one, other = pair
    call_id = queued(one, "first 0 ok")
    for broker in (one, other, one):
        told = result(broker, call_id, 5)
        assert (told["state"], told["tool"]) == ("done", LEDGER)
        assert told["result"]["output_json"] == '"first"'
    assert crowd.runs()["first"] == 1


def test_an_id_is_one_call_however_often_it_is_enqueued(pair):
    crowd, one, other = pair
    answers = [enqueue(broker, "twice 300 ok", "twice") for broker in (one, other, one)]
    assert [answer["duplicate"] for answer in answers] == [False, True, True]
    assert result(one, "twice", 5)["state"] == "done"
    again = enqueue(other, "twice 300 ok", "twice")
    assert (again["duplicate"], again["state"]) == (True, "done")
    assert crowd.runs()["twice"] == 1


def test_an_id_of_another_call_is_refused(pair):
    crowd, one, other = pair
    queued(one, "mine 0 ok", "mine")
    for broker in (one, other):
        refused = enqueue(broker, "yours 0 ok", "mine")
        assert refused["type"] == "bad_request"
        assert "another call" in refused["error"]
    assert result(one, "mine", 5)["state"] == "done"
    assert enqueue(one, "yours 0 ok", "mine")["type"] == "bad_request", "also when it has ended"
    assert crowd.runs()["yours"] == 0


def test_the_result_is_waited_for(pair):
    _, one, other = pair
    queued(one, "slow 600 ok", "slow")
    now = result(other, "slow")
    assert now["state"] in ("queued", "running")
    assert "result" not in now
    begun = time.monotonic()
    assert result(other, "slow", 10)["state"] == "done"
    assert time.monotonic() - begun < 3


def test_a_tools_own_error_is_its_result(pair):
    _, one, _ = pair
    call_id = queued(one, '{"error":"no luck"}', aid="AID.DEMO.FAIL.v1")
    told = result(one, call_id, 5)
    assert told["state"] == "done"
    assert told["result"]["status"] == "TOOL_ERROR"
    assert told["result"]["error"] == "no luck"


def test_a_call_of_five_megabytes_and_a_reply_of_five(pair):
    _, one, _ = pair
    text = json.dumps("x" * 5_000_000)
    told = result(one, queued(one, text, aid="AID.DEMO.ECHO.v1"), 20)
    assert told["result"]["output_json"] == text
    told = result(one, queued(one, '{"bytes":5000000}', aid="AID.DEMO.BLOB.v1"), 20)
    assert len(told["result"]["output_json"]) == 5_000_000


def test_many_calls_are_shared_and_each_runs_once(pair):
    crowd, one, other = pair
    with one.wire() as wire:
        wire.send(
            *[
                {"aid": "_enqueue", "id": n, "call": {"aid": LEDGER, "input_json": f"m{n} 5 ok", "id": f"m{n}"}}
                for n in range(300)
            ]
        )
        assert all(reply["ok"] for reply in wire.replies(300))
    assert all(result(one, f"m{n}", 20)["state"] == "done" for n in range(300))
    runs = crowd.runs()
    assert all(runs[f"m{n}"] == 1 for n in range(300))
    for broker in (one, other):
        assert broker.status()["cluster"]["queue"]["done"] > 30, "both have done their share"


def test_a_tool_that_nobody_has_waits_until_somebody_has_it(pair):
    crowd, one, _ = pair
    answer = enqueue(one, '{"n":1}', "early", aid="AID.LATE.ECHO.v1")
    assert answer["known"] is False
    status = operate(one, "status")["queue"]
    assert {"tool": "AID.LATE.ECHO.v1", "queued": 1, "running": 0, "again": 0, "brokers": False} in status["tools"]
    assert result(one, "early", 0.3)["state"] == "queued"
    late = crowd.start(config=SOON + '[[oneshot]]\nname = "AID.LATE.ECHO.v1"\ncommand = ["sh", "-c", "cat"]\n')
    assert result(one, "early", 20)["state"] in ("done", "dead")
    late.stop()


def test_a_slow_call_is_not_given_to_another_broker(pair):
    crowd, one, other = pair
    call_id = queued(one, "sleeper 4000 ok")
    told = result(other, call_id, 15)
    assert told["result"]["output_json"] == '"sleeper"'
    assert crowd.runs()["sleeper"] == 1, "it took four times redeliver_seconds"


def test_calls_of_one_key_run_once(pair):
    crowd, one, _ = pair
    ids = [queued(one, "keyed 100 ok", idempotency_key="k") for _ in range(3)]
    results = [result(one, call_id, 10)["result"] for call_id in ids]
    assert [reply["output_json"] for reply in results] == ['"keyed"'] * 3
    assert sum("idempotent_hit" in reply for reply in results) == 2
    assert crowd.runs()["keyed"] == 1


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "words"),
    [
        ({}, "missing aid"),
        ([], "invalid JSON"),
        ({"aid": LEDGER, "id": 7}, '"id"'),
        ({"aid": LEDGER, "id": ""}, '"id"'),
        ({"aid": LEDGER, "id": None}, '"id"'),
        ({"aid": LEDGER, "id": "x" * 129}, '"id"'),
        ({"aid": LEDGER, "input_json": 1}, '"input_json" must be'),
        ({"aid": LEDGER, "timeout_ms": 0}, '"timeout_ms" must be'),
        ({"aid": LEDGER, "stream": True}, '"stream"'),
        ({"aid": "_status"}, "word to the broker"),
    ],
)
def test_a_call_that_cannot_run_is_refused_at_once(pair, call, words):
    _, one, _ = pair
    refused = one.ask({"aid": "_enqueue", "call": call})
    assert refused["type"] == "bad_request"
    assert words in refused["error"] + refused.get("detail", "")


def test_words_without_what_they_need_are_refused(pair):
    _, one, _ = pair
    assert '"call"' in one.ask({"aid": "_enqueue"})["error"]
    assert '"call_id"' in one.ask({"aid": "_result"})["error"]
    assert result(one, "never")["type"] == "not_found"
    assert one.ask({"aid": "_queue.dead"})["type"] == "forbidden"
    assert operate(one, "requeue")["type"] == "bad_request"
    assert operate(one, "requeue", call_id="never")["type"] == "not_found"


def test_rights_are_asked_at_once_and_results_told_to_whoever_enqueued(crowd):
    config = SOON + '[[principal]]\nname = "http:anonymous"\ntools = ["AID.DEMO.*"]\ntiers = [0]\n'
    broker = crowd.start("--http", "127.0.0.1:0", "--cluster", "own", config=config)
    web = web_of(broker)
    assert post(web, {"aid": LEDGER, "inputs": {}})[0] == 403
    assert post(web, {"aid": "AID.NOBODY.v1", "inputs": {}})[0] == 403, "nobody can tell its tier"
    call_id = queued(broker, "secret 0 ok")
    assert result(broker, call_id, 5)["state"] == "done"
    assert get(web, call_id)[0] == 404, "another principal's"
    with broker.operator() as wire:
        assert wire.ask({"aid": "_result", "call_id": call_id})["state"] == "done"


def test_without_nats_one_sentence_says_what_to_do(demo):
    for request in ({"aid": "_enqueue", "call": {"aid": LEDGER}}, {"aid": "_result", "call_id": "x"}):
        refused = demo.ask(request)
        assert refused["type"] == "unavailable"
        assert "--nats" in refused["error"]
    assert "--nats" in operate(demo, "status")["error"]


# --- what is dead -----------------------------------------------------------------------------------------------------


def test_a_crash_of_the_tool_is_reported_and_run_again_only_by_force(pair):
    crowd, one, other = pair
    queued(one, "fatal 0 die", "fatal")
    told = result(other, "fatal", 10)
    assert (told["state"], told["result"]["type"]) == ("dead", "crash")
    found = dead(other, "fatal")
    assert found["may_have_run"] is True
    assert found["type"] == "crash"
    assert json.loads(found["request"])["input_json"] == "fatal 0 die"
    assert abs(found["time"] - time.time()) < 60
    refused = operate(one, "requeue", call_id="fatal")
    assert refused["type"] == "bad_request"
    assert "--force" in refused["error"]
    assert operate(one, "requeue", all=True)["left"], "all leaves it where it is"
    assert crowd.runs()["fatal"] == 1
    assert operate(one, "requeue", call_id="fatal", force=True)["requeued"] == ["fatal"]
    one.eventually(lambda: crowd.runs()["fatal"] == 2)
    assert result(one, "fatal", 10)["state"] == "dead"


def test_what_cannot_be_read_is_dead_with_the_reason(pair, plain):
    _, one, _ = pair
    queued(one, "warm 0 ok")  # the tool is known to the queue
    for text in (b"\xff\xfe junk", b"[1]", b'{"aid":"AID.OTHER.v1"}', b'{"inputs":{},"input_json":"{}"}'):
        token = LEDGER.replace(".", "%2E")
        plain.run(plain.nats.jetstream().publish(f"broker_queue.default.{token}.x", text))
    one.eventually(lambda: sum(d["call_id"].startswith("message-") for d in operate(one, "dead")["dead"]) >= 4)
    reasons = " ".join(d["reason"] for d in operate(one, "dead")["dead"] if d["call_id"].startswith("message-"))
    assert "invalid JSON" in reasons
    assert "names AID.OTHER.v1" in reasons


def test_a_call_that_a_program_on_nats_has_queued_runs_too(pair, plain):
    crowd, one, _ = pair
    queued(one, "warm 0 ok")
    token = LEDGER.replace(".", "%2E")
    request = json.dumps({"id": "foreign", "input_json": "foreign 0 ok"}).encode()
    for _ in range(2):
        plain.run(plain.nats.jetstream().publish(f"broker_queue.default.{token}.x", request))
    one.eventually(lambda: crowd.runs()["foreign"] == 1)
    with one.operator() as wire:
        assert wire.ask({"aid": "_result", "call_id": "foreign", "wait_ms": 5000})["state"] == "done"
    one.eventually(lambda: operate(one, "status")["queue"]["calls"] == 0)
    assert crowd.runs()["foreign"] == 1


def test_a_breaker_that_is_open_puts_calls_off_and_they_run_when_it_closes(crowd):
    breaker = "[breaker]\nin_a_row = 2\nopen_seconds = 1.5\n"
    broker = crowd.start("--cluster", "breaker", config=SOON + breaker)
    for n in range(2):
        queued(broker, f"d{n} 0 die", f"d{n}")
        assert result(broker, f"d{n}", 10)["state"] == "dead"
    assert broker.ask({"aid": LEDGER, "input_json": "direct 0 ok"})["type"] == "breaker_open"
    assert result(broker, queued(broker, "patient 0 ok"), 10)["state"] == "done"
    assert crowd.runs()["patient"] == 1


def test_a_lease_is_asked_for_and_a_new_one_brings_a_dead_call_back(crowd):
    broker = crowd.start("--cluster", "leases", config=SOON, env={"MACHINA_LEASE_ENFORCE": "1"})

    def token() -> str:
        with broker.operator() as wire:
            return wire.ask({"aid": "_lease.issue", "tool_aid": LEASED})["token_id"]

    assert enqueue(broker, "l0 0 ok", aid=LEASED)["type"] == "lease_required"
    assert result(broker, queued(broker, "l1 0 ok", aid=LEASED, _lease_token=token()), 5)["state"] == "done"
    queued(broker, "l2 0 ok", "l2", aid=LEASED, _lease_token="lease_" + "0" * 32)
    told = result(broker, "l2", 5)
    assert (told["state"], told["result"]["reason"]) == ("dead", "lease not found")
    assert dead(broker, "l2")["may_have_run"] is False
    assert operate(broker, "requeue", call_id="l2", lease=token())["requeued"] == ["l2"]

    def done() -> bool:
        told = result(broker, "l2", 1)
        assert told.get("type") in (None, "unavailable"), told
        return told.get("state") == "done"

    broker.eventually(done)
    assert crowd.runs() == {"l1": 1, "l2": 1}


def test_a_full_queue_takes_no_more_and_loses_nothing(crowd):
    broker = crowd.start("--cluster", "full", config=SOON.replace("[queue]\n", "[queue]\nbytes = 20000\n"), tools=False)
    for n in range(3):
        queued(broker, json.dumps("x" * 5000), f"full{n}")
    broker.eventually(lambda: enqueue(broker, json.dumps("y" * 5000), "more").get("type") == "overloaded")
    assert "queue.bytes" in enqueue(broker, json.dumps("y" * 5000), "more")["error"]
    crowd.start("--cluster", "full", config=SOON)
    for n in range(3):
        assert result(broker, f"full{n}", 10)["state"] in ("done", "dead")
    broker.eventually(lambda: enqueue(broker, "after 0 ok", "after")["ok"])


def test_results_and_dead_calls_expire(crowd):
    broker = crowd.start("--cluster", "short", config="[queue]\nresult_seconds = 1\ndead_seconds = 2\n")
    queued(broker, "gone 0 ok", "gone")
    assert result(broker, "gone", 5)["state"] == "done"
    queued(broker, "died 0 die", "died")
    assert result(broker, "died", 5)["state"] == "dead"
    broker.eventually(lambda: result(broker, "gone").get("type") == "not_found")
    broker.eventually(lambda: result(broker, "died").get("type") == "not_found")
    assert dead(broker, "died") == {}


# --- faces ------------------------------------------------------------------------------------------------------------


def web_of(broker) -> str:
    return broker.status()["http"]


def post(web: str, body: Any) -> tuple[int, Any]:
    return ask(web, "POST", "/v1/queue", body)


def get(web: str, call_id: str, query: str = "") -> tuple[int, Any]:
    return ask(web, "GET", f"/v1/queue/{call_id}{query}")


def ask(web: str, method: str, path: str, body: Any = None) -> tuple[int, Any]:
    import urllib.error
    import urllib.request

    data = None if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(web + path, data, {"content-type": "application/json"}, method=method)
    try:
        with urllib.request.urlopen(request, timeout=20) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def test_over_http(pair):
    crowd, one, _ = pair
    web = web_of(one)
    status, made = post(web, {"aid": LEDGER, "input_json": "web 300 ok", "id": "a/b c"})
    assert (status, made["call_id"], made["state"]) == (202, "a/b c", "queued")
    assert get(web, "a%2Fb%20c")[0] == 202
    status, told = get(web, "a%2Fb%20c", "?wait=5")
    assert (status, told["state"], told["result"]["output_json"]) == (200, "done", '"web"')
    assert get(web, "never")[0] == 404
    assert get(web, "never", "?wait=soon")[0] == 400
    assert post(web, b"junk")[0] == 400
    assert post(web, {"inputs": {}})[0] == 400
    assert "/v1/queue/{id}" in ask(web, "GET", "/openapi.json")[1]["paths"]
    assert crowd.runs()["web"] == 1


def test_from_python(pair):
    _, one, _ = pair
    with Client(one.path) as tools:
        call_id = tools.enqueue("AID.DEMO.ECHO.v1", {"n": 1})
        reply = tools.result(call_id, wait=10)
        assert reply is not None
        assert reply.output == {"n": 1}
        assert tools.enqueue("AID.DEMO.ECHO.v1", {"n": 1}, id="py") == "py"
        with pytest.raises(BadRequest) as refused:
            tools.enqueue("AID.DEMO.ECHO.v1", {"n": 2}, id="py")
        assert refused.value.more["call_id"] == "py"
        assert tools.result(tools.enqueue("AID.DEMO.SLEEP.v1", {"ms": 800})) is None
        with pytest.raises(NotFound):
            tools.result("never")

    async def main() -> None:
        async with AsyncClient(one.path) as tools:
            ids = await asyncio.gather(*(tools.enqueue("AID.DEMO.ECHO.v1", {"n": n}) for n in range(5)))
            replies = await asyncio.gather(*(tools.result(one, wait=10) for one in ids))
            assert [reply.output for reply in replies if reply] == [{"n": n} for n in range(5)]

    asyncio.run(main())


def test_the_command_line(pair, tmp_path):
    _, one, _ = pair

    def run(*words: str) -> Any:
        return broker_command(tmp_path, *words, "--socket", one.path)

    put = run("enqueue", "AID.DEMO.ECHO.v1", '{"n":1}', "--id", "cli")
    assert (put.returncode, put.stdout) == (0, "cli\n"), put.stderr
    got = run("queue", "result", "cli", "--wait", "10")
    assert (got.returncode, got.stdout) == (0, '{"n":1}\n'), got.stderr
    assert run("enqueue", "AID.DEMO.ECHO.v1", '{"n":2}', "--wait").stdout == '{"n":2}\n'
    waiting = run("enqueue", "AID.NOBODY.v1", "{}", "--id", "nobody", "--wait", "0.2")
    assert waiting.returncode == 3
    assert "no broker" in waiting.stderr
    assert "AID.NOBODY.v1" in run("queue", "status").stdout
    failed = run("enqueue", LEDGER, '"x 0 die"', "--wait", "10", "--id", "clidead")
    assert failed.returncode in (0, 1)
    again = run("enqueue", "AID.DEMO.ECHO.v1", '{"n":9}', "--id", "cli")
    assert again.returncode == 1
    assert "another call" in again.stderr
    assert run("queue", "requeue").returncode == 2
    assert run("queue", "dead").returncode == 0
    assert run("status").stdout.count("queue of the cluster") == 1


def test_metrics_tell_of_the_queue(pair):
    _, one, _ = pair
    import urllib.request

    with urllib.request.urlopen(web_of(one) + "/metrics") as response:
        text = response.read().decode()
    assert 'broker_queue_ended_total{how="done"}' in text
    assert "broker_queue_calls " in text


def test_tools_of_one_toolhost_do_not_wait_for_each_other(pair):
    """One that has just had many calls does not keep its toolhosts' room for more of them."""
    _, one, _ = pair
    quick = [queued(one, f'{{"n":{n}}}', aid="AID.DEMO.ECHO.v1") for n in range(20)]
    assert all(result(one, call_id, 10)["state"] == "done" for call_id in quick)
    begun = time.monotonic()
    for n in range(4):
        assert result(one, queued(one, '{"ms":50}', aid="AID.DEMO.SLEEP.v1"), 10)["state"] == "done"
        assert result(one, queued(one, f'{{"n":{n}}}', aid="AID.DEMO.ECHO.v1"), 10)["state"] == "done"
        assert result(one, queued(one, "{}", aid="AID.DEMO.COUNTER.v1"), 10)["state"] == "done"
    assert time.monotonic() - begun < 10


def test_a_session_of_queued_calls_is_its_callers_own(pair):
    _, one, other = pair
    web = web_of(one)

    def state(op: str, **more: Any) -> dict[str, Any]:
        inputs = {"op": op, "slot": 7, **more}
        return {"aid": "AID.DEMO.STATE.v1", "inputs": inputs, "session": "s", "ds_state": {"delta": True, "slots": {}}}

    def ours(call: dict[str, Any]) -> str:
        answer = one.ask({"aid": "_enqueue", "call": call})
        return result(one, answer["call_id"], 10)["result"]["output_json"]

    ours(state("put", value="secret"))
    assert "secret" in ours(state("get"))
    theirs = post(web, state("get"))[1]["call_id"]
    assert "secret" not in json.dumps(get(web, theirs, "?wait=10")[1])
    direct = other.ask(state("get"))
    assert direct["ok"]
    assert "secret" not in json.dumps(direct), "a session of queued calls is apart from those of connections"
