"""An engine for models that see. Shapes: R chunks of T ids, P patches, N features (P / merge_size²), D hidden.

::

    pictures of all new ids ──tower──► features [N, D] ──lay──► in place of embeddings ──chunks──► keys, values
                              one program per                one program per chunk
                              number of patches              and features

A picture is looked at when its ids are prefilled; who continues, forks or repeats that context finds keys and values in
the cache. What was laid once makes the programs of chunks the same with pictures and without.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_agent_rl.jetstream.decode_batch import DecodeBatch
from jax_agent_rl.jetstream.engine import PREFILL_ROWS, EngineShapes, Extension, JaxEngine, bucket, unheard
from jax_agent_rl.jetstream.forward import EngineParams
from jax_agent_rl.jetstream.kv import KVCache
from jax_agent_rl.models.config import DecoderConfig
from jax_agent_rl.models.vision.image_processor import ProcessedImage
from jax_agent_rl.models.vision.layout import ImageInputs, layout
from jax_agent_rl.models.vision.tower import features


class VisionEngine(JaxEngine):
    """An engine whose extensions may show pictures: those of their contexts that stand behind their first id."""

    def __init__(self, config: DecoderConfig, shapes: EngineShapes, **options: Any) -> None:
        super().__init__(config, shapes, **options)
        assert config.vision is not None  # by who chose this engine
        self._vision = config.vision
        self._looked: dict[bytes, tuple[jax.Array, int]] = {}  # digest: features [N, D], index of the first
        self._blank = functools.cache(lambda rows, size: jnp.zeros((rows, size, config.hidden_size), self._dtype))

    @property
    def patch_buckets(self) -> tuple[int, ...]:
        """Numbers of patches compiled for: whole windows."""
        window = self._vision.window_patches
        return tuple(sorted({-(-size // window) * window for size in self.shapes.patch_buckets}))

    def extend(self, params: EngineParams, cache: KVCache, extensions: Sequence[Extension]) -> KVCache:
        """As :meth:`JaxEngine.extend`, after a look at the pictures."""
        new = {
            picture.digest: picture
            for extension in extensions
            if (multimodal := extension.multimodal) is not None
            for picture, span in zip(multimodal.pictures, multimodal.spans, strict=True)
            if span.stop > extension.start
        }
        try:
            for some in _together(list(new.values()), self.patch_buckets[-1]):
                self._look(params, some)
            return super().extend(params, cache, extensions)
        finally:
            self._looked.clear()

    def decode(
        self, params: EngineParams, cache: KVCache, slots: DecodeBatch, steps: int, exit_after: int
    ) -> tuple[KVCache, np.ndarray, np.ndarray]:
        """As :meth:`JaxEngine.decode`; slots without offsets have seen nothing."""
        if slots.offsets is None:
            slots = replace(slots, offsets=np.zeros(len(slots.tokens), np.int32))
        return super().decode(params, cache, slots, steps, exit_after)

    def warm_up(self, params: EngineParams, cache: KVCache, say: Callable[[str], None] = unheard) -> KVCache:
        """As :meth:`JaxEngine.warm_up`, and the programs that look."""
        looks = self._looks() if self._compile_ahead else []
        for number, (size, rows, chunk) in enumerate(looks, 1):
            say(f"compiling a look at {size} patches for {rows} x {chunk} ({number} of {len(looks)})")
            found = self._features(params, [], size)
            self._lay(self._blank(rows, chunk), found, np.full(chunk, -1, np.int32), 0)
        return super().warm_up(params, cache, say)

    def _looks(self) -> list[tuple[int, int, int]]:
        """Numbers of patches, rows and ids that are looked at together."""
        return [
            (size, rows, chunk)
            for size in self.patch_buckets
            for rows in (1, PREFILL_ROWS)
            for chunk in self.shapes.chunk_buckets
        ]

    def program_keys(self) -> set[tuple]:
        """As :meth:`JaxEngine.program_keys`, and the programs that look."""
        merged = self._vision.merge_size**2
        lay = {("lay", rows, chunk, size // merged) for size, rows, chunk in self._looks()}
        return super().program_keys() | lay | {("tower", size) for size in self.patch_buckets}

    def _look(self, params: EngineParams, pictures: Sequence[ProcessedImage]) -> None:
        """Computes the features of pictures that fit a program together."""
        count = sum(len(picture.patches) for picture in pictures)
        found, first = self._features(params, pictures, bucket(self.patch_buckets, count)), 0
        for picture in pictures:
            self._looked[picture.digest] = found, first
            first += len(picture.patches) // self._vision.merge_size**2

    def _features(self, params: EngineParams, pictures: Sequence[ProcessedImage], size: int) -> jax.Array:
        """[N, D] of ``size`` patches."""
        patches = np.zeros((size, self._vision.patch_dim), np.float32)
        if pictures:
            joined = np.concatenate([picture.patches for picture in pictures])
            patches[: len(joined)] = joined
        where = layout(self._vision, [picture.grid for picture in pictures], size)
        program = functools.partial(features, self._vision)
        return self._call(("tower", size), program, (), params.vision, patches, where, out=self._everywhere)

    def _lay(self, chunks: jax.Array, found: jax.Array, index: np.ndarray, row: int) -> jax.Array:
        key = ("lay", *chunks.shape[:2], len(found))
        return self._call(key, _laid, (), chunks, found, index, np.int32(row), out=self._everywhere)

    def _pictures(self, some: Sequence[Extension], rows: int, size: int) -> ImageInputs:
        """Every id of a chunk has a place of its own for a feature."""
        positions = np.zeros((rows, size, 3), np.int32)
        places = np.full((rows, size), -1, np.int32)
        chunks = self._blank(rows, size)
        for row, extension in enumerate(some):
            start, context = extension.start, extension.multimodal
            if context is None:
                positions[row] = start + np.arange(size)[:, None]
                continue
            mine = context.positions[start : start + size]
            positions[row] = (start + context.offset + np.arange(size))[:, None]  # of ids sampled behind it
            positions[row, : len(mine)] = mine
            for found, index in self._indices(extension, size):
                chunks = self._lay(chunks, found, index, row)
                places[row] = np.where(index >= 0, np.arange(size), places[row])
        return ImageInputs(positions, chunks, places)

    def _indices(self, extension: Extension, size: int) -> Iterator[tuple[jax.Array, np.ndarray]]:
        """Features that a chunk shows, with int32 [T]: which of them stands at each id, -1 for none."""
        context, start = extension.multimodal, extension.start
        assert context is not None
        indices: dict[int, tuple[jax.Array, np.ndarray]] = {}
        for picture, span in zip(context.pictures, context.spans, strict=True):
            begin, end = max(span.start, start), min(span.stop, start + size)
            if begin < end:
                found, first = self._looked[picture.digest]
                _, index = indices.setdefault(id(found), (found, np.full(size, -1, np.int32)))
                index[begin - start : end - start] = first + np.arange(begin - span.start, end - span.start)
        yield from indices.values()


def _laid(chunks: jax.Array, found: jax.Array, index: jax.Array, row: jax.Array) -> jax.Array:
    """Chunks [R, T, D] with features [N, D] in one of them, where ``index`` int32 [T] is not negative."""
    return chunks.at[row].set(jnp.where(index[:, None] >= 0, found[index].astype(chunks.dtype), chunks[row]))


def _together(pictures: Sequence[ProcessedImage], most: int) -> Iterator[list[ProcessedImage]]:
    """Pictures in order, as many together as have at most ``most`` patches."""
    some: list[ProcessedImage] = []
    for picture in pictures:
        if some and sum(len(p.patches) for p in (*some, picture)) > most:
            yield some
            some = []
        some.append(picture)
    if some:
        yield some
