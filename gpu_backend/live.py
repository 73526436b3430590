"""One request while vLLM works on it: its outputs become chunks of ids, log-probs and versions."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np

from gpu_backend.versions import Span, versions_of
from jax_agent_rl.errors import BackendError
from jax_agent_rl.jetstream.request import RunningRequest
from jax_agent_rl.rollout.protocol import TokenChunk
from jax_agent_rl.types import StopReason


class LiveRequest:
    """A request and its state.

    Attributes:
        run: ids so far, and when it is over.
        submitted: set once vLLM knows the request, or never will.
        collector: vLLM's queue of outputs for it (``RequestOutputCollector``).
        state: vLLM's own record of it (``RequestState``); holds the versions of tokens not yet reported as final.
        left_engine: vLLM has finished with it.
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
        """What a vLLM ``RequestOutput`` (new tokens only) adds; None if that is nothing.

        Args:
            spans: versions by index of output token, at least up to the end of this output.

        Raises:
            BackendError: vLLM reports an error or leaves log-probs out.
        """
        run, completion = self.run, output.outputs[0]
        self.left_engine = output.finished
        ids = list(completion.token_ids)
        log_probs = _log_probs(run.request.request_id, ids, completion.logprobs)
        start = len(run.token_ids)
        versions = versions_of(spans, start, len(ids))
        taken = 0
        for token, log_prob, version in zip(ids, log_probs, versions, strict=True):
            taken += run.accept(np.array([token]), np.array([log_prob]), version)
        if output.finished and run.stop_reason is None:
            run.stop_reason = self._reason(completion.finish_reason)
        if run.stop_reason is not None:
            self._describe(output)
        if not taken and run.stop_reason is None:
            return None
        return TokenChunk(
            token_ids=tuple(ids[:taken]),
            log_probs=tuple(log_probs[:taken]),
            policy_versions=tuple(versions[:taken]),
            final=run.output([*self.prompt_ids, *run.token_ids]) if run.stop_reason is not None else None,
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
    """The sampled ids' log-probs; vLLM reports them as one mapping per position."""
    if not ids:
        return []
    if reported is None or len(reported) != len(ids):
        got = 0 if reported is None else len(reported)
        raise BackendError(f"request {request_id!r}: vLLM returned {len(ids)} ids, but {got} log-probs")
    return [float(position[token].logprob) for token, position in zip(ids, reported, strict=True)]
