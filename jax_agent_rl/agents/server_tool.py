"""The model acts, a tool server answers: verl-tool's loop, on exact ids.

::

    step 0 … max_turns
      generate to an action stop token ──► action? ──no──► ANSWER, or ACTION_LENGTH, RESPONSE_LENGTH when cut
                                             │ yes, but it is the last step ─────► MAX_USER_TURNS, no tool call
                                             ▼
      POST /get_observation ──► done ────────────────────────────────────────────► TOOL_DONE
                                             ▼
      insert the observation ──► no room ────────────────────────────────────────► RESPONSE_LENGTH

    in the end, however it ends: the environment is closed, once

What stands in a think block is no action: a stop token in there does not end the turn, and the tool server, which looks
for calls in what it is sent, is not sent it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, nullcontext
from typing import Any

from jax_agent_rl.agents.context import AgentContext
from jax_agent_rl.agents.episode import Episode
from jax_agent_rl.agents.loop import AgentLoop, register_agent
from jax_agent_rl.agents.observations import ObservationCodec
from jax_agent_rl.agents.tool_environment import Lockstep, Send, ToolEnvironment
from jax_agent_rl.config import AgentConfig
from jax_agent_rl.errors import ConfigError, ToolServerError
from jax_agent_rl.tools.client import ServerAction, ServerObservation, ToolServerClient, observation_url
from jax_agent_rl.types import (
    DropReason,
    FinishReason,
    SamplingParams,
    StopReason,
    TokenOutput,
    ToolCallRecord,
    Trajectory,
)
from jax_agent_rl.utils.json_service import JsonService, ServiceSettings, bearer


@register_agent("server_tool_agent")
class ServerToolAgent(AgentLoop):
    """The settings are those of :class:`~jax_agent_rl.config.ServerToolConfig`.

    Raises:
        ConfigError: there is no tool server to ask, or nothing would ever ask it.
    """

    def __init__(self, context: AgentContext):
        super().__init__(context)
        limits = context.limits
        self._observations = ObservationCodec(limits, context.codec)
        self._server = _server(limits) if limits.enable_agent else None
        self._lockstep = Lockstep(self._server.get_observation) if self._server else None
        most = limits.max_concurrent_trajectories
        self._slots = nullcontext() if most is None else asyncio.Semaphore(most)

    async def preflight(self) -> None:
        if self._server:
            await self._server.check()

    async def close(self) -> None:
        if self._server:
            await self._server.close()

    async def run(
        self, row: Mapping[str, Any], *, trajectory_id: str, group_id: str, sampling: SamplingParams
    ) -> Trajectory:
        async with self._slots:
            episode = self.start(row, trajectory_id=trajectory_id, group_id=group_id, sampling=sampling)
            if self._server is None:
                output = await episode.generate(session_ends=True, max_tokens=self.context.limits.max_action_length)
                reason = self._ended(episode, output)
            else:
                async with self._environment(self._server, trajectory_id) as environment:
                    reason = await self._act(episode, environment, row)
                episode.add_metrics({"tool_close_failures": environment.close_failures})
        return episode.finish(reason, no_loss=self._no_loss(episode, reason))

    @asynccontextmanager
    async def _environment(self, server: ToolServerClient, trajectory_id: str) -> AsyncIterator[ToolEnvironment]:
        shown = self.context.modalities if self._observations.are_messages else frozenset()
        if self.context.limits.rollout_mode == "async" or self._lockstep is None:
            async with ToolEnvironment(server, _alone(server), trajectory_id, modalities=shown) as environment:
                yield environment
        else:
            environment = ToolEnvironment(server, self._lockstep.send, trajectory_id, modalities=shown)
            async with environment, self._lockstep:
                yield environment

    async def _act(self, episode: Episode, environment: ToolEnvironment, row: Mapping[str, Any]) -> FinishReason:
        limits = self.context.limits
        if limits.call_tool_first:
            await self._look_first(episode, environment, row)
        for step in range(limits.max_turns + 1):
            last = step == limits.max_turns
            output = await episode.generate(
                session_ends=last,
                stop=() if limits.turn_end_token is None else (limits.turn_end_token,),
                action_stops=() if last and limits.force_finish_for_last_turn else limits.action_stop_tokens,
                stop_token_ids=limits.additional_eos_token_ids,
                max_tokens=limits.max_action_length,
            )
            action = self._action(episode, output, step)
            if action is None:
                return self._ended(episode, output)
            if last:
                break
            observation, record = await self._step(environment, action, row, step)
            episode.record_calls([record], seconds=record.seconds)
            episode.add_metrics({f"tool_server/{key}": value for key, value in observation.metrics.items()})
            if observation.done:
                return FinishReason.TOOL_DONE
            if not self._observations.insert(episode, record.observation, record.media):
                return FinishReason.RESPONSE_LENGTH
        return FinishReason.MAX_USER_TURNS

    async def _look_first(self, episode: Episode, environment: ToolEnvironment, row: Mapping[str, Any]) -> None:
        """An observation of the environment as it is, before the model has done anything."""
        observation, record = await self._step(environment, "", row, 0)
        if observation.done:
            raise ToolServerError("the tool server ended the trajectory before its first turn (agent.call_tool_first)")
        if observation.media:
            raise ToolServerError("images before the first turn (agent.call_tool_first) cannot be shown")
        numbers = {f"tool_server/{key}": value for key, value in observation.metrics.items()}
        episode.add_metrics({"tool_seconds": record.seconds, **numbers})
        self._observations.before_the_first_turn(episode, record.observation)

    async def _step(
        self, environment: ToolEnvironment, action: str, row: Mapping[str, Any], step: int
    ) -> tuple[ServerObservation, ToolCallRecord]:
        extra_fields = self._extra_fields(row, step)
        return await environment.step(
            action, name="tool_server", extra_fields=extra_fields, shorten=self._observations.shorten
        )

    def _extra_fields(self, row: Mapping[str, Any], step: int) -> dict[str, Any]:
        most = self.context.limits.max_turns
        turns = {"current_step": step, "max_turns": most, "turns_left": most - step}
        return {**(row.get("extra_info") or {}), **turns}

    def _action(self, episode: Episode, output: TokenOutput, step: int) -> str | None:
        """What to send to the tool server, up to the first action stop token; None: the turn is no action."""
        limits, codec = self.context.limits, self.context.codec
        if step == limits.max_turns and limits.force_finish_for_last_turn:
            return None
        text = episode.outside_thinking(output)
        thought = text != codec.decode(output.token_ids, skip_special_tokens=False)
        ends = [place + len(token) for token in limits.action_stop_tokens if (place := text.find(token)) >= 0]
        if ends:
            return text[: min(ends)].lstrip() if thought else text[: min(ends)]
        sent_anyway = step < limits.min_turns or limits.enable_mtrl and not limits.action_stop_tokens
        if not sent_anyway or episode.tokens_left < 1:
            return None
        said = codec.decode(output.token_ids)
        if thought:
            end = [i for i in output.token_ids[-1:] if i in codec.eos_token_ids]
            said = text.removesuffix(codec.decode(end, skip_special_tokens=False)).lstrip()
        # The server's tools look for the token that the model left out.
        return said.removesuffix(limits.turn_end_token or "") + "".join(limits.action_stop_tokens[:1])

    def _ended(self, episode: Episode, output: TokenOutput) -> FinishReason:
        if output.stop_reason is not StopReason.LENGTH:
            return FinishReason.ANSWER
        cut_short = len(output.token_ids) == self.context.limits.max_action_length and episode.tokens_left > 0
        return FinishReason.ACTION_LENGTH if cut_short else FinishReason.RESPONSE_LENGTH

    def _no_loss(self, episode: Episode, reason: FinishReason) -> DropReason | None:
        limits = self.context.limits
        if limits.mask_overlong_loss and reason.truncated:
            return DropReason.OVERLONG
        if limits.mask_void_traj and limits.enable_agent:
            acted = any(call.error is None for turn in episode.turns for call in turn.tool_calls)
            answered = reason is FinishReason.ANSWER and bool(episode.messages[-1]["content"].strip())
            return None if acted or answered else DropReason.VOID_TRAJECTORY
        return None


def _alone(server: ToolServerClient) -> Send:
    """Sends each action as a request of its own."""

    async def send(action: ServerAction) -> ServerObservation:
        (result,) = await server.get_observation([action])
        if isinstance(result, ToolServerError):
            raise result
        return result

    return send


def _server(limits: AgentConfig) -> ToolServerClient:
    if limits.tool_server_url is None:
        raise ConfigError(
            "server_tool_agent needs a tool server; set agent.tool_server_url, e.g. http://localhost:5000, or "
            "agent.enable_agent=false for plain generation"
        )
    if not limits.action_stop_tokens and not limits.enable_mtrl and not limits.min_turns:
        raise ConfigError(
            "server_tool_agent would never call a tool: set agent.action_stop_tokens (e.g. '</python>'), "
            "agent.enable_mtrl=true, or agent.min_turns"
        )
    settings = ServiceSettings(
        url=observation_url(limits.tool_server_url),
        url_key="agent.tool_server_url",
        timeout=limits.tool_call_timeout,
        timeout_key="agent.tool_call_timeout",
        max_retries=limits.tool_call_max_retries,
        headers=bearer(limits.tool_server_token_env, key="agent.tool_server_token_env"),
        token_hint="set agent.tool_server_token_env to the environment variable that holds it",
    )
    return ToolServerClient(JsonService(settings, error=ToolServerError))
