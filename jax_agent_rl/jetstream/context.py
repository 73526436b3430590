"""What the parts of an engine share: the model, its shapes, its devices, and compiled programs."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from jax_agent_rl.jetstream.adapters import ServedAdapters
from jax_agent_rl.jetstream.cpu import kernels as cpu_kernels
from jax_agent_rl.jetstream.decode_batch import DecodeBatch
from jax_agent_rl.jetstream.forward import EngineParams, Kernels
from jax_agent_rl.jetstream.kv_cache import KVCache
from jax_agent_rl.jetstream.mixers.table import has_states
from jax_agent_rl.jetstream.programs import CompilerOptions, NextCall, ProgramTable
from jax_agent_rl.jetstream.shapes import EngineShapes
from jax_agent_rl.jetstream.sharding import cache_sharding, engine_config
from jax_agent_rl.jetstream.state_slots import NULL_STATE
from jax_agent_rl.models.config import DecoderConfig
from jax_agent_rl.models.layers import DTYPES, EightBits
from jax_agent_rl.models.lora import PeftAdapter
from jax_agent_rl.models.sharding import replicated


@dataclass(frozen=True)
class WarmUp:
    """A program to compile before the first request.

    Attributes:
        name: for a line of progress.
        run: runs the program on idle slots or unused pages; takes weights and the cache, which it
            may donate, and returns the cache.
    """

    name: str
    run: Callable[[EngineParams, KVCache], KVCache]


class EnginePart(Protocol):
    """A part of an engine, with programs of its own."""

    def program_keys(self) -> set[tuple]:
        """Return the keys of all programs the shapes allow, but for restricted slots."""
        ...

    def warm_ups(self) -> list[WarmUp]:
        """Return the programs of :meth:`program_keys`, to be run in order."""
        ...


class EngineContext:
    """What the parts of an engine share.

    Args:
        model: with the learner's number of key/value heads.
        use_cpu_kernels: see :class:`~jax_agent_rl.jetstream.engine.JaxEngine`.

    Attributes:
        config: the model as the engine computes it, see
            :func:`~jax_agent_rl.jetstream.sharding.engine_config`.
        dtype: type of weights and activations.
        kv_dtype: type of the cache.
        mesh: the devices it computes on.
        split: the mesh if it has more than one device, otherwise None.
        replicated: sharding of arrays that every device of the mesh holds in full.
        cache_sharding: shardings of the cache, and of copies of its pages.
        takes_images: whether prompts may contain images.
        has_states: whether the model has recurrent layers.
        adapters: LoRA adapters that are served beside the base model.
        program_table: the compiled programs.
    """

    def __init__(
        self,
        model: DecoderConfig,
        shapes: EngineShapes,
        *,
        dtype: jnp.dtype,
        kv_dtype: EightBits | None,
        quantize: EightBits | None,
        mesh: jax.sharding.Mesh,
        takes_images: bool,
        adapters: Mapping[str, PeftAdapter],
        program_table: ProgramTable,
        use_cpu_kernels: bool,
    ) -> None:
        self.config = engine_config(model, mesh)
        self.shapes = shapes
        self.dtype = dtype
        self.kv_dtype = DTYPES[kv_dtype] if kv_dtype else dtype
        self.mesh = mesh
        self.split = mesh if mesh.size > 1 else None
        self.replicated = replicated(mesh)
        self.cache_sharding = cache_sharding(self.config, mesh)
        self.takes_images = takes_images
        self.adapters = ServedAdapters(self.config, adapters, dtype=dtype, sharding=self.replicated)
        self.program_table = program_table

        self.has_states = has_states(self.config)

        # The kernels compute attention to keys and values in float32, on one CPU. Matrices may be
        # in int8.
        has_one_cpu = self.platform == "cpu" and self.split is None
        is_float32 = jnp.dtype(self.dtype) == jnp.dtype(self.kv_dtype) == jnp.dtype(jnp.float32)
        self._suits_cpu_kernels = (
            use_cpu_kernels
            and has_one_cpu
            and is_float32
            and quantize in (None, "int8")
            and self.config.latent is None
        )
        if self._suits_cpu_kernels:
            # Build them while weights load and prefill programs compile.
            threading.Thread(
                target=cpu_kernels.kernels_digest, name="cpu-kernels", daemon=True
            ).start()

    @property
    def platform(self) -> str:
        """Platform of the devices, as JAX calls it."""
        return self.mesh.devices.flat[0].platform

    @functools.cached_property
    def kernels(self) -> Kernels:
        """Kernels of the programs that decode; waits until those for CPUs are built."""
        if self.platform == "tpu":
            return Kernels.PALLAS
        if self._suits_cpu_kernels and cpu_kernels.kernels_digest() is not None:
            return Kernels.CPU
        return Kernels.NONE

    @property
    def cache_pages(self) -> int:
        """Pages of the cache, with the null page."""
        return 1 + self.shapes.pages

    def call(
        self,
        key: tuple,
        function: Any,
        donate: tuple[int, ...],
        *args: Any,
        out: Any,
        next_call: Callable[[], NextCall] | None = None,
        compiler_options: CompilerOptions | None = None,
    ) -> Any:
        """Run a program on the engine's mesh, see :meth:`ProgramTable.call`."""
        return self.program_table.call(
            key,
            function,
            donate,
            *args,
            default_sharding=self.replicated,
            out=out,
            next_call=next_call,
            compiler_options=compiler_options,
        )

    def with_defaults(self, slots: DecodeBatch) -> DecodeBatch:
        """Add the optional arrays that the engine's programs always take.

        Slots without numbers of adapters are of the base model; slots without offsets hold no
        images; slots without states are idle.
        """
        if self.adapters.names and slots.adapter is None:
            slots = replace(slots, adapter=np.zeros(len(slots.tokens), np.int32))
        if self.takes_images and slots.offsets is None:
            slots = replace(slots, offsets=np.zeros(len(slots.tokens), np.int32))
        if self.has_states and slots.states is None:
            slots = replace(slots, states=np.full(len(slots.tokens), NULL_STATE, np.int32))
        return slots
