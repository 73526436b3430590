"""An engine with one program for everything, so that log-probs are bitwise reproducible.

Floating-point sums depend on the order of additions, and that order on the shapes a program was
compiled for. Elsewhere prompts are computed in chunks, slots in buckets and the learner's rows
packed, each by its own program, so log-probs differ by rounding and by how requests arrive. Here
one compiled program does all of it, stepping ``max_concurrent_decodes`` slots over all pages of the
longest context::

    prompts      fed id by id, the next one forced
    decoding     fed id by id, the next one sampled
    scoring      fed id by id, the next one forced; gives the learner's old log-probs

A slot's numbers depend on its own context alone: products [out, in] x [in, slots] sum over ``in``
in the same order for every slot, which tests confirm. The price is speed: prompts take a step per
id, and scoring costs about as much as the rollout (``benchmarks/deterministic.py``). Batch
invariance follows He et al. 2025, "Defeating Nondeterminism in LLM Inference".
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from jax_agent_rl.errors import ConfigError
from jax_agent_rl.jetstream import programs
from jax_agent_rl.jetstream.decode_batch import (
    DecodeBatch,
    Extension,
    Sampled,
    make_decode_batch,
    pad_decode_batch,
)
from jax_agent_rl.jetstream.engine import JaxEngine, PrintLine, ignore_line
from jax_agent_rl.jetstream.forward import EngineParams
from jax_agent_rl.jetstream.kv_cache import KVCache
from jax_agent_rl.jetstream.shapes import EngineShapes
from jax_agent_rl.models.config import DecoderConfig, Params

ANY_ID = 0


class DeterministicEngine(JaxEngine):
    """An engine with one program.

    Raises:
        ConfigError: the model is a mixture of experts, whose products group ids of all slots.
    """

    def __init__(self, config: DecoderConfig, shapes: EngineShapes, **options: Any) -> None:
        if config.experts is not None:
            raise ConfigError(
                f"rollout.deterministic: a {config.family} model's experts compute the ids of all"
                " slots together, so what one gets depends on the others; set"
                " rollout.deterministic=false"
            )
        super().__init__(config, shapes, **options)

    def extend(
        self, params: EngineParams, cache: KVCache, extensions: Sequence[Extension]
    ) -> KVCache:
        """Feed ids into pages, one by one."""
        unfinished = [extension for extension in extensions if len(extension.ids)]
        for batch in _batches(unfinished, self.max_concurrent_decodes):
            cache, _ = self.force(params, cache, batch, temperature=1.0)
        return cache

    def decode(
        self, params: EngineParams, cache: KVCache, slots: DecodeBatch, steps: int, exit_after: int
    ) -> tuple[KVCache, Sampled]:
        """Decode as :meth:`JaxEngine.decode` does."""
        # Nothing is forced.
        forced = np.full((self.shapes.decode_steps, self.max_concurrent_decodes), -1, np.int32)
        limits = np.array([steps, exit_after], np.int32)
        return self._run(params, cache, slots, limits, forced)

    def _suits_cpu_kernels(self) -> bool:
        """Return False: what tests confirm of sums is confirmed of XLA's."""
        return False

    def width(self, count: int) -> int:
        """Return ``max_concurrent_decodes``."""
        return self.max_concurrent_decodes

    def force(
        self,
        params: EngineParams,
        cache: KVCache,
        extensions: Sequence[Extension],
        *,
        temperature: float,
    ) -> tuple[KVCache, list[np.ndarray]]:
        """Feed ids into the pages of at most ``max_concurrent_decodes`` contexts.

        Args:
            cache: donated.
            extensions: the contexts' ids and pages.
            temperature: temperature of the log-probs.

        Returns:
            The cache, and for each extension of n ids float32 [n - 1]: the log-prob of every id but
                the first.
        """
        log_probs: list[list[np.ndarray]] = [[] for _ in extensions]
        steps = self.shapes.decode_steps
        longest = max((len(extension.ids) for extension in extensions), default=0)
        # No number of finished slots ends a dispatch early.
        limits = np.array([steps, len(extensions) + 1], np.int32)
        for begin in range(0, longest, steps):
            remaining = []
            for extension in extensions:
                remaining.append(extension.after(min(begin, len(extension.ids))))
            slots, forced = self._forced_slots(remaining, temperature)
            cache, sampled = self._run(params, cache, slots, limits, forced)
            for slot, slot_log_probs in enumerate(log_probs):
                has_run = sampled.ids[:, slot] >= 0
                slot_log_probs.append(sampled.log_probs[has_run, slot])

        scored = []
        for extension, slot_log_probs in zip(extensions, log_probs, strict=True):
            # The last one is of the id after the context.
            scored.append(np.concatenate(slot_log_probs)[: len(extension.ids) - 1])
        return cache, scored

    def warm_up(
        self, params: EngineParams, cache: KVCache, print_line: PrintLine = ignore_line
    ) -> KVCache:
        """Compile and run the one program."""
        print_line("compiling the one program (1 of 1)")
        slots = make_decode_batch(self.max_concurrent_decodes, self.shapes.context_pages)
        cache, _ = self.decode(params, cache, slots, self.shapes.decode_steps, 1)
        return self._end_warm_up(cache, print_line)

    def _forced_slots(
        self, extensions: Sequence[Extension], temperature: float
    ) -> tuple[DecodeBatch, np.ndarray]:
        """Return a slot for each extension, and the ids that are forced, int32 [steps, slots]."""
        steps = self.shapes.decode_steps
        slots = make_decode_batch(len(extensions), self.shapes.context_pages)
        forced = np.full((steps, self.max_concurrent_decodes), -1, np.int32)
        for slot, extension in enumerate(extensions):
            # The id after the last one is not read.
            following = [*extension.ids[1 : steps + 1], ANY_ID][:steps]
            forced[: len(following), slot] = following
            slots.pages[slot, : len(extension.pages)] = extension.pages
            slots.tokens[slot] = extension.ids[0] if len(extension.ids) else ANY_ID
            slots.positions[slot] = extension.start
            slots.remaining[slot] = len(extension.ids)
            slots.temperature[slot] = temperature
        return slots, forced

    def _run(
        self,
        params: EngineParams,
        cache: KVCache,
        slots: DecodeBatch,
        limits: np.ndarray,
        forced: np.ndarray,
    ) -> tuple[KVCache, Sampled]:
        count = len(slots.tokens)
        program = programs.decode_program(
            self.config, self.shapes.decode_steps, self.split, self.kernels
        )
        padded = pad_decode_batch(slots, self.max_concurrent_decodes - count)
        key: tuple = ("deterministic", cache.count)
        if slots.truncation is not None:
            key = (*key, "truncated")
        arguments = (params, cache, padded, limits, forced)
        shardings = (self.cache_sharding, self.replicated)
        cache, out = self._call(key, program, (1,), *arguments, out=shardings)
        return cache, Sampled.of(np.asarray(out)[:, :, :count])


