"""State of one running generation, and totals over all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from jax_agent_rl.chat.grammar import GrammarState
from jax_agent_rl.errors import BackendError, PromptTooLongError
from jax_agent_rl.jetstream.shapes import EngineShapes
from jax_agent_rl.models.config import DecoderConfig
from jax_agent_rl.models.vision_context import MultimodalContext
from jax_agent_rl.rollout.protocol import GenerateRequest
from jax_agent_rl.types import RoutedExperts, StopReason, Support, TokenOutput, digest_ids
from jax_agent_rl.types.supports import encode_supports


@dataclass
class Counters:
    """Running totals behind :class:`BackendMetrics`."""

    generated_tokens: int = 0
    prefill_tokens: int = 0
    cached_tokens: int = 0
    recomputed_tokens: int = 0
    requests_finished: int = 0
    busy_seconds: float = 0.0
    prefill_seconds: float = 0.0
    weight_update_seconds: float = 0.0
    slot_steps: int = 0
    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0


class EngineInfo(Protocol):
    """What an engine says of itself, which requests are checked against."""

    @property
    def config(self) -> DecoderConfig: ...

    @property
    def shapes(self) -> EngineShapes: ...

    @property
    def adapters(self) -> Sequence[str]:
        """Names of the LoRA adapters."""
        ...


def check_request(request: GenerateRequest, engine: EngineInfo, *, stop_strings: bool) -> None:
    """Refuse a request that an engine cannot serve.

    Args:
        stop_strings: whether the engine can decode ids to text, which stop strings need.

    Raises:
        PromptTooLongError: there is no room for one sampled id.
        BackendError: anything else.
    """
    name = f"request {request.request_id!r}"
    max_model_len = engine.shapes.max_model_len
    if len(request.prompt_ids) >= max_model_len:
        raise PromptTooLongError(
            f"{name}: a prompt of {len(request.prompt_ids)} ids leaves no room in"
            f" rollout.max_model_len={max_model_len}; shorten the prompt or raise"
            " rollout.max_model_len"
        )

    if request.lora is not None and request.lora not in engine.adapters:
        raise BackendError(
            f"{name}: no LoRA adapter {request.lora!r}; there are {sorted(engine.adapters)}"
            " (rollout.adapters)"
        )

    if request.sampling.stop and not stop_strings:
        raise BackendError(f"{name} has stop strings, but this engine was given no tokenizer")

    vocab_size = engine.config.vocab_size
    for token in request.prompt_ids:
        if not 0 <= token < vocab_size:
            raise BackendError(f"{name}: prompt ids must be in [0, {vocab_size})")


class RunningRequest:
    """Mutable state of one request inside the engine thread.

    Args:
        max_tokens: most ids to sample: the request's limit, or less where the context ends.
        eos_ids: ids that end it with ``StopReason.EOS``.
        seed: uint32.
        decode_text: ids to text, for stop strings.
        multimodal: the prompt with its images, if any.
        grammar: where its output stands in its grammar, if it has one.
        order: (priority, arrival); least first.
    """

    def __init__(
        self,
        request: GenerateRequest,
        *,
        max_tokens: int,
        eos_ids: frozenset[int],
        seed: int,
        decode_text: Callable[[Sequence[int]], str] | None,
        multimodal: MultimodalContext | None = None,
        grammar: GrammarState | None = None,
        order: tuple[int, int] = (0, 0),
    ) -> None:
        self.request = request
        self.order = order
        self.max_tokens = max_tokens
        self.seed = seed
        self.multimodal = multimodal
        self.grammar = grammar

        # What images add to the rotary positions of the ids after them.
        self.offset = multimodal.offset if multimodal else 0
        # Cache keys of a prompt with images, see ImageKeys.
        self.keys: np.ndarray | None = None
        # Number in the block manager (or slot table) while it runs.
        self.context: int | None = None
        self.cached_tokens = 0
        self.num_preempted = 0

        self.token_ids: list[int] = []
        self.log_probs: list[float] = []
        self.versions: list[int] = []
        # Of all ids or of none.
        self.constrained: list[bool] = []
        # Of all ids, or of none if they are drawn from the whole vocabulary.
        self.supports: list[Support | None] = []
        # Of positions up to the last preemption, or of all at the end.
        self.routed: RoutedExperts | None = None
        self.stop_reason: StopReason | None = None
        self.stop_match: str | None = None

        sampling = request.sampling
        self._eos_ids = frozenset() if sampling.ignore_eos else eos_ids
        self._stop_ids = frozenset(sampling.stop_token_ids)
        self._decode_text = decode_text
        # A stop string of n bytes spans at most n ids with text; the margin is for ids without.
        longest_stop = max((len(s.encode()) for s in sampling.stop), default=0)
        self._window = longest_stop + 8

    @property
    def stop_ids(self) -> list[int]:
        """All ids that end the generation, for the device."""
        return sorted(self._eos_ids | self._stop_ids)

    @property
    def last_id(self) -> int:
        """Newest id of the context, which the next decode step feeds."""
        return self.token_ids[-1] if self.token_ids else self.request.prompt_ids[-1]

    @property
    def context_ids(self) -> tuple[int, ...]:
        """Prompt and output so far."""
        return (*self.request.prompt_ids, *self.token_ids)

    def tail(self, count: int) -> list[int]:
        """Return the last ``count`` ids of the context, or all."""
        from_prompt = max(0, count - len(self.token_ids))
        prompt_ids = self.request.prompt_ids
        begin = max(0, len(prompt_ids) - from_prompt)
        return [*prompt_ids[begin:], *self.token_ids[-count:]]

    @property
    def context_keys(self) -> np.ndarray:
        """:attr:`context_ids` as the cache tells them apart, int32: with the keys of images."""
        ids = np.asarray(self.context_ids, np.int32)
        if self.keys is None:
            return ids
        return np.concatenate([self.keys, ids[len(self.keys) :]])

    @property
    def remaining(self) -> int:
        return self.max_tokens - len(self.token_ids)

    def accept(
        self,
        ids: np.ndarray,
        log_probs: np.ndarray,
        version: int,
        support_bits: np.ndarray | None = None,
    ) -> int:
        """Append sampled ids up to the one that ends the generation; return how many were appended.

        Args:
            ids: int32 [n].
            log_probs: float32 [n].
            version: policy version of the weights.
            support_bits: uint32 [n, ceil(V / 32)], a bit for each id that could be drawn; None
                where that is not known.
        """
        accepted = 0
        for token, log_prob in zip(ids.tolist(), log_probs.tolist(), strict=True):
            if self.stop_reason is not None:
                break
            self.token_ids.append(token)
            self.log_probs.append(log_prob)
            self.versions.append(version)
            accepted += 1
            self._check_stop(token)

        if support_bits is not None and self.request.sampling.restricted:
            self.supports += encode_supports(support_bits[:accepted])

        # The id that ends an output is none of the grammar's.
        if self.grammar is not None and self.stop_reason is None:
            first = len(self.token_ids) - accepted
            self.grammar.consume(self.token_ids[first:])
        return accepted

    def _check_stop(self, token: int) -> None:
        if token in self._eos_ids:
            self.stop_reason = StopReason.EOS
            return
        if token in self._stop_ids:
            self.stop_reason = StopReason.STOP
            self.stop_match = str(token)
            return

        if self.request.sampling.stop:
            match = self._stop_string()
            if match:
                self.stop_reason = StopReason.STOP
                self.stop_match = match
                return

        if self.remaining == 0:
            self.stop_reason = StopReason.LENGTH

    def _stop_string(self) -> str | None:
        """Return the first of the request's stop strings in the text of the last ids, if any."""
        assert self._decode_text is not None  # refused at submission otherwise
        text = self._decode_text(self.token_ids[-self._window :])
        for stop in self.request.sampling.stop:
            if stop in text:
                return stop
        return None

    def keys_to_ids(self, cached_keys: np.ndarray) -> np.ndarray:
        """Map the cached keys of this context to ids, int32; keys of other images stay."""
        if self.keys is None:
            return cached_keys
        prompt = cached_keys[: len(self.keys)]
        prompt_ids = np.asarray(self.request.prompt_ids, np.int32)[: len(prompt)]
        is_own_key = prompt == self.keys[: len(prompt)]
        return np.concatenate(
            [np.where(is_own_key, prompt_ids, prompt), cached_keys[len(prompt) :]]
        )

    def output(self, context_ids: Sequence[int]) -> TokenOutput:
        """Return the result, with a digest of ``context_ids``: prompt and output as cached."""
        assert self.stop_reason is not None
        return TokenOutput(
            token_ids=tuple(self.token_ids),
            log_probs=tuple(self.log_probs),
            policy_versions=tuple(self.versions),
            stop_reason=self.stop_reason,
            stop_match=self.stop_match,
            context_digest=digest_ids(context_ids),
            cached_tokens=self.cached_tokens,
            num_preempted=self.num_preempted,
            constrained=tuple(self.constrained),
            routed_experts=self.routed,
            supports=tuple(self.supports),
        )
