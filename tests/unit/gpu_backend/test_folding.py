"""Placeholders on their way into vLLM and back; vLLM itself is not needed."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from gpu_backend.requests import check_conditioned, fold, vllm_media
from jax_agent_rl.errors import BackendError, TokenDriftError
from jax_agent_rl.rollout.protocol import GenerateRequest
from jax_agent_rl.types import SamplingParams
from tests.messages import raises

PLACEHOLDERS = {"image": 7, "video": 8}
IMAGE = Image.new("RGB", (4, 2))


def request(ids, **media) -> GenerateRequest:
    return GenerateRequest(
        request_id="r",
        prompt_ids=tuple(ids),
        sampling=SamplingParams(max_tokens=1),
        multi_modal=media,
    )


@given(
    items=st.lists(st.tuples(st.sampled_from(["image", "video"]), st.integers(1, 9)), max_size=6),
    text=st.lists(st.integers(10, 20), min_size=1, max_size=4),
    tail=st.lists(st.sampled_from([7, 8, 11]), max_size=6),
)
def test_folding_undoes_writing_out_and_leaves_what_follows_alone(items, text, tail):
    folded = list(text)
    expanded = list(text)
    for kind, count in items:
        folded += [PLACEHOLDERS[kind], *text]
        expanded += [PLACEHOLDERS[kind]] * count + text
    counts = {kind: sum(k == kind for k, _ in items) for kind in PLACEHOLDERS}
    assert fold(expanded + tail, counts, PLACEHOLDERS) == folded + tail


def test_a_video_is_its_frames_and_their_times():
    media = vllm_media(request([8], video=([IMAGE] * 4,), image=(IMAGE,)))
    ((frames, times),) = media["video"]
    assert frames.shape == (4, 2, 4, 3)
    assert (times["fps"], times["duration"]) == (2.0, 2.0)
    assert times["frames_indices"] == [0, 1, 2, 3]
    assert not times["do_sample_frames"]
    assert media["image"][0].size == (4, 2)


def test_what_is_no_picture_is_refused_with_the_request():
    with raises(BackendError, key="request 'r'", fix="a PIL image"):
        vllm_media(request([7], image=("cat.png",)))


def test_any_other_context_is_refused():
    good = request([1, 7, 7, 2], image=(IMAGE,))
    check_conditioned(good, [1, 7, 7, 2], PLACEHOLDERS)
    with raises(TokenDriftError, value=("3 ids", "2 image placeholders", "vLLM has 1")):
        check_conditioned(good, [1, 7, 2], PLACEHOLDERS)
    with pytest.raises(TokenDriftError):
        check_conditioned(good, [1, 7, 7, 3], PLACEHOLDERS)
