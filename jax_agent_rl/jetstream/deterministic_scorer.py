"""Scores of finished contexts for the learner, by the program that sampled them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from jax_agent_rl.jetstream.decode_batch import Extension
from jax_agent_rl.jetstream.deterministic import OneProgram, batches
from jax_agent_rl.jetstream.engine import JaxEngine
from jax_agent_rl.jetstream.programs import ProgramTable
from jax_agent_rl.jetstream.shapes import EngineShapes
from jax_agent_rl.jetstream.state_slots import NULL_STATE
from jax_agent_rl.models.config import DecoderConfig, Params


class DeterministicScorer:
    """Scores finished contexts for the learner with the very program that sampled them.

    Args:
        dtype: type of the engine's weights, activations and cache.
        program_table: the engine's, which holds the compiled program.
        temperature: the rollout's, at which log-probs are computed.
    """

    def __init__(
        self,
        model: DecoderConfig,
        shapes: EngineShapes,
        *,
        dtype: Any,
        program_table: ProgramTable,
        temperature: float,
    ) -> None:
        self._engine = JaxEngine(
            model, shapes, dtype=dtype, program_table=program_table, deterministic=True
        )
        self._program = OneProgram(self._engine.context)
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
        for batch in batches(order, batch_size):
            extensions = []
            for slot, number in enumerate(batch):
                ids = np.asarray(contexts[number], np.int32)
                extension = Extension(shapes.pages_of_slot(slot), 0, ids, state=1 + slot)
                extensions.append(extension)
                if self._engine.context.has_states:
                    cache = self._engine.copy_state(cache, NULL_STATE, extension.state)
            cache, scored = self._program.force(
                weights, cache, extensions, temperature=self._temperature
            )
            log_probs.update(zip(batch, scored, strict=True))
        return [log_probs[number] for number in range(len(contexts))]
