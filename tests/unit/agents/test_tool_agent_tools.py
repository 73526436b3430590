"""What tools give a trajectory, through the whole loop: state, rewards, images and videos, ids of
calls.
"""

import dataclasses
import json

import pytest
from PIL import Image

from jax_agent_rl.agents import AgentContext, ToolAgent
from jax_agent_rl.chat.reply import Reply
from jax_agent_rl.collect.collector import RolloutCollector
from jax_agent_rl.config import AgentConfig
from jax_agent_rl.observe.run_dir import trajectory_record
from jax_agent_rl.rewards import register_reward, registry, score
from jax_agent_rl.rollout.client import LLMServerClient
from jax_agent_rl.rollout.protocol import Capabilities
from jax_agent_rl.rollout.server import AsyncServer
from jax_agent_rl.tools import BaseTool, ToolRegistry, ToolResponse
from jax_agent_rl.types import SamplingParams
from tests.agent_testbed import episode_request
from tests.fakes import FakeCodec, ScriptedBackend
from tests.messages import raises

NUMBER = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}


class Guess(BaseTool):
    """Keeps, for each trajectory, a secret and the guesses so far."""

    def __init__(self):
        super().__init__(name="guess", description="", parameters=NUMBER)
        self.secrets = {}
        self.guesses = {}
        self.released = []

    async def create(self, instance_id, *, secret):
        self.secrets[instance_id] = secret
        self.guesses[instance_id] = []

    async def execute(self, instance_id, arguments, *, step):
        self.guesses[instance_id].append(arguments["x"])
        right = arguments["x"] == self.secrets[instance_id]
        return ("right" if right else "wrong"), (step if right else -step), {"guesses": 1}

    async def calc_reward(self, instance_id, *, scale):
        return scale * len(self.guesses[instance_id])

    async def release(self, instance_id, *, why):
        self.released.append((instance_id, why))
        del self.secrets[instance_id], self.guesses[instance_id]


KWARGS = {
    "create_kwargs": {"secret": 7},
    "execute_kwargs": {"step": 0.5},
    "calc_reward_kwargs": {"scale": 10},
    "release_kwargs": {"why": "over"},
}


def context_of(script, tools, *, kinds=frozenset(), shows=frozenset(), codec=None, **limits):
    codec = codec or FakeCodec(modalities=frozenset(shows))
    capabilities = Capabilities(max_model_len=4096, max_concurrent=8, multi_modal=frozenset(kinds))
    backend = ScriptedBackend(codec, script, capabilities=capabilities)
    context = AgentContext(
        client=LLMServerClient([AsyncServer(backend)]),
        codec=codec,
        tools=ToolRegistry(tools),
        limits=AgentConfig(**{"tool_prompt": "none", **limits}),
        max_model_len=2000,
    )
    return context, backend


async def run(context, row=None):
    row = row or {"prompt": [{"role": "user", "content": "go"}]}
    return await ToolAgent(context).play(episode_request(row, SamplingParams(max_tokens=200)))


@pytest.fixture
def reward(monkeypatch):
    """A reward function that is paid what the tools paid; it keeps what it saw."""
    monkeypatch.setattr(registry, "REWARDS", {})
    seen = []

    @register_reward("guessing")
    def compute_score(data_source, solution_str, ground_truth, extra_info):
        seen.append(extra_info)
        from_calls = sum(extra_info["tool_rewards"])
        from_trajectory = sum(extra_info["tool_scores"].values())
        return {
            "score": from_calls + from_trajectory,
            "calls": from_calls,
            "whole": from_trajectory,
        }

    return seen


async def test_rewards_of_tools_reach_the_reward_function_and_the_trajectory(reward):
    """wrong -0.5, right +0.5, and 10 for each of two guesses: 0 + 20."""
    tool = Guess()
    script = ['<call>guess {"x": 3}</call>', '<call>guess {"x": 7}</call>', "it is 7"]
    context, _ = context_of(script, [tool])
    row = {
        "prompt": [{"role": "user", "content": "guess"}],
        "agent_name": "tool_agent",
        "data_source": "guessing",
        "extra_info": {"tools_kwargs": {"guess": KWARGS}},
    }
    collector = RolloutCollector(context, score=score, max_in_flight=4, seed=0)
    (group,) = await collector.collect(
        [row], group_size=3, sampling=SamplingParams(max_tokens=200), step=0
    )
    for trajectory in group.trajectories:
        assert [call.reward for call in trajectory.tool_calls] == [-0.5, 0.5]
        assert trajectory.tool_scores == {"guess": 20.0}
        assert (trajectory.reward, trajectory.reward_parts) == (20.0, {"calls": 0.0, "whole": 20.0})
        assert trajectory.metrics["tool/guess/guesses"] == 2
    assert [info["tool_rewards"] for info in reward] == [[-0.5, 0.5]] * 3
    ids = sorted(trajectory.trajectory_id for trajectory in group.trajectories)
    assert sorted(tool.released) == [(name, "over") for name in ids]
    assert tool.secrets == {}


async def test_a_tool_that_cannot_score_costs_its_score_not_the_trajectory():
    broken = {**KWARGS, "calc_reward_kwargs": {"scale": "x"}}
    context, _ = context_of(['<call>guess {"x": 1}</call>', "done"], [Guess()])
    row = {
        "prompt": [{"role": "user", "content": "go"}],
        "extra_info": {"tools_kwargs": {"guess": broken}},
    }
    trajectory = await run(context, row)
    assert trajectory.tool_scores == {}
    assert trajectory.metrics["tool/guess/calc_reward_errors"] == 1


