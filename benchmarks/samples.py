"""Trajectories of given ids, for benchmarks of the learner."""

from __future__ import annotations

from collections.abc import Sequence

from jax_agent_rl.types import FinishReason, StopReason, TokenOutput, Trajectory, Turn


def sample(prompt: Sequence[int], ids: Sequence[int], *, group: str, index: int) -> Trajectory:
    """Member ``index`` of a group, in which every second one is rewarded: a prompt and sampled ids, all trained on."""
    output = TokenOutput(
        token_ids=tuple(ids),
        log_probs=(-1.0,) * len(ids),
        policy_versions=(0,) * len(ids),
        stop_reason=StopReason.EOS,
        context_digest="",
    )
    return Trajectory.from_turns(
        prompt_ids=prompt,
        turns=[Turn(output=output)],
        trajectory_id=f"{group}-{index}",
        group_id=group,
        agent_name="benchmark",
        finish_reason=FinishReason.ANSWER,
        reward=float(index % 2),
    )
