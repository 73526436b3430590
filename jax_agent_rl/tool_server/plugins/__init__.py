"""The interface of the tool server's tools, and the lookup of tools by name.

Unlike a :class:`jax_agent_rl.tools.BaseTool`, whose calls are already parsed, a server tool parses
the model's text (``parse_action``), like verl-tool's. The server offers an action to its tools in
order; the first that accepts it acts.

A tool with state per trajectory sets ``stateful``: ``open`` is called before its first action
there, and ``close`` exactly once for each ``open``, whatever happens in between.

The modules of the built-in tools:

=================  ==============================================================================
``interpreters``   Python per action, Python and bash per trajectory (``kernel`` runs in the
                   sandbox), SQLite databases, programs against tests
``search``         passages of a local corpus
``files``          local pages as text, zooming into images
``mcp_gateway``    tools of MCP servers
``markup``         parsing of actions and formatting of results, for all of them
=================  ==============================================================================
"""

from __future__ import annotations

import importlib
import inspect
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, ClassVar, Generic, TypeVar

from jax_agent_rl.checks import as_float, as_score
from jax_agent_rl.config.commands import ToolServerSettings
from jax_agent_rl.errors import ConfigError
from jax_agent_rl.tool_server.sandbox import Sandbox
from jax_agent_rl.utils.plugins import load_user_module
from jax_agent_rl.utils.timeouts import DaemonThreads

FINISH = "finish"
"""Name of the tool that every server has: the end of a trajectory."""
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
        trajectory_id: id of the trajectory.
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


BUILTIN = {
    "python": "interpreters:PythonTool",
    "stateful_python": "interpreters:StatefulPythonTool",
    "bash": "interpreters:BashTool",
    "judge": "interpreters:JudgeTool",
    "search": "search:SearchTool",
    "sql": "interpreters:SqlTool",
    "page": "files:PageTool",
    "image_zoom": "files:ImageZoomTool",
    "mcp": "mcp_gateway:McpTool",
}


def tool_classes(settings: ToolServerSettings) -> list[type[ServerTool]]:
    """Return the classes named by ``settings.tools``, in order.

    Raises:
        ConfigError: a name is unknown, or a library that the tool needs is not installed.
    """
    user_classes: dict[str, type[ServerTool]] = {}
    if settings.tool_path:
        user_classes = _load_classes(settings.tool_path)

    conflicts = sorted(set(user_classes) & {*BUILTIN, FINISH})
    if conflicts:
        raise ConfigError(
            f"tool_path={settings.tool_path!r} defines {conflicts}, names of built-in tools; rename"
            " them"
        )

    classes = []
    for name in settings.tools:
        if name != FINISH:  # no tool: the service handles it itself
            classes.append(_tool_class(name, user_classes))
    return classes


def _tool_class(name: str, user_classes: dict[str, type[ServerTool]]) -> type[ServerTool]:
    if name in user_classes:
        return user_classes[name]
    if name not in BUILTIN:
        known = sorted([*BUILTIN, *user_classes, FINISH])
        raise ConfigError(f"tools: there is no tool {name!r}; there are {known}")

    module_name, _, class_name = BUILTIN[name].partition(":")
    try:
        module = importlib.import_module(f"{__name__}.{module_name}")
        return getattr(module, class_name)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"tool {name!r} needs {error.name}, which is not installed: pip install"
            " 'jax_agent_rl[tool-server]'"
        ) from error


def _load_classes(path: str) -> dict[str, type[ServerTool]]:
    """Return the tool classes of a user's module, by the tool's name."""
    module = load_user_module(path, key="tool_path")
    classes = {}
    for value in vars(module).values():
        if not inspect.isclass(value) or not issubclass(value, ServerTool):
            continue
        if not inspect.isabstract(value):
            classes[value.name] = value
    if not classes:
        raise ConfigError(f"tool_path={path!r} defines no ServerTool class")
    return classes
