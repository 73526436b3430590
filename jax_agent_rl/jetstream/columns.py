"""Prefill with CPU kernels: a decode step with a column for each id, of any contexts.

A tool's result of a few ids then costs a few columns, where a prompt chunk would be padded, its pages gathered and
written back; and long prompts take no longer than with XLA's products.
"""

from __future__ import annotations

import abc
import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from jax_agent_rl.jetstream import programs
from jax_agent_rl.jetstream.adapters import AdapterStacks
from jax_agent_rl.jetstream.decode_batch import (
    DecodeBatch,
    Extension,
    columns_of,
    make_decode_batch,
    pad_decode_batch,
)
from jax_agent_rl.jetstream.driver_interface import DriverInterface
from jax_agent_rl.jetstream.forward import EngineParams
from jax_agent_rl.jetstream.kv_cache import KVCache
from jax_agent_rl.jetstream.shapes import bucket
from jax_agent_rl.models.config import DecoderConfig

COLUMNS = (16, 32, 64)
"""Columns of the programs. More are no faster."""


class ColumnEngine(DriverInterface):
    """The part of :class:`~jax_agent_rl.jetstream.engine.JaxEngine` that prefills with CPU kernels."""

    config: DecoderConfig
    _stacks: AdapterStacks | None

    @abc.abstractmethod
    def _completed(self, slots: DecodeBatch) -> DecodeBatch: ...

    @abc.abstractmethod
    def _call(self, key: tuple, function: Any, donate: tuple[int, ...], *args: Any, out: Any) -> Any: ...

    @property
    def _by_column(self) -> bool:
        return self._kernels is programs.Kernels.CPU

    @property
    def _prefills_columns(self) -> bool:
        return self._by_column and self.config.vision is None

    def _extend_columns(self, params: EngineParams, cache: KVCache, extensions: Sequence[Extension]) -> KVCache:
        """Prefill ids into pages, those of each context in order."""
        slots = make_decode_batch(len(extensions), self.shapes.context_pages)
        for slot, extension in enumerate(extensions):
            slots.pages[slot, : len(extension.pages)] = extension.pages
            slots.positions[slot] = extension.start
        if self._stacks is not None:
            slots = replace(slots, adapter=np.array([extension.adapter for extension in extensions], np.int32))
        columns, *_ = columns_of(slots, [extension.ids for extension in extensions])
        for i in range(0, len(columns.tokens), COLUMNS[-1]):
            cache = self._feed(params, cache, jax.tree.map(lambda x, i=i: x[i : i + COLUMNS[-1]], columns))
        return cache

    def _feed(self, params: EngineParams, cache: KVCache, columns: DecodeBatch) -> KVCache:
        width = bucket(COLUMNS, len(columns.tokens))
        inputs = (params, cache, pad_decode_batch(columns, width - len(columns.tokens)), self._stacks)
        program = functools.partial(programs.feed_columns, self.config)
        return self._call(("columns", cache.count, width), program, (1,), *inputs, out=self._cache_sharding)

    @property
    def _column_widths(self) -> tuple[int, ...]:
        return COLUMNS if self._prefills_columns else ()

    def _column_keys(self) -> set[tuple]:
        return {("columns", 1 + self.shapes.pages, width) for width in self._column_widths}

    def _warm_up_columns(self, params: EngineParams, cache: KVCache, width: int) -> KVCache:
        return self._feed(params, cache, self._completed(make_decode_batch(width, self.shapes.context_pages)))
