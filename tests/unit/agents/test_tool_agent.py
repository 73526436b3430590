"""The tool agent: exact ids, every limit, every way to end."""

import asyncio
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jax_agent_rl.agents import AgentContext, ToolAgent
from jax_agent_rl.config import AgentConfig
from jax_agent_rl.errors import (
    AbortedError,
    BackendError,
    DataError,
    PromptTooLongError,
    TokenDriftError,
)
from jax_agent_rl.rollout.client import LLMServerClient
from jax_agent_rl.rollout.server import AsyncServer
from jax_agent_rl.tools import ToolRegistry, function_tool
from jax_agent_rl.types import FinishReason, SamplingParams, StopReason
from tests.agent_testbed import episode_request
from tests.examples import examples
from tests.fakes import EOS, FakeCodec, ScriptedBackend
from tests.messages import raises

ROW = {"prompt": [{"role": "user", "content": "what is 1 + 2 ?"}], "data_source": "calculator"}
ASK = '<call>add {"a": 1, "b": 2}</call>'


@function_tool
def add(a: int, b: int) -> str:
    """Adds."""
    return str(a + b)


class Stage:
    """An agent over a scripted engine; keeps what the tests look at."""

    def __init__(
        self,
        script,
        *,
        agent=ToolAgent,
        backend=ScriptedBackend,
        tools=(add,),
        max_model_len=1000,
        **limits,
    ):
        self.codec = FakeCodec()
        self.backend = backend(self.codec, script)
        self.client = LLMServerClient([AsyncServer(self.backend)])
        self.events = []
        context = AgentContext(
            client=self.client,
            codec=self.codec,
            tools=ToolRegistry(tools),
            limits=AgentConfig(**{"tool_prompt": "none", **limits}),
            max_model_len=max_model_len,
            on_event=self.events.append,
        )
        self.agent = agent(context)

    async def run(self, row=ROW, *, max_tokens=1000, seed=None):
        sampling = SamplingParams(max_tokens=max_tokens, seed=seed)
        return await self.agent.play(episode_request(row, sampling))


def assert_token_exact(trajectory, requests):
    """The context of every turn is the prompt, then sampled and inserted ids in order; nothing
    else.
    """
    context = trajectory.prompt_ids
    for turn, request in zip(trajectory.turns, requests, strict=True):
        assert request.prompt_ids == context
        context = context + turn.output.token_ids + turn.appended_ids
    assert context == trajectory.prompt_ids + trajectory.response_ids


async def test_a_tool_is_called_and_its_result_is_read():
    stage = Stage([ASK, "the answer is 3"])
    trajectory = await stage.run()
    assert trajectory.finish_reason is FinishReason.ANSWER
    assert [(c.name, c.arguments, c.observation, c.error) for c in trajectory.tool_calls] == [
        ("add", {"a": 1, "b": 2}, "3", None)
    ]
    assert_token_exact(trajectory, stage.backend.requests)
    first, second = trajectory.turns
    assert stage.codec.decode(first.appended_ids) == "tool: 3assistant:"
    assert second.appended_ids == ()
    sampled = len(first.output.token_ids), len(second.output.token_ids)
    assert (
        trajectory.response_mask
        == (1,) * sampled[0] + (0,) * len(first.appended_ids) + (1,) * sampled[1]
    )
    assert [m["role"] for m in trajectory.messages] == ["user", "assistant", "tool", "assistant"]
    assert trajectory.messages[-1]["content"] == "the answer is 3"


async def test_the_engine_goes_on_with_others_while_a_tool_runs():
    others_are_done = asyncio.Event()

    @function_tool
    async def wait() -> str:
        """Ends when every other trajectory has."""
        await others_are_done.wait()
        return "waited"

    def script(request):
        first = request.session_id == "slow" and "tool: waited" not in stage.codec.decode(
            request.prompt_ids
        )
        return stage.codec.reply_ids("<call>wait {}</call>" if first else "done")

    stage = Stage(script, tools=(wait,))
    sampling = SamplingParams(max_tokens=50)
    slow, *quick_tasks = (
        asyncio.create_task(stage.agent.play(episode_request(ROW, sampling, trajectory_id=name)))
        for name in ("slow", "a", "b")
    )
    await asyncio.wait_for(asyncio.gather(*quick_tasks), timeout=60)
    assert not slow.done()
    others_are_done.set()
    assert (await slow).tool_calls[0].observation == "waited"


