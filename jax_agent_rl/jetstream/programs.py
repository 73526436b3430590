"""The engine's device programs, and a table that compiles each shape once and counts what comes late.

Every program has static shapes taken from a few buckets, donates the cache it changes, and crosses to the host once
per dispatch.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.monitoring
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jax_agent_rl.jetstream.adapters import AdapterStacks
from jax_agent_rl.jetstream.decode_batch import DecodeBatch
from jax_agent_rl.jetstream.forward import EngineParams, decode_step, prefill_chunks
from jax_agent_rl.jetstream.kv import KVCache, LayerKV
from jax_agent_rl.jetstream.page_ops import aligned, gathered, write_back
from jax_agent_rl.jetstream.sampling import sample
from jax_agent_rl.models.config import DecoderConfig
from jax_agent_rl.models.vision.layout import ImageInputs


def decode(
    config: DecoderConfig,
    max_steps: int,
    mesh: Mesh | None,
    in_place: bool,
    params: EngineParams,
    cache: KVCache,
    slots: DecodeBatch,
    limits: jax.Array,
    forced: jax.Array | None = None,
    adapters: AdapterStacks | None = None,
) -> tuple[KVCache, jax.Array]:
    """Several decode steps for W slots, each in its ``slots.pages`` of the cache.

    On a TPU kernels read and write the pages where they lie. Elsewhere they are gathered into a compact working cache
    (those that no slot uses cost nothing), the steps run on it, and the pages they may have written are written back.

    Args:
        max_steps: static size of the output, >= limits[0]; pages must be there for as many.
        mesh: the engine's, if it has more than one device.
        in_place: by kernels for TPUs.
        limits: int32 [2]: steps to run at most; end early once this many slots have finished.
        forced: int32 [max_steps, W], ids to take in place of sampled ones, which stop nothing; -1 samples.
        adapters: those that ``slots.adapter`` names.

    Returns:
        the cache, and int32 [2, max_steps, W]: sampled ids (-1 where a slot did not run) and the bits of their
        float32 log-probs. One array, because one copy to the host is cheaper than two.
    """
    span = slots.pages.shape[1] * cache.length
    pages, worked = (slots.pages, cache) if in_place else (None, gathered(cache, slots.pages, slots.positions))

    def feed(worked: KVCache, tokens: jax.Array, positions: jax.Array) -> tuple[jax.Array, KVCache]:
        here = jnp.minimum(positions, span - 1)
        return decode_step(config, params, worked, tokens, here, slots.offsets, mesh, pages, adapters, slots.adapter)

    worked, out = _steps(feed, max_steps, worked, slots, limits, forced)
    return worked if in_place else write_back(cache, worked, slots.pages, slots.positions, max_steps), out


def _steps(
    feed: Callable[[KVCache, jax.Array, jax.Array], tuple[jax.Array, KVCache]],
    max_steps: int,
    cache: KVCache,
    slots: DecodeBatch,
    limits: jax.Array,
    forced: jax.Array | None,
) -> tuple[KVCache, jax.Array]:
    """The loop of :func:`decode`; ``feed`` takes ids and positions [W], and gives logits of what comes next."""
    slot_count = len(slots.tokens)
    started = jnp.sum(slots.remaining > 0)

    def go_on(carry: tuple) -> jax.Array:
        step, _, _, remaining, _, _ = carry
        running = jnp.sum(remaining > 0)
        return (step < limits[0]) & (running > 0) & (started - running < limits[1])

    def body(carry: tuple) -> tuple:
        step, tokens, positions, remaining, cache, out = carry
        running = remaining > 0
        logits, cache = feed(cache, tokens, positions)
        ids, logprobs = sample(
            logits,
            temperature=slots.temperature,
            top_p=slots.top_p,
            top_k=slots.top_k,
            seed=slots.seed,
            position=positions + 1,
            forced=None if forced is None else forced[step],
        )
        new = jnp.stack([jnp.where(running, ids, -1), jax.lax.bitcast_convert_type(logprobs, jnp.int32)])
        out = jax.lax.dynamic_update_index_in_dim(out, new, step, axis=1)
        stopped = jnp.any(ids[:, None] == slots.stop_ids, axis=1)
        if forced is not None:
            stopped &= forced[step] < 0
        remaining = jnp.where(running, jnp.where(stopped, 0, remaining - 1), remaining)
        return (
            step + 1,
            jnp.where(running, ids, tokens),
            positions + running,
            remaining,
            cache,
            out,
        )

    out = jnp.full((2, max_steps, slot_count), -1, jnp.int32)
    carry = (jnp.int32(0), slots.tokens, slots.positions, slots.remaining, cache, out)
    _, _, _, _, cache, out = jax.lax.while_loop(go_on, body, carry)
    return cache, out


def compute_chunks(
    config: DecoderConfig,
    mesh: Mesh | None,
    params: EngineParams,
    cache: KVCache,
    tokens: jax.Array,
    starts: jax.Array,
    before: jax.Array,
    into: jax.Array,
    pictures: ImageInputs | None = None,
    adapters: AdapterStacks | None = None,
    adapter: jax.Array | None = None,
) -> tuple[LayerKV, ...]:
    """Prefills one chunk of each of R contexts, to be written by :func:`~jax_agent_rl.jetstream.page_ops.written`.

    Two programs, because one that both reads and writes a donated cache makes the compiler copy all of it.

    Args:
        mesh: the engine's, if it has more than one device.
        tokens: int32 [R, T], padded.
        starts: int32 [R], where the chunks begin.
        before: int32 [R, n], the pages of the contexts, at least as far as the chunks begin.
        into: int32 [R, m], the pages that the chunks touch.
        pictures: what the chunks show, for models that see.
        adapters, adapter: see :func:`~jax_agent_rl.jetstream.forward.prefill_chunks`.

    Returns:
        the pages ``into``.
    """
    rows = gathered(cache, before, starts)
    new = prefill_chunks(config, params, rows, tokens, starts, pictures, mesh, adapters, adapter)
    return aligned(cache, new, starts, into[:, 0])


@contextlib.contextmanager
def cache_hits() -> Iterator[list[str]]:
    """Fills with an event for each program that this thread finds in JAX's compilation cache."""
    events, thread = [], threading.get_ident()

    def listen(event: str, **_: Any) -> None:
        if event == "/jax/compilation_cache/cache_hits" and threading.get_ident() == thread:
            events.append(event)

    jax.monitoring.register_event_listener(listen)
    try:
        yield events
    finally:
        jax.monitoring.unregister_event_listener(listen)


