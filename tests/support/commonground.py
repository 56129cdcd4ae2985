"""CommonGround's side of tool calls, for tests: its tables, what its workers write and read, its messages."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sqlite3
import threading
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import asyncpg

from tests.support.nats import Client

COMMANDS = "cg_cmd_v1r3"
BUCKET = "cg_tool_idem_v1"
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
HEADERS = {
    "traceparent": f"00-{TRACE}-00f067aa0ba902b7-01",
    "tracestate": "vendor=1",
    "CG-Recursion-Depth": "1",
    "CG-Timestamp": "1700000000000",
    "CG-Version": "v1r3",
    "CG-Msg-Type": "dict",
    "CG-Sender": "cg-nats-client",
}
TABLES = """
CREATE SCHEMA resource;
CREATE SCHEMA state;
CREATE TABLE projects (project_id TEXT PRIMARY KEY, title TEXT NOT NULL, status TEXT NOT NULL DEFAULT 'active',
    owner_id TEXT NOT NULL);
CREATE TABLE cards (card_id TEXT PRIMARY KEY, tenant_id TEXT NOT NULL, content JSONB, tool_calls JSONB,
    tool_call_id TEXT, ttl_seconds INTEGER, expires_at TIMESTAMPTZ, deleted_at TIMESTAMPTZ, metadata JSONB,
    created_at TIMESTAMPTZ DEFAULT now());
CREATE UNIQUE INDEX one_result ON cards (tenant_id, md5(tool_call_id)) WHERE metadata->>'type' = 'tool.result';
CREATE TABLE resource.tools (project_id TEXT NOT NULL, tool_name TEXT NOT NULL, description TEXT,
    parameters JSONB NOT NULL DEFAULT '{}', target_subject TEXT, after_execution TEXT,
    options JSONB NOT NULL DEFAULT '{}', PRIMARY KEY (project_id, tool_name));
CREATE TABLE resource.project_agents (project_id TEXT NOT NULL, agent_id TEXT NOT NULL, profile_box_id UUID NOT NULL,
    worker_target TEXT NOT NULL, tags JSONB NOT NULL DEFAULT '[]', display_name TEXT, owner_agent_id TEXT,
    status TEXT NOT NULL DEFAULT 'active', metadata JSONB NOT NULL DEFAULT '{}', created_at TIMESTAMPTZ DEFAULT now(),
    last_seen_at TIMESTAMPTZ, PRIMARY KEY (project_id, agent_id));
CREATE TABLE state.agent_inbox (inbox_id TEXT PRIMARY KEY, project_id TEXT NOT NULL, agent_id TEXT NOT NULL,
    message_type TEXT NOT NULL, enqueue_mode TEXT, correlation_id TEXT, recursion_depth INT NOT NULL,
    traceparent TEXT NOT NULL, tracestate TEXT, trace_id TEXT, parent_step_id TEXT, source_agent_id TEXT,
    source_step_id TEXT, payload JSONB NOT NULL DEFAULT '{}', status TEXT NOT NULL DEFAULT 'pending',
    processed_at TIMESTAMPTZ, archived_at TIMESTAMPTZ, created_at TIMESTAMPTZ DEFAULT now());
CREATE UNIQUE INDEX one_message ON state.agent_inbox (project_id, message_type, md5(correlation_id));
CREATE TABLE state.execution_edges (edge_id TEXT PRIMARY KEY, project_id TEXT NOT NULL, channel_id TEXT,
    primitive TEXT NOT NULL, edge_phase TEXT NOT NULL, source_agent_id TEXT, source_agent_turn_id TEXT,
    source_step_id TEXT, target_agent_id TEXT, target_agent_turn_id TEXT, correlation_id TEXT, enqueue_mode TEXT,
    recursion_depth INT, trace_id TEXT, parent_step_id TEXT, metadata JSONB NOT NULL DEFAULT '{}',
    created_at TIMESTAMPTZ DEFAULT now());
