"""The engine's device programs, and a table that compiles each shape once and counts what comes late.

Every program has static shapes taken from a few buckets, donates the cache it changes, and crosses to the host once
per dispatch.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from jax_agent_rl.jetstream.forward import EngineParams, KVCache, decode_step, prefill_chunks
from jax_agent_rl.jetstream.lanes import Lanes
from jax_agent_rl.jetstream.sampling import sample
from jax_agent_rl.models.config import DecoderConfig
from jax_agent_rl.models.pictures import PictureInputs


def decode(
    config: DecoderConfig,
    max_steps: int,
    span: int,
    mesh: Mesh | None,
    params: EngineParams,
    cache: KVCache,
    lanes: Lanes,
    limits: jax.Array,
    forced: jax.Array | None = None,
) -> tuple[KVCache, jax.Array]:
    """Several decode steps for W lanes.

    The lanes' rows are gathered into a compact working cache of ``span`` positions (rows and positions that no lane
    uses cost nothing), the steps run on it, and only the new columns are written back.

    Args:
        max_steps: static size of the output, >= limits[0].
        span: static; must be >= max(positions) + limits[0].
        mesh: the engine's, if it has more than one device.
        limits: int32 [2]: steps to run at most; end early once this many lanes have finished.
        forced: int32 [max_steps, W], ids to take in place of sampled ones, which stop nothing; -1 samples.

    Returns:
        the cache, and int32 [2, max_steps, W]: sampled ids (-1 where a lane did not run) and the bits of their
        float32 log-probs. One array, because one copy to the host is cheaper than two.
    """
    lane_count = lanes.rows.shape[0]
    work = KVCache(
        tuple(k.at[lanes.rows].get(mode="clip")[..., :span] for k in cache.keys),
        tuple(v.at[lanes.rows].get(mode="clip")[:, :, :span] for v in cache.values),
    )
    started = jnp.sum(lanes.remaining > 0)

    def go_on(carry: tuple) -> jax.Array:
        step, _, _, remaining, _, _ = carry
        running = jnp.sum(remaining > 0)
        return (step < limits[0]) & (running > 0) & (started - running < limits[1])

    def body(carry: tuple) -> tuple:
        step, tokens, positions, remaining, work, out = carry
        running = remaining > 0
        here = jnp.minimum(positions, span - 1)
        logits, work = decode_step(config, params, work, tokens, here, lanes.offsets, mesh)
        ids, logprobs = sample(
            logits,
            temperature=lanes.temperature,
            top_p=lanes.top_p,
            top_k=lanes.top_k,
            seed=lanes.seed,
            position=positions + 1,
            forced=None if forced is None else forced[step],
        )
        new = jnp.stack([jnp.where(running, ids, -1), jax.lax.bitcast_convert_type(logprobs, jnp.int32)])
        out = jax.lax.dynamic_update_index_in_dim(out, new, step, axis=1)
        stopped = jnp.any(ids[:, None] == lanes.stop_ids, axis=1)
        if forced is not None:
            stopped &= forced[step] < 0
        remaining = jnp.where(running, jnp.where(stopped, 0, remaining - 1), remaining)
        return (
            step + 1,
            jnp.where(running, ids, tokens),
            positions + running,
            remaining,
            work,
            out,
        )

    out = jnp.full((2, max_steps, lane_count), -1, jnp.int32)
    carry = (jnp.int32(0), lanes.tokens, lanes.positions, lanes.remaining, work, out)
    _, _, _, _, work, out = jax.lax.while_loop(go_on, body, carry)
    return _write_back(cache, work, lanes, max_steps), out


def _write_back(cache: KVCache, work: KVCache, lanes: Lanes, max_steps: int) -> KVCache:
    """Copies the columns a dispatch may have written from the working cache to the lanes' rows.

    One window of ``max_steps`` columns per lane; near the end of a row it begins earlier and rewrites what is there.
    """
    width = min(max_steps, work.length)
    starts = jnp.minimum(lanes.positions, work.length - width)
    places = jnp.stack([lanes.rows, starts], axis=1)

    def one(cached: jax.Array, worked: jax.Array, axis: int) -> jax.Array:
        window = jax.vmap(lambda row, start: jax.lax.dynamic_slice_in_dim(row, start, width, axis - 1))(worked, starts)
        return _write_windows(cached, window, places, axis)

    return KVCache(
        tuple(one(k, w, 3) for k, w in zip(cache.keys, work.keys, strict=True)),
        tuple(one(v, w, 2) for v, w in zip(cache.values, work.values, strict=True)),
    )


def _write_windows(cached: jax.Array, windows: jax.Array, places: jax.Array, axis: int) -> jax.Array:
    """Writes ``windows`` [R, ...] into rows of ``cached`` [N, ...] at ``places`` [R, 2]: row, start along ``axis``.

    A window of a row that does not exist (an unused lane) is dropped.
    """
    dimensions = jax.lax.ScatterDimensionNumbers(
        update_window_dims=(1, 2, 3), inserted_window_dims=(0,), scatter_dims_to_operand_dims=(0, axis)
    )
    mode = jax.lax.GatherScatterMode.FILL_OR_DROP
    return jax.lax.scatter(cached, places, windows, dimensions, unique_indices=True, mode=mode)


NewKV = tuple[tuple[jax.Array, jax.Array], ...]


def compute_chunks(
    config: DecoderConfig,
    span: int,
    mesh: Mesh | None,
    params: EngineParams,
    cache: KVCache,
    tokens: jax.Array,
    places: jax.Array,
    pictures: PictureInputs | None = None,
) -> NewKV:
    """Prefills one chunk of each of R rows, to be written by :func:`write_chunks`.

    Two programs, because one that both reads and writes a donated cache makes the compiler copy all of it.

    Args:
        span: static number of cached positions to attend to, >= every chunk's start.
        mesh: the engine's, if it has more than one device.
        tokens: int32 [R, T], padded.
        places: int32 [R, 2]: row, start; a row >= the cache's marks an unused chunk.
        pictures: what the chunks show, for models that see.
    """
    rows = places[:, 0]
    view = KVCache(
        tuple(k.at[rows].get(mode="clip")[..., :span] for k in cache.keys),
        tuple(v.at[rows].get(mode="clip")[:, :, :span] for v in cache.values),
    )
    return prefill_chunks(config, params, view, tokens, places[:, 1], pictures, mesh)


def write_chunks(cache: KVCache, new: NewKV, places: jax.Array) -> KVCache:
    """Puts chunks' keys and values in place; start + T must not exceed the cache's length."""
    return KVCache(
        tuple(_write_windows(c, k, places, 3) for c, (k, _) in zip(cache.keys, new, strict=True)),
        tuple(_write_windows(c, v, places, 2) for c, (_, v) in zip(cache.values, new, strict=True)),
    )


def copy_row(cache: KVCache, place: jax.Array) -> KVCache:
    """Copies row ``place[0]`` over row ``place[1]``, on the device."""

    def copy(x: jax.Array) -> jax.Array:
        row = jax.lax.dynamic_index_in_dim(x, place[0], keepdims=True)
        return jax.lax.dynamic_update_index_in_dim(x, row, place[1], axis=0)

    return jax.tree.map(copy, cache)


class ProgramTable:
    """Compiles programs ahead of time, one per name and shape, and counts those that come after warm-up."""

    def __init__(self) -> None:
        self._programs: dict[tuple, Callable[..., Any]] = {}
        self._warm = False
        self.recompilations = 0
        self.compile_seconds = 0.0

    def end_warm_up(self) -> None:
        """From here on a new program counts as a recompilation."""
        self._warm = True

    def __len__(self) -> int:
        return len(self._programs)

    def call(
        self,
        key: tuple,
        function: Callable[..., Any],
        donate: tuple[int, ...],
        *args: Any,
        place: NamedSharding,
        out: Any,
    ) -> Any:
        """Runs ``function(*args)`` through the program named ``key``, compiling it if it is new.

        Args:
            donate: indices of arguments whose memory the result may take.
            place: where arguments go that are on no devices yet.
            out: shardings of the result (a prefix of its tree).
        """
        program = self._programs.get(key)
        if program is None:
            begin = time.perf_counter()
            places = jax.tree.map(lambda x: x.sharding if getattr(x, "committed", False) else place, args)
            jitted = jax.jit(
                function,
                in_shardings=places,
                out_shardings=out,
                donate_argnums=donate,
                keep_unused=True,  # memory may be given by what is not read
            )
            program = self._programs[key] = jitted.lower(*args).compile()
            self.compile_seconds += time.perf_counter() - begin
            self.recompilations += self._warm
        return program(*args)


def decode_program(config: DecoderConfig, max_steps: int, span: int, mesh: Mesh | None) -> Callable[..., Any]:
    """``decode`` with its static arguments bound."""
    return functools.partial(decode, config, max_steps, span, mesh)


def chunks_program(config: DecoderConfig, span: int, mesh: Mesh | None) -> Callable[..., Any]:
    """``compute_chunks`` with its static arguments bound."""
    return functools.partial(compute_chunks, config, span, mesh)
