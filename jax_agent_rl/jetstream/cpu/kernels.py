"""Kernels of a decode step on CPUs (``kernels.cc``).

The system's C++ compiler builds them at first use.

XLA multiplies a large matrix with a few columns at a fraction of a CPU's memory bandwidth and
operations, and its attention needs pages copied to rows before each dispatch. The kernels read
every weight once, where it lies, and only the cached positions that are visible.

Shapes: B slots, P pages of S positions, K key/value heads, G queries of each, h head size. All
arrays are float32, but for matrices that are int8 with a scale per output.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_agent_rl.jetstream.kv_cache import LayerKV
from jax_agent_rl.models.config import DecoderConfig
from jax_agent_rl.models.delta_net import DeltaTokens
from jax_agent_rl.models.layers import ACTIVATIONS, Quantized
from jax_agent_rl.utils.files import cache_root

logger = logging.getLogger(__name__)
SOURCE = Path(__file__).with_suffix(".cc")
HEADERS = tuple(
    SOURCE.with_name(f"{name}.h") for name in ("vectors", "products", "attention", "delta_step")
)
TARGETS = (
    "product",
    "gated_product",
    "quantized_product",
    "quantized_gated_product",
    "grouped_product",
    "decode_attention",
    "read_attention",
    "delta_step",
)
COMPILERS = ("c++", "g++", "clang++")
COMPILER_SECONDS = 600.0
FLAGS = ("-std=c++17", "-O3", "-march=native", "-shared", "-fPIC")


_building = threading.Lock()


def kernels_digest() -> str | None:
    """Build and register the kernels, once per process.

    Their names end with a digest of source, compiler and CPU, so that a program from JAX's
    compilation cache never calls other kernels than it was compiled for.

    Returns:
        The digest; None if there is no compiler, or it cannot build them.
    """
    with _building:  # engines start in threads of their own
        return register_kernels()


@functools.cache
def register_kernels() -> str | None:
    """Build and register the kernels, and return their digest.

    Takes no lock: call :func:`kernels_digest`.
    """
    slower = "decoding takes XLA's own products, which are two to three times slower"
    compiler = _find_compiler()
    if compiler is None:
        logger.warning(
            "no C++ compiler (%s) on the PATH: %s; install one", ", ".join(COMPILERS), slower
        )
        return None

    try:
        digest = _digest(compiler)
        library = ctypes.CDLL(str(_build_library(compiler, digest)))
    except (OSError, subprocess.SubprocessError) as error:
        problem: object = error
        if isinstance(error, subprocess.CalledProcessError):
            problem = error.stderr.strip().splitlines()[:1]
        logger.warning("%s could not build the decode kernels (%s): %s", compiler, problem, slower)
        return None

    for target in TARGETS:
        function = jax.ffi.pycapsule(getattr(library, target))
        jax.ffi.register_ffi_target(f"jax_agent_rl.{target}.{digest}", function, platform="cpu")
    return digest


def _find_compiler() -> str | None:
    for name in COMPILERS:
        path = shutil.which(name)
        if path:
            return path
    return None


def _digest(compiler: str) -> str:
    """Return a digest of all that a build depends on."""
    # The macros name the compiler's version and every extension of this CPU.
    macros = _run(compiler, "-march=native", "-dM", "-E", "-x", "c++", os.devnull)
    sources = [file.read_text() for file in (SOURCE, *HEADERS)]
    parts = [*sources, macros, " ".join(FLAGS), version("jaxlib")]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _build_library(compiler: str, digest: str) -> Path:
    """Return the shared library, compiled unless the cache has it."""
    folder = cache_root() / "kernels"
    file = folder / f"decode-{digest}.so"
    if file.exists():
        return file

    begin = time.perf_counter()
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        library = Path(temporary) / file.name
        _run(compiler, *FLAGS, f"-I{jax.ffi.include_dir()}", str(SOURCE), "-o", str(library))
        os.replace(library, file)  # other processes may build it at the same time
    seconds = time.perf_counter() - begin
    logger.info("built the decode kernels for this CPU in %.1f s: %s", seconds, file)
    return file


def _run(*command: str) -> str:
    """Run a command and return its output."""
    process = subprocess.run(
        command, check=True, capture_output=True, text=True, timeout=COMPILER_SECONDS
    )
    return process.stdout


def product(
    config: DecoderConfig,
    weight: jax.Array | Quantized,
    x: jax.Array,
    norm: jax.Array | None = None,
) -> jax.Array:
    """Multiply [..., out, in] x [in, B] -> [..., out, B].

    Args:
        config: the model, for the settings of the norm.
        weight: read once; if it is quantized, int8 numbers become floats in registers.
        x: the columns; normalized first if ``norm`` is given.
        norm: [in], the weight of an RMS norm; None for none.
    """
    out = jax.ShapeDtypeStruct((*weight.shape[:-1], x.shape[1]), x.dtype)
    settings = _norm_settings(config)
    if isinstance(weight, Quantized):
        call = _call("quantized_product", out)
        return call(weight.numbers, weight.scale, x, _or_empty(norm), **settings)
    return _call("product", out)(weight, x, _or_empty(norm), **settings)


def gated_product(
    config: DecoderConfig,
    weight: jax.Array | Quantized,
    x: jax.Array,
    norm: jax.Array | None = None,
) -> jax.Array:
    """Apply the activation to the two products of [2, out, in] x [in, B] -> [out, B].

    It takes the arguments of :func:`product`.
    """
    out = jax.ShapeDtypeStruct((weight.shape[1], x.shape[1]), x.dtype)
    settings = _norm_settings(config)
    settings["activation"] = np.int64(list(ACTIVATIONS).index(config.activation))
    if isinstance(weight, Quantized):
        call = _call("quantized_gated_product", out)
        return call(weight.numbers, weight.scale, x, _or_empty(norm), **settings)
    return _call("gated_product", out)(weight, x, _or_empty(norm), **settings)


def grouped_product(weight: jax.Array, x: jax.Array, group: jax.Array) -> jax.Array:
    """Multiply each column with its group's matrix: [N, ..., out, in] x [in, B] -> [..., out, B].

    Args:
        weight: a matrix for each group.
        group: int32 [B], 1 to N, or 0: the result is zero.
    """
    out = jax.ShapeDtypeStruct((*weight.shape[1:-1], x.shape[1]), x.dtype)
    return _call("grouped_product", out)(weight, x, group)


def decode_attention(
    config: DecoderConfig,
    qkv: jax.Array,
    cached: LayerKV,
    positions: jax.Array,
    pages: jax.Array,
    rope_table: tuple[jax.Array, jax.Array],
    sinks: jax.Array | None = None,
    *,
    windowed: bool = False,
) -> tuple[jax.Array, LayerKV]:
    """Rotate one token per slot, write it to its page and attend to the slot's pages, in place.

    Args:
        config: the model, with the engine's ``num_kv_heads``.
        qkv: [K, G + 2, h, B], queries, key and value of each key/value head, not rotated.
        cached: P pages, changed in place where XLA donates them.
        positions: int32 [B], position of each token, which attends to the cache up to there.
        pages: int32 [B, n], pages of each slot.
        rope_table: cos and sin [r/2, B] of the slots' angles.
        sinks: [K, G], a further score of each query head's softmax; None for none.
        windowed: attend to the last ``config.sliding_window`` positions only.

    Returns:
        [K, G, h, B], and the updated cache.
    """
    kv_heads, heads, size, slots = qkv.shape
    mixed_shape = jax.ShapeDtypeStruct((kv_heads, heads - 2, size, slots), qkv.dtype)
    keys_shape = jax.ShapeDtypeStruct(cached.keys.shape, cached.keys.dtype)
    values_shape = jax.ShapeDtypeStruct(cached.values.shape, cached.values.dtype)
    call = _call(
        "decode_attention",
        (mixed_shape, keys_shape, values_shape),
        input_output_aliases={1: 1, 2: 2},  # keys and values
    )
    cos, sin = rope_table
    mixed, keys, values = call(
        *(qkv, cached.keys, cached.values, pages, positions, cos, sin, _or_empty(sinks)),
        **_attention_settings(config, windowed),
    )
    return mixed, LayerKV(keys, values)


def read_attention(
    config: DecoderConfig,
    queries: jax.Array,
    cached: LayerKV,
    positions: jax.Array,
    pages: jax.Array,
    rope_table: tuple[jax.Array, jax.Array],
    sinks: jax.Array | None = None,
    *,
    windowed: bool = False,
) -> jax.Array:
    """Rotate one token's queries per slot and attend to the slot's pages, which have its key.

    The other arguments are as for :func:`decode_attention`.

    Args:
        queries: [K, G, h, B], not rotated.

    Returns:
        [K, G, h, B].
    """
    call = _call("read_attention", jax.ShapeDtypeStruct(queries.shape, queries.dtype))
    cos, sin = rope_table
    return call(
        *(queries, cached.keys, cached.values, pages, positions, cos, sin, _or_empty(sinks)),
        **_attention_settings(config, windowed),
    )


def delta_step(
    tokens: DeltaTokens, states: jax.Array, running: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Apply the delta rule for one token per slot; see ``delta_net.delta_step``.

    Args:
        tokens: [B, H, ..].
        states: [B, H, k, v], changed in place where XLA donates them.
        running: bool [B], slots whose state changes; others have outputs of 0.

    Returns:
        Outputs [B, H, v], and the updated states.
    """
    out = jax.ShapeDtypeStruct(tokens.v.shape, tokens.v.dtype)
    new_states = jax.ShapeDtypeStruct(states.shape, states.dtype)
    call = _call("delta_step", (out, new_states), input_output_aliases={5: 1})
    decay = jnp.exp(tokens.log_decay)
    return call(tokens.q, tokens.k, tokens.v, decay, tokens.beta, states, running.astype(jnp.int32))


def _attention_settings(config: DecoderConfig, windowed: bool) -> dict[str, Any]:
    window = config.sliding_window if windowed else None
    return {
        "scale": np.float32(config.score_scale),
        "window": np.int64(window or 0),
        "interleaved": config.rope.interleaved,
    }


def _call(target: str, out: Any, **options: Any) -> Callable[..., Any]:
    """Return a function that calls a kernel."""
    return jax.ffi.ffi_call(f"jax_agent_rl.{target}.{kernels_digest()}", out, **options)


def _or_empty(x: jax.Array | None) -> jax.Array:
    """Return an empty array in place of None, which kernels do not take."""
    return jnp.zeros(0, jnp.float32) if x is None else x


def _norm_settings(config: DecoderConfig) -> dict[str, Any]:
    return {"eps": np.float32(config.rms_norm_eps), "offset": np.float32(config.norm_offset)}