async def test_metrics_and_events_tell_what_happened():
    stage = Stage([ASK, "3"])
    trajectory = await stage.run()
    metrics = trajectory.metrics
    assert (metrics["tool_calls"], metrics["tool_errors"]) == (1, 0)
    assert metrics["prompt_tokens"] == sum(len(r.prompt_ids) for r in stage.backend.requests)
    assert metrics["generate_seconds"] > 0
    assert metrics["tool_seconds"] > 0
    kinds = [("call" if e.tool_call else "generate", e.turn) for e in stage.events]
    assert kinds == [("generate", 0), ("call", 0), ("generate", 1)]


async def test_the_prompt_tells_of_the_tools_unless_told_not_to():
    told = Stage(["hi"], tool_prompt="template")
    untold = Stage(["hi"])
    assert '"name": "add"' in told.codec.decode((await told.run()).prompt_ids)
    assert "add" not in untold.codec.decode((await untold.run()).prompt_ids)


async def test_a_row_selects_its_tools():
    stage = Stage([ASK, "ok"])
    trajectory = await stage.run({**ROW, "extra_info": {"tool_selection": []}})
    assert trajectory.tool_calls[0].error == "unknown_tool"


async def test_every_turn_has_a_seed_of_its_own_that_the_trajectory_seed_fixes():
    seeds = []
    for _ in range(2):
        stage = Stage([ASK, ASK, "3"])
        await stage.run(seed=5)
        seeds.append([request.sampling.seed for request in stage.backend.requests])
    assert seeds[0] == seeds[1]
    assert len(set(seeds[0])) == 3
    stage = Stage(["3"])
    await stage.run(seed=None)
    assert stage.backend.requests[0].sampling.seed is None


async def test_one_session_holds_all_turns_and_its_end_is_announced_when_known():
    stage = Stage([ASK, ASK, ASK], max_assistant_turns=2)
    await stage.run()
    assert [(r.session_id, r.session_ends) for r in stage.backend.requests] == [
        ("t", False),
        ("t", True),
    ]


@pytest.mark.parametrize(
    ("limits", "reason", "turns", "calls"),
    [
        ({"max_assistant_turns": 2}, FinishReason.MAX_ASSISTANT_TURNS, 2, 1),
        ({"max_user_turns": 2}, FinishReason.MAX_USER_TURNS, 3, 2),
        ({"max_user_turns": 0}, FinishReason.MAX_USER_TURNS, 1, 0),
    ],
)
async def test_turn_limits_end_it_without_running_the_last_calls(limits, reason, turns, calls):
    stage = Stage([ASK], **limits)
    trajectory = await stage.run()
    assert trajectory.finish_reason is reason
    assert (trajectory.num_turns, len(trajectory.tool_calls)) == (turns, calls)
    assert trajectory.turns[-1].appended_ids == ()


async def test_calls_over_the_parallel_limit_answer_with_an_error():
    stage = Stage([ASK * 3, "3"], max_parallel_calls=2)
    trajectory = await stage.run()
    assert [c.error for c in trajectory.tool_calls] == [None, None, "over_parallel_limit"]
    assert "at most 2 tool calls" in trajectory.tool_calls[2].observation
    assert [m["role"] for m in trajectory.messages[2:5]] == ["tool"] * 3


async def test_a_result_that_would_fill_the_budget_ends_it_without_being_inserted():
    """Turn 1 samples 6 ids, the observation has 4 ("tool: 3", EOS, "assistant:"), so 11 leave one
    id to sample.
    """
    roomy = Stage([ASK, "3"], max_response_length=11)
    trajectory = await roomy.run()
    assert trajectory.num_turns == 2
    assert len(trajectory.response_ids) == 11
    tight = Stage([ASK, "3"], max_response_length=10)
    trajectory = await tight.run()
    assert trajectory.finish_reason is FinishReason.RESPONSE_LENGTH
    assert trajectory.num_turns == 1
    assert trajectory.turns[0].appended_ids == ()
    assert trajectory.tool_calls[0].observation == "3", "the call was made and is on record"
    assert trajectory.messages[-1]["role"] == "assistant"


