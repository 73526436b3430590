"""Profile of one decode step: milliseconds per part, and the whole step's share of what the machine allows.

    python benchmarks/decode_profile.py [--batches 1 8 32] [--positions 256]

SmolLM2-135M in float32. Each part runs by itself, as often as a dispatch of the engine has steps, in a loop on the
device:

- ``products``: the matrix products of all layers, without anything between them; ``head``: the one with the vocabulary.
- ``attention``: everything between the projections, with the new token's place in the cache.
- ``sampling``: one id for each slot.
- ``between``: the rest of the step: norms, rotation, activations, residuals, embedding, the loop.
- ``rows``: pages gathered before a dispatch's steps and written back after them, for each step.

All but ``step`` and ``between`` are parts of XLA's path; an engine with ``jetstream.cpu_kernels`` runs none of them but
``sampling``, so ``between`` is what the kernels take or, below zero, save. ``floor`` reads all weights and the cache
once and computes two operations a weight and id, whichever takes longer, as in ``decode.py``. The last line is one JSON
object. Figures depend on the CPU's vectors, so it is part of it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from common import argument_parser, best_seconds, cpu, load_quickstart, read_bandwidth, sgemm_flops
from decode import step_floor

from jax_agent_rl.jetstream.attention import decode_attention
from jax_agent_rl.jetstream.decode_batch import DecodeBatch, make_decode_batch
from jax_agent_rl.jetstream.engine import EngineShapes, JaxEngine
from jax_agent_rl.jetstream.forward import EngineParams
from jax_agent_rl.jetstream.kv_cache import KVCache, empty_cache, gather_pages, write_back
from jax_agent_rl.jetstream.sampling import sample
from jax_agent_rl.models.config import DecoderConfig
from jax_agent_rl.models.quantized import product

STEPS, REPEATS = 16, 3


def step_seconds(part: Callable[..., Any], state: Any, *arguments: Any) -> float:
    """Time ``part(step, state, *arguments) -> state``, repeated on the device as a dispatch repeats it."""

    @jax.jit
    def loop(state: Any, *arguments: Any) -> Any:
        return jax.lax.fori_loop(0, STEPS, lambda step, state: part(step, state, *arguments), state)

    return best_seconds(lambda: loop(state, *arguments), REPEATS) / STEPS


def products(step: jax.Array, x: jax.Array, params: EngineParams) -> jax.Array:
    """Chain every layer's products, so that none is left out or moved out of the loop."""
    for layer in params.layers:
        qkv = product(layer["qkv"], x).reshape(-1, x.shape[1])
        x = product(layer["o"], qkv[: layer["o"].shape[1]])
        gate, up = product(layer["gate_up"], x)
        x = product(layer["down"], gate + up)
    return x


def head(step: jax.Array, x: jax.Array, params: EngineParams) -> jax.Array:
    logits = jnp.einsum("vd,db->vb", params.embed, x, preferred_element_type=jnp.float32)
    return logits[: len(x)]


def attention(
    step: jax.Array, state: tuple[jax.Array, KVCache], new: tuple[jax.Array, jax.Array], positions: jax.Array
) -> tuple[jax.Array, KVCache]:
    q, rows = state
    layers = []
    for layer in rows.layers:
        q, layer = decode_attention(q, layer, new, positions + step)
        layers.append(layer)
    return q, KVCache(tuple(layers))


def draw(step: jax.Array, logits: jax.Array, slots: DecodeBatch) -> jax.Array:
    ids, log_probs, _ = sample(
        logits,
        temperature=slots.temperature,
        seed=slots.seed,
        position=slots.positions + step,
    )
    return logits.at[ids, jnp.arange(len(ids))].add(log_probs)


def whole_step(engine: JaxEngine, params: EngineParams, slots: DecodeBatch) -> float:
    """Time a step of the engine's own program."""
    cache = engine.init_cache()

    def dispatch() -> None:
        nonlocal cache
        cache, sampled = engine.decode(params, cache, slots, STEPS, len(slots.tokens))
        assert (sampled.ids >= 0).all() and len(sampled.ids) == STEPS

    return best_seconds(dispatch, REPEATS) / STEPS


def parts(config: DecoderConfig, weights: Any, batch: int, positions: int) -> dict[str, float]:
    """Time each part of a step, and the whole ``step``."""
    shapes = EngineShapes(
        max_model_len=positions,
        max_concurrent_decodes=batch,
        kv_cache_tokens=batch * positions,
        decode_steps=STEPS,
        prefill_buckets=(32,),
    )
    engine = JaxEngine(config, shapes, compile_ahead=False)
    params = engine.load_params(weights)
    slots = make_decode_batch(batch, shapes.context_pages)
    slots.pages[:] = 1 + np.arange(slots.pages.size).reshape(slots.pages.shape)
    slots.positions[:], slots.remaining[:], slots.temperature[:] = positions - STEPS - 1, STEPS + 1, 1
    slots.seed[:] = np.arange(batch)
    slots = jax.tree.map(jnp.asarray, slots)
    rows = empty_cache(config, batch, positions, jnp.float32)
    x = jnp.ones((config.hidden_size, batch))
    heads, group = config.num_kv_heads, config.num_heads // config.num_kv_heads
    q, one = jnp.ones((batch, heads, group, config.head_dim)), jnp.ones((batch, heads, config.head_dim))
    paged = jax.jit(
        lambda cache, slots: write_back(
            cache, gather_pages(cache, slots.pages, slots.positions), slots.pages, slots.positions, STEPS
        ),
        donate_argnums=0,
    )
    cache = engine.init_cache()

    def rows_once() -> None:
        nonlocal cache
        cache = jax.block_until_ready(paged(cache, slots))

    found = {
        "products": step_seconds(products, x, params),
        "head": step_seconds(head, x, params),
        "attention": step_seconds(attention, (q, rows), (one, one), slots.positions),
        "sampling": step_seconds(draw, jnp.ones((config.vocab_size, batch)), slots),
        "rows": best_seconds(rows_once, REPEATS) / STEPS,
    }
    step = whole_step(engine, params, slots)
    return {**found, "between": step - sum(found.values()), "step": step}


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--positions", type=int, default=256)
    arguments = parser.parse_args()
    config, weights = load_quickstart()
    bandwidth, flops = read_bandwidth(), sgemm_flops()
    print(f"{cpu()}: reads {bandwidth / 1e9:.1f} GB/s, sgemm {flops / 1e9:.0f} GFLOP/s", flush=True)
    result: dict[str, Any] = {"cpu": cpu(), "positions": arguments.positions}
    for batch in arguments.batches:
        seconds = parts(config, weights, batch, arguments.positions)
        floor = step_floor(config, batch, arguments.positions, bandwidth, flops)
        milliseconds = {name: round(1000 * s, 2) for name, s in {**seconds, "floor": floor}.items()}
        share = round(floor / seconds["step"], 3)
        result[f"batch_{batch}"] = {"milliseconds": milliseconds, "share_of_floor": share}
        print(f"batch {batch}: {milliseconds}, {share:.1%} of the floor", flush=True)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
