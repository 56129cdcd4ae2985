"""CommonGround's own tables, as they are. Nothing is ever created or altered here."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, TypeVar

import asyncpg
import msgspec

from broker.bus import without_secrets
from broker.errors import ConfigError
from broker.utp.model import RESULT_CARD, Card, Report, ToolDefinition
from broker.utp.stores import rows
from broker.utp.stores.base import ReportRefused, StoreAway, StoreRefused

if TYPE_CHECKING:
    from asyncpg.pool import PoolConnectionProxy

T = TypeVar("T")
logging.getLogger("asyncpg").addHandler(logging.NullHandler())  # it writes where we do not, what we say, too
logging.getLogger("asyncpg").propagate = False

TABLES = (
    "cards",
    "state.agent_inbox",
    "state.execution_edges",
    "resource.tools",
    "resource.project_agents",
    "public.projects",
)
CONNECTIONS = 8
CONNECT_SECONDS = 5.0
ANSWER_SECONDS = 10.0
_encode = msgspec.json.Encoder().encode
_CARD = "SELECT card_id, tenant_id, content::text, metadata::text, tool_call_id FROM cards WHERE tenant_id = $1"

_TOOL = (
    "SELECT project_id, tool_name, description, parameters::text, target_subject, after_execution, options::text"
    " FROM resource.tools WHERE project_id = $1"
)


class Postgres:
    """Empty `dsn`: as the variables PG* have it."""

    def __init__(self, dsn: str) -> None:
        self._dsn = dsn
        self._pool: asyncpg.Pool[Any] | None = None

    @property
    def place(self) -> str:
        return without_secrets(self._dsn) or "postgres, as PG* say"

    async def open(self) -> None:
        if self._pool is None:
            self._pool = await asyncpg.create_pool(
                self._dsn or None,
                min_size=0,  # none is kept that nobody needs: one that is lost is not missed, either
                max_size=CONNECTIONS,
                timeout=CONNECT_SECONDS,
                command_timeout=ANSWER_SECONDS,
                server_settings={"application_name": "toolhost-broker"},
            )
        query = "SELECT name FROM unnest($1::text[]) name WHERE to_regclass(name) IS NULL"
        try:
            found = await self._do(lambda one: one.fetch(query, TABLES))
        except StoreRefused as error:
            raise ConfigError(f"utp.dsn cannot be used: {error}") from None
        missing = ", ".join(row["name"] for row in found)
        if missing:
            raise ConfigError(
                f"{self.place} has no {missing}: these are CommonGround's tables, which its own set-up makes (utp.dsn)"
            )

    async def close(self) -> None:
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.terminate()

    # --- cards --------------------------------------------------------------------------------------------------------

    async def card(self, project_id: str, card_id: str) -> Card | None:
        row = await self._do(
            lambda one: one.fetchrow(f"{_CARD} AND card_id = $2 AND deleted_at IS NULL", project_id, card_id)
        )
        return rows.card(row)

    async def result_of(self, project_id: str, tool_call_id: str) -> Card | None:
        return await self._do(lambda one: _result_of(one, project_id, tool_call_id))

    async def save_result(self, card: Card) -> Card:
        content, metadata = _encode(card.content).decode(), _encode(card.metadata).decode()

        async def save(one: PoolConnectionProxy[Any]) -> Card | None:
            written = await one.fetchval(
                "INSERT INTO cards (card_id, tenant_id, content, tool_call_id, metadata)"
                " VALUES ($1, $2, $3::jsonb, $4, $5::jsonb) ON CONFLICT DO NOTHING RETURNING card_id",
                card.card_id,
                card.project_id,
                content,
                card.tool_call_id,
                metadata,
            )
            return card if written else await _result_of(one, card.project_id, card.tool_call_id or "")

        saved = await self._do(save)
        if saved is None:
            raise StoreAway("a result card stood in the way of another, and is gone")
        return saved

    # --- resources ----------------------------------------------------------------------------------------------------

    async def project_exists(self, project_id: str) -> bool:
        query = "SELECT EXISTS (SELECT FROM public.projects WHERE project_id = $1)"
        return bool(await self._do(lambda one: one.fetchval(query, project_id)))

    async def tool(self, project_id: str, tool_name: str) -> ToolDefinition | None:
        row = await self._do(lambda one: one.fetchrow(f"{_TOOL} AND tool_name = $2", project_id, tool_name))
        return rows.definition(row) if row is not None else None

    async def tools(self, project_id: str) -> list[ToolDefinition]:
        found = await self._do(lambda one: one.fetch(f"{_TOOL} ORDER BY tool_name", project_id))
        return [rows.definition(row) for row in found]

    async def make_project(self, project_id: str) -> None:
        raise StoreRefused(f"{project_id}: projects are made by CommonGround's own management (POST /projects)")

    async def put_tool(self, definition: ToolDefinition) -> None:
        query = (
            "INSERT INTO resource.tools (project_id, tool_name, description, parameters, target_subject,"
            " after_execution, options) VALUES ($1, $2, $3, $4::jsonb, $5, $6, $7::jsonb)"
            " ON CONFLICT (project_id, tool_name) DO UPDATE SET description = excluded.description,"
            " parameters = excluded.parameters, target_subject = excluded.target_subject,"
            " after_execution = excluded.after_execution, options = excluded.options"
        )
        values = (
            definition.project_id,
            definition.tool_name,
            definition.description,
            _encode(definition.parameters).decode(),
            definition.target_subject,
            definition.after_execution,
            _encode(definition.options).decode(),
        )
        await self._do(lambda one: one.execute(query, *values))

    async def worker_target(self, project_id: str, agent_id: str) -> str | None:
        query = "SELECT worker_target FROM resource.project_agents WHERE project_id = $1 AND agent_id = $2"
        target = await self._do(lambda one: one.fetchval(query, project_id, agent_id))
        return (target or "").strip() or None

    # --- the report: the only place that writes to state.* ------------------------------------------------------------

    async def report(self, report: Report) -> int:
        async def write(one: PoolConnectionProxy[Any]) -> int:
            async with one.transaction():
                requested = await one.fetchval(
                    "SELECT recursion_depth FROM state.execution_edges WHERE project_id = $1 AND correlation_id = $2"
                    " AND edge_phase = 'request' AND recursion_depth IS NOT NULL ORDER BY created_at LIMIT 1",
                    report.project_id,
                    report.callback.tool_call_id,
                )
                depth = rows.depth_of(report, requested)
                if requested is None:
                    await _insert(one, "state.execution_edges", rows.request_edge(report, depth))
                row = rows.inbox_row(report, depth)
                if await _insert(one, "state.agent_inbox", row):
                    edge = rows.response_edge(report, depth, row["inbox_id"])
                    await _insert(one, "state.execution_edges", edge)
                return depth

        return await self._do(write)

    # --- one word with Postgres ---------------------------------------------------------------------------------------

    async def _do(self, ask: Callable[[PoolConnectionProxy[Any]], Awaitable[T]]) -> T:
        if self._pool is None:
            raise StoreAway("Postgres is not connected")
        try:
            async with self._pool.acquire(timeout=CONNECT_SECONDS) as one:
                return await ask(one)
        except ReportRefused:
            raise
        except (asyncpg.PostgresError, asyncpg.InterfaceError, OSError, TimeoutError) as error:
            raise _trouble(error) from None


def _trouble(error: Exception) -> StoreAway | StoreRefused:
    """Data that a table does not take is the call's fault; all else may be better soon, or when somebody mends it."""
    said = str(error.args[0]) if error.args else ""  # its detail would quote the row
    words = f"Postgres: {said or type(error).__name__}"
    data = isinstance(error, asyncpg.DataError | asyncpg.IntegrityConstraintViolationError)
    own = isinstance(error, asyncpg.InterfaceError) and isinstance(error, ValueError)  # asyncpg's DataError: a client's
    return StoreRefused(words) if data or own else StoreAway(words)


async def _result_of(one: PoolConnectionProxy[Any], project_id: str, tool_call_id: str) -> Card | None:
    where = "AND md5(tool_call_id) = md5($2) AND tool_call_id = $2 AND metadata->>'type' = $3"
    return rows.card(await one.fetchrow(f"{_CARD} {where} LIMIT 1", project_id, tool_call_id, RESULT_CARD))


async def _insert(one: PoolConnectionProxy[Any], table: str, row: dict[str, Any]) -> bool:
    """False where there is one already. The clock's time, not the transaction's: rows of one have an order."""
    numbered = ", ".join(f"${number}" for number in range(1, len(row) + 1))
    query = (
        f"INSERT INTO {table} ({', '.join(row)}, created_at) VALUES ({numbered}, clock_timestamp())"
        " ON CONFLICT DO NOTHING RETURNING 1"
    )
    return bool(await one.fetchval(query, *row.values()))
