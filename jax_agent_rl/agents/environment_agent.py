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
from collections.abc import Mapping, Sequence
from typing import Any

from jax_agent_rl.agents.episode import Episode
from jax_agent_rl.agents.loop import AgentLoop, register_agent
from jax_agent_rl.environments import LeasedEnvironment, Observation, environment_of
from jax_agent_rl.tools.truncate import truncate_text
from jax_agent_rl.tracing import span
from jax_agent_rl.types import FinishReason, SamplingParams, StopReason, Trajectory


@register_agent("environment_agent")
class EnvironmentAgent(AgentLoop):
    """Multi-turn in the environment named by ``extra_info.environment_kwargs``.

    Every reply reaches the environment, also the one at a turn limit, so its score counts. Observations are shortened
    as tool results are (``agent.max_tool_response_length``), and count as user turns.
    """

    async def run(
        self, row: Mapping[str, Any], *, trajectory_id: str, group_id: str, sampling: SamplingParams
    ) -> Trajectory:
        name, kwargs = environment_of(row)
        async with self.context.environments.pool(name).lease() as environment:
            opening = await environment.reset(**kwargs)
            episode = self.start(
                row,
                trajectory_id=trajectory_id,
                group_id=group_id,
                sampling=sampling,
                opening=opening.messages,
                tool_schemas=environment.tool_schemas,
            )
            episode.add_metrics(opening.metrics)
            reason = await self._live(episode, environment)
            outcome = await environment.conclude(tuple(episode.messages), reason)
        episode.add_score(outcome.get("score", 0.0))
        episode.add_metrics({key: value for key, value in outcome.items() if key != "score"})
        return episode.finish(reason)

    async def _live(self, episode: Episode, environment: LeasedEnvironment) -> FinishReason:
        limits = self.context.limits
        while True:
            turns = len(episode.turns) + 1
            out_of_turns, out_of_user_turns = turns >= limits.max_assistant_turns, turns > limits.max_user_turns
            output = await episode.generate(session_ends=out_of_turns or out_of_user_turns)
            if output.stop_reason is StopReason.LENGTH:
                return FinishReason.RESPONSE_LENGTH
            began = time.perf_counter()
            with span("tool", "environment") as traced:
                if traced:
                    traced.set(arguments={"reply": episode.messages[-1]["content"]})
                observation = await environment.step(self.context.codec.parse_reply(output.token_ids))
                if traced:
                    traced.set(**_seen(observation))
            episode.add_metrics({"environment_seconds": time.perf_counter() - began, **observation.metrics})
            episode.record_calls(observation.tool_calls, seconds=sum(call.seconds for call in observation.tool_calls))
            episode.add_score(observation.score)
            if observation.done:
                return FinishReason.ENVIRONMENT_DONE
            if out_of_turns:
                return FinishReason.MAX_ASSISTANT_TURNS
            if out_of_user_turns:
                return FinishReason.MAX_USER_TURNS
            if not episode.append(self._shortened(observation.messages)):
                return FinishReason.RESPONSE_LENGTH

    def _shortened(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        limits, codec = self.context.limits, self.context.codec
        return [
            {
                **message,
                "content": truncate_text(
                    message["content"],
                    limits.max_tool_response_length,
                    limits.tool_response_truncate_side,
                    encode=codec.encode_text,
                    decode=codec.decode,
                ),
            }
            for message in messages
        ]


def _seen(observation: Observation) -> dict[str, Any]:
    """What the trace of a step says about its outcome; of calls the environment ran itself, the first error."""
    return {
        "observation": "\n".join(message["content"] for message in observation.messages),
        "tool_error": next((call.error for call in observation.tool_calls if call.error), None),
    }
