"""The registry, the choice of a loop per row, the single-turn agent, and seeds."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jax_agent_rl.agents import (
    AgentContext,
    AgentLoop,
    AgentSelector,
    SingleTurnAgent,
    ToolAgent,
    agent_names,
    derive_seed,
    get_agent,
    register_agent,
)
from jax_agent_rl.config import AgentConfig
from jax_agent_rl.errors import ConfigError
from jax_agent_rl.rollout.client import LLMServerClient
from jax_agent_rl.rollout.server import AsyncServer
from jax_agent_rl.tools import ToolRegistry
from jax_agent_rl.tools.calculator import calculator
from jax_agent_rl.types import FinishReason, SamplingParams
from tests.agent_testbed import episode_request
from tests.fakes import FakeCodec, ScriptedBackend
from tests.messages import raises

ROW = {"prompt": [{"role": "user", "content": "hi"}]}


def context(*, script=("hello there",), tools=(), **limits):
    codec = FakeCodec()
    client = LLMServerClient([AsyncServer(ScriptedBackend(codec, script))])
    return AgentContext(
        client=client,
        codec=codec,
        tools=ToolRegistry(tools),
        limits=AgentConfig(**limits),
        max_model_len=1000,
    )


def test_loops_are_found_by_name():
    assert get_agent("single_turn_agent") is SingleTurnAgent
    assert get_agent("tool_agent") is ToolAgent
    with raises(ConfigError, value="'tool_agnt'", fix="'tool_agent'"):
        get_agent("tool_agnt")


def test_a_name_is_registered_once():
    with raises(ConfigError, key="two agents", value="'tool_agent'"):

        @register_agent("tool_agent")
        class Impostor(ToolAgent):
            pass

    assert get_agent("tool_agent") is ToolAgent


def test_a_loop_that_cannot_play_is_refused_when_it_is_registered():
    with raises(ConfigError, key="agent 'mute_for_test'", value="Mute", fix="`play`"):

        @register_agent("mute_for_test")
        class Mute(AgentLoop):
            async def run(self, row, **parts):
                raise NotImplementedError

    assert "mute_for_test" not in agent_names()


@pytest.mark.parametrize("method", ["run", "branch", "resume"])
def test_a_loop_whose_own_method_nothing_calls_is_refused(method):
    """It would train the agent that it is derived from."""
    with raises(
        ConfigError, key="agent 'old_for_test'", value=("Old", f"`{method}`"), fix="`async def"
    ):
        register_agent("old_for_test")(type("Old", (ToolAgent,), {method: lambda self: None}))
    assert "old_for_test" not in agent_names()


@pytest.mark.parametrize("method", ["run", "branch", "resume"])
def test_a_loop_that_plays_itself_may_have_methods_of_any_name(method):
    name = f"{method}s_for_test"
    methods = {method: lambda self: None, "play": ToolAgent.play}
    register_agent(name)(type("Own", (ToolAgent,), methods))
    assert name in agent_names()


async def test_a_loop_of_ones_own_runs_on_an_episode():
    @register_agent("greeter_for_test")
    class Greeter(AgentLoop):
        async def play(self, request):
            episode = self.start(request)
            await episode.generate()
            assert episode.append([{"role": "user", "content": "and now ?"}])
            await episode.generate(session_ends=True)
            return episode.finish(FinishReason.ANSWER)

    loop = AgentSelector(context()).for_row({"agent_name": "greeter_for_test"})
    trajectory = await loop.play(episode_request(ROW, SamplingParams(max_tokens=9)))
    assert trajectory.agent_name == "greeter_for_test"
    assert [m["content"] for m in trajectory.messages] == [
        "hi",
        "hello there",
        "and now ?",
        "hello there",
    ]


def test_the_row_chooses_and_the_default_fills_in():
    selector = AgentSelector(context(default_agent="tool_agent"))
    assert isinstance(selector.for_row({"agent_name": "single_turn_agent"}), SingleTurnAgent)
    assert isinstance(selector.for_row({}), ToolAgent)
    assert selector.for_row({}) is selector.for_row({"agent_name": "tool_agent"})


@pytest.mark.parametrize(
    ("limit", "reason"),
    [(100, FinishReason.ANSWER), (3, FinishReason.ANSWER), (2, FinishReason.RESPONSE_LENGTH)],
)
async def test_a_single_turn_answers_or_is_cut(limit, reason):
    agent = SingleTurnAgent(context(max_response_length=limit))
    trajectory = await agent.play(episode_request(ROW, SamplingParams(max_tokens=50)))
    assert trajectory.finish_reason is reason
    assert trajectory.num_turns == 1
    assert set(trajectory.response_mask) == {1}


async def test_a_single_turn_prompt_tells_of_no_tools():
    agent = SingleTurnAgent(context(tools=[calculator]))
    trajectory = await agent.play(episode_request(ROW, SamplingParams(max_tokens=50)))
    assert "calculator" not in agent.context.codec.decode(trajectory.prompt_ids)


parts = st.lists(st.integers() | st.text(), max_size=4)


@given(parts, parts)
def test_seeds_are_equal_for_equal_parts_only(a, b):
    assert 0 <= derive_seed(*a) < 2**31
    same = [(type(x), x) for x in a] == [(type(x), x) for x in b]
    assert (derive_seed(*a) == derive_seed(*b)) is same


def test_parts_do_not_run_into_each_other():
    assert (
        len({derive_seed(1, 23), derive_seed(12, 3), derive_seed("1", 23), derive_seed(123)}) == 4
    )
