"""OpenEnv's protocol: three environments as openenv 0.10 serves them, message by message.

The recordings are of ``tests/openenv_server.py``; ``test_openenv_server.py`` plays the same
episodes with the package itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocket

from jax_agent_rl.chat.reply import Reply, ToolCall
from jax_agent_rl.environments import EnvironmentPool, LeasedEnvironment, get_environment
from jax_agent_rl.errors import EnvironmentFailedError
from jax_agent_rl.types import FinishReason
from tests.http_service import serve
from tests.messages import raises

Exchange = tuple[dict[str, Any], dict[str, Any]]
METADATA = {"type": "object", "additionalProperties": True}
NO_MCP = {"code": -32603, "message": "Environment does not support MCP", "data": None}


def tools_list(**answer: Any) -> Exchange:
    request = {"jsonrpc": "2.0", "method": "tools/list", "params": {}, "id": 1}
    return (
        {"type": "mcp", "data": request},
        {"type": "mcp", "data": {"jsonrpc": "2.0", "id": 1, **answer}},
    )


def observed(message: dict[str, Any], reward: Any, done: bool, **fields: Any) -> Exchange:
    data = {"observation": {"metadata": {}, **fields}, "reward": reward, "done": done}
    return message, {"type": "observation", "data": data}


def reset(**arguments: Any) -> dict[str, Any]:
    return {"type": "reset", "data": arguments}


def step(**action: Any) -> dict[str, Any]:
    return {"type": "step", "data": action}


def tool_step(name: str, **arguments: Any) -> dict[str, Any]:
    return step(type="call_tool", tool_name=name, arguments=arguments)


def result(text: str) -> dict[str, Any]:
    part = {"type": "text", "text": text, "annotations": None, "meta": None}
    return {
        "content": [part],
        "structured_content": {"result": text},
        "meta": {"fastmcp": {"wrap_result": True}},
        "data": text,
        "is_error": False,
    }


STATE = {"episode_id": None, "step_count": 3}
TOO_LONG = {
    "type": "string_too_long",
    "loc": ["word"],
    "msg": "String should have at most 20 characters",
    "input": "x" * 30,
    "ctx": {"max_length": 20},
}
TOOLS = [
    {
        "name": "price",
        "title": None,
        "description": "The price of some items.",
        "inputSchema": {
            "additionalProperties": False,
            "properties": {
                "item": {"type": "string"},
                "count": {"default": 1, "type": "integer"},
            },
            "required": ["item"],
            "type": "object",
        },
    },
    {
        "name": "buy",
        "description": "Buys an item, and leaves the shop.",
        "inputSchema": {
            "properties": {"item": {"type": "string"}},
            "required": ["item"],
            "type": "object",
        },
    },
]
ACTIONS: dict[str, dict[str, Any]] = {
    "write": {
        "additionalProperties": False,
        "description": "Says a word.",
        "properties": {"metadata": METADATA, "word": {"maxLength": 20, "type": "string"}},
        "required": ["word"],
        "type": "object",
    },
    "place": {
        "additionalProperties": False,
        "description": "Puts a stone on the board.",
        "properties": {
            "metadata": METADATA,
            "row": {"minimum": 0, "exclusiveMaximum": 3, "type": "integer"},
            "column": {"default": 0, "type": "integer"},
        },
        "required": ["row"],
        "type": "object",
    },
    "shop": {
        "description": "Call a specific tool via MCP.",
        "properties": {
            "metadata": METADATA,
            "type": {"const": "call_tool", "type": "string"},
            "tool_name": {"type": "string"},
            "arguments": {"additionalProperties": True, "type": "object"},
        },
        "required": ["tool_name"],
        "type": "object",
    },
}
RECORDED: dict[str, Sequence[Exchange]] = {
    "write": [
        observed(reset(seed=1), None, False, text="A fruit of 4 letters?"),
        tools_list(error=NO_MCP),
        observed(step(word="plum"), -0.25, False, text="No."),
        (
            step(word="x" * 30),
            {
                "type": "error",
                "data": {
                    "message": "Invalid message",
                    "code": "VALIDATION_ERROR",
                    "errors": [TOO_LONG],
                },
            },
        ),
        observed(step(word="pear"), 1.0, True, text="Right."),
        ({"type": "state"}, {"type": "state", "data": {"episode_id": None, "step_count": 2}}),
    ],
    "place": [
        observed(reset(), None, False, board=[], legal=True),
        tools_list(error=NO_MCP),
        observed(step(row=0), 0.5, False, board=[0], legal=True),
        observed(step(row=1, column=2), 0.5, False, board=[0, 5], legal=True),
        observed(step(row=2), 0.5, True, board=[0, 5, 6], legal=True),
        ({"type": "state"}, {"type": "state", "data": STATE}),
    ],
    "shop": [
        observed(reset(), None, False),
        tools_list(result={"tools": TOOLS}),
        observed(
            tool_step("price", item="lamp", count=2),
            None,
            False,
            tool_name="price",
            result=result("40 coins"),
            error=None,
        ),
        observed(
            tool_step("price", item="sofa"),
            None,
            False,
            tool_name="price",
            result=None,
            error={"error_type": "execution_error", "message": "Error calling tool 'price': no"},
        ),
        observed(
            tool_step("buy", item="lamp"),
            2.0,
            True,
            tool_name="buy",
            result=result("bought a lamp"),
            error=None,
        ),
        ({"type": "state"}, {"type": "state", "data": STATE}),
    ],
}


def recorded_app(exchanges: Sequence[Exchange], action: dict[str, Any]) -> Starlette:
    """A server that answers what it is expected to be sent; anything else is told, and ends it."""

    async def schema(request: Request) -> Response:
        return JSONResponse({"action": action, "observation": {}, "state": {}})

    async def session(socket: WebSocket) -> None:
        await socket.accept()
        for expected, answer in exchanges:
            message = await socket.receive_json()
            if message != expected:
                data = {"message": f"{message} is not {expected}", "code": "UNKNOWN_TYPE"}
                await socket.send_json({"type": "error", "data": data})
                break
            await socket.send_json(answer)
        await socket.close()

    return Starlette(routes=[Route("/schema", schema), WebSocketRoute("/ws", session)])


@asynccontextmanager
async def leased(timeout: float = 30.0) -> AsyncIterator[LeasedEnvironment]:
    pool = EnvironmentPool(
        get_environment("openenv"),
        name="openenv",
        scope="rollout",
        max_instances=2,
        timeout=timeout,
    )
    async with pool.lease() as environment:
        yield environment


def calling(*calls: tuple[str, dict[str, Any]]) -> Reply:
    return Reply(tool_calls=[ToolCall(name=name, arguments=arguments) for name, arguments in calls])


async def write_words(url: str) -> None:
    """An episode whose actions are texts."""
    async with leased() as environment:
        opening = await environment.reset(url=url, reset='{"seed": 1}')
        assert opening.messages == ({"role": "user", "content": "A fruit of 4 letters?"},)
        assert environment.tool_schemas == []
        wrong = await environment.step(Reply("plum"))
        assert (wrong.score, wrong.done, wrong.messages[0]["content"]) == (-0.25, False, "No.")
        long = await environment.step(Reply("x" * 30))
        assert "word: String should have at most 20 characters" in long.messages[0]["content"]
        right = await environment.step(Reply("pear", reasoning="four letters"))
        assert (right.score, right.done) == (1.0, True)
        outcome = await environment.conclude([], FinishReason.ENVIRONMENT_DONE)
    assert outcome == {"score": 0.0, "openenv/steps": 2.0}


async def place_stones(url: str) -> None:
    """An episode whose actions are several numbers."""
    async with leased() as environment:
        opening = await environment.reset(url=url, show="board")
        assert opening.messages[0]["content"] == "[]"
        (schema,) = environment.tool_schemas
        assert schema["function"]["name"] == "act"
        assert schema["function"]["description"] == "Puts a stone on the board."
        assert set(schema["function"]["parameters"]["properties"]) == {"row", "column"}
        idle = await environment.step(Reply("I wait."))
        assert "act" in idle.messages[0]["content"]
        outside = await environment.step(calling(("act", {"row": 7})))
        assert outside.tool_calls[0].error == "bad_arguments"
        three = await environment.step(
            calling(
                ("act", {"row": 0}),
                ("act", {"row": 1, "column": 2}),
                ("act", {"row": 2}),
                ("act", {"row": 0}),
            )
        )
        assert [record.error for record in three.tool_calls] == [None, None, None, "raised"]
        assert three.messages[1]["content"] == "[0, 5]"
        assert (three.score, three.done) == (1.5, True)
        outcome = await environment.conclude([], FinishReason.ENVIRONMENT_DONE)
    assert outcome["openenv/steps"] == 3.0


async def go_shopping(url: str) -> None:
    """An episode of MCP tools."""
    async with leased() as environment:
        opening = await environment.reset(url=url)
        assert opening.messages == ()
        names = [schema["function"]["name"] for schema in environment.tool_schemas]
        assert names == ["price", "buy"]
        price = await environment.step(calling(("price", {"item": "lamp", "count": 2})))
        assert price.messages == ({"role": "tool", "name": "price", "content": "40 coins"},)
        failed = await environment.step(calling(("price", {"item": "sofa"})))
        assert failed.tool_calls[0].error == "raised"
        assert failed.messages[0]["content"].startswith("Error: Error calling tool 'price'")
        bought = await environment.step(calling(("buy", {"item": "lamp"})))
        assert (bought.score, bought.done) == (2.0, True)
        outcome = await environment.conclude([], FinishReason.ENVIRONMENT_DONE)
    assert outcome["openenv/steps"] == 3.0


EPISODES = {"write": write_words, "place": place_stones, "shop": go_shopping}


@pytest.mark.parametrize("name", EPISODES)
async def test_an_environment_is_played_as_the_server_declares_it(name: str):
    async with serve(recorded_app(RECORDED[name], ACTIONS[name])) as url:
        await EPISODES[name](url)


async def test_an_answer_without_calls_ends_an_episode_of_mcp_tools():
    async with serve(recorded_app(RECORDED["shop"], ACTIONS["shop"])) as url:
        async with leased() as environment:
            await environment.reset(url=url)
            assert (await environment.step(Reply("I only look."))).done


def errors(code: str, **data: Any) -> list[Exchange]:
    return [
        (reset(), {"type": "error", "data": {"message": "it broke", "code": code, **data}}),
    ]


TWICE = {"tools": [{"name": "look"}, {"name": "look", "inputSchema": {"type": "object"}}]}


@pytest.mark.parametrize(
    ("exchanges", "named"),
    [
        (errors("EXECUTION_ERROR"), {"key": "EXECUTION_ERROR", "value": "it broke"}),
        (errors("CAPACITY_REACHED"), {"fix": "environments.max_instances"}),
        ([(reset(), {"type": "state", "data": {}})], {"key": "reset"}),
        ([(reset(), {"type": "observation", "data": {"reward": 1}})], {"value": "observation"}),
        ([(reset(), [1])], {"value": "not an object"}),
        ([], {"value": "ended the session"}),
        ([observed(reset(), None, False), tools_list(result={"tools": [{}]})], {"value": "name"}),
        ([observed(reset(), None, False), tools_list(result=None)], {"value": "no tools"}),
        ([observed(reset(), None, False), tools_list(result=TWICE)], {"value": "'look'"}),
        ([observed(reset(), None, False), tools_list(error=NO_MCP)], {"value": "has no tools"}),
    ],
)
async def test_a_server_that_fails_or_lies_loses_the_trajectory(
    exchanges: Sequence[Exchange], named: dict[str, Any]
):
    async with serve(recorded_app(exchanges, ACTIONS["shop"])) as url:
        with raises(EnvironmentFailedError, **named):
            async with leased() as environment:
                await environment.reset(url=url)


@pytest.mark.parametrize("reward", ["1.0", [1], 1e300])
async def test_a_reward_that_is_no_score_loses_the_trajectory(reward: Any):
    exchanges = [*RECORDED["write"][:2], observed(step(word="pear"), reward, True, text="Right.")]
    async with serve(recorded_app(exchanges, ACTIONS["write"])) as url:
        with raises(EnvironmentFailedError, key="the reward of a step"):
            async with leased() as environment:
                await environment.reset(url=url, reset={"seed": 1})
                await environment.step(Reply("pear"))


async def test_a_server_does_not_send_the_session_to_another_one():
    paths: list[str] = []

    async def redirect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request = await reader.readuntil(b"\r\n\r\n")
        paths.append(request.decode().split()[1])
        writer.write(b"HTTP/1.1 307 -\r\nLocation: /elsewhere\r\nContent-Length: 0\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(redirect, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        with raises(EnvironmentFailedError, value=port, fix="not followed"):
            async with leased() as environment:
                await environment.reset(url=f"http://127.0.0.1:{port}")
    assert paths == ["/ws"]


async def test_a_field_to_show_that_an_observation_lacks_is_named():
    async with serve(recorded_app(RECORDED["place"], ACTIONS["place"])) as url:
        with raises(EnvironmentFailedError, value="score", fix="board"):
            async with leased() as environment:
                await environment.reset(url=url, show="score")


async def test_a_message_without_end_is_not_read():
    huge = observed(reset(), None, False, text="x" * (17 * 2**20))
    async with serve(recorded_app([huge], ACTIONS["write"])) as url:
        with raises(EnvironmentFailedError, key="ended the session"):
            async with leased() as environment:
                await environment.reset(url=url)


@pytest.mark.parametrize("url", ["ws://127.0.0.1:1", "127.0.0.1:8000", "http://127.0.0.1:9"])
async def test_an_address_that_is_no_server_is_named(url: str):
    with raises(EnvironmentFailedError, key="openenv", value=url):
        async with leased() as environment:
            await environment.reset(url=url)