class DeterministicScorer:
    """Scores finished contexts for the learner with the very program that sampled them.

    Args:
        dtype: type of the engine's weights, activations and cache.
        table: the engine's program table, which holds the compiled program.
        temperature: the rollout's, at which log-probs are computed.
    """

    def __init__(
        self,
        model: DecoderConfig,
        shapes: EngineShapes,
        *,
        dtype: Any,
        table: programs.ProgramTable,
        temperature: float,
    ) -> None:
        self._engine = DeterministicEngine(model, shapes, dtype=dtype, table=table)
        self._temperature = temperature

    def __call__(self, params: Params, contexts: Sequence[Sequence[int]]) -> list[np.ndarray]:
        """Return the log-prob of every id but the first: float32 [n - 1] for a context of n ids."""
        weights = self._engine.load_params(params)
        # As large as the engine's, since the program is compiled for that; freed on return.
        cache = self._engine.init_cache()

        # Similar lengths together, as many contexts as slots and cache can hold.
        shapes = self._engine.shapes
        order = sorted(range(len(contexts)), key=lambda i: len(contexts[i]))
        batch_size = min(shapes.max_concurrent_decodes, shapes.pages // shapes.context_pages)
        log_probs: dict[int, np.ndarray] = {}
        for batch in _batches(order, batch_size):
            extensions = []
            for slot, number in enumerate(batch):
                ids = np.asarray(contexts[number], np.int32)
                extensions.append(Extension(shapes.pages_of_slot(slot), 0, ids))
            cache, scored = self._engine.force(
                weights, cache, extensions, temperature=self._temperature
            )
            log_probs.update(zip(batch, scored, strict=True))
        return [log_probs[number] for number in range(len(contexts))]


def _batches(items: Sequence[Any], size: int) -> list[Sequence[Any]]:
    return [items[i : i + size] for i in range(0, len(items), size)]
