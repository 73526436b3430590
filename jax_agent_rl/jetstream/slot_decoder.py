"""Decoding, with a program for each of a few numbers of slots and lengths of contexts."""

from __future__ import annotations

import itertools
from dataclasses import replace

import jax
import numpy as np

from jax_agent_rl.jetstream import programs
from jax_agent_rl.jetstream.context import EngineContext, WarmUp
from jax_agent_rl.jetstream.decode_batch import (
    DecodeBatch,
    Sampled,
    make_decode_batch,
    pad_decode_batch,
)
from jax_agent_rl.jetstream.forward import EngineParams, Kernels
from jax_agent_rl.jetstream.kv_cache import KVCache
from jax_agent_rl.jetstream.shapes import bucket


class SlotDecoder:
    """Decodes several steps per dispatch.

    Args:
        compile_ahead: whether programs are compiled before the first request. Otherwise the one
            likely to be needed next is compiled along with each new one.
    """

    def __init__(self, context: EngineContext, *, compile_ahead: bool) -> None:
        self._context = context
        self._compile_ahead = compile_ahead

    def width(self, count: int) -> int:
        """Return the slots of the program that decodes ``count`` contexts."""
        return self._context.shapes.width(count)

    def decode(
        self, params: EngineParams, cache: KVCache, slots: DecodeBatch, steps: int, exit_after: int
    ) -> tuple[KVCache, Sampled]:
        """Decode, see :meth:`~jax_agent_rl.jetstream.engine.JaxEngine.decode`."""
        context = self._context
        count = len(slots.tokens)
        slots = context.with_defaults(slots)
        width = self.width(count)
        span = bucket(self._spans, int(slots.positions.max()) + steps)
        # Programs for restricted slots are compiled when the first ones come: most runs have none.
        kind = _decode_kind(slots.truncation is not None, slots.allowed is not None)
        max_steps = context.shapes.decode_steps if slots.allowed is None else 1
        program = programs.decode_program(context.config, max_steps, context.split, context.kernels)
        limits = np.array([min(steps, max_steps), exit_after], np.int32)

        def call_of(width: int, span: int) -> tuple[tuple, tuple]:
            """Return the key and the arguments of the program of a shape.

            Slots are cut to the shape: the program compiled ahead needs only shapes.
            """
            fitting = replace(slots, pages=slots.pages[:, : span // context.shapes.page])
            fitting = jax.tree.map(lambda x: x[:width], fitting)
            padded = pad_decode_batch(fitting, max(0, width - count))
            key = (kind, cache.count, width, span)
            return key, (params, cache, padded, limits, None, context.adapters.stacks)

        def next_call() -> programs.NextCall:
            if self._compile_ahead:  # it was compiled already
                return None
            shape = self._next_shape(width, span)
            if shape is None:
                return None
            return call_of(*shape)

        key, arguments = call_of(width, span)
        shardings = (context.cache_sharding, context.replicated)
        cache, out = context.call(
            key, program, (1,), *arguments, out=shardings, next_call=next_call
        )
        return cache, Sampled.of(np.asarray(out)[:, :, :count])

    def _next_shape(self, width: int, span: int) -> tuple[int, int] | None:
        """Return the shape likely to be needed next: contexts grow, then slots fall idle."""
        for longer in self._spans:
            if longer > span:
                return width, longer
        narrower = [w for w in self._context.shapes.slot_buckets if w < width]
        if narrower:
            return narrower[-1], span
        return None

    @property
    def _spans(self) -> tuple[int, ...]:
        """Context lengths that programs are compiled for."""
        spans = self._context.shapes.span_buckets
        if self._context.kernels is Kernels.CPU:  # they read only the positions there are
            return spans[-1:]
        return spans

    def _program_shapes(self) -> list[tuple[int, int]]:
        """Return the shapes of the programs: (slots, positions)."""
        return list(itertools.product(self._context.shapes.slot_buckets, self._spans))

    def program_keys(self) -> set[tuple]:
        return self._keys("decode")

    def restricted_keys(self) -> set[tuple]:
        """Return the keys of the programs for restricted slots."""
        keys: set[tuple] = set()
        for truncated, constrained in ((False, True), (True, False), (True, True)):
            keys |= self._keys(_decode_kind(truncated, constrained))
        return keys

    def _keys(self, kind: str) -> set[tuple]:
        count = self._context.cache_pages
        return {(kind, count, width, span) for width, span in self._program_shapes()}

    def warm_ups(self) -> list[WarmUp]:
        return [self._warm_up(width, span) for width, span in self._program_shapes()]

    def _warm_up(self, width: int, span: int) -> WarmUp:
        shapes = self._context.shapes
        steps = shapes.decode_steps
        idle = make_decode_batch(width, shapes.context_pages, span - steps)

        def run(params: EngineParams, cache: KVCache) -> KVCache:
            cache, _ = self.decode(params, cache, idle, steps, 1)
            return cache

        return WarmUp(f"decode {width} slots of {span} positions", run)


def _decode_kind(truncated: bool, constrained: bool) -> str:
    """Name the decode program of a batch by what restricts its slots: top-p and such, grammars."""
    kind = "decode"
    if truncated:
        kind += " truncated"
    if constrained:
        kind += " constrained"
    return kind
