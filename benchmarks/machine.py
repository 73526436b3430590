"""What this machine is, and what it can do at best, measured with XLA: matrix products and memory reads."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp

VECTORS = {"avx512f": "AVX-512", "avx2": "AVX2", "avx": "AVX"}


def cpu() -> str:
    """The CPU's name, its widest vectors and the cores this process may use; figures of different CPUs differ."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    facts = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    flags = facts.get("flags", "").split()
    vectors = next((name for flag, name in VECTORS.items() if flag in flags), "no AVX")
    if limit := re.search(r"--xla_cpu_max_isa=(\S+)", os.environ.get("XLA_FLAGS", "")):
        vectors += f", XLA limited to {limit[1]}"
    return f"{facts.get('model name', 'unknown')} ({vectors}), {len(os.sched_getaffinity(0))} cores"


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
