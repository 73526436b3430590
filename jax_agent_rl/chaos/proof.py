"""Whether a trajectory is what its weights, seeds and context give: everything is computed again."""

from __future__ import annotations

from collections.abc import Iterator

from jax_agent_rl.agents import derive_seed
from jax_agent_rl.chaos.policy import context_key, policy_of
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
    context, key = list(trajectory.prompt_ids), context_key(trajectory.prompt_ids)
    mask: list[int] = []
    for turn_number, turn in enumerate(trajectory.turns):
        output, turn_seed = turn.output, derive_seed(own_seed, turn_number)
        for token, log_prob, version in zip(output.token_ids, output.log_probs, output.policy_versions, strict=True):
            expected = policy_of(seed, version).sample(key, seed=turn_seed, position=len(context))
            if expected != (token, log_prob):
                yield f"{name}: id {len(context)} is {token, log_prob}; version {version} gives {expected}"
            context.append(token)
            key = context_key([token], key)
        context += turn.appended_ids
        key = context_key(turn.appended_ids, key)
        mask += [1] * len(output.token_ids) + [0] * len(turn.appended_ids)
        for calls_before, call in enumerate(turn.tool_calls):
            if call.reward > turn_number + calls_before + 1:
                yield f"{name}: its tool acted {call.reward:g} times by turn {turn_number + 1}"
    if context != [*trajectory.prompt_ids, *trajectory.response_ids] or mask != list(trajectory.response_mask):
        yield f"{name}: its ids or its mask are not those of its turns"
