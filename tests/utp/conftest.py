"""Brokers that serve CommonGround's targets, with real NATS, and each test on both stores."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from nats.js.api import ConsumerConfig

from broker.utp.stores.sqlite import SQLite as EmbeddedStore
from tests.conftest import Brokers, Served
from tests.support.commonground import COMMANDS, Postgres, Project, SQLite, Tables
from tests.support.nats import Client, NatsServer
from tests.support.postgres import PostgresServer
from tests.support.python_app import python_app, python_config

ORACLE = """
import os, sys, time
from collections import Counter

class BadRequestError(Exception):
    code, http_status = "bad_request", 400

    def __init__(self, message, detail=None):
        super().__init__(message)
        self.detail = detail

def oracle(payload):
    with open(os.environ["LEDGER"], "a") as ledger:
        ledger.write(str(payload.get("id") or payload.get("do")) + "\\n")
    do = payload.get("do", "return")
    if do == "bad_request":
        raise BadRequestError("q is required", {"field": "q"})
    if do == "value_error":
        raise ValueError("no such thing")
    if do == "key_error":
        raise KeyError("x")
    if do == "boom":
        raise RuntimeError("boom")
    if do == "sleep":
        time.sleep(payload["seconds"])
    if do == "die":
        print("last words:", payload.get("api_key"), file=sys.stderr)
        os._exit(3)
    if do == "echo":
        return payload
    if do == "measure":
        return {"api_key": [len(payload["api_key"]), payload["api_key"][-1]]}
    if do == "nul":
        return ["a\\0b", "\\ud800"]
    if do == "complain":
        raise RuntimeError(f"the key {payload['api_key']} is wrong")
    return payload.get("value")

def word_count(payload):
    words = payload["text"].split()
    top = Counter(words).most_common(payload["top_k"])
    return {
        "mode": payload["mode"],
        "top_k": payload["top_k"],
        "total_tokens": len(words),
        "unique_tokens": len(set(words)),
        "counts": [{"word": word, "count": count} for word, count in top],
        "counts_map": dict(top),
    }
