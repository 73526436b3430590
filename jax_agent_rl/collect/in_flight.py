"""What a group's trajectories have sampled, in a checkpoint: a resumed run continues them instead of starting again.

Otherwise a kill would cost the long ones more often than the short ones, and the rest would be biased. Members that
have ended are kept whole, running ones up to their newest id, as far as agent and engine allow
(:meth:`~jax_agent_rl.agents.loop.AgentLoop.can_resume`, :meth:`~jax_agent_rl.agents.episode.Episode.progress`). Others
start again under the same id, so with the same seed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from pydantic import TypeAdapter

from jax_agent_rl.agents.context import Prefix
from jax_agent_rl.types import DropReason, Trajectory

_PREFIX, _TRAJECTORY = TypeAdapter(Prefix), TypeAdapter(Trajectory)


@dataclass(kw_only=True)
class GroupRecord:
    """The members of a group by number.

    Attributes:
        ended: scored trajectories, and why others were dropped.
        begun: what an earlier process had sampled of others.
        running: for those that run, returns what they have sampled; None: they have to start again.
    """

    ended: dict[int, Trajectory | DropReason] = field(default_factory=dict)
    begun: dict[int, Prefix] = field(default_factory=dict)
    running: dict[int, Callable[[], Prefix | None]] = field(default_factory=dict)

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint, as JSON."""
        progress = {number: prefix for number, now in self.running.items() if (prefix := now()) is not None}
        ended = {n: t for n, t in self.ended.items() if isinstance(t, Trajectory) and _is_plain(t)}
        dropped = {n: str(reason) for n, reason in self.ended.items() if isinstance(reason, DropReason)}
        begun = {number: prefix for number, prefix in self.begun.items() if number not in self.running} | progress
        return {
            "ended": {str(n): _TRAJECTORY.dump_python(replace(t, row={}), mode="json") for n, t in ended.items()},
            "begun": {str(n): _PREFIX.dump_python(prefix, mode="json") for n, prefix in begun.items()},
            "dropped": {str(n): reason for n, reason in dropped.items()},
        }

    @classmethod
    def restore(cls, state: Mapping[str, Any]) -> GroupRecord:
        """Return the record with this :meth:`state`."""
        ended = {int(number): _TRAJECTORY.validate_python(member) for number, member in state["ended"].items()}
        dropped = {int(number): DropReason(reason) for number, reason in state["dropped"].items()}
        begun = {int(number): _PREFIX.validate_python(prefix) for number, prefix in state["begun"].items()}
        return cls(ended=ended | dropped, begun=begun)


def continued(state: Mapping[str, Any]) -> list[int]:
    """Return the numbers of the members that a resumed run continues from a :meth:`GroupRecord.state`."""
    return [int(number) for number in (*state["ended"], *state["begun"])]


def _is_plain(trajectory: Trajectory) -> bool:
    """Return whether JSON can hold a trajectory, and it is its episode's only one."""
    outputs = [turn.output for turn in trajectory.turns]
    media = trajectory.multi_modal or any(call.media for call in trajectory.tool_calls)
    routed = any(output.routed_experts for output in outputs)
    return trajectory.role is None and not media and not routed and not trajectory.segments
