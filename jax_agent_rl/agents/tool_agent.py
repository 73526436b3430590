"""The model calls tools until it answers, or a limit ends it; a simulated user may answer in turn.

::

      ┌─► generate ──► calls? ──no──► ANSWER, or the user replies and scores the turn ──► USER_DONE
      │      │           │              │ no turn left ──────────────────────► MAX_…_TURNS
      │      │ cut       │ yes, but a turn limit is reached ─────────────────► MAX_…_TURNS
      │      ▼           ▼              │
      │  RESPONSE_     run them, at most max_parallel_calls at once
      │  LENGTH          │              │
      └─────── append the results, or the reply, if they fit ──no───────────► RESPONSE_LENGTH

``MAX_…_TURNS`` is ``MAX_ASSISTANT_TURNS`` or ``MAX_USER_TURNS``, whichever limit is reached.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jax_agent_rl.agents.context import AgentContext
from jax_agent_rl.agents.episode import Episode, media_kinds, spoken_messages
from jax_agent_rl.agents.loop import AgentLoop, register_agent
from jax_agent_rl.agents.request import EpisodeRequest, Prefix
from jax_agent_rl.agents.turn_loop import Responder, check_replay, describe_call, run_turns
from jax_agent_rl.chat.grammar import GrammarError
from jax_agent_rl.chat.grammar_limits import in_grammar_thread
from jax_agent_rl.checks import is_number
from jax_agent_rl.environments.users import InteractionSession
from jax_agent_rl.errors import ConfigError, InteractionError
from jax_agent_rl.tools.base import BaseTool
from jax_agent_rl.tools.registry import list_schemas
from jax_agent_rl.tools.session import ToolSession
from jax_agent_rl.tracing import span
from jax_agent_rl.types import (
    FinishReason,
    StopReason,
    TokenOutput,
    ToolCallRecord,
    Trajectory,
    join_media,
)

if TYPE_CHECKING:
    from jax_agent_rl.chat.codec import ChatCodec
    from jax_agent_rl.chat.reply import Reply

_NOT_EXECUTED = frozenset({"malformed", "unknown_tool", "bad_arguments", "over_parallel_limit"})
_FORMAT_REMEDY = "if the model writes calls in another format, set agent.tool_format"
_GRAMMAR_REMEDY = "if it only makes mistakes, agent.constrain_tool_calls=true rules them out"
_TOOL_REMEDY = (
    "give the tool a seed, or set its `stateful` to False if trajectories share its state"
)


@dataclass
class ToolResponder(Responder):
    """Runs the calls of a turn; one without calls goes to the simulated user, if there is one."""

    session: ToolSession
    schemas: Sequence[Mapping[str, Any]]
    user: InteractionSession | None
    grammar: str | None = None  # of every turn

    def generate_options(self, *, last: bool) -> dict[str, Any]:
        return {"grammar": self.grammar}

    async def replay_turn(self, prefix: Prefix, turn: int) -> int:
        """Repeat the calls to stateful tools, or the question to a stateful user."""
        recorded_calls = prefix.turns[turn].tool_calls
        if not recorded_calls:
            if self.user is None:
                return 0
            return await self._replay_user(self.user, prefix, turn)

        stateful_calls = []
        for call in recorded_calls:
            if self.session.is_stateful(call.name) and call.error not in _NOT_EXECUTED:
                stateful_calls.append(call)

        tasks = []
        async with asyncio.TaskGroup() as group:  # concurrently, as they were made
            for call in stateful_calls:
                repeated = self.session.call(call.name, call.arguments, call_id=call.call_id)
                tasks.append(group.create_task(repeated))

        for call, task in zip(stateful_calls, tasks, strict=True):
            recorded = describe_call(call)
            replayed = describe_call(task.result())
            check_replay(turn, call.name, recorded, replayed, remedy=_TOOL_REMEDY)
        self.session.metrics.clear()  # what tools reported meanwhile was counted for the parent
        return len(stateful_calls)

    async def _replay_user(self, user: InteractionSession, prefix: Prefix, turn: int) -> int:
        if not user.stateful:
            return 0
        (answer,) = prefix.response_to(turn)
        question = prefix.messages_before(turn + 1)[:-1]
        turns = prefix.turns[: turn + 1]
        spoken = spoken_messages(self.context.codec, question, prefix.prompt_ids, turns)
        reply = await user.reply(spoken)
        check_replay(
            turn,
            f"interaction {user.name!r}",
            recorded=(answer["content"], turns[-1].score, False),
            replayed=(reply.text, reply.score, reply.terminate),
            remedy="make it deterministic, or set its `stateful` to False if it keeps no state",
        )
        return 1

    async def respond(
        self, episode: Episode, output: TokenOutput, limit: FinishReason | None
    ) -> FinishReason | None:
        if output.stop_reason is StopReason.LENGTH:
            return FinishReason.RESPONSE_LENGTH

        reply = episode.read_turn(tools=self.schemas)
        if not reply.calls:
            if self.user is None:
                return FinishReason.ANSWER
            return await self._ask_user(self.user, episode, limit)
        if limit is not None:
            return limit

        start_time = time.perf_counter()
        calls = await self._run_calls(reply, episode.codec.decode(output.token_ids))
        episode.record_calls(calls, seconds=time.perf_counter() - start_time)

        messages = [_tool_message(call) for call in calls]
        media = join_media(call.media for call in calls)
        fits = episode.append(messages, media=media)
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
        metrics = {"interaction_turns": 1.0}
        for key, value in reply.metadata.items():
            if is_number(value):
                metrics[f"interaction/{key}"] = float(value)
        episode.add_metrics(metrics)

        if reply.terminate:
            return FinishReason.USER_DONE
        if limit is not None:
            return limit
        fits = episode.append([{"role": "user", "content": reply.text}])
        return None if fits else FinishReason.RESPONSE_LENGTH

    async def _run_calls(self, reply: Reply, text: str) -> list[ToolCallRecord]:
        """Run the calls of one turn concurrently.

        Calls over the limit and malformed ones get an error. ``text`` is the whole turn's.

        Returns:
            A record of each call, in the order in which the model wrote them.
        """
        session = self.session
        records: dict[int, ToolCallRecord] = {}
        tasks: dict[int, asyncio.Task[ToolCallRecord]] = {}
        async with asyncio.TaskGroup() as group:
            for index, part in enumerate(reply.calls):
                call = part.call
                if call is None:
                    records[index] = malformed_call(
                        self.context, session, wrote=text, problem=part.problem
                    )
                else:
                    work = session.call(
                        call.name, call.arguments, call_id=call.id, earlier_calls=len(tasks)
                    )
                    tasks[index] = group.create_task(work)

        for index, task in tasks.items():
            records[index] = task.result()
        return [records[index] for index in sorted(records)]


@register_agent("tool_agent")
class ToolAgent(AgentLoop):
    """Multi-turn with tools, within the limits of :class:`~jax_agent_rl.config.AgentConfig`."""

    describes_tools = True
    continues_prefix = True

    async def play(self, request: EpisodeRequest) -> Trajectory:
        context = self.context
        extra_info = request.row.get("extra_info") or {}
        tools = context.tools.select(extra_info.get("tool_selection"))
        schemas = list_schemas(tools)
        episode = self.start(request, tools=tools)

        async with (
            self._user(request) as user,
            tool_session(context, tools, request, modalities=context.modalities) as session,
        ):
            grammar = await self._turn_grammar(schemas, episode.codec)
            responder = ToolResponder(context, session, schemas, user, grammar)
            reason = await run_turns(episode, responder)
            scores = await session.calc_rewards()

        episode.add_metrics(session.metrics)
        return episode.finish(reason, tool_scores=scores)

    async def preflight(self) -> None:
        """Check that calls can be constrained, if they are to be."""
        schemas = list_schemas(self.context.tools.select(None))
        try:
            await self._turn_grammar(schemas, self.context.codec)
        except GrammarError as error:
            raise ConfigError(
                "agent.constrain_tool_calls=true with"
                f" agent.tool_format={self.context.codec.tool_format}: {error}; set it to false, or"
                " use a model or agent.tool_format whose calls have an opening tag, such as hermes"
            ) from None

    async def _turn_grammar(
        self, schemas: Sequence[Mapping[str, Any]], codec: ChatCodec
    ) -> str | None:
        """Return a turn's grammar with these tools; None without ``agent.constrain_tool_calls``."""
        limits = self.context.limits
        if not limits.constrain_tool_calls or not schemas:
            return None
        several_calls = limits.max_parallel_calls > 1
        return await in_grammar_thread(
            lambda: codec.free_turn_grammar(tools=schemas, several=several_calls)
        )

    def _user(
        self, request: EpisodeRequest
    ) -> AbstractAsyncContextManager[InteractionSession | None]:
        return nullcontext()


