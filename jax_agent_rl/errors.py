"""Every exception this package raises on purpose, and why trajectories end or are dropped.

The exceptions are one tree; what follows an arrow mends the failure::

    JaxAgentRLError
    ├── ConfigError                 the user's YAML / overrides -> fix the config, nothing ran
    ├── ModelError                  weights or tokenizer files -> fix the path or the checkpoint
    ├── DataError                   a dataset file or one of its rows -> fix the data
    ├── TrajectoryError             one rollout is lost, the batch goes on (carries a DropReason)
    │   ├── TokenDriftError         the engine's context is not the trajectory's ids
    │   ├── PromptTooLongError      prompt does not fit the budget
    │   ├── TemplateError           a chat template cannot be tokenized append-only
    │   ├── RewardError             the reward function failed
    │   │   └── RewardTimeoutError  it ran past its limit
    │   ├── ToolServerError         the tool server cannot be reached, or answers what it must not
    │   ├── InteractionError        a simulated user failed
    │   ├── EnvironmentFailedError  an environment failed
    │   │   └── EnvironmentTimeoutError  it ran past its limit
    │   ├── AbortedError            one of its generations was aborted for good
    │   ├── AgentTimeoutError       the user's agent ran past its limit
    │   ├── TrajectoryTimeoutError  the trajectory ran past rollout.trajectory_timeout
    │   ├── StragglerError          enough others of its group had ended
    │   ├── HistoryEditedError      an agent edited its history, which the config forbids
    │   ├── ReplayError             a branch's tools cannot replay its parent's calls
    │   └── BackendError            the engine failed this request
    │       ├── EngineDiedError     the engine itself is gone (infrastructure: retry elsewhere)
    │       └── BackendClosedError  the engine was shut down
    ├── TurnRefusedError            a budget allows no further turn; what was recorded stands
    ├── ToolError                   a tool failed; becomes an observation the model reads
    │   ├── ToolNotFoundError       unknown tool name
    │   ├── ToolArgumentError       arguments do not match the schema
    │   ├── ToolTimeoutError        the call ran past its limit
    │   └── UnusableTestsError      tests of a program that say nothing about it -> fix the row
    ├── ToolDefinitionError         a tool is declared wrongly (raised at import / start)
    ├── WeightUpdateError           new weights were refused; the old ones are still served
    ├── CheckpointError             nothing to restore, or it does not match the config
    ├── StorageError                a file of the run was not written -> make space, then --resume
    ├── CompilerError               a planned program cannot be compiled, for a compiler's fault
    ├── WorkerDiedError             a tool server's worker went away; its calls fail, it restarts
    ├── RegistryGoneError           process 0 of a run has ended -> the others end too
    ├── LaunchError                 a host, GPU, port or process of a launch -> fix what it names
    │   ├── LaunchTargetError       the requested cloud resource does not exist
    │   └── LaunchUnansweredError   the cloud could not be reached, which may pass
    ├── NothingToTrainError         every trajectory of several batches in a row was lost
    ├── DisagreementError           engine and learner disagree -> do what the diagnosis says
    └── NonFiniteError              a model had no finite update in too many steps in a row

Two questions decide what happens to a failure: *whose* it is (config, data, engine, tool, reward)
and *how far* it reaches. ``TrajectoryError`` reaches one rollout: it is counted under its
``drop_reason`` and the batch continues. ``ToolError`` reaches one tool call: the model reads it as
an observation. Everything else reaches the run and stops it with a message that says what was
wrong, the value, and the fix.
"""

from __future__ import annotations

from enum import StrEnum


class FinishReason(StrEnum):
    """Why a whole *trajectory* ended."""

    ANSWER = "answer"
    """The last assistant turn made no tool call, or the agent's own ``max_tokens`` cut it: the
    agent wanted no more."""
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
        if self in (FinishReason.MAX_ASSISTANT_TURNS, FinishReason.MAX_USER_TURNS):
            return True
        return self.out_of_tokens

    @property
    def out_of_tokens(self) -> bool:
        """Whether a token limit ended it.

        The last turn may then be a fragment. A turn limit leaves complete turns.
        """
        return self in (FinishReason.RESPONSE_LENGTH, FinishReason.ACTION_LENGTH)


