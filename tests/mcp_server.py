"""A small MCP server for tests: ``python mcp_server.py`` on stdio, ``python mcp_server.py PORT``
over HTTP.
"""

import asyncio
import os
import sys

from mcp.server.mcpserver import Image, MCPServer

server = MCPServer("tests")
calls = 0


@server.tool()
def add(a: int, b: int) -> str:
    """Adds two numbers."""
    return str(a + b)


@server.tool()
def count() -> str:
    """How often this process was asked."""
    global calls
    calls += 1
    return str(calls)


@server.tool()
def fail() -> str:
    """Always fails."""
    raise ValueError("broken inside")


@server.tool()
async def hang() -> str:
    """Never answers."""
    await asyncio.Event().wait()
    return "never"


@server.tool()
def die() -> str:
    """Ends the process at once."""
    os._exit(3)


@server.tool()
def picture() -> Image:
    """A red image of one pixel."""
    import io

    from PIL import Image as Pixels

    buffer = io.BytesIO()
    Pixels.new("RGB", (1, 1), "red").save(buffer, format="PNG")
    return Image(data=buffer.getvalue(), format="png")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        server.run("streamable-http", host="127.0.0.1", port=int(sys.argv[1]))
    else:
        server.run("stdio")
