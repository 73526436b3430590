"""The engine's device programs, and a table that compiles each shape once.

Every program has static shapes taken from a few buckets, donates the cache it changes, and crosses
to the host once per dispatch. The table counts recompilations.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import jax
import jax.monitoring
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from jax_agent_rl.jetstream.adapters import AdapterStacks
from jax_agent_rl.jetstream.decode_batch import DecodeBatch
from jax_agent_rl.jetstream.forward import EngineParams, Kernels, decode_step, prefill_chunks
from jax_agent_rl.jetstream.kv_cache import (
    KVCache,
    align_to_pages,
    gather_pages,
    write_back,
)
from jax_agent_rl.jetstream.recurrent_states import (
    gather_states,
    states_after_chunks,
    write_states,
)
from jax_agent_rl.jetstream.sampling import sample
from jax_agent_rl.models.config import DecoderConfig
from jax_agent_rl.models.sharding import constrain
from jax_agent_rl.models.vision_context import ImageInputs
from jax_agent_rl.types.supports import mask_words
from jax_agent_rl.utils.text import counted


def decode(
    config: DecoderConfig,
    max_steps: int,
    mesh: Mesh | None,
    kernels: Kernels,
    params: EngineParams,
    cache: KVCache,
    slots: DecodeBatch,
    limits: jax.Array,
    forced: jax.Array | None = None,
    adapters: AdapterStacks | None = None,
    gathers_logits: bool = False,
) -> tuple[KVCache, jax.Array]:
    """Run several decode steps for W slots, each in its ``slots.pages`` of the cache.

    Kernels read and write pages in place. Without them the used pages are gathered into a compact
    working cache, the steps run on it, and the pages they may have changed are written back.

    Args:
        config: the model, with the engine's ``num_kv_heads``.
        max_steps: static size of the output, >= limits[0]; slots must have pages for as many.
        mesh: the engine's mesh, if it has more than one device.
        kernels: what computes the steps besides XLA.
        cache: all pages.
        slots: the contexts, with room for the ids of all steps.
        limits: int32 [2]: most steps to run, and the number of finished slots that ends the loop
            early.
        forced: int32 [max_steps, W], ids that replace sampled ones and never stop a slot; -1
            samples.
        adapters: the stacks ``slots.adapter`` indexes.
        gathers_logits: every device samples from all ids, so that their weights are summed as on
            one device; otherwise each from its own.

    Returns:
        The cache, and int32 [2, max_steps, W]: sampled ids (-1 where a slot did not run) and the
        bits of their float32 log-probs; if slots are restricted [2 + ceil(V / 32), max_steps, W],
        then the bits of the ids they drew from. One array, because one copy to the host is cheaper
        than several.
    """
    span = slots.pages.shape[1] * cache.length
    in_place = kernels is not Kernels.NONE
    working_cache = cache if in_place else gather_pages(cache, slots.pages, slots.positions)
    # States are gathered with kernels as well: a step reads and writes all of each.
    working_cache = replace(working_cache, states=gather_states(cache.states, slots.states))
    started = jnp.sum(slots.remaining > 0)

    def go_on(carry: tuple) -> jax.Array:
        step, _, _, remaining, _, _ = carry
        running = jnp.sum(remaining > 0)
        return (step < limits[0]) & (running > 0) & (started - running < limits[1])

    def body(carry: tuple) -> tuple:
        step, tokens, positions, remaining, working_cache, out = carry
        running = remaining > 0
        fed = replace(
            slots,
            tokens=tokens,
            positions=jnp.minimum(positions, span - 1),
            remaining=remaining,
        )
        logits, working_cache = decode_step(
            config, mesh, kernels, params, working_cache, fed, adapters
        )
        if gathers_logits:
            logits = constrain(logits, mesh)
        ids, logprobs, support_bits = sample(
            logits,
            temperature=slots.temperature,
            seed=slots.seed,
            position=positions + 1,
            truncation=slots.truncation,
            forced=None if forced is None else forced[step],
            allowed=slots.allowed,
            mesh=None if gathers_logits else mesh,
        )
        new = jnp.stack(
            [jnp.where(running, ids, -1), jax.lax.bitcast_convert_type(logprobs, jnp.int32)]
        )
        if support_bits is not None:
            new = jnp.concatenate([new, jax.lax.bitcast_convert_type(support_bits.T, jnp.int32)])
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
            working_cache,
            out,
        )

    words = mask_words(config.vocab_size) if slots.restricted else 0
    out = jnp.full((2 + words, max_steps, len(slots.tokens)), -1, jnp.int32)
    carry = (jnp.int32(0), slots.tokens, slots.positions, slots.remaining, working_cache, out)
    _, _, _, _, working_cache, out = jax.lax.while_loop(go_on, body, carry)
    states = write_states(cache.states, working_cache.states, slots.states)
    if not in_place:
        working_cache = write_back(cache, working_cache, slots.pages, slots.positions, max_steps)
    return replace(working_cache, states=states), out


def compute_chunks(
    config: DecoderConfig,
    mesh: Mesh | None,
    params: EngineParams,
    cache: KVCache,
    tokens: jax.Array,
    starts: jax.Array,
    context_pages: jax.Array,
    chunk_pages: jax.Array,
    images: ImageInputs | None = None,
    adapters: AdapterStacks | None = None,
    adapter: jax.Array | None = None,
    states: jax.Array | None = None,
    lengths: jax.Array | None = None,
) -> KVCache:
    """Prefill one chunk of each of R contexts, for ``kv_cache.write_pages`` to write.

    A program that both reads and writes a donated cache makes the compiler copy all of it, so these
    are two.

    Args:
        config: the model, with the engine's ``num_kv_heads``.
        mesh: the engine's mesh, if it has more than one device.
        cache: all pages.
        tokens: int32 [R, T], padded.
        starts: int32 [R], where the chunks begin.
        context_pages: int32 [R, n], pages of the contexts, at least up to ``starts``.
        chunk_pages: int32 [R, m], pages the chunks touch.
        images: the chunks' images, for vision models.
        adapters: the engine's LoRA adapters, if any.
        adapter: int32 [R], the adapter of each context.
        states: int32 [R], slots of the contexts' states; None for models without.
        lengths: int32 [R], tokens of each chunk without its padding; None for models without.

    Returns:
        The content of ``chunk_pages`` and ``states``.
    """
    rows = gather_pages(cache, context_pages, starts)
    rows = replace(rows, states=gather_states(cache.states, states))
    layers = prefill_chunks(
        config,
        params,
        rows,
        tokens,
        starts,
        images,
        mesh,
        adapters,
        adapter,
        lengths=lengths,
    )
    chunks = pages_of_chunks(cache, layers, tokens, starts, chunk_pages)
    return replace(chunks, states=states_after_chunks(chunks.states))


def pages_of_chunks(
    cache: KVCache,
    layers: list[tuple[jax.Array, Any, jax.Array | None]],
    tokens: jax.Array,
    starts: jax.Array,
    chunk_pages: jax.Array,
) -> KVCache:
    """Return the content of the pages that chunks touch, and what they bring to states.

    Args:
        cache: all pages.
        layers: what :func:`~jax_agent_rl.jetstream.forward.prefill_chunks` computed.
        tokens: int32 [R, T].
        starts: int32 [R], where the chunks begin.
        chunk_pages: int32 [R, m].
    """
    routed = None
    if cache.routed is not None:
        experts = [chosen for *_, chosen in layers if chosen is not None]
        joined = jnp.concatenate(experts, axis=1)  # [R T, M k]
        routed = joined.astype(cache.routed.dtype).reshape(len(tokens), 1, tokens.shape[1], -1)
    chunks = cache.with_entries([chunk for _, chunk, _ in layers], routed)
    aligned = align_to_pages(cache, chunks, starts, chunk_pages[:, 0])
    return replace(aligned, states=chunks.states)


def feed_columns(
    config: DecoderConfig,
    params: EngineParams,
    cache: KVCache,
    columns: DecodeBatch,
    adapters: AdapterStacks | None = None,
) -> KVCache:
    """Prefill ids with kernels for CPUs, a column for each; XLA leaves out the head.

    Args:
        config: the model, with the engine's ``num_kv_heads``.
        cache: all pages.
        columns: from :func:`~jax_agent_rl.jetstream.decode_batch.columns_of`.
        adapters: the stacks ``columns.adapter`` indexes.
    """
    return decode_step(config, None, Kernels.CPU, params, cache, columns, adapters)[1]


def read_routed(per_token: int, cache: KVCache, pages: jax.Array) -> jax.Array:
    """Return the experts chosen at the positions of ``pages`` int32 [n], [n S, M, k].

    Args:
        per_token: k.
    """
    experts = cache.routed[pages]  # [n, 1, S, M k]
    return experts.reshape(-1, experts.shape[-1] // per_token, per_token)


@contextlib.contextmanager
def cache_hits() -> Iterator[list[str]]:
    """Yield a list of the programs that this thread finds in JAX's compilation cache.

    It gains an event for each.
    """
    events: list[str] = []
    thread = threading.get_ident()

    def listen(event: str, **_: Any) -> None:
        if event == "/jax/compilation_cache/cache_hits" and threading.get_ident() == thread:
            events.append(event)

    jax.monitoring.register_event_listener(listen)
    try:
        yield events
    finally:
        jax.monitoring.unregister_event_listener(listen)


CompilerOptions = dict[str, str | bool]
"""XLA's options by name."""
NextCall = tuple[tuple, Sequence[Any]] | None
"""Key and arguments of the program likely to be needed next."""


