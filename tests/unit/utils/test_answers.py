"""What a hostile server answers costs no client more than its bound, and ends no run: one test for
all clients.
"""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_backend.sglang.backend import SglangBackend
from gpu_backend.sglang.settings import SglangSettings
from jax_agent_rl.config.kl import TeacherConfig
from jax_agent_rl.environments import EnvironmentPool, get_environment
from jax_agent_rl.environments.users.builtin import OpenAIChat
from jax_agent_rl.errors import ConfigError, JaxAgentRLError, ToolServerError
from jax_agent_rl.rewards.judge import RemoteReward
from jax_agent_rl.rollout.http import membership
from jax_agent_rl.rollout.http.client import RemoteBackend
from jax_agent_rl.rollout.protocol import GenerateRequest
from jax_agent_rl.runtime.served_teachers import CompletionsTeacher
from jax_agent_rl.tools.client import ServerAction, ServerObservation, ToolServerClient
from jax_agent_rl.tools.mcp import MAX_TOOLS, MCPConnection, MCPServerConfig
from jax_agent_rl.types import FinishReason, SamplingParams
from jax_agent_rl.utils.bounded_json import MAX_NESTING, MAX_VALUES
from jax_agent_rl.utils.network import JsonService, LineBuffer, UnreadableAnswerError
from tests.fake_sglang import CONTEXT, VOCABULARY, write_model
from tests.messages import raises
from tests.served import behind_server
from tests.toy_backend import ToyBackend

LIMIT = 10_000
"""Bytes that the clients of these tests take."""
SECONDS = 20.0
"""Time limit of the clients of these tests."""


@contextlib.asynccontextmanager
async def answering(
    content: bytes,
    *,
    headers: dict[str, str] | None = None,
    status: int = 200,
    endless: bool = False,
    silent: bool = False,
):
    """A server that answers every request so, or never; yields its URL and the bytes it could send
    so far.
    """
    sent: list[int] = []
    over = asyncio.Event()
    head = f"HTTP/1.1 {status} X\r\nContent-Type: application/json\r\nConnection: close\r\n"
    for name, value in (headers or {}).items():
        head += f"{name}: {value}\r\n"
    if not endless:
        head += f"Content-Length: {len(content)}\r\n"

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            request = await reader.readuntil(b"\r\n\r\n")
            length = [
                line
                for line in request.lower().split(b"\r\n")
                if line.startswith(b"content-length:")
            ]
            if length:
                await reader.readexactly(int(length[0].split(b":")[1]))
            if silent:
                await over.wait()
                writer.close()
                return
            writer.write(head.encode() + b"\r\n" + content)
            sent.append(len(content))
            while endless:
                await writer.drain()
                writer.write(content)
                sent.append(len(content))
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", sent
    finally:
        over.set()
        server.close()


# --- each client asks once ------------------------------------------------------------------------


class Closing:
    """Closes a client like an async generator."""

    def __init__(self, client: Any) -> None:
        self.aclose = client.close


def json_service(url: str) -> JsonService:
    options: dict[str, Any] = {
        "url_key": "a.url",
        "timeout_key": "a.timeout",
        "error": ToolServerError,
    }
    return JsonService(url=url, timeout=SECONDS, max_answer_bytes=LIMIT, **options)


async def ask_json(url: str, path: Path) -> Any:
    service = json_service(url)
    async with contextlib.aclosing(Closing(service)):
        return await service.post({})


async def ask_tools(url: str, path: Path) -> Any:
    client = ToolServerClient(json_service(url))
    async with contextlib.aclosing(Closing(client)):
        return await client.step(ServerAction(trajectory_id="t"))


async def ask_reward(url: str, path: Path) -> Any:
    reward = RemoteReward(url, max_retries=0, timeout=SECONDS)
    async with contextlib.aclosing(Closing(reward)):
        return await reward("a", "b", "c", {})


async def ask_user(url: str, path: Path) -> Any:
    chat = OpenAIChat(base_url=url, model="m", max_retries=0, timeout=SECONDS)
    async with contextlib.aclosing(Closing(chat)):
        return await chat.complete(
            [{"role": "user", "content": "q"}], request_id="r", max_tokens=5, temperature=1.0
        )


