"""The Model Context Protocol's Python SDK, client and server, over stdio.

python -m benchmarks.peers.mcp_stdio      the server
"""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec

from benchmarks.peers.peer import Call, Peer


@asynccontextmanager
async def opened() -> AsyncIterator[Call]:
    from mcp.client.session import ClientSession
    from mcp.client.stdio import StdioServerParameters, stdio_client

    server = StdioServerParameters(command=sys.executable, args=["-m", __spec__.name])
    async with stdio_client(server) as streams, ClientSession(*streams) as session:
        await session.initialize()
        await session.list_tools()  # so that no call has to

        async def call(inputs: dict[str, Any]) -> str:
            result: Any = await session.call_tool("echo", inputs)
            text: str = result.content[0].text
            return text

        yield call


async def serve() -> None:
    import mcp_types as types
    from mcp.server.lowlevel import Server
    from mcp.server.stdio import stdio_server

    async def list_tools(_: Any, __: Any) -> Any:
        return types.ListToolsResult(tools=[types.Tool(name="echo", input_schema={"type": "object"})])

    async def call_tool(_: Any, asked: Any) -> Any:
        text = msgspec.json.encode(asked.arguments).decode()
        return types.CallToolResult(content=[types.TextContent(type="text", text=text)])

    server: Any = Server("echo", on_list_tools=list_tools, on_call_tool=call_tool)
    async with stdio_server() as (reading, writing):
        await server.run(reading, writing, server.create_initialization_options())


PEER = Peer(
    name="MCP Python SDK, stdio",
    how="the SDK's low-level server (no schema of the output to validate) and `ClientSession`, both on uvloop, one "
    "session",
    needs=("mcp",),
    coroutines=opened,
)

if __name__ == "__main__":
    import uvloop

    uvloop.run(serve())
