"""What an executor needs of a store: cards, definitions and who works for whom, and the report."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

from broker.utp.model import Card, Report, ToolDefinition


class StoreAway(Exception):
    """The store does not answer, or not as it should; what was asked may be asked again."""


class StoreRefused(Exception):
    """The store does not take what it was given, and never will."""


class ReportRefused(Exception):
    """The report does not fit what has been written of its call; asking again changes nothing."""


class Cards(Protocol):
    async def card(self, project_id: str, card_id: str) -> Card | None: ...

    async def result_of(self, project_id: str, tool_call_id: str) -> Card | None:
        """The result card that this call has already."""

    async def save_result(self, card: Card) -> Card:
        """Writes it; or, where the call has one by now, that one."""


class Resources(Protocol):
    async def project_exists(self, project_id: str) -> bool: ...

    async def tool(self, project_id: str, tool_name: str) -> ToolDefinition | None: ...

    async def put_tool(self, definition: ToolDefinition) -> None:
        """Writes it, or over the one of that name."""

    async def tools(self, project_id: str) -> list[ToolDefinition]:
        """All of a project's, by name."""

    async def make_project(self, project_id: str) -> None:
        """Where projects are ours to make; else StoreRefused."""

    async def worker_target(self, project_id: str, agent_id: str) -> str | None:
        """Who works for the agent now; None: it is not in the roster."""


class Reports(Protocol):
    async def report(self, report: Report) -> int:
        """Inbox row and edges in one transaction; the same report again changes nothing. The recursion depth."""


class Store(Protocol):
    """Where all of them lie."""

    @property
    def place(self) -> str:
        """For people: no password in it."""

    async def open(self) -> None:
        """Everything that is needed is there, else a ConfigError says what is missing; StoreAway: not yet."""

    async def close(self) -> None: ...


class Stores(NamedTuple):
    cards: Cards
    resources: Resources
    reports: Reports
    store: Store

    def status(self) -> dict[str, Any]:
        return {"kind": type(self.store).__name__.lower(), "place": self.store.place}
