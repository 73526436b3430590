"""Images in the engine: processed beside its thread, encoded when their placeholder ids are prefilled.

::

    ImageReader                VisionEngine
    request ──► patches ──►    new images ──tower──► features [N, D] ──scatter──► placeholder embeddings ──► prefill
                                        one program per              one program per chunk size
                                        number of patches            and number of features

Contexts that continue, fork or repeat find an image's keys and values in the cache. Features are
scattered to one slot per id of a chunk, so the prefill programs have the same shapes with images as
without.

Shapes: R chunks of T ids, P patches, N features (P / merge_size²), D hidden.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_agent_rl.errors import BackendError, TokenDriftError
from jax_agent_rl.jetstream.decode_batch import PREFILL_ROWS, DecodeBatch, Extension
from jax_agent_rl.jetstream.engine import JaxEngine, PrintLine, ignore_line
from jax_agent_rl.jetstream.forward import EngineParams
from jax_agent_rl.jetstream.kv_cache import KVCache
from jax_agent_rl.jetstream.shapes import EngineShapes, bucket
from jax_agent_rl.models.config import DecoderConfig, Params
from jax_agent_rl.models.image_processor import ProcessedImage
from jax_agent_rl.models.vision_context import (
    ImageInputs,
    Layout,
    MultimodalContext,
    VisionProcessor,
    layout,
)
from jax_agent_rl.models.vision_tower import VisionTower
from jax_agent_rl.rollout.protocol import GenerateRequest


class ImageReader:
    """Processes the images of requests in worker threads, as it takes longer than a decode step.

    Args:
        vision_processor: the model's; None for an engine without images.
        max_patches: of one image, as the engine's largest program takes.
    """

    def __init__(self, vision_processor: VisionProcessor | None, *, max_patches: int) -> None:
        self._vision_processor = vision_processor
        self._max_patches = max_patches

    @property
    def kinds(self) -> frozenset[str]:
        """Kinds of media the engine takes."""
        return frozenset(
            self._vision_processor.vision.placeholders if self._vision_processor else ()
        )

    async def read(self, request: GenerateRequest) -> MultimodalContext | None:
        """Process a request's images; None if it has none.

        Raises:
            BackendError: an image cannot be processed, exceeds the patch buckets, or is of an
                unsupported kind.
            TokenDriftError: the placeholder ids do not match the images.
        """
        if not any(request.multi_modal.values()):
            return None
        return await asyncio.to_thread(self._read, request)

    def _read(self, request: GenerateRequest) -> MultimodalContext:
        name = f"request {request.request_id!r}"
        if self._vision_processor is None or request.multi_modal.keys() - self.kinds:
            supported = sorted(self.kinds) or "no images"
            raise BackendError(
                f"{name} contains {sorted(request.multi_modal)}, but this engine takes {supported}"
            )
        try:
            images = self._vision_processor.read(request.multi_modal)
        except ValueError as error:
            raise BackendError(f"{name}: {error}") from None
        try:
            multimodal = self._vision_processor.make_context(request.prompt_ids, images)
        except ValueError as error:
            raise TokenDriftError(f"{name}: {error}") from None
        largest = max(len(image.patches) for image in multimodal.images)
        if largest > self._max_patches:
            raise BackendError(
                f"{name} contains an image of {largest} patches, the engine takes"
                f" {self._max_patches}; add {largest} to rollout.jetstream.patch_buckets, or lower"
                " model.max_pixels"
            )
        if multimodal.spans[-1].stop == len(request.prompt_ids):
            raise BackendError(
                f"{name} ends with an image; text must follow it, such as a generation prompt"
            )
        return multimodal


class VisionEngine(JaxEngine):
    """A :class:`JaxEngine` for vision models: extensions may contain images from their first id on."""

    def __init__(self, config: DecoderConfig, shapes: EngineShapes, **options: Any) -> None:
        super().__init__(config, shapes, **options)
        assert config.vision is not None  # the backend checks
        self._vision = config.vision
        self._encoded: dict[
            bytes, tuple[jax.Array, int]
        ] = {}  # digest: features [N, D], index of the first
        self._blank = functools.cache(
            lambda rows, size: jnp.zeros((rows, size, self._vision.feature_size), self.dtype)
        )

    @property
    def patch_buckets(self) -> tuple[int, ...]:
        """Numbers of patches compiled for, in whole windows."""
        window = self._vision.window_patches
        return tuple(sorted({-(-size // window) * window for size in self.shapes.patch_buckets}))

    def extend(
        self, params: EngineParams, cache: KVCache, extensions: Sequence[Extension]
    ) -> KVCache:
        """Encode the new images, then prefill as :meth:`JaxEngine.extend` does."""
        new = {
            image.digest: image
            for extension in extensions
            if (multimodal := extension.multimodal) is not None
            for image, span in zip(multimodal.images, multimodal.spans, strict=True)
            if span.stop > extension.start
        }
        try:
            for images in _batches(list(new.values()), self.patch_buckets[-1]):
                self._encode(params, images)
            return super().extend(params, cache, extensions)
        finally:
            self._encoded.clear()

    def _completed(self, slots: DecodeBatch) -> DecodeBatch:
        """Add what the engine's programs always take; slots without offsets hold no images."""
        if slots.offsets is None:
            slots = replace(slots, offsets=np.zeros(len(slots.tokens), np.int32))
        return super()._completed(slots)

    def warm_up(
        self, params: EngineParams, cache: KVCache, print_line: PrintLine = ignore_line
    ) -> KVCache:
        """Warm up as :meth:`JaxEngine.warm_up` does, with the image programs first."""
        shapes = self._image_program_shapes() if self._compile_ahead else []
        for number, (size, rows, chunk) in enumerate(shapes, 1):
            print_line(
                f"compiling {size} image patches for {rows} x {chunk} ({number} of {len(shapes)})"
            )
            encoded = self._features(params, [], size)
            self._scatter(self._blank(rows, chunk), encoded, np.full(chunk, -1, np.int32), 0)
        return super().warm_up(params, cache, print_line)

    def _image_program_shapes(self) -> list[tuple[int, int, int]]:
        """Return (patches, rows, ids) of all programs that scatter features."""
        return list(
            itertools.product(self.patch_buckets, (1, PREFILL_ROWS), self.shapes.chunk_buckets)
        )

    def program_keys(self) -> set[tuple]:
        """Return the keys of all programs, those for images included."""
        merged = self._vision.merge_size**2
        scatter = {
            ("scatter", rows, chunk, size // merged)
            for size, rows, chunk in self._image_program_shapes()
        }
        return super().program_keys() | scatter | {("tower", size) for size in self.patch_buckets}

    def _encode(self, params: EngineParams, images: Sequence[ProcessedImage]) -> None:
        """Compute the features of images that fit one program together."""
        count = sum(len(image.patches) for image in images)
        encoded, first = self._features(params, images, bucket(self.patch_buckets, count)), 0
        for image in images:
            self._encoded[image.digest] = encoded, first
            first += len(image.patches) // self._vision.merge_size**2

    def _features(
        self, params: EngineParams, images: Sequence[ProcessedImage], size: int
    ) -> jax.Array:
        """Return features [N, D] of images padded to ``size`` patches."""
        patches = np.zeros((size, self._vision.patch_dim), np.float32)
        if images:
            joined = np.concatenate([image.patches for image in images])
            patches[: len(joined)] = joined
        where = layout(self._vision, [image.grid for image in images], size)

        def program(vision: Params, patches: jax.Array, where: Layout) -> jax.Array:
            return VisionTower.from_params(self._vision, vision)(patches, where)

        return self._call(
            ("tower", size), program, (), params.vision, patches, where, out=self.replicated
        )

    def _scatter(
        self, chunks: jax.Array, encoded: jax.Array, index: np.ndarray, row: int
    ) -> jax.Array:
        key = ("scatter", *chunks.shape[:2], len(encoded))
        return self._call(
            key, _scattered, (), chunks, encoded, index, np.int32(row), out=self.replicated
        )

    def _image_inputs(self, extensions: Sequence[Extension], rows: int, size: int) -> ImageInputs:
        positions = np.zeros((rows, size, 3), np.int32)
        feature_index = np.full((rows, size), -1, np.int32)
        chunks = self._blank(rows, size)
        for row, extension in enumerate(extensions):
            start, context = extension.start, extension.multimodal
            if context is None:
                positions[row] = start + np.arange(size)[:, None]
                continue
            own = context.positions[start : start + size]
            positions[row] = (start + context.offset + np.arange(size))[
                :, None
            ]  # of ids sampled after the prompt
            positions[row, : len(own)] = own
            for encoded, index in self._indices(extension, size):
                chunks = self._scatter(chunks, encoded, index, row)
                feature_index[row] = np.where(index >= 0, np.arange(size), feature_index[row])
        return ImageInputs(positions, chunks, feature_index)

    def _indices(self, extension: Extension, size: int) -> Iterator[tuple[jax.Array, np.ndarray]]:
        """Yield a chunk's features with int32 [T]: the feature at each id, -1 for none."""
        context, start = extension.multimodal, extension.start
        assert context is not None
        indices: dict[int, tuple[jax.Array, np.ndarray]] = {}
        for image, span in zip(context.images, context.spans, strict=True):
            begin, end = max(span.start, start), min(span.stop, start + size)
            if begin < end:
                encoded, first = self._encoded[image.digest]
                _, index = indices.setdefault(id(encoded), (encoded, np.full(size, -1, np.int32)))
                index[begin - start : end - start] = first + np.arange(
                    begin - span.start, end - span.start
                )
        yield from indices.values()


def _scattered(
    chunks: jax.Array, encoded: jax.Array, index: jax.Array, row: jax.Array
) -> jax.Array:
    """Return chunks [R, T, D] with features [N, D] in one row, where ``index`` int32 [T] is not negative."""
    return chunks.at[row].set(
        jnp.where(index[:, None] >= 0, encoded[index].astype(chunks.dtype), chunks[row])
    )


def _batches(images: Sequence[ProcessedImage], max_patches: int) -> Iterator[list[ProcessedImage]]:
    """Yield images in order, batched to at most ``max_patches`` patches."""
    batch: list[ProcessedImage] = []
    for image in images:
        if batch and sum(len(i.patches) for i in (*batch, image)) > max_patches:
            yield batch
            batch = []
        batch.append(image)
    if batch:
        yield batch
