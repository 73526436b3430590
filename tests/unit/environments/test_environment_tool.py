"""Tools that lease environments: one holder at a time, every lease ended once, whatever happens in
between.
"""

from __future__ import annotations

import asyncio
import contextlib

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from jax_agent_rl.agents import ToolAgent
from jax_agent_rl.config import ToolsConfig
from jax_agent_rl.environments import EnvironmentTool, environment_tool
from jax_agent_rl.errors import ToolDefinitionError, ToolError
from jax_agent_rl.testing.simulate.workload import VirtualLoop
from jax_agent_rl.tools import ToolRegistry, ToolSession
from jax_agent_rl.tools.registry import open_tools
from tests.agent_testbed import ROW
from tests.fakes import FakeCodec
from tests.messages import raises
from tests.unit.agents.test_branches import FORKS, Branching, assert_same_course

TIMEOUT = 10.0


class Notes:
    """Keeps lines; counts what happens to it."""

    instances: list[Notes] = []

    def __init__(self, *, title="notes"):
        self.instances.append(self)
        self.title = title
        self.lines = []
        self.resets = []
        self.closes = 0

    async def reset(self, **kwargs):
        self.resets.append(kwargs)
        self.lines = list(kwargs.get("lines", []))

    async def close(self):
        self.closes += 1


@pytest.fixture(autouse=True)
def instances(monkeypatch):
    monkeypatch.setattr(Notes, "instances", [])
    return Notes.instances


async def write(line: str, env: Notes) -> str:
    """Writes a line.

    Args:
        line: The line.
        env: The notes.
    """
    if line == "mistake":
        raise ToolError("no such line")
    if line == "break":
        raise OSError("disk full")
    if line == "hang":
        await asyncio.Event().wait()
    env.lines.append(line)
    return f"{len(env.lines)} {env.title}"


def read(env: Notes) -> str:
    """Reads all lines."""
    return " ".join(env.lines) or "nothing"


def tools_of(*functions, **settings):
    make = environment_tool(env_cls=Notes, **{"pool_size": 1, **settings})
    return {tool.name: tool for tool in map(make, functions or (write,))}


def session(tools, name="t", *, timeout=TIMEOUT, **kwargs):
    return ToolSession(
        tools,
        name,
        kwargs=kwargs,
        timeout=timeout,
        shorten=lambda text: FakeCodec().truncate(text, 99, "right"),
    )


async def say(opened, line):
    return (await opened.call("write", {"line": line})).observation


async def test_a_trajectory_has_one_environment_and_the_next_one_gets_it_reset(instances):
    tools = tools_of(env_kwargs={"title": "lines"})
    async with session(tools, write={"create_kwargs": {"lines": ["x"]}}) as opened:
        assert instances == [], "leased by the first call"
        assert [await say(opened, "a"), await say(opened, "b")] == ["2 lines", "3 lines"]
    async with session(tools, "u") as opened:
        assert await say(opened, "c") == "1 lines"
    (notes,) = instances
    assert notes.resets == [{"lines": ["x"]}, {}]
    assert notes.closes == 0
    await tools["write"].close()
    assert notes.closes == 1


async def test_the_model_does_not_see_the_environment():
    tool = tools_of()["write"]
    assert isinstance(tool, EnvironmentTool)
    assert tool.description == "Writes a line."
    properties = {"line": {"type": "string", "description": "The line."}}
    assert tool.parameters == {"type": "object", "properties": properties, "required": ["line"]}
    async with session({"write": tool}) as opened:
        assert (
            "wrong arguments"
            in (await opened.call("write", {"line": "a", "env": "mine"})).observation
        )


async def test_tools_of_a_decorator_share_an_environment(
    instances,
):
    tools = tools_of(write, read)
    async with session(tools, read={"create_kwargs": {"lines": ["x"]}}) as opened:
        calls = [
            opened.call("write", {"line": "a"}),
            opened.call("read", {}),
            opened.call("write", {"line": "b"}),
        ]
        records = await asyncio.gather(*calls)
        assert [record.observation for record in records] == [
            "2 notes",
            "x a",
            "3 notes",
        ], "one after the other"
    (notes,) = instances
    async with session(tools) as opened:
        assert (await opened.call("read", {})).observation == "nothing"
    assert instances == [notes]
    assert len(notes.resets) == 2


async def test_a_mistake_of_the_model_keeps_the_environment(instances):
    tools = tools_of()
    async with session(tools) as opened:
        assert [await say(opened, line) for line in ("a", "mistake", "b")] == [
            "1 notes",
            "Error: no such line",
            "2 notes",
        ]
    await tools["write"].close()
    assert [notes.closes for notes in instances] == [1]


