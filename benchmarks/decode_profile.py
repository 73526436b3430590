"""Profile of one decode step: milliseconds per part, and the share of the machine's limit.

    python benchmarks/decode_profile.py [--batches 1 8 32] [--positions 256]

SmolLM2-135M in float32, once with ``jetstream.cpu`` (if there is a compiler) and once with
XLA alone. Each part runs by itself as the step computes it, as often as a dispatch of the engine
has steps, in a loop on the device:

- ``products``: the matrix products of all layers, with the norms before them and the activation.
- ``head``: the product with the vocabulary.
- ``attention``: everything between the projections, with the write to the cache. XLA's includes the
  pages gathered before a dispatch's steps and written back after them.
- ``sampling``: one id for each slot.
- ``rest``: what remains of ``step``, the engine's own program: residuals, rotary tables, embedding,
  the loop, and what parts gain or lose next to the others.

``floor`` reads all weights and the cache once and computes two operations a weight and id,
whichever takes longer, as in ``decode.py``, at the best bandwidth and speed measured between the
parts. The last line is one JSON object. Figures depend on the CPU's vectors, so it is part of it.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from common import argument_parser, best_seconds, cpu, load_quickstart, read_bandwidth, sgemm_flops
from decode import step_floor

from jax_agent_rl.jetstream.attention import decode_attention
from jax_agent_rl.jetstream.cpu import kernels as cpu_kernels
from jax_agent_rl.jetstream.decode_batch import DecodeBatch, make_decode_batch
from jax_agent_rl.jetstream.engine import EngineShapes, JaxEngine
from jax_agent_rl.jetstream.forward import EngineParams
from jax_agent_rl.jetstream.kv_cache import KVCache, gather_pages, write_back
from jax_agent_rl.jetstream.mixers.table import empty_cache
from jax_agent_rl.jetstream.programs import Kernels
from jax_agent_rl.jetstream.sampling import sample
from jax_agent_rl.models.config import DecoderConfig
from jax_agent_rl.models.layers import ACTIVATIONS, product, rms_norm

STEPS = 16
REPEATS = 3


def step_seconds(part: Callable[..., Any], state: Any, *arguments: Any) -> float:
    """Time one step of a part, repeated on the device as a dispatch repeats it.

    Args:
        part: called with the number of the step, the state and the arguments; returns the next
            state.
    """

    @functools.partial(jax.jit, donate_argnums=0)
    def loop(state: Any, *arguments: Any) -> Any:
        return jax.lax.fori_loop(0, STEPS, lambda step, state: part(step, state, *arguments), state)

    def dispatch() -> None:
        nonlocal state
        state = jax.block_until_ready(loop(state, *arguments))

    state = jax.tree.map(jnp.copy, state)
    return best_seconds(dispatch, REPEATS) / STEPS


def multiply(
    config: DecoderConfig, native: bool, weight: jax.Array, x: jax.Array, norm: Any = None
) -> jax.Array:
    """Multiply, after a norm if there is one."""
    if native:
        return cpu_kernels.product(config, weight, x, norm)
    if norm is not None:
        x = rms_norm(config, x, norm, axis=0)
    return product(weight, x)


def products(
    config: DecoderConfig, native: bool, step: jax.Array, x: jax.Array, params: EngineParams
) -> jax.Array:
    """Chain every layer's products, so that none is left out or moved out of the loop."""
    for layer in params.layers:
        qkv = multiply(config, native, layer["qkv"], x, layer["input_norm"]).reshape(-1, x.shape[1])
        x = multiply(config, native, layer["o"], qkv[: layer["o"].shape[1]])
        norm = layer["post_attention_norm"]
        if native:
            hidden = cpu_kernels.gated_product(config, layer["gate_up"], x, norm)
        else:
            gate, up = multiply(config, native, layer["gate_up"], x, norm)
            hidden = ACTIVATIONS[config.activation](gate, up)
        x = multiply(config, native, layer["down"], hidden)
    return x


def head(
    config: DecoderConfig, native: bool, step: jax.Array, x: jax.Array, params: EngineParams
) -> jax.Array:
    return multiply(config, native, params.embed, x, params.final_norm)[: len(x)]


def attention(
    step: jax.Array,
    state: tuple[jax.Array, KVCache],
    new: tuple[jax.Array, jax.Array],
    positions: jax.Array,
) -> tuple[jax.Array, KVCache]:
    q, rows = state
    layers = []
    for layer in rows.layers:
        q, layer = decode_attention(q, layer, new, positions + step)
        layers.append(layer)
    return q, KVCache(tuple(layers))


def native_attention(
    config: DecoderConfig,
    step: jax.Array,
    state: tuple[jax.Array, KVCache],
    slots: DecodeBatch,
    table: tuple[jax.Array, jax.Array],
) -> tuple[jax.Array, KVCache]:
    qkv, cache = state
    layers = []
    for layer in cache.layers:
        mixed, layer = cpu_kernels.decode_attention(
            config, qkv, layer, slots.positions + step, slots.pages, table
        )
        qkv = qkv.at[:, :-2].set(mixed)
        layers.append(layer)
    return qkv, KVCache(tuple(layers))