class ProgramTable:
    """Compiles programs, one per key, and counts those compiled after warm-up."""

    def __init__(self) -> None:
        self._by_mesh: dict[Mesh, ProgramTable] = {}
        self._programs: dict[tuple, Callable[..., Any]] = {}
        self._warm = False
        self._later: frozenset[tuple] = frozenset()
        self.recompilations = 0
        self.compile_seconds = 0.0
        self.cache_hits = 0

    def of(self, mesh: Mesh) -> ProgramTable:
        """Return the table of all engines on these devices; others have one of their own."""
        return self._by_mesh.setdefault(mesh, ProgramTable())

    def end_warm_up(self, later: Collection[tuple] = ()) -> None:
        """Count new programs as recompilations from here on.

        Args:
            later: keys of programs that are compiled at first use and do not count.
        """
        self._warm = True
        self._later = frozenset(later)

    def __len__(self) -> int:
        return len(self._programs)

    def summary(self) -> str:
        """Return a line about what was compiled."""
        return (
            f"{counted(len(self), 'engine program')} in {self.compile_seconds:.1f} s,"
            f" {self.cache_hits} of them from the compilation cache"
        )

    def call(
        self,
        key: tuple,
        function: Callable[..., Any],
        donate: tuple[int, ...],
        *args: Any,
        default_sharding: NamedSharding,
        out: Any,
        next_call: Callable[[], NextCall] | None = None,
        compiler_options: CompilerOptions | None = None,
    ) -> Any:
        """Run ``function(*args)`` through the program named ``key``, compiling it if it is new.

        Args:
            key: name of the program.
            function: a function of arrays.
            donate: indices of donated arguments.
            default_sharding: sharding of arguments that are on no device yet.
            out: shardings of the result (a prefix of its tree).
            next_call: returns the program likely to be needed next, which is compiled alongside a
                new one, as a compiler uses one core.
            compiler_options: of this program alone.
        """
        if key not in self._programs:
            begin = time.perf_counter()
            compile_for = functools.partial(
                _compile,
                function,
                donate,
                default_sharding=default_sharding,
                out=out,
                compiler_options=compiler_options,
            )
            following = next_call() if next_call is not None else None
            if following is not None and following[0] not in self._programs:
                following_key, following_args = following
                with ThreadPoolExecutor(1) as pool:
                    following_program = pool.submit(compile_for, *following_args)
                    self._add(key, *compile_for(*args))
                    self._add(following_key, *following_program.result())
            else:
                self._add(key, *compile_for(*args))
            self.compile_seconds += time.perf_counter() - begin
        return self._programs[key](*args)

    def _add(self, key: tuple, program: Callable[..., Any], hit: bool) -> None:
        self._programs[key] = program
        if hit:
            self.cache_hits += 1
        if self._warm and key not in self._later:
            self.recompilations += 1


