r"""Request and answer of ``POST /get_observation``.

::

    {"trajectory_ids": ["t-1", "t-2"], "actions": ["<python>print(1)</python>", ""],
     "extra_fields": [{"turns_left": 2}, {}], "finish": [false, true], "is_last_step": [false, true]}
    ──►
    {"observations": ["1\n", ""], "dones": [false, true], "valids": [true, true],
     "tools": ["python", "finish"], "errors": [null, null], "processing_time_ms": 41.7}

An observation is a string, or ``{"obs", "reward"?, "image"?, "audio"?, "metrics"?, …}`` if it holds more than text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from jax_agent_rl.tool_server.plugin import ToolObservation
from jax_agent_rl.tools.client import ServerAction

TrajectoryId = Annotated[
    str,
    Field(min_length=1, max_length=256),
    BeforeValidator(lambda value: str(value) if type(value) is int else value),
]


class Failure(StrEnum):
    """Reason why an action has no ordinary observation."""

    INVALID = "invalid_action"
    """No tool accepts it."""
    TOOL = "tool_error"
    """The tool raised ``ToolError``."""
    CRASH = "tool_crash"
    """The tool raised something else."""
    TIMEOUT = "timeout"
    """It took longer than ``step_seconds``."""
    GONE = "environment_gone"
    """The trajectory's environment was closed before: it was idle, or interrupted in the middle of an action."""
    WORKER = "worker_died"
    """The process that held its environment ended."""


class ObservationRequest(BaseModel):
    """Body of a request; each list has one entry per trajectory id."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    trajectory_ids: list[TrajectoryId] = Field(min_length=1)
    actions: list[str]
    extra_fields: list[dict[str, Any]] | None = None
    finish: list[bool] | None = None
    is_last_step: list[bool] | None = None

    @model_validator(mode="after")
    def _equal_lengths(self) -> ObservationRequest:
        expected = len(self.trajectory_ids)
        for name in ("actions", "extra_fields", "finish", "is_last_step"):
            values = getattr(self, name)
            if values is not None and len(values) != expected:
                raise ValueError(f"{name} has {len(values)} entries, trajectory_ids has {expected}; they must match")
        return self

    def steps(self) -> list[ServerAction]:
        """Return one action per trajectory id, in order."""
        count = len(self.trajectory_ids)
        columns = zip(
            self.trajectory_ids,
            self.actions,
            self.extra_fields or [{}] * count,
            self.finish or [False] * count,
            self.is_last_step or [False] * count,
            strict=True,
        )
        return [
            ServerAction(trajectory_id=id, text=text, extra_fields=extra, finish=finish, is_last_step=last)
            for id, text, extra, finish, last in columns
        ]


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolReply:
    """One trajectory's part of an answer.

    Attributes:
        observation: as sent to the client.
        done, valid: see :class:`ToolObservation`.
        tool: the tool that acted, ``finish``, or None.
        error: reason why there is no ordinary observation.
        open: whether the trajectory has an open environment.
    """

    observation: str | dict[str, Any]
    done: bool
    valid: bool
    tool: str | None
    error: Failure | None
    open: bool


def encode_observation(observation: ToolObservation, text: str) -> str | dict[str, Any]:
    """Encode an observation with this (shortened) text: a string if there is only text."""
    media = {"image": list(observation.image), "audio": list(observation.audio), "metrics": dict(observation.metrics)}
    more: dict[str, Any] = {key: value for key, value in media.items() if value}
    if observation.reward is not None:
        more["reward"] = observation.reward
    return {"obs": text, **more} if more else text


def failed(failure: Failure, text: str, *, done: bool, tool: str | None = None, **more: Any) -> ToolReply:
    """Return the reply to a failed action: ``text`` is for the model, ``failure`` for the agent loop.

    Args:
        failure: the reason.
        text: what the model reads.
        done: whether the trajectory is over.
        tool: the tool that acted, if any.
        more: further fields of the observation.
    """
    observation = {"obs": text, "invalid_reason": failure.value, **more}
    return ToolReply(observation=observation, done=done, valid=False, tool=tool, error=failure, open=False)


def encode_replies(replies: Sequence[ToolReply], milliseconds: float) -> dict[str, Any]:
    """Return the body of an answer."""
    return {
        "observations": [reply.observation for reply in replies],
        "dones": [reply.done for reply in replies],
        "valids": [reply.valid for reply in replies],
        "tools": [reply.tool for reply in replies],
        "errors": [reply.error for reply in replies],
        "processing_time_ms": round(milliseconds, 3),
    }


def describe_errors(error: ValidationError) -> str:
    """Describe a body's validation errors in one line."""
    lines = []
    for item in error.errors(include_url=False)[:5]:
        where = ".".join(map(str, item["loc"]))
        lines.append((f"{where}: " if where else "") + item["msg"].removeprefix("Value error, "))
    return "; ".join(lines)
