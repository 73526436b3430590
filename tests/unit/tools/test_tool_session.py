"""A session creates and releases each tool once, whatever happens in between."""

import asyncio

import numpy as np
import pytest

from jax_agent_rl.tools import BaseTool, ToolResponse, ToolSession, function_tool
from tests.fakes import FakeCodec

codec = FakeCodec()
OBJECT = {"type": "object", "properties": {}}


class Recorder(BaseTool):
    """Records its calls, and fails on demand."""

    def __init__(self, name="recorder", *, fail=(), hang=()):
        super().__init__(name=name, description="", parameters=OBJECT)
        self.log = []
        self.fail = fail
        self.hang = hang

    async def _step(self, what, instance_id, kwargs):
        self.log.append((what, instance_id, kwargs))
        if what in self.fail:
            raise RuntimeError(f"{what} failed")
        if what in self.hang:
            await asyncio.Event().wait()

    async def create(self, instance_id, **create_kwargs):
        await self._step("create", instance_id, create_kwargs)

    async def execute(self, instance_id, arguments, **execute_kwargs):
        await self._step("execute", instance_id, execute_kwargs)
        return ToolResponse(text="done", reward=0.5, metrics={"rows": 2})

    async def release(self, instance_id, **release_kwargs):
        await self._step("release", instance_id, release_kwargs)

    @property
    def steps(self):
        return [what for what, _, _ in self.log]


def session(*tools, kwargs=None, timeout=5.0, limit=50):
    return ToolSession(
        {tool.name: tool for tool in tools},
        "t-1",
        kwargs=kwargs or {},
        timeout=timeout,
        shorten=lambda text: codec.truncate(text, limit, "middle"),
    )


async def test_a_tool_lives_once_and_gets_the_rows_kwargs():
    tool = Recorder()
    kwargs = {
        "recorder": {
            "create_kwargs": {"a": 1},
            "execute_kwargs": {"b": 2},
            "release_kwargs": {"c": 3},
        }
    }
    async with session(tool, kwargs=kwargs) as opened:
        await opened.call("recorder", {})
        record = await opened.call("recorder", {})
    execute = ("execute", "t-1", {"b": 2})
    assert tool.log == [("create", "t-1", {"a": 1}), execute, execute, ("release", "t-1", {"c": 3})]
    assert (record.observation, record.reward, record.error) == ("done", 0.5, None)
    assert opened.metrics == {"tool/recorder/rows": 4}


async def test_release_is_called_when_the_trajectory_fails():
    tool = Recorder()
    with pytest.raises(KeyError):
        async with session(tool):
            raise KeyError("trajectory")
    assert tool.steps == ["create", "release"]


async def test_release_is_called_when_the_trajectory_is_cancelled():
    tool = Recorder(hang=("execute",))
    inside = asyncio.Event()

    async def trajectory():
        async with session(tool) as opened:
            inside.set()
            await opened.call("recorder", {})

    task = asyncio.create_task(trajectory())
    await inside.wait()
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert tool.steps[-1] == "release"


async def test_release_is_called_when_creating_is_cancelled():
    first = Recorder("first")
    second = Recorder("second", hang=("create",))

    async def trajectory():
        async with session(first, second):
            raise AssertionError("never reached")

    task = asyncio.create_task(trajectory())
    while second.steps != ["create"]:
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert first.steps == ["create", "release"]
    assert second.steps == ["create", "release"]


async def test_a_tool_that_cannot_be_created_answers_with_the_reason():
    broken = Recorder("broken", fail=("create",))
    sound = Recorder("sound")
    async with session(broken, sound) as opened:
        bad = await opened.call("broken", {})
        good = await opened.call("sound", {})
    assert bad.error == "raised"
    assert bad.observation == "Error: broken is not available: create failed"
    assert good.error is None
    assert broken.steps == ["create", "release"]
    assert sound.steps == ["create", "execute", "release"]


async def test_a_failing_release_does_not_keep_the_others():
    first = Recorder("first")
    second = Recorder("second", fail=("release",))
    async with session(first, second):
        pass
    assert first.steps == ["create", "release"]


@pytest.mark.parametrize(
    ("score", "expected"), [(np.float32(0.5), 0.5), (True, 1.0), (None, None), ("1", None)]
)
async def test_a_tools_score_of_the_trajectory_is_any_number(score, expected):
    class Scorer(Recorder):
        async def calc_reward(self, instance_id):
            return score

    async with session(Scorer()) as opened:
        assert await opened.calc_rewards() == ({} if expected is None else {"recorder": expected})
    assert opened.metrics == ({"tool/recorder/calc_reward_errors": 1} if score == "1" else {})


async def test_unexpected_row_kwargs_do_not_pass_silently():
    @function_tool
    def add(a: int, b: int) -> str:
        return str(a + b)

    async with session(add, kwargs={"add": {"create_kwargs": {"oops": 1}}}) as opened:
        record = await opened.call("add", {"a": 1, "b": 2})
    assert record.error == "raised" and "oops" in record.observation


async def test_images_are_refused_rather_than_lost():
    class Camera(Recorder):
        async def execute(self, instance_id, arguments, **execute_kwargs):
            return ToolResponse(text="look", image=("pixels",))

    async with session(Camera("camera")) as opened:
        record = await opened.call("camera", {})
    assert record.error == "raised"
    assert "cannot be shown" in record.observation