class DropReason(StrEnum):
    """Why a started trajectory was not trained on.

    At every step, ``started = trained + sum(dropped) + in flight``.
    """

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
    """Every token was rejected as too far from the learner's policy
    (``rollout_correction.rollout_rs``)."""
    CONSTRAINED = "constrained"
    """A grammar (``response_format``, ``tool_choice``) decided every token: none carries loss."""
    VOID_TURN = "void_turn"
    VOID_TRAJECTORY = "void_trajectory"
    ALL_TOOL_CALLS_FAILED = "all_tool_calls_failed"
    OVERLONG = "overlong"
    REPETITION = "repetition"
    """The last five, like ZERO_VARIANCE, are filters (``algorithm.filters``).
    ``agent.mask_void_traj`` and ``agent.mask_overlong_loss`` also use VOID_TRAJECTORY and OVERLONG.
    """
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
    """Every update of its mini-batch had a non-finite gradient and was skipped."""
    TRAJECTORY_TIMEOUT = "trajectory_timeout"
    """It ran past ``rollout.trajectory_timeout``."""
    STRAGGLER = "straggler"
    """Its group was complete without it: see ``rollout.min_group_size`` and
    ``rollout.group_timeout``."""
    STALE = "stale"
    """Its group became older than ``trainer.max_staleness`` allows before it was trained on."""
    CANCELLED = "cancelled"
    """The run was interrupted while it was in flight."""


class JaxAgentRLError(Exception):
    """Base class: catch this to catch everything the package raises on purpose."""


class ConfigError(JaxAgentRLError):
    """One or more configuration keys are wrong. ``problems`` lists all of them, one line each."""

    def __init__(self, problems: list[str] | str):
        if isinstance(problems, str):
            problems = [problems]
        self.problems = list(problems)

        count = len(self.problems)
        heading = "configuration error" if count == 1 else f"{count} configuration errors"
        items = "\n".join(f"  - {problem}" for problem in self.problems)
        super().__init__(f"{heading}:\n{items}")


class ModelError(JaxAgentRLError):
    """Model weights or tokenizer files are missing, damaged or of an unsupported kind."""


class DataError(JaxAgentRLError):
    """A dataset file is missing or a row of it does not have the expected fields."""


class TrajectoryError(JaxAgentRLError):
    """One rollout is lost. It is counted under :attr:`drop_reason`; the batch goes on.

    Attributes:
        failed_at: file and line of the user's code that raised; empty if none did.
    """

    drop_reason: DropReason = DropReason.AGENT_ERROR
    failed_at: str = ""


class TokenDriftError(TrajectoryError):
    """The ids the engine conditioned on are not the ids the learner would train on."""

    drop_reason = DropReason.TOKEN_DRIFT


class PromptTooLongError(TrajectoryError):
    """The prompt leaves no room for even one sampled token."""

    drop_reason = DropReason.PROMPT_TOO_LONG


class TemplateError(TrajectoryError):
    """The chat template cannot be rendered, or not append-only even with the anchored base."""

    drop_reason = DropReason.TEMPLATE_ERROR


class RewardError(TrajectoryError):
    """The reward function raised or returned something that is not a finite number."""

    drop_reason = DropReason.REWARD_ERROR


class RewardTimeoutError(RewardError):
    """Scoring took longer than ``reward.timeout``."""

    drop_reason = DropReason.REWARD_TIMEOUT


class ToolServerError(TrajectoryError):
    """The tool server is unreachable, refuses, or gives an unusable answer.

    The message names its URL and the configuration key to change.
    """

    drop_reason = DropReason.TOOL_SERVER_ERROR


class InteractionError(TrajectoryError):
    """A simulated user raised, took too long, or is not known."""

    drop_reason = DropReason.INTERACTION_ERROR


class EnvironmentFailedError(TrajectoryError):
    """An environment raised, or does not exist any more."""

    drop_reason = DropReason.ENVIRONMENT_ERROR


