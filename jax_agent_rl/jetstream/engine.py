"""The engine over the Flax model, on CPU, GPU and TPU from the same code.

``jetstream.scheduler`` drives it by :meth:`JaxEngine.extend`, :meth:`copy_page` and :meth:`decode`:
pages of one cache, many steps per dispatch, sampling per request. ``jetstream.driver_interface``
puts JetStream's ``Engine`` interface before it, for JetStream's own Driver, which runs the same
programs.
"""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_agent_rl.config.engines import EngineMeshConfig
from jax_agent_rl.jetstream import programs
from jax_agent_rl.jetstream.adapters import AdapterStacks, replace_adapters, stack_adapters
from jax_agent_rl.jetstream.block_manager import NULL_PAGE
from jax_agent_rl.jetstream.cpu import kernels as cpu_kernels
from jax_agent_rl.jetstream.decode_batch import (
    PREFILL_ROWS,
    DecodeBatch,
    Extension,
    Sampled,
    batches_of,
    make_decode_batch,
    pad_decode_batch,
)
from jax_agent_rl.jetstream.forward import EngineParams
from jax_agent_rl.jetstream.kv_cache import (
    MOVED_TOGETHER,
    KVCache,
    copy_page,
    count_pages,
    empty_cache,
    get_pages,
    write_pages,
)
from jax_agent_rl.jetstream.shapes import EngineShapes, bucket
from jax_agent_rl.jetstream.sharding import cache_sharding, engine_config, make_engine_mesh
from jax_agent_rl.jetstream.verification import VerifyingEngine
from jax_agent_rl.jetstream.weights import WeightLoader, to_host
from jax_agent_rl.models.config import DecoderConfig, Params
from jax_agent_rl.models.layers import DTYPES, EightBits
from jax_agent_rl.models.lora import PeftAdapter
from jax_agent_rl.models.sharding import replicated
from jax_agent_rl.models.vision_context import ImageInputs

if TYPE_CHECKING:
    from jax_agent_rl.jetstream.data_parallel import Replica

PrintLine = Callable[[str], None]


def ignore_line(line: str) -> None:
    """Discard a line of progress."""


