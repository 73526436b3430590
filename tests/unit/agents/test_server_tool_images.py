"""Images of a tool server: shown in the next prompt where the model can see them, told as an error
where it cannot.
"""

import pytest

from jax_agent_rl.errors import ToolServerError
from jax_agent_rl.rollout.protocol import Capabilities
from tests.agent_testbed import ACT, assert_token_exact
from tests.agent_testbed import server_tool_stage as stage
from tests.fakes import FakeCodec
from tests.http_service import ToolServer, data_url
from tests.messages import raises

SEES = Capabilities(max_model_len=4096, max_concurrent=8, multi_modal=frozenset({"image"}))


def picture_of(action):
    return {"obs": "zoomed", "image": [data_url((4, 3)), data_url((2, 2))]}


def seeing(server, **settings):
    codec = FakeCodec(modalities=frozenset({"image"}))
    return stage(
        server, [ACT, "so 3"], codec=codec, capabilities=SEES, **{"enable_mtrl": True, **settings}
    )


async def test_images_stand_in_the_next_prompt_and_go_to_the_engine():
    async with ToolServer(picture_of) as server:
        it = seeing(server)
        trajectory = await it.run()
    first, second = it.backend.requests
    assert_token_exact(trajectory, it.backend.requests)
    assert "user: <image> <image> zoomed" in it.codec.decode(trajectory.turns[0].appended_ids)
    assert not first.multi_modal
    assert [picture.size for picture in second.multi_modal["image"]] == [
        (4, 3),
        (2, 2),
    ]
    assert [picture.size for picture in trajectory.multi_modal["image"]] == [(4, 3), (2, 2)]
    (call,) = trajectory.tool_calls
    assert call.error is None
    assert len(call.media["image"]) == 2


@pytest.mark.parametrize("settings", [{"enable_mtrl": False}, {"mtrl_sep": "<o>{obs}</o>"}])
async def test_images_are_an_error_the_model_reads_where_no_template_writes_them(settings, caplog):
    async with ToolServer(picture_of) as server:
        it = seeing(server, **settings)
        trajectory = await it.run()
    (call,) = trajectory.tool_calls
    assert call.error == "raised"
    assert "the tool returned image data, which cannot be shown here" in call.observation
    assert not it.backend.requests[1].multi_modal
    assert "the tool server returned image, which cannot be shown" in caplog.text
    assert "agent.enable_mtrl=true" in caplog.text


async def test_a_model_without_eyes_reads_an_error():
    async with ToolServer(picture_of) as server:
        it = stage(server, [ACT, "so 3"], enable_mtrl=True)
        trajectory = await it.run()
    assert trajectory.tool_calls[0].error == "raised"
    assert not trajectory.multi_modal


async def test_images_before_the_first_turn_lose_the_trajectory_with_words():
    async with ToolServer(picture_of) as server:
        with raises(ToolServerError, key="agent.call_tool_first"):
            await seeing(server, call_tool_first=True).run()