_shared: dict[tuple, Callable[..., Any]] = {}
MAX_SHARED_PROGRAMS = 512
"""Programs shared by engines of this process, such as a restarted one or an evaluation's; beyond
that all are dropped. Engines run in threads of their own, so each access is one atomic operation.
"""


def _compile(
    function: Callable[..., Any],
    donate: tuple[int, ...],
    *args: Any,
    default_sharding: NamedSharding,
    out: Any,
    compiler_options: CompilerOptions | None,
) -> tuple[Callable[..., Any], bool]:
    """Return the program, and whether this process or JAX's compilation cache had it."""
    key: tuple | None = None
    identity = _identity(function)
    if identity is not None:
        arguments = tuple(
            (x.shape, x.dtype, _sharding_or(x, default_sharding)) for x in jax.tree.leaves(args)
        )
        shardings, tree = jax.tree.flatten(out)
        options = tuple(sorted((compiler_options or {}).items()))
        structure = jax.tree.structure(args)
        key = (identity, donate, arguments, structure, tuple(shardings), tree, options)
        program = _shared.get(key)
        if program is not None:
            return program, True

    with cache_hits() as hits:
        lowered = traced(
            function, donate, *args, default_sharding=default_sharding, out=out
        ).lower()
        program = lowered.compile(compiler_options)
    if key is not None:
        if len(_shared) >= MAX_SHARED_PROGRAMS:
            _shared.clear()
        _shared[key] = program
    return program, bool(hits)


