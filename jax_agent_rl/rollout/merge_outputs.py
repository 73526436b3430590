"""Joins the parts of an interrupted generation into one output, equal to that of an uninterrupted one.

A stop string may begin in one part and end in the next, where no engine sees it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from jax_agent_rl.errors import AbortedError, BackendError, TokenDriftError
from jax_agent_rl.rollout.protocol import GenerateRequest, TokenChunk
from jax_agent_rl.types import StopReason, TokenOutput, digest_ids

DecodeText = Callable[[Sequence[int]], str]
"""Ids to text, special tokens included."""


def merge_outputs(
    request: GenerateRequest, before: TokenOutput, rest: TokenOutput, decode_text: DecodeText | None
) -> TokenOutput:
    """Return both parts as one, cut where a stop string that began before the interruption is complete.

    Args:
        request: the whole request.
        before: what was sampled before the interruption.
        rest: what was sampled after it.
        decode_text: needed if the request has stop strings.

    Raises:
        TokenDriftError: ``rest`` was conditioned on other ids.
        BackendError: the request has stop strings and ``decode_text`` is None.
    """
    whole, stop = before.then(rest), request.sampling.stop
    if not stop or not before.token_ids:
        return whole
    if decode_text is None:
        raise BackendError(
            f"request {request.request_id!r} was interrupted, and its stop strings {list(stop)} may"
            " stand across the seam; give LLMServerClient decode_text"
        )
    found = _straddling_stop(before.token_ids, rest.token_ids, stop, decode_text)
    if found is None:
        return whole
    end, match = len(before.token_ids) + found[0], found[1]
    if end == len(whole.token_ids) and whole.stop_reason in (StopReason.EOS, StopReason.STOP):
        return whole  # the engine's own reason for ending at this id takes precedence
    check_context(replace(request, prompt_ids=request.prompt_ids + before.token_ids), rest)
    digest = digest_ids(request.prompt_ids + whole.token_ids[:end])
    return whole.first(end, stop_reason=StopReason.STOP, stop_match=match, context_digest=digest)


def remaining_request(request: GenerateRequest, so_far: TokenOutput) -> GenerateRequest:
    """Return the request for what is still to be sampled: the ids so far extend the prompt and use up the budget."""
    left = request.sampling.max_tokens - len(so_far.token_ids)
    return replace(
        request,
        prompt_ids=request.prompt_ids + so_far.token_ids,
        sampling=replace(request.sampling, max_tokens=left),
        resumed=request.resumed + len(so_far.token_ids),
        routed_experts_prompt_start=(
            so_far.routed_experts.end
            if so_far.routed_experts
            else request.routed_experts_prompt_start
        ),
    )


def check_context(request: GenerateRequest, part: TokenOutput) -> None:
    """Check a part's digest, which is lost when the part is cut or joined to another.

    Raises:
        TokenDriftError: the part was conditioned on other ids than the request's.
    """
    if part.context_digest != digest_ids(request.prompt_ids + part.token_ids):
        raise TokenDriftError(
            f"request {request.request_id!r}: a part of it was not sampled from the"
            f" {len(request.prompt_ids)} ids that were sent"
        )


def check_output(
    output: TokenOutput, context_ids: Sequence[int], max_tokens: int, *, what: str
) -> None:
    """Check that a generation continued exactly ``context_ids`` and kept its budget.

    Args:
        output: the generation.
        context_ids: ids it was to continue.
        max_tokens: its budget.
        what: the trajectory and turn, for messages.

    Raises:
        TokenDriftError: the engine conditioned on other ids.
        AbortedError: the generation was aborted for good.
        BackendError: no id, or more than asked for.
    """
    if output.stop_reason is StopReason.ABORTED:
        raise AbortedError(f"{what} was aborted")
    if not 1 <= len(output.token_ids) <= max_tokens:
        raise BackendError(f"{what}: asked for 1 to {max_tokens} ids, got {len(output.token_ids)}")
    expected = digest_ids([*context_ids, *output.token_ids])
    if output.context_digest != expected:
        raise TokenDriftError(
            f"{what}: the engine's context (digest {output.context_digest}) is not the trajectory's"
            f" {len(context_ids)} + {len(output.token_ids)} ids (digest {expected})"
        )


def from_chunks(request: GenerateRequest, chunks: Sequence[TokenChunk]) -> TokenOutput:
    """Return the chunks of a request whose server was lost as an aborted output.

    A lost server cannot report the digest of its context: this one is of the ids that were sent.
    """
    ids = tuple(token for chunk in chunks for token in chunk.token_ids)
    return TokenOutput(
        token_ids=ids,
        log_probs=tuple(value for chunk in chunks for value in chunk.log_probs),
        policy_versions=tuple(version for chunk in chunks for version in chunk.policy_versions),
        stop_reason=StopReason.ABORTED,
        context_digest=digest_ids(request.prompt_ids + ids),
        constrained=tuple(mark for chunk in chunks for mark in chunk.constrained),
        supports=tuple(support for chunk in chunks for support in chunk.supports),
    )


def _straddling_stop(
    before: Sequence[int], after: Sequence[int], stop: Sequence[str], decode_text: DecodeText
) -> tuple[int, str] | None:
    """Find a stop string across the seam of two parts, as an uninterrupted engine would have.

    Returns:
        How many ids of ``after`` are kept (the last one completes the string), and the string; None
        if there is none.
    """
    # A string of n bytes spans at most n ids that add text; a few more are allowed for ids without
    # text.
    window = max(len(s.encode()) for s in stop) + 8
    for kept in range(1, min(window, len(after)) + 1):
        tail = decode_text([*before[-window:], *after[:kept]][-window:])
        if found := next((s for s in stop if s in tail), None):
            return kept, found
    return None
