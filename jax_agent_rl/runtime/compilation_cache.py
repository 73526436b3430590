"""The cache of compiled programs on disk."""

from __future__ import annotations

import os

from jax_agent_rl.utils.files import cache_root


def use_compilation_cache() -> None:
    """Cache on disk the programs that take half a second or more to compile.

    JAX's own environment variables take precedence.
    """
    import jax

    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        jax.config.update("jax_compilation_cache_dir", str(cache_root() / "xla"))
    if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
