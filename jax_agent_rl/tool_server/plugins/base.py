"""The interface of the tool server's tools.

Unlike a :class:`jax_agent_rl.tools.BaseTool`, whose calls are already parsed, a server tool parses
the model's text (``parse_action``), like verl-tool's. The server offers an action to its tools in
order; the first that accepts it acts.

A tool with state per trajectory sets ``stateful``: ``open`` is called before its first action
there, and ``close`` exactly once for each ``open``, whatever happens in between.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, ClassVar, Generic, TypeVar

from jax_agent_rl.checks import as_float, as_score
from jax_agent_rl.config.commands import ToolServerSettings
from jax_agent_rl.errors import ConfigError
from jax_agent_rl.tool_server.sandbox import Sandbox
from jax_agent_rl.utils.timeouts import DaemonThreads

Parsed = TypeVar("Parsed")
Environment = TypeVar("Environment")


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolObservation:
    """Result of an action.

    Attributes:
        text: what the model reads.
        done: whether the trajectory is over.
        valid: whether the action was valid.
        reward: reward of the action; None means that there is none, not zero.
        image, audio: ``data:`` URLs.
        metrics: numbers to sum over the trajectory.
    """

    text: str = ""
    done: bool = False
    valid: bool = True
    reward: float | None = None
    image: Sequence[str] = ()
    audio: Sequence[str] = ()
    metrics: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.text, str):
            raise TypeError(f"Observation.text must be str, got {type(self.text).__name__}")
        if self.reward is not None:
            object.__setattr__(self, "reward", as_score(self.reward, "an observation's reward"))
        metrics = {}
        for key, value in self.metrics.items():
            metrics[key] = as_float(value, f"an observation's metric {key!r}")
        object.__setattr__(self, "metrics", metrics)


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
    """The trajectory's environment was closed before: it was idle, or interrupted in the middle of
    an action."""
    WORKER = "worker_died"
    """The process that held its environment ended."""


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


def failed(
    failure: Failure, text: str, *, done: bool, tool: str | None = None, **fields: Any
) -> ToolReply:
    """Return the reply to a failed action.

    Args:
        failure: the reason, for the agent loop.
        text: what the model reads.
        done: whether the trajectory is over.
        tool: the tool that acted; None if no tool did.
        fields: further fields of the observation.
    """
    observation = {"obs": text, "invalid_reason": failure.value, **fields}
    return ToolReply(
        observation=observation, done=done, valid=False, tool=tool, error=failure, open=False
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolContext:
    """Resources that tools are built with: the server's settings, and threads for blocking work."""

    settings: ToolServerSettings
    threads: DaemonThreads
    _sandbox: Sandbox | None

    @property
    def sandbox(self) -> Sandbox:
        """The sandbox for model-written programs.

        Raises:
            ConfigError: no tool's class sets ``needs_sandbox``, so none was opened.
        """
        if self._sandbox is None:
            raise ConfigError("a tool uses the sandbox without needs_sandbox = True in its class")
        return self._sandbox


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolAction(Generic[Parsed, Environment]):
    """One action.

    Attributes:
        parsed: the result of ``parse_action``.
        environment: the result of ``open``; None for a stateless tool.
        extra: the request's ``extra_fields``: the dataset's fields, ``turns_left`` and the like.
    """

    parsed: Parsed
    environment: Environment
    extra: Mapping[str, Any]
    trajectory_id: str


class ServerTool(ABC, Generic[Parsed, Environment]):
    """Base class of the server's tools.

    One instance serves all trajectories of a worker, concurrently.
    """

    name: ClassVar[str]
    """Name in the setting ``tools``."""
    usage: ClassVar[str]
    """One line for a model whose action no tool accepts."""
    stateful: ClassVar[bool] = False
    needs_sandbox: ClassVar[bool] = False

    def __init__(self, context: ToolContext):
        self.context = context

    async def start(self) -> None:
        """Prepare for the first action.

        Raises:
            ConfigError: the tool cannot work, with these settings or on this machine.
        """

    async def stop(self) -> None:
        """Release what ``start`` acquired; called once, after every environment was closed."""

    @abstractmethod
    def parse_action(self, action: str) -> Parsed | None:
        """Parse an action; None leaves it to the next tool.

        Must be quick, whatever the text (a worker that is busy for ``stuck_seconds`` is killed),
        and have no effects.
        """

    @abstractmethod
    async def act(self, action: ToolAction[Parsed, Environment]) -> ToolObservation:
        """Execute an action.

        Raises:
            ToolError: it failed; the model reads the message.
        """

    async def open(self, trajectory_id: str, extra: Mapping[str, Any]) -> Environment:
        """Create a trajectory's environment; called only if ``stateful``."""
        raise NotImplementedError(f"{self.name} is stateful and has no open()")

    async def close(self, environment: Environment) -> None:
        """Close an environment; called only if ``stateful``, once for each ``open``."""
        raise NotImplementedError(f"{self.name} is stateful and has no close()")
