"""Tool calls, media and forks of trajectories; import them from :mod:`jax_agent_rl.types`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolCallRecord:
    """One tool call of a turn, for rewards, metrics and display.

    Attributes:
        name: tool name the model wrote ("" when the call could not be decoded).
        arguments: decoded arguments, or None when they could not be decoded.
        observation: text the model read back (after truncation).
        error: None, or the kind: ``malformed``, ``unknown_tool``, ``bad_arguments``, ``timeout``,
            ``raised``, ``over_parallel_limit``, ``invalid_action`` (no tool of the tool server took it).
        reward: reward the tool itself gave.
        seconds: wall time of the call.
        call_id: the id the model gave the call, in formats that have one.
        media: images and videos it returned, by kind: ``{"image": (…,)}``.
    """

    name: str
    arguments: Mapping[str, Any] | None
    observation: str
    error: str | None = None
    reward: float = 0.0
    seconds: float = 0.0
    call_id: str | None = None
    media: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)


def join_media(parts: Iterable[Mapping[str, tuple[Any, ...]]]) -> dict[str, tuple[Any, ...]]:
    """Join images and videos from several mappings into one by kind, in order.

    >>> join_media([{"image": ("a",)}, {}, {"image": ("b",), "video": ("c",)}])
    {'image': ('a', 'b'), 'video': ('c',)}
    """
    joined: dict[str, tuple[Any, ...]] = {}
    for part in parts:
        for kind, items in part.items():
            joined[kind] = joined.get(kind, ()) + tuple(items)
    return joined


@dataclass(frozen=True, kw_only=True, slots=True)
class Fork:
    """Where a trajectory branched off another one of its tree.

    The inherited ids are equal one by one and never sampled again::

        parent  = [20 21 2] [30 31 32] [40 41 2]
        fork    = turns 1, tokens 1
        branch  = [20 21 2] [30 31 32] [40] + [50 2]        newly sampled: 50 2

    Attributes:
        tree_id: the first trajectory of the tree.
        parent_id: the trajectory it branched off.
        turns: number of whole inherited turns, with what was appended to them.
        tokens: number of inherited ids of the turn after those.
    """

    tree_id: str
    parent_id: str
    turns: int
    tokens: int = 0

    @property
    def at_prompt(self) -> bool:
        """Whether it inherits the prompt alone: a new chain that counts as part of the tree."""
        return self.turns == self.tokens == 0
