"""The action in a turn, found by markers in its text.

::

    opening=None        so <py> 1 + 2 </py>           all of the turn, up to the end of its marker
                        ───────────────────
    opening="<tool>"    so <tool> 1 + 2 </tool>       what stands between the two markers
                                 ───────

Text in a think block is not an action: it is blanked before markers are looked for. It is not part
of an action either, as tool servers look for calls in all they get.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from jax_agent_rl.agents.episode import Episode
from jax_agent_rl.config import ServerToolConfig
from jax_agent_rl.types import TokenOutput

if TYPE_CHECKING:
    from jax_agent_rl.chat.codec import ChatCodec

_REPORTED_LENGTH = 100
"""Characters shown of a malformed action, from its end."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Action:
    """What a turn asks of the service.

    Attributes:
        text: the action; of a malformed one, the end of what the model wrote.
        problem: why it is malformed; None if it is not.
    """

    text: str
    problem: str | None = None


class Markers:
    """Finds actions.

    Args:
        settings: ``action_stop_tokens`` end actions; ``min_turns`` and ``enable_mtrl`` can make a
            turn without such a token an action.
        opening: what precedes an action; None: actions begin with their turns.
    """

    def __init__(self, settings: ServerToolConfig, codec: ChatCodec, *, opening: str | None = None):
        self._settings = settings
        self._codec = codec
        self._opening = opening

    @property
    def hint(self) -> str:
        """What to do about malformed actions."""
        closing = self._settings.action_stop_tokens[0]
        return f"show the model a call in the prompt, between {self._opening} and {closing}"

    def find(self, episode: Episode, output: TokenOutput) -> Action | None:
        """Return the action of the turn last sampled; None if the turn is not an action."""
        text = episode.outside_thinking(output)
        marker = _first_marker(text, self._settings.action_stop_tokens)
        if self._opening is not None:
            return _between(self._opening, marker, text) if marker else None

        has_thinking = text != self._codec.decode(output.token_ids, skip_special_tokens=False)
        if marker is None:
            return self._without_marker(episode, output, text, has_thinking=has_thinking)
        action = text[: marker.end]
        if has_thinking:
            action = action.lstrip()  # a blanked think block leaves white space in front
        return Action(text=action)

    def _without_marker(
        self, episode: Episode, output: TokenOutput, text: str, *, has_thinking: bool
    ) -> Action | None:
        """Return a turn without a marker as an action, if the settings make it one."""
        settings = self._settings
        codec = self._codec
        turns_before = len(episode.turns) - 1
        every_turn_acts = settings.enable_mtrl and not settings.action_stop_tokens
        must_act = turns_before < settings.min_turns or every_turn_acts
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
        action = action.removesuffix(settings.turn_end_token or "")
        if settings.action_stop_tokens:
            # The server's tools look for the token that the model left out.
            action += settings.action_stop_tokens[0]
        return Action(text=action)


@dataclass(frozen=True, slots=True)
class _Marker:
    """A marker in a text, and the position after it."""

    text: str
    end: int


def _first_marker(text: str, markers: Sequence[str]) -> _Marker | None:
    """Return the marker that ends first in a text; None if there is none."""
    found = []
    for marker in markers:
        start = text.find(marker)
        if start >= 0:
            found.append(_Marker(marker, start + len(marker)))
    return min(found, key=lambda marker: marker.end, default=None)


def _between(opening: str, closing: _Marker, text: str) -> Action:
    """Return the action between the last opening marker and the closing one after it."""
    start_of_closing = closing.end - len(closing.text)
    _, opening_found, body = text[:start_of_closing].rpartition(opening)
    if opening_found:
        return Action(text=body)
    return Action(
        text=body[-_REPORTED_LENGTH:] + closing.text,
        problem=f"{closing.text} without {opening}",
    )