CREATE UNIQUE INDEX one_edge ON state.execution_edges (project_id, md5(correlation_id), primitive, edge_phase);
"""

Row = dict[str, Any]


class Postgres:
    """A database with CommonGround's tables."""

    kind = "postgres"
    inbox, edges, tools, agents = (
        "state.agent_inbox",
        "state.execution_edges",
        "resource.tools",
        "resource.project_agents",
    )

    def __init__(self, dsn: str) -> None:
        self.dsn = dsn
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()

    def make(self) -> Postgres:
        self.do(TABLES)
        return self

    def do(self, statement: str, *values: Any) -> list[Row]:
        async def do() -> list[Row]:
            one = await asyncpg.connect(self.dsn)
            try:
                if not values and not statement.lstrip().startswith("SELECT"):
                    await one.execute(statement)
                    return []
                return [dict(row) for row in await one.fetch(statement, *values)]
            finally:
                await one.close()

        return self.run(do())

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(30)

    def insert(self, table: str, row: Row) -> None:
        values = [json.dumps(one) if isinstance(one, dict | list) else one for one in row.values()]
        places = ", ".join(f"${number}" for number in range(1, len(row) + 1))
        self.do(f"INSERT INTO {table} ({', '.join(row)}) VALUES ({places}) ON CONFLICT DO NOTHING RETURNING 1", *values)

    def add_agent(self, project: str, agent: str, worker: str) -> None:
        about = {"project_id": project, "agent_id": agent, "worker_target": worker, "profile_box_id": "0" * 32}
        self.insert(self.agents, about)

    def rows(self, table: str, call: str) -> list[Row]:
        column = "tool_call_id" if table == "cards" else "correlation_id"
        return [
            _decoded(row) for row in self.do(f"SELECT * FROM {table} WHERE {column} = $1 ORDER BY created_at", call)
        ]

    def everything(self) -> str:
        """All rows of all tables, as text."""
        tables = ("cards", self.inbox, self.edges, self.agents)
        return "\n".join(str(row) for table in tables for row in self.do(f"SELECT * FROM {table}"))

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)


class SQLite:
    """The embedded store's file, which the broker makes."""

    kind = "sqlite"
    inbox, edges, tools, agents = "reports", "edges", "tools", "project_agents"

    def __init__(self, file: Path) -> None:
        self.dsn = str(file)

    def insert(self, table: str, row: Row) -> None:
        values = [json.dumps(one) if isinstance(one, dict | list) else one for one in row.values()]
        with sqlite3.connect(self.dsn, timeout=20) as one:
            one.execute(
                f"INSERT OR IGNORE INTO {table} ({', '.join(row)}) VALUES ({', '.join('?' * len(row))})", values
            )

    def add_agent(self, project: str, agent: str, worker: str) -> None:
        self.insert(self.agents, {"project_id": project, "agent_id": agent, "worker_target": worker})

    def rows(self, table: str, call: str) -> list[Row]:
        column = "tool_call_id" if table == "cards" else "correlation_id"
        with sqlite3.connect(self.dsn, timeout=20) as one:
            one.row_factory = sqlite3.Row
            found = one.execute(f"SELECT * FROM {table} WHERE {column} = ? ORDER BY rowid", (call,)).fetchall()
        return [_decoded(dict(row)) for row in found]

    def everything(self) -> str:
        return "".join(
            one.read_bytes().decode(errors="replace") for one in Path(self.dsn).parent.glob(Path(self.dsn).name + "*")
        )


def _decoded(row: Row) -> Row:
    """What is too deep for us stays text."""
    objects: Row = {}
    for name in ("content", "metadata", "payload"):
        with contextlib.suppress(RecursionError):
            if row.get(name):
                objects[name] = json.loads(row[name])
    return {**row, **objects}


Tables = Postgres | SQLite


