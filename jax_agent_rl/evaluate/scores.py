"""Groups of trajectories to the numbers of an evaluation, by data source."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jax_agent_rl.evaluate.estimates import estimate, pass_at_k
from jax_agent_rl.types import Group

ALL = "all"


def scores(
    groups: Sequence[Group],
    sources: Sequence[str],
    *,
    samples: int,
    ks: Sequence[int],
    pass_reward: float,
    seed: int,
) -> dict[str, dict[str, Any]]:
    """By data source, and over everything as ``all`` if there are several.

    Args:
        groups: one per prompt.
        sources: the data source of each.
        samples: trajectories started per prompt. Those that were lost count, with reward 0, as failures: to leave them
            out would flatter a policy that breaks what it uses.
        ks: of pass@k.
        pass_reward: the least reward of a trajectory that passes.
        seed: of the resampling.
    """
    names = sorted(set(sources))
    parts = {name: [g for g, source in zip(groups, sources, strict=True) if source == name] for name in names}
    if len(parts) > 1:
        parts[ALL] = list(groups)
    return {
        name: _scores(part, samples=samples, ks=ks, pass_reward=pass_reward, seed=seed) for name, part in parts.items()
    }


def _scores(
    groups: Sequence[Group], *, samples: int, ks: Sequence[int], pass_reward: float, seed: int
) -> dict[str, Any]:
    members = [t for g in groups for t in g.trajectories]
    calls = [call for t in members for call in t.tool_calls]
    lost = sum((Counter({str(r): c for r, c in g.dropped.items()}) for g in groups), Counter())
    passed = [sum(reward >= pass_reward for reward in g.rewards) for g in groups]
    rewards = estimate([sum(g.rewards) / samples for g in groups], seed=seed)
    return {
        "prompts": len(groups),
        "samples": samples * len(groups),
        "lost": dict(lost),
        "reward": vars(rewards),
        "pass": {
            str(k): vars(estimate([pass_at_k(samples, count, k) for count in passed], seed=seed, share=True))
            for k in ks
        },
        "reward_parts": _part_means([t.reward_parts for t in members]),
        "turns_mean": _mean([t.num_turns for t in members]),
        "response_tokens_mean": _mean([len(t.response_ids) for t in members]),
        "tool_calls_mean": _mean([len(t.tool_calls) for t in members]),
        "tool_error_share": _mean([call.error is not None for call in calls]),
        "cut_share": _mean([t.finish_reason.truncated for t in members]),
    }


def _part_means(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Each named part of the reward, over the trajectories that have it."""
    names = sorted({name for part in parts for name in part})
    return {name: _mean([part[name] for part in parts if name in part]) for name in names}


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if values else 0.0
