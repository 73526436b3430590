"""The model acts, a tool server answers: verl-tool's loop, on exact ids.

::

    step 0 … max_turns
      generate to an action stop token ──► action? ──no──► ANSWER, or when cut
                                             │             ACTION_LENGTH, RESPONSE_LENGTH
                                             │ yes, but it is the last step ──► MAX_USER_TURNS,
                                             ▼                                  no tool call
      POST /get_observation ──► done ─────────────────────────────────────────► TOOL_DONE
                                             ▼
      insert the observation ──► no room ─────────────────────────────────────► RESPONSE_LENGTH

    in the end, however it ends: the environment is closed, once

Text in a think block is no action: a stop token in it does not end the turn, and it is not sent to
the tool server, which looks for calls in what it gets.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jax_agent_rl.agents.context import AgentContext
from jax_agent_rl.agents.episode import Episode, media_kinds
from jax_agent_rl.agents.loop import AgentLoop, register_agent
from jax_agent_rl.agents.request import EpisodeRequest, Prefix
from jax_agent_rl.agents.turn_loop import (
    SERVER_REMEDY,
    Responder,
    check_replay,
    describe_call,
    run_turns,
)
from jax_agent_rl.chat.thinking import answer_of
from jax_agent_rl.config import AgentConfig
from jax_agent_rl.errors import ConfigError, ToolServerError
from jax_agent_rl.tools.base import truncate_text
from jax_agent_rl.tools.client import (
    Lockstep,
    ServerObservation,
    ToolEnvironment,
    ToolServerClient,
    observation_url,
)
from jax_agent_rl.types import (
    DropReason,
    FinishReason,
    StopReason,
    TokenOutput,
    ToolCallRecord,
    Trajectory,
)
from jax_agent_rl.utils.network import JsonService, bearer

if TYPE_CHECKING:
    from jax_agent_rl.chat.codec import ChatCodec


Media = Mapping[str, tuple[Any, ...]]
"""Images and videos by kind."""


class ObservationCodec:
    """Inserts observations after turns, as data: special tokens in them stay plain text.

    ::

        enable_mtrl=false           …</python> ──► observation ──► the model goes on
        enable_mtrl=true            …</python> ──► end of turn, a turn of mtrl_role,
                                                   the next generation prompt
        enable_mtrl=true, mtrl_sep  …</python> ──► turn_end_token,
                                                   mtrl_sep with the observation for {obs}
    """

    def __init__(self, limits: AgentConfig, codec: ChatCodec):
        self._limits = limits
        self._codec = codec

    @property
    def are_messages(self) -> bool:
        """True if observations are chat messages: written by the template, maybe with images."""
        return self._limits.enable_mtrl and self._limits.mtrl_sep is None

    def shorten(self, text: str) -> str:
        """Return ``text`` within ``max_obs_length`` tokens, cut on ``truncate_obs_side``."""
        return self._cut(text, self._limits.max_obs_length, self._limits.truncate_obs_side)

    def add_to_prompt(self, episode: Episode, text: str) -> None:
        """Add an observation to the prompt.

        Raises:
            PromptTooLongError, TemplateError: see :meth:`Episode.extend_prompt`.
        """
        messages = [self._message(text)]
        if self.are_messages:
            episode.extend_prompt(messages)
        else:
            episode.extend_prompt(messages, self._between_separators(text, turn_has_ended=False))

    def insert(self, episode: Episode, text: str, media: Media) -> bool:
        """Append an observation after the last turn.

        ``media`` are images shown before the text, by kind, for observations that
        :attr:`are_messages`.

        Returns:
            Whether it was appended; ``truncate_response_side`` can leave it out.
        """
        ids = self._encode(episode, text, media)
        if self._append(episode, ids, text, media):
            return True
        if self._limits.truncate_response_side == "right":
            return False

        # The model has to answer it: the observation takes no more than half of what is left.
        markup_length = len(ids) - len(self._codec.encode_text(text))
        max_text_length = episode.tokens_left // 2 - markup_length
        if max_text_length < 1:
            return False
        text = self._cut(text, max_text_length, "left")
        ids = self._encode(episode, text, media)
        return self._append(episode, ids, text, media)

    def _append(self, episode: Episode, ids: Sequence[int], text: str, media: Media) -> bool:
        messages = [self._message(text, media)] if text or media else []
        learn = not self._limits.mask_observations
        return episode.append_ids(ids, messages, learn=learn, media=media)

    def _message(self, text: str, media: Media | None = None) -> dict[str, Any]:
        role = self._limits.mtrl_role if self._limits.enable_mtrl else "tool"
        message: dict[str, Any] = {"role": role, "content": text}
        kinds = media_kinds(media or {})
        if kinds:
            message["media"] = kinds
        return message

    def _encode(self, episode: Episode, text: str, media: Media) -> list[int]:
        output = episode.turns[-1].output
        if not self.are_messages:
            return self._between_separators(text, turn_has_ended=self._has_ended(output))
        ids = episode.encode_append([self._message(text, media)])
        ids = self._codec.expand_media(ids, media)
        return self._without_second_end(output, ids)

    def _between_separators(self, text: str, *, turn_has_ended: bool) -> list[int]:
        limits = self._limits
        codec = self._codec
        if not limits.enable_mtrl or limits.mtrl_sep is None:
            return codec.encode_text(text)

        prefix, _, suffix = limits.mtrl_sep.partition("{obs}")
        if limits.turn_end_token and not turn_has_ended:
            prefix = limits.turn_end_token + prefix
        return [
            *codec.encode_markup(prefix),
            *codec.encode_text(text),
            *codec.encode_markup(suffix),
        ]

    def _has_ended(self, output: TokenOutput) -> bool:
        """Return whether the model wrote the end of its turn itself."""
        if output.stop_reason is StopReason.EOS:
            return True
        return output.stop_match is not None and output.stop_match == self._limits.turn_end_token

    def _without_second_end(self, output: TokenOutput, ids: list[int]) -> list[int]:
        """Drop the template's end of turn if the model already wrote it as ``turn_end_token``."""
        if output.stop_reason is StopReason.STOP and self._has_ended(output):
            end = self._codec.encode_markup(self._limits.turn_end_token or "")
            if ids[: len(end)] == end:
                return ids[len(end) :]
        return ids

    def _cut(self, text: str, limit: int, side: Any) -> str:
        return truncate_text(
            text, limit, side, encode=self._codec.encode_text, decode=self._codec.decode
        )


