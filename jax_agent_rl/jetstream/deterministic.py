"""An engine with one program for everything, so that an id's log-prob is bitwise the same however it is computed.

Floating-point sums depend on the order of additions, and that on the shapes a program was compiled
for. Elsewhere prompts are computed in chunks, slots in buckets and the learner's rows packed, each
by its own program, so log-probs differ by rounding and by how requests arrive. Here one compiled
program does all of it, stepping ``max_concurrent_decodes`` slots over all pages of the longest
context::

    prompts      fed id by id, the next one forced
    decoding     fed id by id, the next one sampled
    scoring      fed id by id, the next one forced, its log-prob kept        (the learner's old log-probs)

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
        waiting = [extension for extension in extensions if len(extension.ids)]
        for some in _batches(waiting, self.max_concurrent_decodes):
            cache, _ = self.force(params, cache, some, temperature=1.0)
        return cache

    def decode(
        self, params: EngineParams, cache: KVCache, slots: DecodeBatch, steps: int, exit_after: int
    ) -> tuple[KVCache, Sampled]:
        """Decode as :meth:`JaxEngine.decode` does."""
        forced = np.full((self.shapes.decode_steps, self.max_concurrent_decodes), -1, np.int32)
        return self._run(params, cache, slots, np.array([steps, exit_after], np.int32), forced)

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
            params: weights.
            cache: donated.
            extensions: the ids.
            temperature: of the log-probs.

        Returns:
            The cache, and for each extension of n ids float32 [n - 1]: the log-prob of every id but
                the first.
        """
        scored: list[list[np.ndarray]] = [[] for _ in extensions]
        for done in range(
            0, max((len(e.ids) for e in extensions), default=0), self.shapes.decode_steps
        ):
            slots, forced = self._forced_slots(
                [e.after(min(done, len(e.ids))) for e in extensions], temperature
            )
            limits = np.array([self.shapes.decode_steps, len(extensions) + 1], np.int32)
            cache, sampled = self._run(params, cache, slots, limits, forced)
            for slot, own in enumerate(scored):
                own.append(sampled.log_probs[sampled.ids[:, slot] >= 0, slot])
        return cache, [
            np.concatenate(own)[: len(e.ids) - 1] for own, e in zip(scored, extensions, strict=True)
        ]

    def warm_up(
        self, params: EngineParams, cache: KVCache, print_line: PrintLine = ignore_line
    ) -> KVCache:
        """Compile and run the one program."""
        print_line("compiling the one program (1 of 1)")
        slots = make_decode_batch(self.max_concurrent_decodes, self.shapes.context_pages)
        cache, _ = self.decode(params, cache, slots, self.shapes.decode_steps, 1)
        return self._end_warm_up(cache, print_line)

    def _forced_slots(
        self, rest: Sequence[Extension], temperature: float
    ) -> tuple[DecodeBatch, np.ndarray]:
        steps = self.shapes.decode_steps
        slots = make_decode_batch(len(rest), self.shapes.context_pages)
        forced = np.full((steps, self.max_concurrent_decodes), -1, np.int32)
        for slot, extension in enumerate(rest):
            following = [*extension.ids[1 : steps + 1], ANY_ID][
                :steps
            ]  # the id after the last one is not read
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
        key = ("deterministic", cache.count, *["truncated"][: slots.truncation is not None])
        places = (self.cache_sharding, self.replicated)
        cache, out = self._call(
            key, program, (1,), params, cache, padded, limits, forced, out=places
        )
        return cache, Sampled.of(np.asarray(out)[:, :, :count])


class DeterministicScorer:
    """Scores finished contexts for the learner with the very program that sampled them.

    Args:
        model: the model.
        shapes: the run's engine shapes.
        dtype: the engine's dtype.
        table: the engine's, which holds the compiled program.
        temperature: the rollout's.
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
        """Return float32 [n - 1] for each context of n ids: the log-prob of every id but the first."""
        weights = self._engine.load_params(params)
        # As large as the engine's, since the program is compiled for that; freed on return.
        cache = self._engine.init_cache()
        scored: list[np.ndarray] = []
        order = sorted(
            range(len(contexts)), key=lambda i: len(contexts[i])
        )  # similar lengths together
        shapes = self._engine.shapes
        for some in _batches(
            order, min(shapes.max_concurrent_decodes, shapes.pages // shapes.context_pages)
        ):
            fed = [
                Extension(
                    self._engine.shapes.pages_of_slot(slot), 0, np.asarray(contexts[i], np.int32)
                )
                for slot, i in enumerate(some)
            ]
            cache, own = self._engine.force(weights, cache, fed, temperature=self._temperature)
            scored += own
        placed = dict(zip(order, scored, strict=True))
        return [placed[i] for i in range(len(contexts))]


def _batches(items: Sequence[Any], size: int) -> list[Sequence[Any]]:
    return [items[i : i + size] for i in range(0, len(items), size)]
