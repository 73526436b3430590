"""What a traced trajectory shows: where its time went, in every trainer mode."""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from jax_agent_rl.agents import AgentContext
from jax_agent_rl.collect.collector import RolloutCollector
from jax_agent_rl.config import AgentConfig
from jax_agent_rl.rollout.client import LLMServerClient
from jax_agent_rl.rollout.server import AsyncServer
from jax_agent_rl.tools.function_tool import function_tool
from jax_agent_rl.tools.registry import ToolRegistry
from jax_agent_rl.tracing import Tracer
from jax_agent_rl.types import SamplingParams
from tests.fake_training import finish, make_trainer
from tests.fakes import FakeCodec, ScriptedBackend


@function_tool
def add(a: int, b: int) -> str:
    """Adds.

    Args:
        a: One number.
        b: Another.
    """
    return str(a + b)


async def scored(trajectory):
    return replace(trajectory, reward=0.5, reward_parts={"format": 1.0})


async def collect(traces, *, score=scored, agent="tool_agent", max_in_flight=8, group_size=1):
    codec = FakeCodec()
    script = ['<call>add {"a": 1, "b": 2}</call>', "3"]
    context = AgentContext(
        client=LLMServerClient(
            [AsyncServer(ScriptedBackend(codec, script))],
            decode_text=lambda ids: codec.decode(ids, skip_special_tokens=False),
        ),
        codec=codec,
        limits=AgentConfig(tool_prompt="none"),
        max_model_len=1000,
        tools=ToolRegistry([add]),
    )
    collector = RolloutCollector(
        context,
        score=score,
        max_in_flight=max_in_flight,
        seed=0,
        tracer=Tracer(traces.append, max_per_step=8),
        validate=True,
    )
    row = {
        "prompt": [{"role": "user", "content": "1 + 2 ?"}],
        "agent_name": agent,
        "data_source": "sums",
    }
    return await collector.collect(
        [row], group_size=group_size, sampling=SamplingParams(max_tokens=50), step=4
    )


async def test_a_trajectory_is_generations_tools_and_a_reward():
    traces = []
    await collect(traces)
    (trace,) = traces
    assert (trace.trajectory_id, trace.step, trace.sample, trace.rollout, trace.validate) == (
        "train-4-0-0",
        4,
        0,
        0,
        True,
    )
    run, *spans = [s for s in trace.spans if s.name != "wait"]
    assert [(s.name, s.about) for s in spans] == [
        ("generate", ""),
        ("tool", "add"),
        ("generate", ""),
        ("reward", "sums"),
    ]
    first, tool, _, reward = (s.attributes for s in spans)
    assert first["stop_reason"] == "eos"
    assert first["policy_versions"] == [0]
    assert "<call>add" in first["text"]
    assert tool["arguments"] == {"a": 1, "b": 2}
    assert tool["observation"] == "3"
    assert tool["tool_error"] is None
    assert reward == {"reward": 0.5, "reward_parts": {"format": 1.0}}
    assert run.attributes["finish_reason"] == "answer"
    assert run.attributes["reward"] == 0.5
    assert [m["role"] for m in run.attributes["messages"]] == [
        "user",
        "assistant",
        "tool",
        "assistant",
    ]


async def test_a_lost_trajectory_says_why():
    async def fails(trajectory):
        raise ValueError("no score")

    traces = []
    await collect(traces, score=fails)
    assert traces[0].spans[0].attributes == {"dropped": "agent_error"}
    (reward,) = [s for s in traces[0].spans if s.name == "reward"]
    assert reward.error == "ValueError: no score"


@pytest.mark.parametrize("mode", ["sync", "one_step_off", "fully_async"])
async def test_every_trainer_mode_is_traced(tmp_path: Path, mode: str):
    traces = []
    tracer = Tracer(traces.append, max_per_step=2)
    training = make_trainer(
        tmp_path, steps=3, trainer={"mode": mode}, prompts_per_step=2, rows=3, tracer=tracer
    )
    await finish(training)
    traced = Counter((trace.step, trace.validate) for trace in traces)
    first = 1 if mode == "sync" else 0
    assert traced == {**{(first + n, False): 2 for n in range(3)}, (0, True): 1, (3, True): 1}
    assert all({"run", "generate", "reward"} <= {s.name for s in trace.spans} for trace in traces)
