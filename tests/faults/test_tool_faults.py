"""Tools and calls that go wrong: the model reads what happened, it is counted, nothing is lost,
nothing hangs.

Every test runs whole trajectories: collector, agent, client, tools; only the engine is scripted.
"""

import asyncio
import logging
import sys
import threading

import pytest

from jax_agent_rl.agents import AgentContext
from jax_agent_rl.collect.collector import RolloutCollector
from jax_agent_rl.config import AgentConfig
from jax_agent_rl.errors import ToolError
from jax_agent_rl.rollout.client import LLMServerClient
from jax_agent_rl.rollout.server import AsyncServer
from jax_agent_rl.tools import FunctionTool, ToolRegistry
from jax_agent_rl.tools.base import MARKER
from jax_agent_rl.types import FinishReason, SamplingParams
from jax_agent_rl.utils.timeouts import DaemonThreads
from tests.fakes import FakeCodec, ScriptedBackend
from tests.trajectories import trajectories_of

ROWS = [{"prompt": [{"role": "user", "content": "go"}], "agent_name": "tool_agent"}]


class Faults:
    """One tool per fault. ``release()`` lets the hung threads go at the end of a test."""

    def __init__(self):
        self.threads = DaemonThreads(max_abandoned=3)
        self._go = threading.Event()
        functions = [
            self.fine,
            self.raises,
            self.refuses,
            self.exits,
            self.huge,
            self.hangs,
            self.hangs_async,
        ]
        functions += [
            self.ignores_cancellation,
            self.huge_error,
            self.returns_nothing,
            self.cancels_itself,
        ]
        self.tools = [FunctionTool(f, threads=self.threads) for f in functions]

    def release(self):
        self._go.set()

    def fine(self, x: int = 0) -> str:
        return f"fine {x}"

    def raises(self) -> str:
        raise ValueError("broken inside")

    def refuses(self) -> str:
        raise ToolError("unexpected token 'x'")

    def exits(self) -> str:
        sys.exit(3)

    def huge(self) -> str:
        return "begin " + "x " * 5_000_000 + "end"

    def huge_error(self) -> str:
        raise ValueError("y " * 5_000_000)

    def returns_nothing(self) -> None:
        return None

    def hangs(self) -> str:
        self._go.wait()
        return "late"

    async def hangs_async(self) -> str:
        await asyncio.Event().wait()
        return "never"

    async def ignores_cancellation(self) -> str:
        while not self._go.is_set():
            try:
                await asyncio.sleep(0.001)
            except asyncio.CancelledError:
                continue
        return "late"

    async def cancels_itself(self) -> str:
        raise asyncio.CancelledError


@pytest.fixture
def faults():
    injected = Faults()
    yield injected
    injected.release()


async def run(faults, script, *, count=4, timeout=60.0, **limits):
    """Runs ``count`` trajectories of the script; asserts that none is lost; returns them."""
    codec = FakeCodec()
    context = AgentContext(
        client=LLMServerClient([AsyncServer(ScriptedBackend(codec, script))]),
        codec=codec,
        tools=ToolRegistry(faults.tools),
        limits=AgentConfig(**{"tool_prompt": "none", "tool_timeout": timeout, **limits}),
        max_model_len=2000,
    )

    async def unscored(trajectory):
        return trajectory

    collector = RolloutCollector(context, score=unscored, max_in_flight=64, seed=0)
    groups = await collector.collect(
        ROWS, group_size=count, sampling=SamplingParams(max_tokens=500), step=0
    )
    trajectories = trajectories_of(groups)
    assert collector.accounting.summary() == {
        "started": count,
        "trained": 0,
        "in_flight": count,
        "dropped": 0,
    }
    assert all(t.finish_reason is FinishReason.ANSWER for t in trajectories), (
        "each goes on after the fault"
    )
    return trajectories


@pytest.mark.parametrize(
    ("call", "error", "observation"),
    [
        ("raises {}", "raised", "Error: raises raised ValueError: broken inside"),
        ("refuses {}", "raised", "Error: unexpected token 'x'"),
        ("exits {}", "raised", "Error: exits raised SystemExit: 3"),
        (
            "returns_nothing {}",
            "raised",
            "Error: returns_nothing raised TypeError: a tool must return str",
        ),
        (
            "cancels_itself {}",
            "raised",
            "Error: cancels_itself did not answer: it cancelled itself",
        ),
        ("nobody {}", "unknown_tool", "Error: there is no tool 'nobody'; available tools: fine,"),
        (
            'fine {"x": "many"}',
            "bad_arguments",
            "Error: wrong arguments for fine: argument x: 'many' is not of type",
        ),
        ('fine {"y": 1}', "bad_arguments", "'y' was unexpected"),
        ("fine [1]", "bad_arguments", "arguments must be a JSON object"),
        ("fine null", "bad_arguments", "arguments must be a JSON object"),
        ("fine {not json}", "malformed", "Error: Failed to decode tool call"),
    ],
)
async def test_every_fault_becomes_a_counted_observation(faults, call, error, observation):
    for trajectory in await run(faults, [f"<call>{call}</call>", "I see"]):
        (record,) = trajectory.tool_calls
        assert record.error == error
        assert observation in record.observation
        assert trajectory.messages[2]["content"] == record.observation
        assert (trajectory.metrics["tool_calls"], trajectory.metrics["tool_errors"]) == (1, 1)


