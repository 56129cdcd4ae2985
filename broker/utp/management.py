"""Definitions of tools in the store: what HTTP and the operator's words do with them."""

from __future__ import annotations

import asyncio

from broker import errors
from broker.errors import ConfigError, Refusal
from broker.utp import definitions
from broker.utp.definitions import BadDefinition
from broker.utp.model import ToolDefinition
from broker.utp.stores.base import Resources, StoreAway, StoreRefused, Stores


class Management:
    def __init__(self, stores: Stores, shared: bool) -> None:
        """`shared`: with an executor, that opens and closes the store."""
        self._stores = stores
        self._shared = shared
        self._opening = asyncio.Lock()

    async def open(self) -> None:
        """A store that is away is looked for when it is needed."""
        try:
            await self._resources()
        except StoreAway:
            return

    async def _resources(self) -> Resources:
        if not self._shared:
            async with self._opening:
                await self._stores.store.open()
        return self._stores.resources

    async def add(self, project_id: str, file: bytes, make_project: bool = False) -> ToolDefinition | Refusal:
        """Writes what the file says, or over the one of that name; or says what is wrong with it."""
        try:
            definition = await asyncio.to_thread(definitions.read, project_id, file)
            resources = await self._resources()
            known = definitions.is_text(project_id) and await resources.project_exists(project_id)
            if not known and not make_project:
                return _no_project(project_id)
            definitions.check_external(definition)
            if not known:
                await resources.make_project(project_id)
            await resources.put_tool(definition)
        except (BadDefinition, StoreRefused) as error:
            return Refusal(errors.BAD_REQUEST, str(error))
        except (StoreAway, ConfigError) as error:
            return Refusal(errors.UNAVAILABLE, f"{error}; ask again")
        return definition

    async def tools(self, project_id: str) -> list[ToolDefinition] | Refusal:
        try:
            resources = await self._resources()
            if not definitions.is_text(project_id) or not await resources.project_exists(project_id):
                return _no_project(project_id)
            return await resources.tools(project_id)
        except (StoreAway, ConfigError) as error:
            return Refusal(errors.UNAVAILABLE, f"{error}; ask again")

    async def close(self) -> None:
        if not self._shared:
            await self._stores.store.close()


def _no_project(project_id: str) -> Refusal:
    return Refusal(errors.NOT_FOUND, f"project not found: {project_id}")
