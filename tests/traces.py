"""Traces for tests."""

from __future__ import annotations

from typing import Any

from jax_agent_rl.tracing import Span, Trace

SECOND = 1_000_000_000
EPOCH = 1_700_000_000 * SECOND


def a_span(name: str, about: str, parent: int, begin: float, end: float, *, error: str | None = None, **facts: Any):
    """A span from ``begin`` to ``end`` seconds after the epoch of these tests."""
    times = {"start_ns": EPOCH + round(begin * SECOND), "end_ns": EPOCH + round(end * SECOND)}
    return Span(name=name, about=about, parent=parent, attributes=facts, error=error, **times)


def a_trace(trajectory_id: str = "train-3-1-2", *, step: int = 3, validate: bool = False) -> Trace:
    """Waits, calls a tool that fails, answers, is rewarded; four seconds."""
    messages = [{"role": "user", "content": "1 + 2 ?"}, {"role": "assistant", "content": "3"}]
    return Trace(
        trajectory_id=trajectory_id,
        group_id="train-3-1",
        step=step,
        sample=1,
        rollout=2,
        validate=validate,
        spans=(
            a_span("run", trajectory_id, -1, 0, 4, messages=messages, reward=1.0, finish_reason="answer"),
            a_span("wait", "slot", 0, 0, 1),
            a_span("generate", "", 0, 1, 2, text="<call>", context_tokens=7, stop_reason="eos"),
            a_span("tool", "add", 0, 2, 3, arguments={"a": 1}, observation="Error", tool_error="timeout"),
            a_span("reward", "sums", 0, 3, 4, error="ValueError: no", reward=1.0),
        ),
    )
