"""A delta net against attention of the same width, in one process: time and memory.

    python benchmarks/recurrent.py [--lengths 1024 4096]

Both mix the same number of heads of the same size over one row. A learner's part is the mixture and
its gradient, without the projections: seconds, and the bytes that the compiled program has beside
its arguments and results. An engine's part is one step of 8 contexts of that length, and the bytes
of one context's cache. The last line is one JSON object with attention's figure divided by the
delta net's, for each length: ``train_speed``, ``train_memory``, ``decode_speed`` and
``context_memory``; above 1 the delta net is ahead.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from common import argument_parser, best_seconds

from jax_agent_rl.models.attention import tree_attention
from jax_agent_rl.models.delta_net import DeltaTokens, delta_step
from jax_agent_rl.models.delta_tree import tree_delta_rule
from jax_agent_rl.models.token_forest import plan_forest
from jax_agent_rl.models.tree_kernel import TreeMask

HEADS = 8
SIZE = 64  # of keys and of values
CONTEXTS = 8
REPEATS = 3


def draw(rng: np.random.Generator, *shape: int) -> jax.Array:
    """Return normal numbers, float32."""
    return jnp.asarray(rng.standard_normal(shape), jnp.float32)


def draw_tokens(rng: np.random.Generator, *shape: int) -> DeltaTokens:
    """Return what tokens bring to the delta rule; ``shape`` is of rows and tokens."""
    k = draw(rng, *shape, HEADS, SIZE)
    return DeltaTokens(
        q=draw(rng, *shape, HEADS, SIZE),
        k=k / jnp.linalg.norm(k, axis=-1, keepdims=True),
        v=draw(rng, *shape, HEADS, SIZE),
        log_decay=-0.1 * jnp.abs(draw(rng, *shape, HEADS)),
        beta=jax.nn.sigmoid(draw(rng, *shape, HEADS)),
    )


def measure(function: Callable[..., Any], *arguments: Any) -> tuple[float, int]:
    """Return seconds of a call, and bytes that it needs besides its arguments and results."""
    compiled = jax.jit(function).lower(*arguments).compile()
    memory = compiled.memory_analysis()
    assert memory is not None
    seconds = best_seconds(lambda: jax.block_until_ready(compiled(*arguments)), REPEATS)
    return seconds, memory.temp_size_in_bytes


def train_delta(length: int) -> tuple[float, int]:
    """Measure the delta rule and its gradient over a row."""
    rng = np.random.default_rng(0)
    forest = plan_forest(jnp.full((1, length), length, jnp.int32))

    def loss(tokens: DeltaTokens) -> jax.Array:
        return jnp.sum(jnp.sin(tree_delta_rule(tokens, forest)))

    return measure(jax.grad(loss), draw_tokens(rng, 1, length))


def train_attention(length: int) -> tuple[float, int]:
    """Measure attention and its gradient over a row."""
    rng = np.random.default_rng(0)
    mask = TreeMask(jnp.full((1, length), length, jnp.int32))
    qkv = [draw(rng, 1, HEADS, length, SIZE) for _ in range(3)]

    def loss(qkv: list[jax.Array]) -> jax.Array:
        q, k, v = qkv
        return jnp.sum(jnp.sin(tree_attention(q * SIZE**-0.5, k, v, mask)))

    return measure(jax.grad(loss), qkv)


def decode_delta() -> tuple[float, int]:
    """Measure a step over states of any length, and the bytes of one state."""
    rng = np.random.default_rng(0)
    state = draw(rng, CONTEXTS, HEADS, SIZE, SIZE)
    seconds, _ = measure(delta_step, draw_tokens(rng, CONTEXTS), state)
    return seconds, state.nbytes // CONTEXTS


def decode_attention(length: int) -> tuple[float, int]:
    """Measure a step over keys and values, and the bytes that one context has of them."""
    rng = np.random.default_rng(0)
    keys = draw(rng, CONTEXTS, HEADS, length, SIZE)
    values = draw(rng, CONTEXTS, HEADS, length, SIZE)

    def step(q: jax.Array, keys: jax.Array, values: jax.Array) -> jax.Array:
        scores = jax.nn.softmax(jnp.einsum("bhd,bhtd->bht", q, keys))
        return jnp.einsum("bht,bhtd->bhd", scores, values)

    seconds, _ = measure(step, draw(rng, CONTEXTS, HEADS, SIZE), keys, values)
    return seconds, (keys.nbytes + values.nbytes) // CONTEXTS


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 4096], help="of rows")
    arguments = parser.parse_args()

    result = {}
    step_seconds, state_bytes = decode_delta()
    for length in arguments.lengths:
        delta_seconds, delta_bytes = train_delta(length)
        attention_seconds, attention_bytes = train_attention(length)
        read_seconds, cache_bytes = decode_attention(length)
        print(
            f"{length} tokens: train {delta_seconds:.3f} s and {delta_bytes / 1e6:.0f} MB,"
            f" attention {attention_seconds:.3f} s and {attention_bytes / 1e6:.0f} MB; step"
            f" {step_seconds * 1e3:.2f} ms and {state_bytes / 1e6:.2f} MB, attention"
            f" {read_seconds * 1e3:.2f} ms and {cache_bytes / 1e6:.2f} MB",
            flush=True,
        )
        result[str(length)] = {
            "train_speed": round(attention_seconds / delta_seconds, 2),
            "train_memory": round(attention_bytes / delta_bytes, 2),
            "decode_speed": round(read_seconds / step_seconds, 2),
            "context_memory": round(cache_bytes / state_bytes, 2),
        }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
