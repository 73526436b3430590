"""Tools of a real MCP server, over stdio and over streamable HTTP."""

import asyncio
import base64
import io
import json
import sys
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from PIL import Image

from jax_agent_rl.config import ToolsConfig
from jax_agent_rl.errors import ConfigError, ToolDefinitionError, ToolError
from jax_agent_rl.tools import ToolSession
from jax_agent_rl.tools.mcp import MCPConnection, MCPServerConfig, as_tool_response
from jax_agent_rl.tools.registry import open_tools
from jax_agent_rl.utils.rate_limit import RateLimit
from tests.fakes import FakeCodec
from tests.messages import raises
from tests.ports import free_port

pytest.importorskip("mcp")
codec = FakeCodec()
SERVER = Path(__file__).parents[2] / "mcp_server.py"
STDIO = MCPServerConfig(command=sys.executable, args=(str(SERVER),))
NAMES = {"add", "count", "fail", "hang", "die", "picture"}


async def start(port):
    """The server on a port, once it accepts connections."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(SERVER), str(port), stderr=asyncio.subprocess.PIPE
    )
    async with asyncio.timeout(60):
        async for line in process.stderr:
            if b"running on" in line:
                return process
    raise AssertionError("the server ended before it was up")


async def stop(process):
    if process.returncode is None:
        process.kill()
    await process.communicate()


@asynccontextmanager
async def connection(kind, *, timeout=30.0):
    if kind == "stdio":
        async with MCPConnection("tests", STDIO, timeout=timeout, connect_timeout=30.0) as opened:
            yield opened
        return
    port = free_port()
    process = await start(port)
    try:
        url = f"http://127.0.0.1:{port}/mcp"
        async with MCPConnection("tests", MCPServerConfig(url=url), timeout=timeout) as opened:
            yield opened
    finally:
        await stop(process)


async def session_of(opened, *, timeout=30.0, modalities=()):
    return ToolSession(
        {tool.name: tool for tool in await opened.tools()},
        "t-1",
        kwargs={},
        timeout=timeout,
        shorten=lambda text: codec.truncate(text, 50, "middle"),
        modalities=modalities,
    )


@pytest.mark.parametrize("kind", ["stdio", "http"])
async def test_a_servers_tools_are_called(kind):
    async with connection(kind) as opened:
        tools = {tool.name: tool for tool in await opened.tools()}
        assert set(tools) == NAMES
        assert tools["add"].schema["function"]["description"] == "Adds two numbers."
        async with await session_of(opened) as session:
            records = await asyncio.gather(
                *(session.call("add", {"a": n, "b": 1}) for n in range(8))
            )
            wrong = await session.call("add", {"a": "x", "b": 1})
            failed = await session.call("fail", {})
    assert [record.observation for record in records] == [str(n + 1) for n in range(8)]
    assert wrong.error == "bad_arguments"
    assert "argument a" in wrong.observation
    assert failed.error == "raised"
    assert failed.observation.startswith("Error: ")


@pytest.mark.parametrize("kind", ["stdio", "http"])
async def test_a_call_that_hangs_is_left_and_others_go_on(kind):
    async with connection(kind) as opened, await session_of(opened, timeout=1.0) as session:
        hung, fine = await asyncio.gather(
            session.call("hang", {}), session.call("add", {"a": 1, "b": 2})
        )
        next_result = await session.call("add", {"a": 2, "b": 2})
    assert hung.error == "timeout"
    assert "did not answer within 1 seconds" in hung.observation
    assert (fine.observation, next_result.observation) == ("3", "4")


async def test_calls_that_wait_for_their_turn_say_so_when_they_are_late():
    async with connection("stdio") as opened, await session_of(opened, timeout=1.0) as session:
        opened.rate = RateLimit(0.01)
        records = await asyncio.gather(*(session.call("add", {"a": n, "b": 1}) for n in range(2)))
    assert sorted(record.error or "" for record in records) == ["", "timeout"]
    (late,) = [record for record in records if record.error]
    assert "config.rate_limit=0.01" in late.observation


async def test_the_servers_own_timeout_is_an_observation_too():
    async with connection("stdio", timeout=0.5) as opened, await session_of(opened) as session:
        record = await session.call("hang", {})
    assert record.error == "timeout"
    assert "the server tests did not answer within 0.5 seconds" in record.observation


async def test_a_server_that_dies_is_an_observation_and_is_restarted():
    async with connection("stdio") as opened, await session_of(opened) as session:
        counts = [(await session.call("count", {})).observation for _ in range(2)]
        dead = await session.call("die", {})
        restarted = await session.call("count", {})
    assert counts == ["1", "2"]
    assert dead.error == "raised"
    assert "the server tests" in dead.observation
    assert (restarted.error, restarted.observation) == (None, "1"), "a new process"


async def test_an_http_server_that_is_gone_is_an_observation_until_it_is_back():
    port = free_port()
    process = await start(port)
    again = None
    url = f"http://127.0.0.1:{port}/mcp"
    try:
        async with MCPConnection("tests", MCPServerConfig(url=url), timeout=20.0) as opened:
            async with await session_of(opened) as session:
                assert (await session.call("add", {"a": 1, "b": 1})).observation == "2"
                await stop(process)
                gone = [await session.call("add", {"a": 1, "b": 1}) for _ in range(2)]
                again = await start(port)
                late = [await session.call("add", {"a": 2, "b": 1}) for _ in range(2)]
    finally:
        await stop(process)
        if again:
            await stop(again)
    assert all(
        record.error == "raised" and "the MCP server tests" in record.observation
        for record in gone[1:]
    )
    assert gone[0].error == "raised" and "tests" in gone[0].observation
    assert late[-1].observation == "3"


async def test_images_arrive_as_pil_images():
    async with (
        connection("stdio") as opened,
        await session_of(opened, modalities={"image"}) as session,
    ):
        record = await session.call("picture", {})
    (image,) = record.media["image"]
    assert (image.size, image.getpixel((0, 0)), record.error) == ((1, 1), (255, 0, 0), None)


@pytest.mark.parametrize(("kind", "size"), [("EPS", (4, 3)), ("PNG", (9000, 2000))])
def test_an_image_that_runs_a_program_or_fills_the_memory_is_not_read(
    kind: str, size: tuple[int, int]
):
    from mcp.types import CallToolResult, ImageContent

    stream = io.BytesIO()
    Image.new("L", size).save(stream, format=kind)
    data = base64.b64encode(stream.getvalue()).decode()
    with pytest.raises(ToolError, match="an image that"):
        as_tool_response(
            CallToolResult(content=[ImageContent(type="image", data=data, mime_type="image/png")])
        )


async def test_an_image_that_is_none_is_an_error():
    from mcp.types import CallToolResult, ImageContent

    data = base64.b64encode(b"no image").decode()
    with pytest.raises(ToolError, match="cannot be read"):
        as_tool_response(
            CallToolResult(content=[ImageContent(type="image", data=data, mime_type="image/png")])
        )


@pytest.mark.parametrize(
    "server",
    [
        MCPServerConfig(command="/no/such/program"),
        MCPServerConfig(url=f"http://127.0.0.1:{free_port()}/mcp"),
    ],
    ids=["stdio", "http"],
)
async def test_a_server_that_cannot_be_reached_is_named_at_start(server):
    with raises(ConfigError, key="the MCP server tests", value="cannot be reached"):
        async with MCPConnection("tests", server, timeout=20.0):
            raise AssertionError("never reached")


async def test_a_server_that_never_answers_does_not_hang_the_start():
    silent = MCPServerConfig(command=sys.executable, args=("-c", "import sys; sys.stdin.read()"))
    with raises(ConfigError, value="0.5 seconds"):
        async with MCPConnection("tests", silent, timeout=0.5):
            raise AssertionError("never reached")


def write_config(folder, **mcp):
    servers = {"mcpServers": {"tests": {"command": sys.executable, "args": [str(SERVER)]}}}
    (folder / "servers.json").write_text(json.dumps(servers))
    entry = {"config": {"type": "mcp"}, "mcp": {"mcp_servers_config_path": "servers.json", **mcp}}
    (folder / "tools.yaml").write_text(json.dumps({"tools": [entry]}))
    return ToolsConfig(tool_config_path=str(folder / "tools.yaml"))


async def test_tools_of_a_server_are_selected_in_the_config(tmp_path):
    async with open_tools(write_config(tmp_path, tool_selected_list=["count", "add"])) as registry:
        assert sorted(registry) == ["add", "count"]
    with raises(ConfigError, value="['sub']"):
        async with open_tools(write_config(tmp_path, tool_selected_list=["sub"])):
            raise AssertionError("never reached")


async def test_an_entry_of_verls_is_taken_as_it_is_written_there(tmp_path):
    config = write_config(tmp_path)
    tree = json.loads((tmp_path / "tools.yaml").read_text())
    tree["tools"][0] |= {"class_name": "verl.tools.mcp_search_tool.MCPSearchTool"}
    tree["tools"][0]["config"] |= {"rate_limit": 120, "timeout": 120}
    (tmp_path / "tools.yaml").write_text(json.dumps(tree))
    async with open_tools(config) as registry:
        assert set(registry) == NAMES
        connections = {id(tool.connection): tool.connection for tool in registry.select().values()}
    (opened,) = connections.values()
    assert opened.rate.per_second == 120


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"config": {"type": "mcp", "rate_limit": 0}}, {"key": "config.rate_limit", "value": 0}),
        (
            {"config": {"type": "mcp", "timeout": "long"}},
            {"key": "config.timeout", "value": "'long'"},
        ),
        ({"config": {"type": "mcp", "retries": 3}}, {"value": "retries"}),
        ({"class_name": "my_tools.Own"}, {"key": "class_name", "value": "'my_tools.Own'"}),
    ],
)
async def test_an_entry_that_says_what_has_no_effect_is_refused(tmp_path, changes, named):
    config = write_config(tmp_path)
    tree = json.loads((tmp_path / "tools.yaml").read_text())
    tree["tools"][0] |= changes
    (tmp_path / "tools.yaml").write_text(json.dumps(tree))
    with raises(ConfigError, **named):
        async with open_tools(config):
            raise AssertionError("never reached")


async def test_a_server_and_a_file_with_one_name_are_both_named(tmp_path):
    functions = tmp_path / "mine.py"
    functions.write_text(
        "from jax_agent_rl.tools import function_tool\n@function_tool\ndef add() -> str:\n    'x'\n"
    )
    config = write_config(tmp_path).model_copy(update={"function_tool_path": str(functions)})
    with pytest.raises(ToolDefinitionError) as error:
        async with open_tools(config):
            raise AssertionError("never reached")
    assert "mine.py" in str(error.value)
    assert "server 'tests'" in str(error.value)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({}, {"fix": ("url", "command")}),
        ({"url": "x", "command": "y"}, {"fix": ("url", "command")}),
        ({"command": "y", "arg": []}, {"value": "unknown keys"}),
        ("x", {"fix": "a mapping"}),
    ],
)
def test_a_wrong_server_entry_is_refused(settings, named):
    with raises(ConfigError, **named):
        MCPServerConfig.from_mapping(settings, where="here")


def test_a_token_becomes_a_bearer_header():
    server = MCPServerConfig.from_mapping(
        {"url": "http://x/mcp", "auth_token": "abc"}, where="here"
    )
    assert server.headers == {"Authorization": "Bearer abc"}


# --- what a result says ---------------------------------------------------------------------------


def result_of(*content, **fields):
    from mcp.types import CallToolResult

    return CallToolResult(content=list(content), **fields)


def contents():
    from mcp.types import (
        BlobResourceContents,
        EmbeddedResource,
        ResourceLink,
        TextContent,
        TextResourceContents,
    )

    text = TextResourceContents(uri="file:///a", text="THE FILE")
    blob = BlobResourceContents(uri="file:///b", blob="AAAA", mime_type="application/pdf")
    return [
        TextContent(type="text", text="downloaded"),
        EmbeddedResource(type="resource", resource=text),
        EmbeddedResource(type="resource", resource=blob),
        ResourceLink(
            type="resource_link", name="report", uri="file:///c", description="of the year"
        ),
    ]


def test_the_text_of_embedded_resources_is_shown_and_the_rest_is_named():
    text = as_tool_response(result_of(*contents())).text
    assert text.splitlines()[:2] == ["downloaded", "THE FILE"]
    assert "application/pdf" in text
    assert "report" in text
    assert "of the year" in text
    assert "AAAA" not in text


def test_the_gateway_of_the_tool_server_says_what_a_tool_here_says():
    from jax_agent_rl.tool_server.plugins.mcp_gateway import tool_observation

    assert (
        as_tool_response(result_of(*contents())).text
        in tool_observation(result_of(*contents())).text
    )
