"""A run whose rewards all fail ends with a message; parts of rewards become metrics."""

import asyncio
from dataclasses import replace
from pathlib import Path

from jax_agent_rl.errors import NothingToTrainError, RewardTimeoutError
from jax_agent_rl.observe.run_dir import read_records
from jax_agent_rl.types import DropReason
from tests.fake_training import make_trainer
from tests.messages import raises


async def hangs(trajectory):
    """Hang in training; a lost evaluation would count as a lost batch."""
    if trajectory.trajectory_id.startswith("heldout-"):
        return replace(trajectory, reward=0.0)
    raise RewardTimeoutError(
        "the reward function of 'mine' did not return within reward.timeout=60 seconds"
    )


async def test_rewards_that_fail_for_whole_batches_stop_the_run_with_a_message(tmp_path: Path):
    training = make_trainer(tmp_path, steps=1000, score=hangs)
    collector = training.runtime.collector
    with raises(NothingToTrainError, key=("reward_timeout 2", "reward.timeout"), value=60):
        async with asyncio.timeout(60):
            await training.run()
    assert collector.accounting.dropped == {DropReason.REWARD_TIMEOUT: 4}, "two batches of two"
    assert training.record.step == 1, (
        "the batch before the last is a step, recorded without an update"
    )
    collector.accounting.check()


async def test_a_batch_that_is_half_lost_goes_on(tmp_path: Path):
    async def fails_for_one(trajectory):
        if trajectory.trajectory_id.endswith("-0"):
            return await hangs(trajectory)
        return replace(trajectory, reward=1.0)

    training = make_trainer(tmp_path, steps=5, score=fails_for_one)
    await training.run()
    assert training.record.step == 5


async def test_named_parts_and_the_sums_of_tools_and_turns_are_metrics_of_the_step(tmp_path: Path):
    async def parts(trajectory):
        reward = float(trajectory.trajectory_id.endswith("-1"))
        metrics = {**trajectory.metrics, "tool_reward": -0.5, "turn_score": 2 * reward}
        return replace(trajectory, reward=reward, reward_parts={"format": reward}, metrics=metrics)

    training = make_trainer(tmp_path, steps=1, score=parts)
    await training.run()
    (step,) = [r for r in read_records(tmp_path / "metrics.jsonl") if r["kind"] == "step"]
    assert {key: value for key, value in step.items() if key.startswith("reward/")} == {
        "reward/format": 0.5,
        "reward/tool_reward": -0.5,
        "reward/turn_score": 1.0,
    }
