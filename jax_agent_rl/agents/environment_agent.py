"""The model lives in an environment until that says the episode is over, or a limit ends it.

::

    lease ─► reset ─► row's prompt + first observation
      ┌─► generate ──cut──────────────────────────────────────► RESPONSE_LENGTH
      │      │
      │     step ──done───────────────────────────────────────► ENVIRONMENT_DONE
      │      │  ──turn limit reached──────────────────────────► MAX_ASSISTANT_TURNS, MAX_USER_TURNS
      └─── append the observation, if it fits ──no────────────► RESPONSE_LENGTH
                                                     conclude: the last word on the score
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jax_agent_rl.agents.episode import Episode
from jax_agent_rl.agents.loop import register_agent
from jax_agent_rl.agents.turn_loop import Responder, StartEpisode, TurnLoopAgent, run_turns
from jax_agent_rl.environments import LeasedEnvironment, environment_of
from jax_agent_rl.tracing import span
from jax_agent_rl.types import FinishReason, StopReason, TokenOutput, Trajectory


@dataclass
class EnvironmentResponder(Responder):
    """Steps the environment with each reply, also the one at a turn limit, so that its score counts."""

    environment: LeasedEnvironment

    async def respond(self, episode: Episode, output: TokenOutput, limit: FinishReason | None) -> FinishReason | None:
        if output.stop_reason is StopReason.LENGTH:
            return FinishReason.RESPONSE_LENGTH
        began = time.perf_counter()
        with span("tool", "environment") as traced:
            if traced:
                traced.set(arguments={"reply": episode.messages[-1]["content"]})
            observation = await self.environment.step(self.context.codec.parse_reply(output.token_ids))
            calls = observation.tool_calls
            if traced:
                shown = "\n".join(message["content"] for message in observation.messages)
                traced.set(observation=shown, tool_error=next((call.error for call in calls if call.error), None))
        episode.add_metrics({"environment_seconds": time.perf_counter() - began, **observation.metrics})
        episode.record_calls(calls, seconds=sum(call.seconds for call in calls))
        episode.add_score(observation.score)
        if observation.done:
            return FinishReason.ENVIRONMENT_DONE
        if limit is not None:
            return limit
        messages = [{**message, "content": self.shorten(message["content"])} for message in observation.messages]
        return None if episode.append(messages) else FinishReason.RESPONSE_LENGTH


@register_agent("environment_agent")
class EnvironmentAgent(TurnLoopAgent):
    """Multi-turn in the environment named by ``extra_info.environment_kwargs``.

    Observations are shortened as tool results are (``agent.max_tool_response_length``), and count as user turns.
    """

    async def play(self, start: StartEpisode, row: Mapping[str, Any], trajectory_id: str) -> Trajectory:
        name, kwargs = environment_of(row)
        async with self.context.environments.pool(name).lease() as environment:
            opening = await environment.reset(**kwargs)
            episode = start(opening=opening.messages, tool_schemas=environment.tool_schemas)
            episode.add_metrics(opening.metrics)
            reason = await run_turns(episode, EnvironmentResponder(self.context, environment))
            outcome = await environment.conclude(tuple(episode.messages), reason)
        episode.add_score(outcome.get("score", 0.0))
        episode.add_metrics({key: value for key, value in outcome.items() if key != "score"})
        return episode.finish(reason)
