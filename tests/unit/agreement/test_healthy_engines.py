"""Engines without a fault give no alarm, whatever the model, the precision and the way they are
used.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jax_agent_rl.agreement import forward
from jax_agent_rl.agreement.inspection import (
    first_difference,
    outputs_of_layers,
    sample_tensors,
    tensor_faults,
)
from jax_agent_rl.agreement.report import JAX_ENGINE
from jax_agent_rl.agreement.subject import DiagnosisSubject, collect_contexts
from jax_agent_rl.jetstream.backend import JetStreamBackend
from jax_agent_rl.models.config import DecoderConfig, Experts, Rope
from jax_agent_rl.rollout.protocol import WeightUpdate
from tests.agreement_testbed import GEMMA, LLAMA, MOE, SHAPES, conversations, jax_engine
from tests.tiny import GEMMA4, GEMMA4_EXPERTS, GEMMA4_SMALL, OLMO3, tiny_params

SIGMOID = Experts(
    count=8,
    per_token=2,
    intermediate_size=24,
    normalize=True,
    scoring="sigmoid",
    correction=True,
)
FAMILIES = {
    "llama": LLAMA,
    "qwen2": replace(LLAMA, family="qwen2", qkv_bias=True, tie_word_embeddings=False),
    "qwen3": replace(LLAMA, family="qwen3", qk_norm=True),
    "mistral": replace(
        LLAMA, family="mistral", sliding_window=16, windowed_layers=(True, True, True)
    ),
    "glm4": replace(
        LLAMA,
        family="glm4",
        qkv_bias=True,
        norms="around",
        rope=Rope(partial_rotary=0.5, interleaved=True),
    ),
    "gemma3": GEMMA,
    "gemma4": replace(GEMMA4, vocab_size=LLAMA.vocab_size),
    "gemma4 experts": replace(GEMMA4_EXPERTS, vocab_size=LLAMA.vocab_size),
    "gemma4 small": replace(GEMMA4_SMALL, vocab_size=LLAMA.vocab_size),
    "qwen3_moe": MOE,
    "glm4_moe": replace(
        LLAMA,
        family="glm4_moe",
        rope=Rope(partial_rotary=0.5),
        tie_word_embeddings=False,
        experts=replace(
            SIGMOID, first_dense_layers=1, groups=4, groups_per_token=2, scale=2.5, shared_size=24
        ),
    ),
    "minimax_m2": replace(
        LLAMA, family="minimax_m2", qk_norm=True, qk_norm_over="heads", experts=SIGMOID
    ),
    "olmo3": replace(OLMO3, vocab_size=LLAMA.vocab_size),
    "gpt_oss": replace(
        LLAMA,
        family="gpt_oss",
        qkv_bias=True,
        o_bias=True,
        attention_sinks=True,
        activation="clamped_swiglu",
        sliding_window=16,
        windowed_layers=(True, False, True),
        tie_word_embeddings=False,
        experts=Experts(count=4, per_token=2, intermediate_size=24, normalize=True, bias=True),
    ),
}


async def check(
    backend: JetStreamBackend,
    model: DecoderConfig,
    params: Any,
    *,
    since: int = 0,
    updates: bool = False,
) -> None:
    """Talk to an engine, and find nothing wrong with it."""
    later = params

    async def update(turn: int) -> None:
        nonlocal later
        if updates and turn == 1:
            later = {**params, "final_norm": params["final_norm"] * 1.1}
            await backend.update_weights(
                WeightUpdate(version=since + 1, kind="arrays", payload=later)
            )

    await backend.start()
    try:
        groups = await conversations(backend, model, before_turn=update)
        samples = await backend.tensor_samples()
        contexts = collect_contexts(groups, since + updates)
        subject = DiagnosisSubject(
            model=model, params=later, dtype="float32", temperature=1.0, contexts=contexts
        )
        gap = subject.compare(subject.split(subject.tokens(subject.hidden()).plain))
        precision = backend.capabilities.precision
        assert gap.tokens >= 60 and JAX_ENGINE[precision].holds(gap), gap
        learner_samples = sample_tensors(model, later)
        assert (
            tensor_faults(
                samples,
                learner_samples,
                precision=precision,
                transposed=lambda name: None,
                older={},
            )
            == []
        )
        ids = contexts[0].token_ids[:32]
        layers = await backend.layer_outputs(ids)
    finally:
        await backend.close()
    short_subject = replace(subject, contexts=[contexts[0].cut(len(ids))])
    activations = await asyncio.to_thread(
        forward.activations,
        model,
        short_subject.weights(),
        short_subject.inputs(short_subject.rows),
    )
    expected = outputs_of_layers(model, activations, len(ids))
    assert len(layers) == 1 + model.num_layers
    assert first_difference(layers, expected, precision=precision) is None


@pytest.mark.parametrize("name", FAMILIES)
async def test_an_engine_of_any_family_agrees_in_its_log_probs_tensors_and_layers(name: str):
    model = FAMILIES[name]
    params = tiny_params(1, model)
    await check(jax_engine(model, params), model, params)


@pytest.mark.parametrize(
    "options",
    [
        {"dtype": "bfloat16"},
        {"quantize": "int8"},
        {"kv_dtype": "int8"},
        {"kv_dtype": "fp8"},
        {"quantize": "fp8"},
    ],
    ids=lambda options: " ".join(f"{name}={value}" for name, value in options.items()),
)
async def test_an_engine_of_a_coarser_precision_agrees_as_far_as_that_goes(options: dict[str, Any]):
    params = dict(tiny_params(1, LLAMA).items())
    params["layers"] = {
        name: x * (0.3 if x.ndim == 3 else 1.0) for name, x in params["layers"].items()
    }
    await check(jax_engine(LLAMA, params, **options), LLAMA, params)


async def test_an_engine_that_speculates_agrees():
    params = tiny_params(1, LLAMA)
    shapes = replace(SHAPES, num_speculative_tokens=3)
    await check(JetStreamBackend(LLAMA, params, shapes, seed=3), LLAMA, params)


async def test_an_engine_whose_weights_change_agrees_about_later_turns():
    params = tiny_params(1, LLAMA)
    await check(jax_engine(LLAMA, params), LLAMA, params, updates=True)


async def test_an_engine_of_merged_adapters_agrees():
    base = tiny_params(1, LLAMA)
    rng = np.random.default_rng(0)
    low = [
        jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in ((3, 32, 2), (3, 2, 32))
    ]
    layers = {**base["layers"], "q": base["layers"]["q"] + 0.1 * low[0] @ low[1]}
    params = {**base, "layers": layers}
    await check(jax_engine(LLAMA, params), LLAMA, params)
