"""Brings the tools of a branch to where its parent's stood at the fork.

Tools keep state per trajectory, and a branch is a trajectory of its own. So the calls of the turns it took over are
made again in its session, turn by turn, and must be answered as they were: the ids that follow were sampled after
those answers. Tools without such state (``BaseTool.stateful`` false, e.g. function tools) are not called again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from jax_agent_rl.errors import ReplayError
from jax_agent_rl.tools.session import ToolSession
from jax_agent_rl.types import ToolCallRecord, Turn

_NEVER_RAN = frozenset({"malformed", "unknown_tool", "bad_arguments", "over_parallel_limit"})


async def replay(session: ToolSession, turns: Sequence[Turn]) -> dict[str, float]:
    """Repeat the tool calls of ``turns``.

    Returns:
        The metrics ``replayed_calls`` and ``replay_seconds``. ``session.metrics`` is cleared: those are the parent's.

    Raises:
        ReplayError: an observation, error or reward differs from the recorded one.
    """
    began, count = time.perf_counter(), 0
    for number, turn in enumerate(turns):
        calls = [c for c in turn.tool_calls if session.is_stateful(c.name) and c.error not in _NEVER_RAN]
        async with asyncio.TaskGroup() as group:  # side by side, as they were made
            tasks = [group.create_task(session.call(c.name, c.arguments, call_id=c.call_id)) for c in calls]
        for before, task in zip(calls, tasks, strict=True):
            _check(number, before, task.result())
        count += len(calls)
    session.metrics.clear()
    return {"replayed_calls": float(count), "replay_seconds": time.perf_counter() - began}


def _check(turn: int, before: ToolCallRecord, now: ToolCallRecord) -> None:
    if (before.observation, before.error, before.reward) != (now.observation, now.error, now.reward):
        raise ReplayError(
            f"{before.name} answered {now.observation!r:.200} (error {now.error}, reward {now.reward}) where it had "
            f"answered {before.observation!r:.200} (error {before.error}, reward {before.reward}) in turn {turn}; give "
            "the tool a seed, or set its `stateful` to False if trajectories share its state"
        )