def _identity(function: Callable[..., Any]) -> tuple | None:
    """Identify a module-level function with its static arguments.

    None for a function made at run time.
    """
    if isinstance(function, functools.partial):
        if _identity(function.func) is None:
            return None
        static = (*function.args, *sorted(function.keywords.items()))
        return (function.func, static)
    if inspect.isfunction(function) and "<" not in function.__qualname__:
        return (function,)
    return None


def _sharding_or(x: Any, default_sharding: NamedSharding) -> NamedSharding:
    """Return an argument's sharding, or ``default_sharding`` if it is on no device yet."""
    if isinstance(x, jax.ShapeDtypeStruct) or getattr(x, "committed", False):
        return x.sharding
    return default_sharding


def traced(
    function: Callable[..., Any],
    donate: tuple[int, ...],
    *args: Any,
    default_sharding: NamedSharding,
    out: Any,
) -> jax.stages.Traced:
    """Trace ``function(*args)`` for compilation, see :meth:`ProgramTable.call`.

    Arguments may be shapes.
    """
    jitted = jax.jit(
        function,
        in_shardings=jax.tree.map(lambda x: _sharding_or(x, default_sharding), args),
        out_shardings=out,
        donate_argnums=donate,
        keep_unused=True,  # unused arguments may be donated
    )
    return jitted.trace(*args)


def decode_program(
    config: DecoderConfig, max_steps: int, mesh: Mesh | None, kernels: Kernels
) -> Callable[..., Any]:
    """Bind the static arguments of :func:`decode`."""
    return functools.partial(decode, config, max_steps, mesh, kernels)