class Camera(BaseTool):
    def __init__(self, response, name="camera"):
        super().__init__(name=name, description="", parameters={"type": "object"})
        self.response = response

    async def execute(self, instance_id, arguments, **execute_kwargs):
        return self.response


RED = Image.new("RGB", (2, 2), "red")
BLUE = Image.new("RGB", (2, 2), "blue")
SHOW = "<call>camera {}</call>"


async def test_images_and_videos_reach_the_next_prompt_and_stay_with_the_trajectory():
    clip = (RED, BLUE)
    tool = Camera(ToolResponse(text="look", image=(RED, BLUE), video=[clip], reward=1.0))
    kinds = {"image", "video"}
    context, backend = context_of([SHOW, "nice", "unused"], [tool], kinds=kinds, shows=kinds)
    trajectory = await run(context)
    first, second = backend.requests
    assert first.multi_modal == {}
    assert second.multi_modal == {"image": (RED, BLUE), "video": (clip,)}
    assert trajectory.multi_modal == second.multi_modal
    assert trajectory.tool_calls[0].media == second.multi_modal
    assert trajectory.tool_calls[0].reward == 1.0
    appended = context.codec.decode(trajectory.turns[0].appended_ids)
    assert appended == "tool: <image> <image> <video> lookassistant:"
    assert trajectory.messages[2]["content"] == "look"
    assert trajectory.messages[2]["media"] == [
        "image",
        "image",
        "video",
    ]


async def test_images_of_all_turns_are_sent_in_the_order_of_their_placeholders():
    class Album(Camera):
        async def execute(self, instance_id, arguments, **execute_kwargs):
            return ToolResponse(text="page", image=(images.pop(0),))

    images = [RED, BLUE, RED]
    script = [SHOW * 2, SHOW, "done"]
    context, backend = context_of(
        script, [Album(None)], kinds={"image"}, shows={"image"}, max_parallel_calls=2
    )
    trajectory = await run(context)
    assert [request.multi_modal.get("image", ()) for request in backend.requests] == [
        (),
        (RED, BLUE),
        (RED, BLUE, RED),
    ]
    assert trajectory.multi_modal == {"image": (RED, BLUE, RED)}


@pytest.mark.parametrize(
    ("kinds", "shows"), [((), ()), (("image",), ()), ((), ("image",)), (("video",), ("video",))]
)
async def test_a_model_that_cannot_see_reads_an_error_instead(kinds, shows, caplog):
    context, backend = context_of(
        [SHOW, "ok"], [Camera(ToolResponse(image=(RED,)))], kinds=kinds, shows=shows
    )
    trajectory = await run(context)
    (call,) = trajectory.tool_calls
    assert call.error == "raised"
    assert call.observation == "Error: camera returned image data, which cannot be shown here"
    assert backend.requests[1].multi_modal == {}
    assert trajectory.multi_modal == {}
    assert "tool 'camera' returned image, which cannot be shown" in caplog.text
    assert "cannot take" in caplog.text


async def test_images_that_did_not_fit_are_not_part_of_the_trajectory():
    tool = Camera(ToolResponse(text="long " * 20, image=(RED,)))
    context, _ = context_of(
        [SHOW, "never"], [tool], kinds={"image"}, shows={"image"}, max_response_length=12
    )
    trajectory = await run(context)
    assert trajectory.num_turns == 1
    assert trajectory.multi_modal == {}


async def test_a_trajectory_with_images_is_recorded_as_json():
    context, _ = context_of(
        [SHOW, "nice"], [Camera(ToolResponse(image=(RED,)))], kinds={"image"}, shows={"image"}
    )
    record = trajectory_record(await run(context), step=1, split="train")
    assert json.loads(json.dumps(record))["turns"][0]["tool_calls"][0]["media"] == {"image": 1}


@pytest.mark.parametrize("image", [RED, "path.png", None])
def test_an_image_that_is_not_in_a_list_is_refused(image):
    with raises(TypeError, key="ToolResponse.image", fix="a tuple or list"):
        ToolResponse(image=image)


class IdCodec(FakeCodec):
    """Its calls have ids, and it keeps the messages it is asked to append."""

    def __init__(self):
        super().__init__()
        self.appended = []

    def parse_reply(self, sampled_ids, tools=(), *, context_ids=None):
        reply = super().parse_reply(sampled_ids)
        calls = (
            dataclasses.replace(call, id=f"call-{n}") for n, call in enumerate(reply.tool_calls)
        )
        return Reply(reply.content, tool_calls=calls, malformed=reply.malformed)

    def encode_append(self, sampled_ids, messages, *, tools=()):
        self.appended.append(messages)
        return super().encode_append(sampled_ids, messages, tools=tools)


async def test_a_call_id_the_model_wrote_names_its_result_even_when_it_fails():
    codec = IdCodec()
    calls = SHOW + "<call>nobody {}</call>" + SHOW + "<call>camera oops</call>"
    context, _ = context_of([calls, "ok"], [Camera("seen")], codec=codec, max_parallel_calls=2)
    trajectory = await run(context)
    (messages,) = codec.appended
    assert [message.get("tool_call_id") for message in messages] == [
        "call-0",
        "call-1",
        "call-2",
        None,
    ]
    errors = [call.error for call in trajectory.tool_calls]
    assert errors == [None, "unknown_tool", "over_parallel_limit", "malformed"]
    assert [call.call_id for call in trajectory.tool_calls] == ["call-0", "call-1", "call-2", None]
