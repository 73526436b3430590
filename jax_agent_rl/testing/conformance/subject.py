"""A backend to be tested, and all the suite has to know about it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from jax_agent_rl.rollout.protocol import RolloutBackend
from jax_agent_rl.testing.conformance.reference import Reference

BASE, OTHER, MIXED = "base", "other", "mixed"
"""Weight sets of one architecture: the one a backend starts with, one that differs in every parameter, and the first
with some of the second's parameters."""

ADAPTER, ADAPTED = "conformance", "adapted"
"""A LoRA adapter, by the name requests give, and the weight set that ``BASE`` is with it merged in."""

SHORTEST_CONTEXT = 128
"""Least ``Capabilities.max_model_len`` the checks have room in."""


class MediaCounts(Protocol):
    """How contexts show images and videos, see :class:`jax_agent_rl.chat.media.MediaTokens`."""

    @property
    def placeholders(self) -> Mapping[str, int]:
        """Ids by kind."""
        ...

    def expand(self, ids: Sequence[int], media: Mapping[str, Sequence[Any]]) -> list[int]:
        """With each item's one placeholder as often as the model reads it."""
        ...


@dataclass(frozen=True, kw_only=True)
class BackendUnderTest:
    """One backend under test.

    Attributes:
        name: for the report.
        make: builds a backend that is not started, serving the weights ``BASE``; called again if one dies.
        reference: right answers for all weight sets.
        payload: (kind, weight set) to the payload of a ``WeightUpdate`` of that kind. That of ``MIXED`` holds only the
            parameters in which it differs from ``BASE``; it is asked for with ``Capabilities.partial_update``.
        vocab_size: ids are in [0, vocab_size).
        eos_ids: ids that end a generation.
        decode_text: ids to text, as the backend decodes them; None without a tokenizer.
        ending_prompts: prompts after which the model is likely to end soon; random ones are tried after them.
        media: how many ids an image or a video takes; None for models of text.
        adapter: whether the backend serves ``ADAPTER``, and the reference knows ``ADAPTED``.
        tolerance: largest difference of a log-prob from float64, in nats. 1e-3 suits float32, 0.1 bfloat16.
        patience: seconds one check may take before it counts as hanging.
    """

    name: str
    make: Callable[[], RolloutBackend]
    reference: Reference
    payload: Callable[[str, str], Any]
    vocab_size: int
    eos_ids: frozenset[int]
    decode_text: Callable[[Sequence[int]], str] | None = None
    ending_prompts: tuple[tuple[int, ...], ...] = ()
    media: MediaCounts | None = None
    adapter: bool = False
    tolerance: float = 1e-3
    patience: float = 120.0
