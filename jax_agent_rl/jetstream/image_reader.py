"""The pictures of requests, read beside the engine's thread: cutting them into patches takes longer than a step."""

from __future__ import annotations

import asyncio

from jax_agent_rl.errors import BackendError, TokenDriftError
from jax_agent_rl.models.vision.context import MultimodalContext, VisionProcessor
from jax_agent_rl.rollout.protocol import GenerateRequest


class ImageReader:
    """Reads the pictures of requests in worker threads.

    Args:
        vision_processor: the model's; None if it takes no pictures.
        most_patches: of one picture: what the engine's largest program takes.
    """

    def __init__(self, vision_processor: VisionProcessor | None, *, most_patches: int) -> None:
        self._vision_processor = vision_processor
        self._most_patches = most_patches
        self._reading: dict[str, asyncio.Event] = {}

    @property
    def kinds(self) -> frozenset[str]:
        """Of pictures that are taken."""
        return frozenset(self._vision_processor.vision.placeholders if self._vision_processor else ())

    async def read(self, request: GenerateRequest) -> MultimodalContext | None:
        """What a request shows; None if nothing.

        Raises:
            BackendError: a picture cannot be shown, or there is no room for it, or a kind is not taken.
            TokenDriftError: the ids have other placeholders than the pictures take.
        """
        if not any(request.multi_modal.values()):
            return None
        done = self._reading[request.request_id] = asyncio.Event()
        try:
            return await asyncio.to_thread(self._read, request)
        finally:
            del self._reading[request.request_id]
            done.set()

    async def settled(self, request_id: str) -> None:
        """Returns when a request is not being read (any more)."""
        if done := self._reading.get(request_id):
            await done.wait()

    def _read(self, request: GenerateRequest) -> MultimodalContext:
        name = f"request {request.request_id!r}"
        if self._vision_processor is None or request.multi_modal.keys() - self.kinds:
            taken = sorted(self.kinds) or "no pictures"
            raise BackendError(f"{name} shows {sorted(request.multi_modal)}, but this engine takes {taken}")
        try:
            pictures = self._vision_processor.read(request.multi_modal)
        except ValueError as error:
            raise BackendError(f"{name}: {error}") from None
        try:
            multimodal = self._vision_processor.show(request.prompt_ids, pictures)
        except ValueError as error:
            raise TokenDriftError(f"{name}: {error}") from None
        largest = max(len(picture.patches) for picture in multimodal.pictures)
        if largest > self._most_patches:
            raise BackendError(
                f"{name} shows a picture of {largest} patches, the engine takes {self._most_patches}; add "
                f"{largest} to rollout.jetstream.patch_buckets, or lower model.max_pixels"
            )
        if multimodal.spans[-1].stop == len(request.prompt_ids):
            raise BackendError(f"{name} ends with a picture; text must follow it (a generation prompt, say)")
        return multimodal