@pytest.mark.parametrize("line", ["break", "hang"])
@pytest.mark.parametrize("scope", ["trajectory", "global"])
async def test_a_broken_environment_is_closed_and_another_takes_its_place(instances, line, scope):
    tools = tools_of(scope=scope)
    async with session(tools, timeout=0.05 if line == "hang" else TIMEOUT) as opened:
        await say(opened, "a")
        answer = await say(opened, line)
        assert "disk full" in answer or "write did not answer" in answer
        for _ in range(20):  # a call that was cut off ends in a task of its own
            await asyncio.sleep(0)
        assert instances[0].closes == 1
        if scope == "trajectory":
            assert "Error: its Notes is gone: a call raised " in await say(opened, "b")
            async with session(tools, "u") as other_session:
                assert await say(other_session, "c") == "1 notes", (
                    "the place is free before the trajectory ends"
                )
        else:
            assert await say(opened, "b") == "1 notes"
    await tools["write"].close()
    assert [(len(notes.resets), notes.closes) for notes in instances] == [(1, 1), (1, 1)]


async def test_a_full_pool_makes_calls_wait_and_says_why_they_waited_in_vain(instances, caplog):
    tools = tools_of(pool_size=2)
    async with contextlib.AsyncExitStack() as stack:
        first, second = [await stack.enter_async_context(session(tools, name)) for name in "ab"]
        await asyncio.gather(say(first, "a"), say(second, "b"))
        async with session(tools, "c", timeout=0.05) as third:
            answer = await say(third, "c")
        reason = "all 2 of its Notes environments are in use (pool_size=2)"
        assert answer == f"Error: write did not answer within 0.05 seconds: {reason}"
        assert reason in caplog.text
        assert "agent.tool_timeout=0.05" in caplog.text
        async with session(tools, "d") as fourth:
            waiting = asyncio.create_task(say(fourth, "d"))
            await asyncio.sleep(0)
            await first.__aexit__(None, None, None)
            assert await waiting == "1 notes"
    assert len(instances) == 2


async def test_global_environments_keep_what_others_did_and_are_reset_once(instances):
    tools = tools_of(scope="global")
    async with session(tools) as first, session(tools, "u") as second:
        assert [await say(first, "a"), await say(second, "b"), await say(first, "c")] == [
            "1 notes",
            "2 notes",
            "3 notes",
        ]
    assert [notes.resets for notes in instances] == [[{}]]
    async with session(tools, write={"create_kwargs": {"lines": []}}) as opened:
        assert "all trajectories share the environments of 'write'" in await say(opened, "d")


async def test_a_tool_that_cannot_be_created_leaves_another_its_environment(instances):
    tools = tools_of(write, read, scope="global")
    async with session(tools, read={"create_kwargs": {"lines": []}}) as opened:
        assert "read is not available" in (await opened.call("read", {})).observation
        assert await say(opened, "a") == "1 notes"


@pytest.mark.parametrize("fork", FORKS)
async def test_a_branch_repeats_its_calls_in_an_environment_of_its_own(instances, fork):
    words = [f'<call>write {{"line": "{line}"}}</call>' for line in "abc"] + ["done"]
    stage = Branching(
        ToolAgent, words, shared={"tools": ToolRegistry(tools_of(pool_size=2).values())}
    )
    parent = await stage.parent(ROW)
    assert_same_course(parent, await stage.branch(parent, *fork))
    assert [notes.resets for notes in instances] == [[{}, {}]], (
        "released by the parent before it branches"
    )
    assert instances[0].lines == ["a", "b", "c"]


@pytest.mark.parametrize("fork", FORKS)
async def test_a_branch_does_not_repeat_what_it_did_to_all(instances, fork):
    words = [f'<call>write {{"line": "{line}"}}</call>' for line in "abc"] + ["done"]
    stage = Branching(
        ToolAgent, words, shared={"tools": ToolRegistry(tools_of(scope="global").values())}
    )
    await stage.branch(await stage.parent(ROW), *fork)
    assert instances[0].lines == list("abc") + list("abc")[fork[0] :]


async def test_the_end_of_the_run_closes_environments(tmp_path, monkeypatch):
    (tmp_path / "my_notes.py").write_text(
        "from jax_agent_rl.environments import environment_tool\n"
        "from tests.unit.environments.test_environment_tool import Notes, write\n"
        "Notes.instances = instances = []\n"
        "write = environment_tool(env_cls=Notes, pool_size=3)(write)\n"
    )
    async with open_tools(
        ToolsConfig(function_tool_path=str(tmp_path / "my_notes.py"))
    ) as registry:
        async with session(registry.select()) as opened:
            assert await say(opened, "a") == "1 notes"
        instances = registry.select()["write"].function.__globals__["Notes"].instances
        assert [notes.closes for notes in instances] == [0]
    assert [notes.closes for notes in instances] == [1]