class Project:
    """A project whose agent calls tools: `agent_a`, in `turn_1`, woken as `worker_generic`."""

    def __init__(self, tables: Tables, client: Client, name: str = "proj_v") -> None:
        self.tables = tables
        self.client = client
        self.name = name
        tables.add_agent(name, "agent_a", "worker_generic")

    def subject(self, target: str) -> str:
        return f"cg.v1r3.{self.name}.public.cmd.tool.{target}.call"

    def put_call(self, call: str, arguments: Any, tool: str = "oracle", **metadata: Any) -> str:
        """The call's card."""
        about = {
            "type": "tool.call",
            "step_id": "step_1",
            "trace_id": TRACE,
            "author_id": "agent_a",
            "project_id": self.name,
            "tool_call_id": call,
            "agent_turn_id": "turn_1",
            "parent_step_id": "step_0",
        }
        content = {"status": "called", "__type__": "ToolCallContent", "arguments": arguments, "tool_name": tool}
        card = f"card_{call}"
        self.put_card(card, content, {**about, **metadata}, call)
        return card

    def put_card(self, card: str, content: Any, metadata: Row, call: str) -> None:
        said = {"content": json.dumps(content), "metadata": json.dumps(metadata)}
        row = {"card_id": card, "tenant_id": self.name, "tool_call_id": call, **said}
        self.tables.insert("cards", row)

    def put_edge(self, call: str, depth: int = 1) -> None:
        """Of the call's request."""
        row = {
            "edge_id": f"edge_{self.name}_{call}",
            "project_id": self.name,
            "channel_id": "public",
            "primitive": "tool_call",
            "edge_phase": "request",
            "source_agent_id": "agent_a",
            "target_agent_id": "agent_a",
            "correlation_id": call,
            "recursion_depth": depth,
            "trace_id": TRACE,
            "parent_step_id": "step_0",
            "metadata": {},
        }
        self.tables.insert(self.tables.edges, row)

    def command(self, call: str, target: str = "oracle", **members: Any) -> Row:
        said = {
            "project_id": self.name,
            "channel": "public",
            "agent_id": "agent_a",
            "agent_turn_id": "turn_1",
            "turn_epoch": 7,
            "step_id": "step_1",
            "tool_call_id": call,
            "tool_name": target,
            "after_execution": "suspend",
            "context_box_id": None,
            "tool_call_card_id": f"card_{call}",
        }
        return {name: value for name, value in {**said, **members}.items() if value is not ...}

    def say(self, command: Row | bytes, target: str = "oracle", headers: dict[str, str] | None = None) -> None:
        payload = command if isinstance(command, bytes) else json.dumps(command).encode()
        js = self.client.nats.jetstream()
        self.client.run(js.publish(self.subject(target), payload, headers=HEADERS if headers is None else headers))

    def ask(self, call: str, arguments: Any, target: str = "oracle", **members: Any) -> None:
        """A whole call, as an agent's worker makes it."""
        self.put_call(call, arguments, target)
        self.put_edge(call)
        self.say(self.command(call, target, **members), target)

    # --- what came of it ----------------------------------------------------------------------------------------------

    def results(self, call: str) -> list[Row]:
        return [row for row in self.tables.rows("cards", call) if row["metadata"]["type"] == "tool.result"]

    def reports(self, call: str) -> list[Row]:
        return self.tables.rows(self.tables.inbox, call)

    def edges(self, call: str) -> list[Row]:
        return self.tables.rows(self.tables.edges, call)

    def entry(self, call: str, target: str = "oracle") -> Any:
        """What the bucket of idempotency says; None: nothing."""
        import hashlib

        from nats.js.errors import KeyNotFoundError

        key = f"tool.{self.name}.{target}.{hashlib.sha256(call.encode()).hexdigest()}"

        async def get() -> Any:
            bucket = await self.client.nats.jetstream().key_value(BUCKET)
            try:
                return json.loads((await bucket.get(key)).value)
            except KeyNotFoundError:
                return None

        return self.client.run(get())
