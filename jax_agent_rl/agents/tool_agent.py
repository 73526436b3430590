"""The model calls tools until it answers, or a limit ends it; a simulated user may answer in turn.

::

      ┌─► generate ──► calls? ──no──► ANSWER, or the user replies and scores the turn ──► USER_DONE
      │      │           │              │ no turn left ───────────────────────────► MAX_ASSISTANT_TURNS, MAX_USER_TURNS
      │      │ cut       │ yes, but a turn limit is reached ──────────────────────► MAX_ASSISTANT_TURNS, MAX_USER_TURNS
      │      ▼           ▼              │
      │  RESPONSE_     run them, at most max_parallel_calls at once
      │  LENGTH          │              │
      └─────── append the results, or the reply, if they fit ──no────────────────► RESPONSE_LENGTH
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from jax_agent_rl.agents.context import AgentContext, Prefix
from jax_agent_rl.agents.episode import Episode, spoken_messages
from jax_agent_rl.agents.loop import register_agent
from jax_agent_rl.agents.turn_loop import Responder, StartEpisode, TurnLoopAgent, check_replay, describe_call, run_turns
from jax_agent_rl.chat.grammar import GrammarError
from jax_agent_rl.chat.grammar_limits import in_grammar_thread
from jax_agent_rl.environments.users import InteractionSession
from jax_agent_rl.errors import ConfigError, InteractionError
from jax_agent_rl.tools.base import BaseTool
from jax_agent_rl.tools.registry import list_schemas
from jax_agent_rl.tools.session import ToolSession
from jax_agent_rl.tracing import span
from jax_agent_rl.types import FinishReason, StopReason, TokenOutput, ToolCallRecord, Trajectory, join_media
from jax_agent_rl.validation import is_number

if TYPE_CHECKING:
    from jax_agent_rl.chat.codec import ChatCodec
    from jax_agent_rl.chat.reply import Reply

_NOT_EXECUTED = frozenset({"malformed", "unknown_tool", "bad_arguments", "over_parallel_limit"})
_FORMAT_REMEDY = "if the model writes calls in another format, set agent.tool_format"
_GRAMMAR_REMEDY = "if it only makes mistakes, agent.constrain_tool_calls=true rules them out"
_TOOL_REMEDY = "give the tool a seed, or set its `stateful` to False if trajectories share its state"


@dataclass
class ToolResponder(Responder):
    """Runs the calls of a turn; a turn without calls goes to the simulated user, if there is one."""

    session: ToolSession
    schemas: Sequence[Mapping[str, Any]]
    user: InteractionSession | None
    grammar: str | None = None  # of every turn

    def generate_options(self, *, last: bool) -> dict[str, Any]:
        return {"grammar": self.grammar}

    async def replay_turn(self, prefix: Prefix, turn: int) -> int:
        """Repeat the calls to stateful tools, or the question to a stateful user.

        What tools report meanwhile is dropped: it is the parent's.
        """
        session, records = self.session, prefix.turns[turn].tool_calls
        if not records:
            return await self._replay_user(self.user, prefix, turn) if self.user else 0
        calls = [c for c in records if session.is_stateful(c.name) and c.error not in _NOT_EXECUTED]
        async with asyncio.TaskGroup() as group:  # concurrently, as they were made
            tasks = [group.create_task(session.call(c.name, c.arguments, call_id=c.call_id)) for c in calls]
        for before, task in zip(calls, tasks, strict=True):
            now = describe_call(task.result())
            check_replay(turn, before.name, describe_call(before), now, remedy=_TOOL_REMEDY)
        session.metrics.clear()
        return len(calls)

    async def _replay_user(self, user: InteractionSession, prefix: Prefix, turn: int) -> int:
        if not user.stateful:
            return 0
        (answer,) = prefix.response_to(turn)
        messages = prefix.messages_before(turn + 1)[:-1]
        spoken = spoken_messages(self.context.codec, messages, prefix.prompt_ids, prefix.turns[: turn + 1])
        reply = await user.reply(spoken)
        check_replay(
            turn,
            f"interaction {user.name!r}",
            (answer["content"], prefix.turns[turn].score, False),
            (reply.text, reply.score, reply.terminate),
            remedy="make it deterministic, or set its `stateful` to False if it keeps no state",
        )
        return 1

    async def respond(self, episode: Episode, output: TokenOutput, limit: FinishReason | None) -> FinishReason | None:
        if output.stop_reason is StopReason.LENGTH:
            return FinishReason.RESPONSE_LENGTH
        reply = episode.read_turn(tools=self.schemas)
        if not reply.calls:
            return await self._ask_user(self.user, episode, limit) if self.user else FinishReason.ANSWER
        if limit is not None:
            return limit
        began = time.perf_counter()
        calls = await self._run_calls(reply, episode.codec.decode(output.token_ids))
        episode.record_calls(calls, seconds=time.perf_counter() - began)
        fits = episode.append([_tool_message(call) for call in calls], media=join_media(call.media for call in calls))
        return None if fits else FinishReason.RESPONSE_LENGTH

    async def _ask_user(
        self, user: InteractionSession, episode: Episode, limit: FinishReason | None
    ) -> FinishReason | None:
        """Append the user's reply; every turn is scored, also the last one."""
        with span("tool", "user") as traced:
            messages = episode.spoken_messages()
            traced.set(arguments={"reply": messages[-1]["content"]})
            reply = await user.reply(messages)
            traced.set(observation=reply.text)
        episode.add_score(reply.score)
        numbers = {f"interaction/{key}": float(value) for key, value in reply.metadata.items() if is_number(value)}
        episode.add_metrics({**numbers, "interaction_turns": 1})
        if reply.terminate:
            return FinishReason.USER_DONE
        if limit is not None:
            return limit
        return None if episode.append([{"role": "user", "content": reply.text}]) else FinishReason.RESPONSE_LENGTH

    async def _run_calls(self, reply: Reply, wrote: str) -> list[ToolCallRecord]:
        """Run the calls of one turn concurrently; those over the limit and malformed ones get an error.

        Args:
            reply: the turn.
            wrote: its text.

        Returns:
            A record of each call, in the order in which the model wrote them.
        """
        limit = self.limits.max_parallel_calls
        answers: list[asyncio.Task[ToolCallRecord] | ToolCallRecord] = []
        started = 0
        async with asyncio.TaskGroup() as group:
            for part in reply.calls:
                call = part.call
                if call is None:
                    answers.append(malformed_call(self.context, self.session, wrote=wrote, problem=part.problem))
                elif started < limit:
                    answers.append(group.create_task(self.session.call(call.name, call.arguments, call_id=call.id)))
                    started += 1
                else:
                    refused = over_the_limit(self.session, call.name, call.arguments, limit)
                    answers.append(replace(refused, call_id=call.id))
        return [answer.result() if isinstance(answer, asyncio.Task) else answer for answer in answers]


