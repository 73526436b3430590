"""Whether a trajectory is what its weights, seeds and context give: everything is computed again."""

from __future__ import annotations

from collections.abc import Iterator

from jax_agent_rl.agents import derive_seed
from jax_agent_rl.testing.chaos.policy import context_key, hash_policy
from jax_agent_rl.types import Trajectory


def problems(trajectory: Trajectory, *, seed: int) -> Iterator[str]:
    """What is wrong with it, in words; nothing if every token is exact.

    Args:
        trajectory: its id ends with step, index and number, by which the collector seeded it.
        seed: the run's.
    """
    name = trajectory.trajectory_id
    label, *numbers = name.rsplit("-", 3)
    own_seed = derive_seed(seed, label, *map(int, numbers))
    key, position = context_key(trajectory.prompt_ids), len(trajectory.prompt_ids)
    ids: list[int] = []
    sampled: list[tuple[int, int, float, int]] = []  # place in the response, id, log-prob, version
    for number, turn in enumerate(trajectory.turns):
        output, turn_seed = turn.output, derive_seed(own_seed, number)
        for token, log_prob, version in zip(output.token_ids, output.log_probs, output.policy_versions, strict=True):
            expected = hash_policy(seed, version).sample(key, seed=turn_seed, position=position + len(ids))
            if expected != (token, log_prob):
                yield f"{name}: id {len(ids)} is {token, log_prob}; version {version} gives {expected}"
            sampled.append((len(ids), token, log_prob, version))
            ids.append(token)
            key = context_key([token], key)
        ids += turn.appended_ids
        key = context_key(turn.appended_ids, key)
        acted = max((call.reward for call in turn.tool_calls), default=0.0)
        if acted > number + 1:
            yield f"{name}: its tool acted {acted:g} times in {number + 1} turns"
    columns = (trajectory.response_mask, trajectory.rollout_logprobs, trajectory.policy_versions)
    flat = enumerate(zip(trajectory.response_ids, *columns, strict=True))
    if list(trajectory.response_ids) != ids or sampled != [(i, t, lp, v) for i, (t, m, lp, v) in flat if m]:
        yield f"{name}: what the learner reads is not what its turns hold"
