"""What may go wrong in the middle of a call: brokers that are killed, NATS and Postgres that go away and come back."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import time
from pathlib import Path

import pytest

from tests.conftest import Served
from tests.support.commonground import BUCKET, Postgres, Project, Row
from tests.support.postgres import PostgresServer
from tests.support.waiting import eventually
from tests.utp.conftest import Make, Stage
from tests.utp.test_vectors import last, wakeups

SHORT_LEASE = "lease_seconds = 1"


def told(stage: Stage, call: str, seconds: float = 30.0) -> Row:
    eventually(lambda: bool(stage.project.reports(call)), seconds)
    (card,) = stage.project.results(call)
    (report,) = stage.project.reports(call)
    assert report["payload"]["tool_result_card_id"] == card["card_id"]
    return card["content"]


def running(stage: Stage, call: str) -> None:
    eventually(lambda: stage.runs(call) == 1)


def holder(stage: Stage) -> Served:
    """The broker that has a command in hand."""
    return next(
        one
        for one in stage.brokers
        if one.process.poll() is None and any(target["in_hand"] for target in one.status()["utp"]["targets"])
    )


def kill(broker: Served) -> None:
    os.kill(broker.process.pid, signal.SIGKILL)
    broker.process.wait()


# --- brokers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sqlite", [True, False])
def test_a_call_whose_broker_is_killed_is_answered_for_by_another_and_not_run_again(make: Make, sqlite: bool) -> None:
    stage = make(sqlite)
    stage.consumer(ack_wait=1.5)
    for _ in range(2):
        stage.serving(stage.start(SHORT_LEASE))
    stage.project.ask("tc", {"id": "tc", "do": "sleep", "seconds": 60})
    running(stage, "tc")
    before = last(stage.project)
    kill(holder(stage))
    content = told(stage, "tc")
    assert (content["status"], content["error"]["code"]) == ("failed", "internal_error")
    assert "may have run" in content["error"]["message"]
    assert stage.runs("tc") == 1
    eventually(lambda: len(wakeups(stage.project, before)) == 1)
    assert stage.project.entry("tc")["payload"] == stage.project.reports("tc")[0]["payload"]


def test_a_call_that_had_not_begun_when_its_broker_was_killed_is_run_by_another(make: Make) -> None:
    stage = make()
    assert isinstance(stage.tables, Postgres)
    stage.consumer(ack_wait=1.5)
    stage.serving(stage.start(SHORT_LEASE))
    stage.project.put_call("tc", {"id": "tc", "value": 1})
    stage.tables.do("ALTER TABLE resource.tools RENAME TO gone")  # it gets as far as looking for the tool's definition
    stage.project.say(stage.project.command("tc"))
    eventually(lambda: "resource.tools" in stage.status()["trouble"])
    kill(stage.brokers[0])
    stage.tables.do("ALTER TABLE resource.gone RENAME TO tools")
    stage.start(SHORT_LEASE)
    assert told(stage, "tc")["result"] == 1
    assert stage.runs("tc") == 1


def test_the_claim_of_an_executor_that_is_gone_is_taken_over(make: Make) -> None:
    stage = make()
    stage.serving(stage.start(SHORT_LEASE))
    entries = {"a": b'{"status":"running"}', "b": b'{"status":"running","timestamp":1700000000.5}', "c": b"junk"}
    for call, entry in entries.items():
        put_entry(stage.project, call, entry)
        stage.project.ask(call, {"id": call})
    for call in entries:
        assert "may have run" in told(stage, call)["error"]["message"]
        assert stage.runs(call) == 0


def test_an_executor_of_commonground_s_own_is_given_its_time(make: Make) -> None:
    """It does not renew its claim: for a minute it may be at work."""
    stage = make()
    stage.serving(stage.start(SHORT_LEASE))
    put_entry(stage.project, "tc", b'{"status":"running","timestamp":%d}' % time.time())
    stage.project.ask("tc", {"id": "tc"})
    time.sleep(2.5)
    assert stage.project.results("tc") == []
    content = {"__type__": "ToolResultContent", "status": "success", "after_execution": "suspend", "result": 1}
    stage.project.put_card("theirs", content, {"type": "tool.result", "step_id": "step_1"}, "tc")
    callback = {
        "tool_call_id": "tc",
        "agent_turn_id": "turn_1",
        "turn_epoch": 7,
        "after_execution": "suspend",
        "status": "success",
        "tool_result_card_id": "theirs",
        "agent_id": "agent_a",
        "step_id": "step_1",
    }
    done = {"status": "done", "timestamp": time.time(), "payload": callback}
    put_entry(stage.project, "tc", json.dumps(done).encode())
    assert told(stage, "tc")["result"] == 1
    assert stage.project.reports("tc")[0]["payload"] == callback
    assert stage.runs("tc") == 0


def put_entry(project: Project, call: str, value: bytes) -> None:
    key = f"tool.{project.name}.oracle.{hashlib.sha256(call.encode()).hexdigest()}"

    async def put() -> None:
        js = project.client.nats.jetstream()
        try:
            bucket = await js.key_value(BUCKET)
        except Exception:
            bucket = await js.create_key_value(bucket=BUCKET, history=64)
        await bucket.put(key, value)

    project.client.run(put())


def test_a_leader_that_is_alive_is_waited_for_however_long_it_takes(make: Make) -> None:
    stage = make()
    stage.consumer(ack_wait=1.5)
    for _ in range(2):
        stage.serving(stage.start(SHORT_LEASE))
    stage.project.ask("tc", {"id": "tc", "do": "sleep", "seconds": 3.5, "value": 1})
    running(stage, "tc")
    stage.project.say(stage.project.command("tc"))  # a duplicate waits as long
    assert told(stage, "tc")["result"] == 1
    assert stage.runs("tc") == 1


def test_a_broker_that_drains_finishes_what_runs_and_gives_back_what_waits(make: Make) -> None:
    stage = make()
    first = stage.serving(stage.start())
    calls = [f"tc{number}" for number in range(12)]  # eight run at once, the rest waits
    for one in calls:
        stage.project.ask(one, {"id": one, "do": "sleep", "seconds": 1.0, "value": one})
    eventually(lambda: sum(stage.runs(one) for one in calls) == 8)
    first.process.send_signal(signal.SIGTERM)
    time.sleep(0.3)
    stage.serving(stage.start())
    assert first.process.wait(20) == 0
    assert all(told(stage, one)["result"] == one for one in calls)
    assert all(stage.runs(one) == 1 for one in calls)


def test_what_waits_when_nobody_will_get_it_again_is_told_of(make: Make) -> None:
    stage = make()
    stage.consumer(ack_wait=30, max_deliver=1)
    broker = stage.serving(stage.start())
    calls = [f"tc{number}" for number in range(9)]
    for one in calls:
        stage.project.ask(one, {"id": one, "do": "sleep", "seconds": 1.0, "value": one})
    eventually(lambda: sum(stage.runs(one) for one in calls) == 8)
    assert broker.stop() == 0
    contents = [told(stage, one, 1) for one in calls]
    (left,) = [one for one in contents if one["status"] == "failed"]
    assert (left["error"]["code"], left["error"]["retryable"]) == ("upstream_unavailable", True)


def test_a_call_that_outlives_the_drain_time_is_told_of_as_one_that_may_have_run(make: Make) -> None:
    stage = make()
    broker = stage.serving(stage.start("", env={"BROKER_SERVER_DRAIN_SECONDS": "0.3"}))
    stage.project.ask("tc", {"id": "tc", "do": "sleep", "seconds": 60})
    running(stage, "tc")
    assert broker.stop() == 0
    content = told(stage, "tc", 1)
    assert content["error"]["code"] == "internal_error"
    assert "may have run" in content["error"]["message"]


# --- Postgres ---------------------------------------------------------------------------------------------------------


def test_postgres_may_be_away_while_a_tool_runs(own_postgres: PostgresServer, make: Make) -> None:
    stage = make(server=own_postgres)
    stage.serving(stage.start())
    stage.project.ask("tc", {"id": "tc", "do": "sleep", "seconds": 0.5, "value": 1})
    running(stage, "tc")
    own_postgres.kill()
    eventually(lambda: "Postgres" in stage.status()["trouble"])
    own_postgres.start()
    assert told(stage, "tc")["result"] == 1
    assert stage.runs("tc") == 1
    eventually(lambda: stage.status()["trouble"] == "")


def test_postgres_may_be_away_when_a_command_comes(own_postgres: PostgresServer, make: Make) -> None:
    stage = make(server=own_postgres)
    stage.serving(stage.start())
    stage.project.put_call("tc", {"id": "tc", "value": 1})
    own_postgres.stop()
    stage.project.say(stage.project.command("tc"))
    eventually(lambda: "Postgres" in stage.status()["trouble"])
    assert stage.status()["targets"][0]["in_hand"] == 1
    own_postgres.start()
    assert told(stage, "tc")["result"] == 1


def test_a_postgres_that_stalls_is_waited_for(own_postgres: PostgresServer, make: Make) -> None:
    stage = make(server=own_postgres)
    stage.serving(stage.start())
    stage.project.ask("tc", {"id": "tc", "do": "sleep", "seconds": 0.5, "value": 1})
    running(stage, "tc")
    own_postgres.pause()
    time.sleep(1)
    own_postgres.go_on()
    assert told(stage, "tc")["result"] == 1
    assert stage.runs("tc") == 1


@pytest.mark.parametrize("table", ["cards", "state.agent_inbox", "state.execution_edges", "resource.project_agents"])
def test_each_step_is_taken_when_postgres_can_take_it(make: Make, table: str) -> None:
    """The table of one step is not there for a while: nothing is acknowledged before, and nothing done twice."""
    stage = make()
    assert isinstance(stage.tables, Postgres)
    stage.serving(stage.start())
    before = last(stage.project)
    stage.project.ask("tc", {"id": "tc", "do": "sleep", "seconds": 0.5, "value": 1})
    running(stage, "tc")
    schema = table.rpartition(".")[0] or "public"
    stage.tables.do(f"ALTER TABLE {table} RENAME TO gone")
    eventually(lambda: "Postgres" in stage.status()["trouble"])
    assert wakeups(stage.project, before) == []
    stage.tables.do(f"ALTER TABLE {schema}.gone RENAME TO {table.rpartition('.')[2]}")
    assert told(stage, "tc")["result"] == 1
    eventually(lambda: len(wakeups(stage.project, before)) == 1)
    assert stage.runs("tc") == 1


def test_a_result_that_the_store_refuses_is_told_of(make: Make) -> None:
    stage = make()
    assert isinstance(stage.tables, Postgres)
    stage.tables.do("ALTER TABLE cards ADD CHECK (content->'result' IS DISTINCT FROM '\"forbidden\"')")
    stage.tables.do("ALTER TABLE cards ADD CHECK (tool_call_id <> 'never' OR metadata->>'type' <> 'tool.result')")
    stage.serving(stage.start())
    stage.project.ask("tc", {"value": "forbidden"})
    content = told(stage, "tc")
    assert content["error"]["code"] == "internal_error"
    assert "cannot be kept" in content["error"]["message"]
    stage.project.ask("never", {})
    eventually(lambda: bool(stage.status()["given_up"]))
    assert "check constraint" in stage.status()["given_up"][0]["reason"]


def test_a_postgres_that_is_away_at_the_start_is_looked_for(own_postgres: PostgresServer, make: Make) -> None:
    stage = make(server=own_postgres)
    stage.project.put_call("tc", {"value": 1})
    own_postgres.stop()
    broker = stage.start()
    assert not broker.status()["utp"]["store"]["ready"]
    own_postgres.start()
    stage.serving(broker)
    stage.project.say(stage.project.command("tc"))
    assert told(stage, "tc")["result"] == 1


def test_a_postgres_without_commonground_s_tables_stops_the_start(make: Make) -> None:
    stage = make()
    assert isinstance(stage.tables, Postgres)
    stage.tables.do("DROP TABLE state.agent_inbox; DROP TABLE resource.tools")
    text = stage.refused("--nats", stage.nats.url)
    assert "has no state.agent_inbox, resource.tools: these are CommonGround's tables" in text
    assert "a-password" not in text


# --- NATS -------------------------------------------------------------------------------------------------------------


def test_nats_may_be_away_while_a_tool_runs(make: Make) -> None:
    stage = make()
    stage.consumer(ack_wait=2)
    stage.serving(stage.start(SHORT_LEASE))
    stage.project.ask("tc", {"id": "tc", "do": "sleep", "seconds": 0.5, "value": 1})
    running(stage, "tc")
    stage.nats.kill()
    eventually(lambda: "NATS" in stage.status()["trouble"], 20)
    assert stage.project.reports("tc") == []
    stage.nats.start()
    assert told(stage, "tc")["result"] == 1
    assert stage.runs("tc") == 1
    eventually(lambda: stage.project.entry("tc")["status"] == "done")


def test_a_consumer_that_is_taken_away_is_made_again(make: Make) -> None:
    stage = make()
    stage.serving(stage.start())
    stage.project.client.ask("$JS.API.CONSUMER.DELETE.cg_cmd_v1r3.tool_oracle_cmd_v1r3", b"")
    stage.project.ask("tc", {"value": 1})
    assert told(stage, "tc")["result"] == 1


def test_a_consumer_that_is_not_what_we_need_is_left_alone_and_shown(make: Make) -> None:
    stage = make()
    stage.consumer(ack_wait=30, deliver_subject="somewhere")
    broker = stage.start()

    def target() -> Row:
        return next(one for one in broker.status()["utp"]["targets"] if one["target"] == "oracle")

    eventually(lambda: "not one that is pulled" in target()["reason"])
    assert target()["state"] == "waiting"


# --- all of it --------------------------------------------------------------------------------------------------------


def test_whatever_goes_away_each_call_ends_once(own_postgres: PostgresServer, make: Make) -> None:
    """Two brokers, one of which is killed; NATS and Postgres are killed, and come back, while calls come and run."""
    stage = make(server=own_postgres)
    stage.consumer(ack_wait=2, max_deliver=10)
    for _ in range(2):
        stage.serving(stage.start(SHORT_LEASE))
    calls = [f"tc{number}" for number in range(40)]
    for one in calls:
        stage.project.put_call(one, {"id": one, "do": "sleep", "seconds": 0.3, "value": one})
        stage.project.put_edge(one)
    for one in calls:
        stage.project.say(stage.project.command(one))
    eventually(lambda: sum(stage.runs(one) for one in calls) >= 6)
    own_postgres.kill()
    time.sleep(0.5)
    own_postgres.start()
    time.sleep(0.5)
    stage.nats.kill()
    time.sleep(0.3)
    stage.nats.start()
    time.sleep(0.5)
    kill(stage.brokers[0])
    eventually(lambda: all(stage.project.reports(one) for one in calls), 60)
    contents = {one: told(stage, one) for one in calls}
    assert all(stage.runs(one) <= 1 for one in calls)
    for one, content in contents.items():
        assert content["status"] == "failed" or content["result"] == one
    answered_for = [one for one, content in contents.items() if content["status"] == "failed"]
    assert len(answered_for) <= 16  # what the killed one had in hand
    assert all("may have run" in contents[one]["error"]["message"] for one in answered_for)


def test_without_its_extra_utp_says_what_to_install(tmp_path: Path, make: Make) -> None:
    stage = make(sqlite=True)
    (tmp_path / "asyncpg.py").write_text("raise ModuleNotFoundError(\"No module named 'asyncpg'\", name='asyncpg')")
    stage.start(env={"PYTHONPATH": str(tmp_path)})  # the embedded store needs none of it
    text = make().refused("--nats", stage.nats.url, env={"PYTHONPATH": str(tmp_path)})
    assert "needs asyncpg: pip install 'toolhost-broker[utp]'" in text


def test_targets_without_nats_are_refused(make: Make) -> None:
    assert "set nats.url" in make(sqlite=True).refused()
