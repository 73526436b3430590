"""Code of the user's wherever a run calls it: where it failed is said, and what holds the event
loop is named.

Tools, rewards, environments, simulated users, agents and tools of the tool server, each through the
path by which a run calls it. Nothing waits for a time: code that blocks is released by the warning
about it.
"""

import asyncio
import threading
from contextlib import contextmanager
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from jax_agent_rl import rewards
from jax_agent_rl.agents import (
    AgentContext,
    AgentLoop,
    EnvironmentAgent,
    InteractionAgent,
    ToolAgent,
)
from jax_agent_rl.agents import loop as agent_loops
from jax_agent_rl.agents.frameworks import OpenAIAgentLoop
from jax_agent_rl.collect.collector import RolloutCollector
from jax_agent_rl.config import AgentConfig
from jax_agent_rl.config.commands import ToolServerSettings
from jax_agent_rl.environments import Environment, EnvironmentPools, Observation
from jax_agent_rl.environments import base as environments
from jax_agent_rl.environments.users import BaseInteraction, InteractionRegistry
from jax_agent_rl.errors import (
    EnvironmentFailedError,
    InteractionError,
    RewardError,
    TrajectoryError,
)
from jax_agent_rl.rewards import registry as reward_registry
from jax_agent_rl.rollout.client import LLMServerClient
from jax_agent_rl.rollout.server import AsyncServer
from jax_agent_rl.tool_server.plugins import ServerTool, ToolContext, ToolObservation
from jax_agent_rl.tool_server.plugins.base import Failure
from jax_agent_rl.tool_server.service import Telemetry, ToolService
from jax_agent_rl.tools import BaseTool, ToolRegistry
from jax_agent_rl.tools.client import ServerAction
from jax_agent_rl.types import SamplingParams
from jax_agent_rl.utils.failures import FailureLog
from jax_agent_rl.utils.loop_watch import watch_loop
from jax_agent_rl.utils.timeouts import DaemonThreads
from tests.fakes import FakeCodec, ScriptedBackend

PATIENCE = 0.2
HERE = Path(__file__).name


class UserCode:
    """What the user's code does when it is called: raise, or block the loop until somebody releases
    it.
    """

    def __init__(self, *, raises: bool, make: type[Exception] = LookupError):
        self.raises = raises
        self.make = make
        self.released = threading.Event()

    def act(self):
        if self.raises:
            raise self.make("no such thing")  # the line that has to be named
        assert self.released.wait(60)
        return "done"


class Run:
    """One trajectory through the collector, whose log is kept."""

    def __init__(
        self,
        agent: str,
        script,
        *,
        score=None,
        limits=None,
        data_source="mine",
        extra_info=None,
        **shared,
    ):
        self.lines = []
        self.failures = FailureLog(emit=self.lines.append)
        codec = FakeCodec()
        pools = EnvironmentPools(failures=self.failures, **shared.pop("pools", {}))
        context = AgentContext(
            client=LLMServerClient([AsyncServer(ScriptedBackend(codec, script))]),
            codec=codec,
            limits=AgentConfig(**{"tool_prompt": "none", **(limits or {})}),
            max_model_len=1000,
            environments=pools,
            failures=self.failures,
            **shared,
        )
        self.collector = RolloutCollector(
            context, score=score or self._unscored, max_in_flight=8, seed=0
        )
        self.row = {
            "prompt": [{"role": "user", "content": "go"}],
            "agent_name": agent,
            "data_source": data_source,
        }
        self.row["extra_info"] = extra_info or {}

    @staticmethod
    async def _unscored(trajectory):
        return trajectory

    async def play(self, count=1):
        sampling = SamplingParams(max_tokens=50)
        try:
            return await self.collector.collect_one(
                self.row, group_size=count, sampling=sampling, step=0, index=0
            )
        finally:
            await self.collector.close()


class Tool(BaseTool):
    def __init__(self, code: UserCode):
        super().__init__(
            name="slow", description="", parameters={"type": "object", "properties": {}}
        )
        self.code = code

    async def execute(self, instance_id, arguments, **kwargs):
        return self.code.act()


class User(BaseInteraction):
    def __init__(self, code: UserCode):
        super().__init__({})
        self.code = code

    async def generate_response(self, instance_id, messages, **kwargs):
        return True, self.code.act(), 1.0, {}


def run_of(kind: str, code: UserCode, timeout: float, monkeypatch) -> Run:
    """A run in which the user's code of this kind is called, with its own time limit."""
    if kind == "tool":
        limits = {"tool_timeout": timeout}
        return Run(
            ToolAgent.name,
            ["<call>slow {}</call>", "end"],
            tools=ToolRegistry([Tool(code)]),
            limits=limits,
        )
    if kind == "reward":
        monkeypatch.setattr(reward_registry, "REWARDS", {})

        @rewards.register_reward("mine")
        async def compute_score(solution_str):
            code.act()
            return 1.0

        return Run(
            "single_turn_agent",
            ["end"],
            score=lambda trajectory: rewards.score(trajectory, timeout=timeout),
        )
    if kind == "environment":

        class World(Environment):
            async def reset(self):
                return Observation.say("begin")

            async def step(self, reply):
                return Observation(done=True, messages=({"role": "user", "content": code.act()},))

        monkeypatch.setattr(environments, "ENVIRONMENTS", {"world": World})
        extra_info = {"environment_kwargs": {"name": "world"}}
        return Run(
            EnvironmentAgent.name, ["end"], extra_info=extra_info, pools={"timeout": timeout}
        )
    if kind == "user":
        users = InteractionRegistry({"me": User(code)}, timeout=timeout)
        return Run(InteractionAgent.name, ["end"], interactions=users)

    class Mine(AgentLoop):
        async def play(self, request):
            code.act()
            return await self.context_agent.play(request)

        @property
        def context_agent(self):
            return agent_loops.get_agent("single_turn_agent")(self.context)

    class Program(OpenAIAgentLoop):
        name = "mine"

        @staticmethod
        async def function(base_url, api_key, row):
            code.act()

    agents = {**agent_loops.AGENTS, "mine": {"agent": Mine, "program": Program}[kind]}
    monkeypatch.setattr(agent_loops, "AGENTS", agents)
    Mine.name = "mine"
    return Run("mine", ["end"])


