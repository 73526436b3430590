"""Scores of finished contexts for the learner, by the program that sampled them."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jax_agent_rl.config.engines import EngineMeshConfig
from jax_agent_rl.jetstream.decode_batch import Extension
from jax_agent_rl.jetstream.deterministic import OneProgram, batches
from jax_agent_rl.jetstream.engine import JaxEngine
from jax_agent_rl.jetstream.forward import EngineParams
from jax_agent_rl.jetstream.programs import ProgramTable
from jax_agent_rl.jetstream.shapes import EngineShapes
from jax_agent_rl.jetstream.sharding import make_engine_mesh, split_mesh
from jax_agent_rl.jetstream.state_slots import NULL_STATE
from jax_agent_rl.jetstream.weights import WeightLoader
from jax_agent_rl.models.config import DecoderConfig, Params


class DeterministicScorer:
    """Scores finished contexts for the learner with the very program that sampled them.

    The devices of all engines take part::

        learner's weights ──► engine 0's devices: batch 0, then 2, … ──┐
                          ──► engine 1's devices: batch 1, then 3, … ──┴──► log-probs

    Args:
        dtype: type of the engines' weights, activations and cache.
        program_table: the engines', which holds the compiled programs.
        temperature: the rollout's, at which log-probs are computed.
        mesh: of all engines; None is this process's first device.
    """

    def __init__(
        self,
        model: DecoderConfig,
        shapes: EngineShapes,
        *,
        dtype: Any,
        program_table: ProgramTable,
        temperature: float,
        mesh: Mesh | None = None,
    ) -> None:
        self._scorers = []
        for engine_mesh in split_mesh(mesh or make_engine_mesh(EngineMeshConfig())):
            engine = JaxEngine(
                model,
                shapes,
                dtype=dtype,
                mesh=engine_mesh,
                program_table=program_table.of(engine_mesh),
                deterministic=True,
            )
            self._scorers.append(_EngineScorer(model, engine, temperature=temperature))
        # Similar lengths together, as many contexts as slots and cache can hold.
        self._batch_size = min(shapes.max_concurrent_decodes, shapes.pages // shapes.context_pages)

    def __call__(self, params: Params, contexts: Sequence[Sequence[int]]) -> list[np.ndarray]:
        """Return the log-prob of every id but the first: float32 [n - 1] for a context of n ids."""
        order = sorted(range(len(contexts)), key=lambda i: len(contexts[i]))
        numbered = batches(order, self._batch_size)

        # One after the other, as they may share the learner's devices for it.
        weights = []
        for scorer in self._scorers:
            weights.append(jax.block_until_ready(scorer.load(params)))

        def score(number: int) -> list[list[np.ndarray]]:
            scorer = self._scorers[number]
            engine_batches = []
            for batch in numbered[number :: len(self._scorers)]:
                engine_batches.append([contexts[i] for i in batch])
            return scorer.score(weights[number], engine_batches)

        with ThreadPoolExecutor(len(self._scorers)) as pool:
            scored = list(pool.map(score, range(len(self._scorers))))

        log_probs: dict[int, np.ndarray] = {}
        for number, batch in enumerate(numbered):
            of_engine = scored[number % len(self._scorers)]
            log_probs.update(zip(batch, of_engine[number // len(self._scorers)], strict=True))
        return [log_probs[number] for number in range(len(contexts))]


class _EngineScorer:
    """Scores batches of contexts on one engine's devices.

    Attributes:
        load: copies the learner's weights into the engine's layout.
    """

    def __init__(self, model: DecoderConfig, engine: JaxEngine, *, temperature: float) -> None:
        self._engine = engine
        self._program = OneProgram(engine.context)
        self._temperature = temperature
        # With a table of its own: engines that load together have other programs for it.
        self.load = WeightLoader(
            model,
            engine.config,
            engine.context.mesh,
            dtype=engine.context.dtype,
            quantize=None,
            by_rows=True,
            call=ProgramTable().call,
        )

    def score(
        self, weights: EngineParams, contexts: Sequence[Sequence[Sequence[int]]]
    ) -> list[list[np.ndarray]]:
        """Return the log-probs of batches of contexts, each of which fits the slots."""
        # As large as the engine's, since the program is compiled for that; freed on return.
        cache = self._engine.init_cache()
        shapes = self._engine.shapes
        log_probs = []
        for batch in contexts:
            extensions = []
            for slot, context in enumerate(batch):
                ids = np.asarray(context, np.int32)
                extension = Extension(shapes.pages_of_slot(slot), 0, ids, state=1 + slot)
                extensions.append(extension)
                if self._engine.context.has_states:
                    cache = self._engine.copy_state(cache, NULL_STATE, extension.state)
            cache, scored = self._program.force(
                weights, cache, extensions, temperature=self._temperature
            )
            log_probs.append(scored)
        return log_probs
