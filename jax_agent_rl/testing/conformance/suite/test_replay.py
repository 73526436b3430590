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
from jax_agent_rl.testing.conformance.client import CheckClient, CheckFailed
from jax_agent_rl.testing.conformance.models import log_softmax, predictions
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
async def test_replay_supports(client: CheckClient) -> None:
    """Restricted draws report the support that they are from; free draws report none."""
    prompt = client.prompt(20, seed=80)
    for sampling in _RESTRICTED:
        output = await client.generate(prompt, max_tokens=24, seed=14, **sampling)
        _assert_supports(client, prompt, output, sampling)
    free = await client.generate(prompt, max_tokens=8, temperature=1.0, seed=14)
    assert not any(free.supports), (
        "draws from the whole vocabulary have supports, which cost memory for nothing"
    )


@check("sampling_replay")
async def test_replay_top_k(client: CheckClient) -> None:
    """With top-k, a support has the k most likely ids and no others."""
    k = 5
    prompt = client.prompt(20, seed=81)
    output = await client.generate(prompt, max_tokens=24, temperature=1.0, top_k=k, seed=15)
    supports_SV = _supports(client, output)
    logits_SV = predictions(client.subject.reference, prompt, output.token_ids, client.serving)
    logits_SV = logits_SV[:, : supports_SV.shape[1]]
    for position, (support, logits) in enumerate(zip(supports_SV, logits_SV, strict=True)):
        excess = logits[~support].max() - logits[support].min()
        if support.sum() != k or excess > client.subject.tolerance:
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
async def test_replay_chunks(client: CheckClient) -> None:
    """The supports of all chunks are those of the final output."""
    request = client.request(
        client.prompt(12, seed=82), max_tokens=24, temperature=1.0, top_k=3, seed=16
    )
    async with client.streaming(request) as stream:
        chunks = [chunk async for chunk in stream]
    final = chunks[-1].final
    joined = ()
    for chunk in chunks:
        joined += chunk.supports
    assert final is not None, "the stream ends without a result"
    assert joined == final.supports, "a request whose server is lost resumes without its supports"
    assert len(joined) == len(final.token_ids), "supports are missing"


@check("sampling_replay", "abort", "seeds")
async def test_replay_abort(client: CheckClient) -> None:
    """An aborted and resumed request has the supports of an uninterrupted one."""
    prompt = client.prompt(12, seed=83)
    sampling: dict[str, Any] = {"temperature": 1.0, "top_k": 6, "seed": 17}
    count = client.room - 24
    uninterrupted = await client.generate(prompt, max_tokens=count, **sampling)
    running = await client.started(prompt, max_tokens=count, **sampling)
    await client.backend.abort(running.request_id)
    part = await running.task
    if part.stop_reason is not StopReason.ABORTED:  # it ended before the abort came
        return

    resumed = client.request(
        [*prompt, *part.token_ids], max_tokens=count - len(part.token_ids), **sampling
    )
    continuation = await client.backend.generate(replace(resumed, resumed=len(part.token_ids)))
    cause = "supports are dropped with the slot, or belong to other positions after a resumption"
    assert len(part.supports) == len(part.token_ids), cause
    assert part.then(continuation).supports == uninterrupted.supports, cause


def _supports(client: CheckClient, output: TokenOutput) -> np.ndarray:
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
    size = client.subject.vocab_size
    masks = decode_supports(output.supports, size)
    bits = np.unpackbits(masks.view(np.uint8), axis=1, bitorder="little")
    return bits[:, :size].astype(bool)


def _assert_supports(
    client: CheckClient, prompt: Sequence[int], output: TokenOutput, sampling: dict[str, Any]
) -> None:
    """Expect supports that hold the sampled ids and normalize their log-probs."""
    what = f"draws with {sampling}"
    supports_SV = _supports(client, output)
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

    logits_SV = predictions(client.subject.reference, prompt, ids, client.serving)
    scaled_SV = logits_SV[:, : supports_SV.shape[1]] / sampling["temperature"]
    expected_S = log_softmax(np.where(supports_SV, scaled_SV, -np.inf))[rows_S, ids]
    errors_S = np.abs(expected_S - output.log_probs)
    worst = int(np.argmax(errors_S))
    if not errors_S[worst] <= client.subject.tolerance:
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
async def test_grammars(client: CheckClient) -> None:
    """Outputs are texts of their grammar, with log-probs over what it allows, which is reported."""
    decode = _decoder(client)
    prompt = client.prompt(12, seed=60)
    texts = [decode([token]) for token in range(client.subject.vocab_size)]

    for seed in range(4):
        output = await client.generate(
            prompt,
            max_tokens=_MOST + 1,
            temperature=1.0,
            seed=seed,
            grammar=_GRAMMAR,
            ignore_eos=False,
        )

        words = [token for token in output.token_ids if token not in client.subject.eos_ids]
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

        _assert_distribution(client, prompt, output, texts)


