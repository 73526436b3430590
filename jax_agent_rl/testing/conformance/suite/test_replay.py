"""What a learner replays: supports of restricted draws, also under grammars, and routed experts."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from jax_agent_rl.errors import BackendError
from jax_agent_rl.rollout.merge_outputs import remaining_request
from jax_agent_rl.testing.conformance.backends import BASE, OTHER
from jax_agent_rl.testing.conformance.models import log_softmax, predictions
from jax_agent_rl.testing.conformance.probe import CheckFailed, Probe
from jax_agent_rl.testing.conformance.runner import check
from jax_agent_rl.types import StopReason, TokenOutput
from jax_agent_rl.types.supports import decode_supports

_RESTRICTED: tuple[dict[str, Any], ...] = (
    {"temperature": 1.0, "top_p": 0.7},
    {"temperature": 1.2, "top_k": 4},
    {"temperature": 1.3, "min_p": 0.1},
    {"temperature": 0.8, "top_p": 0.9, "top_k": 9, "min_p": 0.02},
)


@check("sampling_replay", "logprobs")
async def test_replay_supports(probe: Probe) -> None:
    """Restricted draws report the support that they are from; free draws report none."""
    prompt = probe.prompt(20, seed=80)
    for sampling in _RESTRICTED:
        output = await probe.generate(prompt, max_tokens=24, seed=14, **sampling)
        _assert_supports(probe, prompt, output, sampling)
    free = await probe.generate(prompt, max_tokens=8, temperature=1.0, seed=14)
    assert not any(free.supports), (
        "draws from the whole vocabulary have supports, which cost memory for nothing"
    )


@check("sampling_replay")
async def test_replay_top_k(probe: Probe) -> None:
    """With top-k, a support has the k most likely ids and no others."""
    k = 5
    prompt = probe.prompt(20, seed=81)
    output = await probe.generate(prompt, max_tokens=24, temperature=1.0, top_k=k, seed=15)
    supports_SV = _supports(probe, output)
    logits_SV = predictions(probe.subject.reference, prompt, output.token_ids, probe.serving)
    logits_SV = logits_SV[:, : supports_SV.shape[1]]
    for position, (support, logits) in enumerate(zip(supports_SV, logits_SV, strict=True)):
        excess = logits[~support].max() - logits[support].min()
        if support.sum() != k or excess > probe.subject.tolerance:
            cause = (
                "the threshold is off by one, or the bits are those of another position or shard"
            )
            got = (
                f"{support.sum()} ids at position {position}; an excluded one is {excess:.2e} nats"
                " above a kept one"
            )
            raise CheckFailed(
                "a support with top_k", expected=f"the {k} most likely ids", got=got, cause=cause
            )


@check("sampling_replay", "streaming")
async def test_replay_chunks(probe: Probe) -> None:
    """The supports of all chunks are those of the final output."""
    request = probe.request(
        probe.prompt(12, seed=82), max_tokens=24, temperature=1.0, top_k=3, seed=16
    )
    async with probe.streaming(request) as stream:
        chunks = [chunk async for chunk in stream]
    final = chunks[-1].final
    joined = ()
    for chunk in chunks:
        joined += chunk.supports
    assert final is not None, "the stream ends without a result"
    assert joined == final.supports, "a request whose server is lost resumes without its supports"
    assert len(joined) == len(final.token_ids), "supports are missing"


@check("sampling_replay", "abort", "seeds")
async def test_replay_abort(probe: Probe) -> None:
    """An aborted and resumed request has the supports of an uninterrupted one."""
    prompt = probe.prompt(12, seed=83)
    sampling: dict[str, Any] = {"temperature": 1.0, "top_k": 6, "seed": 17}
    count = probe.room - 24
    uninterrupted = await probe.generate(prompt, max_tokens=count, **sampling)
    running = await probe.started(prompt, max_tokens=count, **sampling)
    await probe.backend.abort(running.request_id)
    part = await running.task
    if part.stop_reason is not StopReason.ABORTED:  # it ended before the abort came
        return

    resumed = probe.request(
        [*prompt, *part.token_ids], max_tokens=count - len(part.token_ids), **sampling
    )
    continuation = await probe.backend.generate(replace(resumed, resumed=len(part.token_ids)))
    cause = "supports are dropped with the slot, or belong to other positions after a resumption"
    assert len(part.supports) == len(part.token_ids), cause
    assert part.then(continuation).supports == uninterrupted.supports, cause


def _supports(probe: Probe, output: TokenOutput) -> np.ndarray:
    """Return which ids each draw was made from, bool [S, V].

    Raises:
        CheckFailed: they were not reported.
    """
    if len(output.supports) != len(output.token_ids):
        got = f"{len(output.supports)} for {len(output.token_ids)} ids"
        cause = (
            "restricted draws are not reported, so that a learner scores them over the whole"
            " vocabulary"
        )
        raise CheckFailed("supports", expected="one for each id", got=got, cause=cause)
    size = probe.subject.vocab_size
    masks = decode_supports(output.supports, size)
    bits = np.unpackbits(masks.view(np.uint8), axis=1, bitorder="little")
    return bits[:, :size].astype(bool)


def _assert_supports(
    probe: Probe, prompt: Sequence[int], output: TokenOutput, sampling: dict[str, Any]
) -> None:
    """Expect supports that hold the sampled ids and normalize their log-probs."""
    what = f"draws with {sampling}"
    supports_SV = _supports(probe, output)
    ids = list(output.token_ids)
    rows_S = np.arange(len(ids))
    holds_id_S = supports_SV[rows_S, ids]
    if not holds_id_S.all():
        position = int(np.argmin(holds_id_S))
        raise CheckFailed(
            what,
            expected="supports that hold the ids",
            got=f"id {ids[position]} is not in its own",
            cause="the bits are those of another position, or are packed in another order",
        )

    logits_SV = predictions(probe.subject.reference, prompt, ids, probe.serving)
    scaled_SV = logits_SV[:, : supports_SV.shape[1]] / sampling["temperature"]
    expected_S = log_softmax(np.where(supports_SV, scaled_SV, -np.inf))[rows_S, ids]
    errors_S = np.abs(expected_S - output.log_probs)
    worst = int(np.argmax(errors_S))
    if not errors_S[worst] <= probe.subject.tolerance:
        raise CheckFailed(
            what,
            expected=f"{expected_S[worst]:.6f} over the support",
            got=f"{output.log_probs[worst]:.6f} at position {worst}",
            cause="the log-prob is normalized over other ids than the support has",
        )


_LEAST = 2
_MOST = 6
_WORD = re.compile("[a-z]+")
_GRAMMAR = f"start: /[a-z]{{{_LEAST},{_MOST}}}/"


@check("grammars")
async def test_grammars(probe: Probe) -> None:
    """Outputs are texts of their grammar, with log-probs over what it allows, which is reported."""
    decode = _decoder(probe)
    prompt = probe.prompt(12, seed=60)
    texts = [decode([token]) for token in range(probe.subject.vocab_size)]
    for seed in range(4):
        output = await probe.generate(
            prompt,
            max_tokens=_MOST + 1,
            temperature=1.0,
            seed=seed,
            grammar=_GRAMMAR,
            ignore_eos=False,
        )
        words = [token for token in output.token_ids if token not in probe.subject.eos_ids]
        text = decode(words)
        is_word = _WORD.fullmatch(text) and _LEAST <= len(text) <= _MOST
        has_eos = len(words) < len(output.token_ids)
        if not is_word or not has_eos:
            cause = "the grammar is ignored, or advanced by other ids than those that are returned"
            raise CheckFailed(
                f"an output under {_GRAMMAR}",
                expected="such a word, then EOS",
                got=repr(text),
                cause=cause,
            )
        _assert_distribution(probe, prompt, output, texts)


@check("grammars")
async def test_wrong_grammars_refused(probe: Probe) -> None:
    """A grammar that cannot be compiled raises a BackendError for this request alone."""
    prompt = probe.prompt(9, seed=61)
    concurrent = probe.begin(prompt, max_tokens=16)
    what = "a grammar that names a rule it does not have"
    wrong = probe.generate(prompt, grammar="start: nothing", ignore_eos=False)
    await probe.raises(
        BackendError,
        wrong,
        what,
        cause="it is compiled where a failure ends the engine, or ignored",
    )
    probe.assert_greedy(
        prompt,
        await concurrent,
        "a request beside it",
        cause="the mask of another request is applied",
    )


def _decoder(probe: Probe) -> Callable[[Sequence[int]], str]:
    if probe.subject.decode_text is None:
        pytest.skip("the suite was given no tokenizer to decode with")
    return probe.subject.decode_text


def _assert_distribution(
    probe: Probe, prompt: Sequence[int], output: TokenOutput, texts: Sequence[str]
) -> None:
    """Expect log-probs over what was allowed, which the supports have to be.

    Without ``sampling_replay``, ids are marked as constrained instead.
    """
    supports = None
    if probe.capabilities.sampling_replay:
        supports = _supports(probe, output)
    elif output.constrained != (True,) * len(output.token_ids):
        raise CheckFailed(
            "ids under a grammar",
            expected="marked as constrained",
            got="no mark",
            cause="marks are missing: ids would be trained on as if they had been sampled freely",
        )

    # How many letters each id adds to the word; ids with other text add too many.
    lengths = np.full(len(texts), _MOST + 1)
    for token, text in enumerate(texts):
        if _WORD.fullmatch(text):
            lengths[token] = len(text)
    is_eos = np.isin(np.arange(len(texts)), sorted(probe.subject.eos_ids))
    logits_SV = predictions(probe.subject.reference, prompt, output.token_ids, probe.serving)
    written = 0
    for at, (token, log_prob) in enumerate(zip(output.token_ids, output.log_probs, strict=True)):
        is_allowed = np.where(is_eos, written >= _LEAST, lengths + written <= _MOST)
        if supports is not None and (supports[at] != is_allowed).any():
            too_many = (supports[at] & ~is_allowed).sum()
            too_few = (is_allowed & ~supports[at]).sum()
            raise CheckFailed(
                f"support of id {at}",
                expected="what the grammar left",
                got=f"{too_many} ids too many and {too_few} too few",
                cause="supports are those of another position, or of draws before the mask",
            )

        allowed_logits = np.where(is_allowed, logits_SV[at, : len(texts)], -np.inf)
        expected = log_softmax(allowed_logits)[token]
        is_right = abs(log_prob - expected) <= probe.subject.tolerance
        if not is_right and probe.capabilities.logprobs:
            raise CheckFailed(
                f"log-prob of id {at} under a grammar",
                expected=expected,
                got=log_prob,
                cause="log-probs are taken before the mask",
            )
        written += int(lengths[token])


_MARGIN = 20.0
"""Least difference of two router scores, in tolerances of a log-prob.

