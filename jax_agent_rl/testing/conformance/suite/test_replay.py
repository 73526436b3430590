"""What a learner replays: the supports of restricted draws, also under grammars, and the experts of the routers."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from jax_agent_rl.errors import BackendError
from jax_agent_rl.generation import decode_supports
from jax_agent_rl.rollout.merge_outputs import remaining_request
from jax_agent_rl.testing.conformance.backends import BASE, OTHER
from jax_agent_rl.testing.conformance.models import log_softmax, predictions
from jax_agent_rl.testing.conformance.probe import CheckFailed, Probe
from jax_agent_rl.testing.conformance.runner import check
from jax_agent_rl.types import StopReason, TokenOutput

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
    assert not any(free.supports), (
        "draws from the whole vocabulary have supports, which cost memory for nothing"
    )


@check("sampling_replay")
async def test_replay_top_k(probe: Probe) -> None:
    """With top-k, a support has the k most likely ids and no others."""
    prompt, k = probe.prompt(20, seed=81), 5
    output = await probe.generate(prompt, max_tokens=24, temperature=1.0, top_k=k, seed=15)
    kept = _supported(probe, output)
    logits = predictions(probe.subject.reference, prompt, output.token_ids, probe.serving)[
        :, : kept.shape[1]
    ]
    for at, (row, scores) in enumerate(zip(kept, logits, strict=True)):
        excess = scores[~row].max() - scores[row].min()
        if row.sum() != k or excess > probe.subject.tolerance:
            cause = (
                "the threshold is off by one, or the bits are those of another position or shard"
            )
            got = (
                f"{row.sum()} ids at position {at}; an excluded one is {excess:.2e} nats above a"
                " kept one"
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
    resumed = probe.request(
        [*prompt, *part.token_ids], max_tokens=count - len(part.token_ids), **sampling
    )
    rest = await probe.backend.generate(replace(resumed, resumed=len(part.token_ids)))
    cause = "supports are dropped with the slot, or belong to other positions after a resumption"
    assert len(part.supports) == len(part.token_ids), cause
    assert part.then(rest).supports == whole.supports, cause


def _supported(probe: Probe, output: TokenOutput) -> np.ndarray:
    """Return which ids each draw was made from, bool [S, V]; a check fails if that is not said."""
    if len(output.supports) != len(output.token_ids):
        got = f"{len(output.supports)} for {len(output.token_ids)} ids"
        cause = (
            "restricted draws are not reported, so that a learner scores them over the whole"
            " vocabulary"
        )
        raise CheckFailed("supports", expected="one for each id", got=got, cause=cause)
    size = probe.subject.vocab_size
    bits = np.unpackbits(
        decode_supports(output.supports, size).view(np.uint8), axis=1, bitorder="little"
    )
    return bits[:, :size].astype(bool)


def _assert_supports(
    probe: Probe, prompt: Sequence[int], output: TokenOutput, sampling: dict[str, Any]
) -> None:
    kept, ids, what = _supported(probe, output), list(output.token_ids), f"draws with {sampling}"
    rows = np.arange(len(ids))
    if not kept[rows, ids].all():
        at = int(np.argmin(kept[rows, ids]))
        cause = "the bits are those of another position, or are packed in another order"
        raise CheckFailed(
            what,
            expected="supports that hold the ids",
            got=f"id {ids[at]} is not in its own",
            cause=cause,
        )
    logits = predictions(probe.subject.reference, prompt, ids, probe.serving)[:, : kept.shape[1]]
    right = log_softmax(np.where(kept, logits / sampling["temperature"], -np.inf))[rows, ids]
    worst = int(np.argmax(np.abs(right - output.log_probs)))
    if not abs(right[worst] - output.log_probs[worst]) <= probe.subject.tolerance:
        cause = "the log-prob is normalized over other ids than the support has"
        got = f"{output.log_probs[worst]:.6f} at position {worst}"
        raise CheckFailed(
            what, expected=f"{right[worst]:.6f} over the support", got=got, cause=cause
        )


_LEAST, _MOST = 2, 6
_WORD = re.compile("[a-z]+")
_GRAMMAR = f"start: /[a-z]{{{_LEAST},{_MOST}}}/"


@check("grammars")
async def test_grammars(probe: Probe) -> None:
    """Under a grammar every output is one of its texts, and log-probs are those of what it left, which is reported."""
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
        if not (
            _WORD.fullmatch(text)
            and _LEAST <= len(text) <= _MOST
            and len(words) < len(output.token_ids)
        ):
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
    beside = probe.begin(prompt, max_tokens=16)
    what = "a grammar that names a rule it does not have"
    wrong = probe.generate(prompt, grammar="start: nothing", ignore_eos=False)
    await probe.raises(
        BackendError,
        wrong,
        what,
        cause="it is compiled where a failure ends the engine, or ignored",
    )
    probe.assert_greedy(
        prompt, await beside, "a request beside it", cause="the mask of another request is applied"
    )


def _decoder(probe: Probe) -> Callable[[Sequence[int]], str]:
    if probe.subject.decode_text is None:
        pytest.skip("the suite was given no tokenizer to decode with")
    return probe.subject.decode_text


def _assert_distribution(
    probe: Probe, prompt: Sequence[int], output: TokenOutput, texts: Sequence[str]
) -> None:
    """Expect log-probs over what was allowed, and that as the support; without replay, marks instead."""
    replays = probe.capabilities.sampling_replay
    if not replays and output.constrained != (True,) * len(output.token_ids):
        cause = "marks are missing: ids would be trained on as if they had been sampled freely"
        raise CheckFailed(
            "ids under a grammar", expected="marked as constrained", got="no mark", cause=cause
        )
    kept = _supported(probe, output) if replays else None
    logits = predictions(probe.subject.reference, prompt, output.token_ids, probe.serving)
    lengths = np.array([len(text) if _WORD.fullmatch(text) else _MOST + 1 for text in texts])
    ends = np.isin(np.arange(len(texts)), sorted(probe.subject.eos_ids))
    written = 0
    for at, (token, got) in enumerate(zip(output.token_ids, output.log_probs, strict=True)):
        allowed = np.where(ends, written >= _LEAST, lengths + written <= _MOST)
        if kept is not None and (kept[at] != allowed).any():
            cause = "supports are those of another position, or of draws before the mask"
            wrong = (
                f"{(kept[at] & ~allowed).sum()} ids too many and {(allowed & ~kept[at]).sum()}"
                " too few"
            )
            raise CheckFailed(
                f"support of id {at}", expected="what the grammar left", got=wrong, cause=cause
            )
        right = log_softmax(np.where(allowed, logits[at, : len(texts)], -np.inf))[token]
        if not abs(got - right) <= probe.subject.tolerance and probe.capabilities.logprobs:
            cause = "log-probs are taken before the mask"
            raise CheckFailed(
                f"log-prob of id {at} under a grammar", expected=right, got=got, cause=cause
            )
        written += int(lengths[token])


_MARGIN = 20.0
"""How many tolerances of a log-prob two router scores differ by, so that rounding cannot exchange
their experts."""


@check("routed_experts")
async def test_experts_match_reference(probe: Probe) -> None:
    """Every position fed, of prompt and output, reports the experts of a full forward pass, layer by layer."""
    prompts = [probe.prompt(length, seed=80) for length in (2, 17, 40)]
    cause = (
        "choices are those of the next position or of another request, or layers are in another"
        " order"
    )
    for prompt, output in zip(prompts, await probe.gather(prompts, max_tokens=16), strict=True):
        _assert_routed(
            probe,
            prompt,
            output,
            f"experts of a prompt of {len(prompt)} ids and its output",
            cause=cause,
        )


@check("routed_experts")
async def test_experts_of_a_next_turn(probe: Probe) -> None:
    """A turn reports the positions from ``routed_experts_prompt_start`` on, whether their KV was reused or not."""
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
    live = await probe.started(prompt, max_tokens=probe.room - 24)
    await probe.backend.abort(live.request_id)
    part = await live.task
    if part.stop_reason is not StopReason.ABORTED:  # it had ended before
        return
    cause = "the choices of an aborted request are dropped, or counted from another position"
    if part.routed_experts is not None:
        _assert_routed(probe, prompt, part, "experts of an aborted output", cause=cause)
    missing = replace(remaining_request(request, part), request_id=probe.new_id())
    missing = replace(missing, sampling=replace(missing.sampling, max_tokens=8))
    rest = await probe.backend.generate(missing)
    _assert_routed(
        probe, prompt, part.then(rest), "experts of an output that was resumed", cause=cause
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
    """Expect the reference's top-k of all positions from ``start`` on, wherever its margin is clear."""
    fed = [*prompt, *output.token_ids[:-1]]
    scores = probe.subject.reference.router_scores(fed, weights=weights)[start:]
    routed = output.routed_experts
    if routed is None or (routed.start, routed.shape[:2]) != (start, scores.shape[:2]):
        expected = f"{scores.shape[0]} positions from {start} on, {scores.shape[1]} layers"
        got = (
            "none"
            if routed is None
            else f"{routed.shape[0]} from {routed.start} on, {routed.shape[1]} layers"
        )
        raise CheckFailed(what, expected=expected, got=got, cause=cause)
    count, chosen = routed.shape[2], np.reshape(routed.numbers, routed.shape)
    order = np.argsort(-scores, axis=-1)
    ranked = np.take_along_axis(scores, order, axis=-1)
    clear = ranked[..., count - 1] - ranked[..., count] > _MARGIN * probe.subject.tolerance
    wrong = (np.sort(order[..., :count]) != np.sort(chosen)).any(axis=-1) & clear
    if wrong.any():
        at, layer = (int(i[0]) for i in np.nonzero(wrong))
        expected = (
            f"experts {np.sort(order[at, layer, :count])} at position {start + at}, layer {layer}"
        )
        got = (
            f"{np.sort(chosen[at, layer])}; {wrong.sum()} of {clear.sum()} clear choices are wrong"
        )
        raise CheckFailed(what, expected=expected, got=got, cause=cause)
