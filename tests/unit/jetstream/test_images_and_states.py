"""Images before recurrent layers: in the engine a state belongs to images, not to their ids."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from jax_agent_rl.jetstream.engine import EngineShapes, JaxEngine
from jax_agent_rl.jetstream.programs import ProgramTable
from jax_agent_rl.jetstream.scheduler import Scheduler
from jax_agent_rl.models.config import Params
from jax_agent_rl.models.vision_context import MultimodalContext
from jax_agent_rl.rollout.protocol import GenerateRequest
from jax_agent_rl.types import SamplingParams, TokenOutput
from tests.driven_engine import finished
from tests.tiny import tiny_params
from tests.tiny_vision import (
    IMAGE,
    TINY_QWEN3_5,
    picture,
    placeholders,
    seen_logprobs,
    vision_processor,
)
from tests.unit.jetstream.test_speculation import Eager, Known

SHAPES = EngineShapes(
    max_model_len=88,
    max_concurrent_decodes=3,
    kv_cache_tokens=480,
    decode_steps=4,
    prefill_buckets=(8,),
    patch_buckets=(64,),
    state_checkpoints=16,  # none gives way
)
FIRST = picture(1)
SECOND = picture(2)
WIDE = picture(3, 12, 8)
Media = Mapping[str, Sequence[Any]]
ONE: Media = {"image": [FIRST]}
OTHER: Media = {"image": [SECOND]}
COUNT = 6


def prompt_of(media: Media) -> list[int]:
    """Ids around images; they are the same for images of one size."""
    return [5, 6, 7, *placeholders(media), 8, 9]


PROMPT = prompt_of(ONE)
BEFORE = PROMPT.index(IMAGE)
"""Ids before the image."""
assert prompt_of(OTHER) == PROMPT


@functools.cache
def programs(shapes: EngineShapes) -> ProgramTable:
    """Compiled once for all tests."""
    return ProgramTable()


@functools.cache
def weights() -> Params:
    return tiny_params(config=TINY_QWEN3_5)


def scheduler(shapes: EngineShapes = SHAPES) -> Scheduler:
    engine = JaxEngine(TINY_QWEN3_5, shapes, program_table=programs(shapes), takes_images=True)
    return Scheduler(engine, engine.load_params(weights()), version=1)


def seen(ids: Sequence[int], media: Media) -> MultimodalContext:
    processor = vision_processor(TINY_QWEN3_5.vision)
    return processor.make_context(ids, processor.read(media))


def submit(
    on: Scheduler,
    name: str,
    prompt: Sequence[int],
    media: Media,
    *,
    session: str | None = None,
    **sampling: Any,
) -> None:
    chosen = {"max_tokens": COUNT, "temperature": 1.0, "seed": 7, "ignore_eos": True}
    request = GenerateRequest(
        request_id=name,
        prompt_ids=tuple(prompt),
        multi_modal=media,
        sampling=SamplingParams(**chosen | sampling),
        session_id=session,
    )
    on.submit(request, seen(prompt, media) if media else None)


def run(
    on: Scheduler, name: str, prompt: Sequence[int], media: Media, **options: Any
) -> TokenOutput:
    """Run one request to its end."""
    submit(on, name, prompt, media, **options)
    return finished(on)[name]


def assert_exact(prompt: Sequence[int], media: Media, output: TokenOutput) -> None:
    """Compare an output with one pass over all of it, without a cache: float32 rounds by 7e-5."""
    ids = [*prompt, *output.token_ids]
    scores = seen_logprobs(weights(), seen(ids, media), TINY_QWEN3_5)[len(prompt) - 1 : -1]
    expected = scores[np.arange(len(output.token_ids)), list(output.token_ids)]
    np.testing.assert_allclose(output.log_probs, expected, atol=2e-4)


def test_prompts_of_equal_ids_share_no_state_behind_different_images():
    on = scheduler()
    first = run(on, "first", PROMPT, ONE, session="a")
    assert_exact(PROMPT, ONE, first)

    # The same ids with another image share what is before it, whoever asks and however often.
    for name, session in (("other", None), ("of the same session", "a")):
        on.block_manager.reset()
        run(on, f"before {name}", PROMPT, ONE, session="a")
        other = run(on, name, PROMPT, OTHER, session=session)
        assert other.cached_tokens <= BEFORE
        assert_exact(PROMPT, OTHER, other)
        assert np.abs(np.subtract(first.log_probs, other.log_probs)).max() > 1e-2

        # Both images have their checkpoints now.
        for media in (ONE, OTHER):
            again = run(on, f"again {name} {id(media)}", PROMPT, media)
            assert again.cached_tokens == len(PROMPT) - 1
            assert_exact(PROMPT, media, again)

    # Text alone has none of them, even with the ids of an image.
    text = run(on, "text", PROMPT, {})
    assert text.cached_tokens <= BEFORE
    assert np.abs(np.subtract(first.log_probs, text.log_probs)).max() > 1e-2


def test_prompts_of_equal_ids_are_told_apart_when_they_are_admitted_together():
    on = scheduler()
    for name, media in (("one", ONE), ("other", OTHER), ("one again", ONE)):
        submit(on, name, PROMPT, media)
    outputs = finished(on)
    for name, media in (("one", ONE), ("other", OTHER), ("one again", ONE)):
        assert_exact(PROMPT, media, outputs[name])
    assert outputs["one again"].cached_tokens == len(PROMPT) - 1
    assert outputs["other"].cached_tokens <= BEFORE


def test_a_chunk_and_a_checkpoint_may_begin_within_an_image():
    on = scheduler()
    media = {"image": [WIDE, FIRST]}
    prompt = prompt_of(media)
    assert prompt[SHAPES.prefill_buckets[0] - 1] == prompt[SHAPES.prefill_buckets[0]] == IMAGE
    output = run(on, "0", prompt, media)
    assert_exact(prompt, media, output)

    # It shares the first image, and begins anew within the placeholders of the second.
    shared = {"image": [WIDE, SECOND]}
    output = run(on, "1", prompt, shared)
    assert_exact(prompt, shared, output)
    assert output.cached_tokens >= SHAPES.prefill_buckets[0]


def test_the_next_turn_begins_with_the_state_after_the_image():
    on = scheduler()
    first = run(on, "1", PROMPT, ONE, session="s")
    context = [*PROMPT, *first.token_ids, *placeholders({"image": [WIDE]}), 5]
    two_images = {"image": [FIRST, WIDE]}
    second = run(on, "2", context, two_images, session="s")
    assert second.cached_tokens == len(PROMPT) + COUNT - 1
    assert on.metrics().recomputed_tokens == 0
    assert_exact(context, two_images, second)


def test_samples_and_branches_begin_with_copies_of_the_state_after_the_image():
    on = scheduler()
    for number in range(3):
        submit(on, str(number), PROMPT, ONE, seed=number)
    outputs = finished(on)
    assert len({output.token_ids for output in outputs.values()}) == 3
    assert sorted(output.cached_tokens for output in outputs.values()) == [0, 10, 10]
    for output in outputs.values():
        assert_exact(PROMPT, ONE, output)

    branch = [*PROMPT, *outputs["0"].token_ids[:3], *placeholders(OTHER), 4]
    media = {"image": [FIRST, SECOND]}
    output = run(on, "branch", branch, media)
    assert output.cached_tokens == len(PROMPT) - 1
    assert_exact(branch, media, output)


def test_who_is_preempted_sees_its_images_again():
    asked = {"0": (prompt_of(ONE), ONE), "1": (prompt_of(OTHER), OTHER)}
    outputs = []
    for kv_cache_tokens in (128, 480):  # four pages for two contexts of three, and enough
        on = scheduler(replace(SHAPES, max_concurrent_decodes=2, kv_cache_tokens=kv_cache_tokens))
        for name, (prompt, media) in asked.items():
            submit(on, name, prompt, media, seed=int(name), max_tokens=84 - len(prompt))
        outputs.append(finished(on))
    preempted, wanted = outputs
    assert preempted["1"].num_preempted > 0
    for name, (prompt, media) in asked.items():
        assert preempted[name].token_ids == wanted[name].token_ids
        assert_exact(prompt, media, preempted[name])


def test_states_that_come_back_from_the_host_are_those_of_their_images():
    shapes = replace(
        SHAPES,
        state_checkpoints=0,
        max_concurrent_decodes=1,
        kv_cache_tokens=96,
        kv_offloading_bytes=1 << 20,
    )
    on = scheduler(shapes)
    contexts = {}
    sessions = {"one": ONE, "other": OTHER, "both": {"image": [FIRST, SECOND]}}
    for name, media in sessions.items():
        prompt = prompt_of(media)
        # Of the first two, all ids are the same.
        output = run(on, name, prompt, media, session=name, max_tokens=30)
        contexts[name] = [*prompt, *output.token_ids, 5, 6]
    assert on.host_cache.saved
    for name, media in sessions.items():
        output = run(on, f"{name} again", contexts[name], media, session=name)
        assert_exact(contexts[name], media, output)
    assert on.host_cache.restored


@pytest.mark.parametrize("wrong", [2, 100])
def test_speculation_after_an_image_leaves_the_state_after_the_accepted_ids(wrong: int):
    asked = {"0": ONE, "1": OTHER}
    plain = scheduler()
    for name, media in asked.items():
        submit(plain, name, PROMPT, media, max_tokens=20)
    wanted = finished(plain)

    on = scheduler(replace(SHAPES, num_speculative_tokens=4))
    on.speculation = Eager(on.engine, Known(wanted, wrong), on.counters)
    for name, media in asked.items():
        submit(on, name, PROMPT, media, session=name, max_tokens=20)
    outputs = finished(on)
    assert on.metrics().drafts > 0
    on.speculation = None
    for name, media in asked.items():
        assert outputs[name].token_ids == wanted[name].token_ids
        assert_exact(PROMPT, media, outputs[name])
        context = [*PROMPT, *outputs[name].token_ids, 5, 6]
        following = run(on, f"{name} again", context, media, session=name)
        assert following.cached_tokens == len(context) - 3
        assert_exact(context, media, following)
