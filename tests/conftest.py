"""Compiled programs are kept between tests and runs: many tests build the same small engine."""

from __future__ import annotations

import os

from jax_agent_rl.cache import cache_root

os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(cache_root() / "xla-tests"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")
