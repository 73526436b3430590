"""Observations of a service, written after the turn that asked for them.

::

    enable_mtrl=false           …</python> ──► observation ──► the model goes on
    enable_mtrl=true            …</python> ──► end of turn, a turn of mtrl_role,
                                               the next generation prompt
    enable_mtrl=true, mtrl_sep  …</python> ──► turn_end_token,
                                               mtrl_sep with the observation for {obs}

They are data: special tokens in them stay plain text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jax_agent_rl.agents.episode import Episode, media_kinds
from jax_agent_rl.config import ServerToolConfig
from jax_agent_rl.types import StopReason, TokenOutput

if TYPE_CHECKING:
    from jax_agent_rl.chat.codec import ChatCodec


Media = Mapping[str, tuple[Any, ...]]
"""Images and videos by kind."""


class ObservationWriter:
    """Shortens observations, and inserts them into episodes.

    Args:
        settings: keys such as ``enable_mtrl``, ``mtrl_sep`` and ``max_obs_length``.
        frame: text around an observation that continues the assistant's text, with ``{}`` for it.
    """

    def __init__(self, settings: ServerToolConfig, codec: ChatCodec, *, frame: str = "{}"):
        self._settings = settings
        self._codec = codec
        self._frame = frame

    @property
    def are_messages(self) -> bool:
        """True if observations are chat messages: written by the template, maybe with images."""
        return self._settings.enable_mtrl and self._settings.mtrl_sep is None

    def shorten(self, text: str) -> str:
        """Return ``text`` within ``max_obs_length`` tokens, cut on ``truncate_obs_side``."""
        settings = self._settings
        return self._codec.truncate(text, settings.max_obs_length, settings.truncate_obs_side)

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
        if self._settings.truncate_response_side == "right":
            return False

        # The model has to answer it: the observation takes no more than half of what is left.
        markup_length = len(ids) - len(self._codec.encode_text(text))
        max_text_length = episode.tokens_left // 2 - markup_length
        if max_text_length < 1:
            return False
        text = self._codec.truncate(text, max_text_length, "left")
        ids = self._encode(episode, text, media)
        return self._append(episode, ids, text, media)

    def _append(self, episode: Episode, ids: Sequence[int], text: str, media: Media) -> bool:
        messages = []
        # A frame of its own is seen by the model even where the text is empty.
        if self._frame.format(text) or media:
            messages.append(self._message(text, media))
        learn = not self._settings.mask_observations
        return episode.append_ids(ids, messages, learn=learn, media=media)

    def _message(self, text: str, media: Media | None = None) -> dict[str, Any]:
        role = self._settings.mtrl_role if self._settings.enable_mtrl else "tool"
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
        settings = self._settings
        codec = self._codec
        if not settings.enable_mtrl or settings.mtrl_sep is None:
            return codec.encode_text(self._frame.format(text))

        prefix, _, suffix = settings.mtrl_sep.partition("{obs}")
        if settings.turn_end_token and not turn_has_ended:
            prefix = settings.turn_end_token + prefix
        return [
            *codec.encode_markup(prefix),
            *codec.encode_text(text),
            *codec.encode_markup(suffix),
        ]

    def _has_ended(self, output: TokenOutput) -> bool:
        """Return whether the model wrote the end of its turn itself."""
        if output.stop_reason is StopReason.EOS:
            return True
        return output.stop_match is not None and output.stop_match == self._settings.turn_end_token

    def _without_second_end(self, output: TokenOutput, ids: list[int]) -> list[int]:
        """Drop the template's end of turn if the model already wrote it as ``turn_end_token``."""
        if output.stop_reason is StopReason.STOP and self._has_ended(output):
            end = self._codec.encode_markup(self._settings.turn_end_token or "")
            if ids[: len(end)] == end:
                return ids[len(end) :]
        return ids
