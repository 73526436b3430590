"""Where downloads, converted models and compiled programs are kept."""

from __future__ import annotations

import os
from pathlib import Path


def cache_root() -> Path:
    """``$JAX_AGENT_RL_CACHE``, or ``~/.cache/jax_agent_rl``."""
    return Path(os.environ.get("JAX_AGENT_RL_CACHE", "~/.cache/jax_agent_rl")).expanduser()
