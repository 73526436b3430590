"""The model writes actions between markers, a service answers: one loop, three agents.

::

      ┌─► generate to a closing marker ──► action? ──no──► ANSWER, or when cut
      │                                      │             ACTION_LENGTH, RESPONSE_LENGTH
      │                                      │ yes, but all calls are made ──► MAX_USER_TURNS
      │                                      ▼
      │                          ask the service ──► done ───────────────────► TOOL_DONE
      │                                      ▼
      └───────────── insert the observation, if it fits ──no──────────────────► RESPONSE_LENGTH

    in the end, however it ends: the trajectory's session with the service is closed, once

:class:`~jax_agent_rl.agents.markers.Markers` finds the action, a
:class:`~jax_agent_rl.tools.marker_services.Service` answers it, and an
:class:`~jax_agent_rl.agents.observations.ObservationWriter` inserts the answer. All three follow
verl-tool's settings (:class:`~jax_agent_rl.config.ServerToolConfig`). An agent is a preset:

=================  ====================  ======================  ===================
agent              action                service                 observation
=================  ====================  ======================  ===================
server_tool_agent  action_stop_tokens    tool server             as the settings say
text_tool_agent    <tool> … </tool>      tool server, for code   <result> … </result>
search_agent       <search> … </search>  retrieval server        <information> … </…>
=================  ====================  ======================  ===================
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

from jax_agent_rl.agents.context import AgentContext
from jax_agent_rl.agents.episode import Episode
from jax_agent_rl.agents.loop import AgentLoop, register_agent
from jax_agent_rl.agents.markers import Action, Markers
from jax_agent_rl.agents.observations import ObservationWriter
from jax_agent_rl.agents.request import EpisodeRequest, Prefix
from jax_agent_rl.agents.turn_loop import (
    SERVER_REMEDY,
    Responder,
    answer_or_cut,
    check_replay,
    describe_call,
    run_turns,
)
from jax_agent_rl.chat.thinking import answer_of
from jax_agent_rl.config import AgentConfig, ServerToolConfig
from jax_agent_rl.errors import ToolServerError
from jax_agent_rl.tools.base import refuse_unseen
from jax_agent_rl.tools.client import ServerObservation
from jax_agent_rl.tools.marker_services import (
    SearchClient,
    Service,
    Session,
    ToolClient,
    tool_server,
)
from jax_agent_rl.tracing import span
from jax_agent_rl.types import (
    DropReason,
    FinishReason,
    StopReason,
    TokenOutput,
    ToolCallRecord,
    Trajectory,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class CallFormat:
    """How an agent's calls are written, recorded and answered.

    Attributes:
        tool: name of the calls in records and traces.
        argument: name of a call's text there.
        opening: marker before a call; None: a call begins with its turn.
        frame: text around an observation, with ``{}`` for it.
        stateful: whether calls leave state behind, so that branches repeat their parents' calls.
    """

    tool: str
    argument: str
    opening: str | None = None
    frame: str = "{}"
    stateful: bool = True


@dataclass
class MarkerResponder(Responder):
    """Sends each turn's action to the service, and inserts the observation."""

    settings: ServerToolConfig
    calls: CallFormat
    markers: Markers
    observations: ObservationWriter
    session: Session

    def turn_limit(self, turns: int) -> FinishReason | None:
        return FinishReason.MAX_USER_TURNS if turns >= self.settings.max_turns else None

    def generate_options(self, *, last: bool) -> Mapping[str, Any]:
        settings = self.settings
        must_finish = last and settings.force_finish_for_last_turn
        return {
            "stop": () if settings.turn_end_token is None else (settings.turn_end_token,),
            "action_stops": () if must_finish else settings.action_stop_tokens,
            "stop_token_ids": settings.additional_eos_token_ids,
            "max_tokens": settings.max_action_length,
        }

    async def look_first(self, episode: Episode) -> None:
        """Add an observation of the new session to the prompt (``agent.call_tool_first``)."""
        observation, record = await self._ask("", 0)
        prefix = episode.request.prefix
        if prefix is not None:
            # The inherited prompt has the observation already; the new session must agree.
            recorded = prefix.messages_before(0)[-1]["content"]
            check_replay(0, record.name, recorded, record.observation, remedy=SERVER_REMEDY)
            return
        if observation.done:
            raise ToolServerError(
                "the tool server ended the trajectory before its first turn (agent.call_tool_first)"
            )
        if observation.media:
            raise ToolServerError(
                "images before the first turn (agent.call_tool_first) cannot be shown"
            )
        episode.add_metrics({"tool_seconds": record.seconds, **_metrics(observation)})
        self.observations.add_to_prompt(episode, record.observation)

    async def respond(
        self, episode: Episode, output: TokenOutput, limit: FinishReason | None
    ) -> FinishReason | None:
        action = None
        must_finish = limit is not None and self.settings.force_finish_for_last_turn
        if not must_finish:
            action = self.markers.find(episode, output)
        if action is None:
            return _finish_reason(episode, output, self.settings)
        if limit is not None:
            return limit

        if action.problem is None:
            observation, record = await self._ask(action.text, len(episode.turns) - 1)
        else:
            observation, record = self._refuse(action)
        episode.record_calls([record], seconds=record.seconds)
        episode.add_metrics(_metrics(observation))
        if observation.done:
            return FinishReason.TOOL_DONE
        fits = self.observations.insert(episode, record.observation, record.media)
        return None if fits else FinishReason.RESPONSE_LENGTH

    async def replay_turn(self, prefix: Prefix, turn: int) -> int:
        (recorded_call,) = prefix.turns[turn].tool_calls
        if not self.calls.stateful or recorded_call.arguments is None:
            return 0
        _, replayed_call = await self._ask(recorded_call.arguments[self.calls.argument], turn)
        check_replay(
            turn,
            recorded_call.name,
            describe_call(recorded_call),
            describe_call(replayed_call),
            remedy=SERVER_REMEDY,
        )
        return 1

    async def _ask(self, action: str, step: int) -> tuple[ServerObservation, ToolCallRecord]:
        """Send an action to the service."""
        arguments = {self.calls.argument: action}
        start_time = time.perf_counter()
        with span("tool", self.calls.tool) as traced:
            traced.set(arguments=arguments)
            observation = self._with_media_shown(await self.session.ask(action, step))
            traced.set(observation=observation.text, tool_error=observation.error)

        record = ToolCallRecord(
            name=self.calls.tool,
            arguments=arguments,
            observation=self.observations.shorten(observation.text),
            error=observation.error,
            reward=observation.reward,
            seconds=time.perf_counter() - start_time,
            media=observation.media,
        )
        return observation, record

    def _with_media_shown(self, observation: ServerObservation) -> ServerObservation:
        """Return an observation, or an error if it has media that cannot be shown."""
        if not observation.media:
            return observation
        modalities: frozenset[str] = frozenset()
        if self.observations.are_messages:  # only the chat template can show images
            modalities = self.context.modalities
        problem = refuse_unseen(
            observation.media,
            modalities,
            source="the tool",
            logged_as="the tool server",
            reason=(
                "that takes a model, chat template and engine for it, server_tool_agent and"
                " agent.enable_mtrl=true without agent.mtrl_sep"
            ),
            failures=self.context.failures,
        )
        if problem is None:
            return observation
        return replace(observation, text=f"Error: {problem}.", error="raised", media={})

    def _refuse(self, action: Action) -> tuple[ServerObservation, ToolCallRecord]:
        """Answer a malformed action with an error, and report it."""
        self.context.report_malformed(action.text, "", hint=self.markers.hint)
        observation = ServerObservation(text=f"Error: {action.problem}.", error="malformed")
        record = ToolCallRecord(
            name="",
            arguments=None,
            observation=self.observations.shorten(observation.text),
            error=observation.error,
        )
        return observation, record


