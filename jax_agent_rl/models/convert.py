"""Model files to a Hugging Face folder this package trains from: another precision, one format, checked names."""

from __future__ import annotations

from pathlib import Path

import jax.numpy as jnp

from jax_agent_rl.errors import ModelError
from jax_agent_rl.models.hf import load_hf, save_hf

DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16, "float16": jnp.float16}


def convert(source: Path, target: Path, *, dtype: str = "float32") -> Path:
    """Reads a GGUF file or a Hugging Face folder and writes a folder; returns it.

    Args:
        dtype: of the written weights, one of :data:`DTYPES`.

    Raises:
        ModelError: ``dtype`` is not known, the source is not readable or of an unknown family, or the target is in use.
    """
    target_dtype = named_dtype(dtype)
    if target.exists() and any(target.iterdir()):
        raise ModelError(f"{target} is not empty; name a new folder")
    if source.suffix == ".gguf":
        from jax_agent_rl.models.gguf import convert_gguf

        convert_gguf(source, target)
        if dtype == "float32":
            return target
        source = target
    config, params = load_hf(source, dtype=target_dtype)
    save_hf(target, config, params, tokenizer_from=None if source == target else source)
    return target


def named_dtype(name: str) -> jnp.dtype:
    """The type a ``--dtype`` option names; raises ModelError if it is not one of :data:`DTYPES`."""
    if name not in DTYPES:
        raise ModelError(f"--dtype {name!r} is not known; there are {', '.join(DTYPES)}")
    return DTYPES[name]
