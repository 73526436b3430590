"""A branch computes only what is new: what it took over lies in the JAX engine's cache already."""

import contextlib

from jax_agent_rl.agents import AgentContext
from jax_agent_rl.chat.reply import Reply, ToolCall
from jax_agent_rl.collect.collector import RolloutCollector
from jax_agent_rl.collect.strategies import TreeGrpo, TreeRL
from jax_agent_rl.config import AgentConfig
from jax_agent_rl.config.rollout import TreeGrpoConfig, TreerlConfig
from jax_agent_rl.jetstream.backend import JetStreamBackend
from jax_agent_rl.jetstream.engine import EngineShapes
from jax_agent_rl.rollout.client import LLMServerClient
from jax_agent_rl.rollout.server import AsyncServer
from jax_agent_rl.tools import ToolRegistry, function_tool
from jax_agent_rl.types import SamplingParams
from tests.fakes import FakeCodec
from tests.tiny import TINY, logprobs_of, tiny_params

SHAPES = EngineShapes(
    max_model_len=60,
    max_concurrent_decodes=4,
    kv_cache_tokens=512,
    decode_steps=4,
    prefill_buckets=(4, 16),
)


@function_tool
def look() -> str:
    """Looks."""
    return "a b"


class AlwaysCalls(FakeCodec):
    """Reads a tool call in whatever the random model says."""

    def decode(self, ids, *, skip_special_tokens=True) -> str:
        return " ".join(map(str, ids))

    def parse_reply(self, sampled_ids, tools=(), *, context_ids=None):
        return Reply(tool_calls=(ToolCall(name="look", arguments={}),))


def to_letters(ids) -> str:
    return "".join("abcdefghijklmnopqrstuvwxyz"[i % 26] for i in ids)


@contextlib.asynccontextmanager
async def collector(strategy, **limits):
    backend = JetStreamBackend(
        TINY, tiny_params(), SHAPES, version=1, seed=3, decode_text=to_letters
    )
    await backend.start()
    try:
        context = AgentContext(
            client=LLMServerClient([AsyncServer(backend)]),
            codec=AlwaysCalls(),
            limits=AgentConfig(tool_prompt="none", **limits),
            max_model_len=60,
            tools=ToolRegistry([look]),
        )
        yield (
            backend,
            RolloutCollector(context, score=unscored, max_in_flight=4, seed=0, strategy=strategy),
        )
    finally:
        await backend.close()


async def unscored(trajectory):
    return trajectory


def row(agent: str) -> dict:
    return {"prompt": [{"role": "user", "content": "one two three four"}], "agent_name": agent}


async def test_a_fork_within_a_turn_reuses_all_before_it():
    async with collector(TreeRL(TreerlConfig(m=2, n=2, t=2)), max_response_length=20) as (
        backend,
        collect,
    ):
        sampling = SamplingParams(max_tokens=20, ignore_eos=True)
        (group,) = await collect.collect(
            [row("single_turn_agent")], group_size=10, sampling=sampling, step=0
        )
        metrics = await backend.metrics()
    branches = [t for t in group.trajectories if t.fork]
    assert len(branches) == 8
    assert any(t.num_inherited for t in branches)
    for t in branches:
        reusable = (
            len(t.prompt_ids) + t.num_inherited - 1
        )  # the last id is fed by the first decode step
        assert t.metrics["cached_tokens"] == reusable
        expected = logprobs_of(tiny_params(), t.prompt_ids, t.response_ids)
        assert abs(expected - t.rollout_logprobs).max() < 2e-5
    assert metrics.generated_tokens == sum(
        t.num_sampled - t.num_inherited for t in group.trajectories
    )
    assert metrics.prefill_tokens == len(group.trajectories[0].prompt_ids) - 1, (
        "the prompt was computed once"
    )


async def test_a_branch_at_a_turn_reuses_the_turns_and_tool_results_before_it():
    limits = {"max_assistant_turns": 3, "max_response_length": 40}
    sampling = SamplingParams(max_tokens=40, stop=tuple("abcdef"))  # so that turns end soon
    async with collector(TreeGrpo(TreeGrpoConfig(m=1, n=5, k=6)), **limits) as (_, collect):
        (group,) = await collect.collect(
            [row("tool_agent")], group_size=6, sampling=sampling, step=0
        )
    branches = [t for t in group.trajectories if t.fork and t.fork.turns]
    assert branches
    for t in branches:
        all_ids = t.prompt_ids + t.response_ids
        context = len(t.prompt_ids) + sum(
            len(turn.output.token_ids) + len(turn.appended_ids) for turn in t.turns[: t.fork.turns]
        )
        output = t.turns[t.fork.turns].output
        assert all_ids[context : context + len(output.token_ids)] == output.token_ids
        assert output.cached_tokens == context - 1
