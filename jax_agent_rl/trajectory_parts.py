"""Reasons, tool calls, media and forks of trajectories; import them from :mod:`jax_agent_rl.types`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class StopReason(StrEnum):
    """Why one *generation* ended."""

    EOS = "eos"
    """The model's end-of-sequence id was sampled. It is the last id of the output, with its log-prob."""
    STOP = "stop"
    """A stop string or an extra stop token id was produced; ``TokenOutput.stop_match`` says which."""
    LENGTH = "length"
    """``max_tokens`` ids were sampled, or the model's context is full."""
    ABORTED = "aborted"
    """Cancelled from outside. The ids so far are valid and the generation can be resumed."""


class FinishReason(StrEnum):
    """Why a whole *trajectory* ended."""

    ANSWER = "answer"
    """The last assistant turn made no tool call."""
    MAX_ASSISTANT_TURNS = "max_assistant_turns"
    """The assistant turn limit was reached while the model still called tools."""
    MAX_USER_TURNS = "max_user_turns"
    """The limit of tool / user turns was reached."""
    RESPONSE_LENGTH = "response_length"
    """The response budget (sampled + inserted ids) is used up."""
    ACTION_LENGTH = "action_length"
    """One turn reached ``agent.max_action_length`` and held no action."""
    TOOL_DONE = "tool_done"
    """The tool server ended it."""
    USER_DONE = "user_done"
    """The simulated user ended the conversation."""
    ENVIRONMENT_DONE = "environment_done"
    """The environment ended its episode."""

    @property
    def truncated(self) -> bool:
        """Whether a limit of the run truncated the trajectory.

        Otherwise the policy answered, or the tool server, the user or the environment ended it.
        """
        return self in _TURN_LIMITS or self.out_of_tokens

    @property
    def out_of_tokens(self) -> bool:
        """Whether a token limit ended it, so that the last turn may be a fragment; a turn limit leaves whole turns."""
        return self in _TOKEN_LIMITS


_TOKEN_LIMITS = frozenset({FinishReason.RESPONSE_LENGTH, FinishReason.ACTION_LENGTH})
_TURN_LIMITS = frozenset({FinishReason.MAX_ASSISTANT_TURNS, FinishReason.MAX_USER_TURNS})


class DropReason(StrEnum):
    """Why a started trajectory was not trained on. ``started = trained + sum(dropped) + in flight``."""

    ZERO_VARIANCE = "zero_variance"
    """All rewards of its group are equal, so every advantage (and the gradient) is zero."""
    SINGLE_MEMBER = "single_member"
    """The others of its group were lost, so there is nothing to compare with."""
    NO_BASELINE = "no_baseline"
    """Its greedy baseline rollout was lost."""
    GREEDY = "greedy"
    """A greedy rollout: its reward is a baseline (ReMax), its tokens are never trained on."""
    NAN_LOGPROBS = "nan_logprobs"
    """The engine reported a log-prob that is not a finite number <= 0."""
    REJECTED = "rejected"
    """Every token was rejected as too far from the learner's policy (``rollout_correction.rollout_rs``)."""
    CONSTRAINED = "constrained"
    """A grammar (``response_format``, ``tool_choice``) decided every token, so none carries loss."""
    VOID_TURN = "void_turn"
    VOID_TRAJECTORY = "void_trajectory"
    ALL_TOOL_CALLS_FAILED = "all_tool_calls_failed"
    OVERLONG = "overlong"
    REPETITION = "repetition"
    """The last five, like ZERO_VARIANCE, are filters (``algorithm.filters``). ``agent.mask_void_traj`` and
    ``agent.mask_overlong_loss`` also use VOID_TRAJECTORY and OVERLONG."""
    PROMPT_TOO_LONG = "prompt_too_long"
    TOKEN_DRIFT = "token_drift"
    TEMPLATE_ERROR = "template_error"
    REWARD_ERROR = "reward_error"
    REWARD_TIMEOUT = "reward_timeout"
    BACKEND_ERROR = "backend_error"
    ENVIRONMENT_ERROR = "environment_error"
    ENVIRONMENT_TIMEOUT = "environment_timeout"
    AGENT_ERROR = "agent_error"
    """The agent loop itself raised."""
    AGENT_TIMEOUT = "agent_timeout"
    """The user's agent ran past ``agent.run_timeout``."""
    HISTORY_EDITED = "history_edited"
    """The agent changed its history and ``agent.edited_history`` is ``drop``."""
    REPLAY_MISMATCH = "replay_mismatch"
    """A branch's stateful tool did not answer as it had answered its parent."""
    NOT_SELECTED = "not_selected"
    """A leaf that the rollout strategy does not keep."""
    TOOL_SERVER_ERROR = "tool_server_error"
    """The tool server could not be reached, or its answer could not be used."""
    INTERACTION_ERROR = "interaction_error"
    """The simulated user failed or took too long."""
    NON_FINITE = "non_finite"
    """The learner step it was part of had a non-finite gradient and was skipped."""
    TRAJECTORY_TIMEOUT = "trajectory_timeout"
    """It ran past ``rollout.trajectory_timeout``."""
    STRAGGLER = "straggler"
    """Its group was complete without it: see ``rollout.min_group_size`` and ``rollout.group_timeout``."""
    STALE = "stale"
    """Its group became older than ``trainer.max_staleness`` allows before it was trained on."""
    CANCELLED = "cancelled"
    """The run was interrupted while it was in flight."""


