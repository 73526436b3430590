"""Traces as JSON, as every sink writes them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from jax_agent_rl.tracing import Span, Trace


def trace_record(trace: Trace, *, max_text_length: int) -> dict[str, Any]:
    """A line of ``traces.jsonl``: the attributes of :class:`~jax_agent_rl.tracing.Trace`, texts shortened."""
    record = asdict(trace)
    for span in record["spans"]:
        span["attributes"] = shortened(span["attributes"], max_text_length)
    return record


def shortened(value: Any, most: int) -> Any:
    """A value as JSON; of texts longer than ``most`` characters both ends."""
    if isinstance(value, str):
        return value if len(value) <= most else f"{value[: most // 2]} … {value[-(most - most // 2) :]}"
    if isinstance(value, Mapping):
        return {str(key): shortened(item, most) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [shortened(item, most) for item in value]
    return value if isinstance(value, int | float | bool | None) else shortened(str(value), most)


def title(span: Span) -> str:
    """What a span is called: ``tool calculator``."""
    return f"{span.name} {span.about}".rstrip()


def tags(trace: Trace) -> dict[str, str]:
    """What a trace is found by."""
    named = {name: getattr(trace, name) for name in ("trajectory_id", "group_id", "step", "sample", "rollout")}
    return {name: str(value) for name, value in named.items()} | {"validate": str(trace.validate).lower()}


def failure(span: Span) -> str | None:
    """Why a span failed, or None; a tool's error was told to the model, and raised nothing."""
    return span.error or span.attributes.get("tool_error")


INPUTS = ("messages", "arguments", "context_tokens")
"""Attributes that are what a span was given; the sinks show them apart."""
OUTPUTS = ("text", "observation", "reward", "reward_parts", "finish_reason")
"""Attributes that are what came of it."""


def part(span: Span, names: tuple[str, ...], most: int) -> dict[str, Any]:
    """Those attributes of a span that have these names."""
    return {name: shortened(span.attributes[name], most) for name in names if name in span.attributes}


def rest(span: Span, most: int) -> dict[str, Any]:
    """All other attributes."""
    known = {*INPUTS, *OUTPUTS}
    return {name: shortened(value, most) for name, value in span.attributes.items() if name not in known}
