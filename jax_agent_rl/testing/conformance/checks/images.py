"""Images: a context's images condition the model as its ids do."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from jax_agent_rl.testing.conformance.check import check
from jax_agent_rl.testing.conformance.probe import DoesNotApply, Probe
from jax_agent_rl.types import TokenOutput, digest_ids

_SIDE = 56  # pixels of the images
_BEFORE = 12  # ids before the first image


@check("images-are-seen", needs=["multi_modal:image"])
async def seen(probe: Probe) -> None:
    """Ids after an image depend on the image and its place, and on nothing else."""
    first, second = _image(1), _image(2)
    prompt = _prompt(probe, 1)
    one = await _shown(probe, prompt, first)
    _equal(probe, await _shown(probe, prompt, first.copy()), one, "the same image again", cause=_OTHERS)
    _differ(probe, await _shown(probe, prompt, second), one, "another image of that size", cause=_BLIND)
    both = _prompt(probe, 2)
    forth, back = await _shown(probe, both, first, second), await _shown(probe, both, second, first)
    _differ(probe, back, forth, "two images in the other order", cause="images are put in places of others")


@check("images-and-prefixes", needs=["multi_modal:image", "prefix_reuse"])
async def prefixes(probe: Probe) -> None:
    """KV after an image is reused for that image only."""
    first, second = _image(3), _image(4)
    prompt = _prompt(probe, 1)
    await probe.backend.reset_prefix_cache()
    cold = await _shown(probe, prompt, second)
    await probe.backend.reset_prefix_cache()
    await _shown(probe, prompt, first)
    warm = await _shown(probe, prompt, second)
    _equal(probe, warm, cold, "an image after another in the same context", cause=_OTHERS)
    probe.expect(
        warm.cached_tokens <= _BEFORE + 1,  # one id may introduce the image
        "ids reused of a context that showed another image",
        expected=f"at most {_BEFORE + 1}, those before it",
        got=warm.cached_tokens,
        cause="the cache compares ids alone",
    )


@check("images-miscounted-refused", needs=["multi_modal:image"])
async def miscounted(probe: Probe) -> None:
    """Contexts with fewer placeholders than their image takes are refused."""
    placeholder = _media(probe).placeholders["image"]
    prompt = _prompt(probe, 1)
    prompt.remove(placeholder)
    await probe.raises(
        Exception,
        _shown(probe, prompt, _image(5)),
        "an image with a placeholder too few",
        cause="the engine writes placeholders out itself, so what it conditions on is not what the learner has",
    )


_BLIND = "images are ignored, or replaced by others of their size"
_OTHERS = "what was computed of one image is used for another"


def _media(probe: Probe) -> Any:
    if probe.subject.media is None:
        raise DoesNotApply("how many ids an image takes is not known for this model")
    return probe.subject.media


def _image(seed: int) -> Any:
    from PIL import Image

    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (_SIDE, _SIDE, 3), dtype=np.uint8))


def _prompt(probe: Probe, images: int) -> list[int]:
    """Return ids of text and of images of one size, each followed by text."""
    media = _media(probe)
    ids = probe.prompt(_BEFORE, seed=60)
    for number in range(images):
        ids += [media.placeholders["image"], *probe.prompt(6, seed=61 + number)]
    return media.expand(ids, {"image": [_image(0)] * images})


async def _shown(probe: Probe, prompt: list[int], *images: Any) -> TokenOutput:
    output = await probe.backend.generate(replace(probe.request(prompt), multi_modal={"image": images}))
    probe.equal(
        output.context_digest,
        digest_ids([*prompt, *output.token_ids]),
        "the digest of a context with images",
        cause="the engine conditioned on other placeholders than it was given",
    )
    return output


def _distance(a: TokenOutput, b: TokenOutput) -> float:
    """Return the largest log-prob difference over the ids that both outputs begin with."""
    same = next((i for i, (x, y) in enumerate(zip(a.token_ids, b.token_ids, strict=True)) if x != y), len(a.token_ids))
    if not same:
        return float("inf")
    return float(np.abs(np.subtract(a.log_probs[:same], b.log_probs[:same])).max())


def _equal(probe: Probe, got: TokenOutput, expected: TokenOutput, what: str, *, cause: str) -> None:
    distance = _distance(got, expected)
    same = distance <= probe.subject.tolerance
    probe.expect(same, what, expected="the same log-probs", got=f"{distance:.2e} nats between", cause=cause)


def _differ(probe: Probe, got: TokenOutput, other: TokenOutput, what: str, *, cause: str) -> None:
    distance = _distance(got, other)
    another = distance > probe.subject.tolerance
    probe.expect(another, what, expected="other log-probs", got=f"{distance:.2e} nats between", cause=cause)
