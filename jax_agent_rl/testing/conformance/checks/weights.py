"""Weight updates: all or nothing, under a new version, with an empty cache."""

from __future__ import annotations

import numpy as np

from jax_agent_rl.errors import WeightUpdateError
from jax_agent_rl.rollout.protocol import WeightUpdate
from jax_agent_rl.testing.conformance.backend_under_test import BASE, MIXED, OTHER
from jax_agent_rl.testing.conformance.check import check
from jax_agent_rl.testing.conformance.probe import DoesNotApply, Probe
from jax_agent_rl.testing.conformance.reference import expected_logprobs, predictions
from jax_agent_rl.types import PauseMode, TokenOutput

_ATTEMPTS = 5


@check("weights-take-effect", needs=["weight_payloads"])
async def take_effect(probe: Probe) -> None:
    """After an update, every id is of the new weights and version, even where a prefix was cached."""
    prompt = probe.prompt(64, seed=60)
    for kind in sorted(probe.capabilities.weight_payloads):
        await probe.serve(BASE, kind=kind)
        await probe.generate(prompt)
        version = await probe.serve(OTHER, kind=kind)
        output = await probe.generate(prompt, max_tokens=16)
        probe.equal(
            (probe.backend.policy_version, set(output.policy_versions)),
            (version, {version}),
            f"policy_version, versions of ids after an update of kind {kind!r}",
            cause="the version is not taken over with the weights",
        )
        probe.equal(output.cached_tokens, 0, "cached_tokens after an update", cause="KV of the old weights is reused")
        probe.expect_greedy(prompt, output, "ids of the new weights", weights=OTHER, cause=_STALE)
        if probe.capabilities.logprobs:
            probe.expect_logprobs(prompt, output, "log-probs of the new weights", weights=OTHER, cause=_STALE)


@check("weights-round-trip", needs=["weight_payloads"])
async def round_trip(probe: Probe) -> None:
    """Other weights and back again restore the first output."""
    prompt = probe.prompt(20, seed=61)
    for kind in sorted(probe.capabilities.weight_payloads):
        await probe.serve(BASE, kind=kind)
        first = await probe.generate(prompt, max_tokens=24)
        await probe.serve(OTHER, kind=kind)
        between = await probe.generate(prompt, max_tokens=24)
        await probe.serve(BASE, kind=kind)
        last = await probe.generate(prompt, max_tokens=24)
        probe.equal(last.token_ids, first.token_ids, f"ids after a round trip of kind {kind!r}", cause=_STALE)
        gap = float(np.abs(np.subtract(last.log_probs, first.log_probs)).max())
        probe.expect(
            gap <= probe.subject.tolerance,
            "log-probs after the round trip",
            expected=f"those of before, to {probe.subject.tolerance:g}",
            got=f"off by {gap:.2e}",
            cause=_STALE,
        )
        probe.expect(
            between.log_probs != first.log_probs,
            "log-probs in between",
            expected="different ones",
            got="the same",
            cause="the update was accepted and not applied",
        )


@check("partial-update", needs=["partial_update", "weight_payloads"])
async def partial_update(probe: Probe) -> None:
    """Parameters that a partial update does not name stay as they are."""
    prompt = probe.prompt(20, seed=64)
    for kind in sorted(probe.capabilities.weight_payloads):
        await probe.serve(BASE, kind=kind)
        version = await probe.serve(MIXED, kind=kind)
        output = await probe.generate(prompt, max_tokens=16)
        probe.equal(set(output.policy_versions), {version}, "versions of ids after a partial update", cause=_STALE)
        cause = "the parameters that were not named are lost, or matrices that the engine fuses are filled in part"
        probe.expect_greedy(prompt, output, "ids after a partial update", weights=MIXED, cause=cause)
        if probe.capabilities.logprobs:
            probe.expect_logprobs(prompt, output, "log-probs after a partial update", weights=MIXED, cause=cause)


@check("update-in-flight", needs=["in_flight_update", "pause_modes:keep", "weight_payloads"])
async def in_flight(probe: Probe) -> None:
    """During a generation, weights can change: earlier ids keep the old version, later ones have the new."""
    prompt, count = probe.prompt(8, seed=62), probe.room - 24
    output, old, new, before = await _updated_in_flight(probe, prompt, count)
    versions = output.policy_versions
    probe.expect(
        set(versions) == {old, new} and list(versions) == sorted(versions) and len(versions) == count,
        "versions of the ids",
        expected=f"{count} of them: some {old}, then only {new}",
        got=f"{len(versions)}: {_runs(versions)}",
        cause="all ids get the version served at the end (or the start), or the request was restarted",
    )
    cut = versions.index(new)
    probe.expect(
        cut >= before,
        f"ids of version {old}",
        expected=f"at least the {before} that were sampled before the pause",
        got=cut,
        cause="ids are labelled when they are returned, not when they are sampled",
    )
    if probe.capabilities.logprobs:
        _expect_separate(probe, prompt, output, cut)


