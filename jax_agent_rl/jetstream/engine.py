"""A JetStream ``Engine`` over the Flax model, on CPU, GPU and TPU from the same code.

Two callers drive it. Our scheduler (``jetstream.scheduler``) uses :meth:`JaxEngine.extend`, :meth:`copy_page` and
:meth:`decode`: pages of one cache, many steps per dispatch, sampling per request. JetStream's own Driver uses the
abstract interface (``prefill`` / ``insert`` / ``generate``), which is the same programs one request and one step at a
time, greedy; its slots have as many pages as the longest context, side by side.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jax_agent_rl.config.mesh import EngineMeshConfig
from jax_agent_rl.jetstream import compat, programs
from jax_agent_rl.jetstream.adapters import AdapterStacks, stack_adapters
from jax_agent_rl.jetstream.block_manager import NULL_PAGE
from jax_agent_rl.jetstream.decode_batch import MAX_STOP_IDS, DecodeBatch, idle_decode_batch, pad_decode_batch
from jax_agent_rl.jetstream.forward import EngineParams
from jax_agent_rl.jetstream.kv import KVCache, empty_cache
from jax_agent_rl.jetstream.layout import cache_places, engine_config, make_engine_mesh
from jax_agent_rl.jetstream.page_ops import copied, pages_of, written
from jax_agent_rl.jetstream.shapes import EngineShapes, bucket
from jax_agent_rl.jetstream.tokenizer import IdTokenizer
from jax_agent_rl.jetstream.weight_loading import WeightLoader
from jax_agent_rl.models.config import DecoderConfig, Params
from jax_agent_rl.models.peft import PeftAdapter
from jax_agent_rl.models.quantized import DTYPES, EightBits
from jax_agent_rl.models.sharding import replicated
from jax_agent_rl.models.vision.context import MultimodalContext
from jax_agent_rl.models.vision.layout import ImageInputs

engine_api = compat.engine_api()


def unheard(line: str) -> None:
    """Takes a line of progress that nobody reads."""


PREFILL_ROWS = 4  # chunks computed together: a matrix product of one short chunk mostly waits for the weights


@dataclass(frozen=True)
class Extension:
    """Ids (int32 [n]) to prefill from position ``start`` on into a context's pages, given by their numbers;
    ``multimodal`` is the whole context of a vision model, ``adapter`` is as in
    :class:`~jax_agent_rl.jetstream.decode_batch.DecodeBatch`.
    """

    pages: Sequence[int]
    start: int
    ids: np.ndarray
    multimodal: MultimodalContext | None = None
    adapter: int = 0

    def after(self, count: int) -> Extension:
        """What is left when the first ``count`` ids are done."""
        return replace(self, start=self.start + count, ids=self.ids[count:])


@struct.dataclass
class EnginePrefix:
    """The KV of one prefilled context without its last id: ``cache`` has the pages of slot 0."""

    cache: KVCache
    last_token: jax.Array  # int32 []
    length: jax.Array  # int32 [], ids in the cache


@struct.dataclass
class DecodeState:
    """Everything a Driver's generation step transforms; arrays [slots] but the cache."""

    cache: KVCache
    tokens: jax.Array
    positions: jax.Array
    generated: jax.Array


@struct.dataclass
class ResultTokens(engine_api.ResultTokens):
    """JetStream's result array with one more column: the bits of each id's float32 log-prob."""

    def convert_to_numpy(self) -> ResultTokens:
        return self.replace(data=np.array(self.data))

    def log_probs(self) -> np.ndarray:
        """float32 [slots], after ``convert_to_numpy``."""
        return np.ascontiguousarray(self.data[:, -1]).view(np.float32)