@register_agent("tool_agent")
class ToolAgent(TurnLoopAgent):
    """Multi-turn with tools; the limits are those of :class:`~jax_agent_rl.config.AgentConfig`."""

    describes_tools = True

    async def play(self, start: StartEpisode, row: Mapping[str, Any], trajectory_id: str) -> Trajectory:
        context = self.context
        tools = context.tools.select((row.get("extra_info") or {}).get("tool_selection"))
        episode = start(tools=tools)
        async with (
            self._user(row, trajectory_id) as user,
            tool_session(context, tools, row, trajectory_id, modalities=context.modalities) as session,
        ):
            schemas = list_schemas(tools)
            grammar = await self._turn_grammar(schemas, episode.codec)
            responder = ToolResponder(context, session, schemas, user, grammar)
            reason = await run_turns(episode, responder)
            scores = await session.calc_rewards()
        episode.add_metrics(session.metrics)
        return episode.finish(reason, tool_scores=scores)

    async def preflight(self) -> None:
        """Check that calls can be constrained, if they are to be."""
        try:
            await self._turn_grammar(list_schemas(self.context.tools.select(None)), self.context.codec)
        except GrammarError as error:
            raise ConfigError(
                f"agent.constrain_tool_calls=true with agent.tool_format={self.context.codec.tool_format}: {error}; "
                "set it to false, or use a model or agent.tool_format whose calls have an opening tag, such as hermes"
            ) from None

    async def _turn_grammar(self, schemas: Sequence[Mapping[str, Any]], codec: ChatCodec) -> str | None:
        """Return the grammar of a turn with these tools; None without ``agent.constrain_tool_calls``."""
        limits = self.context.limits
        if not (limits.constrain_tool_calls and schemas):
            return None
        several = limits.max_parallel_calls > 1
        return await in_grammar_thread(lambda: codec.free_turn_grammar(tools=schemas, several=several))

    def _user(
        self, row: Mapping[str, Any], trajectory_id: str
    ) -> AbstractAsyncContextManager[InteractionSession | None]:
        return nullcontext()


