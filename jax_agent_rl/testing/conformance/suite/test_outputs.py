"""A single request: its ids, their log-probs, how it ends, and the images in its context."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from jax_agent_rl.errors import BackendError, PromptTooLongError
from jax_agent_rl.testing.conformance.client import CheckClient, CheckFailed
from jax_agent_rl.testing.conformance.models import log_softmax
from jax_agent_rl.testing.conformance.runner import check
from jax_agent_rl.types import StopReason, TokenOutput, digest_ids
from jax_agent_rl.types.token_ids import ID_BOUND

_MAX_ANSWER = 48


@check()
async def test_greedy_matches_reference(client: CheckClient) -> None:
    """Temperature 0 gives the ids of a full forward pass over the same weights."""
    prompts = [client.prompt(length, seed=1) for length in (1, 3, 17, 40, 90)]
    outputs = await client.gather(prompts, max_tokens=16)
    for prompt, output in zip(prompts, outputs, strict=True):
        what = f"greedy continuation of a prompt of {len(prompt)} ids"
        cause = "wrong weights, positions off by one, or KV of another request is read"
        client.assert_greedy(prompt, output, what, cause=cause)
        assert len(output.token_ids) == 16, "max_tokens or ignore_eos is not honoured"


@check("logprobs")
async def test_greedy_logprobs(client: CheckClient) -> None:
    """Greedy log-probs are of temperature 1."""
    prompt = client.prompt(20, seed=2)
    output = await client.generate(prompt, max_tokens=16)
    cause = "greedy log-probs are reported as 0, or scaled by 1/epsilon"
    client.assert_logprobs(prompt, output, "log-probs at temperature 0", cause=cause)


@check("logprobs")
async def test_logprobs_temperature(client: CheckClient) -> None:
    """Log-probs are of the distribution after temperature."""
    prompt = client.prompt(20, seed=3)
    cause = "raw log-probs (before temperature) are reported, or they are shifted by one position"
    temperatures = [1.0]
    if client.capabilities.any_sampling:
        temperatures += [0.6, 1.4]
    for temperature in temperatures:
        output = await client.generate(prompt, max_tokens=24, temperature=temperature, seed=11)
        client.assert_logprobs(
            prompt,
            output,
            f"log-probs at temperature {temperature:g}",
            cause=cause,
            temperature=temperature,
        )


@check("scoring")
async def test_scores_match_reference(client: CheckClient) -> None:
    """Scores of given ids, and of the likeliest ids, are those of a full forward pass."""
    for length, start, top_k in ((2, 1, 0), (40, 1, 3), (client.room, 17, 3)):
        ids = client.prompt(length, seed=5)
        scores = await client.backend.score(ids, start=start, top_k=top_k)
        logits = client.subject.reference.logits(ids[:-1], weights=client.serving)[start - 1 :]
        logprobs_TV = log_softmax(np.asarray(logits, np.float64))
        logprobs_T = logprobs_TV[np.arange(len(logprobs_TV)), ids[start:]]
        top_logprobs_TK = -np.sort(-logprobs_TV, axis=-1)[:, :top_k]

        # The ids are compared by their log-probs, because equally likely ones may differ.
        top_ids_TK = np.asarray(scores.top_ids, np.int64).reshape(len(logprobs_TV), top_k)
        logprobs_of_top_ids_TK = np.take_along_axis(logprobs_TV, top_ids_TK, axis=1)
        reported_TK = np.reshape(scores.top_log_probs, top_logprobs_TK.shape)
        for what, expected, got in (
            ("log-probs of ids", logprobs_T, scores.log_probs),
            ("log-probs of the likeliest ids", top_logprobs_TK, reported_TK),
            ("the likeliest ids", top_logprobs_TK, logprobs_of_top_ids_TK),
        ):
            if (
                np.shape(got) != expected.shape
                or np.abs(expected - got).max(initial=0.0) > client.subject.tolerance
            ):
                raise CheckFailed(
                    f"{what} of a context of {length} from id {start} on",
                    expected=np.round(expected[:4], 3).tolist(),
                    got=np.round(np.asarray(got)[:4], 3).tolist(),
                    cause="they are shifted by one position, or of a temperature",
                )


@check("logprobs", "any_sampling")
async def test_logprobs_top_p(client: CheckClient) -> None:
    """With top-p, ids are in the nucleus and log-probs are normalized over it."""
    prompt = client.prompt(20, seed=4)
    cause = (
        "log-probs of the untruncated distribution are reported, or top-p is applied before"
        " temperature"
    )
    for top_p, temperature in ((0.7, 1.0), (0.9, 1.3)):
        sampling: dict[str, Any] = {"temperature": temperature, "top_p": top_p}
        output = await client.generate(prompt, max_tokens=24, seed=12, **sampling)
        client.assert_logprobs(prompt, output, f"log-probs at {sampling}", cause=cause, **sampling)


@check("logprobs", "any_sampling")
async def test_logprobs_top_k(client: CheckClient) -> None:
    """With top-k, ids are among the k most likely and log-probs are normalized over them."""
    prompt = client.prompt(20, seed=5)
    sampling: dict[str, Any] = {"temperature": 1.2, "top_k": 4}
    output = await client.generate(prompt, max_tokens=24, seed=13, **sampling)
    cause = "log-probs of the untruncated distribution are reported, or top-k is ignored"
    client.assert_logprobs(prompt, output, f"log-probs at {sampling}", cause=cause, **sampling)


@check("logprobs", "any_sampling")
async def test_logprobs_min_p(client: CheckClient) -> None:
    """With min-p, ids are nearly as likely as the likeliest; log-probs are normalized over them."""
    prompt = client.prompt(20, seed=14)
    sampling: dict[str, Any] = {"temperature": 1.3, "min_p": 0.2}
    output = await client.generate(prompt, max_tokens=24, seed=18, **sampling)
    cause = (
        "min-p is ignored, or its threshold is not relative to the likeliest id after temperature"
    )
    client.assert_logprobs(prompt, output, f"log-probs at {sampling}", cause=cause, **sampling)


@check()
async def test_ids_in_ids_out(client: CheckClient) -> None:
    """Exactly the given ids are conditioned on; every sampled id has a log-prob and a version."""
    with_eos = [
        *client.prompt(6, seed=6),
        *sorted(client.subject.eos_ids)[:1],
        *client.prompt(5, seed=7),
    ]
    repeated = [with_eos[0]] * 9  # decoding and encoding again would merge or split these
    for prompt in (with_eos, repeated, client.prompt(33, seed=8)):
        output = await client.generate(prompt, max_tokens=12, temperature=1.0, seed=5)
        digest = digest_ids([*prompt, *output.token_ids])
        assert output.context_digest == digest, (
            "the prompt went through text, or ids were added or cut"
        )

        invalid = []
        for token in output.token_ids:
            if type(token) is not int or not 0 <= token < client.subject.vocab_size:
                invalid.append(token)
        assert invalid == [], "padding ids or array scalars leak into the output"
        assert set(output.policy_versions) == {client.backend.policy_version}, (
            "versions are not of the served weights"
        )


@check()
async def test_bad_ids_refused(client: CheckClient) -> None:
    """Ids outside the vocabulary raise a BackendError for this request alone."""
    cause = (
        "ids are not checked before they index the embedding: an engine reads garbage or dies of it"
    )
    for bad in (client.subject.vocab_size, -1):
        await client.raises(
            BackendError, client.generate([5, bad]), f"a prompt with id {bad}", cause=cause
        )
    prompt = client.prompt(5, seed=9)
    output = await client.generate(prompt)
    client.assert_greedy(
        prompt,
        output,
        "a request after a refused one",
        cause="the refused one broke the engine",
    )


@check()
async def test_extreme_values_are_isolated(client: CheckClient) -> None:
    """Extreme values in a request are served or refused, and do not affect other requests."""
    count = client.room - 24
    prompt = client.prompt(8, seed=13)
    concurrent = (await client.started(prompt, max_tokens=count)).task
    cause = (
        "values are not checked before they reach the engine's arrays: one request ends all others"
    )
    for extreme in (
        {"top_k": ID_BOUND - 1, "temperature": 1.0},
        {"stop_token_ids": (ID_BOUND - 1,)},
    ):
        with contextlib.suppress(BackendError):
            await client.within(
                60,
                client.begin(prompt, **extreme),
                f"an answer to a request of {extreme}",
                cause=cause,
            )
    assert len((await concurrent).token_ids) == count, cause
    after = await client.generate(prompt)
    client.assert_greedy(prompt, after, "a request after them", cause=cause)


@check()
async def test_prompt_too_long(client: CheckClient) -> None:
    """Too long a prompt raises PromptTooLongError with its length and the limit."""
    limit = client.capabilities.max_model_len
    for length in (limit, limit + 7):
        request = client.generate(client.prompt(length, seed=10))
        what = f"a prompt of {length} ids with max_model_len={limit}"
        cause = "the prompt is truncated silently, or the engine's own error is not translated"
        message = str(await client.raises(PromptTooLongError, request, what, cause=cause))
        assert str(length) in message, "a message without numbers cannot be acted on"
        assert str(limit) in message, "a message without numbers cannot be acted on"


@check()
async def test_context_limit(client: CheckClient) -> None:
    """When the context is full, a generation ends with LENGTH."""
    output = await client.generate(
        client.prompt(client.capabilities.max_model_len - 3, seed=11), max_tokens=50
    )
    cause = "the last position is left unused, or the prompt was cut to make room"
    assert (len(output.token_ids), output.stop_reason) == (3, StopReason.LENGTH), cause


@check("streaming")
async def test_streaming_chunks(client: CheckClient) -> None:
    """Chunks add up to the final output and arrive before the end."""
    prompt = client.prompt(12, seed=12)
    request = client.request(prompt, max_tokens=60, temperature=1.0, seed=3)
    async with client.streaming(request) as stream:
        chunks = [chunk async for chunk in stream]
    final = chunks[-1].final
    finals = [chunk.final is not None for chunk in chunks]
    assert finals == [False] * (len(chunks) - 1) + [True], (
        "the stream goes on after its end, or lacks a result"
    )
    for name in ("token_ids", "log_probs", "policy_versions"):
        joined = ()
        for chunk in chunks:
            joined += getattr(chunk, name)
        assert joined == getattr(final, name), f"{name}: a chunk is lost, repeated or reordered"
    assert len(chunks) > 1, "the output is buffered"


@check()
async def test_eos_kept(client: CheckClient) -> None:
    """EOS ends a generation and is its last id, with its log-prob, even at max_tokens."""
    prompt, whole = await _find_ending(client)
    for limit in (_MAX_ANSWER, len(whole)):
        output = await client.generate(prompt, max_tokens=limit, ignore_eos=False)
        what = f"an answer of {len(whole)} ids, max_tokens={limit}"
        assert output.token_ids == whole, f"{what}: EOS is dropped, or does not end the generation"
        cause = f"{what}: the reason is derived from the length, or EOS is reported as a stop id"
        assert (output.stop_reason, output.stop_match) == (StopReason.EOS, None), cause
        if client.capabilities.logprobs:
            cause = "the log-prob of EOS is missing or shifted"
            client.assert_logprobs(prompt, output, f"{what}: log-probs", cause=cause)


@check()
async def test_stop_token_ids(client: CheckClient) -> None:
    """Extra stop ids end a generation, are kept, and are named in stop_match."""
    prompt = client.prompt(10, seed=20)
    whole = (await client.generate(prompt, max_tokens=12)).token_ids
    stop = whole[4]
    output = await client.generate(prompt, max_tokens=12, stop_token_ids=(stop,))
    assert output.token_ids == whole[: whole.index(stop) + 1], (
        "stop ids are ignored, or the stop id is dropped"
    )
    cause = "a stop id is reported as EOS or without its name"
    assert (output.stop_reason, output.stop_match) == (StopReason.STOP, str(stop)), cause


@check("stop_strings")
async def test_stop_strings(client: CheckClient) -> None:
    """Stop strings end a generation at the id that completes them; ids up to it are kept."""
    decode = client.subject.decode_text
    if decode is None:
        pytest.skip("the suite was given no tokenizer to decode with")
    prompt = client.prompt(10, seed=21)
    whole = (await client.generate(prompt, max_tokens=24)).token_ids
    texts = [decode(whole[:n]) for n in range(len(whole) + 1)]
    stop = _text_across_ids(texts)
    cut = next(n for n, text in enumerate(texts) if stop in text)
    output = await client.generate(prompt, max_tokens=24, stop=("\x00never\x00", stop))
    cause = (
        f"ids that make up {stop!r} in {texts[-1]!r} are cut off, or it is looked for in single ids"
        " only"
    )
    assert output.token_ids == whole[:cut], cause
    assert (output.stop_reason, output.stop_match) == (
        StopReason.STOP,
        stop,
    ), "the matching string is not reported"


@check()
async def test_max_tokens_exact(client: CheckClient) -> None:
    """Exactly max_tokens ids, with LENGTH, if nothing else ends the generation."""
    limits = (1, 2, 3, 7, 16, 33)
    prompt = client.prompt(9, seed=22)
    tasks = [client.begin(prompt, max_tokens=limit, temperature=1.0) for limit in limits]
    cause = "the first or last id is not counted, or a whole dispatch of several steps is returned"
    for limit, output in zip(limits, await asyncio.gather(*tasks), strict=True):
        assert (len(output.token_ids), output.stop_reason) == (limit, StopReason.LENGTH), cause


async def _find_ending(client: CheckClient) -> tuple[list[int], tuple[int, ...]]:
    """Find a prompt after which a greedy generation reaches EOS, or else skip the test.

    Returns:
        The prompt, and the ids that are generated after it, up to EOS.
    """
    candidates = [list(prompt) for prompt in client.subject.ending_prompts]
    candidates += [client.prompt(5, seed=100 + i) for i in range(64)]

    for begin in range(0, len(candidates), 16):
        prompts = candidates[begin : begin + 16]
        outputs = await client.gather(prompts, max_tokens=_MAX_ANSWER)
        for prompt, output in zip(prompts, outputs, strict=True):
            is_eos = [token in client.subject.eos_ids for token in output.token_ids]
            if True not in is_eos:
                continue

            count = is_eos.index(True) + 1
            if count > 2:
                client.assert_greedy(
                    prompt,
                    output,
                    "greedy ids with ignore_eos",
                    cause="wrong ids, see greedy checks",
                )
                return prompt, output.token_ids[:count]

    pytest.skip(f"no prompt tried leads this model to EOS within {_MAX_ANSWER} greedy ids")


def _text_across_ids(texts: list[str]) -> str:
    """Find a string that spans the texts of two ids; ``texts`` are those of each prefix."""
    for n in range(3, len(texts) - 1):
        begin = max(0, len(texts[n]) - 1)
        piece = texts[n + 1][begin : len(texts[n]) + 1]
        if len(piece) == 2 and piece.isprintable() and "\ufffd" not in texts[n + 1]:
            return piece
    pytest.skip("the greedy output holds no clean text to stop at")


_SIDE = 56
"""Width and height of the images, in pixels."""
_IDS_BEFORE = 12
"""Ids before the first image."""
_SHARED = "what was computed of one image is used for another"


@check("multi_modal:image")
async def test_images_condition_output(client: CheckClient) -> None:
    """Ids after an image depend on the image and its place, and on nothing else."""
    first = _image(1)
    second = _image(2)
    tolerance = client.subject.tolerance
    prompt = _image_prompt(client, 1)
    output = await _generate(client, prompt, first)
    repeated = await _generate(client, prompt, first.copy())
    assert _distance(repeated, output) <= tolerance, _SHARED
    other = await _generate(client, prompt, second)
    cause = "images are ignored, or replaced by others of their size"
    assert _distance(other, output) > tolerance, cause

    prompt = _image_prompt(client, 2)
    ordered = await _generate(client, prompt, first, second)
    swapped = await _generate(client, prompt, second, first)
    assert _distance(swapped, ordered) > tolerance, "images are put in places of others"


@check("multi_modal:image", "prefix_reuse")
async def test_images_and_prefixes(client: CheckClient) -> None:
    """KV after an image is reused for that image only."""
    first = _image(3)
    second = _image(4)
    prompt = _image_prompt(client, 1)
    await client.backend.reset_prefix_cache()
    cold = await _generate(client, prompt, second)
    await client.backend.reset_prefix_cache()
    await _generate(client, prompt, first)
    warm = await _generate(client, prompt, second)
    assert _distance(warm, cold) <= client.subject.tolerance, _SHARED
    # One id more may introduce the image.
    assert warm.cached_tokens <= _IDS_BEFORE + 1, "the cache compares ids alone"


@check("multi_modal:image")
async def test_images_miscounted_refused(client: CheckClient) -> None:
    """Contexts with fewer placeholders than their image takes are refused."""
    prompt = _image_prompt(client, 1)
    prompt.remove(_media(client).placeholders["image"])
    cause = (
        "the engine writes placeholders out itself, so what it conditions on is not what the"
        " learner has"
    )
    await client.raises(
        Exception,
        _generate(client, prompt, _image(5)),
        "an image short of a placeholder",
        cause=cause,
    )


def _media(client: CheckClient) -> Any:
    if client.subject.media is None:
        pytest.skip("how many ids an image takes is not known for this model")
    return client.subject.media


def _image(seed: int) -> Any:
    from PIL import Image

    rng = np.random.default_rng(seed)
    return Image.fromarray(rng.integers(0, 256, (_SIDE, _SIDE, 3), dtype=np.uint8))


def _image_prompt(client: CheckClient, images: int) -> list[int]:
    """Return ids of text and of images of one size, each followed by text."""
    media = _media(client)
    ids = client.prompt(_IDS_BEFORE, seed=60)
    for number in range(images):
        ids += [media.placeholders["image"], *client.prompt(6, seed=61 + number)]
    return media.expand(ids, {"image": [_image(0)] * images})


async def _generate(client: CheckClient, prompt: list[int], *images: Any) -> TokenOutput:
    request = replace(client.request(prompt), multi_modal={"image": images})
    output = await client.backend.generate(request)
    digest = digest_ids([*prompt, *output.token_ids])
    assert output.context_digest == digest, (
        "the engine conditioned on other placeholders than it was given"
    )
    return output


def _distance(a: TokenOutput, b: TokenOutput) -> float:
    """Return the largest log-prob difference over the ids that both outputs begin with."""
    common = 0
    for id_a, id_b in zip(a.token_ids, b.token_ids, strict=True):
        if id_a != id_b:
            break
        common += 1
    if not common:
        return float("inf")
    differences = np.subtract(a.log_probs[:common], b.log_probs[:common])
    return float(np.abs(differences).max())