Soon = tuple[tuple, Sequence[Any]] | None
"""Key and arguments of a program that will be needed."""


class ProgramTable:
    """Compiles programs, one per name and shape, and counts those that come after warm-up."""

    def __init__(self) -> None:
        self._programs: dict[tuple, Callable[..., Any]] = {}
        self._warm = False
        self._later: frozenset[tuple] = frozenset()
        self.recompilations = 0
        self.compile_seconds = 0.0
        self.cache_hits = 0

    def end_warm_up(self, later: Collection[tuple] = ()) -> None:
        """From here on a new program counts as a recompilation.

        Args:
            later: keys of programs that are compiled when they are first needed, and do not count.
        """
        self._warm, self._later = True, frozenset(later)

    def __len__(self) -> int:
        return len(self._programs)

    def summary(self) -> str:
        """What compiling took, for people."""
        taken = f"{len(self)} engine programs in {self.compile_seconds:.1f} s"
        return f"{taken}, {self.cache_hits} of them from the compilation cache"

    def call(
        self,
        key: tuple,
        function: Callable[..., Any],
        donate: tuple[int, ...],
        *args: Any,
        place: NamedSharding,
        out: Any,
        soon: Callable[[], Soon] | None = None,
    ) -> Any:
        """Runs ``function(*args)`` through the program named ``key``, compiling it if it is new.

        Args:
            donate: indices of arguments whose memory the result may take.
            place: where arguments go that are on no devices yet.
            out: shardings of the result (a prefix of its tree).
            soon: tells by what the function will be called next, or None. Asked if this program is new; another new one
                is compiled beside it, for a compiler uses one core.
        """
        if key not in self._programs:
            begin = time.perf_counter()
            compiled = functools.partial(_compiled, function, donate, place=place, out=out)
            following = soon() if soon is not None else None
            if following is not None and following[0] not in self._programs:
                with ThreadPoolExecutor(1) as pool:
                    other = pool.submit(compiled, *following[1])
                    self._add(key, *compiled(*args))
                    self._add(following[0], *other.result())
            else:
                self._add(key, *compiled(*args))
            self.compile_seconds += time.perf_counter() - begin
        return self._programs[key](*args)

    def _add(self, key: tuple, program: Callable[..., Any], hit: bool) -> None:
        self._programs[key] = program
        self.cache_hits += hit
        self.recompilations += self._warm and key not in self._later