@dataclass
class ServerResponder(Responder):
    """Sends each turn's action to the tool server, and inserts the observation.

    The row's ``extra_info`` is sent with the action.
    """

    observations: ObservationCodec
    environment: ToolEnvironment
    row: Mapping[str, Any]

    def turn_limit(self, turns: int) -> FinishReason | None:
        return FinishReason.MAX_USER_TURNS if turns >= self.limits.max_turns else None

    def generate_options(self, *, last: bool) -> Mapping[str, Any]:
        limits = self.limits
        must_finish = last and limits.force_finish_for_last_turn
        return {
            "stop": () if limits.turn_end_token is None else (limits.turn_end_token,),
            "action_stops": () if must_finish else limits.action_stop_tokens,
            "stop_token_ids": limits.additional_eos_token_ids,
            "max_tokens": limits.max_action_length,
        }

    async def look_first(self, episode: Episode) -> None:
        """Add an observation of the new environment to the prompt (``agent.call_tool_first``)."""
        observation, record = await self._step("", 0)
        prefix = episode.request.prefix
        if prefix is not None:
            # The inherited prompt has the observation already; the new environment must agree.
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
        step = len(episode.turns) - 1
        action = self._action(episode, output, step)
        if action is None:
            return _finish_reason(episode, output, self.limits)
        if limit is not None:
            return limit

        observation, record = await self._step(action, step)
        episode.record_calls([record], seconds=record.seconds)
        episode.add_metrics(_metrics(observation))
        if observation.done:
            return FinishReason.TOOL_DONE
        fits = self.observations.insert(episode, record.observation, record.media)
        return None if fits else FinishReason.RESPONSE_LENGTH

    async def replay_turn(self, prefix: Prefix, turn: int) -> int:
        (recorded_call,) = prefix.turns[turn].tool_calls
        arguments = recorded_call.arguments or {}
        _, replayed_call = await self._step(arguments["action"], turn)
        check_replay(
            turn,
            recorded_call.name,
            describe_call(recorded_call),
            describe_call(replayed_call),
            remedy=SERVER_REMEDY,
        )
        return 1

    async def _step(self, action: str, step: int) -> tuple[ServerObservation, ToolCallRecord]:
        max_turns = self.limits.max_turns
        extra_fields = {
            **(self.row.get("extra_info") or {}),
            "current_step": step,
            "max_turns": max_turns,
            "turns_left": max_turns - step,
        }
        start_time = time.perf_counter()
        observation = await self.environment.step(
            action, name="tool_server", extra_fields=extra_fields
        )
        seconds = time.perf_counter() - start_time
        record = ToolCallRecord(
            name="tool_server",
            arguments={"action": action},
            observation=self.observations.shorten(observation.text),
            error=observation.error,
            reward=observation.reward,
            seconds=seconds,
            media=observation.media,
        )
        return observation, record

    def _action(self, episode: Episode, output: TokenOutput, step: int) -> str | None:
        """Return the text for the tool server, up to the first action stop token.

        None if the turn is no action.
        """
        limits = self.limits
        codec = self.context.codec
        if step == limits.max_turns and limits.force_finish_for_last_turn:
            return None

        text = episode.outside_thinking(output)
        has_thinking = text != codec.decode(output.token_ids, skip_special_tokens=False)

        ends = []
        for token in limits.action_stop_tokens:
            position = text.find(token)
            if position >= 0:
                ends.append(position + len(token))
        if ends:
            action = text[: min(ends)]
            # A blanked think block leaves white space in front.
            return action.lstrip() if has_thinking else action

        # Without a stop token the turn is an action only if the settings make every turn one.
        every_turn_acts = limits.enable_mtrl and not limits.action_stop_tokens
        must_act = step < limits.min_turns or every_turn_acts
        if not must_act or episode.tokens_left < 1:
            return None

        if has_thinking:
            action = text
            last_id = output.token_ids[-1]
            if last_id in codec.eos_token_ids:
                action = action.removesuffix(codec.decode([last_id], skip_special_tokens=False))
            action = action.lstrip()
        else:
            action = codec.decode(output.token_ids)
        action = action.removesuffix(limits.turn_end_token or "")
        if limits.action_stop_tokens:
            # The server's tools look for the token that the model left out.
            action += limits.action_stop_tokens[0]
        return action