@check("grammars")
async def test_wrong_grammars_refused(client: CheckClient) -> None:
    """A grammar that cannot be compiled raises a BackendError for this request alone."""
    prompt = client.prompt(9, seed=61)
    concurrent = client.begin(prompt, max_tokens=16)
    what = "a grammar that names a rule it does not have"
    wrong = client.generate(prompt, grammar="start: nothing", ignore_eos=False)
    await client.raises(
        BackendError,
        wrong,
        what,
        cause="it is compiled where a failure ends the engine, or ignored",
    )
    client.assert_greedy(
        prompt,
        await concurrent,
        "a request beside it",
        cause="the mask of another request is applied",
    )


def _decoder(client: CheckClient) -> Callable[[Sequence[int]], str]:
    if client.subject.decode_text is None:
        pytest.skip("the suite was given no tokenizer to decode with")
    return client.subject.decode_text


def _assert_distribution(
    client: CheckClient, prompt: Sequence[int], output: TokenOutput, texts: Sequence[str]
) -> None:
    """Expect log-probs over what was allowed, which the supports have to be.

    Without ``sampling_replay``, ids are marked as constrained instead.
    """
    supports = None
    if client.capabilities.sampling_replay:
        supports = _supports(client, output)
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
    is_eos = np.isin(np.arange(len(texts)), sorted(client.subject.eos_ids))
    logits_SV = predictions(client.subject.reference, prompt, output.token_ids, client.serving)
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
        is_right = abs(log_prob - expected) <= client.subject.tolerance
        if not is_right and client.capabilities.logprobs:
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
async def test_experts_match_reference(client: CheckClient) -> None:
    """All positions of prompt and output report the experts of a full forward pass."""
    prompts = [client.prompt(length, seed=80) for length in (2, 17, 40)]
    cause = (
        "choices are those of the next position or of another request, or layers are in another"
        " order"
    )
    outputs = await client.gather(prompts, max_tokens=16)
    for prompt, output in zip(prompts, outputs, strict=True):
        _assert_routed(
            client,
            prompt,
            output,
            f"experts of a prompt of {len(prompt)} ids and its output",
            cause=cause,
        )


@check("routed_experts")
async def test_experts_of_a_next_turn(client: CheckClient) -> None:
    """A turn reports all positions from ``routed_experts_prompt_start`` on, also reused ones."""
    prompt = client.prompt(40, seed=81)
    first = await client.generate(prompt, max_tokens=12, session="experts")
    context = [*prompt, *first.token_ids, *client.prompt(9, seed=82)]
    for start in (0, len(prompt) + 11):
        request = replace(
            client.request(context, session="experts"), routed_experts_prompt_start=start
        )
        output = await client.backend.generate(request)
        cause = (
            "the start is ignored, or what a reused prefix chose is lost or that of another context"
        )
        _assert_routed(
            client,
            context,
            output,
            f"experts of a next turn from {start} on",
            cause=cause,
            start=start,
        )


@check("routed_experts", "abort")
async def test_experts_survive_an_abort(client: CheckClient) -> None:
    """An aborted output and its resumption report each position once."""
    prompt = client.prompt(20, seed=83)
    request = client.request(prompt, max_tokens=client.room - 24)
    running = await client.started(prompt, max_tokens=client.room - 24)
    await client.backend.abort(running.request_id)
    part = await running.task
    if part.stop_reason is not StopReason.ABORTED:  # it ended before the abort came
        return

    cause = "the choices of an aborted request are dropped, or counted from another position"
    if part.routed_experts is not None:
        _assert_routed(client, prompt, part, "experts of an aborted output", cause=cause)

    remaining = remaining_request(request, part)
    remaining = replace(
        remaining,
        request_id=client.new_id(),
        sampling=replace(remaining.sampling, max_tokens=8),
    )
    continuation = await client.backend.generate(remaining)
    _assert_routed(
        client,
        prompt,
        part.then(continuation),
        "experts of an output that was resumed",
        cause=cause,
    )


@check("routed_experts", "weight_payloads")
async def test_experts_of_new_weights(client: CheckClient) -> None:
    """After a weight update a prompt that was cached reports what the new routers choose."""
    prompt = client.prompt(60, seed=84)
    for which in (OTHER, BASE):
        await client.generate(prompt)
        await client.serve(which)
        output = await client.generate(prompt)
        cause = "the prefix keeps the choices of the old weights"
        _assert_routed(
            client, prompt, output, "experts after an update", cause=cause, weights=which
        )


def _assert_routed(
    client: CheckClient,
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
    scores_TLE = client.subject.reference.router_scores(fed, weights=weights)[start:]
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
    is_clear_TL = margin_TL > _MARGIN * client.subject.tolerance

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
