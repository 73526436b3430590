"""Agent ``harbor`` where Harbor is not installed: the message says what to do."""

from __future__ import annotations

import sys

import pytest

from jax_agent_rl.agents import HarborAgent
from jax_agent_rl.agents.harbor import agent
from jax_agent_rl.errors import ConfigError
from tests.agent_testbed import AgentHarness
from tests.messages import raises


@pytest.mark.parametrize(
    ("version", "fix"), [((3, 11), "PYTHON=python3.12"), ((3, 12), "install.sh harbor")]
)
async def test_the_extra_and_the_python_are_named(
    version: tuple[int, int], fix: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(sys, "version_info", version)
    monkeypatch.setattr(agent, "is_installed", lambda name: False)
    monkeypatch.setattr(agent, "install_command", lambda extra: f"./launch/install.sh {extra}")
    harness = AgentHarness(HarborAgent, [], harbor={"agent": "nop"})
    with raises(ConfigError, key="harbor", fix=fix):
        await harness.agent.preflight()
    with raises(ConfigError, key="harbor", fix=fix):
        await harness.run()
