"""A history window: each turn is sampled after the prompt and a few turns, and trained on in
exactly that context.
"""

import re
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from jax_agent_rl.agents import ToolAgent
from jax_agent_rl.config import build
from jax_agent_rl.config.algorithm import AlgorithmConfig
from jax_agent_rl.errors import ConfigError
from jax_agent_rl.learner.advantages.registry import compute_advantages
from jax_agent_rl.learner.advantages.scored_batch import scored_batch
from jax_agent_rl.learner.packing import pack
from jax_agent_rl.tools import ToolRegistry, function_tool
from jax_agent_rl.types import FinishReason, Trajectory
from tests.agent_testbed import AgentHarness
from tests.messages import raises
from tests.trajectories import group_of


@function_tool
def echo(word: str) -> str:
    """Says it again."""
    return word


def stage(turns: int, window: int | None, **limits) -> AgentHarness:
    said = [f'<call>echo {{"word": "w{number}"}}</call>' for number in range(turns - 1)]
    limits = {"max_assistant_turns": 20, "max_user_turns": 20, "history_window": window, **limits}
    return AgentHarness(
        ToolAgent, [*said, "done"], shared={"tools": ToolRegistry([echo])}, **limits
    )


@given(turns=st.integers(1, 7), window=st.integers(1, 7))
async def test_every_sampled_id_is_trained_on_once_in_the_context_it_was_sampled_in(
    turns: int, window: int
):
    scene = stage(turns, window)
    trajectory = await scene.run()
    assert trajectory.num_turns == turns
    contexts = []
    for sequence in trajectory.sequences:
        context = sequence.prompt_ids
        for turn in sequence.turns:
            contexts.append((context, turn.output))
            context += turn.output.token_ids + turn.appended_ids
    asked = [request.prompt_ids for request in scene.backend.requests]
    assert contexts == list(zip(asked, (turn.output for turn in trajectory.turns), strict=True))
    assert len(trajectory.sequences) == max(1, turns - window)


async def test_a_turn_sees_the_prompt_and_the_window():
    scene = stage(4, 1)
    trajectory = await scene.run()
    seen = [
        scene.codec.decode(r.prompt_ids, skip_special_tokens=True) for r in scene.backend.requests
    ]
    assert all(text.startswith("user: what is 1 + 2 ?") for text in seen)
    assert [re.findall(r'"w(\d)"', text) for text in seen] == [[], ["0"], ["1"], ["2"]]
    assert [m["role"] for m in trajectory.messages] == [
        "user",
        *["assistant", "tool"] * 3,
        "assistant",
    ]


async def test_without_a_window_the_trajectory_is_one_sequence():
    trajectory = await stage(5, None).run()
    assert trajectory.sequences == (trajectory,)


async def test_a_window_lets_an_episode_outlast_the_models_context():
    short = {"engine_len": 40, "max_response_length": 400}
    cut = await stage(12, None, **short).run()
    assert cut.finish_reason is FinishReason.RESPONSE_LENGTH
    trajectory = await stage(12, 1, **short).run()
    assert trajectory.finish_reason is FinishReason.ANSWER
    assert trajectory.num_turns == 12
    assert all(len(s.prompt_ids) + len(s.response_ids) <= 40 for s in trajectory.sequences)


async def test_the_advantage_of_a_trajectory_is_that_of_all_its_samples():
    members = []
    for index, reward in enumerate((1.0, 0.0)):
        members.append(replace(await stage(4, 1).run(trajectory_id=f"g-{index}"), reward=reward))
    samples = scored_batch([group_of(members)], turn_reward="none")
    good, bad = compute_advantages(samples, AlgorithmConfig(adv_estimator="dr_grpo")).advantages
    mask = np.concatenate([s.response_mask for s in members[0].sequences])
    np.testing.assert_allclose(good, 0.5 * mask)
    np.testing.assert_allclose(bad, -0.5 * mask)
    batch = pack(members, pack_length=200)
    assert batch.num_tokens == sum(
        len(s.prompt_ids) + len(s.response_ids) for t in members for s in t.sequences
    )
    assert [len(packed_sequences) for packed_sequences in batch.packed] == [3, 3]


async def test_gigpo_compares_observations_not_windows():
    """Hiding turns changes no advantage: what a turn observed is the last tool result, whatever
    else it saw.
    """
    members = [
        replace(await stage(turns, 1).run(trajectory_id=f"g-{turns}"), reward=float(turns))
        for turns in (3, 4, 5)
    ]
    without_window = [replace(t, history_window=None) for t in members]
    windowed = gigpo_advantages(members)
    plain = gigpo_advantages(without_window)
    for windowed_values, plain_values in zip(windowed, plain, strict=True):
        np.testing.assert_allclose(windowed_values, plain_values)


def gigpo_advantages(members: Sequence[Trajectory]) -> list[np.ndarray]:
    """Return each trajectory's advantages where it was sampled."""
    samples = scored_batch([group_of(members)], turn_reward="none")
    config = AlgorithmConfig(adv_estimator="gigpo")
    advantages = compute_advantages(samples, config).advantages
    return [values[mask] for values, mask in zip(advantages, samples.masks, strict=True)]


def test_a_response_may_be_longer_than_the_engines_context():
    overrides = ["agent.history_window=2", "agent.max_response_length=4000"]
    tree = {"run_dir": "r", "model": {"path": "m"}, "data": {"train": "t"}}
    assert build(tree, overrides).agent.max_response_length == 4000
    with raises(ConfigError, key="rollout.strategy.name", value="treerl"):
        build(tree, [*overrides, "rollout.strategy.name=treerl", "rollout.group_size=30"])