async def ask_teacher(url: str, path: Path) -> Any:
    teacher = CompletionsTeacher(TeacherConfig(path="m", url=url, timeout=SECONDS))
    async with contextlib.aclosing(Closing(teacher)):
        return await teacher.score([1, 2, 3])


async def ask_engine(url: str, path: Path) -> Any:
    backend = RemoteBackend(url, start_seconds=0.0, silence_seconds=SECONDS)
    async with contextlib.aclosing(Closing(backend)):
        await backend.start()


async def ask_started_engine(url: str, path: Path) -> Any:
    """Ask an engine whose server had greeted before another took its place."""
    request = GenerateRequest(
        request_id="r", prompt_ids=(1,), sampling=SamplingParams(max_tokens=3)
    )
    async with behind_server(ToyBackend(), client={"silence_seconds": SECONDS}) as (_, remote):
        remote.url = url
        return await remote.generate(request)


async def ask_sglang(url: str, path: Path) -> Any:
    folder = write_model(path / "model", 0)
    settings = SglangSettings(
        model=str(folder), vocab_size=VOCABULARY, max_model_len=CONTEXT, url=url
    )
    backend = SglangBackend(settings, silence_seconds=SECONDS)
    async with contextlib.aclosing(Closing(backend)):
        await backend.start()


async def ask_run(url: str, path: Path) -> Any:
    (path / membership.ADDRESS_FILE).write_text(json.dumps({"url": url, "token": "t", "host": "h"}))
    return await membership.command_run(path, "engines")


async def ask_mcp(url: str, path: Path) -> Any:
    server = MCPServerConfig(url=url)
    async with MCPConnection("s", server, timeout=SECONDS) as connection:
        return await connection.tools()


async def ask_environment(url: str, path: Path) -> Any:
    pool = EnvironmentPool(
        get_environment("nemo_gym"), name="e", scope="rollout", max_instances=1, timeout=SECONDS
    )
    async with pool.lease() as environment:
        await environment.reset(url=url, row={"responses_create_params": {"input": "go"}})
        return await environment.conclude([], FinishReason.ANSWER)


CLIENTS = {
    "JSON": ask_json,
    "environment": ask_environment,
    "tool server": ask_tools,
    "reward server": ask_reward,
    "simulated user": ask_user,
    "teacher": ask_teacher,
    "rollout server, greeting": ask_engine,
    "rollout server": ask_started_engine,
    "SGLang's server": ask_sglang,
    "run": ask_run,
    "MCP": ask_mcp,
}


async def outcome(client: str, url: str, path: Path) -> Any:
    """What a client gets, or the error of ours that it raises; another error fails the test."""
    try:
        async with asyncio.timeout(30.0):
            return await CLIENTS[client](url, path)
    except JaxAgentRLError as error:
        return error


BOMB = gzip.compress(gzip.compress(b"0" * 20_000_000))


@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize("encoding", ["gzip, gzip", "gzip", "br", "deflate"])
async def test_a_compressed_answer_is_not_read(client, encoding, tmp_path):
    async with answering(BOMB, headers={"Content-Encoding": encoding}) as (url, _):
        error = await outcome(client, url, tmp_path)
    assert isinstance(error, JaxAgentRLError)
    assert "Content-Encoding" in str(error)


@pytest.mark.parametrize("client", CLIENTS)
async def test_an_endless_answer_is_left(client, tmp_path):
    async with answering(b"0" * (1 << 20), endless=True) as (url, sent):
        error = await outcome(client, url, tmp_path)
    assert isinstance(error, JaxAgentRLError)
    assert sum(sent) < 300 << 20, "the largest bound, of a teacher's scores and an engine's outputs"


UNUSABLE = {
    "many values": b"[" + b"[]," * MAX_VALUES + b"[]]",
    "many levels": b"[" * (MAX_NESTING + 1) + b"]" * (MAX_NESTING + 1),
    "more levels than Python has": b"[" * 100_000,
    "no JSON": b"<html>",
    "nothing": b"",
    "a number that is too long": b"9" * 9000,
}


@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize("kind", UNUSABLE)
async def test_what_cannot_be_decoded_is_an_error_of_ours(client, kind, tmp_path):
    async with answering(UNUSABLE[kind]) as (url, _):
        assert isinstance(await outcome(client, url, tmp_path), JaxAgentRLError)


