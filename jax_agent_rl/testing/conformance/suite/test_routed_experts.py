"""The experts that outputs report: those of the reference's routers, for the positions that were asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from jax_agent_rl.rollout.merge_outputs import remaining_request
from jax_agent_rl.testing.conformance.backends import BASE, OTHER
from jax_agent_rl.testing.conformance.probe import CheckFailed, Probe
from jax_agent_rl.testing.conformance.runner import check
from jax_agent_rl.types import StopReason, TokenOutput

_MARGIN = 20.0
"""How many tolerances of a log-prob two router scores differ by, so that rounding cannot exchange their experts."""


@check("routed_experts")
async def test_experts_match_reference(probe: Probe) -> None:
    """Every position fed, of prompt and output, reports the experts of a full forward pass, layer by layer."""
    prompts = [probe.prompt(length, seed=80) for length in (2, 17, 40)]
    cause = "choices are those of the next position or of another request, or layers are in another order"
    for prompt, output in zip(prompts, await probe.gather(prompts, max_tokens=16), strict=True):
        _assert_routed(probe, prompt, output, f"experts of a prompt of {len(prompt)} ids and its output", cause=cause)


@check("routed_experts")
async def test_experts_of_a_next_turn(probe: Probe) -> None:
    """A turn reports the positions from ``routed_experts_prompt_start`` on, whether their KV was reused or not."""
    prompt = probe.prompt(40, seed=81)
    first = await probe.generate(prompt, max_tokens=12, session="experts")
    context = [*prompt, *first.token_ids, *probe.prompt(9, seed=82)]
    for start in (0, len(prompt) + 11):
        request = replace(probe.request(context, session="experts"), routed_experts_prompt_start=start)
        output = await probe.backend.generate(request)
        cause = "the start is ignored, or what a reused prefix chose is lost or that of another context"
        _assert_routed(probe, context, output, f"experts of a next turn from {start} on", cause=cause, start=start)


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
    _assert_routed(probe, prompt, part.then(rest), "experts of an output that was resumed", cause=cause)


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
        got = "none" if routed is None else f"{routed.shape[0]} from {routed.start} on, {routed.shape[1]} layers"
        raise CheckFailed(what, expected=expected, got=got, cause=cause)
    count, chosen = routed.shape[2], np.reshape(routed.numbers, routed.shape)
    order = np.argsort(-scores, axis=-1)
    ranked = np.take_along_axis(scores, order, axis=-1)
    clear = ranked[..., count - 1] - ranked[..., count] > _MARGIN * probe.subject.tolerance
    wrong = (np.sort(order[..., :count]) != np.sort(chosen)).any(axis=-1) & clear
    if wrong.any():
        at, layer = (int(i[0]) for i in np.nonzero(wrong))
        expected = f"experts {np.sort(order[at, layer, :count])} at position {start + at}, layer {layer}"
        got = f"{np.sort(chosen[at, layer])}; {wrong.sum()} of {clear.sum()} clear choices are wrong"
        raise CheckFailed(what, expected=expected, got=got, cause=cause)
