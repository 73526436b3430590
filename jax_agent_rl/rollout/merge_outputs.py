"""Joins the parts of an interrupted generation into one output, as if nothing had interrupted it.

A stop string may begin in one part and end in the next, where no engine sees it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from jax_agent_rl.errors import AbortedError, BackendError, TokenDriftError
from jax_agent_rl.rollout.protocol import GenerateRequest, TokenChunk
from jax_agent_rl.types import StopReason, Support, TokenOutput, digest_ids

DecodeText = Callable[[Sequence[int]], str]
"""Ids to text, special tokens included."""


def merge_outputs(
    request: GenerateRequest,
    so_far: TokenOutput,
    continuation: TokenOutput,
    decode_text: DecodeText | None,
) -> TokenOutput:
    """Return both parts as one, cut where a stop string across their seam is complete.

    Args:
        request: the whole request, as it was before the first interruption.
        so_far: what was sampled before the interruption.
        continuation: what was sampled after it.
        decode_text: needed if the request has stop strings.

    Raises:
        TokenDriftError: ``continuation`` was conditioned on other ids.
        BackendError: the request has stop strings and ``decode_text`` is None.
    """
    merged = so_far.then(continuation)
    stop_strings = request.sampling.stop
    if not stop_strings or not so_far.token_ids:
        return merged
    if decode_text is None:
        raise BackendError(
            f"request {request.request_id!r} was interrupted, and its stop strings"
            f" {list(stop_strings)} may stand across the seam; give LLMServerClient decode_text"
        )

    stop = _find_straddling_stop(
        so_far.token_ids, continuation.token_ids, stop_strings, decode_text
    )
    if stop is None:
        return merged

    num_continued, stop_string = stop
    end = len(so_far.token_ids) + num_continued
    if end == len(merged.token_ids) and merged.stop_reason in (StopReason.EOS, StopReason.STOP):
        return merged  # the engine's own reason for ending at this id takes precedence

    # The cut drops the engine's digest, so compare it while it is still there.
    check_context(replace(request, prompt_ids=request.prompt_ids + so_far.token_ids), continuation)
    return merged.first(
        end,
        stop_reason=StopReason.STOP,
        stop_match=stop_string,
        context_digest=digest_ids(request.prompt_ids + merged.token_ids[:end]),
    )


def remaining_request(request: GenerateRequest, so_far: TokenOutput) -> GenerateRequest:
    """Return the request for what is still to be sampled.

    The ids so far extend its prompt and use up its budget.
    """
    num_sampled = len(so_far.token_ids)
    routed_experts_start = request.routed_experts_prompt_start
    if so_far.routed_experts:
        routed_experts_start = so_far.routed_experts.end
    return replace(
        request,
        prompt_ids=request.prompt_ids + so_far.token_ids,
        sampling=replace(request.sampling, max_tokens=request.sampling.max_tokens - num_sampled),
        resumed=request.resumed + num_sampled,
        routed_experts_prompt_start=routed_experts_start,
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
        what: names the trajectory and turn in messages.

    Raises:
        TokenDriftError: the engine conditioned on other ids.
        AbortedError: the generation was aborted for good.
        BackendError: it has no id, or more than ``max_tokens``.
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
    token_ids: list[int] = []
    log_probs: list[float] = []
    policy_versions: list[int] = []
    constrained: list[bool] = []
    supports: list[Support | None] = []
    for chunk in chunks:
        token_ids += chunk.token_ids
        log_probs += chunk.log_probs
        policy_versions += chunk.policy_versions
        constrained += chunk.constrained
        supports += chunk.supports

    return TokenOutput(
        token_ids=tuple(token_ids),
        log_probs=tuple(log_probs),
        policy_versions=tuple(policy_versions),
        stop_reason=StopReason.ABORTED,
        context_digest=digest_ids([*request.prompt_ids, *token_ids]),
        constrained=tuple(constrained),
        supports=tuple(supports),
    )


def _find_straddling_stop(
    first_ids: Sequence[int],
    second_ids: Sequence[int],
    stop_strings: Sequence[str],
    decode_text: DecodeText,
) -> tuple[int, str] | None:
    """Find a stop string across the seam of two parts, as an uninterrupted engine would have.

    Returns:
        How many of ``second_ids`` stay (the last of them completes the string), and the string;
        None if there is none.
    """
    # A string of n bytes spans at most n ids that add text; a few more are allowed for ids without
    # text.
    window = max(len(stop_string.encode()) for stop_string in stop_strings) + 8
    for num_ids in range(1, min(window, len(second_ids)) + 1):
        tail_ids = [*first_ids[-window:], *second_ids[:num_ids]][-window:]
        tail = decode_text(tail_ids)
        for stop_string in stop_strings:
            if stop_string in tail:
                return num_ids, stop_string
    return None