@register_agent("interaction_agent")
class InteractionAgent(ToolAgent):
    """A conversation with a simulated user.

    ``extra_info.interaction_kwargs`` names the user and says what it knows.
    """

    def _user(self, request: EpisodeRequest) -> InteractionSession:
        users = self.context.interactions
        extra_info = request.row.get("extra_info") or {}
        kwargs = dict(extra_info.get("interaction_kwargs") or {})
        name = kwargs.pop("name", None)
        if name is None and len(users) == 1:
            (name,) = users  # no need to choose
        if not isinstance(name, str) or name not in users:
            raise InteractionError(
                f"extra_info.interaction_kwargs.name={name!r} is not an interaction; there are"
                f" {sorted(users)} (interactions.interaction_config_path)"
            )
        return InteractionSession(
            users[name],
            name=name,
            instance_id=request.trajectory_id,
            kwargs=kwargs,
            timeout=users.timeout,
            failures=self.context.failures,
        )


def tool_session(
    context: AgentContext,
    tools: Mapping[str, BaseTool],
    request: EpisodeRequest,
    *,
    modalities: Collection[str] = (),
) -> ToolSession:
    """Return the tools of one trajectory, with the row's arguments.

    The limits are the ``agent`` section's. ``modalities`` are the kinds of media that the agent can
    show the model.
    """
    extra_info = request.row.get("extra_info") or {}
    return ToolSession(
        tools,
        request.trajectory_id,
        kwargs=extra_info.get("tools_kwargs") or {},
        timeout=context.limits.tool_timeout,
        shorten=context.shorten,
        max_parallel_calls=context.limits.max_parallel_calls,
        modalities=modalities,
        failures=context.failures,
    )


def malformed_call(
    context: AgentContext, session: ToolSession, *, wrote: str, problem: str
) -> ToolCallRecord:
    """Return the answer to a call that could not be decoded, and report it.

    ``wrote`` is the text of the turn, ``problem`` what is wrong with the call.
    """
    remedies = [_FORMAT_REMEDY]
    if not context.limits.constrain_tool_calls:
        remedies.append(_GRAMMAR_REMEDY)
    context.report_malformed(wrote, problem, hint="; ".join(remedies))
    text = f"Error: Failed to decode tool call: {problem:.200}"
    return ToolCallRecord(
        name="", arguments=None, observation=session.shorten(text), error="malformed"
    )


def _tool_message(call: ToolCallRecord) -> dict[str, Any]:
    """Return a call's result as a message; a malformed call has no name and no id."""
    message: dict[str, Any] = {"role": "tool", "content": call.observation}
    if call.name:
        message["name"] = call.name
    if call.call_id:
        message["tool_call_id"] = call.call_id

    kinds = media_kinds(call.media)
    if kinds:
        message["media"] = kinds
    return message
