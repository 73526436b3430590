"""Images in a row's prompt: where they stand in the ids, who gets them, and what people read of
them.
"""

import io
from base64 import b64decode

import pytest
from PIL import Image

from jax_agent_rl.agents import SingleTurnAgent
from jax_agent_rl.agents.command.task import read_task
from jax_agent_rl.agents.conversation import plain_messages
from jax_agent_rl.agents.episode import Episode
from jax_agent_rl.agents.frameworks import graph_messages
from jax_agent_rl.agents.prompt import openai_prompt
from jax_agent_rl.errors import BackendError, DataError
from jax_agent_rl.observe.run_dir import trajectory_record
from jax_agent_rl.rollout.protocol import Capabilities
from jax_agent_rl.types import FinishReason, Fork, SamplingParams
from tests.agent_testbed import (
    ROW,
    AgentHarness,
    assert_token_exact,
    branch_request,
    episode_request,
)
from tests.fakes import FakeCodec
from tests.messages import raises

SEES = Capabilities(max_model_len=4096, max_concurrent=8, multi_modal=frozenset({"image"}))


def png(width: int, height: int) -> bytes:
    stream = io.BytesIO()
    Image.new("RGB", (width, height)).save(stream, format="PNG")
    return stream.getvalue()


def row(first: bytes = png(4, 3)) -> dict:
    parts = [
        {"type": "text", "text": "is"},
        {"type": "image", "image": first},
        {"type": "text", "text": "like"},
        {"type": "image", "image": png(2, 2)},
    ]
    return {"prompt": [{"role": "user", "content": parts}], "data_source": "x"}


def harness(script=("so 3",)) -> AgentHarness:
    codec = FakeCodec(modalities=frozenset({"image"}))
    return AgentHarness(SingleTurnAgent, list(script), codec=codec, capabilities=SEES)


def sizes(media) -> list:
    return [image.size for image in media["image"]]


async def test_a_prompts_images_stand_between_its_words_for_engine_and_learner():
    it = harness()
    trajectory = await it.run(row())
    (request,) = it.backend.requests
    assert_token_exact(trajectory, [request])
    assert it.codec.decode(trajectory.prompt_ids) == "user: is <image> like <image>assistant:"
    assert (
        sizes(request.multi_modal)
        == sizes(trajectory.prompt_media)
        == sizes(trajectory.multi_modal)
        == [(4, 3), (2, 2)]
    )


async def test_messages_are_text_with_the_kinds_shown_and_records_hold_no_bytes():
    trajectory = await harness().run(row())
    assert trajectory.messages[0] == {
        "role": "user",
        "content": "islike",
        "media": ["image", "image"],
    }
    record = trajectory_record(trajectory, step=1, split="train")
    assert record["prompt_media"] == {"image": 2}
    assert "PNG" not in repr(record)


async def test_every_turn_and_branch_sees_the_prompts_images():
    it = harness(script=["one", "so 3", "so 4"])
    sampling = SamplingParams(max_tokens=50, seed=0)
    request = episode_request(row(), sampling)
    episode = Episode(it.context, request, agent_name="x", tools={})
    await episode.generate()
    assert episode.append([{"role": "user", "content": "and now?"}])
    await episode.generate()
    assert [sizes(request.multi_modal) for request in it.backend.requests] == [[(4, 3), (2, 2)]] * 2
    parent = episode.finish(FinishReason.ANSWER)
    fork = Fork(tree_id="t", parent_id="t", turns=1, tokens=0)
    request = branch_request(parent, fork, sampling)
    branch = Episode(it.context, request, agent_name="x", tools={})
    await branch.generate()
    assert sizes(it.backend.requests[-1].multi_modal) == [(4, 3), (2, 2)]
    assert sizes(branch.finish(FinishReason.ANSWER).prompt_media) == [(4, 3), (2, 2)]


async def test_images_stay_where_they_are_when_the_prompt_is_extended():
    it = harness()
    asked = episode_request(row(), SamplingParams(max_tokens=9))
    episode = Episode(it.context, asked, agent_name="x", tools={})
    episode.extend_prompt([{"role": "user", "content": "go"}])
    await episode.generate()
    (request,) = it.backend.requests
    assert it.codec.decode(request.prompt_ids) == "user: is <image> like <image>user: goassistant:"
    assert sizes(request.multi_modal) == [(4, 3), (2, 2)]


async def test_an_image_that_cannot_be_read_loses_the_trajectory_with_words():
    with raises(DataError, key="the prompt", value="an image"):
        await harness().run(row(first=b"no image"))


def test_agents_of_ones_own_code_get_images_as_openais_api_takes_them():
    """Back through the endpoint's reader, they are the same files in the same places."""
    (message,) = openai_prompt(row())
    (plain,) = plain_messages([message], modalities=frozenset({"image"}))
    assert [part.get("text", part["type"]) for part in plain["content"]] == [
        "is",
        "image",
        "like",
        "image",
    ]
    files = [b64decode(part["image"].url.partition(",")[2]) for part in plain["content"][1::2]]
    assert files == [png(4, 3), png(2, 2)]
    assert plain["content"][1]["image"].url.startswith("data:image/png;")
    assert openai_prompt(ROW) == ROW["prompt"]
    assert graph_messages(row()) == [message]


@pytest.mark.parametrize(
    ("part", "named"),
    [
        ({"type": "video", "video": []}, {"value": "no part for"}),
        ({"type": "image", "image": b"x"}, {"value": "cannot be read"}),
    ],
)
def test_what_openais_api_cannot_show_is_named(part: dict, named: dict):
    with raises(DataError, **named):
        openai_prompt({"prompt": [{"role": "user", "content": [part]}]})


def test_a_command_reads_no_images():
    with raises(DataError, key="a command", fix="put their files into the task"):
        read_task(row())


async def test_an_engine_without_eyes_refuses_the_request():
    it = AgentHarness(SingleTurnAgent, ["so 3"], codec=FakeCodec(modalities=frozenset({"image"})))
    with raises(BackendError, value="image"):
        await it.run(row())