_shared: dict[tuple, Callable[..., Any]] = {}
MAX_SHARED = 512
"""Programs that the next engine of the same shapes in this process takes as they are: one that is started again, that
of an evaluation. Engines have threads of their own, so each access is one operation; at the limit all are dropped."""


def _compiled(
    function: Callable[..., Any], donate: tuple[int, ...], *args: Any, place: NamedSharding, out: Any
) -> tuple[Callable[..., Any], bool]:
    """The program, and whether it was compiled before: by this process, or by one with the same cache."""
    key: tuple | None = None
    if (identity := _identity(function)) is not None:
        described = [(x.shape, x.dtype, _place_of(x, place)) for x in map(_as_array, jax.tree.leaves(args))]
        leaves, tree = jax.tree.flatten(out)
        key = (identity, donate, tuple(described), jax.tree.structure(args), tuple(leaves), tree)
    if (program := _shared.get(key) if key else None) is not None:
        return program, True
    with cache_hits() as hits:
        program = traced(function, donate, *args, place=place, out=out).lower().compile()
    if key is not None:
        if len(_shared) >= MAX_SHARED:
            _shared.clear()
        _shared[key] = program
    return program, bool(hits)


def _identity(function: Callable[..., Any]) -> tuple | None:
    """What tells a function of a module, with static arguments, from others; None for one that is made at run time."""
    if isinstance(function, functools.partial):
        static = (*function.args, *sorted(function.keywords.items()))
        return (function.func, static) if _identity(function.func) else None
    return (function,) if inspect.isfunction(function) and "<" not in function.__qualname__ else None


def _as_array(x: Any) -> Any:
    return x if isinstance(x, jax.Array | jax.ShapeDtypeStruct) else np.asarray(x)


def _place_of(x: Any, place: NamedSharding) -> NamedSharding:
    """Where an argument is, or goes if it is on no device yet."""
    return x.sharding if isinstance(x, jax.ShapeDtypeStruct) or getattr(x, "committed", False) else place


def traced(
    function: Callable[..., Any], donate: tuple[int, ...], *args: Any, place: NamedSharding, out: Any
) -> jax.stages.Traced:
    """``function(*args)`` ready to be compiled, see :meth:`ProgramTable.call`; arguments may be described."""
    jitted = jax.jit(
        function,
        in_shardings=jax.tree.map(lambda x: _place_of(x, place), args),
        out_shardings=out,
        donate_argnums=donate,
        keep_unused=True,  # memory may be given by what is not read
    )
    return jitted.trace(*args)


def decode_program(config: DecoderConfig, max_steps: int, mesh: Mesh | None, in_place: bool) -> Callable[..., Any]:
    """``decode`` with its static arguments bound."""
    return functools.partial(decode, config, max_steps, mesh, in_place)


def chunks_program(config: DecoderConfig, mesh: Mesh | None) -> Callable[..., Any]:
    """``compute_chunks`` with its static arguments bound."""
    return functools.partial(compute_chunks, config, mesh)
