"""What bfloat16 rounds: no layer of an engine loses more than the learner's, whatever it computes.

A part that one side computes in bfloat16 and the other in float32 (a router, a decay, a state, a
norm) would leave that side further from float32 than the other.
"""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_agent_rl.jetstream import inspection
from jax_agent_rl.jetstream.engine import JaxEngine
from jax_agent_rl.jetstream.scheduler import Scheduler
from jax_agent_rl.models.config import DecoderConfig, Params
from jax_agent_rl.models.decoder import Decoder
from jax_agent_rl.models.parameters import cast_params
from tests.tiny import FOUR_SLOTS, GEMMA4, LATENT, QWEN3_5_MOE, TINY, tiny_params

assert QWEN3_5_MOE.experts is not None and QWEN3_5_MOE.delta_net is not None
MODELS = {
    "attention": TINY,
    "windowed": replace(GEMMA4, layer_scale=False),
    "latent": LATENT,
    # All experts are chosen: rounding chooses no others.
    "delta nets, experts": replace(
        QWEN3_5_MOE,
        num_layers=4,
        delta_net=replace(QWEN3_5_MOE.delta_net, layers=(True, True, True, False)),
        experts=replace(QWEN3_5_MOE.experts, count=3, per_token=3),
    ),
}
IDS = np.random.default_rng(0).integers(3, 97, 48).tolist()


def learner_layers(model: DecoderConfig, params: Params, dtype: str) -> np.ndarray:
    """Outputs of the learner's layers, float32 [L, T, D]."""

    @jax.jit
    def run(params: Params) -> jax.Array:
        return Decoder.from_params(model, params).layer_outputs(jnp.asarray([IDS]))[1]

    return np.asarray(run(cast_params(params, jnp.dtype(dtype))), np.float32)[:, 0]


def engine_layers(model: DecoderConfig, params: Params, dtype: str) -> np.ndarray:
    """Outputs of an engine's layers, float32 [L, T, D]."""
    engine = JaxEngine(model, FOUR_SLOTS, dtype=dtype)
    scheduler = Scheduler(engine, engine.load_params(params), version=0)
    outputs = inspection.layer_outputs(scheduler, IDS)
    return np.stack([output.hidden for output in outputs[1:]])


def errors_of(layers: np.ndarray, exact: np.ndarray) -> np.ndarray:
    """Mean relative error of each layer's positions, float [L]."""
    errors_LT = np.sqrt(np.square(layers - exact).mean(-1) / np.square(exact).mean(-1))
    return errors_LT.mean(-1)


@pytest.mark.parametrize("name", MODELS)
def test_no_layer_of_an_engine_is_further_from_float32_than_the_learners(name: str):
    model = MODELS[name]
    # bfloat16 holds these exactly: the two differ in their arithmetic alone.
    params = jax.tree.map(
        lambda x: x.astype(jnp.bfloat16).astype(jnp.float32), tiny_params(config=model)
    )
    exact = learner_layers(model, params, "float32")
    assert errors_of(engine_layers(model, params, "float32"), exact).max() < 2e-5

    engine = errors_of(engine_layers(model, params, "bfloat16"), exact)
    learner = errors_of(learner_layers(model, params, "bfloat16"), exact)
    assert learner.max() < 0.2
    assert (engine < 1.5 * learner).all() and (learner < 1.5 * engine).all(), (engine, learner)
