"""One output out of several: the parts of a generation that was interrupted, joined so that nobody can tell."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from jax_agent_rl.errors import BackendError, TokenDriftError
from jax_agent_rl.rollout.protocol import GenerateRequest, TokenChunk
from jax_agent_rl.rollout.stops import DecodeText, straddling_stop
from jax_agent_rl.types import StopReason, TokenOutput, digest_ids


def merge_outputs(
    request: GenerateRequest, before: TokenOutput, rest: TokenOutput, decode_text: DecodeText | None
) -> TokenOutput:
    """Both parts as one, cut where a stop string is complete that began before the interruption.

    Args:
        request: the whole one.
        decode_text: see :class:`~jax_agent_rl.rollout.client.LLMServerClient`.

    Raises:
        TokenDriftError: the later part was conditioned on other ids.
        BackendError: the request has stop strings and ``decode_text`` is None.
    """
    whole, stop = before.then(rest), request.sampling.stop
    if not stop or not before.token_ids:
        return whole
    if decode_text is None:
        raise BackendError(
            f"request {request.request_id!r} was interrupted, and its stop strings {list(stop)} may stand across "
            "the seam; give LLMServerClient decode_text"
        )
    found = straddling_stop(before.token_ids, rest.token_ids, stop, decode_text)
    if found is None:
        return whole
    end, match = len(before.token_ids) + found[0], found[1]
    if end == len(whole.token_ids) and whole.stop_reason in (StopReason.EOS, StopReason.STOP):
        return whole  # the engine's own reason for ending at this id comes first
    check_context(replace(request, prompt_ids=request.prompt_ids + before.token_ids), rest)
    return replace(
        whole,
        token_ids=whole.token_ids[:end],
        log_probs=whole.log_probs[:end],
        policy_versions=whole.policy_versions[:end],
        stop_reason=StopReason.STOP,
        stop_match=match,
        context_digest=digest_ids(request.prompt_ids + whole.token_ids[:end]),
    )


def remaining_request(request: GenerateRequest, so_far: TokenOutput) -> GenerateRequest:
    """What is still to be sampled: the ids so far belong to the prompt, and count against the budget."""
    left = request.sampling.max_tokens - len(so_far.token_ids)
    return replace(
        request,
        prompt_ids=request.prompt_ids + so_far.token_ids,
        sampling=replace(request.sampling, max_tokens=left),
    )


def check_context(request: GenerateRequest, part: TokenOutput) -> None:
    """The digest of a part is lost when another is joined to it or it is cut, so it is checked before.

    Raises:
        TokenDriftError: the part was conditioned on other ids than the request's.
    """
    if part.context_digest != digest_ids(request.prompt_ids + part.token_ids):
        raise TokenDriftError(
            f"request {request.request_id!r}: a part of it was not sampled from the {len(request.prompt_ids)} "
            "ids that were sent"
        )


def from_chunks(request: GenerateRequest, chunks: Sequence[TokenChunk]) -> TokenOutput:
    """The part of a request whose server was lost in the middle of it, from what it had streamed.

    A lost server gives no digest of its context any more: this one is of the ids that it was sent.
    """
    ids = tuple(token for chunk in chunks for token in chunk.token_ids)
    return TokenOutput(
        token_ids=ids,
        log_probs=tuple(value for chunk in chunks for value in chunk.log_probs),
        policy_versions=tuple(version for chunk in chunks for version in chunk.policy_versions),
        stop_reason=StopReason.ABORTED,
        context_digest=digest_ids(request.prompt_ids + ids),
    )


def seen(request: GenerateRequest, output: TokenOutput, decode_text: DecodeText | None) -> dict[str, Any]:
    """What the trace of a request says."""
    return ({"text": decode_text(output.token_ids)} if decode_text else {}) | {
        "request_id": request.request_id,
        "context_tokens": len(request.prompt_ids),
        "sampled_tokens": len(output.token_ids),
        "cached_tokens": output.cached_tokens,
        "stop_reason": str(output.stop_reason),
        "policy_versions": sorted(set(output.policy_versions)),
    }