class PauseMode(StrEnum):
    """What :meth:`RolloutBackend.pause` does with requests that are running."""

    KEEP = "keep"
    """Freeze them; they continue after ``resume`` (possibly under new weights)."""
    WAIT = "wait"
    """Let them finish, admit no new ones, return when the engine is idle."""
    ABORT = "abort"
    """End them now with ``StopReason.ABORTED``; the caller resumes them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolCallRecord:
    """One tool call of a turn, for rewards, metrics and display.

    Attributes:
        name: tool name the model wrote ("" when the call could not be decoded).
        arguments: decoded arguments, or None when they could not be decoded.
        observation: text the model read back (after truncation).
        error: None, or the kind: ``malformed``, ``unknown_tool``, ``bad_arguments``, ``timeout``,
            ``raised``, ``over_parallel_limit``, ``invalid_action`` (no tool of the tool server took it).
        reward: reward the tool itself gave.
        seconds: wall time of the call.
        call_id: the id the model gave the call, in formats that have one.
        media: images and videos it returned, by kind: ``{"image": (…,)}``.
    """

    name: str
    arguments: Mapping[str, Any] | None
    observation: str
    error: str | None = None
    reward: float = 0.0
    seconds: float = 0.0
    call_id: str | None = None
    media: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)


def join_media(parts: Iterable[Mapping[str, tuple[Any, ...]]]) -> dict[str, tuple[Any, ...]]:
    """Join images and videos from several mappings into one by kind, in order.

    >>> join_media([{"image": ("a",)}, {}, {"image": ("b",), "video": ("c",)}])
    {'image': ('a', 'b'), 'video': ('c',)}
    """
    joined: dict[str, tuple[Any, ...]] = {}
    for part in parts:
        for kind, items in part.items():
            joined[kind] = joined.get(kind, ()) + tuple(items)
    return joined


@dataclass(frozen=True, kw_only=True, slots=True)
class Fork:
    """Where a trajectory branched off another one of its tree.

    The inherited ids are equal one by one and never sampled again::

        parent  = [20 21 2] [30 31 32] [40 41 2]
        fork    = turns 1, tokens 1
        branch  = [20 21 2] [30 31 32] [40] + [50 2]        newly sampled: 50 2

    Attributes:
        tree_id: the first trajectory of the tree.
        parent_id: the trajectory it branched off.
        turns: number of whole inherited turns, with what was appended to them.
        tokens: number of inherited ids of the turn after those.
    """

    tree_id: str
    parent_id: str
    turns: int
    tokens: int = 0

    @property
    def at_prompt(self) -> bool:
        """Whether it inherits the prompt alone: a new chain that counts as part of the tree."""
        return self.turns == self.tokens == 0
