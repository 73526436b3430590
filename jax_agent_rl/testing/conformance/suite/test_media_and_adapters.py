"""What a context is read with beside its ids: images, and a LoRA adapter."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from jax_agent_rl.testing.conformance.backends import ADAPTED, ADAPTER
from jax_agent_rl.testing.conformance.probe import Probe
from jax_agent_rl.testing.conformance.runner import check
from jax_agent_rl.types import TokenOutput, digest_ids

_SIDE = 56  # pixels of the images
_IDS_BEFORE = 12  # ids before the first image
_SHARED = "what was computed of one image is used for another"


@check("multi_modal:image")
async def test_images_condition_output(probe: Probe) -> None:
    """Ids after an image depend on the image and its place, and on nothing else."""
    first, second = _image(1), _image(2)
    prompt, tolerance = _image_prompt(probe, 1), probe.subject.tolerance
    one = await _generate(probe, prompt, first)
    assert _distance(await _generate(probe, prompt, first.copy()), one) <= tolerance, _SHARED
    cause = "images are ignored, or replaced by others of their size"
    assert _distance(await _generate(probe, prompt, second), one) > tolerance, cause
    prompt = _image_prompt(probe, 2)
    ordered, swapped = await _generate(probe, prompt, first, second), await _generate(probe, prompt, second, first)
    assert _distance(swapped, ordered) > tolerance, "images are put in places of others"


@check("multi_modal:image", "prefix_reuse")
async def test_images_and_prefixes(probe: Probe) -> None:
    """KV after an image is reused for that image only."""
    first, second = _image(3), _image(4)
    prompt = _image_prompt(probe, 1)
    await probe.backend.reset_prefix_cache()
    cold = await _generate(probe, prompt, second)
    await probe.backend.reset_prefix_cache()
    await _generate(probe, prompt, first)
    warm = await _generate(probe, prompt, second)
    assert _distance(warm, cold) <= probe.subject.tolerance, _SHARED
    assert warm.cached_tokens <= _IDS_BEFORE + 1, "the cache compares ids alone"  # one id may introduce the image


@check("multi_modal:image")
async def test_images_miscounted_refused(probe: Probe) -> None:
    """Contexts with fewer placeholders than their image takes are refused."""
    prompt = _image_prompt(probe, 1)
    prompt.remove(_media(probe).placeholders["image"])
    cause = "the engine writes placeholders out itself, so what it conditions on is not what the learner has"
    await probe.raises(Exception, _generate(probe, prompt, _image(5)), "an image short of a placeholder", cause=cause)


@check("lora")
async def test_adapters(probe: Probe) -> None:
    """Only requests that name an adapter sample from the model with it merged in."""
    prompt, cause = _adapter_prompt(probe, seed=60), "the adapter is not applied, or scaled or laid out wrongly"
    plain, adapted = await asyncio.gather(*(probe.begin(prompt, lora=name) for name in (None, ADAPTER)))
    probe.assert_logprobs(prompt, adapted, "log-probs with an adapter", cause=cause, weights=ADAPTED)
    cause = "an adapter leaks into requests that run beside it"
    probe.assert_logprobs(prompt, plain, "log-probs of the plain model", cause=cause)
    unknown = probe.generate(prompt, lora="unknown")
    await probe.raises(Exception, unknown, "a request with an unknown adapter", cause="it is served without one")


@check("lora", "prefix_reuse")
async def test_adapters_and_prefixes(probe: Probe) -> None:
    """KV is reused under the adapter that computed it, and under no other."""
    prompt = _adapter_prompt(probe, seed=61)
    first = await probe.generate(prompt)
    adapted, again = await probe.generate(prompt, lora=ADAPTER), await probe.generate(prompt, lora=ADAPTER)
    assert (first.cached_tokens, adapted.cached_tokens) == (0, 0), "prefixes are compared by ids alone"
    assert again.cached_tokens > 0, "requests with adapters never find what was cached"
    cause = "the KV reused is of another adapter"
    probe.assert_logprobs(prompt, again, "log-probs on a reused prefix", cause=cause, weights=ADAPTED)


def _adapter_prompt(probe: Probe, *, seed: int) -> list[int]:
    if not probe.subject.adapter:
        pytest.skip("the backend serves no adapter of the suite; built-in ones do with --adapters")
    return probe.prompt(64, seed=seed)


def _media(probe: Probe) -> Any:
    if probe.subject.media is None:
        pytest.skip("how many ids an image takes is not known for this model")
    return probe.subject.media


def _image(seed: int) -> Any:
    from PIL import Image

    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (_SIDE, _SIDE, 3), dtype=np.uint8))


def _image_prompt(probe: Probe, images: int) -> list[int]:
    """Return ids of text and of images of one size, each followed by text."""
    media = _media(probe)
    ids = probe.prompt(_IDS_BEFORE, seed=60)
    for number in range(images):
        ids += [media.placeholders["image"], *probe.prompt(6, seed=61 + number)]
    return media.expand(ids, {"image": [_image(0)] * images})


async def _generate(probe: Probe, prompt: list[int], *images: Any) -> TokenOutput:
    output = await probe.backend.generate(replace(probe.request(prompt), multi_modal={"image": images}))
    digest = digest_ids([*prompt, *output.token_ids])
    assert output.context_digest == digest, "the engine conditioned on other placeholders than it was given"
    return output


def _distance(a: TokenOutput, b: TokenOutput) -> float:
    """Return the largest log-prob difference, in nats, over the ids that both outputs begin with."""
    same = next((i for i, (x, y) in enumerate(zip(a.token_ids, b.token_ids, strict=True)) if x != y), len(a.token_ids))
    if not same:
        return float("inf")
    return float(np.abs(np.subtract(a.log_probs[:same], b.log_probs[:same])).max())