def draw(step: jax.Array, logits: jax.Array, slots: DecodeBatch) -> jax.Array:
    ids, log_probs, _ = sample(
        logits,
        temperature=slots.temperature,
        seed=slots.seed,
        position=slots.positions + step,
    )
    return logits.at[ids, jnp.arange(len(ids))].add(log_probs)


def full_step(engine: JaxEngine, params: EngineParams, slots: DecodeBatch) -> float:
    """Time a step of the engine's own program."""
    cache = engine.init_cache()

    def dispatch() -> None:
        nonlocal cache
        cache, sampled = engine.decode(params, cache, slots, STEPS, len(slots.tokens))
        assert (sampled.ids >= 0).all() and len(sampled.ids) == STEPS

    return best_seconds(dispatch, REPEATS) / STEPS


def attention_seconds(
    config: DecoderConfig, engine: JaxEngine, slots: DecodeBatch, native: bool
) -> float:
    """Time a step's attention.

    If it reads rows, this includes the step's share of gathering pages and writing them back.
    """
    batch = len(slots.tokens)
    heads = config.num_kv_heads
    size = config.head_dim
    group = config.num_heads // heads
    cache = engine.init_cache()
    if native:
        qkv = jnp.ones((heads, group + 2, size, batch))
        table = (jnp.ones((size // 2, batch)), jnp.ones((size // 2, batch)))
        part = functools.partial(native_attention, config)
        return step_seconds(part, (qkv, cache), slots, table)

    @functools.partial(jax.jit, donate_argnums=0)
    def gather_and_write_back(cache: KVCache, slots: DecodeBatch) -> KVCache:
        rows = gather_pages(cache, slots.pages, slots.positions)
        return write_back(cache, rows, slots.pages, slots.positions, STEPS)

    def dispatch() -> None:
        nonlocal cache
        cache = jax.block_until_ready(gather_and_write_back(cache, slots))

    q = jnp.ones((batch, heads, group, size))
    new_key = jnp.ones((batch, heads, size))
    new_value = jnp.ones((batch, heads, size))
    rows = empty_cache(config, batch, slots.pages.shape[1] * cache.length, jnp.float32)
    steps = step_seconds(attention, (q, rows), (new_key, new_value), slots.positions)
    return steps + best_seconds(dispatch, REPEATS) / STEPS


def parts(
    config: DecoderConfig, weights: Any, use_cpu_kernels: bool, batch: int, positions: int
) -> dict[str, float]:
    """Time each part of a step, and the whole ``step``, of an engine."""
    shapes = EngineShapes(
        max_model_len=positions,
        max_concurrent_decodes=batch,
        kv_cache_tokens=batch * positions,
        decode_steps=STEPS,
        prefill_buckets=(32,),
    )
    engine = JaxEngine(config, shapes, use_cpu_kernels=use_cpu_kernels, compile_ahead=False)
    native = engine.context.kernels is Kernels.CPU
    params = engine.load_params(weights)
    slots = make_decode_batch(batch, shapes.context_pages)
    slots.pages[:] = 1 + np.arange(slots.pages.size).reshape(slots.pages.shape)
    slots.positions[:] = positions - STEPS - 1
    slots.remaining[:] = STEPS + 1
    slots.temperature[:] = 1
    slots.seed[:] = np.arange(batch)
    slots = jax.tree.map(jnp.asarray, slots)

    x = jnp.ones((config.hidden_size, batch))
    seconds = {
        "products": step_seconds(functools.partial(products, config, native), x, params),
        "head": step_seconds(functools.partial(head, config, native), x, params),
        "attention": attention_seconds(config, engine, slots, native),
        "sampling": step_seconds(draw, jnp.ones((config.vocab_size, batch)), slots),
    }
    step = full_step(engine, params, slots)
    return {**seconds, "rest": step - sum(seconds.values()), "step": step}


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--positions", type=int, default=256)
    arguments = parser.parse_args()
    config, weights = load_quickstart()
    uses_kernels = {"xla": False}
    if cpu_kernels.kernels_digest() is not None:
        uses_kernels = {"kernels": True, **uses_kernels}

    bandwidth = 0.0
    flops = 0.0
    measured: dict[tuple[int, str], dict[str, float]] = {}
    for batch in arguments.batches:
        for name, use_cpu_kernels in uses_kernels.items():
            bandwidth = max(bandwidth, read_bandwidth())
            flops = max(flops, sgemm_flops())
            measured[batch, name] = parts(
                config, weights, use_cpu_kernels, batch, arguments.positions
            )

    machine = f"{cpu()}: reads {bandwidth / 1e9:.1f} GB/s, sgemm {flops / 1e9:.0f} GFLOP/s"
    print(machine)
    result: dict[str, Any] = {"machine": machine, "positions": arguments.positions}
    for (batch, name), seconds in measured.items():
        floor = step_floor(config, batch, arguments.positions, bandwidth, flops)
        milliseconds = {}
        for part, part_seconds in {**seconds, "floor": floor}.items():
            milliseconds[part] = round(1000 * part_seconds, 2)
        share = round(floor / seconds["step"], 3)
        result.setdefault(f"batch_{batch}", {})[name] = {
            "milliseconds": milliseconds,
            "share_of_floor": share,
        }
        print(f"batch {batch}, {name}: {milliseconds}, {share:.1%} of the floor")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