def no_env(line: str) -> str:
    return line


@pytest.mark.parametrize(
    ("settings", "function", "named"),
    [
        ({"pool_size": 0}, write, {"key": "pool_size", "fix": "1 or more"}),
        ({"scope": "rollout"}, write, {"value": "1 and 'rollout'"}),
        ({}, no_env, {"key": "no_env", "fix": "env"}),
    ],
)
def test_a_wrong_declaration_is_refused(settings, function, named):
    with raises(ToolDefinitionError, **named):
        tools_of(function, **settings)


# --- any order of events --------------------------------------------------------------------------


class Held:
    """Fails the test if it is used by two at once, by another trajectory than the one it was reset
    for, or closed.
    """

    def __init__(self, world):
        self.owner = None
        self.in_call = False
        self.closes = 0
        self.world = world
        world.instances.append(self)

    async def reset(self):
        assert not self.closes
        self.owner = None
        await self.world.act(self.world.resets.pop() if self.world.resets else ("ok", 0), self)

    async def close(self):
        self.closes += 1


class World:
    """One run: the environments made, how resets go, and violations seen inside calls (where errors
    are messages).
    """

    def __init__(self, resets, scope):
        self.instances = []
        self.resets = resets
        self.violations = []
        self.scope = scope

    async def act(self, how, env):
        kind, seconds = how
        try:
            await asyncio.sleep(seconds)
        except asyncio.CancelledError:
            if kind != "stubborn":
                raise
            await asyncio.sleep(seconds)
        if kind == "mistake":
            raise ToolError("no")
        if kind == "raise":
            raise OSError("broken")

    async def call(self, who: str, kind: str, seconds: int, env: Held) -> str:
        if (
            env.in_call
            or env.closes
            or (self.scope == "trajectory" and env.owner not in (None, who))
        ):
            self.violations.append((who, kind, env.owner, env.in_call, env.closes))
        env.owner = who
        env.in_call = True
        try:
            await self.act((kind, seconds), env)
        finally:
            env.in_call = False
        return "done"


ACTS = st.tuples(st.sampled_from(["ok", "ok", "mistake", "raise", "stubborn"]), st.integers(0, 12))
LIVES = st.tuples(
    st.integers(0, 10),  # when it begins
    st.lists(st.lists(ACTS, min_size=1, max_size=2), max_size=4),  # turns of concurrent calls
    st.one_of(st.none(), st.integers(0, 30)),  # when it is cancelled
)


async def seconds_of(live, count: int) -> float:
    """Return how long so many trajectories take that each call once for nine seconds."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    await asyncio.gather(*(live(f"{count}-{n}", 0, [[("ok", 9)]]) for n in range(count)))
    return loop.time() - began


# The trajectory is cancelled, its call is not to be stopped, and another one waits for the
# environment.
@example(
    lives=[(0, [[("stubborn", 9)]], 5), (1, [[("ok", 9)]], None)],
    pool_size=1,
    scope="trajectory",
    resets=[],
)
@given(
    lives=st.lists(LIVES, min_size=1, max_size=5),
    pool_size=st.integers(1, 3),
    scope=st.sampled_from(["trajectory", "global"]),
    resets=st.lists(ACTS, max_size=4),
)
def test_in_any_order_of_events_a_lease_has_one_holder_and_ends_once(
    lives, pool_size, scope, resets
):
    async def run():
        world = World(list(resets), scope)
        make = environment_tool(
            env_cls=Held, pool_size=pool_size, scope=scope, env_kwargs={"world": world}
        )
        tool = make(world.call)
        tools = {tool.name: tool}

        async def live(name, begins, turns):
            await asyncio.sleep(begins)
            async with session(tools, name) as opened:
                for turn in turns:
                    calls = [
                        {"who": name, "kind": kind, "seconds": seconds} for kind, seconds in turn
                    ]
                    await asyncio.gather(*(opened.call("call", arguments) for arguments in calls))

        tasks = []
        for number, (begins, turns, cancelled) in enumerate(lives):
            tasks.append(asyncio.create_task(live(f"t{number}", begins, turns)))
            if cancelled is not None:
                asyncio.get_running_loop().call_later(cancelled, tasks[-1].cancel)
        await asyncio.gather(*tasks, return_exceptions=True)
        while len(asyncio.all_tasks()) > 1:  # calls that were cut off
            await asyncio.sleep(1)
        assert world.violations == []

        world.resets.clear()
        seconds = await seconds_of(live, pool_size)
        assert seconds == pytest.approx(9), "every place of the pool is free again"
        seconds = await seconds_of(live, pool_size + 1)
        assert seconds > 9.5, "and there are not more of them"
        await tool.close()
        assert world.violations == []
        assert [env.closes for env in world.instances] == [1] * len(world.instances)

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(run())