async def test_the_models_context_is_a_budget_too():
    prompt = len((await Stage(["hi"]).run()).prompt_ids)
    trajectory = await Stage([ASK, "a b c d"], max_model_len=prompt + 13).run()
    assert trajectory.finish_reason is FinishReason.RESPONSE_LENGTH
    assert len(trajectory.response_ids) == 13


async def test_a_cut_turn_earns_no_tool_result():
    stage = Stage([ASK, "3"], max_response_length=4)
    trajectory = await stage.run()
    assert trajectory.finish_reason is FinishReason.RESPONSE_LENGTH
    assert trajectory.turns[0].output.stop_reason is StopReason.LENGTH
    assert trajectory.tool_calls == ()
    assert len(trajectory.response_ids) == 4


async def test_a_prompt_over_the_limit_says_both_numbers_and_the_key():
    stage = Stage(["hi"], max_prompt_length=3)
    with pytest.raises(PromptTooLongError, match=r"\d+ ids.*agent.max_prompt_length=3"):
        await stage.run()
    stage = Stage(["hi"], max_model_len=5)
    with raises(PromptTooLongError, key="rollout.max_model_len", value=5):
        await stage.run()
    assert stage.backend.requests == []


@pytest.mark.parametrize(
    "prompt", [None, "text", [], {"role": "user"}, ["text"], [{"content": "x"}]]
)
async def test_a_row_without_messages_is_refused(prompt):
    with raises(DataError, fix="a list of messages"):
        await Stage(["hi"]).run({"prompt": prompt})


class DriftingBackend(ScriptedBackend):
    def digest(self, ids):
        return super().digest(ids[:-1])


async def test_an_engine_with_another_context_is_caught():
    with raises(TokenDriftError, value="digest"):
        await Stage(["hi"], backend=DriftingBackend).run()


class MuteBackend(ScriptedBackend):
    async def generate(self, request):
        output = await super().generate(request)
        return type(output)(
            token_ids=(),
            log_probs=(),
            policy_versions=(),
            stop_reason=StopReason.EOS,
            context_digest="",
        )


async def test_an_engine_that_returns_nothing_is_an_error():
    with raises(BackendError, value="got 0"):
        await Stage(["hi"], backend=MuteBackend).run()


async def test_an_aborted_trajectory_is_cancelled_not_trained_on():
    class Impatient(ScriptedBackend):
        async def wait_for_turn(self, request_id):
            await stage.client.abort(request_id)

    stage = Stage(["hi there"], backend=Impatient)
    with pytest.raises(AbortedError):
        await stage.run()


replies = st.sampled_from(
    [
        ASK,
        ASK * 3,
        "<call>add not json</call>",
        '<call>add {"a": "x"}</call>',
        "<call>sub {}</call>",
        "answer",
        "a b c d e",
    ]
)


@settings(max_examples=examples(60))
@given(
    st.lists(replies, min_size=1, max_size=6),
    st.integers(1, 40),
    st.integers(1, 4),
    st.integers(0, 4),
    st.integers(1, 2),
    st.integers(1, 12),
)
async def test_whatever_is_sampled_budgets_hold_and_ids_are_exact(
    script, response, turns, user_turns, parallel, result
):
    limits = {
        "max_response_length": response,
        "max_assistant_turns": turns,
        "max_user_turns": user_turns,
        "max_parallel_calls": parallel,
        "max_tool_response_length": result,
    }
    stage = Stage(script, **limits)
    trajectory = await stage.run()
    assert_token_exact(trajectory, stage.backend.requests)
    assert len(trajectory.response_ids) <= response
    assert trajectory.num_turns <= turns
    assert sum(bool(turn.appended_ids) for turn in trajectory.turns) <= user_turns
    assert trajectory.turns[-1].appended_ids == ()
    assert all(len(stage.codec.encode_text(c.observation)) <= result for c in trajectory.tool_calls)
    if trajectory.finish_reason is FinishReason.ANSWER:
        assert trajectory.response_ids[-1] == EOS
    assert trajectory.metrics["tool_calls"] == len(trajectory.tool_calls)
    json.dumps(trajectory.messages)
