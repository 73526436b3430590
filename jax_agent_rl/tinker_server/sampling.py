"""Sampling from checkpoints with one JAX engine.

With LoRA the engine has a few slots for adapters, and requests of all of them are decoded together;
a checkpoint takes the slot that has been idle for longest. Without LoRA the engine serves one
checkpoint at a time.
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
        model: the base model's hyperparameters.
        params: the base model's parameters.
        codec: for stop strings.
        models: reads checkpoints, and scores what was sampled.
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
        self._settings = settings
        self._models = models
        self._database = database
        self._training = training
        # Contexts that wait for the training thread, by checkpoint.
        self._unscored: dict[
            Checkpoint | None, list[tuple[ScoringRequest, asyncio.Future[ContextScores]]]
        ] = {}
        self._scoring: set[asyncio.Task[None]] = set()

        slot_count = settings.max_sampled_adapters if settings.lora else 1
        slots = [f"slot{number}" for number in range(slot_count)]
        # The checkpoint in each slot, the slot that has been idle for longest first.
        self._checkpoints: dict[str, Checkpoint | None] = dict.fromkeys(slots)
        self._users = dict.fromkeys(slots, 0)
        self._slots_changed = asyncio.Condition()
        self._adapters: dict[str, PeftAdapter] = {}
        if settings.lora:
            self._adapters = dict.fromkeys(slots, blank_adapter(settings.lora, model))

        decodes = settings.max_concurrent_decodes
        shapes = EngineShapes(
            max_model_len=self.longest,
            max_concurrent_decodes=decodes,
            kv_cache_tokens=kv_cache_tokens(self.longest, decodes, decodes),
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
        """Compute a request and return its result.

        Raises:
            BadRequest: it cannot be computed, which is the client's fault.
        """
        sample_request = SampleRequest.from_json(request.body)
        body = sample_request.model_dump()
        checkpoint = await self._requested_checkpoint(request.owner, sample_request)
        ids = read_prompt(body["prompt"], vocab_size=self._models.vocab_size)
        tokens_left = self.longest - len(ids)
        if not ids or tokens_left < 1:
            raise BadRequest(
                f"the prompt has {len(ids)} tokens; this server takes 1 to {self.longest - 1};"
                " start it with a larger max_model_len for more"
            )
        targets = read_targets(
            body.get("target_prompt_logprobs"), len(ids), vocab_size=self._models.vocab_size
        )
        params = []
        for number in range(sample_request.num_samples):
            params.append(sampling_params(body["sampling_params"], number, longest=tokens_left))
        outputs = await self._sample(checkpoint, request.id, ids, params)

        prompt_scores = None
        prompt_top = sample_request.topk_prompt_logprobs
        wants_scores = sample_request.prompt_logprobs or prompt_top or targets is not None
        if wants_scores and len(ids) > 1:
            prompt_scores = await self._score(
                checkpoint, ScoringRequest(ids=ids, top=prompt_top, targets=targets)
            )

        sample_scores: list[ContextScores] = []
        sample_top = sample_request.topk_sample_logprobs
        if sample_top:
            scores = []
            for output in outputs:
                context = ScoringRequest(ids=[*ids, *output.token_ids], top=sample_top)
                scores.append(self._score(checkpoint, context))
            sample_scores = await asyncio.gather(*scores)
        return write_samples(body, len(ids), outputs, prompt_scores, sample_scores)

    async def _requested_checkpoint(
        self, owner: str, sample_request: SampleRequest
    ) -> Checkpoint | None:
        """Return the checkpoint to sample from; None for the base model."""
        session = self._database.sampler(owner)
        path = session["path"] if session else sample_request.model_path
        if path is None:
            return None
        if self._database.checkpoint(path) is None:
            raise BadRequest(
                f"there is no checkpoint {path!r} any more: weights without a name are kept for"
                f" sampler_ttl_seconds={self._settings.sampler_ttl_seconds} after their last"
                " sample; start the server with more, or save them under a name"
            )
        return path, await asyncio.to_thread(self._models.fingerprint, path)

    async def _score(self, checkpoint: Checkpoint | None, context: ScoringRequest) -> ContextScores:
        """Score a context.

        It is computed together with all contexts of the same checkpoint that wait for the training
        thread.
        """
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
        # Does nothing, and returns when the thread comes to it: more contexts join the batch.
        await loop.run_in_executor(self._training, int)
        batch = self._unscored.pop(checkpoint)
        contexts = [context for context, _ in batch]
        answers = [answer for _, answer in batch]
        try:
            scored = await loop.run_in_executor(
                self._training, self._models.score, checkpoint, contexts
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
        """Sample once with each of ``params``; cancelling it frees their places in the engine.

        Args:
            checkpoint: None for the base model.
            request_id: unique while the request runs.
        """
        async with self._holding(checkpoint) as lora, asyncio.TaskGroup() as group:
            tasks = []
            for number, sampling in enumerate(params):
                generate_request = GenerateRequest(
                    request_id=f"{request_id}/{number}",
                    prompt_ids=tuple(prompt_ids),
                    sampling=sampling,
                    lora=lora,
                )
                tasks.append(group.create_task(self._backend.generate(generate_request)))
        return [task.result() for task in tasks]

    @contextlib.asynccontextmanager
    async def _holding(self, checkpoint: Checkpoint | None) -> AsyncIterator[str | None]:
        """Have the engine hold a checkpoint; yield the name of its adapter, None for a whole model.

        The base model and, without LoRA, every checkpoint is a whole model.
        """
        if checkpoint is None and self._adapters:
            yield None
            return

        async with self._slots_changed:
            await self._slots_changed.wait_for(lambda: self._find_slot(checkpoint) is not None)
            slot = self._find_slot(checkpoint)
            assert slot is not None
            if self._checkpoints[slot] != checkpoint:
                await self._load(slot, checkpoint)
            self._users[slot] += 1
            # Put last: it has been idle for the shortest time.
            self._checkpoints[slot] = self._checkpoints.pop(slot)
        try:
            yield slot if self._adapters else None
        finally:
            async with self._slots_changed:
                self._users[slot] -= 1
                self._slots_changed.notify_all()

    def _find_slot(self, checkpoint: Checkpoint | None) -> str | None:
        """Return the slot that holds a checkpoint, or else an idle one; None if all are in use."""
        for slot, held_checkpoint in self._checkpoints.items():
            if held_checkpoint == checkpoint:
                return slot
        for slot in self._checkpoints:
            if self._users[slot] == 0:
                return slot
        return None

    async def _load(self, slot: str, checkpoint: Checkpoint | None) -> None:
        loop = asyncio.get_running_loop()
        weights, loaded = await loop.run_in_executor(self._training, self._read, checkpoint)
        update: dict[str, Any] = {"payload": weights}
        if self._adapters:
            update = {"payload": {}, "partial": True, "adapters": {slot: weights}}
        await self._backend.pause(PauseMode.KEEP)
        try:
            version = self._backend.policy_version + 1
            await self._backend.update_weights(
                WeightUpdate(version=version, kind="arrays", **update)
            )
        finally:
            await self._backend.resume()
        self._checkpoints[slot] = loaded

    def _read(self, checkpoint: Checkpoint | None) -> tuple[Any, Checkpoint | None]:
        """Return a checkpoint's weights as the engine takes them, and the checkpoint that was read.

        It runs in the thread that also writes checkpoints: one may have been replaced since it was
        requested.
        """
        if checkpoint is None:
            return self._models.merged(None), None
        path, _ = checkpoint
        if self._adapters:
            weights = self._models.adapter(path)
        else:
            weights = self._models.merged(path)
        return weights, (path, self._models.fingerprint(path))
