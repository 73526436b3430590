"""A toy language model and an engine over it, in memory: small enough to read, and obeys every rule of the protocol.

::

    backend = ToyBackend()                        # one id per running request and tick of the event loop
    subject = toy_subject(lambda: ToyBackend())   # for the conformance suite

Tests break it on purpose by overriding one of its small methods.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from jax_agent_rl.errors import BackendClosedError, BackendError, PromptTooLongError, WeightUpdateError
from jax_agent_rl.rollout.protocol import (
    BackendMetrics,
    Capabilities,
    GenerateRequest,
    Health,
    RolloutBackend,
    TokenChunk,
    WeightUpdate,
)
from jax_agent_rl.testing.conformance.reference import log_softmax, truncate
from jax_agent_rl.testing.conformance.subject import ADAPTED, ADAPTER, BASE, MIXED, OTHER, BackendUnderTest
from jax_agent_rl.types import PauseMode, StopReason, TokenOutput, digest_ids

EOS, VOCAB, IMAGE = 2, 61, 60
_LETTERS = "abcdefghijklmnopqrstuvwxyz"


class ToyModel:
    """Scores the next id from the last two. ``which`` seeds the tables."""

    def __init__(self, which: str) -> None:
        rng = np.random.default_rng([1, len(which)])
        self.last = rng.standard_normal((VOCAB, VOCAB)) * 2
        self.before = rng.standard_normal((VOCAB, VOCAB))

    def logits(self, ids: Sequence[int]) -> np.ndarray:
        """float64 [T, V]."""
        now = np.asarray(ids)
        return self.last[now] + self.before[np.concatenate([[0], now[:-1]])]


def mixture(base: ToyModel) -> ToyModel:
    """``base`` with one of ``OTHER``'s two tables."""
    mixed = ToyModel(OTHER)
    mixed.before = base.before
    return mixed


MODELS = {which: ToyModel(which) for which in (BASE, OTHER, ADAPTED)}
MODELS[MIXED] = mixture(MODELS[BASE])


class ToyReference:
    def logits(self, ids: Sequence[int], *, weights: str) -> np.ndarray:
        return MODELS[weights].logits(ids)


def to_text(ids: Sequence[int]) -> str:
    """One letter per id."""
    return "".join(_LETTERS[i % 26] for i in ids)


class ToyMedia:
    """An image takes two ids."""

    placeholders = {"image": IMAGE}

    def expand(self, ids: Sequence[int], media: Mapping[str, Sequence[Any]]) -> list[int]:
        return [i for own in ids for i in ([own] * 2 if own == IMAGE else [own])]


def toy_subject(make: Callable[[], RolloutBackend], **fields: Any) -> BackendUnderTest:
    """A subject over the toy model; the payload of an update names the weight set."""
    standard = {
        "name": "toy",
        "make": make,
        "reference": ToyReference(),
        "payload": lambda kind, which: which,
        "vocab_size": VOCAB,
        "eos_ids": frozenset({EOS}),
        "decode_text": to_text,
        "media": ToyMedia(),
        "adapter": True,
        "tolerance": 1e-9,
        "patience": 30.0,
    }
    return BackendUnderTest(**standard | fields)


@dataclass(eq=False)
class Run:
    """One request inside the engine."""

    request: GenerateRequest
    seed: int
    cached: int = 0
    ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    events: asyncio.Queue = field(default_factory=asyncio.Queue)


