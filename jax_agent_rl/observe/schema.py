"""The form of the lines of a run's files.

A run folder may come from somebody else, or be damaged. A line of another form is skipped and
counted before anything looks at it, see :class:`~jax_agent_rl.observe.run_dir.Records`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, ValidationError, model_validator

from jax_agent_rl.types import FinishReason, StopReason
from jax_agent_rl.types.token_ids import ID_BOUND
from jax_agent_rl.utils.media import MAX_FRAMES

_Count = Annotated[int, Field(ge=0, lt=ID_BOUND)]
_Ids = Annotated[list[_Count], Field(fail_fast=True)]
_Values = Annotated[list[float | None], Field(fail_fast=True)]


class _Record(BaseModel):
    """JSON with at least these fields; later versions may have more."""

    model_config = ConfigDict(strict=True, extra="ignore")


_Name = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
_Shown = dict[
    Literal["image", "video"],
    _Count | list[_Name] | list[Annotated[list[_Name], Field(min_length=1, max_length=MAX_FRAMES)]],
]
"""What a prompt or an answer shows by kind: its names in ``observe.attachments``, or its number."""


class _Call(_Record):
    name: str
    seconds: float
    error: str | None
    # Records of earlier versions lack the following fields.
    arguments: dict[str, Any] | None = None
    observation: str = ""
    reward: float = 0.0
    call_id: str | None = None
    media: _Shown = {}


class _Turn(_Record):
    sampled: _Count
    appended: _Count
    stop_reason: Literal[tuple(StopReason)]  # pyright: ignore[reportInvalidTypeForm]
    cached_tokens: int
    score: float | None
    tool_calls: list[_Call]
    # Records of earlier versions lack the following fields.
    number: _Count | None = None
    note: str = ""
    learn_appended: bool = False
    constrained: Annotated[list[Literal[0, 1]], Field(fail_fast=True)] = []
    supports: list[Any] = []
    routed_positions: _Count = 0
    appended_media: _Shown = {}

    @model_validator(mode="after")
    def _as_many_as_sampled(self) -> _Turn:
        if self.constrained and len(self.constrained) != self.sampled:
            raise ValueError(f"{len(self.constrained)} marks of {self.sampled} tokens")
        return self


class _Fork(_Record):
    tree_id: str
    parent_id: str
    turns: _Count
    tokens: _Count = 0


class _Trajectory(_Record):
    trajectory_id: str
    group_id: str
    agent_name: str
    step: int
    split: str
    prompt_ids: Annotated[_Ids, Field(min_length=1)]
    response_ids: _Ids
    response_mask: Annotated[list[Literal[0, 1]], Field(fail_fast=True)]
    rollout_logprobs: Annotated[list[float], Field(fail_fast=True)]
    policy_versions: Annotated[list[int], Field(fail_fast=True)]
    finish_reason: Literal[tuple(FinishReason)]  # pyright: ignore[reportInvalidTypeForm]
    reward: FiniteFloat
    reward_parts: dict[str, float]
    metrics: dict[str, float]
    tool_scores: dict[str, float]
    row: dict[str, Any]
    messages: list[dict[str, Any]]
    turns: Annotated[list[_Turn], Field(min_length=1)]
    segments: list[_Trajectory]
    fork: _Fork | None
    no_loss: str | None
    history_window: _Count | None
    role: str | None
    adapter: str | None
    # Records of earlier versions lack the following fields.
    prompt_media: _Shown = {}
    raw_score: FiniteFloat | None = None
    feedback: str = ""
    teacher_prompt_ids: _Ids = []
    advantages: _Values | None = None
    old_logprobs: _Values | None = None
    greedy_reward: FiniteFloat | None = None
    learner_inputs: _Name | None = None

    @model_validator(mode="after")
    def _of_one_length(self) -> _Trajectory:
        # Before a mask of that length is made: a few bytes can say any number.
        num_ids = sum(turn.sampled + turn.appended for turn in self.turns)
        if num_ids != len(self.response_mask):
            raise ValueError(f"turns of {num_ids} ids, and a response_mask of other length")

        mask: list[int] = []
        for turn in self.turns:
            mask += [1] * turn.sampled
            mask += [0] * turn.appended
        if self.response_mask != mask or not any(mask):
            raise ValueError("response_mask is not that of the turns")

        for name in (
            "response_ids",
            "rollout_logprobs",
            "policy_versions",
            "advantages",
            "old_logprobs",
        ):
            values = getattr(self, name)
            if values is not None and len(values) != len(mask):
                raise ValueError(f"{name} has {len(values)} values for {len(mask)} ids")

        if self.fork is not None and self.fork.turns > len(self.turns):
            raise ValueError("the fork has more turns than the trajectory")
        if any(segment.segments for segment in self.segments):
            raise ValueError("a segment has segments of its own")
        return self


def is_trajectory_record(record: Mapping[str, Any]) -> bool:
    """Return whether a record has the form of a trajectory.

    :func:`~jax_agent_rl.observe.run_dir.trajectory_record` writes it.
    """
    try:
        _Trajectory.model_validate(record)
    except (ValidationError, RecursionError):
        return False
    return True


class _Span(_Record):
    name: str
    about: str
    start_ns: int
    end_ns: int
    attributes: dict[str, Any]
    error: str | None


class _Trace(_Record):
    trajectory_id: str
    spans: Annotated[list[_Span], Field(min_length=1)]


def is_trace_record(record: Mapping[str, Any]) -> bool:
    """Return whether a record has the form of a trace.

    :class:`~jax_agent_rl.observe.sinks.traces.TraceFileSink` writes it.
    """
    try:
        _Trace.model_validate(record)
    except (ValidationError, RecursionError):
        return False
    return True
