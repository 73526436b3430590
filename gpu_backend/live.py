"""Requests inside vLLM: their outputs become chunks of ids, log-probs and versions, and are counted."""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jax_agent_rl.errors import BackendError
from jax_agent_rl.jetstream.request import RunningRequest
from jax_agent_rl.rollout.protocol import BackendMetrics, TokenChunk
from jax_agent_rl.types import RoutedExperts, StopReason

Span = tuple[int, int]
"""(version, index of the first output token it sampled), in rising order."""


class LiveRequest:
    """A request and its state.

    Attributes:
        run: ids so far, and the stop conditions.
        submitted: set once vLLM has accepted or refused the request.
        collector: vLLM's queue of its outputs (``RequestOutputCollector``).
        state: vLLM's own record of it (``RequestState``); holds the versions of tokens not yet reported as final.
        left_engine: vLLM has finished it.
        prompt_ids: the prompt as vLLM reports it.
    """

    def __init__(self, run: RunningRequest) -> None:
        self.run = run
        self.submitted = asyncio.Event()
        self.collector: Any = None
        self.state: Any = None
        self.left_engine = False
        self.prompt_ids: Sequence[int] = run.request.prompt_ids

    @property
    def finished(self) -> bool:
        return self.run.stop_reason is not None

    def take(self, output: Any, spans: Sequence[Span]) -> TokenChunk | None:
        """Return the chunk that a vLLM ``RequestOutput`` adds; None if there is none.

        vLLM does not say what a grammar excluded, so all ids under one count as constrained; nor can it continue an
        output within one. So its ids come in one chunk at the end, and none if it was aborted: it begins anew.

        Args:
            output: with new tokens only.
            spans: versions by index of output token, at least up to the end of this output.

        Raises:
            BackendError: vLLM reports an error or omits log-probs.
        """
        run, completion = self.run, output.outputs[0]
        self.left_engine = output.finished
        ids = list(completion.token_ids)
        log_probs = _log_probs(run.request.request_id, ids, completion.logprobs)
        start = len(run.token_ids)
        versions = expand_versions(spans, start, len(ids))
        taken = 0
        for token, log_prob, version in zip(ids, log_probs, versions, strict=True):
            taken += run.accept(np.array([token]), np.array([log_prob]), version)
        if output.finished and run.stop_reason is None:
            run.stop_reason = self._reason(completion.finish_reason)
        if run.stop_reason is not None:
            self._describe(output)
        if completion.routed_experts is not None:  # of all positions fed, with the last output alone
            routed = RoutedExperts.of(run.request.routed_experts_prompt_start, completion.routed_experts)
            run.routed = routed.until(len(run.request.prompt_ids) + len(run.token_ids) - 1)
        if run.request.sampling.grammar is not None:
            return self._constrained_whole() if self.finished else None
        if not taken and run.stop_reason is None:
            return None
        return TokenChunk(
            token_ids=tuple(ids[:taken]),
            log_probs=tuple(log_probs[:taken]),
            policy_versions=tuple(versions[:taken]),
            final=run.output([*self.prompt_ids, *run.token_ids]) if run.stop_reason is not None else None,
        )

    def _constrained_whole(self) -> TokenChunk:
        run = self.run
        if run.stop_reason is StopReason.ABORTED:
            run.token_ids, run.log_probs, run.versions, run.routed = [], [], [], None
        run.constrained = [True] * len(run.token_ids)
        final = run.output([*self.prompt_ids, *run.token_ids])
        return TokenChunk(
            token_ids=final.token_ids,
            log_probs=final.log_probs,
            policy_versions=final.policy_versions,
            constrained=final.constrained,
            final=final,
        )

    def _reason(self, finish_reason: str | None) -> StopReason:
        if finish_reason == "abort":
            return StopReason.ABORTED
        if finish_reason == "length":
            return StopReason.LENGTH
        raise BackendError(f"request {self.run.request.request_id!r}: vLLM ended it with {finish_reason!r}")

    def _describe(self, output: Any) -> None:
        if output.prompt_token_ids is not None:
            self.prompt_ids = output.prompt_token_ids
        self.run.cached_tokens = output.num_cached_tokens or 0


def _log_probs(request_id: str, ids: Sequence[int], reported: Sequence[Any] | None) -> list[float]:
    """Return the sampled ids' log-probs, which vLLM reports as one mapping per position."""
    if not ids:
        return []
    if reported is None or len(reported) != len(ids):
        got = 0 if reported is None else len(reported)
        raise BackendError(f"request {request_id!r}: vLLM returned {len(ids)} ids, but {got} log-probs")
    return [float(position[token].logprob) for token, position in zip(ids, reported, strict=True)]


def expand_versions(spans: Sequence[Span], start: int, count: int) -> list[int]:
    """Return the versions of output tokens ``start .. start + count``.

    Args:
        spans: from vLLM.
        start: index of the first token.
        count: number of tokens.

    >>> expand_versions([(1, 0), (2, 5)], start=3, count=4)
    [1, 1, 2, 2]

    Raises:
        ValueError: a token lies before the first span.
    """
    starts = [first for _, first in spans]
    if count and (not spans or starts[0] > start):
        raise ValueError(f"tokens {start}..{start + count} lie before the first version span {list(spans[:1])}")
    return [spans[bisect_right(starts, index) - 1][0] for index in range(start, start + count)]


class Usage:
    """Counts requests as they begin and end.

    vLLM does not report the time it spends on prompts, so ``prefill_seconds`` stays 0; ``busy_seconds`` is the
    time with at least one request inside.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._inside: dict[int, RunningRequest] = {}
        self._since = 0.0
        self._busy = 0.0
        self._generated = self._prefilled = self._cached = self._finished = 0
        self.weight_update_seconds = 0.0

    def begin(self, run: RunningRequest) -> None:
        if not self._inside:
            self._since = self._clock()
        self._inside[id(run)] = run

    def end(self, run: RunningRequest) -> None:
        del self._inside[id(run)]
        if not self._inside:
            self._busy += self._clock() - self._since
        self._generated += len(run.token_ids)
        if run.stop_reason is not None:
            self._finished += 1
            self._cached += run.cached_tokens
            self._prefilled += len(run.request.prompt_ids) - run.cached_tokens

    def metrics(self) -> BackendMetrics:
        running = self._clock() - self._since if self._inside else 0.0
        return BackendMetrics(
            generated_tokens=self._generated + sum(len(run.token_ids) for run in self._inside.values()),
            prefill_tokens=self._prefilled,
            cached_tokens=self._cached,
            requests_finished=self._finished,
            busy_seconds=self._busy + running,
            weight_update_seconds=self.weight_update_seconds,
        )
