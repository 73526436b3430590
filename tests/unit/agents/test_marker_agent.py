"""What holds for every preset of the marker agent, whatever is sampled and answered."""

from collections.abc import Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route

from jax_agent_rl.agents import AgentLoop, SearchAgent, ServerToolAgent, TextToolAgent
from jax_agent_rl.config import SearchConfig, ToolClientConfig
from jax_agent_rl.types import FinishReason
from tests.agent_testbed import AgentHarness, assert_token_exact
from tests.examples import examples
from tests.http_service import ToolServer, serve

MAX_CALLS = 3


@dataclass
class Preset:
    """A preset and the service it asks.

    ``write`` makes the service's action of a call, ``frame`` is the text around an answer.
    """

    agent: type[AgentLoop]
    opening: str
    closing: str
    write: str
    frame: str
    limits: Mapping[str, Any] = field(default_factory=dict)

    def call(self, text: str) -> str:
        return f"{self.opening} {text} {self.closing}"


PRESETS = {
    "server_tool_agent": Preset(
        ServerToolAgent,
        "<py>",
        "</py>",
        write="<py> {} </py>",
        frame="{}",
        limits={"action_stop_tokens": ("</py>",), "max_turns": MAX_CALLS},
    ),
    "text_tool_agent": Preset(
        TextToolAgent,
        "<tool>",
        "</tool>",
        write="<python>{} </python>",
        frame="\n<result>\n{}\n</result>\n",
    ),
    "search_agent": Preset(
        SearchAgent,
        "<search>",
        "</search>",
        write="{}",
        frame="\n<information>\n{}\n</information>\n",
    ),
}


class Asked:
    """The service of a preset: what it was sent, and what each action was answered."""

    def __init__(self, answers: list[str]):
        self.actions: list[str] = []
        self._answers = answers

    def answer(self, action: str) -> str:
        self.actions.append(action)
        return self._answers[(len(self.actions) - 1) % len(self._answers)]


@asynccontextmanager
async def stage(preset: Preset, script: list[str], asked: Asked, **limits: Any):
    async def retrieve(request):
        (query,) = (await request.json())["queries"]
        return JSONResponse({"result": [[asked.answer(query)]]})

    retriever = Starlette(routes=[Route("/retrieve", retrieve, methods=["POST"])])
    async with ToolServer(asked.answer) as server, serve(retriever) as url:
        shared = {
            "tool_config": ToolClientConfig(
                server_url=server.url, request_interval=0, max_tool_turns=MAX_CALLS
            ),
            "search": SearchConfig(server_url=f"{url}/retrieve", max_turns=MAX_CALLS),
        }
        settings = {"tool_server_url": server.url, **preset.limits, **limits}
        it = AgentHarness(preset.agent, script, shared=shared, **settings)
        yield it, server
        await it.agent.close()


calls = st.sampled_from(["{call}", "words {call} junk", "<think> {call} </think> so {call}"])
answers = st.sampled_from(["words", "</>", "<think> {call} </think>", "<think> {call}"])
observations = st.sampled_from(["ok", "w " * 30, "<eos> <eos>", "{} {0}"])


@pytest.mark.parametrize("name", PRESETS)
@settings(max_examples=examples(25))
@given(
    st.lists(calls | answers, min_size=1, max_size=5),
    st.lists(observations, min_size=1, max_size=3),
    st.integers(1, 60),
)
async def test_budgets_hold_and_ids_are_exact(name, script, observed, budget):
    preset = PRESETS[name]
    asked = Asked(observed)
    replies = [reply.format(call=preset.call("1")) for reply in script]
    async with stage(preset, replies, asked, max_response_length=budget) as (it, server):
        trajectory = await it.run()

    assert_token_exact(trajectory, it.backend.requests)
    assert len(trajectory.response_ids) <= budget
    assert len(asked.actions) == len(trajectory.tool_calls) <= MAX_CALLS
    assert trajectory.num_turns <= MAX_CALLS + 1
    assert trajectory.turns[-1].appended_ids == ()
    assert trajectory.loss_mask == trajectory.response_mask
    assert sum(trajectory.response_mask) == trajectory.num_sampled
    uses_server = bool(asked.actions) and name != "search_agent"
    assert server.closed == ({"t": 1} if uses_server else {})


@pytest.mark.parametrize("name", PRESETS)
async def test_one_policy_takes_the_same_course_in_every_preset(name):
    preset = PRESETS[name]
    asked = Asked(["first", "second"])
    call = preset.call("1 + 2")
    script = [f"{call} junk", f"<think> {preset.closing} </think> {call}", "so 3"]
    async with stage(preset, script, asked) as (it, _):
        trajectory = await it.run()

    assert trajectory.finish_reason is FinishReason.ANSWER
    assert trajectory.num_turns == 3
    assert [action.strip() for action in asked.actions] == [preset.write.format("1 + 2")] * 2
    number = "[1] " if name == "search_agent" else ""
    for turn, answer in zip(trajectory.turns, ["first", "second"], strict=False):
        inserted = it.codec.decode(turn.appended_ids)
        assert inserted == preset.frame.format(number + answer)
    roles = [message["role"] for message in trajectory.messages]
    assert roles == ["user", "assistant", "tool", "assistant", "tool", "assistant"]
    assert trajectory.metrics["tool_calls"] == 2
    assert trajectory.metrics["tool_errors"] == 0
    assert ("tool_close_failures" in trajectory.metrics) is (name != "search_agent")
