"""What this machine can do at best, measured with XLA: matrix products and memory reads."""

from __future__ import annotations

import time
from collections.abc import Callable

import jax
import jax.numpy as jnp


def best_seconds(run: Callable[[], object], repeats: int = 5) -> float:
    """Shortest of several timed calls, after one that warms up."""
    jax.block_until_ready(run())
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        jax.block_until_ready(run())
        times.append(time.perf_counter() - begin)
    return min(times)


def sgemm_flops() -> float:
    """Floating-point operations per second of a 2048³ float32 product."""
    size = 2048
    x = jax.random.normal(jax.random.key(0), (size, size))
    product = jax.jit(lambda x: x @ x)
    return 2 * size**3 / best_seconds(lambda: product(x))


def read_bandwidth() -> float:
    """Bytes per second of summing 800 MB."""
    x = jnp.ones(200_000_000)
    total = jax.jit(jnp.sum)
    return x.nbytes / best_seconds(lambda: total(x))