class MarkerAgent(AgentLoop):
    """Runs the loop of this module.

    Args:
        settings: verl-tool's settings.
        calls: how calls are written and recorded.
        service: answers them; None: trajectories are one turn of plain generation.
    """

    continues_prefix = True

    def __init__(
        self,
        context: AgentContext,
        settings: ServerToolConfig,
        calls: CallFormat,
        service: Service | None,
    ):
        super().__init__(context)
        self._settings = settings
        self._calls = calls
        self._service = service
        self._markers = Markers(settings, context.codec, opening=calls.opening)
        self._observations = ObservationWriter(settings, context.codec, frame=calls.frame)
        max_concurrent = settings.max_concurrent_trajectories
        self._slots = nullcontext() if max_concurrent is None else asyncio.Semaphore(max_concurrent)

    async def preflight(self) -> None:
        if self._service:
            await self._service.check()

    async def close(self) -> None:
        if self._service:
            await self._service.close()

    async def play(self, request: EpisodeRequest) -> Trajectory:
        settings = self._settings
        async with self._slots:
            episode = self.start(request)
            if self._service is None:
                output = await episode.generate(
                    session_ends=True, max_tokens=settings.max_action_length
                )
                reason = _finish_reason(episode, output, settings)
            else:
                reason = await self._play_with_service(self._service, episode)
        return episode.finish(reason, no_loss=_no_loss(episode, reason, settings))

    async def _play_with_service(self, service: Service, episode: Episode) -> FinishReason:
        """Run the turns of an episode in a session of its own."""
        request = episode.request
        extra_info = request.row.get("extra_info") or {}
        async with service.open(request.trajectory_id, extra_info) as session:
            responder = MarkerResponder(
                self.context,
                self._settings,
                self._calls,
                self._markers,
                self._observations,
                session,
            )
            if self._settings.call_tool_first:
                await responder.look_first(episode)
            reason = await run_turns(episode, responder)
        episode.add_metrics(session.metrics)
        return reason