KINDS = ["tool", "reward", "environment", "user", "agent", "program"]
"""``program``: an agent with an OpenAI client."""


@contextmanager
def releasing(code: UserCode, told: list):
    """Watch the loop; what is told of it releases the code."""

    def report(kind, message):
        if f"{HERE}:" in message:  # not a test's fake on a busy machine
            told.append(message)
            code.released.set()

    with watch_loop(report, patience=PATIENCE):
        yield


OWN_ERRORS = {
    "reward": RewardError,
    "environment": EnvironmentFailedError,
    "user": InteractionError,
}


@pytest.mark.parametrize(
    ("kind", "make"),
    [*((kind, LookupError) for kind in KINDS), *OWN_ERRORS.items(), ("agent", TrajectoryError)],
)
async def test_one_warning_has_file_and_line_and_the_others_are_counted(kind, make, monkeypatch):
    """Whether it raises an exception of its own or one of this package's."""
    run = run_of(kind, UserCode(raises=True, make=make), 10.0, monkeypatch)
    await run.play(count=5)
    run.failures.flush()
    first, summary = run.lines
    source = Path(__file__).read_text().splitlines()
    line = 1 + source.index(
        '            raise self.make("no such thing")  # the line that has to be named'
    )
    assert f"{HERE}:{line}" in first and "no such thing" in first
    assert "4 x " in summary


NAMED = {
    "tool": "'slow'",
    "reward": "'mine'",
    "environment": "'world'",
    "user": "'me'",
    "agent": "'mine'",
}


@pytest.mark.parametrize("kind", KINDS)
async def test_code_that_holds_the_event_loop_is_named_with_its_line(kind, monkeypatch):
    code = UserCode(raises=False)
    told = []
    run = run_of(kind, code, 60.0, monkeypatch)
    with releasing(code, told):
        await run.play()
    (message,) = told
    assert "asyncio.to_thread" in message
    assert NAMED.get(kind, "the agent") in message


@pytest.mark.parametrize("kind", ["tool", "reward", "environment", "user"])
async def test_what_held_the_loop_beyond_its_limit_was_too_late(kind, monkeypatch):
    code = UserCode(raises=False)
    told = []
    run = run_of(kind, code, PATIENCE / 2, monkeypatch)
    with releasing(code, told):
        group = await run.play()
    assert told
    if kind == "tool":
        (trajectory,) = group.trajectories
        assert trajectory.tool_calls[0].error == "timeout"
        assert "within" in trajectory.tool_calls[0].observation
    else:
        assert not group.trajectories
        assert sum(group.dropped.values()) == 1


class Blocking(ServerTool):
    name = "slow"
    usage = "slow"

    def parse_action(self, text):
        return text

    async def act(self, action):
        return ToolObservation(text=self.code.act())


@pytest.mark.parametrize("seconds", [60.0, PATIENCE / 2])
async def test_a_served_tool_that_holds_its_loop_is_named(seconds):
    settings = ToolServerSettings(
        tools=("finish",), step_seconds=seconds, limits={"wall_seconds": 0.001}
    )
    tool = Blocking(ToolContext(settings=settings, threads=DaemonThreads(), _sandbox=None))
    tool.code = code = UserCode(raises=False)
    service = ToolService([tool], settings, Telemetry(CollectorRegistry(), worker="0"))
    told = []
    with releasing(code, told):
        reply = await service.step(ServerAction(trajectory_id="t", text="go"))
    assert "'slow'" in told[0]
    assert reply.error == (None if seconds == 60.0 else Failure.TIMEOUT)


async def test_waiting_and_work_of_others_do_not_make_a_call_late():
    """The loop is held by something else for longer than the tool's limit; the tool itself was
    quick.
    """
    code = UserCode(raises=False)
    told = []
    started = asyncio.Event()

    class Quick(Tool):
        async def execute(self, instance_id, arguments, **kwargs):
            started.set()
            await asyncio.sleep(0)
            return "quick"

    run = Run(
        ToolAgent.name,
        ["<call>slow {}</call>", "end"],
        tools=ToolRegistry([Quick(code)]),
        limits={"tool_timeout": PATIENCE},
    )

    async def hold():
        await started.wait()
        code.act()

    with releasing(code, told):
        group, _ = await asyncio.gather(run.play(), hold())
    assert "code holds" in told[0], "it has no name, but a line"
    assert group.trajectories[0].tool_calls[0].error is None


async def test_a_loop_that_runs_is_never_told_of():
    told = []
    never = threading.Event()
    with watch_loop(lambda kind, message: told.append(message), patience=0.5):
        for _ in range(12):
            await asyncio.to_thread(never.wait, 0.1)
    assert not told