async def test_malformed_calls_are_told_on_the_console(faults, caplog):
    await run(faults, ["<call>fine {oops</call>", "I see"], count=5)
    (said,) = caplog.records  # the other four are counted
    assert said.levelno == logging.WARNING
    assert "<call>fine {oops</call>" in said.getMessage()
    assert "agent.tool_format" in said.getMessage()


@pytest.mark.parametrize("tool", ["hangs", "hangs_async", "ignores_cancellation"])
async def test_a_tool_that_hangs_is_left_behind_and_the_run_goes_on(faults, tool):
    for trajectory in await run(
        faults, [f"<call>{tool} {{}}</call>", "I see"], count=2, timeout=0.05
    ):
        (record,) = trajectory.tool_calls
        assert record.error == "timeout"
        assert record.observation == f"Error: {tool} did not answer within 0.05 seconds"
    assert faults.threads.abandoned == (2 if tool == "hangs" else 0)
    faults.release()


async def test_hung_threads_are_bounded_and_further_calls_say_so(faults):
    hang = "<call>hangs {}</call>"
    (trajectory,) = await run(
        faults,
        [hang * 3, "<call>fine {}</call>", "I see"],
        count=1,
        timeout=0.05,
        max_parallel_calls=3,
    )
    *hung, refused = trajectory.tool_calls
    assert [record.error for record in hung] == ["timeout"] * 3
    assert refused.error == "raised"
    assert "3 earlier tool calls never returned" in refused.observation


async def test_while_one_tool_hangs_other_trajectories_finish(faults):
    """The hanging call is released only by the other trajectory's answer; a blocked loop would
    never get there.
    """
    codec = FakeCodec()

    def script(request):
        is_first = request.session_id.endswith("-0")
        has_called = " fine" in codec.decode(request.prompt_ids)
        if not is_first and has_called:
            faults.release()
        if "tool:" in codec.decode(request.prompt_ids):
            return codec.reply_ids("I see")
        return codec.reply_ids("<call>hangs {}</call>" if is_first else "<call>fine {}</call>")

    context = AgentContext(
        client=LLMServerClient([AsyncServer(ScriptedBackend(codec, script))]),
        codec=codec,
        tools=ToolRegistry(faults.tools),
        limits=AgentConfig(tool_prompt="none", tool_timeout=60),
        max_model_len=2000,
    )

    async def unscored(trajectory):
        return trajectory

    collector = RolloutCollector(context, score=unscored, max_in_flight=2, seed=0)
    sampling = SamplingParams(max_tokens=500)
    (group,) = await collector.collect(ROWS, group_size=2, sampling=sampling, step=0)
    assert [t.tool_calls[0].observation for t in group.trajectories] == ["late", "fine 0"]


@pytest.mark.parametrize(
    ("side", "begin", "end"),
    [("left", False, True), ("middle", True, True), ("right", True, False)],
)
async def test_ten_megabytes_become_a_short_observation(faults, side, begin, end):
    limits = {"max_tool_response_length": 12, "tool_response_truncate_side": side}
    for trajectory in await run(faults, ["<call>huge {}</call>", "I see"], count=2, **limits):
        (record,) = trajectory.tool_calls
        assert record.error is None and MARKER in record.observation
        assert len(record.observation.split()) <= 12
        assert record.observation.startswith("begin") is begin
        assert record.observation.endswith("end") is end


async def test_a_huge_error_message_is_shortened_too(faults):
    for trajectory in await run(
        faults, ["<call>huge_error {}</call>", "I see"], count=1, max_tool_response_length=12
    ):
        assert trajectory.tool_calls[0].error == "raised"
        assert len(trajectory.tool_calls[0].observation.split()) <= 12


async def test_calls_over_the_parallel_limit_are_answered_not_dropped(faults):
    script = ['<call>fine {"x": 1}</call>' * 4, "I see"]
    for trajectory in await run(faults, script, max_parallel_calls=3):
        assert [record.error for record in trajectory.tool_calls] == [None] * 3 + [
            "over_parallel_limit"
        ]
        assert [m["role"] for m in trajectory.messages].count("tool") == 4


async def test_faults_side_by_side_stay_apart(faults):
    calls = "".join(
        f"<call>{call}</call>"
        for call in ("raises {}", "fine {}", "nobody {}", "fine {", "exits {}")
    )
    (trajectory,) = await run(faults, [calls, "I see"], count=1, max_parallel_calls=8)
    errors = [record.error for record in trajectory.tool_calls]
    assert errors == [
        "raised",
        None,
        "unknown_tool",
        "malformed",
        "raised",
    ], "as the model wrote them"
    assert trajectory.metrics["tool_errors"] == 4
