"""Our own engine behind JetStream's later API, as MaxText's engine offers it: a real model with
real numbers.

It has that API's manners, too: state and prefix are used up by a call, every slot is stepped
whether it is filled or not, one way of sampling holds for all of them, and nothing is known of stop
ids or budgets.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_agent_rl.jetstream.decode_batch import make_decode_batch
from jax_agent_rl.jetstream.driver_interface import DecodeState, EnginePrefix, JetStreamEngine
from jax_agent_rl.jetstream.engine import EngineShapes, JaxEngine
from jax_agent_rl.jetstream.external_engine import ExternalEngine
from jax_agent_rl.jetstream.programs import ProgramTable
from jax_agent_rl.models.config import DecoderConfig


@dataclass(frozen=True)
class LaterResultTokens:
    """The fields of JetStream 0.3.0's ``ResultTokens`` that are read."""

    data: jax.Array  # int32 [slots, 3]: id, valid, length
    log_prob: jax.Array | None  # float32 [slots, 1]
    tokens_idx: tuple[int, int] = (0, 1)


@functools.cache
def _table(model: DecoderConfig, shapes: EngineShapes) -> ProgramTable:
    """Programs are compiled once for all tests of a model."""
    return ProgramTable()


class LaterApiEngine:
    """The part of the later API that a rollout needs."""

    samples_per_slot = 1

    def __init__(
        self, model: DecoderConfig, shapes: EngineShapes, *, return_log_prob: bool = True
    ) -> None:
        self.inner = JaxEngine(model, shapes, program_table=_table(model, shapes))
        self._driven = JetStreamEngine(self.inner)
        self.freed: list[int] = []
        self.max_prefill_length = shapes.max_model_len
        self.max_concurrent_decodes = shapes.max_concurrent_decodes
        self._return_log_prob = return_log_prob

    def init_decode_state(self) -> DecodeState:
        return self._driven.init_decode_state()

    def prefill(
        self,
        *,
        params: Any,
        padded_tokens: jax.Array,
        true_length: int,
        rng: jax.Array,
        algorithm: str,
    ) -> tuple[EnginePrefix, LaterResultTokens]:
        prefix = self._driven.prefill(
            params=params, padded_tokens=padded_tokens, true_length=true_length
        )
        state = DecodeState(
            cache=prefix.cache,
            tokens=prefix.last_token[None],
            positions=prefix.length[None],
            generated=jnp.zeros(1, jnp.int32),
        )
        state, result = self._step(params, state, rng, algorithm)
        return (
            EnginePrefix(cache=state.cache, last_token=state.tokens[0], length=state.positions[0]),
            result,
        )

    def insert(self, prefix: EnginePrefix, decode_state: DecodeState, slot: int) -> DecodeState:
        return self._driven.insert(prefix, decode_state, slot)

    def generate(
        self, params: Any, decode_state: DecodeState, rng: jax.Array, algorithm: str
    ) -> tuple[DecodeState, LaterResultTokens]:
        return self._step(params, decode_state, rng, algorithm)

    def free_resource(self, slot: int) -> None:
        self.freed.append(slot)

    def _step(
        self, params: Any, state: DecodeState, rng: jax.Array, algorithm: str
    ) -> tuple[DecodeState, LaterResultTokens]:
        slots = len(state.tokens)
        batch = make_decode_batch(slots, self.inner.shapes.context_pages)
        batch.pages[:] = [self.inner.shapes.pages_of_slot(slot) for slot in range(slots)]
        batch.tokens[:] = state.tokens
        batch.positions[:] = state.positions
        batch.remaining[:] = 1
        batch.temperature[:] = {"greedy": 0.0, "weighted": 1.0}[algorithm]
        batch.seed[:] = np.random.default_rng(np.asarray(rng)).integers(2**32, size=slots)
        cache, sampled = self.inner.decode(params, state.cache, batch, 1, slots + 1)
        ids = jnp.asarray(sampled.ids[0])
        limit = self.inner.shapes.cache_length - self.inner.shapes.decode_steps
        new = DecodeState(
            cache=cache,
            tokens=ids,
            positions=jnp.minimum(state.positions + 1, limit),
            generated=state.generated + 1,
        )
        data = jnp.stack([ids, jnp.ones_like(ids), new.generated], axis=1)
        log_prob = jnp.asarray(sampled.log_probs[0])[:, None]
        return new, LaterResultTokens(
            data, log_prob if self._return_log_prob else jnp.zeros_like(log_prob)
        )


def make_external_engine(model: DecoderConfig, shapes: EngineShapes) -> ExternalEngine:
    """What a user's function would be."""
    return external_engine(LaterApiEngine(model, shapes))


def external_engine(engine: LaterApiEngine, **changes: Any) -> ExternalEngine:
    """An engine as a user would describe it."""
    settings = {
        "to_params": engine.inner.load_params,
        "max_new_tokens": engine.inner.shapes.max_model_len,
        "sampled": {"algorithm": "weighted"},
        "greedy": {"algorithm": "greedy"},
    }
    return ExternalEngine(engine=engine, **settings | changes)
