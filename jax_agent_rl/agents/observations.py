"""Tool-server observations as ids: their position, length limit and loss mask."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jax_agent_rl.agents.episode import Episode
from jax_agent_rl.config import AgentConfig
from jax_agent_rl.tools.truncate import truncate_text
from jax_agent_rl.types import StopReason, TokenOutput

if TYPE_CHECKING:
    from jax_agent_rl.chat.codec import ChatCodec


Media = Mapping[str, tuple[Any, ...]]
"""Images and videos by kind."""


class ObservationCodec:
    """Inserts observations after turns. They are data: text of special tokens in them stays plain text.

    ::

        enable_mtrl=false           …</python> ──► observation ──► the model goes on
        enable_mtrl=true            …</python> ──► end of turn, a turn of mtrl_role, the next generation prompt
        enable_mtrl=true, mtrl_sep  …</python> ──► turn_end_token, mtrl_sep with the observation for {obs}

    Args:
        limits: the ``agent`` section of the config.
        codec: messages to ids and back.
    """

    def __init__(self, limits: AgentConfig, codec: ChatCodec):
        self._limits = limits
        self._codec = codec

    @property
    def are_messages(self) -> bool:
        """Whether observations are chat messages, which the template writes and which may hold images."""
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
        """Append an observation after the last turn; return False if ``truncate_response_side`` leaves it out.

        Args:
            episode: the trajectory.
            text: the observation.
            media: images shown before the text, by kind; only for observations that :attr:`are_messages`.
        """
        ids = self._encode(episode, text, media)
        if self._append(episode, ids, text, media):
            return True
        if self._limits.truncate_response_side == "right":
            return False
        around = len(ids) - len(self._codec.encode_text(text))
        room = episode.tokens_left // 2 - around
        if room < 1:
            return False
        text = self._cut(text, room, "left")
        return self._append(episode, self._encode(episode, text, media), text, media)

    def _append(self, episode: Episode, ids: Sequence[int], text: str, media: Media) -> bool:
        messages = [self._message(text, media)] if text or media else []
        return episode.append_ids(ids, messages, learn=not self._limits.mask_observations, media=media)

    def _message(self, text: str, media: Media | None = None) -> dict[str, Any]:
        role = self._limits.mtrl_role if self._limits.enable_mtrl else "tool"
        kinds = [kind for kind, items in (media or {}).items() for _ in items]
        return {"role": role, "content": text} | ({"media": kinds} if kinds else {})

    def _encode(self, episode: Episode, text: str, media: Media) -> list[int]:
        output = episode.turns[-1].output
        if self.are_messages:
            ids = self._codec.expand_media(episode.encode_append([self._message(text, media)]), media)
            return self._without_second_end(output, ids)
        return self._between_separators(text, turn_has_ended=self._has_ended(output))

    def _between_separators(self, text: str, *, turn_has_ended: bool) -> list[int]:
        limits, codec = self._limits, self._codec
        if not limits.enable_mtrl or limits.mtrl_sep is None:
            return codec.encode_text(text)
        before, _, after = limits.mtrl_sep.partition("{obs}")
        end = "" if turn_has_ended else limits.turn_end_token or ""
        return [*codec.encode_markup(end + before), *codec.encode_text(text), *codec.encode_markup(after)]

    def _has_ended(self, output: TokenOutput) -> bool:
        """Return whether the model wrote the end of its turn itself."""
        return output.stop_reason is StopReason.EOS or (
            output.stop_match is not None and output.stop_match == self._limits.turn_end_token
        )

    def _without_second_end(self, output: TokenOutput, ids: list[int]) -> list[int]:
        """Drop the template's end of turn if the model already wrote it as ``turn_end_token``."""
        if output.stop_reason is StopReason.STOP and self._has_ended(output):
            end = self._codec.encode_markup(self._limits.turn_end_token or "")
            if ids[: len(end)] == end:
                return ids[len(end) :]
        return ids

    def _cut(self, text: str, limit: int, side: Any) -> str:
        return truncate_text(text, limit, side, encode=self._codec.encode_text, decode=self._codec.decode)
