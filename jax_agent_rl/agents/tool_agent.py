"""The model calls tools until it answers, or a limit ends it.

::

      ┌─► generate ──► calls? ──no──────────────────────────► ANSWER
      │      │           │
      │      │ cut       │ yes, but a turn limit is reached ─► MAX_ASSISTANT_TURNS, MAX_USER_TURNS
      │      ▼           ▼
      │  RESPONSE_     run them, at most max_parallel_calls at once
      │  LENGTH          │
      └─────── append observations, if they fit ──no────────► RESPONSE_LENGTH
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from jax_agent_rl.agents.context import AgentContext
from jax_agent_rl.agents.episode import Episode
from jax_agent_rl.agents.loop import AgentLoop, register_agent
from jax_agent_rl.agents.replay import replay
from jax_agent_rl.tools.base import BaseTool
from jax_agent_rl.tools.registry import schemas_of
from jax_agent_rl.tools.session import ToolSession
from jax_agent_rl.types import FinishReason, Fork, SamplingParams, StopReason, ToolCallRecord, Trajectory, join_media

if TYPE_CHECKING:
    from jax_agent_rl.chat.codec import Reply

Answered = Callable[[Episode, FinishReason | None], Awaitable[FinishReason | None]]
"""Called after a turn without calls, with the limit that allows no further one (None: there is none); None goes on."""


@register_agent("tool_agent")
class ToolAgent(AgentLoop):
    """Multi-turn with tools; the limits are those of :class:`~jax_agent_rl.config.AgentConfig`."""

    async def run(
        self, row: Mapping[str, Any], *, trajectory_id: str, group_id: str, sampling: SamplingParams
    ) -> Trajectory:
        tools = self._tools_of(row)
        episode = self.start(row, trajectory_id=trajectory_id, group_id=group_id, sampling=sampling, tools=tools)
        return await self._play(episode, tools, row, trajectory_id)

    async def branch(
        self, parent: Trajectory, fork: Fork, *, trajectory_id: str, sampling: SamplingParams
    ) -> Trajectory:
        tools = self._tools_of(parent.row)
        episode = self.resume(parent, fork, trajectory_id=trajectory_id, sampling=sampling, tools=tools)
        return await self._play(episode, tools, parent.row, trajectory_id)

    def _tools_of(self, row: Mapping[str, Any]) -> Mapping[str, BaseTool]:
        return self.context.tools.select((row.get("extra_info") or {}).get("tool_selection"))

    async def _play(
        self, episode: Episode, tools: Mapping[str, BaseTool], row: Mapping[str, Any], trajectory_id: str
    ) -> Trajectory:
        """From where the episode stands to its end, in a tool session of its own."""
        modalities = self.context.modalities
        async with tool_session(self.context, tools, row, trajectory_id, modalities=modalities) as session:
            if episode.turns:
                episode.add_metrics(await replay(session, episode.turns))
            reason = await self._converse(episode, session, schemas_of(tools))
            scores = await session.calc_rewards()
        episode.add_metrics(session.metrics)
        return episode.finish(reason, tool_scores=scores)

    async def _converse(
        self,
        episode: Episode,
        session: ToolSession,
        schemas: Sequence[Mapping[str, Any]],
        answered: Answered | None = None,
    ) -> FinishReason:
        """Runs turns until one ends it; ``answered`` says what follows a turn without calls (None: nothing does)."""
        limits = self.context.limits
        user_turns = len(episode.turns)  # those of a branch were all answered
        while True:
            out_of_user_turns = user_turns >= limits.max_user_turns
            out_of_turns = len(episode.turns) + 1 >= limits.max_assistant_turns
            output = await episode.generate(session_ends=out_of_turns or out_of_user_turns)
            if output.stop_reason is StopReason.LENGTH:
                return FinishReason.RESPONSE_LENGTH
            reply = self.context.codec.parse_reply(output.token_ids, tools=schemas)
            if not reply.tool_calls and not reply.malformed:
                limit = FinishReason.MAX_USER_TURNS if out_of_user_turns else None
                limit = FinishReason.MAX_ASSISTANT_TURNS if out_of_turns else limit
                reason = await answered(episode, limit) if answered else FinishReason.ANSWER
                if reason is not None:
                    return reason
                user_turns += 1
                continue
            if out_of_turns:
                return FinishReason.MAX_ASSISTANT_TURNS
            if out_of_user_turns:
                return FinishReason.MAX_USER_TURNS
            began = time.perf_counter()
            calls = await self._run_calls(reply, session)
            episode.record_calls(calls, seconds=time.perf_counter() - began)
            media = join_media(call.media for call in calls)
            if not episode.append(_observations(calls), media=media):
                return FinishReason.RESPONSE_LENGTH
            user_turns += 1

    async def _run_calls(self, reply: Reply, session: ToolSession) -> list[ToolCallRecord]:
        """Runs the calls of one turn side by side; those over the limit and the malformed ones answer with an error."""
        limit = self.context.limits.max_parallel_calls
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(session.call(call.name, call.arguments, call_id=call.id))
                for call in reply.tool_calls[:limit]
            ]
        records = [task.result() for task in tasks]
        for call in reply.tool_calls[limit:]:
            refused = over_the_limit(session, call.name, call.arguments, limit)
            records.append(replace(refused, call_id=call.id))
        for text in reply.malformed:
            self.context.malformed.tell(text)
            records.append(_refused(session, f"Error: Failed to decode tool call: {text:.200}", "malformed"))
        return records


def tool_session(
    context: AgentContext,
    tools: Mapping[str, BaseTool],
    row: Mapping[str, Any],
    trajectory_id: str,
    *,
    modalities: Collection[str] = (),
) -> ToolSession:
    """The tools of one trajectory, under the limits of the ``agent`` section and with the row's own arguments.

    Args:
        modalities: kinds of media the agent can show the model.
    """
    limits, codec = context.limits, context.codec
    return ToolSession(
        tools,
        trajectory_id,
        kwargs=(row.get("extra_info") or {}).get("tools_kwargs") or {},
        timeout=limits.tool_timeout,
        max_response_length=limits.max_tool_response_length,
        truncate_side=limits.tool_response_truncate_side,
        encode=codec.encode_text,
        decode=codec.decode,
        modalities=modalities,
    )


def over_the_limit(session: ToolSession, name: str, arguments: Mapping[str, Any] | None, limit: int) -> ToolCallRecord:
    """The answer to a call that ``agent.max_parallel_calls`` leaves out."""
    text = f"Error: {name} was not run: at most {limit} tool calls in one turn"
    return replace(_refused(session, text, "over_parallel_limit"), name=name, arguments=arguments)


def _refused(session: ToolSession, text: str, error: str) -> ToolCallRecord:
    return ToolCallRecord(name="", arguments=None, observation=session.shorten(text), error=error)


def _observations(calls: Sequence[ToolCallRecord]) -> list[dict[str, Any]]:
    """One tool message per call, under the id the model gave it; one that could not be decoded has no name to give."""
    return [_observation(call) for call in calls]


def _observation(call: ToolCallRecord) -> dict[str, Any]:
    kinds = [kind for kind, items in call.media.items() for _ in items]
    optional = {"name": call.name, "tool_call_id": call.call_id, "media": kinds}
    return {"role": "tool", "content": call.observation} | {key: value for key, value in optional.items() if value}
