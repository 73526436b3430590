"""Tool calls that could not be decoded are told, but do not flood the console."""

import pytest

from jax_agent_rl.agents import TextToolAgent, ToolAgent
from jax_agent_rl.agents.context import MalformedCalls
from jax_agent_rl.config import ToolClientConfig
from tests.agent_testbed import AgentHarness


def test_one_is_told_in_an_interval_with_the_number_of_those_that_were_not(caplog):
    now = 0.0
    calls = MalformedCalls(interval=30.0, clock=lambda: now)
    for now in (0.0, 1.0, 29.0, 31.0, 32.0, 61.0, 500.0):
        calls.report(f"call at {now:g}", "expected ']'" if now < 40 else "")
    assert [record.getMessage() for record in caplog.records] == [
        "Failed to decode tool call 'call at 0': expected ']'; if the model writes calls in another format, "
        "set agent.tool_format",
        "Failed to decode tool call 'call at 31': expected ']' (and 2 more since the last report)",
        "Failed to decode tool call 'call at 61' (and 1 more since the last report)",
        "Failed to decode tool call 'call at 500'",
    ]
    assert {record.levelname for record in caplog.records} == {"WARNING"}


def test_what_a_model_wrote_is_shown_escaped_and_short(caplog):
    MalformedCalls().report("\x1b[2J\r" + "x" * 1000, "no \x1b[2K×" + "y" * 1000)
    (record,) = caplog.records
    assert "\x1b" not in record.getMessage() and "\\x1b[2J\\r" in record.getMessage()
    assert "': no \\x1b[2K×y" in record.getMessage()
    assert len(record.getMessage()) < 300


@pytest.mark.parametrize(
    ("agent", "said"), [(ToolAgent, "<call>add {oops</call>"), (TextToolAgent, "oops </tool> and so on")]
)
async def test_of_three_in_a_moment_one_is_told_and_how_to_mend_it(caplog, agent, said):
    shared = {"tool_config": ToolClientConfig(server_url="http://localhost:1")}
    it = AgentHarness(agent, [said, "I see"], shared=shared)
    trajectories = [await it.run(trajectory_id=f"t{number}") for number in range(3)]
    assert {trajectory.tool_calls[0].error for trajectory in trajectories} == {"malformed"}
    (record,) = caplog.records
    assert record.getMessage().startswith("Failed to decode tool call '") and said[:10] in record.message
    assert "tool_format" in record.message


async def test_nothing_is_said_where_every_call_could_be_decoded(caplog):
    await AgentHarness(ToolAgent, ["fine"]).run(trajectory_id="t")
    assert not caplog.records