class JaxEngine(VerifyingEngine):
    """The engine of the module docstring. Not thread-safe.

    Args:
        shapes: static shapes to compile for.
        dtype: type of weights, activations and cache.
        kv_dtype: 8-bit type of keys and values; None keeps ``dtype``.
        quantize: 8-bit type to which the layers' matrices are rounded whenever weights are loaded;
            None keeps ``dtype``.
        mesh: from :func:`~jax_agent_rl.jetstream.sharding.make_engine_mesh`, with one engine; None
            is this process's first device.
        table: compiled programs shared with other engines; None makes a new table.
        adapters: LoRA adapters by name, served along with the base model.
        compile_ahead: compile every program in :meth:`warm_up` rather than at first use. None does
            so except on CPUs, where short runs need few programs.
        replica: the engine's place among the engines that load and release weights together; None
            for an engine of its own.

    Attributes:
        config: the model as the engine computes it, see
            :func:`~jax_agent_rl.jetstream.sharding.engine_config`.
        dtype: type of activations.
        kv_dtype: type of the cache.
        mesh: the devices it computes on.
        split: the mesh if it has more than one device, otherwise None.
        replicated: sharding of arrays that every device of the mesh holds in full.
        cache_sharding: shardings of the cache, and of copies of its pages.
        offload_params: copies weights to the host, once for all engines of a group.
    """

    def __init__(
        self,
        config: DecoderConfig,
        shapes: EngineShapes,
        *,
        dtype: jnp.dtype = jnp.float32,
        kv_dtype: EightBits | None = None,
        quantize: EightBits | None = None,
        mesh: jax.sharding.Mesh | None = None,
        table: programs.ProgramTable | None = None,
        adapters: Mapping[str, PeftAdapter] | None = None,
        compile_ahead: bool | None = None,
        replica: Replica | None = None,
    ) -> None:
        self.mesh = mesh or make_engine_mesh(EngineMeshConfig())
        self.config = engine_config(config, self.mesh)
        self.shapes = shapes
        self.table = programs.ProgramTable() if table is None else table
        self.dtype = dtype
        self.kv_dtype = DTYPES[kv_dtype] if kv_dtype else dtype
        self.replicated = replicated(self.mesh)
        self.cache_sharding = cache_sharding(self.config, self.mesh)
        self.split = self.mesh if self.mesh.size > 1 else None
        self._platform = self.mesh.devices.flat[0].platform
        self._quantize = quantize
        self._compile_ahead = self._platform != "cpu" if compile_ahead is None else compile_ahead

        if self._suits_cpu_kernels():
            # Build them while weights load and prefill programs compile.
            threading.Thread(
                target=cpu_kernels.kernels_digest, name="cpu-kernels", daemon=True
            ).start()

        loader = WeightLoader(
            config,
            self.config,
            self.mesh if replica is None else replica.group.mesh,
            dtype=dtype,
            quantize=None if quantize is None else DTYPES[quantize],
            call=self.table.call,
        )
        if replica is None:
            self._load = loader
            self.offload_params = to_host
        else:
            self._load = functools.partial(replica.load, loader)
            self.offload_params = replica.offload

        self.adapters = tuple(adapters or ())
        self._stacks: AdapterStacks | None = None
        if adapters:
            stacks = stack_adapters(self.config, list(adapters.values()), dtype=self.dtype)
            self._stacks = jax.device_put(stacks, self.replicated)

    # --- weights and state ------------------------------------------------------------------------

    def load_adapters(self, adapters: Mapping[str, PeftAdapter]) -> None:
        """Serve these adapters from the next dispatch on; others of :attr:`adapters` stay."""
        self._stacks = replace_adapters(self.config, self._stacks, self.adapters, adapters)

    def load_params(self, params: Params, old: EngineParams | None = None) -> EngineParams:
        """Copy the learner's parameter tree into the engine's layout and precision.

        See :class:`WeightLoader`.

        Args:
            params: the learner's tree.
            old: weights no longer served, whose memory the new ones take.
        """
        return self._load(params, old)

    def init_cache(self) -> KVCache:
        """Return an empty cache of ``shapes.pages`` pages and the null page."""
        return self.empty_cache(self.shapes.pages)

    def empty_cache(self, pages: int) -> KVCache:
        """Return an empty cache of as many pages, and the null page."""
        program = functools.partial(
            empty_cache, self.config, 1 + pages, self.shapes.page, self.kv_dtype
        )
        return self._call(("empty", pages), program, (), out=self.cache_sharding)

    def _call(
        self,
        key: tuple,
        function: Any,
        donate: tuple[int, ...],
        *args: Any,
        out: Any,
        next_call: Any = None,
    ) -> Any:
        """Run a program on the engine's mesh, see :meth:`ProgramTable.call`."""
        return self.table.call(
            key, function, donate, *args, place=self.replicated, out=out, next_call=next_call
        )

    # --- prefill ----------------------------------------------------------------------------------

    def extend(
        self, params: EngineParams, cache: KVCache, extensions: Sequence[Extension]
    ) -> KVCache:
        """Prefill ids into pages, those of each context in order."""
        waiting = [extension for extension in extensions if len(extension.ids)]
        if not waiting:
            return cache
        if self._prefills_columns:
            return self._extend_columns(params, cache, waiting)
        return self._extend_chunks(params, cache, waiting)

    def _extend_chunks(
        self, params: EngineParams, cache: KVCache, waiting: Sequence[Extension]
    ) -> KVCache:
        """Prefill in as many bucketed chunks as it takes; chunks of a size run together."""
        while waiting:
            by_size: dict[int, list[Extension]] = {}
            for extension in waiting:
                size = bucket(self.shapes.chunk_buckets, len(extension.ids))
                by_size.setdefault(size, []).append(extension)

            remaining = []
            for size, extensions in by_size.items():
                # Similar spans run together.
                extensions.sort(key=lambda extension: extension.start)
                for batch in batches_of(extensions):
                    cache = self._prefill_chunks(params, cache, batch, size)
                for extension in extensions:
                    following = extension.after(size)
                    if len(following.ids):
                        remaining.append(following)
            waiting = remaining
        return cache

    def _prefill_chunks(
        self, params: EngineParams, cache: KVCache, extensions: Sequence[Extension], size: int
    ) -> KVCache:
        """Prefill one chunk of up to ``size`` ids for each of up to PREFILL_ROWS contexts."""
        page = self.shapes.page
        rows = 1 if len(extensions) == 1 else PREFILL_ROWS
        span = bucket(self.shapes.prefill_spans, max(e.start for e in extensions))
        tokens = np.zeros((rows, size), np.int32)
        starts = np.zeros(rows, np.int32)
        context_pages = np.full((rows, span // page), NULL_PAGE, np.int32)
        chunk_pages = np.full((rows, count_pages(size, page)), NULL_PAGE, np.int32)
        for row, extension in enumerate(extensions):
            chunk = extension.ids[:size]
            tokens[row, : len(chunk)] = chunk
            starts[row] = extension.start
            _fill_row(context_pages[row], extension.pages)
            _fill_row(chunk_pages[row], extension.pages[extension.start // page :])

        images = self._image_inputs(extensions, rows, size)
        adapter = None
        if self._stacks is not None:
            adapter = np.zeros(rows, np.int32)
            adapter[: len(extensions)] = [extension.adapter for extension in extensions]

        chunks = self._call(
            ("chunks", cache.count, rows, size, span),
            functools.partial(programs.compute_chunks, self.config, self.split),
            (),
            *(params, cache, tokens, starts, context_pages, chunk_pages, images),
            *(self._stacks, adapter),
            out=self.cache_sharding,
        )
        return self._call(
            ("write", cache.count, rows, size),
            write_pages,
            (0,),
            *(cache, chunks, chunk_pages),
            out=self.cache_sharding,
        )

    def _image_inputs(
        self, extensions: Sequence[Extension], rows: int, size: int
    ) -> ImageInputs | None:
        """Return the images in chunks; None for text models."""
        return None

    def copy_page(self, cache: KVCache, source: int, target: int) -> KVCache:
        """Copy one page over another, on the device."""
        source_and_target = np.array([source, target], np.int32)
        return self._call(
            ("copy", cache.count),
            copy_page,
            (0,),
            *(cache, source_and_target),
            out=self.cache_sharding,
        )

    def read_routed(self, cache: KVCache, pages: Sequence[int]) -> np.ndarray:
        """Return the experts chosen at the positions of a context's pages, [positions, L, k].

        Their numbers are unsigned.
        """
        size = self.shapes.page
        padded = _pad_pages(pages, bucket(self.shapes.span_buckets, len(pages) * size) // size)
        key = ("routed", cache.count, len(padded))
        experts = self._call(key, programs.read_routed, (), cache, padded, out=self.replicated)
        return np.asarray(experts)[: len(pages) * size]

    def get_pages(self, cache: KVCache, pages: Sequence[int]) -> KVCache:
        """Return copies of pages on the device, and of the null page up to a bucket."""
        padded = _pad_pages(pages, bucket(MOVED_TOGETHER, len(pages)))
        key = ("get", cache.count, len(padded))
        return self._call(key, get_pages, (), cache, padded, out=self.cache_sharding)

    def put_pages(self, cache: KVCache, content: KVCache, pages: Sequence[int]) -> KVCache:
        """Overwrite pages with ``content`` from the host; ``cache`` is donated."""
        batch_size = MOVED_TOGETHER[-1]
        for i in range(0, len(pages), batch_size):
            batch = pages[i : i + batch_size]
            padded = _pad_pages(batch, bucket(MOVED_TOGETHER, len(batch)))
            # Padding repeats the last page's content; what goes to the null page is dropped.
            index = np.minimum(i + np.arange(len(padded)), len(pages) - 1)
            batch_content = jax.tree.map(lambda x, index=index: x[index], content)
            batch_content = jax.device_put(batch_content, self.cache_sharding)
            cache = self.overwrite_pages(cache, batch_content, padded)
        return cache

    def overwrite_pages(self, cache: KVCache, content: KVCache, pages: np.ndarray) -> KVCache:
        """Overwrite pages int32 [n] with as many on the device; ``cache`` is donated."""
        key = ("put", cache.count, len(pages))
        rows = pages[:, None]
        return self._call(key, write_pages, (0,), cache, content, rows, out=self.cache_sharding)

    # --- decoding ---------------------------------------------------------------------------------

    def _suits_cpu_kernels(self) -> bool:
        """Whether ``jetstream.cpu`` can compute for this engine: in float32, on one CPU."""
        if self._platform != "cpu" or self.split is not None or self._quantize is not None:
            return False
        dtypes = {jnp.dtype(self.dtype), jnp.dtype(self.kv_dtype)}
        return dtypes == {jnp.dtype(jnp.float32)}

    @functools.cached_property
    def kernels(self) -> programs.Kernels:
        """Kernels of its decode programs."""
        if self._platform == "tpu":
            return programs.Kernels.PALLAS
        if self._suits_cpu_kernels() and cpu_kernels.kernels_digest() is not None:
            return programs.Kernels.CPU
        return programs.Kernels.NONE

    def decode(
        self, params: EngineParams, cache: KVCache, slots: DecodeBatch, steps: int, exit_after: int
    ) -> tuple[KVCache, Sampled]:
        """Run up to ``steps`` decode steps.

        Args:
            cache: donated.
            slots: numpy arrays of up to ``max_concurrent_decodes`` slots, with pages for the
                longest context; padded to a bucket here.
            steps: at most ``shapes.decode_steps`` are run; 1 with grammars.
            exit_after: return early once this many slots have finished.
        """
        count = len(slots.tokens)
        slots = self._with_defaults(slots)
        width = self.width(count)
        span = bucket(self._decode_spans, int(slots.positions.max()) + steps)
        # Programs for restricted slots are compiled when the first ones come: most runs have none.
        kind = _decode_kind(slots.truncation is not None, slots.allowed is not None)
        max_steps = self.shapes.decode_steps if slots.allowed is None else 1
        program = programs.decode_program(self.config, max_steps, self.split, self.kernels)
        limits = np.array([min(steps, max_steps), exit_after], np.int32)

        def call_of(width: int, span: int) -> tuple[tuple, tuple]:
            """Return the key and the arguments of the program of a shape.

            Slots are cut to the shape: the program compiled ahead needs only shapes.
            """
            fitting = replace(slots, pages=slots.pages[:, : span // self.shapes.page])
            fitting = jax.tree.map(lambda x: x[:width], fitting)
            padded = pad_decode_batch(fitting, max(0, width - count))
            key = (kind, cache.count, width, span)
            return key, (params, cache, padded, limits, None, self._stacks)

        def next_call() -> programs.NextCall:
            if self._compile_ahead:  # it was compiled already
                return None
            shape = self._next_decode_shape(width, span)
            if shape is None:
                return None
            return call_of(*shape)

        key, arguments = call_of(width, span)
        shardings = (self.cache_sharding, self.replicated)
        cache, out = self._call(key, program, (1,), *arguments, out=shardings, next_call=next_call)
        return cache, Sampled.of(np.asarray(out)[:, :, :count])

    def _with_defaults(self, slots: DecodeBatch) -> DecodeBatch:
        """Add the optional arrays that the engine's programs always take."""
        if self._stacks is not None and slots.adapter is None:
            return replace(slots, adapter=np.zeros(len(slots.tokens), np.int32))
        return slots

    def width(self, count: int) -> int:
        """Return the slots of the program that decodes ``count`` contexts."""
        return bucket(self.shapes.slot_buckets, count)

    def _next_decode_shape(self, width: int, span: int) -> tuple[int, int] | None:
        """Return the shape likely to be needed next: contexts grow, then slots fall idle."""
        for longer in self._decode_spans:
            if longer > span:
                return width, longer
        narrower = [w for w in self.shapes.slot_buckets if w < width]
        if narrower:
            return narrower[-1], span
        return None

    # --- compilation ------------------------------------------------------------------------------

    @property
    def _decode_spans(self) -> tuple[int, ...]:
        """Context lengths that decode programs are compiled for."""
        if self._by_column:  # kernels for CPUs read only the positions there are
            return self.shapes.span_buckets[-1:]
        return self.shapes.span_buckets

    def _decode_shapes(self) -> list[tuple[int, int]]:
        """Return the shapes of decode programs: (slots, positions)."""
        return list(itertools.product(self.shapes.slot_buckets, self._decode_spans))

    def _chunk_shapes(self) -> list[tuple[int, int, int]]:
        """Return the shapes of programs that prefill chunks: (rows, ids, positions)."""
        if self._prefills_columns:
            return []
        shapes = self.shapes
        rows = (1, PREFILL_ROWS)
        return list(itertools.product(rows, shapes.chunk_buckets, shapes.prefill_spans))

    def program_keys(self) -> set[tuple]:
        """Return the keys of all programs the shapes allow, but for restricted slots."""
        count = 1 + self.shapes.pages
        keys: set[tuple] = {("copy", count)}
        for width, span in self._decode_shapes():
            keys.add(("decode", count, width, span))
        for rows, size, span in self._chunk_shapes():
            keys.add(("chunks", count, rows, size, span))
            keys.add(("write", count, rows, size))
        if self.config.experts is not None:
            for span in self.shapes.span_buckets:
                keys.add(("routed", count, span // self.shapes.page))
        if self.shapes.kv_offloading_bytes:
            for moved in MOVED_TOGETHER:
                keys.add(("get", count, moved))
                keys.add(("put", count, moved))
        return keys | self._column_keys() | self._verification_keys()

    def _restricted_keys(self) -> set[tuple]:
        """Return the keys of the programs for restricted slots."""
        count = 1 + self.shapes.pages
        keys: set[tuple] = set()
        for truncated, constrained in ((False, True), (True, False), (True, True)):
            kind = _decode_kind(truncated, constrained)
            for width, span in self._decode_shapes():
                keys.add((kind, count, width, span))
        return keys

    def warm_up(
        self, params: EngineParams, cache: KVCache, print_line: PrintLine = ignore_line
    ) -> KVCache:
        """Compile and run every program the shapes allow, if ``compile_ahead``.

        Programs for restricted slots are left out. Any other program compiled from here on counts
        as a recompilation.

        Args:
            cache: donated.
            print_line: called with a line of progress before each program, and with a summary.
        """
        if not self._compile_ahead:
            self.table.end_warm_up(later=self.program_keys() | self._restricted_keys())
            return cache

        decode_shapes = self._decode_shapes()
        chunk_shapes = self._chunk_shapes()
        column_widths = self._column_widths
        total = len(decode_shapes) + len(chunk_shapes) + len(column_widths)
        number = itertools.count(1)

        steps = self.shapes.decode_steps
        for width, span in decode_shapes:
            print_line(
                f"compiling decode {width} slots of {span} positions ({next(number)} of {total})"
            )
            slots = make_decode_batch(width, self.shapes.context_pages, span - steps)
            cache, _ = self.decode(params, cache, slots, steps, 1)

        for rows, size, span in chunk_shapes:
            print_line(
                f"compiling prefill {rows} x {size} of {span} positions ({next(number)} of {total})"
            )
            unused = Extension(pages=(), start=span, ids=np.zeros(1, np.int32))
            cache = self._prefill_chunks(params, cache, [unused] * rows, size)

        for width in column_widths:
            print_line(f"compiling prefill of {width} ids ({next(number)} of {total})")
            cache = self._warm_up_columns(params, cache, width)

        if self.shapes.num_speculative_tokens:
            print_line("compiling verifications of drafts")
            cache = self._warm_up_verification(params, cache)
        return self._end_warm_up(cache, print_line)

    def _end_warm_up(self, cache: KVCache, print_line: PrintLine) -> KVCache:
        """Compile and run the programs that move pages or read experts, and end the warm-up."""
        cache = self.copy_page(cache, NULL_PAGE, NULL_PAGE)
        if self.config.experts is not None:
            for span in self.shapes.span_buckets:
                self.read_routed(cache, [NULL_PAGE] * (span // self.shapes.page))
        if self.shapes.kv_offloading_bytes:
            for count in MOVED_TOGETHER:
                unused = [NULL_PAGE] * count
                content = jax.tree.map(np.asarray, self.get_pages(cache, unused))
                cache = self.put_pages(cache, content, unused)
        self.table.end_warm_up(later=self._restricted_keys())
        print_line(self.table.summary())
        return cache


def _fill_row(row: np.ndarray, pages: Sequence[int]) -> None:
    """Write as many pages to the beginning of a row as it has room for."""
    fitting = pages[: len(row)]
    row[: len(fitting)] = fitting


def _pad_pages(pages: Sequence[int], count: int) -> np.ndarray:
    """Append null pages up to a count."""
    padded = np.full(count, NULL_PAGE, np.int32)
    padded[: len(pages)] = pages
    return padded


def _decode_kind(truncated: bool, constrained: bool) -> str:
    """Name the decode program of a batch by what restricts its slots: top-p and such, grammars."""
    kind = "decode"
    if truncated:
        kind += " truncated"
    if constrained:
        kind += " constrained"
    return kind