class JaxEngine(engine_api.Engine):
    """See the module docstring. Not thread-safe: one thread drives it.

    Args:
        dtype: of weights, activations and cache.
        kv_dtype: of keys and values instead: ``int8`` or ``fp8``.
        quantize: of the matrices of layers instead: ``int8`` or ``fp8``, at every intake of weights.
        mesh: its devices, see ``jetstream.layout``, which raises a ConfigError; None is this process's first one.
        adapters: LoRA adapters by name, served beside the plain model over any weights.
        compile_ahead: compile every program in :meth:`warm_up`, not each when it is first needed; None: unless the
            engine runs on CPUs, for a short run needs few of them.

    Attributes:
        config: the model as the engine computes it, see ``jetstream.layout.engine_config``.
        kv_dtype: of the cache.
        split: its mesh, if it has more than one device.
    """

    def __init__(
        self,
        config: DecoderConfig,
        shapes: EngineShapes,
        *,
        dtype: jnp.dtype = jnp.float32,
        kv_dtype: EightBits | None = None,
        quantize: EightBits | None = None,
        tokenizer: Any = None,
        mesh: jax.sharding.Mesh | None = None,
        table: programs.ProgramTable | None = None,
        adapters: Mapping[str, PeftAdapter] | None = None,
        compile_ahead: bool | None = None,
    ) -> None:
        self._mesh = mesh or make_engine_mesh(EngineMeshConfig())
        self.config = engine_config(config, self._mesh)
        self.shapes = shapes
        self.table = programs.ProgramTable() if table is None else table
        self._dtype, self.kv_dtype = dtype, DTYPES[kv_dtype] if kv_dtype else dtype
        self._tokenizer = tokenizer
        self._everywhere, self._by_head = replicated(self._mesh), cache_places(self._mesh)
        self.split = self._mesh if self._mesh.size > 1 else None
        platform = self._mesh.devices.flat[0].platform
        self._in_place = platform == "tpu"
        self._compile_ahead = platform != "cpu" if compile_ahead is None else compile_ahead
        self._take = WeightLoader(
            config, self.config, self._mesh, dtype=dtype, quantize=quantize and DTYPES[quantize], call=self.table.call
        )
        self.adapters = tuple(adapters or ())
        self._stacks: AdapterStacks | None = None
        if adapters:
            stacks = stack_adapters(self.config, list(adapters.values()), dtype=dtype)
            self._stacks = jax.device_put(stacks, self._everywhere)

    # --- weights and state ------------------------------------------------------------------------------------

    def load_params(self, params: Params, old: EngineParams | None = None) -> EngineParams:
        """The engine's own copy of the learner's parameter tree, in its own precision, see :class:`WeightLoader`.

        Args:
            old: weights that are served no more; the new ones take their memory.
        """
        return self._take(params, old)

    def init_cache(self) -> KVCache:
        """An empty cache of ``shapes.pages`` pages, and nobody's."""
        return self._empty_cache(self.shapes.pages)

    def _empty_cache(self, pages: int) -> KVCache:
        make = functools.partial(empty_cache, self.config, 1 + pages, self.shapes.page, self.kv_dtype)
        return self._call(("empty", pages), make, (), out=self._by_head)

    def _call(self, key: tuple, function: Any, donate: tuple[int, ...], *args: Any, out: Any, soon: Any = None) -> Any:
        """Runs a program on the engine's mesh."""
        return self.table.call(key, function, donate, *args, place=self._everywhere, out=out, soon=soon)

    # --- our scheduler's interface ----------------------------------------------------------------------------

    def extend(self, params: EngineParams, cache: KVCache, extensions: Sequence[Extension]) -> KVCache:
        """Prefills ids into pages, in as many bucketed chunks as it takes; chunks of a size run several at a time."""
        waiting = [extension for extension in extensions if len(extension.ids)]
        while waiting:
            by_size: dict[int, list[Extension]] = {}
            for extension in waiting:
                by_size.setdefault(bucket(self.shapes.chunk_buckets, len(extension.ids)), []).append(extension)
            for size, same in by_size.items():
                same.sort(key=lambda extension: extension.start)  # alike spans together
                for some in _batches(same):
                    cache = self._extend(params, cache, some, size)
            waiting = [rest for size, same in by_size.items() for e in same if len((rest := e.after(size)).ids)]
        return cache

    def _extend(self, params: EngineParams, cache: KVCache, some: Sequence[Extension], size: int) -> KVCache:
        """One chunk of up to ``size`` ids for each of one, or up to PREFILL_ROWS, contexts."""
        rows, page = 1 if len(some) == 1 else PREFILL_ROWS, self.shapes.page
        span = bucket(self.shapes.prefill_spans, max(e.start for e in some))
        tokens, starts = np.zeros((rows, size), np.int32), np.zeros(rows, np.int32)
        before = np.full((rows, span // page), NULL_PAGE, np.int32)
        into = np.full((rows, pages_of(size, page)), NULL_PAGE, np.int32)
        for i, extension in enumerate(some):
            tokens[i, : len(extension.ids[:size])] = extension.ids[:size]
            starts[i] = extension.start
            for table, first in ((before, 0), (into, extension.start // page)):
                own = extension.pages[first : first + table.shape[1]]
                table[i, : len(own)] = own
        program = programs.chunks_program(self.config, self.split)
        pictures = self._pictures(some, rows, size)
        adapter = None
        if self._stacks is not None:
            adapter = np.zeros(rows, np.int32)
            adapter[: len(some)] = [extension.adapter for extension in some]
        inputs = (params, cache, tokens, starts, before, into, pictures, self._stacks, adapter)
        new = self._call(("chunks", cache.count, rows, size, span), program, (), *inputs, out=self._by_head)
        return self._call(("write", cache.count, rows, size), written, (0,), cache, new, into, out=self._by_head)

    def _pictures(self, some: Sequence[Extension], rows: int, size: int) -> ImageInputs | None:
        """What chunks show: nothing, where the model does not see."""
        return None

    def copy_page(self, cache: KVCache, source: int, target: int) -> KVCache:
        """Copies one page over another, on the device."""
        place = np.array([source, target], np.int32)
        return self._call(("copy", cache.count), copied, (0,), cache, place, out=self._by_head)

    def decode(
        self, params: EngineParams, cache: KVCache, slots: DecodeBatch, steps: int, exit_after: int
    ) -> tuple[KVCache, np.ndarray, np.ndarray]:
        """Runs up to ``steps`` decode steps.

        Args:
            slots: numpy arrays of any length up to ``max_concurrent_decodes``, padded here to a bucket, with pages of
                the longest context.
            exit_after: come back early once this many slots have finished.

        Returns:
            cache, ids int32 [steps', W], log-probs float32 [steps', W]; an id of -1 means the slot did not run.
        """
        count = len(slots.tokens)
        if self._stacks is not None and slots.adapter is None:
            slots = replace(slots, adapter=np.zeros(count, np.int32))
        width = self.width(count)
        span = bucket(self.shapes.span_buckets, int(slots.positions.max()) + steps)
        steps = min(steps, self.shapes.decode_steps)
        program = programs.decode_program(self.config, self.shapes.decode_steps, self.split, self._in_place)
        limits = np.array([steps, exit_after], np.int32)

        def call_of(width: int, span: int) -> tuple[tuple, tuple]:
            """Key and arguments of a program; what slots it has no room for only gives shapes."""
            own = jax.tree.map(lambda x: x[:width], replace(slots, pages=slots.pages[:, : span // self.shapes.page]))
            padded = pad_decode_batch(own, max(0, width - count))
            return ("decode", cache.count, width, span), (params, cache, padded, limits, None, self._stacks)

        def soon() -> programs.Soon:
            after = None if self._compile_ahead else self._after(width, span)
            return after and call_of(*after)

        key, arguments = call_of(width, span)
        places = (self._by_head, self._everywhere)
        cache, out = self._call(key, program, (1,), *arguments, out=places, soon=soon)
        ids, bits = np.asarray(out)[:, :, :count]
        return cache, ids, bits.view(np.float32)

    def width(self, count: int) -> int:
        """Slots of the program that decodes ``count`` contexts."""
        return bucket(self.shapes.slot_buckets, count)

    def _after(self, width: int, span: int) -> tuple[int, int] | None:
        """The decode program that is likely to be needed next: contexts grow, then slots fall idle."""
        longer = [s for s in self.shapes.span_buckets if s > span]
        fewer = [w for w in self.shapes.slot_buckets if w < width]
        return (width, longer[0]) if longer else (fewer[-1], span) if fewer else None

    def warm_up(self, params: EngineParams, cache: KVCache, say: Callable[[str], None] = unheard) -> KVCache:
        """Compiles (and runs once) every program the shapes allow, if that is to be done ahead. Compilations of any
        others count as recompilations from here on.

        Args:
            say: takes a line before each program, and one about all of them.
        """
        shapes = self.shapes
        if not self._compile_ahead:
            self.table.end_warm_up(later=self.program_keys())
            return cache
        jobs = [("decode", w, s) for w in shapes.slot_buckets for s in shapes.span_buckets]
        jobs += [(n, t, s) for n in (1, PREFILL_ROWS) for t in shapes.chunk_buckets for s in shapes.prefill_spans]
        for number, (kind, size, span) in enumerate(jobs, 1):
            name = f"decode {size} slots" if kind == "decode" else f"prefill {kind} x {size}"
            say(f"compiling {name} of {span} positions ({number} of {len(jobs)})")
            if isinstance(kind, str):
                position = span - shapes.decode_steps
                slots = idle_decode_batch(size, shapes.context_pages, position)
                cache, _, _ = self.decode(params, cache, slots, shapes.decode_steps, 1)
            else:
                unused = Extension(pages=(), start=span, ids=np.zeros(1, np.int32))
                cache = self._extend(params, cache, [unused] * kind, size)
        return self._warm(cache, say)

    def program_keys(self) -> set[tuple]:
        """Names in the table of all programs the shapes allow."""
        shapes, count = self.shapes, 1 + self.shapes.pages
        chunks = [(n, t) for n in (1, PREFILL_ROWS) for t in shapes.chunk_buckets]
        return {
            ("copy", count),
            *(("decode", count, width, span) for width in shapes.slot_buckets for span in shapes.span_buckets),
            *(("chunks", count, *chunk, span) for chunk in chunks for span in shapes.prefill_spans),
            *(("write", count, *chunk) for chunk in chunks),
        }

    def _warm(self, cache: KVCache, say: Callable[[str], None]) -> KVCache:
        cache = self.copy_page(cache, NULL_PAGE, NULL_PAGE)
        self.table.end_warm_up()
        say(self.table.summary())
        return cache

    # --- JetStream's abstract interface -----------------------------------------------------------------------

    def prefill(
        self,
        *,
        params: EngineParams,
        existing_prefix: EnginePrefix | None = None,
        padded_tokens: jax.Array,
        true_length: int,
    ) -> EnginePrefix:
        """KV of a context; with ``existing_prefix`` the tokens continue it."""
        ids = np.asarray(padded_tokens)[:true_length].astype(np.int32)
        if existing_prefix is None:
            start = 0
            cache = self._empty_cache(self.shapes.context_pages)
        else:
            start = int(existing_prefix.length)
            cache = jax.tree.map(jnp.copy, existing_prefix.cache)
            ids = np.concatenate([np.asarray(existing_prefix.last_token)[None], ids])
        if start + len(ids) > self.shapes.max_model_len:
            raise ValueError(f"{start + len(ids)} ids do not fit max_model_len={self.shapes.max_model_len}")
        cache = self.extend(params, cache, [Extension(self.pages_of_slot(0), start, ids[:-1])])
        return EnginePrefix(cache=cache, last_token=jnp.int32(ids[-1]), length=jnp.int32(start + len(ids) - 1))

    def init_decode_state(self) -> DecodeState:
        """A state of ``max_concurrent_decodes`` empty slots (each request below gets its own arrays)."""
        slots = self.max_concurrent_decodes
        cache = self._empty_cache(slots * self.shapes.context_pages)
        tokens, positions, generated = (jnp.zeros(slots, jnp.int32) for _ in range(3))
        return DecodeState(cache=cache, tokens=tokens, positions=positions, generated=generated)

    def pages_of_slot(self, slot: int) -> range:
        """Of a decode state's cache."""
        first = 1 + slot * self.shapes.context_pages
        return range(first, first + self.shapes.context_pages)

    def insert(self, prefix: EnginePrefix, decode_state: DecodeState, slot: int) -> DecodeState:
        """Puts a prefilled context into a slot."""
        return _insert(prefix, decode_state, jnp.int32(slot))

    def generate(self, params: EngineParams, decode_state: DecodeState) -> tuple[DecodeState, ResultTokens]:
        """One greedy step for every slot; ``ResultTokens`` also carries log-probs."""
        state, data = self._generate_step(params, decode_state)
        return state, ResultTokens(
            data=data, tokens_idx=(0, 1), valid_idx=(1, 2), length_idx=(2, 3), samples_per_slot=1
        )

    @functools.cached_property
    def _generate_step(self) -> Any:
        slots, length = self.max_concurrent_decodes, self.shapes.cache_length
        step_once = programs.decode_program(self.config, 1, self.split, self._in_place)
        pages = np.array([self.pages_of_slot(slot) for slot in range(slots)], np.int32)

        def step(params: EngineParams, state: DecodeState) -> tuple[DecodeState, jax.Array]:
            batch = DecodeBatch(
                pages=jnp.asarray(pages),
                tokens=state.tokens,
                positions=state.positions,
                remaining=jnp.ones(slots, jnp.int32),
                temperature=jnp.zeros(slots),
                top_p=jnp.ones(slots),
                top_k=jnp.zeros(slots, jnp.int32),
                seed=jnp.zeros(slots, jnp.uint32),
                stop_ids=jnp.full((slots, MAX_STOP_IDS), -1, jnp.int32),
            )
            limits = jnp.array([1, slots + 1], jnp.int32)
            cache, out = step_once(params, state.cache, batch, limits)
            ids, bits = out[0, 0], out[1, 0]
            # An idle slot keeps stepping in JetStream's Driver: hold it inside its pages.
            positions = jnp.minimum(state.positions + 1, length - 1)
            generated = state.generated + 1
            data = jnp.stack([ids, jnp.ones_like(ids), generated, bits], axis=1)
            return DecodeState(cache=cache, tokens=ids, positions=positions, generated=generated), data

        return jax.jit(step, donate_argnums=(1,))

    def get_prefix_destination_sharding(self) -> Any:
        """Prefixes live where the engine's cache does: a prefix of their tree."""
        places: Any = EnginePrefix  # shardings in the places of arrays
        return places(cache=self._by_head, last_token=self._everywhere, length=self._everywhere)

    def get_tokenizer(self) -> Any:
        """JetStream's parameters for C++ tokenizers; only the id arithmetic of ``build_tokenizer`` uses them."""
        from jetstream.engine import tokenizer_pb2

        return tokenizer_pb2.TokenizerParameters()  # pyright: ignore[reportAttributeAccessIssue]  # made at import

    def build_tokenizer(self, metadata: Any) -> IdTokenizer:
        """The tokenizer JetStream's Driver asks for (ids and stop ids; text when one was given)."""
        return IdTokenizer(self.config, self._tokenizer)

    @property
    def max_concurrent_decodes(self) -> int:
        return self.shapes.max_concurrent_decodes

    @property
    def samples_per_slot(self) -> int:
        return 1

    @property
    def max_prefill_length(self) -> int:
        """A power of two: JetStream pads prompts to its own list of those and wants this to be one of them."""
        return 1 << (self.shapes.max_model_len.bit_length() - 1)

    @property
    def mesh(self) -> jax.sharding.Mesh:
        return self._mesh

    @property
    def colocated_cpus(self) -> list[Any] | None:
        return None


@functools.partial(jax.jit, donate_argnums=(1,))
def _insert(prefix: EnginePrefix, state: DecodeState, slot: jax.Array) -> DecodeState:
    first = 1 + slot * (prefix.cache.count - 1)
    cache = jax.tree.map(
        lambda pages, own: jax.lax.dynamic_update_slice_in_dim(pages, own[1:], first, axis=0), state.cache, prefix.cache
    )
    return DecodeState(
        cache=cache,
        tokens=state.tokens.at[slot].set(prefix.last_token),
        positions=state.positions.at[slot].set(prefix.length),
        generated=state.generated.at[slot].set(0),
    )


def _batches(extensions: list[Extension]) -> Iterator[list[Extension]]:
    """PREFILL_ROWS at a time; of a rest of one or two each alone, which is faster than computing padding."""
    for i in range(0, len(extensions), PREFILL_ROWS):
        some = extensions[i : i + PREFILL_ROWS]
        if len(some) > PREFILL_ROWS // 2:
            yield some
        else:
            yield from ([one] for one in some)
