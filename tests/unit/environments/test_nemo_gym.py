"""Resources servers of NeMo Gym: the routes, cookies and bodies that its documentation and its own
agents (simple_agent, gymnasium_agent) use.

NeMo Gym itself needs another Python, so servers here are written to its protocol. OpenAI's package
says what a response is.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from openai.types.responses import Response as OpenAIResponse
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from jax_agent_rl.chat.reply import Reply, ToolCall
from jax_agent_rl.environments import EnvironmentPool, get_environment
from jax_agent_rl.errors import EnvironmentFailedError
from jax_agent_rl.types import FinishReason
from tests.http_service import serve
from tests.messages import raises

# The first row of NeMo Gym's example_session_state_mgmt.
INCREMENT = {
    "name": "increment_counter",
    "parameters": {
        "type": "object",
        "properties": {"count": {"type": "integer", "description": ""}},
        "required": ["count"],
        "additionalProperties": False,
    },
    "strict": True,
    "type": "function",
    "description": "",
}
READ = {
    "name": "get_counter_value",
    "parameters": {
        "type": "object",
        "properties": {},
        "required": [],
        "additionalProperties": False,
    },
    "strict": True,
    "type": "function",
    "description": "",
}
ROW = {
    "responses_create_params": {
        "input": [{"content": "add 1 then add 2 then get the count", "role": "user"}],
        "tools": [INCREMENT, READ],
    },
    "expected_count": 6,
    "initial_count": 3,
}


class CounterServer:
    """NeMo Gym's example_session_state_mgmt: a counter per session, known by its cookie.

    Attributes:
        verified: the bodies of ``/verify``.
        verdict: fields to answer ``/verify`` with, besides the reward.
    """

    def __init__(self) -> None:
        self.counters: dict[str, int] = {}
        self.verified: list[dict[str, Any]] = []
        self.verdict: dict[str, Any] = {"set_overlap": 0.5, "accuracy": True, "note": "text"}
        routes = [
            Route("/seed_session", self._seed_session, methods=["POST"]),
            Route("/increment_counter", self._increment, methods=["POST"]),
            Route("/get_counter_value", self._value, methods=["POST"]),
            Route("/verify", self._verify, methods=["POST"]),
        ]
        self.app = Starlette(routes=routes)

    async def _seed_session(self, request: Request) -> Response:
        body = await request.json()
        session = uuid.uuid4().hex
        self.counters[session] = body["initial_count"]
        response = JSONResponse({})
        response.set_cookie("Counter___server", session)
        return response

    async def _increment(self, request: Request) -> Response:
        body = await request.json()
        if body["count"] > 100:
            return JSONResponse({"detail": "too much"}, status_code=422)
        if body["count"] < 0:
            return JSONResponse({"detail": "a bug"}, status_code=500)
        self.counters[request.cookies["Counter___server"]] += body["count"]
        return JSONResponse({"success": True})

    async def _value(self, request: Request) -> Response:
        return JSONResponse({"count": self.counters[request.cookies["Counter___server"]]})

    async def _verify(self, request: Request) -> Response:
        body = await request.json()
        self.verified.append(body)
        counter = self.counters[request.cookies["Counter___server"]]
        return JSONResponse(
            {**body, "reward": float(counter == body["expected_count"]), **self.verdict}
        )


@asynccontextmanager
async def leased(app: Any, **kwargs: Any) -> AsyncIterator[Any]:
    """An episode on a server: the environment, and what it opened with."""
    pool = EnvironmentPool(
        get_environment("nemo_gym"), name="nemo_gym", scope="global", max_instances=8, timeout=20.0
    )
    async with serve(app) as url:
        try:
            async with pool.lease() as environment:
                yield environment, await environment.reset(url=url, **kwargs)
        finally:
            await pool.close()


def calling(name: str, **arguments: Any) -> Reply:
    return Reply(tool_calls=[ToolCall(name=name, arguments=arguments)])


async def test_tools_change_the_session_and_the_verifier_scores_it():
    server = CounterServer()
    async with leased(server.app, row=ROW) as (environment, opening):
        assert opening.messages == (
            {"role": "user", "content": "add 1 then add 2 then get the count"},
        )
        names = [schema["function"]["name"] for schema in environment.tool_schemas]
        assert names == ["increment_counter", "get_counter_value"]
        await environment.step(calling("increment_counter", count=1))
        both = Reply(
            "and two more",
            reasoning="4 so far",
            tool_calls=[
                ToolCall(name="increment_counter", arguments={"count": 2}),
                ToolCall(name="get_counter_value", arguments={}),
            ],
        )
        observation = await environment.step(both)
        assert observation.messages[1] == {
            "role": "tool",
            "name": "get_counter_value",
            "content": '{"count":6}',
        }
        assert not observation.done
        answer = await environment.step(Reply("It is 6."))
        assert answer.done
        outcome = await environment.conclude([], FinishReason.ENVIRONMENT_DONE)
    assert outcome == {"score": 1.0, "nemo_gym/set_overlap": 0.5, "nemo_gym/accuracy": 1.0}

    (body,) = server.verified
    assert body["responses_create_params"] == ROW["responses_create_params"]
    response = OpenAIResponse.model_validate(body["response"])
    assert [item.type for item in response.output] == [
        "function_call",
        "function_call_output",
        "reasoning",
        "message",
        "function_call",
        "function_call",
        "function_call_output",
        "function_call_output",
        "message",
    ]
    calls = [item for item in response.output if item.type == "function_call"]
    outputs = [item for item in response.output if item.type == "function_call_output"]
    assert [call.call_id for call in calls] == [output.call_id for output in outputs]
    assert json.loads(calls[1].arguments) == {"count": 2}
    assert response.output_text == "and two moreIt is 6."
    assert response.incomplete_details is None


async def test_sessions_do_not_see_each_other():
    server = CounterServer()
    async with (
        leased(server.app, row=ROW) as (one, _),
        leased(server.app, row=json.dumps(ROW)) as (other, _),
    ):
        await one.step(calling("increment_counter", count=1))
        seen = await other.step(calling("get_counter_value"))
        assert seen.messages[0]["content"] == '{"count":3}'


async def test_the_model_reads_what_was_wrong_with_a_call():
    async with leased(CounterServer().app, row=ROW) as (environment, _):
        refused = await environment.step(calling("increment_counter", count=101))
        assert refused.messages[0]["content"] == '{"detail":"too much"}'
        wrong = await environment.step(calling("increment_counter", count="many"))
        assert wrong.tool_calls[0].error == "bad_arguments"
        unknown = await environment.step(calling("verify"))
        assert unknown.tool_calls[0].error == "unknown_tool"
        malformed = await environment.step(Reply(malformed=["no JSON"]))
        assert malformed.messages[0]["role"] == "user"
        assert not malformed.done


async def test_a_server_that_fails_at_a_call_drops_the_trajectory():
    async with leased(CounterServer().app, row=ROW) as (environment, _):
        with raises(EnvironmentFailedError, key="/increment_counter", value=("500", "a bug")):
            await environment.step(calling("increment_counter", count=-1))


async def test_a_reply_that_was_cut_off_is_verified_as_incomplete():
    server = CounterServer()
    async with leased(server.app, row=ROW) as (environment, _):
        messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "It i"}]
        outcome = await environment.conclude(messages, FinishReason.RESPONSE_LENGTH)
    assert outcome["score"] == 0.0
    response = OpenAIResponse.model_validate(server.verified[0]["response"])
    assert response.output_text == "It i"
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"


@pytest.mark.parametrize("reward", [None, "1", [1.0], 1e300])
async def test_a_reward_that_is_no_score_drops_the_trajectory(reward: Any):
    server = CounterServer()
    server.verdict = {"reward": reward}
    async with leased(server.app, row=ROW) as (environment, _):
        with raises(EnvironmentFailedError, key="nemo_gym", value="the reward"):
            await environment.conclude([], FinishReason.ENVIRONMENT_DONE)


@pytest.mark.parametrize(
    "params",
    [
        {"input": [{"type": "function_call", "name": "f"}]},
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
        {"input": "go", "tools": [{"type": "web_search"}]},
        {"input": "go", "tools": [{**READ, "name": "verify"}]},
        {"input": "go", "tools": [READ, INCREMENT, READ]},
    ],
)
async def test_a_row_that_cannot_be_played_here_is_refused(params: dict[str, Any]):
    with raises(EnvironmentFailedError):
        async with leased(CounterServer().app, row={"responses_create_params": params}):
            pass


async def test_a_server_that_is_not_there_is_named():
    environment = get_environment("nemo_gym")()
    with raises(EnvironmentFailedError, key="http://127.0.0.1:9", fix="start the server"):
        await environment.reset(url="http://127.0.0.1:9", row=ROW)
    await environment.close()


async def test_an_answer_without_end_is_not_read():
    async def endless(request: Request) -> Response:
        return Response(b"[" * (17 * 2**20))

    app = Starlette(routes=[Route("/seed_session", endless, methods=["POST"])])
    with raises(EnvironmentFailedError, key="seed_session", value="more than"):
        async with leased(app, row=ROW):
            pass


class GuessServer:
    """A GymnasiumServer: every reply is scored, and calls are answered in ``tool_outputs``."""

    def __init__(self) -> None:
        self.steps: list[dict[str, Any]] = []
        self.closed = 0
        routes = [
            Route("/reset", self._reset, methods=["POST"]),
            Route("/step", self._step, methods=["POST"]),
            Route("/close", self._close, methods=["POST"]),
        ]
        self.app = Starlette(routes=routes)

    async def _reset(self, request: Request) -> Response:
        body = await request.json()
        response = JSONResponse(
            {
                "observation": f"Guess below {body['limit']}.",
                "info": {"supports_explicit_close": True},
            }
        )
        response.set_cookie("Guess___server", "one")
        return response

    async def _step(self, request: Request) -> Response:
        assert request.cookies["Guess___server"] == "one"
        body = await request.json()
        self.steps.append(body)
        calls = [item for item in body["response"]["output"] if item["type"] == "function_call"]
        if calls:
            outputs = [{"call_id": call["call_id"], "output": "larger"} for call in calls]
            return JSONResponse({"reward": 0.25, "info": {"tool_outputs": outputs}})
        return JSONResponse({"reward": 1.0, "terminated": True, "observation": None})

    async def _close(self, request: Request) -> Response:
        self.closed += 1
        return JSONResponse({})


async def test_a_gymnasium_server_scores_every_reply():
    server = GuessServer()
    row = {"responses_create_params": {"input": "Play.", "tools": [INCREMENT]}, "limit": 9}
    async with leased(server.app, row=row, protocol="gymnasium") as (environment, opening):
        assert [message["content"] for message in opening.messages] == ["Play.", "Guess below 9."]
        first = await environment.step(calling("increment_counter", count=4))
        assert first.messages == (
            {"role": "tool", "name": "increment_counter", "content": "larger"},
        )
        assert (first.score, first.done) == (0.25, False)
        second = await environment.step(Reply("7"))
        assert (second.score, second.done, second.messages) == (1.0, True, ())
        assert await environment.conclude([], FinishReason.ENVIRONMENT_DONE) == {"score": 0.0}
    assert server.closed == 1
    for body in server.steps:
        OpenAIResponse.model_validate(body["response"])
        assert body["limit"] == 9
