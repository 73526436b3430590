"""A backend under test and everything the suite needs to know about it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from jax_agent_rl.rollout.protocol import RolloutBackend
from jax_agent_rl.testing.conformance.reference import Reference

BASE, OTHER, MIXED = "base", "other", "mixed"
"""Weight sets of one architecture: the initial one, one that differs in every parameter, and a mixture of both."""

ADAPTER, ADAPTED = "conformance", "adapted"
"""Name of a LoRA adapter in requests, and of the weight set with that adapter merged into ``BASE``."""

SHORTEST_CONTEXT = 128
"""Smallest ``Capabilities.max_model_len`` in which the checks fit."""


class MediaCounts(Protocol):
    """How many ids images and videos take; see :class:`jax_agent_rl.chat.media.MediaTokens`."""

    @property
    def placeholders(self) -> Mapping[str, int]:
        """Placeholder ids by kind of media."""
        ...

    def expand(self, ids: Sequence[int], media: Mapping[str, Sequence[Any]]) -> list[int]:
        """Repeat each item's placeholder as often as the model reads it."""
        ...


@dataclass(frozen=True, kw_only=True)
class BackendUnderTest:
    """A backend under test.

    Attributes:
        name: name in the report.
        make: builds a backend, not yet started, that serves ``BASE``; called again if one dies.
        reference: correct logits for all weight sets.
        payload: maps (kind, weight set) to the payload of a ``WeightUpdate`` of that kind. The payload of ``MIXED``
            holds only the parameters that differ from ``BASE``; it is requested with ``Capabilities.partial_update``.
        vocab_size: ids are in [0, vocab_size).
        eos_ids: ids that end a generation.
        decode_text: decodes ids as the backend does; None without a tokenizer.
        ending_prompts: prompts after which the model is likely to end soon, tried before random ones.
        media: how many ids an image or a video takes; None for text models.
        adapter: whether the backend serves ``ADAPTER`` and the reference knows ``ADAPTED``.
        tolerance: largest log-prob error against float64, in nats: 1e-3 suits float32, 0.1 bfloat16.
        patience: seconds after which a check counts as hanging.
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
