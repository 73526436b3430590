"""LoRA adapters; weight updates: all or nothing, under a new version, with an empty cache."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import numpy as np
import pytest

from jax_agent_rl.errors import WeightUpdateError
from jax_agent_rl.rollout.protocol import WeightUpdate
from jax_agent_rl.testing.conformance.backends import ADAPTED, ADAPTER, BASE, MIXED, OTHER
from jax_agent_rl.testing.conformance.client import CheckClient
from jax_agent_rl.testing.conformance.models import expected_logprobs, predictions
from jax_agent_rl.testing.conformance.runner import check
from jax_agent_rl.types import PauseMode, TokenOutput

_ATTEMPTS = 5
_STALE = "some tensors keep old values (a tied head, a packed copy), or are read in another layout"


@check("lora")
async def test_adapters(client: CheckClient) -> None:
    """Only requests that name an adapter sample from the model with it merged in."""
    prompt = _adapter_prompt(client, seed=60)
    plain, adapted = await asyncio.gather(
        client.begin(prompt, lora=None), client.begin(prompt, lora=ADAPTER)
    )
    cause = "the adapter is not applied, or scaled or laid out wrongly"
    client.assert_logprobs(
        prompt, adapted, "log-probs with an adapter", cause=cause, weights=ADAPTED
    )
    cause = "an adapter leaks into requests that run beside it"
    client.assert_logprobs(prompt, plain, "log-probs of the plain model", cause=cause)
    unknown = client.generate(prompt, lora="unknown")
    await client.raises(
        Exception, unknown, "a request with an unknown adapter", cause="it is served without one"
    )


@check("lora", "prefix_reuse")
async def test_adapters_and_prefixes(client: CheckClient) -> None:
    """KV is reused under the adapter that computed it, and under no other."""
    prompt = _adapter_prompt(client, seed=61)
    first = await client.generate(prompt)
    adapted = await client.generate(prompt, lora=ADAPTER)
    again = await client.generate(prompt, lora=ADAPTER)
    cause = "prefixes are compared by ids alone"
    assert (first.cached_tokens, adapted.cached_tokens) == (0, 0), cause
    assert again.cached_tokens > 0, "requests with adapters never find what was cached"
    cause = "the KV reused is of another adapter"
    client.assert_logprobs(
        prompt, again, "log-probs on a reused prefix", cause=cause, weights=ADAPTED
    )


def _adapter_prompt(client: CheckClient, *, seed: int) -> list[int]:
    if not client.subject.adapter:
        pytest.skip("the backend serves no adapter of the suite; built-in ones do with --adapters")
    return client.prompt(64, seed=seed)


@check("weight_payloads")
async def test_weights_take_effect(client: CheckClient) -> None:
    """After an update, every id is of the new weights and version, even after a cached prefix."""
    prompt = client.prompt(64, seed=60)
    for kind in sorted(client.capabilities.weight_payloads):
        await client.serve(BASE, kind=kind)
        await client.generate(prompt)
        version = await client.serve(OTHER, kind=kind)
        output = await client.generate(prompt, max_tokens=16)
        versions = (client.backend.policy_version, set(output.policy_versions))
        cause = f"kind {kind!r}: the version is not taken over with the weights"
        assert versions == (version, {version}), cause
        assert output.cached_tokens == 0, "KV of the old weights is reused"
        client.assert_greedy(prompt, output, "ids of the new weights", weights=OTHER, cause=_STALE)
        if client.capabilities.logprobs:
            client.assert_logprobs(
                prompt, output, "log-probs of the new weights", weights=OTHER, cause=_STALE
            )


@check("weight_payloads")
async def test_weights_round_trip(client: CheckClient) -> None:
    """Other weights and back again restore the first output."""
    prompt = client.prompt(20, seed=61)
    for kind in sorted(client.capabilities.weight_payloads):
        outputs = []
        for weights in (BASE, OTHER, BASE):
            await client.serve(weights, kind=kind)
            outputs.append(await client.generate(prompt, max_tokens=24))
        first, between, last = outputs
        assert last.token_ids == first.token_ids, f"kind {kind!r}: {_STALE}"
        error = np.abs(np.subtract(last.log_probs, first.log_probs)).max()
        assert error <= client.subject.tolerance, f"kind {kind!r}: {_STALE}"
        assert between.log_probs != first.log_probs, (
            f"kind {kind!r}: the update was accepted and not applied"
        )


@check("partial_update", "weight_payloads")
async def test_partial_update(client: CheckClient) -> None:
    """Parameters that a partial update does not name stay as they are."""
    prompt = client.prompt(20, seed=64)
    for kind in sorted(client.capabilities.weight_payloads):
        await client.serve(BASE, kind=kind)
        version = await client.serve(MIXED, kind=kind)
        output = await client.generate(prompt, max_tokens=16)
        assert set(output.policy_versions) == {version}, f"kind {kind!r}: {_STALE}"
        cause = (
            "the parameters that were not named are lost, or matrices that the engine fuses are"
            " filled in part"
        )
        client.assert_greedy(
            prompt, output, "ids after a partial update", weights=MIXED, cause=cause
        )
        if client.capabilities.logprobs:
            client.assert_logprobs(
                prompt, output, "log-probs after a partial update", weights=MIXED, cause=cause
            )


@check("in_flight_update", "pause_modes:keep", "weight_payloads")
async def test_update_in_flight(client: CheckClient) -> None:
    """Weights can change during a generation: only ids sampled later have the new version."""
    prompt = client.prompt(8, seed=62)
    count = client.room - 24
    output, old, new, before = await _update_in_flight(client, prompt, count)
    versions = output.policy_versions
    spans = []
    for version, ids in itertools.groupby(versions):
        spans.append((version, len(list(ids))))
    cause = (
        "all ids get the version served at the end (or the start), or the request was restarted:"
        f" {spans}"
    )
    assert ([version for version, _ in spans], len(versions)) == ([old, new], count), cause
    cut = versions.index(new)
    assert cut >= before, "ids are labelled when they are returned, not when they are sampled"

    if not client.capabilities.logprobs:
        return
    # The new ids' KV is of both weights, so it is only known that their log-probs are not those of
    # the old weights.
    logits = predictions(client.subject.reference, prompt, output.token_ids, BASE)
    old_logprobs = expected_logprobs(logits, output.token_ids, output.log_probs)
    errors = np.abs(np.asarray(output.log_probs) - old_logprobs)
    assert errors[:cut].max() <= client.subject.tolerance, "ids of the new weights are labelled old"
    assert errors[cut:].max() > client.subject.tolerance, "the version changed without the weights"


async def _update_in_flight(
    client: CheckClient, prompt: list[int], count: int
) -> tuple[TokenOutput, int, int, int]:
    """Return the output, both versions, and the number of ids before the pause."""
    for _ in range(_ATTEMPTS):
        await client.serve(BASE)
        old = client.backend.policy_version
        request = await client.started(prompt, max_tokens=count)
        before = request.sampled
        await client.backend.pause(PauseMode.KEEP)
        if request.task.done():  # it ended before the pause came
            await client.backend.resume()
            continue
        new = await client.serve(OTHER)
        await client.backend.resume()
        output = await request.task
        # The last step before the pause may have finished it; then there is nothing to see.
        if set(output.policy_versions) != {old} or len(output.token_ids) < count:
            return output, old, new, before
    pytest.skip(f"the backend samples {count} ids faster than a pause can reach it")


@check("weight_payloads")
async def test_stale_version_refused(client: CheckClient) -> None:
    """Unless its version is newer, an update is refused and the old weights stay."""
    version = await client.serve(BASE)
    for number in (version, version - 1):
        what = f"an update to version {number} while {version} is served"
        cause = "versions are not compared: a late update would undo a newer one"
        await _refused(client, client.update(OTHER, version=number), what, cause=cause)


@check("weight_payloads")
async def test_bad_weights_refused(client: CheckClient) -> None:
    """Weights of a wrong kind or that do not fit the model are refused, and the old ones stay."""
    version = 1 + await client.serve(BASE)
    cause = "the update is accepted blindly, or leaves the engine half changed"
    unknown = WeightUpdate(version=version, kind="conformance", payload=None)
    await _refused(client, unknown, "an update of kind 'conformance'", cause=cause)
    for kind in sorted(client.capabilities.weight_payloads):
        payload: Any = {"conformance": np.zeros(3)}
        if kind == "safetensors":
            payload = ["/nonexistent/model.safetensors"]
        wrong = WeightUpdate(version=version, kind=kind, payload=payload)
        await _refused(
            client, wrong, f"a {kind!r} update without the model's parameters", cause=cause
        )


async def _refused(client: CheckClient, update: WeightUpdate, what: str, *, cause: str) -> None:
    version = client.backend.policy_version
    await client.raises(WeightUpdateError, client.backend.update_weights(update), what, cause=cause)
    prompt = client.prompt(12, seed=63)
    output = await client.generate(prompt)
    versions = (client.backend.policy_version, set(output.policy_versions))
    version_cause = f"after {what}: the version changed although the weights were refused"
    assert versions == (version, {version}), version_cause
    client.assert_greedy(
        prompt, output, f"ids after {what}", cause="the refused weights were (partly) taken"
    )