class ToyBackend:
    """Continuous batching over :class:`ToyModel`.

    Args:
        max_concurrent: requests decoded at once.
        tick_seconds: pause between steps; 0 only lets the loop turn.
        capabilities: fields that replace those it declares.
    """

    def __init__(self, *, max_concurrent: int = 4, tick_seconds: float = 0.0, **capabilities: Any) -> None:
        self._capabilities = replace(
            Capabilities(
                max_model_len=200,
                max_concurrent=max_concurrent,
                pause_modes=frozenset(PauseMode),
                in_flight_update=True,
                prefix_reuse=True,
                partial_update=True,
                priorities=True,
                weight_payloads=frozenset({"toy"}),
            ),
            **capabilities,
        )
        self.model = MODELS[BASE]
        self.running: dict[str, Run] = {}
        self.waiting: list[tuple[int, int, Run]] = []
        self.cache: set[tuple[int, ...]] = set()
        self._tick_seconds = tick_seconds
        self._version = 0
        self._metrics = BackendMetrics()
        self._arrivals = itertools.count()
        self._frozen = self._closed = False
        self._drains: list[object] = []  # of pauses that wait
        self._changed = asyncio.Event()
        self._task: asyncio.Task | None = None

    @property
    def capabilities(self) -> Capabilities:
        return self._capabilities

    @property
    def policy_version(self) -> int:
        return self._version

    async def start(self) -> None:
        self._task = asyncio.create_task(self._serve())

    async def close(self) -> None:
        self._closed = True
        if self._task:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        for run in self._all():
            run.events.put_nowait(BackendClosedError("the toy backend was closed"))

    # --- requests ---------------------------------------------------------------------------------------------

    async def generate(self, request: GenerateRequest) -> TokenOutput:
        async with contextlib.aclosing(self.stream(request)) as chunks:
            async for chunk in chunks:
                if chunk.final:
                    return chunk.final
        raise BackendError("the stream ended early")

    async def stream(self, request: GenerateRequest) -> AsyncIterator[TokenChunk]:
        self._check(request)
        seed = request.sampling.seed
        run = Run(request, seed=next(self._arrivals) + 10**6 if seed is None else seed)
        heapq.heappush(self.waiting, (request.priority, next(self._arrivals), run))
        self._changed.set()
        try:
            while True:
                event = await run.events.get()
                if isinstance(event, Exception):
                    raise event
                yield event
                if event.final:
                    return
        finally:
            self.forget(run)

    def forget(self, run: Run) -> None:
        """Frees the slot of a request nobody waits for."""
        self.running = {name: other for name, other in self.running.items() if other is not run}
        self.waiting = [item for item in self.waiting if item[2] is not run]
        heapq.heapify(self.waiting)

    async def abort(self, request_id: str) -> bool:
        run = next((r for r in self._all() if r.request.request_id == request_id), None)
        if run is None:
            return False
        self.finish(run, StopReason.ABORTED)
        return True

    def _check(self, request: GenerateRequest) -> None:
        length, limit = len(request.prompt_ids), self.capabilities.max_model_len
        if self._closed:
            raise BackendClosedError("the toy backend is closed")
        if length >= limit:
            raise PromptTooLongError(f"a prompt of {length} ids leaves no room in max_model_len={limit}")
        if not all(0 <= i < VOCAB for i in request.prompt_ids):
            raise BackendError(f"prompt ids must be in [0, {VOCAB})")
        if request.multi_modal.keys() - self.capabilities.multi_modal:
            raise BackendError("the toy backend takes no pictures that it does not declare")
        if request.lora not in ((None, ADAPTER) if self.capabilities.lora else (None,)):
            raise BackendError(f"the toy backend has no adapter {request.lora!r}")
        if request.prompt_ids.count(IMAGE) < 2 * len(request.multi_modal.get("image", ())):
            raise BackendError("an image takes two placeholders")
        if any(r.request.request_id == request.request_id for r in self._all()):
            raise BackendError(f"request {request.request_id!r} is already running")

    def _all(self) -> list[Run]:
        return [*self.running.values(), *(run for _, _, run in self.waiting)]

    # --- the engine -------------------------------------------------------------------------------------------

    async def _serve(self) -> None:
        while True:
            if self._frozen or not (self.running or (self.waiting and not self._drains)):
                self._changed.clear()
                await self._changed.wait()
                continue
            while self.waiting and len(self.running) < self.capabilities.max_concurrent and not self._drains:
                self._admit(heapq.heappop(self.waiting)[2])
            for run in list(self.running.values()):
                self._step(run)
            await asyncio.sleep(self._tick_seconds)

    def _admit(self, run: Run) -> None:
        prompt = run.request.prompt_ids
        keys = [self.key(run, n) for n in range(len(prompt) + 1)]
        run.cached = next((n for n in range(len(prompt) - 1, 0, -1) if keys[n] in self.cache), 0)
        self.cache.update(keys[1:])
        self._count(cached_tokens=run.cached, prefill_tokens=len(prompt) - run.cached)
        self.running[run.request.request_id] = run

    def _step(self, run: Run) -> None:
        token, log_prob = self.sample(run)
        run.ids.append(token)
        run.log_probs.append(log_prob)
        run.versions.append(self._version)
        self.cache.add(self.key(run, len(run.request.prompt_ids) + len(run.ids)))
        self._count(generated_tokens=1)
        reason = self.reason(run)
        if reason is not None:
            self.finish(run, reason)
        else:
            run.events.put_nowait(
                TokenChunk(token_ids=(token,), log_probs=(log_prob,), policy_versions=(self._version,))
            )

    def key(self, run: Run, count: int) -> tuple:
        """What the cache knows a context's first ids by."""
        ids = (*run.request.prompt_ids, *run.ids)[:count]
        return ids + tuple(self.images(run)[: -(-ids.count(IMAGE) // 2)]) + (run.request.lora,)

    def weights(self, run: Run) -> ToyModel:
        """What the request is sampled from; the one adapter is known merged into the first weights only."""
        return self.model if run.request.lora is None else MODELS[ADAPTED]

    def images(self, run: Run) -> list[bytes]:
        """What the model sees."""
        return [image.tobytes() for image in run.request.multi_modal.get("image", ())]

    def distribution(self, run: Run) -> np.ndarray:
        """Log-probs float64 [V] that the next id is drawn from."""
        sampling = run.request.sampling
        model = self.weights(run)
        logits = model.logits([*run.request.prompt_ids, *run.ids][-2:])[-1:]
        if len(run.request.prompt_ids) + len(run.ids) == 1:
            logits = model.logits(run.request.prompt_ids)
        for place, image in enumerate(self.images(run)):
            logits = logits + np.random.default_rng([place, *image[:8]]).standard_normal(VOCAB)
        if sampling.temperature:
            logits = truncate(logits / sampling.temperature, top_p=sampling.top_p, top_k=sampling.top_k)
        return log_softmax(logits)[0]

    def sample(self, run: Run) -> tuple[int, float]:
        log_probs = self.distribution(run)
        if run.request.sampling.temperature == 0:
            token = int(log_probs.argmax())
        else:
            position = len(run.request.prompt_ids) + len(run.ids)
            draw = np.random.default_rng([run.seed, position]).random()
            cdf = np.exp(log_probs).cumsum()
            token = int(np.searchsorted(cdf, draw * cdf[-1], side="right"))
        return token, float(log_probs[token])

    def reason(self, run: Run) -> StopReason | None:
        """Why the newest id ends the request; None if it does not."""
        sampling, token = run.request.sampling, run.ids[-1]
        if token == EOS and not sampling.ignore_eos:
            return StopReason.EOS
        if self.stop_match(run):
            return StopReason.STOP
        full = len(run.request.prompt_ids) + len(run.ids) >= self.capabilities.max_model_len
        return StopReason.LENGTH if full or len(run.ids) >= sampling.max_tokens else None

    def stop_match(self, run: Run) -> str | None:
        sampling = run.request.sampling
        if run.ids and run.ids[-1] in sampling.stop_token_ids:
            return str(run.ids[-1])
        return next((s for s in sampling.stop if s in to_text(run.ids)), None)

    def output(self, run: Run, reason: StopReason) -> TokenOutput:
        return TokenOutput(
            token_ids=tuple(run.ids),
            log_probs=tuple(run.log_probs),
            policy_versions=tuple(run.versions),
            stop_reason=reason,
            stop_match=self.stop_match(run) if reason is StopReason.STOP else None,
            context_digest=digest_ids([*run.request.prompt_ids, *run.ids]),
            cached_tokens=run.cached,
        )

    def finish(self, run: Run, reason: StopReason) -> None:
        self.forget(run)
        self._count(requests_finished=1)
        output = self.output(run, reason)
        fresh = 0 if reason is StopReason.ABORTED else 1
        last = {name: getattr(output, name)[-fresh:] if fresh else () for name in ("token_ids", "log_probs")}
        versions = output.policy_versions[-fresh:] if fresh else ()
        run.events.put_nowait(TokenChunk(**last, policy_versions=versions, final=output))

    def _count(self, **more: int) -> None:
        self._metrics = replace(self._metrics, **{k: getattr(self._metrics, k) + v for k, v in more.items()})

    # --- control ----------------------------------------------------------------------------------------------

    async def pause(self, mode: PauseMode) -> None:
        if mode not in self.capabilities.pause_modes:
            raise NotImplementedError(f"the toy backend does not pause with mode {mode}")
        if mode is PauseMode.ABORT:
            for run in list(self.running.values()):
                self.finish(run, StopReason.ABORTED)
        if mode is PauseMode.WAIT:
            await self._drain()
        self._frozen = True

    async def _drain(self) -> None:
        drain = object()
        self._drains.append(drain)
        self._frozen = False
        self._changed.set()
        try:
            while self.running:
                await asyncio.sleep(0)
                if drain not in self._drains:
                    raise BackendError("resume() came before what this pause waited for had ended")
        finally:
            self._drains = [other for other in self._drains if other is not drain]
            self._changed.set()

    async def resume(self) -> None:
        self._frozen = False
        self._drains.clear()
        self._changed.set()

    async def update_weights(self, update: WeightUpdate) -> None:
        if update.kind not in self.capabilities.weight_payloads:
            raise WeightUpdateError(f"kind {update.kind!r} is not taken")
        which = self.read(update)
        if which not in MODELS:
            raise WeightUpdateError("the payload names no weight set")
        if update.version <= self._version:
            raise WeightUpdateError(f"version {update.version} is not newer than {self._version}")
        self.model, self._version = mixture(self.model) if update.partial else MODELS[which], update.version
        await self.reset_prefix_cache()

    def read(self, update: WeightUpdate) -> str:
        """The weight set an update names: itself, or (kind ``safetensors``) the text of its first file."""
        if update.kind != "safetensors":
            return update.payload if isinstance(update.payload, str) else ""
        try:
            with open(update.payload[0]) as file:
                return file.read()
        except OSError as error:
            raise WeightUpdateError(f"the weights cannot be read: {error}") from error

    async def reset_prefix_cache(self) -> None:
        self.cache.clear()

    async def sleep(self) -> None:
        raise NotImplementedError("the toy backend does not sleep")

    async def wake(self) -> None:
        raise NotImplementedError("the toy backend does not sleep")

    async def health(self) -> Health:
        return Health(
            ok=not self._closed,
            detail="closed" if self._closed else "",
            policy_version=self._version,
            running=len(self.running),
            waiting=len(self.waiting),
        )

    async def metrics(self) -> BackendMetrics:
        return self._metrics
