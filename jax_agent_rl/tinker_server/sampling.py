"""Sampling from checkpoints with one JAX engine.

With LoRA the engine has a few places for adapters, and requests of all of them are decoded
together; a checkpoint takes the place that has been idle for longest. Without, the engine serves
one checkpoint at a time.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from jax_agent_rl.chat.codec import ChatCodec
from jax_agent_rl.config.commands import TinkerServerSettings
from jax_agent_rl.jetstream.backend import JetStreamBackend
from jax_agent_rl.jetstream.shapes import EngineShapes, kv_cache_tokens
from jax_agent_rl.models.config import DecoderConfig, Params
from jax_agent_rl.models.lora import PeftAdapter, blank_adapter
from jax_agent_rl.rollout.protocol import GenerateRequest, WeightUpdate
from jax_agent_rl.tinker_server.database import Database, Request
from jax_agent_rl.tinker_server.requests import SampleRequest
from jax_agent_rl.tinker_server.training import Checkpoint, Models
from jax_agent_rl.tinker_server.wire import (
    BadRequest,
    ContextScores,
    ScoringRequest,
    read_prompt,
    read_targets,
    sampling_params,
    write_samples,
)
from jax_agent_rl.types import PauseMode, SamplingParams, TokenOutput


class Sampler:
    """An engine, and which checkpoints it holds.

    Args:
        settings: of the server.
        model: the base model's hyperparameters.
        params: its parameters.
        codec: of the model, for stop strings.
        models: reads checkpoints, and scores what was sampled.
        database: of the server.
        training: one thread, in which ``models`` runs.
        print_line: takes a line of progress.
    """

    def __init__(
        self,
        settings: TinkerServerSettings,
        model: DecoderConfig,
        params: Params,
        codec: ChatCodec,
        *,
        models: Models,
        database: Database,
        training: ThreadPoolExecutor,
        print_line: Callable[[str], None],
    ) -> None:
        self.longest = settings.max_model_len
        self._settings, self._models, self._database, self._training = (
            settings,
            models,
            database,
            training,
        )
        self._unscored: dict[
            Checkpoint | None, list[tuple[ScoringRequest, asyncio.Future[ContextScores]]]
        ] = {}
        self._scoring: set[asyncio.Task[None]] = set()
        places = settings.max_sampled_adapters if settings.lora else 1
        names = (f"place{number}" for number in range(places))
        self._held: dict[str, Checkpoint | None] = dict.fromkeys(names)  # idle longest first
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
            model,
            params,
            shapes,
            adapters=self._adapters,
            seed=0,
            decode_text=decode,
            print_line=print_line,
        )

    async def start(self) -> None:
        """Compile and start the engine."""
        await self._backend.start()

    async def close(self) -> None:
        """End the engine."""
        for task in self._scoring:
            task.cancel()
        await self._backend.close()

    async def run(self, request: Request) -> bytes:
        """Compute a request and return its result; raise BadRequest if that is the client's fault."""
        asked = SampleRequest.from_json(request.body)
        body = asked.model_dump()
        session = self._database.sampler(request.owner)
        path = session["path"] if session else asked.model_path
        checkpoint = None
        if path is not None:
            if self._database.checkpoint(path) is None:
                raise BadRequest(
                    f"there is no checkpoint {path!r} any more: weights without a name are kept for"
                    f" sampler_ttl_seconds={self._settings.sampler_ttl_seconds} after their last"
                    " sample; start the server with more, or save them under a name"
                )
            checkpoint = (path, await asyncio.to_thread(self._models.fingerprint, path))
        ids = read_prompt(body["prompt"], vocab_size=self._models.vocab_size)
        room = self.longest - len(ids)
        if not ids or room < 1:
            raise BadRequest(
                f"the prompt has {len(ids)} tokens; this server takes 1 to {self.longest - 1};"
                " start it with a larger max_model_len for more"
            )
        targets = read_targets(
            body.get("target_prompt_logprobs"), len(ids), vocab_size=self._models.vocab_size
        )
        given = body["sampling_params"]
        params = [
            sampling_params(given, number, longest=room) for number in range(asked.num_samples)
        ]
        outputs = await self._sample(checkpoint, request.id, ids, params)
        prompt_top = asked.topk_prompt_logprobs
        sample_top = asked.topk_sample_logprobs
        prompt, samples = None, []
        if (asked.prompt_logprobs or prompt_top or targets is not None) and len(ids) > 1:
            prompt = await self._score(
                checkpoint, ScoringRequest(ids=ids, top=prompt_top, targets=targets)
            )
        if sample_top:
            whole = (
                ScoringRequest(ids=[*ids, *output.token_ids], top=sample_top) for output in outputs
            )
            samples = await asyncio.gather(*(self._score(checkpoint, one) for one in whole))
        return write_samples(body, len(ids), outputs, prompt, samples)

    async def _score(self, checkpoint: Checkpoint | None, context: ScoringRequest) -> ContextScores:
        """Score a context, together with all of the same checkpoint that wait for the training thread."""
        length = len(context.ids)
        if length > self._settings.pack_length:
            longest = self._settings.pack_length
            raise BadRequest(
                f"log-probs of {length} tokens are more than the {longest} that this server"
                f" computes; start it with pack_length={length} or more"
            )
        answer: asyncio.Future[ContextScores] = asyncio.get_running_loop().create_future()
        waiting = self._unscored.setdefault(checkpoint, [])
        waiting.append((context, answer))
        if len(waiting) == 1:
            task = asyncio.create_task(self._score_waiting(checkpoint))
            self._scoring.add(task)
            task.add_done_callback(self._scoring.discard)
        return await answer

    async def _score_waiting(self, checkpoint: Checkpoint | None) -> None:
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._training, int)  # returns when the thread comes to it
        batch = self._unscored.pop(checkpoint)
        answers = [answer for _, answer in batch]
        try:
            work = [context for context, _ in batch]
            scored = await loop.run_in_executor(
                self._training, self._models.score, checkpoint, work
            )
        except Exception as error:
            for answer in answers:
                if not answer.done():  # cancelled
                    answer.set_exception(error)
            return
        for answer, scores in zip(answers, scored, strict=True):
            if not answer.done():
                answer.set_result(scores)

    async def _sample(
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
        loop = asyncio.get_running_loop()
        weights, held = await loop.run_in_executor(self._training, self._read, checkpoint)
        update: dict[str, Any] = {"payload": weights}
        if self._adapters:
            update = {"payload": {}, "partial": True, "adapters": {place: weights}}
        await self._backend.pause(PauseMode.KEEP)
        try:
            version = self._backend.policy_version + 1
            await self._backend.update_weights(
                WeightUpdate(version=version, kind="arrays", **update)
            )
        finally:
            await self._backend.resume()
        self._held[place] = held

    def _read(self, checkpoint: Checkpoint | None) -> tuple[Any, Checkpoint | None]:
        """Return a checkpoint's weights as the engine takes them, and which checkpoint they are of.

        It runs in the thread that also writes checkpoints: one may have been replaced since it was
            asked for.
        """
        path = None if checkpoint is None else checkpoint[0]
        read: Any = self._models.adapter if self._adapters else self._models.merged
        return read(path), None if path is None else (path, self._models.fingerprint(path))
