"""The JAX engine with images, against full forward passes without a cache."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from jax_agent_rl.errors import BackendError, TokenDriftError
from jax_agent_rl.jetstream.backend import JetStreamBackend
from jax_agent_rl.jetstream.engine import EngineShapes
from jax_agent_rl.jetstream.programs import ProgramTable
from jax_agent_rl.rollout.protocol import GenerateRequest, WeightUpdate
from jax_agent_rl.types import PauseMode, SamplingParams, TokenOutput, digest_ids
from tests.messages import raises
from tests.tiny import tiny_params
from tests.tiny_vision import IMAGE, TINY_VL, picture, placeholders, seen_logprobs, vision_processor

SHAPES = EngineShapes(
    max_model_len=88,
    max_concurrent_decodes=2,
    kv_cache_tokens=480,
    decode_steps=4,
    prefill_buckets=(16,),
    patch_buckets=(32,),
)
FIRST = picture(1)
SECOND = picture(2)
WIDE = picture(3, 12, 8)
CLIP = [picture(seed) for seed in range(4, 7)]
MIXED = {"image": [SECOND, WIDE]}


@contextlib.asynccontextmanager
async def running(**options: Any):
    backend = JetStreamBackend(
        TINY_VL,
        tiny_params(config=TINY_VL),
        SHAPES,
        version=1,
        **{"vision_processor": vision_processor()} | options,
    )
    await backend.start()
    try:
        yield backend
    finally:
        await backend.close()


def asking(
    name: str, prompt: Sequence[int], media: Mapping[str, Sequence[Any]], **options: Any
) -> GenerateRequest:
    sampling = SamplingParams(
        max_tokens=options.pop("max_tokens", 6), temperature=0.0, ignore_eos=True
    )
    return GenerateRequest(
        request_id=name,
        prompt_ids=tuple(prompt),
        multi_modal=media,
        sampling=sampling,
        session_id=name,
        **options,
    )


def assert_right(
    prompt: Sequence[int], media: Mapping[str, Sequence[Any]], output: TokenOutput, seed: int = 0
) -> None:
    """Require the greedy ids, log-probs and digest of a full pass over prompt and output."""
    ids = [*prompt, *output.token_ids]
    scores = seen_logprobs(
        tiny_params(seed, TINY_VL),
        vision_processor().make_context(ids, vision_processor().read(media)),
    )[len(prompt) - 1 : -1]
    assert scores.argmax(-1).tolist() == list(output.token_ids)
    np.testing.assert_allclose(output.log_probs, scores.max(-1), atol=1e-4)
    assert output.context_digest == digest_ids(ids)


async def test_images_of_every_kind_over_two_turns_and_beside_each_other():
    """One engine for all, because it compiles for a while."""
    async with running() as backend:
        assert backend.capabilities.multi_modal == {"image", "video"}
        one_image = {"image": [FIRST]}
        prompt = [5, 6, *placeholders(one_image), 7]

        # Alone, and beside a request of text. The same ids with another image share only the text
        # before it.
        first, text = await asyncio.gather(
            backend.generate(asking("a", prompt, one_image)),
            backend.generate(asking("t", [5, 6, 7, 8], {})),
        )
        assert_right(prompt, one_image, first)
        assert_right([5, 6, 7, 8], {}, text)
        with_other_image = await backend.generate(asking("b", prompt, {"image": [SECOND]}))
        assert_right(prompt, {"image": [SECOND]}, with_other_image)
        assert with_other_image.cached_tokens == 3
        assert np.abs(np.subtract(first.log_probs, with_other_image.log_probs)).max() > 1e-2

        # The same image in another object is the same.
        again = await backend.generate(asking("c", prompt, {"image": [FIRST.copy()]}))
        assert again.cached_tokens == len(prompt) - 1
        assert again.token_ids == first.token_ids
        assert_right(prompt, one_image, again)

        # A second turn computes what is new: an image, a video, and a second image that needs a
        # look of its own.
        two_turns = {"image": [FIRST, WIDE], "video": [CLIP]}
        longer = [*prompt, *first.token_ids, *placeholders({"video": [CLIP], "image": [WIDE]}), 9]
        second = await backend.generate(asking("a", longer, two_turns))
        assert second.cached_tokens == len(prompt) + len(first.token_ids) - 1
        assert_right(longer, two_turns, second)

        # A placeholder that the model sampled is text.
        multimodal = [*prompt, IMAGE, IMAGE, 4]
        assert_right(
            multimodal, one_image, await backend.generate(asking("d", multimodal, one_image))
        )

        # New weights: what was cached is forgotten, the tower's are new, too.
        params = jax.tree.map(np.asarray, tiny_params(1, TINY_VL))
        await backend.update_weights(WeightUpdate(version=2, kind="arrays", payload=params))
        fresh = await backend.generate(asking("e", prompt, one_image))
        assert fresh.cached_tokens == 0
        assert_right(prompt, one_image, fresh, seed=1)
        assert (await backend.metrics()).recompilations == 0

        await _refusals(backend)


async def _refusals(backend: JetStreamBackend) -> None:
    media = {"image": [FIRST]}
    multimodal = placeholders(media)
    with raises(TokenDriftError, key=("request 'few'", "image 1 of 1"), value="4 placeholders"):
        await backend.generate(asking("few", [5, IMAGE, 7], media))
    with raises(BackendError, key="request 'end'", value="an image"):
        await backend.generate(asking("end", [5, *multimodal[:-1]], media))
    with raises(BackendError, value=("64 patches", 32), fix="rollout.jetstream.patch_buckets"):
        big = {"image": [picture(8, 16, 16)]}
        await backend.generate(asking("big", [5, *placeholders(big), 7], big))
    with raises(BackendError, key=("request 'none'", "image 1 of 1"), value="got str"):
        await backend.generate(asking("none", [5, *multimodal, 7], {"image": ["cat.png"]}))
    assert not (await backend.generate(asking("after", [5, *multimodal, 7], media))).stop_match
    health = await backend.health()
    assert health.ok
    assert health.running == health.waiting == 0


async def test_who_waits_again_for_pages_sees_its_images_again():
    """Two contexts of three pages in a cache of four; the second is computed again from its images
    on.
    """
    backend = JetStreamBackend(
        TINY_VL,
        tiny_params(config=TINY_VL),
        replace(SHAPES, kv_cache_tokens=128),
        version=1,
        vision_processor=vision_processor(),
    )
    await backend.start()
    try:
        asked = [
            ([5, n, *placeholders(media), 7, n], media)
            for n, media in enumerate(({"image": [FIRST]}, MIXED))
        ]
        requests = [
            asking(str(n), *prompt_and_media, max_tokens=84 - len(prompt_and_media[0]))
            for n, prompt_and_media in enumerate(asked)
        ]
        await backend.pause(
            PauseMode.KEEP
        )  # images are read in threads: the first request is to be queued first
        tasks = []
        for number, request in enumerate(requests, 1):
            tasks.append(asyncio.create_task(backend.generate(request)))
            while (await backend.health()).waiting < number:
                await asyncio.sleep(0.01)
        await backend.resume()
        outputs = await asyncio.gather(*tasks)
        for prompt_and_media, output in zip(asked, outputs, strict=True):
            assert_right(*prompt_and_media, output)
        assert [output.num_preempted > 0 for output in outputs] == [False, True]
    finally:
        await backend.close()


async def test_a_request_whose_images_are_still_read_can_be_aborted():
    async with running() as backend:
        media = {"image": [FIRST]}
        task = asyncio.create_task(
            backend.generate(asking("r", [5, *placeholders(media), 7], media, max_tokens=60))
        )
        await asyncio.sleep(0)  # it has begun to read
        assert await backend.abort("r") or task.done()
        await task


async def test_a_deterministic_engine_takes_text_alone():
    shapes = replace(SHAPES, max_concurrent_decodes=1, kv_cache_tokens=96)
    backend = JetStreamBackend(
        TINY_VL,
        tiny_params(config=TINY_VL),
        shapes,
        vision_processor=vision_processor(),
        deterministic=ProgramTable(),
    )
    assert not backend.capabilities.multi_modal
    await backend.start()
    try:
        prompt = [5, 6, 7]
        assert_right(prompt, {}, await backend.generate(asking("t", prompt, {})))
        media = {"image": [FIRST]}
        with raises(BackendError, value="images"):
            await backend.generate(asking("p", [5, *placeholders(media), 7], media))
    finally:
        await backend.close()