async def _updated_in_flight(probe: Probe, prompt: list[int], count: int) -> tuple[TokenOutput, int, int, int]:
    """Return the output, both versions, and the number of ids before the pause."""
    for _ in range(_ATTEMPTS):
        await probe.serve(BASE)
        old = probe.backend.policy_version
        live = await probe.started(prompt, max_tokens=count)
        before = live.sampled
        await probe.backend.pause(PauseMode.KEEP)
        if live.task.done():  # over before the pause came
            await probe.backend.resume()
            continue
        new = await probe.serve(OTHER)
        await probe.backend.resume()
        output = await live.task
        # The last step before the pause may have finished it; then there is nothing to see.
        if set(output.policy_versions) != {old} or len(output.token_ids) < count:
            return output, old, new, before
    raise DoesNotApply(f"the backend samples {count} ids faster than a pause can reach it")


def _expect_separate(probe: Probe, prompt: list[int], output: TokenOutput, cut: int) -> None:
    """Expect old ids to fit the old weights and new ones not to; their KV is of both, so no more can be said."""
    logits = predictions(probe.subject.reference, prompt, output.token_ids, BASE)
    errors = np.abs(np.asarray(output.log_probs) - expected_logprobs(logits, output.token_ids, output.log_probs))
    tolerance = probe.subject.tolerance
    probe.expect(
        bool(errors[:cut].max() <= tolerance),
        "log-probs of the ids labelled with the old version",
        expected=f"those of the old weights, to {tolerance:g}",
        got=f"off by {errors[:cut].max():.2e}",
        cause="ids of the new weights are labelled old",
    )
    probe.expect(
        bool(errors[cut:].max() > tolerance),
        "log-probs of the ids labelled with the new version",
        expected="not those of the old weights",
        got=f"all within {errors[cut:].max():.2e} of them",
        cause="the version changed without the weights",
    )


@check("stale-version-refused", needs=["weight_payloads"])
async def stale(probe: Probe) -> None:
    """Unless its version is newer, an update is refused and the old weights stay."""
    version = await probe.serve(BASE)
    for number in (version, version - 1):
        await _refused(
            probe,
            probe.update(OTHER, version=number),
            f"an update to version {number} while {version} is served",
            cause="versions are not compared: a late update would undo a newer one",
        )


@check("bad-weights-refused", needs=["weight_payloads"])
async def bad(probe: Probe) -> None:
    """Weights of a wrong kind or that do not fit the model are refused, and the old ones stay."""
    await probe.serve(BASE)
    version, cause = (
        probe.backend.policy_version + 1,
        "the update is accepted blindly, or leaves the engine half changed",
    )
    unknown = WeightUpdate(version=version, kind="conformance", payload=None)
    await _refused(probe, unknown, "an update of kind 'conformance'", cause=cause)
    for kind in sorted(probe.capabilities.weight_payloads):
        payload = ["/nonexistent/model.safetensors"] if kind == "safetensors" else {"conformance": np.zeros(3)}
        wrong = WeightUpdate(version=version, kind=kind, payload=payload)
        await _refused(probe, wrong, f"a {kind!r} update without the model's parameters", cause=cause)


async def _refused(probe: Probe, update: WeightUpdate, what: str, *, cause: str) -> None:
    version = probe.backend.policy_version
    await probe.raises(WeightUpdateError, probe.backend.update_weights(update), what, cause=cause)
    prompt = probe.prompt(12, seed=63)
    output = await probe.generate(prompt)
    probe.equal(
        (probe.backend.policy_version, set(output.policy_versions)),
        (version, {version}),
        f"versions after {what}",
        cause="the version changed although the weights were refused",
    )
    probe.expect_greedy(prompt, output, f"ids after {what}", cause="the refused weights were (partly) taken")


_STALE = "some tensors keep old values (a tied head, a packed copy), or are read in another layout"


def _runs(versions: tuple[int, ...]) -> str:
    """Format versions as ``4 x 1, 7 x 2``: four ids of version 1, then seven of version 2."""
    runs: list[list[int]] = []
    for version in versions:
        if runs and runs[-1][1] == version:
            runs[-1][0] += 1
        else:
            runs.append([1, version])
    return ", ".join(f"{count} x {version}" for count, version in runs)
