"""The embedded store: one file of ours, with tables of CommonGround's shape. Its reports are rows in a table for
whoever reads it. No agent's worker does, so that they are no reports in the sense of L0."""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from broker.errors import ConfigError
from broker.utp.model import RESULT_CARD, Card, Report, ToolDefinition
from broker.utp.stores import rows
from broker.utp.stores.base import StoreAway, StoreRefused

T = TypeVar("T")

BUSY_SECONDS = 5.0  # another broker writes
_encode = msgspec.json.Encoder().encode
_TABLES = f"""
CREATE TABLE IF NOT EXISTS cards (
    card_id TEXT PRIMARY KEY, tenant_id TEXT NOT NULL, content TEXT, tool_calls TEXT, tool_call_id TEXT,
    ttl_seconds INTEGER, expires_at TEXT, deleted_at TEXT, metadata TEXT NOT NULL DEFAULT '{{}}', created_at REAL
);
CREATE UNIQUE INDEX IF NOT EXISTS one_result ON cards (tenant_id, tool_call_id)
    WHERE json_extract(metadata, '$.type') = '{RESULT_CARD}';
CREATE TABLE IF NOT EXISTS reports (
    {", ".join(rows.INBOX)}, enqueue_mode, source_step_id, created_at REAL,
    PRIMARY KEY (inbox_id), UNIQUE (project_id, message_type, correlation_id)
);
CREATE TABLE IF NOT EXISTS edges (
    {", ".join(rows.EDGE)}, enqueue_mode, created_at REAL,
    PRIMARY KEY (edge_id), UNIQUE (project_id, correlation_id, primitive, edge_phase)
);
CREATE TABLE IF NOT EXISTS tools (
    project_id TEXT NOT NULL, tool_name TEXT NOT NULL, description TEXT, parameters TEXT NOT NULL DEFAULT '{{}}',
    target_subject TEXT, after_execution TEXT, options TEXT NOT NULL DEFAULT '{{}}', PRIMARY KEY (project_id, tool_name)
);
CREATE TABLE IF NOT EXISTS project_agents (
    project_id TEXT NOT NULL, agent_id TEXT NOT NULL, worker_target TEXT NOT NULL, PRIMARY KEY (project_id, agent_id)
);
CREATE TABLE IF NOT EXISTS projects (project_id TEXT PRIMARY KEY, title TEXT);
"""
_CARD = "SELECT card_id, tenant_id, content, metadata, tool_call_id FROM cards WHERE tenant_id = ?"
_TOOL = ("project_id", "tool_name", "description", "parameters", "target_subject", "after_execution", "options")


