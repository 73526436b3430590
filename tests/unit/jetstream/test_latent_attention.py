"""The engine over a cache of latents samples what one full pass of the learner's model scores."""

from __future__ import annotations

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from jax_agent_rl.jetstream.decode_kernel import decode_kernel, write_kernel
from jax_agent_rl.jetstream.engine import EngineShapes, JaxEngine
from jax_agent_rl.jetstream.forward import Kernels
from jax_agent_rl.jetstream.kv_cache import KVCache, gather_pages
from jax_agent_rl.jetstream.latent_cache import from_latents, to_latents
from jax_agent_rl.jetstream.mixers.latent_attention import (
    chunk_by_kernel,
    decode_latents,
    plain_chunk,
)
from jax_agent_rl.jetstream.programs import ProgramTable
from jax_agent_rl.jetstream.scheduler import Scheduler
from jax_agent_rl.models.config import DecoderConfig, LatentAttention, Rope, YarnScaling
from jax_agent_rl.models.layers import DTYPES
from jax_agent_rl.rollout.protocol import GenerateRequest
from jax_agent_rl.types import SamplingParams, TokenOutput
from tests.driven_engine import finished
from tests.tiny import LATENT, TINY, logprobs_of, tiny_adapter, tiny_params, with_adapter

SHAPES = EngineShapes(
    max_model_len=64,
    max_concurrent_decodes=3,
    kv_cache_tokens=128,
    decode_steps=4,
    prefill_buckets=(16,),
)
DIRECT_QUERIES = replace(
    LATENT,
    num_layers=2,
    rope=Rope(
        scaling=YarnScaling(factor=4.0, original_max_position_embeddings=16, mscale_all_dim=0.8)
    ),
    latent=LatentAttention(q_rank=None, kv_rank=16, nope_dim=8, rope_dim=4, value_dim=14),
)
SHARED = np.random.default_rng(9).integers(3, TINY.vocab_size, 33).tolist()


def run(config: DecoderConfig, prompts: list[list[int]], *, lora: str | None = None, **options):
    """Outputs of requests that run together, in their order."""
    engine = JaxEngine(config, SHAPES, program_table=ProgramTable(), **options)
    assert engine.context.kernels is Kernels.NONE, "the kernels read keys and values"
    on = Scheduler(engine, engine.load_params(tiny_params(config=config)), version=1)
    for number, prompt in enumerate(prompts):
        sampling = SamplingParams(max_tokens=27, temperature=1.0, seed=number, ignore_eos=True)
        on.submit(
            GenerateRequest(
                request_id=str(number),
                prompt_ids=tuple(prompt),
                sampling=sampling,
                lora=lora if number else None,
            )
        )
    outputs = finished(on)
    return [outputs[str(number)] for number in range(len(prompts))]


def assert_scored(config: DecoderConfig, params: dict, prompt: list[int], output: TokenOutput):
    expected = logprobs_of(params, prompt, output.token_ids, config=config)
    np.testing.assert_allclose(output.log_probs, expected, atol=1e-4)


@pytest.mark.parametrize("config", [LATENT, DIRECT_QUERIES], ids=["latent", "direct queries"])
def test_chunked_shared_and_preempted_contexts_are_sampled_as_they_are_scored(config):
    prompts = [[*SHARED, 5], [*SHARED, 6], SHARED[:2:-1]]
    outputs = run(config, prompts)
    assert [output.cached_tokens >= 32 for output in outputs] == [False, True, False]
    assert sum(output.num_preempted for output in outputs) > 0
    for prompt, output in zip(prompts, outputs, strict=True):
        assert_scored(config, tiny_params(config=config), prompt, output)


@pytest.mark.parametrize("config", [LATENT, DIRECT_QUERIES], ids=["latent", "direct queries"])
def test_an_adapter_of_every_matrix_computes_what_the_merged_matrices_do(config):
    adapter = tiny_adapter(config)
    params = tiny_params(config=config)
    assert {"kv_a", "kv_b", "o"} < adapter.weights.keys()
    merged = with_adapter(params, adapter)

    prompts = [SHARED[:20], SHARED[:20]]
    plain, adapted = run(config, prompts, lora="a", adapters={"a": adapter})
    assert plain.token_ids != adapted.token_ids
    assert_scored(config, params, prompts[0], plain)
    assert_scored(config, merged, prompts[1], adapted)


def drawn(seed: int, *shape: int):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_latents_in_8_bits_are_attended_to_as_they_are_restored(kind: str):
    """A latent and a rotary key of a hundred times its size each keep their own scale."""
    size = jnp.array([1.0] * 16 + [100.0] * 4)[:, None]
    latents = drawn(0, 2, 1, 20, 9) * size
    cached = to_latents(latents, 16, DTYPES[kind])
    restored = from_latents(cached, jnp.float32)
    assert np.abs(restored - latents)[:, :, :16].max() < 0.2
    assert np.abs(restored - latents)[:, :, 16:].max() < 20

    q = drawn(1, 2, 3, 20) / size[:, 0]
    new = to_latents(drawn(2, 2, 1, 20, 1) * size, 16, DTYPES[kind])
    at = jnp.array([8, 3])
    mixed, written = decode_latents(q, cached, new, at)
    floats = to_latents(from_latents(written, jnp.float32), 16, jnp.float32)
    token = to_latents(from_latents(new, jnp.float32), 16, jnp.float32)
    expected, _ = decode_latents(q, floats, token, at)
    np.testing.assert_allclose(mixed, expected, atol=1e-4)


def test_a_chunk_by_the_tpu_kernel_equals_the_one_by_products():
    cached = to_latents(drawn(0, 2, 1, 20, 40), 16, jnp.float32)
    chunk = to_latents(drawn(1, 2, 1, 20, 24), 16, jnp.float32)
    q = drawn(2, 4, 20, 2, 24)
    starts = jnp.array([40, 7])
    with pltpu.force_tpu_interpret_mode(True):
        mixed = chunk_by_kernel(q, cached, chunk, starts)
    expected = plain_chunk(q, cached, chunk, starts)
    np.testing.assert_allclose(mixed, expected, atol=1e-5)


@pytest.mark.parametrize("kind", [None, "int8"])
def test_a_step_by_the_tpu_kernels_in_pages_equals_the_one_in_rows(kind: str | None):
    """Two slots of three pages of 128; what lies in pages behind their positions is no number."""
    dtype = DTYPES[kind] if kind else jnp.float32
    pages = jnp.array([[3, 1, 5], [2, 0, 0]])
    at = jnp.array([290, 77])
    cached = to_latents(drawn(0, 6, 1, 40, 128), 32, dtype)
    token = to_latents(drawn(1, 2, 1, 40, 1), 32, dtype)
    q = drawn(2, 2, 4, 40)

    in_rows = gather_pages(KVCache((cached,)), pages, at).layers[0]
    expected, _ = decode_latents(q, in_rows, token, at)
    if kind is None:
        stale = jnp.arange(128) >= 290 - 256
        cached = replace(
            cached, numbers=cached.numbers.at[5].set(jnp.where(stale, jnp.nan, cached.numbers[5]))
        )
    with pltpu.force_tpu_interpret_mode(True):
        written = write_kernel(cached, token, pages, at)
        mixed = decode_kernel(q[:, None], written, pages, at)[:, 0]
    np.testing.assert_allclose(mixed, expected, atol=1e-5)