Rounding cannot exchange the experts of scores that differ by more.
"""


@check("routed_experts")
async def test_experts_match_reference(probe: Probe) -> None:
    """All positions of prompt and output report the experts of a full forward pass."""
    prompts = [probe.prompt(length, seed=80) for length in (2, 17, 40)]
    cause = (
        "choices are those of the next position or of another request, or layers are in another"
        " order"
    )
    outputs = await probe.gather(prompts, max_tokens=16)
    for prompt, output in zip(prompts, outputs, strict=True):
        _assert_routed(
            probe,
            prompt,
            output,
            f"experts of a prompt of {len(prompt)} ids and its output",
            cause=cause,
        )


@check("routed_experts")
async def test_experts_of_a_next_turn(probe: Probe) -> None:
    """A turn reports all positions from ``routed_experts_prompt_start`` on, also reused ones."""
    prompt = probe.prompt(40, seed=81)
    first = await probe.generate(prompt, max_tokens=12, session="experts")
    context = [*prompt, *first.token_ids, *probe.prompt(9, seed=82)]
    for start in (0, len(prompt) + 11):
        request = replace(
            probe.request(context, session="experts"), routed_experts_prompt_start=start
        )
        output = await probe.backend.generate(request)
        cause = (
            "the start is ignored, or what a reused prefix chose is lost or that of another context"
        )
        _assert_routed(
            probe,
            context,
            output,
            f"experts of a next turn from {start} on",
            cause=cause,
            start=start,
        )


@check("routed_experts", "abort")
async def test_experts_survive_an_abort(probe: Probe) -> None:
    """An aborted output and its resumption report each position once."""
    prompt = probe.prompt(20, seed=83)
    request = probe.request(prompt, max_tokens=probe.room - 24)
    running = await probe.started(prompt, max_tokens=probe.room - 24)
    await probe.backend.abort(running.request_id)
    part = await running.task
    if part.stop_reason is not StopReason.ABORTED:  # it ended before the abort came
        return

    cause = "the choices of an aborted request are dropped, or counted from another position"
    if part.routed_experts is not None:
        _assert_routed(probe, prompt, part, "experts of an aborted output", cause=cause)

    remaining = remaining_request(request, part)
    remaining = replace(
        remaining,
        request_id=probe.new_id(),
        sampling=replace(remaining.sampling, max_tokens=8),
    )
    continuation = await probe.backend.generate(remaining)
    _assert_routed(
        probe,
        prompt,
        part.then(continuation),
        "experts of an output that was resumed",
        cause=cause,
    )


@check("routed_experts", "weight_payloads")
async def test_experts_of_new_weights(probe: Probe) -> None:
    """After a weight update a prompt that was cached reports what the new routers choose."""
    prompt = probe.prompt(60, seed=84)
    for which in (OTHER, BASE):
        await probe.generate(prompt)
        await probe.serve(which)
        output = await probe.generate(prompt)
        cause = "the prefix keeps the choices of the old weights"
        _assert_routed(probe, prompt, output, "experts after an update", cause=cause, weights=which)


def _assert_routed(
    probe: Probe,
    prompt: Sequence[int],
    output: TokenOutput,
    what: str,
    *,
    cause: str,
    start: int = 0,
    weights: str = BASE,
) -> None:
    """Expect the reference's experts of all positions from ``start`` on.

    Choices between scores that are nearly equal are not compared.
    """
    fed = [*prompt, *output.token_ids[:-1]]
    scores_TLE = probe.subject.reference.router_scores(fed, weights=weights)[start:]
    routed = output.routed_experts
    positions, layers, _ = scores_TLE.shape
    if routed is None or (routed.start, routed.shape[:2]) != (start, (positions, layers)):
        got = "none"
        if routed is not None:
            got = f"{routed.shape[0]} from {routed.start} on, {routed.shape[1]} layers"
        raise CheckFailed(
            what,
            expected=f"{positions} positions from {start} on, {layers} layers",
            got=got,
            cause=cause,
        )

    count = routed.shape[2]
    order_TLE = np.argsort(-scores_TLE, axis=-1)
    ranked_TLE = np.take_along_axis(scores_TLE, order_TLE, axis=-1)
    margin_TL = ranked_TLE[..., count - 1] - ranked_TLE[..., count]
    is_clear_TL = margin_TL > _MARGIN * probe.subject.tolerance

    expected_TLK = np.sort(order_TLE[..., :count])
    chosen_TLK = np.sort(np.reshape(routed.numbers, routed.shape))
    is_wrong_TL = (expected_TLK != chosen_TLK).any(axis=-1) & is_clear_TL
    if is_wrong_TL.any():
        at, layer = np.argwhere(is_wrong_TL)[0].tolist()
        raise CheckFailed(
            what,
            expected=f"experts {expected_TLK[at, layer]} at position {start + at}, layer {layer}",
            got=(
                f"{chosen_TLK[at, layer]}; {is_wrong_TL.sum()} of {is_clear_TL.sum()} clear choices"
                " are wrong"
            ),
            cause=cause,
        )
