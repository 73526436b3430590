"""Reward functions are called by the names of their parameters."""

import pytest

from jax_agent_rl import rewards
from jax_agent_rl.errors import ConfigError, RewardError
from jax_agent_rl.rewards import registry
from jax_agent_rl.types import (
    FinishReason,
    StopReason,
    TokenOutput,
    ToolCallRecord,
    Trajectory,
    Turn,
)
from tests.messages import raises

ROW = {
    "data_source": "mine",
    "difficulty": "hard",
    "reward_model": {"ground_truth": "9", "style": "rule"},
    "extra_info": {"index": 3, "difficulty": "easy"},
}


@pytest.fixture(autouse=True)
def own_registry(monkeypatch):
    monkeypatch.setattr(registry, "REWARDS", {})


def trajectory(row=ROW):
    output = TokenOutput(
        token_ids=(5,),
        log_probs=(-1.0,),
        policy_versions=(0,),
        stop_reason=StopReason.EOS,
        context_digest="",
    )
    call = ToolCallRecord(name="add", arguments={}, observation="9", reward=0.25)
    return Trajectory.from_turns(
        prompt_ids=[1],
        turns=[
            Turn(output=output, appended_ids=(6,), tool_calls=(call,), score=2.0),
            Turn(output=output, score=-0.5),
        ],
        trajectory_id="t",
        group_id="g",
        agent_name="tool_agent",
        finish_reason=FinishReason.ANSWER,
        row=row,
        messages=(
            {"role": "assistant", "content": "a"},
            {"role": "assistant", "content": "it is 9"},
        ),
    )


async def test_any_field_of_the_row_is_an_argument_and_the_row_itself_comes_first():
    seen = {}

    @rewards.register_reward("mine")
    def compute_score(solution_str, difficulty, index, style, nothing="default"):
        seen.update(locals())
        return 1.0

    await rewards.score(trajectory())
    assert seen == {
        "seen": seen,
        "solution_str": "it is 9",
        "difficulty": "hard",
        "index": 3,
        "style": "rule",
        "nothing": "default",
    }


async def test_tool_turn_and_final_rewards_are_separate_and_all_available():
    @rewards.register_reward("mine")
    def compute_score(tool_rewards, turn_scores, num_turns, finish_reason, trajectory, messages):
        assert (num_turns, finish_reason, len(messages)) == (2, "answer", 2)
        assert trajectory.turn_scores == tuple(turn_scores) == (2.0, -0.5)
        return {"score": 10.0, "mixed": 10.0 + sum(tool_rewards) + sum(turn_scores)}

    scored = await rewards.score(trajectory())
    assert scored.reward == 10.0
    assert scored.reward_parts == {"mixed": 11.75}
    assert (scored.metrics["tool_reward"], scored.metrics["turn_score"]) == (0.25, 1.5)


async def test_services_of_the_run_are_arguments():
    async def ask(text):
        return 0.5

    @rewards.register_reward("mine")
    async def compute_score(solution_str, judge):
        return await judge(solution_str)

    assert (await rewards.score(trajectory(), services={"judge": ask})).reward == 0.5
    assert rewards.require_rewards([ROW], services={"judge", "sandbox"}) == {"judge"}


async def test_a_function_with_open_arguments_gets_the_classic_four():
    seen = {}

    @rewards.register_reward("mine")
    def compute_score(index, **kwargs):
        seen.update(kwargs)
        return index

    assert (await rewards.score(trajectory())).reward == 3.0
    assert sorted(seen) == ["data_source", "extra_info", "ground_truth", "solution_str"]


async def test_a_missing_field_is_found_early_and_drops_a_trajectory():
    rewards.register_reward("mine")(lambda solution_str, answer_key: 1.0)
    with raises(ConfigError, key="'mine'", value="'answer_key'"):
        rewards.require_rewards([ROW, {**ROW, "answer_key": "x"}])
    rewards.require_rewards([{**ROW, "answer_key": "x"}])
    with pytest.raises(RewardError, match="asks for 'answer_key'"):
        await rewards.score(trajectory())


def test_a_judge_that_is_not_configured_names_the_key():
    rewards.register_reward("mine")(lambda judge: 1.0)
    with pytest.raises(ConfigError, match="set reward.judge.model"):
        rewards.require_rewards([ROW])
    rewards.require_rewards([ROW], services={"judge"})


async def test_a_pattern_covers_what_has_no_function_of_its_own():
    rewards.register_reward("aime*")(lambda solution_str: 1.0)
    rewards.register_reward("aime_hard")(lambda solution_str: 2.0)
    assert (await rewards.score(trajectory({**ROW, "data_source": "aime2025"}))).reward == 1.0
    assert (await rewards.score(trajectory({**ROW, "data_source": "aime_hard"}))).reward == 2.0
    with pytest.raises(ConfigError, match="'mime'"):
        rewards.require_rewards([{"data_source": "mime"}])


async def test_a_function_is_replaced_only_when_asked():
    rewards.register_reward("mine")(lambda solution_str: 1.0)
    with pytest.raises(ConfigError, match="override=True"):
        rewards.register_reward("mine")(lambda solution_str: 2.0)
    rewards.register_reward("mine", override=True)(lambda solution_str: 2.0)
    assert (await rewards.score(trajectory())).reward == 2.0


async def test_an_object_with_an_async_call_is_a_reward_function():
    class Half:
        async def __call__(self, solution_str):
            return 0.5

    rewards.register_reward("mine")(Half())
    assert (await rewards.score(trajectory())).reward == 0.5