"""

Make = Callable[..., "Stage"]


class Stage:
    """A store, a NATS server, and brokers that serve the oracle from it."""

    def __init__(self, folder: Path, nats: NatsServer, tables: Tables) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self.nats = nats
        self.tables = tables
        self.ledger = folder / "ledger"
        self._app = python_app(folder / "app", ORACLE, "oracles")
        self._brokers = Brokers(folder)
        self.brokers: list[Served] = []
        self._project: Project | None = None
        self._client: Client | None = None

    def start(
        self,
        utp: str = "",
        *flags: str,
        config: str = "",
        env: dict[str, str] | None = None,
        **oracle: object,
    ) -> Served:
        """A broker; `utp` are more lines of [utp], `oracle` settings of the target."""
        flags = ("--nats", self.nats.url, *flags)
        config = f"{config}\n{self.config(utp, **oracle)}"
        broker = self._brokers.start(*flags, config=config, env={"LEDGER": str(self.ledger), **(env or {})})
        self.brokers.append(broker)
        return broker

    def config(self, utp: str = "", **oracle: object) -> str:
        about = ", ".join(["tool = 'oracle'", *(f"{name} = {value}" for name, value in oracle.items())])
        targets = f"""
        oracle = {{ {about} }}
        word_count = {{ tool = 'word_count', author = 'sys.tool.word_count' }}
        impatient = {{ tool = 'oracle', timeout_seconds = 0.3 }}
        nowhere = 'no_such_tool'
        """
        store = f"[utp]\nstore = '{self.tables.kind}'\ndsn = '{self.tables.dsn}'\n{utp}\n[utp.targets]\n{targets}"
        return python_config(self._app, "oracle", "word_count", module="oracles") + store

    def refused(self, *flags: str, env: dict[str, str] | None = None) -> str:
        """A start that comes to nothing: why not."""
        file = self._folder / "refused.toml"
        file.write_text(self.config())
        command = [sys.executable, "-m", "broker", "serve", "--socket", str(self._folder / "r.sock"), *flags]
        environment = {"HOME": str(self._folder), "PATH": os.environ["PATH"], **(env or {})}
        done = subprocess.run(
            [*command, "--config", str(file)], capture_output=True, text=True, timeout=30, env=environment, check=False
        )
        assert done.returncode == 2, done.stderr
        assert "Traceback" not in done.stderr
        return done.stderr

    def serving(self, broker: Served) -> Served:
        """It gets commands."""
        broker.eventually(lambda: all(one["state"] == "serving" for one in broker.status()["utp"]["targets"]))
        return broker

    @property
    def project(self) -> Project:
        if self._project is None:
            if isinstance(self.tables, SQLite):
                asyncio.run(make_tables(self.tables.dsn))
            self._client = Client(self.nats.url)
            self._project = Project(self.tables, self._client)
        return self._project

    def consumer(self, ack_wait: float, **settings: Any) -> None:
        """Made beforehand, with less patience than ours has."""
        js = self.project.client.nats.jetstream()
        run = self.project.client.run
        run(js.add_stream(name=COMMANDS, subjects=["cg.v1r3.*.*.cmd.*.*.>"], max_age=86400))
        about = {"ack_wait": ack_wait, "ack_policy": "explicit", "max_deliver": 3, **settings}
        subject = "cg.v1r3.*.*.cmd.tool.oracle.*"
        config = ConsumerConfig(durable_name="tool_oracle_cmd_v1r3", filter_subject=subject, **about)
        run(js.add_consumer(COMMANDS, config))

    def status(self) -> Any:
        """What the first broker says of UTP."""
        return self.brokers[0].status()["utp"]

    def runs(self, name: str) -> int:
        return self.ledger.read_text().split().count(name) if self.ledger.exists() else 0

    def end(self) -> None:
        if self._client is not None:
            self._client.close()
        self._brokers.end()


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[PostgresServer]:
    server = PostgresServer().start()
    yield server
    server.remove()


async def make_tables(file: str) -> None:
    """As a broker would, so that a call may be written down before there is one."""
    store = EmbeddedStore(Path(file))
    await store.open()
    await store.close()


_databases = 0


def database(server: PostgresServer) -> Postgres:
    """A new one, with CommonGround's tables."""
    global _databases
    _databases += 1
    whole = Postgres(server.dsn())
    whole.do(f"CREATE DATABASE utp{_databases}")
    whole.close()
    return Postgres(server.dsn(f"utp{_databases}")).make()


@pytest.fixture(scope="module", params=["sqlite", "postgres"])
def stage(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    """One broker for a module's tests, on each store."""
    folder = tmp_path_factory.mktemp("utp")
    tables: Tables = SQLite(folder / "utp.sqlite3")
    if request.param == "postgres":
        tables = database(request.getfixturevalue("postgres_server"))
    with NatsServer(folder / "nats") as nats:
        made = Stage(folder, nats, tables)
        made.serving(made.start())
        yield made
        made.end()


@pytest.fixture
def own_postgres() -> Iterator[PostgresServer]:
    """A server that may be killed."""
    server = PostgresServer().start()
    yield server
    server.remove()


@pytest.fixture
def make(tmp_path: Path, postgres_server: PostgresServer) -> Iterator[Make]:
    """Stages with a NATS server of their own, and brokers that the test starts; on Postgres, unless it says so."""
    made: list[tuple[Stage, NatsServer]] = []

    def start(sqlite: bool = False, server: PostgresServer | None = None) -> Stage:
        folder = tmp_path / str(len(made))
        nats = NatsServer(folder / "nats").start()
        tables = SQLite(folder / "utp.sqlite3") if sqlite else database(server or postgres_server)
        made.append((Stage(folder, nats, tables), nats))
        return made[-1][0]

    yield start
    for stage, nats in made:
        try:
            stage.end()
        finally:
            nats.stop()