def _finish_reason(
    episode: Episode, output: TokenOutput, settings: ServerToolConfig
) -> FinishReason:
    """Return how a turn without action ends the trajectory."""
    was_cut = output.stop_reason is StopReason.LENGTH
    if was_cut and len(output.token_ids) == settings.max_action_length and episode.tokens_left > 0:
        return FinishReason.ACTION_LENGTH
    return answer_or_cut(output)


def _no_loss(
    episode: Episode, reason: FinishReason, settings: ServerToolConfig
) -> DropReason | None:
    """Return why a trajectory carries no loss; None if it does."""
    if settings.mask_overlong_loss and reason.truncated:
        return DropReason.OVERLONG
    if not settings.mask_void_traj or not settings.enable_agent:
        return None

    for turn in episode.turns:
        if any(call.error is None for call in turn.tool_calls):
            return None
    if reason is FinishReason.ANSWER and answer_of(episode.messages[-1]["content"]).strip():
        return None
    return DropReason.VOID_TRAJECTORY


def _metrics(observation: ServerObservation) -> dict[str, float]:
    return {f"tool_server/{key}": value for key, value in observation.metrics.items()}


# --- presets --------------------------------------------------------------------------------------

_SERVER_TOOL = CallFormat(tool="tool_server", argument="action")
_TEXT_TOOL = CallFormat(
    tool="tool", argument="text", opening="<tool>", frame="\n<result>\n{}\n</result>\n"
)
_SEARCH = CallFormat(
    tool="search",
    argument="text",
    opening="<search>",
    frame="\n<information>\n{}\n</information>\n",
    stateful=False,
)


@register_agent("server_tool_agent")
class ServerToolAgent(MarkerAgent):
    """All settings are the configuration's (:class:`~jax_agent_rl.config.ServerToolConfig`).

    Raises:
        ConfigError: no tool server is configured, or no turn would ever call it.
    """

    def __init__(self, context: AgentContext):
        settings = context.limits
        service = tool_server(settings) if settings.enable_agent else None
        super().__init__(context, settings, _SERVER_TOOL, service)


@register_agent("text_tool_agent")
class TextToolAgent(MarkerAgent):
    """Text between ``<tool>`` and ``</tool>`` is code for a tool server.

    Settings: ``tool_config``.

    Raises:
        ConfigError: ``tool_config.server_url`` is missing or wrong.
    """

    def __init__(self, context: AgentContext):
        config = context.tool_config
        settings = _settings(context.limits, closing="</tool>", max_turns=config.max_tool_turns)
        super().__init__(context, settings, _TEXT_TOOL, ToolClient(config))


@register_agent("search_agent")
class SearchAgent(MarkerAgent):
    """Text between ``<search>`` and ``</search>`` is a query for a retrieval server.

    Settings: ``search``.

    Raises:
        ConfigError: ``search.server_url`` is missing or wrong.
    """

    def __init__(self, context: AgentContext):
        config = context.search
        settings = _settings(context.limits, closing="</search>", max_turns=config.max_turns)
        super().__init__(context, settings, _SEARCH, SearchClient(config))


def _settings(limits: AgentConfig, *, closing: str, max_turns: int) -> ServerToolConfig:
    """Return the settings of calls that end with ``closing``; results are cut as tools' are."""
    return ServerToolConfig(
        action_stop_tokens=(closing,),
        max_turns=max_turns,
        max_obs_length=limits.max_tool_response_length,
        truncate_obs_side=limits.tool_response_truncate_side,
    )