SHAPES = [
    b"null",
    b"[]",
    b"{}",
    b'"a"',
    b"0",
    b"1e999",
    b'{"choices": [{}], "result": [], "observations": 1}',
    b"[[]]",
]


@pytest.mark.parametrize(
    "client", [name for name in CLIENTS if name not in ("JSON", "reward server")]
)
@pytest.mark.parametrize("content", SHAPES)
async def test_an_answer_of_another_shape_is_an_error_of_ours(client, content, tmp_path):
    async with answering(content + b"\n") as (url, _):
        got = await outcome(client, url, tmp_path)
    assert isinstance(got, JaxAgentRLError)


@pytest.mark.parametrize("client", CLIENTS)
async def test_a_server_that_never_answers_is_left_after_its_seconds(client, tmp_path, monkeypatch):
    monkeypatch.setitem(globals(), "SECONDS", 0.25)
    monkeypatch.setattr(membership, "COMMAND_SECONDS", 0.25)
    async with answering(b"", silent=True) as (url, _):
        try:
            error = await outcome(client, url, tmp_path)
        except TimeoutError as late:  # of JsonService itself, whose callers decide what it means
            error = late
    text = (
        error.text if isinstance(error, ServerObservation) else str(error)
    )  # a tool's is for the model
    assert "0.25 s" in text


@pytest.mark.parametrize("client", CLIENTS)
async def test_a_redirect_is_not_followed(client, tmp_path):
    async with answering(b"{}") as (elsewhere, asked):
        async with answering(b"", status=307, headers={"Location": f"{elsewhere}/x"}) as (url, _):
            error = await outcome(client, url, tmp_path)
    assert isinstance(error, JaxAgentRLError) and asked == []


@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize("status", [400, 401, 404, 429, 500, 503])
async def test_an_error_is_not_read_beyond_its_beginning(client, status, tmp_path):
    async with answering(b"<p>wrong</p>" * 10_000, status=status, endless=True) as (url, sent):
        error = await outcome(client, url, tmp_path)
    assert isinstance(error, JaxAgentRLError) and len(str(error)) < 3000
    assert sum(sent) < 100 << 20


# --- lines, and MCP servers that are programs -----------------------------------------------------


@given(st.lists(st.binary(max_size=8).map(lambda part: part.replace(b"\r", b"\n")), max_size=20))
def test_lines_are_those_of_the_whole(parts):
    lines = LineBuffer(1000)
    read_lines = [line for part in parts for line in lines.add(part)]
    *complete, unfinished = b"".join(parts).split(b"\n")
    assert read_lines == [line for line in complete if line]
    assert lines.unfinished == bool(unfinished)


def test_a_line_without_an_end_is_left():
    lines = LineBuffer(100)
    lines.add(b"x" * 90)
    with raises(UnreadableAnswerError, value="100 bytes"):
        lines.add(b"x" * 11)


ENDLESS_LINE = """
import sys
sys.stdin.readline()
while True:
    sys.stdout.write("x" * 1000000)
"""
ENDLESS_PAGES = """
import json, sys
for line in sys.stdin:
    asked = json.loads(line)
    tools = [{"name": "t", "inputSchema": {"type": "object"}}] * 100
    result = {"tools": tools, "nextCursor": "more"}
    if asked["method"] == "initialize":
        version = asked["params"]["protocolVersion"]
        info = {"name": "s", "version": "1"}
        result = {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": info}
    if "id" in asked:
        print(json.dumps({"jsonrpc": "2.0", "id": asked["id"], "result": result}), flush=True)
"""


async def test_an_mcp_server_that_writes_a_line_without_an_end_is_left():
    server = MCPServerConfig(command=sys.executable, args=("-c", ENDLESS_LINE))
    with pytest.raises(ConfigError, match="cannot be reached|did not answer"):
        async with MCPConnection("s", server, timeout=SECONDS):
            pass


async def test_an_mcp_server_whose_list_of_tools_never_ends_is_refused():
    server = MCPServerConfig(command=sys.executable, args=("-c", ENDLESS_PAGES))
    async with MCPConnection("s", server, timeout=SECONDS) as connection:
        with raises(ConfigError, value=f"{MAX_TOOLS} tools"):
            await connection.tools()
