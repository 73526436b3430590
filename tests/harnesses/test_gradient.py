"""The gradient of sessions of harnesses equals the one of their single calls."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")

from tests.capabilities import needs_bwrap
from tests.harnesses.by_hand import assert_gradient_of_single_calls
from tests.harnesses.running import (
    INSTALLED,
    MINI_SWE_AGENT_REPLIES,
    OPENCODE_REPLIES,
    OPENCODE_TITLE,
    OPENHANDS_REPLIES,
    TASK_MARK,
    WITH_PYTHON,
    run,
)

pytestmark = [pytest.mark.harnesses, pytest.mark.timeout(900), needs_bwrap, INSTALLED, WITH_PYTHON]


@pytest.mark.parametrize(
    ("program", "replies"),
    [
        ("mini_swe_agent.sh", MINI_SWE_AGENT_REPLIES),
        ("opencode.sh small", OPENCODE_REPLIES),
        ("openhands.sh small", OPENHANDS_REPLIES),
    ],
)
async def test_two_sessions_have_the_gradient_of_their_single_calls(
    program: str, replies: tuple[str, ...], tmp_path: Path
):
    """One gives up, the other mends the file: rewards 0 and 1 of the task's own tests."""
    sessions = []
    for lines in (replies[-1:], replies):
        sessions.append(await run(f"sh /tmp/agent/{program}", {**OPENCODE_TITLE, TASK_MARK: lines}))
    for session in sessions:
        session.assert_all_on_record()
    assert [session.output["reward"] for session in sessions] == [0.0, 1.0]

    trajectories = [session.trajectory for session in sessions]
    calls = [session.calls for session in sessions]
    assert_gradient_of_single_calls(tmp_path, trajectories, calls)
