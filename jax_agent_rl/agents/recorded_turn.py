"""Turns of a recorded session: what was asked, what was sampled, and which turn it continues."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from jax_agent_rl.agents.conversation import ChatReply
from jax_agent_rl.types import TokenOutput, ToolCallRecord, join_media

Media = Mapping[str, tuple[Any, ...]]
"""Images by kind, in order of their placeholders."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RecordedTurn:
    """One sampled turn: a node of the session's tree.

    Attributes:
        number: order of completion in the session.
        parent: the turn it continues, or None for a rendered prompt.
        inserted_ids: ids between the parent's and its own: the whole prompt of a root.
        replaces_end: ``inserted_ids`` take the place of the parent's stop token, see ``ChatCodec.replaces_end``.
        output: the generation.
        prompt_length: ids of its root's prompt.
        context_ids: everything up to and including its own ids.
        inserted: plain messages added since the parent, without the data of their images.
        inserted_media: those images, by kind, in order of their placeholders in ``inserted_ids``.
        reply: what the framework was given.
        text: its ids as text.
        note: where the request left what was on record, as text; empty if it continued it.
        tool_calls: results of its calls, where the agent loop itself ran them.
    """

    number: int
    parent: RecordedTurn | None
    inserted_ids: tuple[int, ...]
    replaces_end: bool
    output: TokenOutput
    prompt_length: int
    context_ids: tuple[int, ...]
    inserted: tuple[Mapping[str, Any], ...]
    inserted_media: Media
    reply: ChatReply
    text: str
    note: str
    tool_calls: list[ToolCallRecord] = field(default_factory=list)

    def path(self) -> list[RecordedTurn]:
        """Return the turns from its root to itself."""
        path, turn = [], self
        while turn is not None:
            path.append(turn)
            turn = turn.parent
        return path[::-1]


@dataclass(frozen=True, kw_only=True, slots=True)
class TurnRequest:
    """A request resolved to ids."""

    parent: RecordedTurn | None
    ids: tuple[int, ...]
    inserted: tuple[Mapping[str, Any], ...]
    inserted_media: Media = field(default_factory=dict)
    replaces_end: bool = False
    note: str = ""

    @property
    def media(self) -> dict[str, tuple[Any, ...]]:
        """Images of the whole context."""
        before = self.parent.path() if self.parent else ()
        return join_media([*(turn.inserted_media for turn in before), self.inserted_media])

    @property
    def context_ids(self) -> tuple[int, ...]:
        before = self.parent.context_ids if self.parent else ()
        return (before[:-1] if self.replaces_end else before) + self.ids

    @property
    def prompt_length(self) -> int:
        return self.parent.prompt_length if self.parent else len(self.ids)
