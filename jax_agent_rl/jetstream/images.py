"""Images in the engine: processed in worker threads, encoded when their ids are prefilled.

::

    ImageReader    request ──► patches
                                  │
    ImageEncoder   new images ◄───┘
                       │ tower: one program per number of patches
                       ▼
                   features [N, D]
                       │ scatter: one program per chunk size and number of features
                       ▼
                   embeddings of placeholder ids ──► prefill

Contexts that continue, fork or repeat find an image's keys and values in the cache. Features are
scattered to one slot per id of a chunk, so the prefill programs have the same shapes with images as
without.

Shapes: R chunks of T ids, P patches, N features (P / merge_size²), D hidden.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jax_agent_rl.errors import BackendError, TokenDriftError
from jax_agent_rl.jetstream.context import EngineContext, WarmUp
from jax_agent_rl.jetstream.decode_batch import PREFILL_ROWS, Extension
from jax_agent_rl.jetstream.forward import EngineParams
from jax_agent_rl.jetstream.kv_cache import KVCache
from jax_agent_rl.jetstream.shapes import bucket
from jax_agent_rl.models.config import Params
from jax_agent_rl.models.image_processor import ProcessedImage
from jax_agent_rl.models.vision_context import (
    ImageInputs,
    MultimodalContext,
    PatchLayout,
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
        if self._vision_processor is None:
            return frozenset()
        return frozenset(self._vision_processor.vision.placeholders)

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


class ImageEncoder:
    """The part of an engine that computes the features of images in prompts."""

    def __init__(self, context: EngineContext) -> None:
        assert context.config.vision is not None  # the backend checks
        self._context = context
        self._vision = context.config.vision
        # By digest of an image: features [N, D] of several, and the index of its first one.
        self._encoded: dict[bytes, tuple[jax.Array, int]] = {}
        self._blank = functools.cache(
            lambda rows, size: jnp.zeros((rows, size, self._vision.feature_size), context.dtype)
        )

    @property
    def patch_buckets(self) -> tuple[int, ...]:
        """Numbers of patches compiled for, in whole windows."""
        window = self._vision.window_patches
        sizes = set()
        for size in self._context.shapes.patch_buckets:
            sizes.add(-(-size // window) * window)
        return tuple(sorted(sizes))

    @contextlib.contextmanager
    def encoding(self, params: EngineParams, extensions: Sequence[Extension]) -> Iterator[None]:
        """Encode the images of extensions that are new, for :meth:`inputs` within this context."""
        # Images that end before an extension are in the cache already. Those after it are encoded
        # with the extension that reaches them.
        new_images: dict[bytes, ProcessedImage] = {}
        for extension in extensions:
            multimodal = extension.multimodal
            if multimodal is None:
                continue
            end = extension.start + len(extension.ids)
            for image, span in zip(multimodal.images, multimodal.spans, strict=True):
                if span.stop > extension.start and span.start < end:
                    new_images[image.digest] = image

        try:
            for images in _batches(list(new_images.values()), self.patch_buckets[-1]):
                self._encode(params, images)
            yield
        finally:
            self._encoded.clear()

    def _program_shapes(self) -> list[tuple[int, int, int]]:
        """Return (patches, rows, ids) of all programs that scatter features."""
        rows = (1, PREFILL_ROWS)
        return list(itertools.product(self.patch_buckets, rows, self._context.shapes.chunk_buckets))

    def program_keys(self) -> set[tuple]:
        keys: set[tuple] = set()
        for size in self.patch_buckets:
            keys.add(("tower", size))
        for size, rows, chunk in self._program_shapes():
            features = size // self._vision.merge_size**2
            keys.add(("scatter", rows, chunk, features))
        return keys

    def warm_ups(self) -> list[WarmUp]:
        return [self._warm_up(size, rows, chunk) for size, rows, chunk in self._program_shapes()]

    def _warm_up(self, size: int, rows: int, chunk: int) -> WarmUp:
        def run(params: EngineParams, cache: KVCache) -> KVCache:
            encoded = self._features(params, [], size)
            self._scatter(self._blank(rows, chunk), encoded, np.full(chunk, -1, np.int32), 0)
            return cache

        return WarmUp(f"{size} image patches for {rows} x {chunk}", run)

    def _encode(self, params: EngineParams, images: Sequence[ProcessedImage]) -> None:
        """Compute the features of images that fit one program together."""
        count = sum(len(image.patches) for image in images)
        encoded = self._features(params, images, bucket(self.patch_buckets, count))
        first = 0
        for image in images:
            self._encoded[image.digest] = (encoded, first)
            first += len(image.patches) // self._vision.merge_size**2

    def _features(
        self, params: EngineParams, images: Sequence[ProcessedImage], size: int
    ) -> jax.Array:
        """Return features [N, D] of images padded to ``size`` patches."""
        patches = np.zeros((size, self._vision.patch_dim), np.float32)
        if images:
            joined = np.concatenate([image.patches for image in images])
            patches[: len(joined)] = joined
        patch_layout = layout(self._vision, [image.grid for image in images], size)

        def program(vision: Params, patches: jax.Array, patch_layout: PatchLayout) -> jax.Array:
            return VisionTower.from_params(self._vision, vision)(patches, patch_layout)

        arguments = (params.vision, patches, patch_layout)
        replicated = self._context.replicated
        return self._context.call(("tower", size), program, (), *arguments, out=replicated)

    def _scatter(
        self, chunks: jax.Array, encoded: jax.Array, index: np.ndarray, row: int
    ) -> jax.Array:
        """Write features to one row of chunks, see :func:`_scattered`."""
        key = ("scatter", *chunks.shape[:2], len(encoded))
        arguments = (chunks, encoded, index, np.int32(row))
        return self._context.call(key, _scattered, (), *arguments, out=self._context.replicated)

    def inputs(self, extensions: Sequence[Extension], rows: int, size: int) -> ImageInputs:
        """Return the images in one chunk of ``size`` ids of each extension, padded to ``rows``."""
        positions = np.zeros((rows, size, 3), np.int32)
        feature_index = np.full((rows, size), -1, np.int32)
        chunks = self._blank(rows, size)
        for row, extension in enumerate(extensions):
            start = extension.start
            context = extension.multimodal
            if context is None:
                positions[row] = start + np.arange(size)[:, None]
                continue
            # First as ids that were sampled after the prompt, whose three positions are equal.
            positions[row] = (start + context.offset + np.arange(size))[:, None]
            prompt_positions = context.positions[start : start + size]
            positions[row, : len(prompt_positions)] = prompt_positions
            for encoded, index in self._indices(extension, size):
                chunks = self._scatter(chunks, encoded, index, row)
                feature_index[row] = np.where(index >= 0, np.arange(size), feature_index[row])
        return ImageInputs(positions, chunks, feature_index)

    def _indices(self, extension: Extension, size: int) -> Iterator[tuple[jax.Array, np.ndarray]]:
        """Yield a chunk's features with int32 [T]: the feature at each id, -1 for none."""
        context = extension.multimodal
        start = extension.start
        chunk_end = start + min(size, len(extension.ids))
        assert context is not None
        # Images that were encoded together are scattered together.
        indices: dict[int, tuple[jax.Array, np.ndarray]] = {}
        for image, span in zip(context.images, context.spans, strict=True):
            begin = max(span.start, start)
            end = min(span.stop, chunk_end)
            if begin >= end:
                continue
            encoded, first = self._encoded[image.digest]
            if id(encoded) not in indices:
                indices[id(encoded)] = (encoded, np.full(size, -1, np.int32))
            _, index = indices[id(encoded)]
            features = first + np.arange(begin - span.start, end - span.start)
            index[begin - start : end - start] = features
        yield from indices.values()


def _scattered(
    chunks: jax.Array, encoded: jax.Array, index: jax.Array, row: jax.Array
) -> jax.Array:
    """Return chunks [R, T, D] with features [N, D] in one row.

    ``index`` int32 [T] is the feature of each id; a negative one leaves the chunk as it is.
    """
    return chunks.at[row].set(
        jnp.where(index[:, None] >= 0, encoded[index].astype(chunks.dtype), chunks[row])
    )


def _batches(images: Sequence[ProcessedImage], max_patches: int) -> Iterator[list[ProcessedImage]]:
    """Yield images in order, batched to at most ``max_patches`` patches."""
    batch: list[ProcessedImage] = []
    num_patches = 0
    for image in images:
        if batch and num_patches + len(image.patches) > max_patches:
            yield batch
            batch = []
            num_patches = 0
        batch.append(image)
        num_patches += len(image.patches)
    if batch:
        yield batch
