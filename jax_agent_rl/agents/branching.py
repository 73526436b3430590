"""Branching off a finished trajectory: the prefix a branch takes over, and the replay of its tool calls.

A branch takes over ids, never text that would be tokenized again. Tools keep state per trajectory, and a branch is a
trajectory of its own, so the calls of its first turns are repeated in its session, turn by turn. Their answers must not
change: the ids that follow were sampled after them. Stateless tools (``BaseTool.stateful`` false, e.g. function tools)
are not called again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jax_agent_rl.errors import ReplayError
from jax_agent_rl.tools.session import ToolSession
from jax_agent_rl.types import Fork, StopReason, TokenOutput, ToolCallRecord, Trajectory, Turn

_NEVER_RAN = frozenset({"malformed", "unknown_tool", "bad_arguments", "over_parallel_limit"})


@dataclass(frozen=True, kw_only=True, slots=True)
class Prefix:
    """A trajectory up to a fork.

    Attributes:
        fork: where it ends.
        prompt_ids: the prompt.
        turns: whole turns, with what was appended to them.
        begun: the ids taken over of the next turn, as if it had been interrupted there; None if there are none.
        messages: the conversation as text, up to ``turns``.
    """

    fork: Fork
    prompt_ids: tuple[int, ...]
    turns: tuple[Turn, ...]
    begun: TokenOutput | None
    messages: tuple[Mapping[str, Any], ...]

    @classmethod
    def of(cls, parent: Trajectory, fork: Fork) -> Prefix:
        """Return the beginning of ``parent`` up to ``fork``.

        Raises:
            ValueError: the fork is of another trajectory, does not leave a turn to sample, or the parent edited its
                history, so that its last context is not all of it.
        """
        if fork.parent_id != parent.trajectory_id or parent.segments:
            raise ValueError(f"{fork} is no place in trajectory {parent.trajectory_id}")
        if not 0 <= fork.turns < parent.num_turns:
            raise ValueError(f"{fork}: trajectory {parent.trajectory_id} has {parent.num_turns} turns; keep fewer")
        cut = parent.turns[fork.turns].output
        if not 0 <= fork.tokens < len(cut.token_ids):
            raise ValueError(f"{fork}: turn {fork.turns} of {parent.trajectory_id} has {len(cut.token_ids)} ids")
        return cls(
            fork=fork,
            prompt_ids=parent.prompt_ids,
            turns=parent.turns[: fork.turns],
            begun=cut.first(fork.tokens, stop_reason=StopReason.ABORTED, stop_match=None) if fork.tokens else None,
            messages=_messages_before(parent, fork.turns),
        )

    @property
    def context_ids(self) -> list[int]:
        """The prompt and the whole turns."""
        ids = list(self.prompt_ids)
        for turn in self.turns:
            ids += turn.output.token_ids + turn.appended_ids
        return ids


def _messages_before(trajectory: Trajectory, turn: int) -> tuple[Mapping[str, Any], ...]:
    """Return the messages before a turn, counted from the end as the prompt may hold assistant messages."""
    spoken = [i for i, message in enumerate(trajectory.messages) if message["role"] == "assistant"]
    return trajectory.messages[: spoken[turn - trajectory.num_turns]]


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