class EnvironmentTimeoutError(EnvironmentFailedError):
    """A call of an environment took longer than ``environments.timeout``."""

    drop_reason = DropReason.ENVIRONMENT_TIMEOUT


class AbortedError(TrajectoryError):
    """A generation of this trajectory was aborted and not to be resumed."""

    drop_reason = DropReason.CANCELLED


class AgentTimeoutError(TrajectoryError):
    """The user's agent took longer than ``agent.run_timeout``."""

    drop_reason = DropReason.AGENT_TIMEOUT


class TrajectoryTimeoutError(TrajectoryError):
    """It ran past ``rollout.trajectory_timeout``."""

    drop_reason = DropReason.TRAJECTORY_TIMEOUT


class StragglerError(TrajectoryError):
    """Enough others of its group had ended after ``rollout.group_timeout``."""

    drop_reason = DropReason.STRAGGLER


class HistoryEditedError(TrajectoryError):
    """A request does not extend its conversation, and ``agent.edited_history`` is ``drop``."""

    drop_reason = DropReason.HISTORY_EDITED


class ReplayError(TrajectoryError):
    """The state behind a branch cannot be restored.

    A stateful tool, called again for it, did not answer as it had answered its parent, or an
    environment's snapshot cannot be used.
    """

    drop_reason = DropReason.REPLAY_MISMATCH


class BackendError(TrajectoryError):
    """The rollout backend refused or failed one request."""

    drop_reason = DropReason.BACKEND_ERROR


class EngineDiedError(BackendError):
    """The engine is gone: an infrastructure failure, worth a retry on another server."""


class BackendClosedError(BackendError):
    """The backend was closed while the request was waiting or running."""


class TurnRefusedError(JaxAgentRLError):
    """A limit of the ``agent`` section allows no further turn.

    The trajectory so far is complete, and it ends here.

    Attributes:
        finish_reason: the limit.
    """

    def __init__(self, message: str, finish_reason: FinishReason):
        super().__init__(message)
        self.finish_reason = finish_reason


class ToolError(JaxAgentRLError):
    """A tool call failed. Its text is shown to the model as the observation."""


class ToolNotFoundError(ToolError):
    """The model called a tool that does not exist for this sample."""


class ToolArgumentError(ToolError):
    """The arguments of a call do not match the tool's schema."""


class ToolTimeoutError(ToolError):
    """A tool call ran longer than its timeout."""


class UnusableTestsError(ToolError):
    """Tests of a program cannot be parsed, ask it nothing, or pass whatever it answers."""


class ToolDefinitionError(JaxAgentRLError):
    """A tool is declared wrongly: no annotation, ``*args``, a name used twice, ..."""


class WeightUpdateError(JaxAgentRLError):
    """A weight update was refused.

    The backend still serves the previous version, or says that it serves none.
    """


class CheckpointError(JaxAgentRLError):
    """There is no checkpoint to restore, or it was made with another model."""


class StorageError(JaxAgentRLError):
    """A file of the run folder could not be written: the disk is full, perhaps, or gone."""


class CompilerError(JaxAgentRLError):
    """A planned program was not compiled: the compiler failed, not for lack of a chip's memory."""


class WorkerDiedError(JaxAgentRLError):
    """A worker process of the tool server is not there, or went away before it answered."""


class RegistryGoneError(JaxAgentRLError):
    """Process 0, which keeps the registry of a run's processes, has ended: so do all others."""


class LaunchError(JaxAgentRLError):
    """A launch cannot go on, for a host, its driver or GPUs, a port, or one of its processes.

    The message names which.
    """


class LaunchTargetError(LaunchError):
    """A cloud resource of a launch does not exist: no slice of that name, say."""


class LaunchUnansweredError(LaunchError):
    """The cloud could not be reached or did not answer, which may pass."""


class NothingToTrainError(JaxAgentRLError):
    """Several batches in a row lost every trajectory, so the run would learn nothing."""


class NonFiniteError(JaxAgentRLError):
    """A model had no finite gradient in several training steps in a row; the run was stopped."""


class DisagreementError(JaxAgentRLError):
    """Log-probs of engine and learner differ by more than rounding explains.

    Both are of the same tokens, under the same weights.
    """
