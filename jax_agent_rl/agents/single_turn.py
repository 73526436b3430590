"""One prompt, one answer, no tools."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jax_agent_rl.agents.episode import Episode
from jax_agent_rl.agents.loop import AgentLoop, register_agent
from jax_agent_rl.types import FinishReason, Fork, SamplingParams, StopReason, Trajectory


@register_agent("single_turn_agent")
class SingleTurnAgent(AgentLoop):
    """Samples once."""

    async def run(
        self, row: Mapping[str, Any], *, trajectory_id: str, group_id: str, sampling: SamplingParams
    ) -> Trajectory:
        episode = self.start(row, trajectory_id=trajectory_id, group_id=group_id, sampling=sampling)
        return await self._sample(episode)

    async def branch(
        self, parent: Trajectory, fork: Fork, *, trajectory_id: str, sampling: SamplingParams
    ) -> Trajectory:
        return await self._sample(self.resume(parent, fork, trajectory_id=trajectory_id, sampling=sampling))

    async def _sample(self, episode: Episode) -> Trajectory:
        output = await episode.generate(session_ends=True)
        cut = output.stop_reason is StopReason.LENGTH
        return episode.finish(FinishReason.RESPONSE_LENGTH if cut else FinishReason.ANSWER)
