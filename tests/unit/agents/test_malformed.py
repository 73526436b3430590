"""Tool calls that could not be decoded are told of once, and do not flood the console."""

import pytest

from jax_agent_rl.agents import TextToolAgent, ToolAgent
from jax_agent_rl.config import ToolClientConfig
from jax_agent_rl.utils.failures import FailureLog
from tests.agent_testbed import AgentHarness

FORMAT = ["agent.tool_format", "agent.constrain_tool_calls"]


def stage(agent, script, lines, **limits):
    shared = {
        "tool_config": ToolClientConfig(server_url="http://localhost:1"),
        "failures": FailureLog(emit=lines.append),
    }
    return AgentHarness(agent, script, shared=shared, **limits)


@pytest.mark.parametrize(
    ("agent", "said", "remedies"),
    [
        (ToolAgent, "<call>add {oops</call>", FORMAT),
        (TextToolAgent, "oops </tool> and so on", ["<tool>", "</tool>"]),
    ],
)
async def test_of_three_in_a_moment_one_is_told_and_how_to_mend_it(agent, said, remedies):
    lines = []
    it = stage(agent, [said, "I see"], lines)
    trajectories = [await it.run(trajectory_id=f"t{number}") for number in range(3)]
    assert {trajectory.tool_calls[0].error for trajectory in trajectories} == {"malformed"}
    (line,) = lines
    assert said[:10] in line
    assert all(remedy in line for remedy in remedies)
    it.context.failures.flush()
    assert lines == [line], "each step of a run tells of its others in one line"


async def test_a_key_that_is_set_is_no_advice():
    lines = []
    await stage(
        ToolAgent, ["<call>add {oops</call>", "I see"], lines, constrain_tool_calls=True
    ).run()
    (line,) = lines
    assert "agent.tool_format" in line
    assert "constrain_tool_calls" not in line


async def test_what_a_model_wrote_is_shown_escaped_and_short():
    lines = []
    await stage(ToolAgent, ["<call>\x1b[2J\r" + "x" * 1000 + "</call>", "I see"], lines).run()
    (line,) = lines
    assert "\x1b" not in line
    assert "\\x1b[2J\\r" in line
    assert len(line) < 600


async def test_nothing_is_said_where_every_call_could_be_decoded():
    lines = []
    await stage(ToolAgent, ["fine"], lines).run(trajectory_id="t")
    assert not lines
