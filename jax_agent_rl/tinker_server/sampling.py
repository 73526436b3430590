"""Sampling from checkpoints with one JAX engine.

With LoRA the engine has a few places for adapters, and requests of all of them are decoded together; a checkpoint takes
the place that has been idle for longest. Without, the engine serves one checkpoint at a time.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

from jax_agent_rl.chat.codec import ChatCodec
from jax_agent_rl.config.servers import TinkerServerSettings
from jax_agent_rl.jetstream.backend import JetStreamBackend
from jax_agent_rl.jetstream.shapes import EngineShapes, kv_cache_tokens
from jax_agent_rl.models.config import DecoderConfig, Params
from jax_agent_rl.models.lora import PeftAdapter, blank_adapter
from jax_agent_rl.rollout.protocol import GenerateRequest, WeightUpdate
from jax_agent_rl.types import PauseMode, SamplingParams, TokenOutput

Checkpoint = tuple[str, float]
"""A checkpoint's path, and when it was made: another one may get its name."""


class Sampler:
    """An engine, and which checkpoints it holds.

    Args:
        settings: of the server.
        model: the base model's hyperparameters.
        params: its parameters.
        codec: of the model, for stop strings.
        read: returns a checkpoint as the engine takes it: an adapter, or without LoRA the whole model, also of None.
        print_line: takes a line of progress.
    """

    def __init__(
        self,
        settings: TinkerServerSettings,
        model: DecoderConfig,
        params: Params,
        codec: ChatCodec,
        *,
        read: Callable[[str | None], Awaitable[Any]],
        print_line: Callable[[str], None],
    ) -> None:
        self.longest = settings.max_model_len
        self._read = read
        places = settings.max_sampled_adapters if settings.lora else 1
        self._held: dict[str, Checkpoint | None] = {
            f"place{number}": None for number in range(places)
        }  # idle longest first
        self._users = dict.fromkeys(self._held, 0)
        self._changed = asyncio.Condition()
        blank = settings.lora and blank_adapter(settings.lora, model)
        self._adapters: dict[str, PeftAdapter] = dict.fromkeys(self._held, blank) if blank else {}
        count = settings.max_concurrent_decodes
        shapes = EngineShapes(
            max_model_len=self.longest,
            max_concurrent_decodes=count,
            kv_cache_tokens=kv_cache_tokens(self.longest, count, count),
            decode_steps=16,
            prefill_buckets=(128, 512),
        )
        decode = functools.partial(codec.decode, skip_special_tokens=False)
        self._backend = JetStreamBackend(
            model, params, shapes, adapters=self._adapters, seed=0, decode_text=decode, print_line=print_line
        )

    async def start(self) -> None:
        """Compile and start the engine."""
        await self._backend.start()

    async def close(self) -> None:
        """End the engine."""
        await self._backend.close()

    async def sample(
        self,
        checkpoint: Checkpoint | None,
        request_id: str,
        prompt_ids: Sequence[int],
        params: Sequence[SamplingParams],
    ) -> list[TokenOutput]:
        """Sample once with each parameters; cancelling it frees their places.

        Args:
            checkpoint: None: the base model.
            request_id: unique while it runs.
            prompt_ids: the context.
            params: of each sample.
        """
        async with self._holding(checkpoint) as lora, asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(
                    self._backend.generate(
                        GenerateRequest(
                            request_id=f"{request_id}/{number}",
                            prompt_ids=tuple(prompt_ids),
                            sampling=one,
                            lora=lora,
                        )
                    )
                )
                for number, one in enumerate(params)
            ]
        return [task.result() for task in tasks]

    @contextlib.asynccontextmanager
    async def _holding(self, checkpoint: Checkpoint | None) -> AsyncIterator[str | None]:
        """Have the engine hold a checkpoint; yield the name of its adapter, None for a whole model."""
        if checkpoint is None and self._adapters:
            yield None
            return
        async with self._changed:
            await self._changed.wait_for(lambda: self._place(checkpoint) is not None)
            place = self._place(checkpoint)
            assert place is not None
            if self._held[place] != checkpoint:
                await self._load(place, checkpoint)
            self._users[place] += 1
            self._held[place] = self._held.pop(place)  # used last
        try:
            yield place if self._adapters else None
        finally:
            async with self._changed:
                self._users[place] -= 1
                self._changed.notify_all()

    def _place(self, checkpoint: Checkpoint | None) -> str | None:
        """Return the place that holds a checkpoint, or an idle one; None if all others are in use."""
        holding = (place for place, held in self._held.items() if held == checkpoint)
        return next(holding, next((place for place in self._held if not self._users[place]), None))

    async def _load(self, place: str, checkpoint: Checkpoint | None) -> None:
        weights = await self._read(None if checkpoint is None else checkpoint[0])
        update: dict[str, Any] = {"payload": weights}
        if self._adapters:
            update = {"payload": {}, "partial": True, "adapters": {place: weights}}
        await self._backend.pause(PauseMode.KEEP)
        try:
            version = self._backend.policy_version + 1
            await self._backend.update_weights(WeightUpdate(version=version, kind="arrays", **update))
        finally:
            await self._backend.resume()
        self._held[place] = checkpoint
