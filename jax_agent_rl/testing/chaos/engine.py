"""An engine at a given pace: every tick each running request gets one id of a :class:`.HashPolicy`.

Starting one takes a second, so it can be killed every few. What it may do wrong, it does on command: while it is
``hung``, it takes requests and commands and answers none, as an engine does whose device stands still.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

from jax_agent_rl.errors import BackendClosedError, BackendError, PromptTooLongError, WeightUpdateError
from jax_agent_rl.rollout.protocol import (
    BackendMetrics,
    Capabilities,
    GenerateRequest,
    Health,
    TokenChunk,
    WeightUpdate,
)
from jax_agent_rl.testing.chaos.policy import EOS, HashPolicy, context_key
from jax_agent_rl.types import PauseMode, StopReason, TokenOutput, digest_ids


@dataclass(eq=False)
class _Run:
    """One request inside the engine."""

    request: GenerateRequest
    seed: int
    key: int
    result: asyncio.Future[TokenOutput]
    ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)


class PacedBackend:
    """Samples at temperature 1 with the request's seed; takes weights as safetensors files.

    Args:
        policy: the first weights.
        version: of them.
        tick_seconds: between two ids of a request.
        slots: requests that are decoded at the same time; more wait.
        max_model_len: most ids of a context.
    """

    def __init__(
        self, policy: HashPolicy, *, version: int, tick_seconds: float = 0.02, slots: int = 4, max_model_len: int = 1024
    ) -> None:
        self._capabilities = Capabilities(
            max_model_len=max_model_len,
            max_concurrent=slots,
            stop_strings=False,
            streaming=False,
            pause_modes=frozenset({PauseMode.KEEP, PauseMode.ABORT}),
            in_flight_update=True,
            weight_payloads=frozenset({"safetensors"}),
        )
        self._policy, self._version = policy, version
        self._tick_seconds = tick_seconds
        self._running: list[_Run] = []
        self._waiting: deque[_Run] = deque()
        self._paused = self._closed = False
        self._well = asyncio.Event()
        self._well.set()
        self._sampled = self._finished = 0
        self._task: asyncio.Task[None] | None = None

    @property
    def capabilities(self) -> Capabilities:
        return self._capabilities

    @property
    def policy_version(self) -> int:
        return self._version

    def hang(self, hung: bool) -> None:
        """Stands still, or goes on."""
        if hung:
            self._well.clear()
        else:
            self._well.set()

    async def start(self) -> None:
        self._task = asyncio.create_task(self._serve(), name="engine")

    async def close(self) -> None:
        self._closed = True
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        for run in self._all():
            run.result.set_exception(BackendClosedError("the engine was closed"))
        self._running.clear()
        self._waiting.clear()

    # --- requests ---------------------------------------------------------------------------------------------

    async def generate(self, request: GenerateRequest) -> TokenOutput:
        sampling = request.sampling
        if self._closed:
            raise BackendClosedError("the engine is closed")
        if len(request.prompt_ids) >= self._capabilities.max_model_len:
            raise PromptTooLongError(
                f"{len(request.prompt_ids)} ids leave no room in {self._capabilities.max_model_len}"
            )
        if sampling.seed is None or sampling.temperature != 1 or sampling.top_p != 1 or sampling.top_k or sampling.stop:
            raise BackendError(f"the paced engine samples with a seed, at temperature 1, without stops; got {sampling}")
        if any(run.request.request_id == request.request_id for run in self._all()):
            raise BackendError(f"request {request.request_id!r} is already running")
        result = asyncio.get_running_loop().create_future()
        run = _Run(request=request, seed=sampling.seed, key=context_key(request.prompt_ids), result=result)
        self._waiting.append(run)
        try:
            return await result
        finally:
            self._forget(run)

    async def stream(self, request: GenerateRequest) -> AsyncIterator[TokenChunk]:
        raise NotImplementedError("the paced engine does not stream")
        yield  # makes it a generator, as the protocol has it

    async def abort(self, request_id: str) -> bool:
        await self._well.wait()
        for run in self._all():
            if run.request.request_id == request_id:
                self._end(run, StopReason.ABORTED)
                return True
        return False

    def _all(self) -> list[_Run]:
        return [*self._running, *self._waiting]

    def _forget(self, run: _Run) -> None:
        for held in (self._running, self._waiting):
            with contextlib.suppress(ValueError):
                held.remove(run)

    # --- the engine -------------------------------------------------------------------------------------------

    async def _serve(self) -> None:
        while True:
            await asyncio.sleep(self._tick_seconds)
            await self._well.wait()
            if self._paused:
                continue
            while self._waiting and len(self._running) < self._capabilities.max_concurrent:
                self._running.append(self._waiting.popleft())
            for run in list(self._running):
                self._step(run)

    def _step(self, run: _Run) -> None:
        position = len(run.request.prompt_ids) + len(run.ids)
        token, log_prob = self._policy.sample(run.key, seed=run.seed, position=position)
        run.key = context_key([token], run.key)
        run.ids.append(token)
        run.log_probs.append(log_prob)
        run.versions.append(self._version)
        self._sampled += 1
        sampling = run.request.sampling
        if token == EOS and not sampling.ignore_eos:
            self._end(run, StopReason.EOS)
        elif token in sampling.stop_token_ids:
            self._end(run, StopReason.STOP)
        elif len(run.ids) >= sampling.max_tokens or position + 1 >= self._capabilities.max_model_len:
            self._end(run, StopReason.LENGTH)

    def _end(self, run: _Run, reason: StopReason) -> None:
        self._forget(run)
        self._finished += 1
        if not run.result.done():
            run.result.set_result(
                TokenOutput(
                    token_ids=tuple(run.ids),
                    log_probs=tuple(run.log_probs),
                    policy_versions=tuple(run.versions),
                    stop_reason=reason,
                    stop_match=str(run.ids[-1]) if reason is StopReason.STOP else None,
                    context_digest=digest_ids([*run.request.prompt_ids, *run.ids]),
                )
            )

    # --- control ----------------------------------------------------------------------------------------------

    async def pause(self, mode: PauseMode) -> None:
        if mode not in self._capabilities.pause_modes:
            raise NotImplementedError(f"the paced engine does not pause with mode {mode}")
        await self._well.wait()
        self._paused = True
        if mode is PauseMode.ABORT:
            for run in list(self._running):
                self._end(run, StopReason.ABORTED)

    async def resume(self) -> None:
        await self._well.wait()
        self._paused = False

    async def update_weights(self, update: WeightUpdate) -> None:
        await self._well.wait()
        if update.kind not in self._capabilities.weight_payloads or update.partial:
            raise WeightUpdateError(f"the paced engine takes whole safetensors files, got kind {update.kind!r}")
        if update.version <= self._version:
            raise WeightUpdateError(f"version {update.version} is not newer than {self._version}, which is served")
        try:
            self._policy = await asyncio.to_thread(HashPolicy.read, Path(update.payload[0]))
        except (OSError, ValueError) as error:
            raise WeightUpdateError(f"version {update.version} cannot be read: {error}") from error
        self._version = update.version

    async def reset_prefix_cache(self) -> None:
        """There is none."""

    async def sleep(self) -> None:
        raise NotImplementedError("the paced engine does not sleep")

    async def wake(self) -> None:
        raise NotImplementedError("the paced engine does not sleep")

    async def health(self) -> Health:
        return Health(
            ok=not self._closed,
            detail="closed" if self._closed else "",
            policy_version=self._version,
            running=len(self._running),
            waiting=len(self._waiting),
        )

    async def metrics(self) -> BackendMetrics:
        return BackendMetrics(generated_tokens=self._sampled, requests_finished=self._finished)
