"""A group while its trajectories run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jax_agent_rl.collect.in_flight import GroupRecord
from jax_agent_rl.collect.strategies import Outcome
from jax_agent_rl.types import DropReason, SamplingParams, Trajectory


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """Settings shared by the trajectories of one group."""

    group_id: str
    row: Mapping[str, Any]
    group_size: int
    sampling: SamplingParams
    seed_parts: tuple[int | str, ...]


@dataclass(kw_only=True, slots=True)
class OpenGroup:
    """A group while its trajectories run."""

    plan: Plan
    waves: list[list[Outcome]] = field(default_factory=list)
    started: set[str] = field(default_factory=set)
    dropped: Counter[DropReason] = field(default_factory=Counter)
    frozen: list[Trajectory] = field(default_factory=list)
    record: GroupRecord = field(default_factory=GroupRecord)

    @property
    def outcomes(self) -> list[Outcome]:
        return [outcome for wave in self.waves for outcome in wave]

    def survivor(self, trajectory_id: str) -> Trajectory:
        """Return a surviving member."""
        found = (o.trajectory for o in self.outcomes if o.trajectory_id == trajectory_id and o.trajectory)
        return next(found)


def trace_fields(result: Sequence[Trajectory] | DropReason) -> dict[str, Any]:
    """Return what the trace of a trajectory shows of its end; of several roles, the first and every reward."""
    if isinstance(result, DropReason):
        return {"dropped": str(result)}
    first = result[0]
    return {
        "agent_name": first.agent_name,
        "finish_reason": str(first.finish_reason),
        "reward": first.reward,
        "turns": first.num_turns,
        "sampled_tokens": sum(t.num_sampled for t in result),
        "messages": [{"role": m["role"], "content": m.get("content")} for m in first.messages],
    } | ({"rewards": {str(t.role): t.reward for t in result}} if first.role else {})