@register_agent("interaction_agent")
class InteractionAgent(ToolAgent):
    """A conversation with a simulated user; ``extra_info.interaction_kwargs`` names it and says what it knows."""

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
            users[name],
            name=name,
            instance_id=trajectory_id,
            kwargs=kwargs,
            timeout=users.timeout,
            failures=self.context.failures,
        )


def tool_session(
    context: AgentContext,
    tools: Mapping[str, BaseTool],
    row: Mapping[str, Any],
    trajectory_id: str,
    *,
    modalities: Collection[str] = (),
) -> ToolSession:
    """Return the tools of one trajectory, under the limits of the ``agent`` section and with the row's arguments.

    Args:
        context: what all loops share.
        tools: the row's tools, by name.
        row: the dataset row.
        trajectory_id: unique within the run.
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
        failures=context.failures,
    )


def over_the_limit(session: ToolSession, name: str, arguments: Mapping[str, Any] | None, limit: int) -> ToolCallRecord:
    """Return the answer to a call that ``agent.max_parallel_calls`` leaves out.

    Args:
        session: the trajectory's tools.
        name: the tool's name.
        arguments: as the model wrote them.
        limit: the value of ``agent.max_parallel_calls``.
    """
    text = f"Error: {name} was not run: at most {limit} tool calls in one turn"
    return replace(_refused(session, text, "over_parallel_limit"), name=name, arguments=arguments)


def malformed_call(context: AgentContext, session: ToolSession, *, wrote: str, problem: str) -> ToolCallRecord:
    """Return the answer to a call that could not be decoded, and report it.

    Args:
        context: keeps the report.
        session: the trajectory's tools.
        wrote: the text of the turn.
        problem: what is wrong with the call.
    """
    remedies = [_FORMAT_REMEDY]
    if not context.limits.constrain_tool_calls:
        remedies.append(_GRAMMAR_REMEDY)
    context.report_malformed(wrote, problem, hint="; ".join(remedies))
    return _refused(session, f"Error: Failed to decode tool call: {problem:.200}", "malformed")


def _refused(session: ToolSession, text: str, error: str) -> ToolCallRecord:
    return ToolCallRecord(name="", arguments=None, observation=session.shorten(text), error=error)


def _tool_message(call: ToolCallRecord) -> dict[str, Any]:
    """Return a call's result as a message; a malformed call has no name or id to give."""
    kinds = [kind for kind, items in call.media.items() for _ in items]
    optional = {"name": call.name, "tool_call_id": call.call_id, "media": kinds}
    return {"role": "tool", "content": call.observation} | {key: value for key, value in optional.items() if value}
