"""Service of one worker: which tool acts, how failures are reported, and that environments close
exactly once.
"""

import asyncio
import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from jax_agent_rl.config.commands import ToolServerSettings
from jax_agent_rl.errors import ConfigError
from jax_agent_rl.tool_server.plugins import ToolContext
from jax_agent_rl.tool_server.plugins.base import Failure
from jax_agent_rl.tool_server.plugins.registry import tool_classes
from jax_agent_rl.tool_server.service import Telemetry, ToolService, shorten
from jax_agent_rl.tools.client import ServerAction
from jax_agent_rl.utils.timeouts import DaemonThreads
from tests.examples import examples
from tests.messages import raises

FAKES = str(Path(__file__).with_name("fake_tools.py"))


class Clock:
    """Seconds that the test advances."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


class Served:
    """A service with the fake tools, its clock and its metrics."""

    def __init__(self, *names, **changes):
        limits = {"step_seconds": 5.0, "max_action_chars": 1000, "max_observation_chars": 200}
        limits |= {"max_environments": 50, "idle_seconds": 100.0, "limits": {"wall_seconds": 0.001}}
        settings = ToolServerSettings(
            **{
                "tools": names or ("echo", "counter", "faulty"),
                "tool_path": FAKES,
                **limits,
                **changes,
            }
        )
        context = ToolContext(settings=settings, threads=DaemonThreads(), _sandbox=None)
        self.tools = {tool.name: tool(context) for tool in tool_classes(settings)}
        self.clock = Clock()
        self.registry = CollectorRegistry()
        telemetry = Telemetry(self.registry, worker="0")
        self.service = ToolService(list(self.tools.values()), settings, telemetry, clock=self.clock)

    @property
    def diary(self):
        return self.tools["counter"].diary

    async def step(self, action="", trajectory="t", **fields):
        return await self.service.step(
            ServerAction(trajectory_id=trajectory, text=action, **fields)
        )

    def metric(self, name, **labels):
        return self.registry.get_sample_value(name, labels) or 0.0

    def closed(self, reason):
        return self.metric(
            "toolserver_environments_closed_total", worker="0", tool="counter", reason=reason
        )


async def test_the_first_tool_that_accepts_acts():
    served = Served()
    reply = await served.step("echo count")
    assert (reply.observation, reply.tool, reply.valid, reply.done) == (
        "count",
        "echo",
        True,
        False,
    )
    assert (await served.step("count")).tool == "counter"


async def test_an_action_no_tool_accepts_is_invalid_and_says_what_there_is():
    served = Served()
    reply = await served.step("hm")
    assert (reply.tool, reply.valid, reply.done, reply.error) == (
        None,
        False,
        False,
        Failure.INVALID,
    )
    assert reply.observation["invalid_reason"] == "invalid_action"
    assert (
        reply.observation["available_tools"]
        == "echo: echo TEXT\ncounter: count\nfaulty: fault WORD"
    )
    assert (await Served(done_if_invalid=True).step("hm")).done


async def test_an_action_that_is_too_long_reaches_no_parser():
    served = Served(max_action_chars=len("fault parse") - 1)
    reply = await served.step("fault parse")
    assert (reply.tool, reply.valid, reply.error) == (None, False, Failure.INVALID)
    assert reply.observation["obs"] == "The action has 11 characters, more than max_action_chars=10"


async def test_rewards_go_along():
    assert (await Served().step("echo hi", extra_fields={"reward": 0.5})).observation == {
        "obs": "hi",
        "reward": 0.5,
    }


async def test_state_lasts_until_finish_and_is_then_reset():
    served = Served()
    assert [(await served.step("count")).observation for _ in range(3)] == ["1", "2", "3"]
    assert (await served.step("count", trajectory="other")).observation == "1"
    reply = await served.step("count", finish=True)
    assert (reply.observation, reply.done, reply.valid, reply.tool) == ("", True, True, "finish")
    assert served.diary[-1] == ("close", "t")
    assert served.closed("finish") == 1
    assert (await served.step("count")).observation == "1"


async def test_the_last_step_closes_after_it_acted():
    served = Served()
    reply = await served.step("count", is_last_step=True)
    assert (reply.observation, reply.open) == ("1", False)
    assert served.closed("last_step") == 1
    assert served.service.environments.count == 0


async def test_a_tool_that_is_done_closes():
    served = Served()
    await served.step("count")
    assert (await served.step("echo bye")).done
    assert served.closed("done") == 1


async def test_finishing_twice_or_an_unknown_trajectory_closes_nothing_twice():
    served = Served()
    await served.step("count")
    for _ in range(3):
        assert (await served.step(finish=True)).done
    assert served.diary == [("open", "t"), ("close", "t")]


@pytest.mark.parametrize(
    ("action", "error", "text"),
    [
        ("fault refuse", Failure.TOOL, "Error: unexpected token"),
        ("fault raise", Failure.CRASH, "Error: faulty raised KeyError: 'broken inside'"),
        ("fault parse", Failure.CRASH, "Error: faulty raised ValueError: cannot even parse"),
        ("fault none", Failure.CRASH, "Error: faulty raised AttributeError"),
        ("fault hang", Failure.TIMEOUT, "Error: faulty did not answer within 0.05 seconds"),
    ],
)
async def test_every_fault_is_a_counted_reply(action, error, text):
    served = Served(step_seconds=0.05 if error is Failure.TIMEOUT else 60)
    reply = await served.step(action)
    assert (reply.error, reply.valid, reply.done) == (error, False, False)
    assert reply.observation["obs"].startswith(text)
    assert served.metric("toolserver_steps_total", tool="faulty", outcome=error) == 1
    assert served.metric("toolserver_steps_running", worker="0") == 0


async def test_huge_observations_lose_their_middle():
    text = (await Served().step("fault huge")).observation
    assert len(text) == 200
    assert text.startswith("begin")
    assert text.endswith("end")
    assert "truncated" in text


async def test_text_that_is_not_unicode_is_made_so():
    assert (await Served().step("fault surrogate")).observation == "? and more"


@given(text=st.text(), limit=st.integers(30, 60))
def test_shortened_text_is_short_unicode_and_whole_if_it_fits(text, limit):
    short = shorten(text, limit)
    assert len(short) <= limit
    short.encode()
    assert len(text) > limit or short == text


async def test_one_fault_leaves_the_batch_alone():
    served = Served(step_seconds=1)
    actions = ["echo a", "fault raise", "fault hang", "count", "hm", "echo b"]
    steps = [ServerAction(trajectory_id=str(n), text=action) for n, action in enumerate(actions)]
    replies = await served.service.steps(steps)
    assert [reply.error for reply in replies] == [
        None,
        Failure.CRASH,
        Failure.TIMEOUT,
        None,
        Failure.INVALID,
        None,
    ]
    assert [replies[n].observation for n in (0, 3, 5)] == ["a", "1", "b"]


async def test_actions_of_one_trajectory_keep_their_order_even_within_a_batch():
    served = Served()
    steps = [ServerAction(trajectory_id="t", text="count") for _ in range(20)]
    assert [reply.observation for reply in await served.service.steps(steps)] == [
        str(n) for n in range(1, 21)
    ]


async def test_a_disconnect_during_an_action_closes_the_environment():
    served = Served()
    await served.step("count")
    running = asyncio.create_task(
        served.service.steps([ServerAction(trajectory_id="t", text="count slowly")])
    )
    while not served.metric("toolserver_steps_running", worker="0"):
        await asyncio.sleep(0)
    await asyncio.sleep(0)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert served.closed("abort") == 1
    assert served.diary == [("open", "t"), ("close", "t")]
    reply = await served.step("count")
    assert (reply.error, reply.done, reply.valid) == (Failure.GONE, True, False)
    assert (await served.step("count")).observation == "1", (
        "it fails once; then it is a new trajectory"
    )


async def test_a_timeout_in_a_stateful_tool_ends_its_trajectory():
    served = Served(step_seconds=0.05)
    reply = await served.step("count slowly")
    assert (reply.error, reply.done, reply.open) == (Failure.TIMEOUT, True, False)
    assert served.closed("abort") == 1


async def test_idle_environments_are_closed_and_the_next_action_fails():
    served = Served(idle_seconds=100)
    await served.step("count", trajectory="old")
    served.clock.now = 60
    await served.step("count", trajectory="young")
    served.clock.now = 110
    await served.service.environments.close_idle()
    assert served.closed("idle") == 1
    assert served.diary[-1] == ("close", "old")
    assert (await served.step("count", trajectory="old")).error is Failure.GONE
    assert (await served.step("count", trajectory="young")).observation == "2"


async def test_a_refused_environment_is_a_reply_and_leaves_nothing():
    served = Served()
    reply = await served.step("count", extra_fields={"refuse": True})
    assert reply.error is Failure.TOOL
    assert served.service.environments.count == 0
    assert served.metric("toolserver_environments_opened_total", worker="0", tool="counter") == 0


async def test_more_environments_than_allowed_are_refused_until_one_is_closed():
    served = Served(max_environments=2)
    for name in "ab":
        await served.step("count", trajectory=name)
    reply = await served.step("count", trajectory="c")
    assert reply.error is Failure.TOOL
    assert "max_environments=2" in reply.observation["obs"]
    await served.step(trajectory="a", finish=True)
    assert (await served.step("count", trajectory="c")).observation == "1"


async def test_closing_that_fails_is_counted_and_keeps_nothing_open():
    served = Served()
    for _ in range(13):
        await served.step("count")
    await served.step(finish=True)
    assert served.metric("toolserver_close_failures_total", tool="counter") == 1
    assert served.service.environments.count == 0


async def test_stopping_closes_everything():
    served = Served()
    await served.service.start()
    for name in "abc":
        await served.step("count", trajectory=name)
    await served.service.close()
    assert served.closed("shutdown") == 3
    assert served.service.environments.count == 0


@settings(max_examples=examples(60))
@given(seed=st.integers(0, 2**32))
def test_whatever_happens_every_environment_is_closed_exactly_once(seed):
    """Random actions, batches, cancellations and idle sweeps, all at the same time."""

    async def chaos():
        rng = random.Random(seed)
        served = Served(step_seconds=0.02, max_environments=5)

        async def client():
            for _ in range(8):
                action = rng.choice(
                    ["count", "count", "count slowly", "echo bye", "fault raise", "hm"]
                )
                step = ServerAction(
                    trajectory_id=rng.choice("abcdef"),
                    text=action,
                    extra_fields={"refuse": rng.random() < 0.1},
                    finish=rng.random() < 0.15,
                    is_last_step=rng.random() < 0.1,
                )
                task = asyncio.ensure_future(served.service.steps([step]))
                await asyncio.sleep(0)
                if rng.random() < 0.2:
                    task.cancel()
                await asyncio.gather(task, return_exceptions=True)
                served.clock.now += rng.choice([0, 0, 150])
                if rng.random() < 0.2:
                    await served.service.environments.close_idle()

        await asyncio.gather(*(client() for _ in range(4)))
        await served.service.close()
        return served

    served = asyncio.run(chaos())
    opened = [name for what, name in served.diary if what == "open"]
    closed = [name for what, name in served.diary if what == "close"]
    assert sorted(opened) == sorted(closed)
    open_now = set()
    for what, name in served.diary:  # never two at once, never closed when not open
        assert (name in open_now) is (what == "close")
        (open_now.add if what == "open" else open_now.discard)(name)
    assert served.service.environments.count == 0
    assert served.metric("toolserver_environments_opened_total", worker="0", tool="counter") == len(
        opened
    )


@pytest.mark.parametrize(
    ("names", "path", "named"),
    [
        (("no_such",), None, {"value": "'no_such'"}),
        (("echo",), FAKES.replace("fake_tools", "no_file"), {"value": "no such file"}),
        (
            ("echo",),
            str(Path(__file__).parents[2] / "capabilities.py"),
            {"fix": "ServerTool class"},
        ),
    ],
)
def test_tools_that_are_not_there_are_named(names, path, named):
    with raises(ConfigError, **named):
        tool_classes(ToolServerSettings(tools=names, tool_path=path))
