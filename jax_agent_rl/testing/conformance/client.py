"""A check's client of the backend under test: requests, weight updates and expectations.

A failed expectation names the likely cause.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from jax_agent_rl.rollout.protocol import (
    ARRAYS,
    Capabilities,
    GenerateRequest,
    RolloutBackend,
    TokenChunk,
    WeightUpdate,
)
from jax_agent_rl.testing.conformance.backends import BASE, MIXED, BackendUnderTest
from jax_agent_rl.testing.conformance.models import expected_logprobs, greedy_gaps, predictions
from jax_agent_rl.testing.leaks import Footprint
from jax_agent_rl.types import SamplingParams, TokenOutput

T = TypeVar("T")


class CheckFailed(AssertionError):
    """A rule that the backend broke.

    Args:
        what: the property that was checked.
        expected: what the protocol promises.
        got: what the backend did.
        cause: the likely cause, for whoever has to fix it.
    """

    def __init__(self, what: str, *, expected: Any, got: Any, cause: str) -> None:
        self.what = what
        self.expected = expected
        self.got = got
        self.cause = cause
        super().__init__(f"{what}\n  expected: {expected}\n  got:      {got}\n  likely:   {cause}")


@dataclass(eq=False)
class StartedRequest:
    """A request in progress: its task, and the number of ids streamed so far."""

    request_id: str
    sampled: int = 0
    task: asyncio.Task[TokenOutput] = field(init=False)


class CheckClient:
    """One check's client of a started backend.

    Requests are greedy and ignore EOS unless the check overrides it, so their length is known.

    Args:
        subject: the backend under test.
        backend: its started instance.
        numbers: counter for request ids, shared by all clients of a run.
        footprint: threads and processes that existed before the backend was built.
    """

    def __init__(
        self,
        subject: BackendUnderTest,
        backend: RolloutBackend,
        *,
        numbers: itertools.count,
        footprint: Footprint,
    ) -> None:
        self.subject = subject
        self.backend = backend
        self.footprint = footprint
        self.serving = BASE
        self._numbers = numbers
        self._tasks: list[asyncio.Future] = []

    @property
    def capabilities(self) -> Capabilities:
        return self.backend.capabilities

    @property
    def room(self) -> int:
        """Context length in ids that the checks use.

        It is enough for long generations, and no more than that, whatever the backend's limit.
        """
        return min(self.capabilities.max_model_len, 256)

    # --- requests ---------------------------------------------------------------------------------

    def prompt(self, length: int, seed: int) -> list[int]:
        """Return random ids without EOS and placeholders."""
        special = set(self.subject.eos_ids)
        if self.subject.media is not None:
            special.update(self.subject.media.placeholders.values())
        allowed = np.setdiff1d(np.arange(self.subject.vocab_size), sorted(special))
        return np.random.default_rng([seed, length]).choice(allowed, length).tolist()

    def request(
        self,
        prompt: Sequence[int],
        *,
        max_tokens: int = 8,
        request_id: str | None = None,
        session: str | None = None,
        priority: int = 0,
        lora: str | None = None,
        **sampling: Any,
    ) -> GenerateRequest:
        settings = {"temperature": 0.0, "ignore_eos": True} | sampling
        return GenerateRequest(
            request_id=request_id or self.new_id(),
            prompt_ids=tuple(prompt),
            session_id=session,
            priority=priority,
            lora=lora,
            sampling=SamplingParams(max_tokens=max_tokens, **settings),
        )

    def new_id(self) -> str:
        return f"conformance-{next(self._numbers)}"

    async def generate(self, prompt: Sequence[int], **options: Any) -> TokenOutput:
        return await self.backend.generate(self.request(prompt, **options))

    def begin(self, prompt: Sequence[int], **options: Any) -> asyncio.Task[TokenOutput]:
        """Generate in the background; cancelled if still running when the check ends."""
        task = asyncio.create_task(self.generate(prompt, **options))
        self._tasks.append(task)
        return task

    async def gather(self, prompts: Sequence[Sequence[int]], **options: Any) -> list[TokenOutput]:
        """Generate for all prompts concurrently."""
        return list(await asyncio.gather(*(self.begin(prompt, **options) for prompt in prompts)))

    @contextlib.asynccontextmanager
    async def streaming(self, request: GenerateRequest) -> AsyncIterator[AsyncIterator[TokenChunk]]:
        async with contextlib.aclosing(self.backend.stream(request)) as chunks:  # type: ignore[type-var]
            yield chunks

    async def started(self, prompt: Sequence[int], **options: Any) -> StartedRequest:
        """Start a request and return it once it has sampled an id.

        A long request is then still running.
        """
        request = self.request(prompt, **options)
        started = StartedRequest(request_id=request.request_id)
        started.task = asyncio.create_task(self._follow(request, started))
        self._tasks.append(started.task)
        metrics = await self.backend.metrics()
        tokens_before = metrics.generated_tokens

        async def has_sampled() -> bool:
            if started.sampled or started.task.done():
                return True
            if self.capabilities.streaming:
                return False
            # Without a stream, the metrics tell: the request runs alone.
            metrics = await self.backend.metrics()
            return metrics.generated_tokens > tokens_before

        await self.until(
            has_sampled,
            what="a request that runs alone samples ids",
            cause="requests are not admitted, or chunks are held back until the end",
        )
        return started

    async def _follow(self, request: GenerateRequest, started: StartedRequest) -> TokenOutput:
        if not self.capabilities.streaming:
            return await self.backend.generate(request)
        async with self.streaming(request) as chunks:
            async for chunk in chunks:
                started.sampled += len(chunk.token_ids)
                if chunk.final is not None:
                    return chunk.final
        raise CheckFailed(
            "a stream",
            expected="a final chunk",
            got="none",
            cause="the stream ends without a result",
        )

    # --- weights ----------------------------------------------------------------------------------

    def update(
        self, which: str, *, kind: str | None = None, version: int | None = None
    ) -> WeightUpdate:
        """Build the update to a weight set, by default under the next version."""
        if kind is None:
            kind = sorted(self.capabilities.weight_payloads)[0]
        if version is None:
            version = self.backend.policy_version + 1
        weight_probe = None
        if kind != ARRAYS and self.subject.probe is not None:
            weight_probe = self.subject.probe(which)
        return WeightUpdate(
            version=version,
            kind=kind,
            payload=self.subject.payload(kind, which),
            partial=which == MIXED,
            probe=weight_probe,
        )

    async def serve(self, which: str, *, kind: str | None = None) -> int:
        """Update the backend to a weight set and return its version."""
        update = self.update(which, kind=kind)
        await self.backend.update_weights(update)
        self.serving = which
        return update.version

    # --- expectations -----------------------------------------------------------------------------

    async def raises(
        self, kind: type[Exception], action: Awaitable[Any], what: str, *, cause: str
    ) -> Exception:
        """Expect the action to raise this class of error, and return the error."""
        try:
            result = await action
        except kind as error:
            return error
        except Exception as error:
            got = f"{type(error).__name__}: {error}"
            raise CheckFailed(what, expected=kind.__name__, got=got, cause=cause) from error
        got = f"no error; it returned {result!r}"
        raise CheckFailed(what, expected=kind.__name__, got=got, cause=cause)

    async def until(
        self,
        condition: Callable[[], Awaitable[bool]],
        what: str,
        *,
        cause: str,
        seconds: float = 30.0,
    ) -> None:
        """Wait for a condition to hold."""
        deadline = time.monotonic() + seconds
        for attempt in itertools.count():
            if await condition():
                return
            if time.monotonic() > deadline:
                raise CheckFailed(
                    what, expected=f"within {seconds:g} s", got="not yet true", cause=cause
                )
            # Poll without a pause at first: a small model samples 200 ids within milliseconds.
            pause = 0.0
            if attempt > 20:
                pause = 0.002
            await asyncio.sleep(pause)

    async def within(self, seconds: float, waiting: Awaitable[T], what: str, *, cause: str) -> T:
        """Return an awaited result that must arrive in time."""
        try:
            return await asyncio.wait_for(waiting, seconds)
        except TimeoutError:
            raise CheckFailed(
                what, expected=f"within {seconds:g} s", got="nothing", cause=cause
            ) from None

    async def until_idle(self, what: str, *, cause: str) -> None:
        """Wait until the backend reports no running and no waiting requests."""

        async def idle() -> bool:
            health = await self.backend.health()
            return (health.running, health.waiting) == (0, 0)

        await self.until(idle, what, cause=cause)

    def assert_greedy(
        self,
        prompt: Sequence[int],
        output: TokenOutput,
        what: str,
        *,
        cause: str,
        weights: str = BASE,
    ) -> None:
        """Expect each id to be the reference's most likely one, or within tolerance of it."""
        logits = predictions(self.subject.reference, prompt, output.token_ids, weights)
        gaps = greedy_gaps(logits, output.token_ids)
        self._compare(gaps, what, cause=cause, expected="the most likely id at every position")

    def assert_logprobs(
        self,
        prompt: Sequence[int],
        output: TokenOutput,
        what: str,
        *,
        cause: str,
        weights: str = BASE,
        **sampling: Any,
    ) -> None:
        """Expect the log-probs of the distribution that ids are drawn from.

        Args:
            sampling: ``temperature``, ``top_p``, ``top_k`` and ``min_p`` of the request.
        """
        logits = predictions(self.subject.reference, prompt, output.token_ids, weights)
        correct = expected_logprobs(logits, output.token_ids, output.log_probs, **sampling)
        errors = np.abs(np.asarray(output.log_probs) - correct)
        worst = int(np.argmax(errors))
        expected = (
            f"{correct[worst]:.6f} for id {output.token_ids[worst]} at position {worst}; got"
            f" {output.log_probs[worst]:.6f}"
        )
        self._compare(errors, what, cause=cause, expected=expected)

    def _compare(self, errors: np.ndarray, what: str, *, cause: str, expected: str) -> None:
        tolerance = self.subject.tolerance
        worst = int(np.argmax(errors))
        if not errors[worst] <= tolerance:  # NaN is an error
            got = (
                f"off by {errors[worst]:.2e} nats at position {worst} of {len(errors)}; tolerance"
                f" {tolerance:g}"
            )
            raise CheckFailed(what, expected=expected, got=got, cause=cause)

    async def clean_up(self) -> None:
        """Cancel the requests that the check left running."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()