class SQLite:
    """All of it in one thread: statements are short, and only one can write anyway."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._thread = ThreadPoolExecutor(1, "utp-sqlite")
        self._open: sqlite3.Connection | None = None

    @property
    def place(self) -> str:
        return str(self._file)

    async def open(self) -> None:
        try:
            await asyncio.get_running_loop().run_in_executor(self._thread, self._connect)
        except (OSError, sqlite3.Error) as error:
            raise ConfigError(f"{self._file} cannot be used: {error} (utp.dsn)") from None

    def _connect(self) -> None:
        if self._open is None:
            self._file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._file.touch(mode=0o600, exist_ok=True)
            one = sqlite3.connect(self._file, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False)
            one.execute("PRAGMA journal_mode = WAL")
            one.execute("PRAGMA synchronous = FULL")  # what has been acknowledged survives a power cut
            one.executescript(_TABLES)
            one.row_factory = sqlite3.Row
            self._open = one

    async def close(self) -> None:
        def close() -> None:
            if self._open is not None:
                self._open.close()

        await asyncio.get_running_loop().run_in_executor(self._thread, close)
        self._thread.shutdown(wait=False)

    # --- cards --------------------------------------------------------------------------------------------------------

    async def card(self, project_id: str, card_id: str) -> Card | None:
        query = f"{_CARD} AND card_id = ? AND deleted_at IS NULL"
        return await self._do(lambda one: rows.card(one.execute(query, (project_id, card_id)).fetchone()))

    async def result_of(self, project_id: str, tool_call_id: str) -> Card | None:
        return await self._do(lambda one: _result_of(one, project_id, tool_call_id))

    async def save_result(self, card: Card) -> Card:
        row = {
            "card_id": card.card_id,
            "tenant_id": card.project_id,
            "content": _encode(card.content).decode(),
            "tool_call_id": card.tool_call_id,
            "metadata": _encode(card.metadata).decode(),
        }

        def save(one: sqlite3.Connection) -> Card | None:
            if _insert(one, "cards", row):
                return card
            return _result_of(one, card.project_id, card.tool_call_id or "")

        saved = await self._do(save, write=True)
        if saved is None:
            raise StoreRefused(f"there is a card {card.card_id} already")
        return saved

    # --- resources ----------------------------------------------------------------------------------------------------

    async def project_exists(self, project_id: str) -> bool:
        query = "SELECT 1 FROM projects WHERE project_id = ?"
        return await self._do(lambda one: one.execute(query, (project_id,)).fetchone() is not None)

    async def tool(self, project_id: str, tool_name: str) -> ToolDefinition | None:
        query = f"SELECT {', '.join(_TOOL)} FROM tools WHERE project_id = ? AND tool_name = ?"
        row = await self._do(lambda one: one.execute(query, (project_id, tool_name)).fetchone())
        return rows.definition(row) if row is not None else None

    async def tools(self, project_id: str) -> list[ToolDefinition]:
        query = f"SELECT {', '.join(_TOOL)} FROM tools WHERE project_id = ? ORDER BY tool_name"
        return [
            rows.definition(row) for row in await self._do(lambda one: one.execute(query, (project_id,)).fetchall())
        ]

    async def make_project(self, project_id: str) -> None:
        query = "INSERT OR IGNORE INTO projects (project_id, title) VALUES (?, ?)"
        await self._do(lambda one: one.execute(query, (project_id, project_id)) and None, write=True)

    async def put_tool(self, definition: ToolDefinition) -> None:
        values = msgspec.to_builtins(definition)
        values |= {name: _encode(values[name]).decode() for name in ("parameters", "options")}
        query = f"INSERT OR REPLACE INTO tools ({', '.join(_TOOL)}) VALUES ({', '.join(':' + name for name in _TOOL)})"
        await self._do(lambda one: one.execute(query, values) and None, write=True)

    async def worker_target(self, project_id: str, agent_id: str) -> str | None:
        query = "SELECT worker_target FROM project_agents WHERE project_id = ? AND agent_id = ?"
        row = await self._do(lambda one: one.execute(query, (project_id, agent_id)).fetchone())
        return (str(row[0]) if row is not None else "").strip() or None

    # --- the report ---------------------------------------------------------------------------------------------------

    async def report(self, report: Report) -> int:
        def write(one: sqlite3.Connection) -> int:
            found = one.execute(
                "SELECT recursion_depth FROM edges WHERE project_id = ? AND correlation_id = ?"
                " AND edge_phase = 'request' AND recursion_depth IS NOT NULL ORDER BY created_at LIMIT 1",
                (report.project_id, report.callback.tool_call_id),
            ).fetchone()
            depth = rows.depth_of(report, found[0] if found else None)
            if found is None:
                _insert(one, "edges", rows.request_edge(report, depth))
            row = rows.inbox_row(report, depth)
            if _insert(one, "reports", row):
                _insert(one, "edges", rows.response_edge(report, depth, row["inbox_id"]))
            return depth

        return await self._do(write, write=True)

    # --- one word with SQLite -----------------------------------------------------------------------------------------

    async def _do(self, ask: Callable[[sqlite3.Connection], T], write: bool = False) -> T:
        """A transaction, where something is written."""

        def work() -> T:
            if self._open is None:
                raise StoreAway(f"{self._file} is not open")
            if not write:
                return ask(self._open)
            self._open.execute("BEGIN IMMEDIATE")
            try:
                answer = ask(self._open)
                self._open.execute("COMMIT")
                return answer
            except BaseException:
                if self._open.in_transaction:
                    self._open.execute("ROLLBACK")
                raise

        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, work)
        except (sqlite3.DataError, sqlite3.IntegrityError) as error:
            raise StoreRefused(f"{self._file}: {error}") from None
        except sqlite3.Error as error:
            raise StoreAway(f"{self._file}: {error}") from None


def _insert(one: sqlite3.Connection, table: str, row: dict[str, Any]) -> bool:
    """False where there is one already."""
    names = [*row, "created_at"]
    query = f"INSERT OR IGNORE INTO {table} ({', '.join(names)}) VALUES ({', '.join(':' + name for name in names)})"
    return one.execute(query, {**row, "created_at": time.time()}).rowcount > 0


def _result_of(one: sqlite3.Connection, project_id: str, tool_call_id: str) -> Card | None:
    query = f"{_CARD} AND tool_call_id = ? AND json_extract(metadata, '$.type') = '{RESULT_CARD}'"
    return rows.card(one.execute(query, (project_id, tool_call_id)).fetchone())
