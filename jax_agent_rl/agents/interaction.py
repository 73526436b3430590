"""A conversation with a simulated user; tools may be called in between.

::

      ┌─► generate ──► calls? ──yes──► run them, append the results ─┐
      │                  │ no                                        │
      │                  ▼                                           │
      │            the user replies, scores the turn ── over ────────┼──► USER_DONE
      │                  │                                           │
      └──────── append the reply, if a turn is left ◄────────────────┘
                         └ no turn left: ANSWER · no room: RESPONSE_LENGTH
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jax_agent_rl.agents.episode import Episode
from jax_agent_rl.agents.loop import register_agent
from jax_agent_rl.agents.tool_agent import ToolAgent, tool_session
from jax_agent_rl.environments.users import InteractionSession
from jax_agent_rl.errors import InteractionError
from jax_agent_rl.tools.base import is_number
from jax_agent_rl.tools.registry import schemas_of
from jax_agent_rl.tracing import span
from jax_agent_rl.types import FinishReason, SamplingParams, Trajectory


@register_agent("interaction_agent")
class InteractionAgent(ToolAgent):
    """The row's ``extra_info.interaction_kwargs`` names the user and says what it knows."""

    async def run(
        self, row: Mapping[str, Any], *, trajectory_id: str, group_id: str, sampling: SamplingParams
    ) -> Trajectory:
        tools = self._tools_of(row)
        episode = self.start(row, trajectory_id=trajectory_id, group_id=group_id, sampling=sampling, tools=tools)
        modalities = self.context.modalities
        async with (
            self._user(row, trajectory_id) as user,
            tool_session(self.context, tools, row, trajectory_id, modalities=modalities) as session,
        ):

            async def answered(episode: Episode, limit: FinishReason | None) -> FinishReason | None:
                return await _hear(episode, user, limit)

            reason = await self._converse(episode, session, schemas_of(tools), answered)
            scores = await session.calc_rewards()
        episode.add_metrics(session.metrics)
        return episode.finish(reason, tool_scores=scores)

    def _user(self, row: Mapping[str, Any], trajectory_id: str) -> InteractionSession:
        users = self.context.interactions
        kwargs = dict((row.get("extra_info") or {}).get("interaction_kwargs") or {})
        name = kwargs.pop("name", None)
        if name is None and len(users) == 1:
            (name,) = users
        if not isinstance(name, str) or name not in users:
            raise InteractionError(
                f"extra_info.interaction_kwargs.name={name!r} is not an interaction; there are {sorted(users)} "
                "(interactions.interaction_config_path)"
            )
        return InteractionSession(
            users[name], name=name, instance_id=trajectory_id, kwargs=kwargs, timeout=users.timeout
        )


async def _hear(episode: Episode, user: InteractionSession, limit: FinishReason | None) -> FinishReason | None:
    """Add the user's reply to the last turn; every turn is scored, also the last one.

    Args:
        limit: the limit of turns that allows no further one, if there is one: it cuts off a user with more to say.

    Returns:
        why the trajectory ends here; None if it goes on.
    """
    with span("tool", "user") as traced:
        if traced:
            traced.set(arguments={"reply": episode.messages[-1]["content"]})
        reply = await user.reply(episode.messages)
        if traced:
            traced.set(observation=reply.text)
    episode.add_score(reply.score)
    numbers = {key: float(value) for key, value in reply.metadata.items() if is_number(value)}
    episode.add_metrics({f"interaction/{key}": value for key, value in numbers.items()} | {"interaction_turns": 1})
    if reply.terminate:
        return FinishReason.USER_DONE
    if limit is not None:
        return limit
    if not episode.append([{"role": "user", "content": reply.text}]):
        return FinishReason.RESPONSE_LENGTH
    return None
