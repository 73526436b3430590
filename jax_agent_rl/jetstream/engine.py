"""The engine over the Flax model, on CPU, GPU and TPU from the same code.

``jetstream.scheduler`` drives it by :meth:`JaxEngine.extend`, :meth:`copy_page`, :meth:`decode` and
:meth:`verify`: pages of one cache, many steps per dispatch, sampling per request. An engine is made
of parts, which share an :class:`~jax_agent_rl.jetstream.context.EngineContext`::

    JaxEngine ─┬─► prefill   ChunkPrefill (with an ImageEncoder), or ColumnPrefill on CPUs
               ├─► decoder   SlotDecoder
               ├─► verifier  ChunkVerifier, or ColumnVerifier on CPUs
               └─► context   model, shapes, devices, LoRA adapters, program table

    deterministic: one program prefills and decodes (``jetstream.deterministic``)
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jax_agent_rl.config.engines import EngineMeshConfig
from jax_agent_rl.jetstream import programs
from jax_agent_rl.jetstream.block_manager import NULL_PAGE
from jax_agent_rl.jetstream.context import EngineContext, EnginePart, WarmUp
from jax_agent_rl.jetstream.decode_batch import DecodeBatch, Extension, Sampled
from jax_agent_rl.jetstream.deterministic import ForcedPrefill, OneProgram, check_model
from jax_agent_rl.jetstream.forward import EngineParams, Kernels
from jax_agent_rl.jetstream.images import ImageEncoder
from jax_agent_rl.jetstream.kv_cache import (
    MOVED_TOGETHER,
    KVCache,
    copy_page,
    get_pages,
    write_pages,
)
from jax_agent_rl.jetstream.mixers.table import empty_cache
from jax_agent_rl.jetstream.prefill import ChunkPrefill, ColumnPrefill
from jax_agent_rl.jetstream.recurrent_states import States, copy_state, get_state, put_state
from jax_agent_rl.jetstream.replica import Replica
from jax_agent_rl.jetstream.shapes import EngineShapes, bucket
from jax_agent_rl.jetstream.sharding import make_engine_mesh
from jax_agent_rl.jetstream.slot_decoder import SlotDecoder
from jax_agent_rl.jetstream.state_slots import NULL_STATE
from jax_agent_rl.jetstream.verification import ChunkVerifier, ColumnVerifier
from jax_agent_rl.jetstream.weights import JointParams, WeightLoader, to_host
from jax_agent_rl.models.config import DecoderConfig, Params
from jax_agent_rl.models.layers import DTYPES, EightBits
from jax_agent_rl.models.lora import PeftAdapter

PrintLine = Callable[[str], None]


def ignore_line(line: str) -> None:
    """Discard a line of progress."""


class JaxEngine:
    """The engine of the module docstring. Not thread-safe.

    Args:
        shapes: static shapes to compile for.
        dtype: type of weights, activations and cache.
        kv_dtype: 8-bit type of keys and values; None keeps ``dtype``.
        quantize: 8-bit type to which the layers' matrices are rounded whenever weights are loaded;
            None keeps ``dtype``.
        mesh: from :func:`~jax_agent_rl.jetstream.sharding.make_engine_mesh`, with one engine; None
            is this process's first device.
        program_table: compiled programs shared with other engines; None makes a new table.
        adapters: LoRA adapters by name, served along with the base model; not with
            ``deterministic``.
        takes_images: serve prompts with images; only for vision models.
        deterministic: compute everything with one program, see ``jetstream.deterministic``.
        use_cpu_kernels: compute in float32 on a CPU with ``jetstream.cpu``, if there is a
            compiler; otherwise with XLA alone.
        compile_ahead: compile every program in :meth:`warm_up` rather than at first use. None does
            so except on CPUs, where short runs need few programs.
        replica: the engine's place among the engines that load and release weights together; None
            for an engine of its own.

    Attributes:
        config: the model as the engine computes it, see
            :func:`~jax_agent_rl.jetstream.sharding.engine_config`.
        offload_params: copies weights to the host, once for all engines of a group.

    Raises:
        ConfigError: the devices cannot share the model, or not as ``deterministic`` has it, see
            :func:`~jax_agent_rl.jetstream.deterministic.check_model`.
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
        program_table: programs.ProgramTable | None = None,
        adapters: Mapping[str, PeftAdapter] | None = None,
        takes_images: bool = False,
        deterministic: bool = False,
        use_cpu_kernels: bool = True,
        compile_ahead: bool | None = None,
        replica: Replica | None = None,
    ) -> None:
        if program_table is None:
            program_table = programs.ProgramTable()
        mesh = mesh or make_engine_mesh(EngineMeshConfig())
        if deterministic:
            check_model(config, mesh)
        context = EngineContext(
            config,
            shapes,
            dtype=dtype,
            kv_dtype=kv_dtype,
            quantize=quantize,
            mesh=mesh,
            takes_images=takes_images,
            adapters=adapters or {},
            program_table=program_table,
            # What tests confirm of sums in the one program is confirmed of XLA's.
            use_cpu_kernels=use_cpu_kernels and not deterministic,
        )
        self.context = context
        self.config = context.config
        self.shapes = shapes

        if compile_ahead is None:
            compile_ahead = context.platform != "cpu"
        self._compile_ahead = compile_ahead
        self.decoder: SlotDecoder | OneProgram
        if deterministic:
            self._compile_ahead = True  # a single program
            self.decoder = OneProgram(context)
        else:
            self.decoder = SlotDecoder(context, compile_ahead=compile_ahead)
        self._images = ImageEncoder(context) if takes_images else None

        loader = WeightLoader(
            config,
            self.config,
            context.mesh if replica is None else replica.group.mesh,
            dtype=dtype,
            quantize=None if quantize is None else DTYPES[quantize],
            by_rows=deterministic,
            call=program_table.call,
        )
        self._replica = replica
        if replica is None:
            self._load = loader
            self.offload_params = to_host
        else:
            self._load = functools.partial(replica.load, loader)
            self.offload_params = replica.offload

    # --- parts ------------------------------------------------------------------------------------

    # Made when they are first used: by then the kernels for CPUs are built, if there are any.

    @functools.cached_property
    def prefill(self) -> ChunkPrefill | ColumnPrefill | ForcedPrefill:
        """The part that computes prompts."""
        if isinstance(self.decoder, OneProgram):
            return ForcedPrefill(self.decoder)
        if self._computes_in_columns and self.config.vision is None:
            return ColumnPrefill(self.context)
        return ChunkPrefill(self.context, self._images)

    @functools.cached_property
    def verifier(self) -> ChunkVerifier | ColumnVerifier:
        """The part that verifies drafts; used only with ``shapes.num_speculative_tokens``."""
        if self._computes_in_columns:
            return ColumnVerifier(self.context)
        return ChunkVerifier(self.context)

    @property
    def _computes_in_columns(self) -> bool:
        """Whether ids of one context are columns of a decode step, as slots are.

        A recurrent state takes the ids of its context one after another.
        """
        return self.context.kernels is Kernels.CPU and not self.context.has_states

    @property
    def _parts(self) -> list[EnginePart]:
        """All parts, in the order in which they warm up."""
        parts: list[EnginePart] = [self.decoder, self.prefill]
        if self._images is not None:
            parts.insert(0, self._images)
        if self.shapes.num_speculative_tokens:
            parts.append(self.verifier)
        return parts

    @property
    def adapters(self) -> tuple[str, ...]:
        """Names of the LoRA adapters."""
        return self.context.adapters.names

    @property
    def program_table(self) -> programs.ProgramTable:
        """The compiled programs."""
        return self.context.program_table

    # --- weights and state ------------------------------------------------------------------------

    def load_adapters(self, adapters: Mapping[str, PeftAdapter]) -> None:
        """Serve these adapters from the next dispatch on; others of :attr:`adapters` stay."""
        self.context.adapters.replace(adapters)

    def load_params(
        self, params: Params | JointParams | EngineParams, old: EngineParams | None = None
    ) -> EngineParams:
        """Copy the learner's parameter tree into the engine's layout and precision.

        See :class:`WeightLoader`.

        Args:
            params: the learner's tree; or weights that a :class:`JointLoader` made for all engines
                of this process, of which no copy is made.
            old: weights no longer served, whose memory the new ones take.
        """
        if not isinstance(params, EngineParams):
            return self._load(params, old)
        if self._replica is not None:
            return self._replica.part_of(params)
        return params

    def init_cache(self) -> KVCache:
        """Return an empty cache of ``shapes.pages`` pages and the null page."""
        return self.empty_cache(self.shapes.pages)

    def empty_cache(self, pages: int) -> KVCache:
        """Return an empty cache of as many pages, and the null page; and of all states."""
        shapes = self.shapes
        program = functools.partial(
            empty_cache,
            self.config,
            1 + pages,
            shapes.page,
            self.context.kv_dtype,
            num_states=shapes.num_states,
            state_dtype=self.context.dtype,
        )
        return self.context.call(("empty", pages), program, (), out=self.context.cache_sharding)

    # --- prefill, decoding, verification ----------------------------------------------------------

    def extend(
        self, params: EngineParams, cache: KVCache, extensions: Sequence[Extension]
    ) -> KVCache:
        """Prefill ids into pages, each context's in order; ``cache`` is donated."""
        waiting = [extension for extension in extensions if len(extension.ids)]
        if not waiting:
            return cache
        return self.prefill.extend(params, cache, waiting)

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
        return self.decoder.decode(params, cache, slots, steps, exit_after)

    def verify(
        self,
        params: EngineParams,
        cache: KVCache,
        slots: DecodeBatch,
        drafts: Sequence[Sequence[int]],
    ) -> tuple[KVCache, Sampled]:
        """Draw the ids after each context and after the accepted ids of its draft.

        Args:
            cache: donated.
            slots: as for :meth:`decode`, not restricted, with pages for the drafts.
            drafts: of each slot; all together must fit the columns of :meth:`verified_columns`.
        """
        return self.verifier.verify(params, cache, slots, drafts)

    def width(self, count: int) -> int:
        """Return the slots of the program that decodes ``count`` contexts."""
        return self.decoder.width(count)

    def verified_columns(self, count: int) -> list[int]:
        """Return how many positions of ``count`` contexts can be verified together, ascending."""
        return self.verifier.columns(count)

    # --- pages ------------------------------------------------------------------------------------

    def copy_page(self, cache: KVCache, source: int, target: int) -> KVCache:
        """Copy one page over another, on the device."""
        source_and_target = np.array([source, target], np.int32)
        return self.context.call(
            ("copy", cache.count),
            copy_page,
            (0,),
            *(cache, source_and_target),
            out=self.context.cache_sharding,
        )

    def read_routed(self, cache: KVCache, pages: Sequence[int]) -> np.ndarray:
        """Return the experts chosen at the positions of a context's pages, [positions, M, k].

        Their numbers are unsigned.
        """
        size = self.shapes.page
        padded = _pad_pages(pages, bucket(self.shapes.span_buckets, len(pages) * size) // size)
        key = ("routed", cache.count, len(padded))
        assert self.config.experts is not None
        read = functools.partial(programs.read_routed, self.config.experts.per_token)
        experts = self.context.call(key, read, (), cache, padded, out=self.context.replicated)
        return np.asarray(experts)[: len(pages) * size]

    def get_pages(self, cache: KVCache, pages: Sequence[int]) -> KVCache:
        """Return copies of pages on the device, and of the null page up to a bucket."""
        padded = _pad_pages(pages, bucket(MOVED_TOGETHER, len(pages)))
        key = ("get", cache.count, len(padded))
        shardings = self.context.cache_sharding.pages
        return self.context.call(key, get_pages, (), cache, padded, out=shardings)

    def put_pages(self, cache: KVCache, content: KVCache, pages: Sequence[int]) -> KVCache:
        """Overwrite pages with ``content`` from the host; ``cache`` is donated."""
        batch_size = MOVED_TOGETHER[-1]
        for i in range(0, len(pages), batch_size):
            batch = pages[i : i + batch_size]
            padded = _pad_pages(batch, bucket(MOVED_TOGETHER, len(batch)))
            # Padding repeats the last page's content; what goes to the null page is dropped.
            index = np.minimum(i + np.arange(len(padded)), len(pages) - 1)
            batch_content = jax.tree.map(lambda x, index=index: x[index], content)
            batch_content = jax.device_put(batch_content, self.context.cache_sharding.pages)
            cache = self.overwrite_pages(cache, batch_content, padded)
        return cache

    def overwrite_pages(self, cache: KVCache, content: KVCache, pages: np.ndarray) -> KVCache:
        """Overwrite pages int32 [n] with as many on the device; ``cache`` is donated."""
        key = ("put", cache.count, len(pages))
        rows = pages[:, None]
        return self.context.call(
            key, write_pages, (0,), cache, content, rows, out=self.context.cache_sharding
        )

    # --- recurrent states -------------------------------------------------------------------------

    def copy_state(self, cache: KVCache, source: int, target: int) -> KVCache:
        """Copy the state of one slot over another, on the device; ``cache`` is donated."""
        source_and_target = np.array([source, target], np.int32)
        return self.context.call(
            ("copy state", cache.count),
            copy_state,
            (0,),
            *(cache, source_and_target),
            out=self.context.cache_sharding,
        )

    def get_state(self, cache: KVCache, slot: int) -> States:
        """Return a copy of the state of a slot on the device, as one row."""
        return self.context.call(
            ("get state", cache.count),
            get_state,
            (),
            *(cache, np.int32(slot)),
            out=self.context.cache_sharding.states,
        )

    def put_state(self, cache: KVCache, row: States, slot: int) -> KVCache:
        """Overwrite the state of a slot with a row from the host; ``cache`` is donated."""
        row = jax.device_put(row, self.context.cache_sharding.states)
        return self.context.call(
            ("put state", cache.count),
            put_state,
            (0,),
            *(cache, row, np.int32(slot)),
            out=self.context.cache_sharding,
        )

    # --- compilation ------------------------------------------------------------------------------

    def program_keys(self) -> set[tuple]:
        """Return the keys of all programs the shapes allow, but for restricted slots."""
        count = self.context.cache_pages
        keys: set[tuple] = {("copy", count)}
        for part in self._parts:
            keys |= part.program_keys()

        if self.config.experts is not None:
            for span in self.shapes.span_buckets:
                keys.add(("routed", count, span // self.shapes.page))

        if self.context.has_states:
            keys.add(("copy state", count))

            if self.shapes.kv_offloading_bytes:
                keys |= {("get state", count), ("put state", count)}
        if self.shapes.kv_offloading_bytes:
            for moved in MOVED_TOGETHER:
                keys.add(("get", count, moved))
                keys.add(("put", count, moved))

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
        restricted_keys = self.decoder.restricted_keys()
        if not self._compile_ahead:
            self.program_table.end_warm_up(later=self.program_keys() | restricted_keys)
            return cache

        warm_ups: list[WarmUp] = []
        for part in self._parts:
            warm_ups += part.warm_ups()
        for number, warm_up in enumerate(warm_ups, 1):
            print_line(f"compiling {warm_up.name} ({number} of {len(warm_ups)})")
            cache = warm_up.run(params, cache)
        cache = self._warm_up_pages(cache)

        self.program_table.end_warm_up(later=restricted_keys)
        print_line(self.program_table.summary())
        return cache

    def _warm_up_pages(self, cache: KVCache) -> KVCache:
        """Compile and run the programs that move pages or states, or read experts."""
        cache = self.copy_page(cache, NULL_PAGE, NULL_PAGE)
        if self.context.has_states:
            cache = self.copy_state(cache, NULL_STATE, NULL_STATE)
            if self.shapes.kv_offloading_bytes:
                state = jax.tree.map(np.asarray, self.get_state(cache, NULL_STATE))
                cache = self.put_state(cache, state, NULL_STATE)
        if self.config.experts is not None:
            for span in self.shapes.span_buckets:
                self.read_routed(cache, [NULL_PAGE] * (span // self.shapes.page))
        if self.shapes.kv_offloading_bytes:
            for count in MOVED_TOGETHER:
                unused = [NULL_PAGE] * count
                content = jax.tree.map(np.asarray, self.get_pages(cache, unused))
                cache = self.put_pages(cache, content, unused)
        return cache


def _pad_pages(pages: Sequence[int], count: int) -> np.ndarray:
    """Append null pages up to a count."""
    padded = np.full(count, NULL_PAGE, np.int32)
    padded[: len(pages)] = pages
    return padded
