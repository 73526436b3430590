"""Which agent runs a row that names none, and what is said of tools that no row will use."""

import json
import logging

import pytest

from jax_agent_rl.agents import (
    AgentSelector,
    SearchAgent,
    ServerToolAgent,
    SingleTurnAgent,
    TextToolAgent,
    ToolAgent,
)
from jax_agent_rl.config import DataSource, SearchConfig, ToolClientConfig, build
from jax_agent_rl.config.default_agent import report_idle_tools
from jax_agent_rl.runtime import rollouts
from jax_agent_rl.tools.registry import ToolRegistry
from tests.agent_testbed import AgentHarness

MINIMAL = {"run_dir": "runs/x", "model": {"path": "m"}, "data": {"train": "t.jsonl"}}
URL = "http://localhost:1"
SERVER = {"tool_server_url": URL, "action_stop_tokens": ("</py>",)}


@pytest.mark.parametrize(
    ("limits", "text_tools", "agent"),
    [
        ({}, False, SingleTurnAgent),
        ({}, True, TextToolAgent),
        ({"enable_search": True}, True, SearchAgent),
        ({"enable_search": True}, False, SearchAgent),
        ({"enable_search": True, "default_agent": "tool_agent"}, True, ToolAgent),
        (SERVER, False, ServerToolAgent),
        ({**SERVER, "enable_agent": False}, False, SingleTurnAgent),
        ({**SERVER, "default_agent": "single_turn_agent"}, False, SingleTurnAgent),
        (SERVER, True, TextToolAgent),
        ({**SERVER, "enable_search": True}, True, SearchAgent),
    ],
)
def test_a_row_without_agent_name_runs_what_is_switched_on(limits, text_tools, agent):
    shared = {
        "tool_config": ToolClientConfig(enabled=text_tools, server_url=URL),
        "search": SearchConfig(server_url=URL),
    }
    selector = AgentSelector(AgentHarness(SingleTurnAgent, ["x"], shared=shared, **limits).context)
    assert type(selector.for_row({})) is agent
    assert type(selector.for_row({"agent_name": "single_turn_agent"})) is SingleTurnAgent


ROWS = [{"agent_name": "tool_agent"}, {}, {"agent_name": None}]
IDLE = {
    "tools.function_tool_path=tools.py": "agent.default_agent=tool_agent",
    "tools.tool_config_path=tools.yaml": "agent.default_agent=tool_agent",
    f"tool_config.server_url={URL}": "tool_config.enabled=true",
    f"search.server_url={URL}": "agent.enable_search=true",
    "environments.path=envs.py": "agent.default_agent=environment_agent",
    "interactions.interaction_config_path=users.yaml": "agent.default_agent=interaction_agent",
}


@pytest.mark.parametrize(("setting", "fix"), IDLE.items())
def test_settings_that_plain_generation_never_reads_are_named_with_a_fix(setting, fix):
    seen, advice = report_idle_tools(build(MINIMAL, [setting]), ROWS)
    assert "no agent_name in 2 of 3 rows" in seen
    assert setting.partition("=")[0] in seen
    assert f"set {fix}, or agent_name in the rows" in advice
    assert report_idle_tools(build(MINIMAL, [setting, fix]), ROWS) is None, "the fix is one"
    assert (
        report_idle_tools(build(MINIMAL, [setting, "agent.default_agent=single_turn_agent"]), ROWS)
        is None
    )
    assert report_idle_tools(build(MINIMAL, [setting]), ROWS[:1]) is None


@pytest.mark.parametrize(
    ("key", "agent"),
    [
        ("tools_kwargs", "tool_agent"),
        ("tool_selection", "tool_agent"),
        ("environment_kwargs", "environment_agent"),
        ("interaction_kwargs", "interaction_agent"),
    ],
)
def test_rows_that_ask_for_more_than_plain_generation_are_told(key, agent):
    config = build(MINIMAL)
    seen, advice = report_idle_tools(
        config, [{"extra_info": {key: {"name": "x"}}}, {"extra_info": None}]
    )
    assert f"extra_info.{key}" in seen
    assert f"agent.default_agent={agent}" in advice
    assert report_idle_tools(config, [{"extra_info": {key: None}}]) is None
    assert (
        report_idle_tools(
            config, [{"extra_info": {key: {"name": "x"}}, "agent_name": "single_turn_agent"}]
        )
        is None
    )


def test_a_tool_server_that_is_switched_off_is_meant_to_be():
    off = build(MINIMAL, [f"agent.tool_server_url={URL}", "agent.enable_agent=false"])
    assert report_idle_tools(off, [{}]) is None


def test_loading_rows_warns_of_what_they_leave_idle(tmp_path, caplog):
    rows = tmp_path / "rows.jsonl"
    rows.write_text(
        json.dumps({"prompt": [{"role": "user", "content": "x"}], "data_source": "d"}) + "\n"
    )
    config = build(MINIMAL, ["tools.function_tool_path=tools.py"])
    sources = (DataSource(path=str(rows)),)
    rollouts.warn_of_idle_tools(
        config, sources, rollouts.read_rows(config, ToolRegistry(), (sources, None))
    )
    (said,) = [
        record.getMessage() for record in caplog.records if record.levelno == logging.WARNING
    ]
    assert said.startswith(
        f"TOOLS ARE CONFIGURED BUT NOT USED: {rows}: no agent_name in 1 of 1 row"
    )
    assert "What to do: set " in said


def test_several_idle_settings_are_named_together():
    seen, advice = report_idle_tools(build(MINIMAL, list(IDLE)), [{}])
    assert all(setting.partition("=")[0] in seen for setting in IDLE)
    assert all(fix in advice for fix in IDLE.values())
