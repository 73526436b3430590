"""Supports of restricted draws: what a learner normalizes over is what the engine drew from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from jax_agent_rl.testing.conformance.probe import CheckFailed, Probe
from jax_agent_rl.testing.conformance.reference import log_softmax, predictions
from jax_agent_rl.testing.conformance.runner import check
from jax_agent_rl.types import StopReason, TokenOutput
from jax_agent_rl.utils.sampling_support import decode_supports

_RESTRICTED: tuple[dict[str, Any], ...] = (
    {"temperature": 1.0, "top_p": 0.7},
    {"temperature": 1.2, "top_k": 4},
    {"temperature": 1.3, "min_p": 0.1},
    {"temperature": 0.8, "top_p": 0.9, "top_k": 9, "min_p": 0.02},
)


@check("sampling_replay", "logprobs")
async def test_replay_supports(probe: Probe) -> None:
    """Every restricted draw reports a support that holds its id and normalizes its log-prob; free draws report none."""
    prompt = probe.prompt(20, seed=80)
    for sampling in _RESTRICTED:
        output = await probe.generate(prompt, max_tokens=24, seed=14, **sampling)
        _assert_supports(probe, prompt, output, sampling)
    free = await probe.generate(prompt, max_tokens=8, temperature=1.0, seed=14)
    assert not any(free.supports), "draws from the whole vocabulary have supports, which cost memory for nothing"


@check("sampling_replay")
async def test_replay_top_k(probe: Probe) -> None:
    """With top-k, a support has the k most likely ids and no others."""
    prompt, k = probe.prompt(20, seed=81), 5
    output = await probe.generate(prompt, max_tokens=24, temperature=1.0, top_k=k, seed=15)
    kept = supported(probe, output)
    logits = predictions(probe.subject.reference, prompt, output.token_ids, probe.serving)[:, : kept.shape[1]]
    for at, (row, scores) in enumerate(zip(kept, logits, strict=True)):
        excess = scores[~row].max() - scores[row].min()
        if row.sum() != k or excess > probe.subject.tolerance:
            cause = "the threshold is off by one, or the bits are those of another position or shard"
            got = f"{row.sum()} ids at position {at}; an excluded one is {excess:.2e} nats above a kept one"
            raise CheckFailed("a support with top_k", expected=f"the {k} most likely ids", got=got, cause=cause)


@check("sampling_replay", "streaming")
async def test_replay_chunks(probe: Probe) -> None:
    """The supports of all chunks are those of the final output."""
    request = probe.request(probe.prompt(12, seed=82), max_tokens=24, temperature=1.0, top_k=3, seed=16)
    async with probe.streaming(request) as stream:
        chunks = [chunk async for chunk in stream]
    final = chunks[-1].final
    joined = sum((chunk.supports for chunk in chunks), ())
    assert final is not None, "the stream ends without a result"
    assert joined == final.supports, "a request whose server is lost resumes without its supports"
    assert len(joined) == len(final.token_ids), "supports are missing"


@check("sampling_replay", "abort", "seeds")
async def test_replay_abort(probe: Probe) -> None:
    """An aborted request keeps its supports, and its resumption has those of an uninterrupted one."""
    prompt, sampling = probe.prompt(12, seed=83), {"temperature": 1.0, "top_k": 6, "seed": 17}
    count = probe.room - 24
    whole = await probe.generate(prompt, max_tokens=count, **sampling)
    running = await probe.started(prompt, max_tokens=count, **sampling)
    await probe.backend.abort(running.request_id)
    part = await running.task
    if part.stop_reason is not StopReason.ABORTED:  # it was faster
        return
    resumed = probe.request([*prompt, *part.token_ids], max_tokens=count - len(part.token_ids), **sampling)
    rest = await probe.backend.generate(replace(resumed, resumed=len(part.token_ids)))
    cause = "supports are dropped with the slot, or belong to other positions after a resumption"
    assert len(part.supports) == len(part.token_ids), cause
    assert part.then(rest).supports == whole.supports, cause


def supported(probe: Probe, output: TokenOutput) -> np.ndarray:
    """Return which ids each draw was made from, bool [S, V]; a check fails if that is not said."""
    if len(output.supports) != len(output.token_ids):
        got = f"{len(output.supports)} for {len(output.token_ids)} ids"
        cause = "restricted draws are not reported, so that a learner scores them over the whole vocabulary"
        raise CheckFailed("supports", expected="one for each id", got=got, cause=cause)
    size = probe.subject.vocab_size
    bits = np.unpackbits(decode_supports(output.supports, size).view(np.uint8), axis=1, bitorder="little")
    return bits[:, :size].astype(bool)


def _assert_supports(probe: Probe, prompt: Sequence[int], output: TokenOutput, sampling: dict[str, Any]) -> None:
    kept, ids, what = supported(probe, output), list(output.token_ids), f"draws with {sampling}"
    rows = np.arange(len(ids))
    if not kept[rows, ids].all():
        at = int(np.argmin(kept[rows, ids]))
        cause = "the bits are those of another position, or are packed in another order"
        raise CheckFailed(
            what, expected="supports that hold the ids", got=f"id {ids[at]} is not in its own", cause=cause
        )
    logits = predictions(probe.subject.reference, prompt, ids, probe.serving)[:, : kept.shape[1]]
    right = log_softmax(np.where(kept, logits / sampling["temperature"], -np.inf))[rows, ids]
    worst = int(np.argmax(np.abs(right - output.log_probs)))
    if not abs(right[worst] - output.log_probs[worst]) <= probe.subject.tolerance:
        cause = "the log-prob is normalized over other ids than the support has"
        got = f"{output.log_probs[worst]:.6f} at position {worst}"
        raise CheckFailed(what, expected=f"{right[worst]:.6f} over the support", got=got, cause=cause)
