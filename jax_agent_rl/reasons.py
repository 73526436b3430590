"""Reasons why generations and trajectories end or are dropped; import them from :mod:`jax_agent_rl.types`."""

from __future__ import annotations

from enum import StrEnum


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