@register_agent("server_tool_agent")
class ServerToolAgent(AgentLoop):
    """Runs the loop of this module.

    Settings: :class:`~jax_agent_rl.config.ServerToolConfig`.

    Raises:
        ConfigError: no tool server is configured, or no turn would ever call it.
    """

    continues_prefix = True

    def __init__(self, context: AgentContext):
        super().__init__(context)
        limits = context.limits
        self._observations = ObservationCodec(limits, context.codec)
        self._server = _server(limits) if limits.enable_agent else None

        self._lockstep = None
        if self._server and limits.rollout_mode != "async":
            self._lockstep = Lockstep(self._server.get_observation)

        max_concurrent = limits.max_concurrent_trajectories
        self._slots = nullcontext() if max_concurrent is None else asyncio.Semaphore(max_concurrent)

    async def preflight(self) -> None:
        if self._server:
            await self._server.check()

    async def close(self) -> None:
        if self._server:
            await self._server.close()

    async def play(self, request: EpisodeRequest) -> Trajectory:
        limits = self.context.limits
        async with self._slots:
            episode = self.start(request)
            if self._server is None:
                output = await episode.generate(
                    session_ends=True, max_tokens=limits.max_action_length
                )
                reason = _finish_reason(episode, output, limits)
            else:
                reason = await self._play_with_server(self._server, episode)
        return episode.finish(reason, no_loss=self._no_loss(episode, reason))

    async def _play_with_server(self, server: ToolServerClient, episode: Episode) -> FinishReason:
        """Run the turns of an episode against its environment on the tool server."""
        send = server.step
        if self._lockstep is not None:
            send = self._lockstep.send
        # Only the chat template can show images.
        modalities: frozenset[str] = frozenset()
        if self._observations.are_messages:
            modalities = self.context.modalities

        request = episode.request
        environment = ToolEnvironment(server, send, request.trajectory_id, modalities=modalities)
        async with environment, self._lockstep or nullcontext():
            responder = ServerResponder(self.context, self._observations, environment, request.row)
            if self.context.limits.call_tool_first:
                await responder.look_first(episode)
            reason = await run_turns(episode, responder)
        episode.add_metrics({"tool_close_failures": environment.close_failures})
        return reason

    def _no_loss(self, episode: Episode, reason: FinishReason) -> DropReason | None:
        """Return why a trajectory carries no loss; None if it does."""
        limits = self.context.limits
        if limits.mask_overlong_loss and reason.truncated:
            return DropReason.OVERLONG
        if not limits.mask_void_traj or not limits.enable_agent:
            return None

        for turn in episode.turns:
            if any(call.error is None for call in turn.tool_calls):
                return None
        if reason is FinishReason.ANSWER and answer_of(episode.messages[-1]["content"]).strip():
            return None
        return DropReason.VOID_TRAJECTORY


def _finish_reason(episode: Episode, output: TokenOutput, limits: AgentConfig) -> FinishReason:
    if output.stop_reason is not StopReason.LENGTH:
        return FinishReason.ANSWER
    if len(output.token_ids) == limits.max_action_length and episode.tokens_left > 0:
        return FinishReason.ACTION_LENGTH
    return FinishReason.RESPONSE_LENGTH


def _metrics(observation: ServerObservation) -> dict[str, float]:
    return {f"tool_server/{key}": value for key, value in observation.metrics.items()}


def _server(limits: AgentConfig) -> ToolServerClient:
    if limits.tool_server_url is None:
        raise ConfigError(
            "server_tool_agent needs a tool server; set agent.tool_server_url, e.g."
            " http://localhost:5000, or agent.enable_agent=false for plain generation"
        )
    if not limits.action_stop_tokens and not limits.enable_mtrl and not limits.min_turns:
        raise ConfigError(
            "server_tool_agent would never call a tool: set agent.action_stop_tokens (e.g."
            " '</python>'), agent.enable_mtrl=true, or agent.min_turns"
        )
    service = JsonService(
        url=observation_url(limits.tool_server_url),
        url_key="agent.tool_server_url",
        timeout=limits.tool_call_timeout,
        timeout_key="agent.tool_call_timeout",
        max_retries=limits.tool_call_max_retries,
        backoff=2.0,
        headers=bearer(limits.tool_server_token_env, key="agent.tool_server_token_env"),
        token_hint="set agent.tool_server_token_env to the environment variable that holds it",
        error=ToolServerError,
    )
    return ToolServerClient(service)
