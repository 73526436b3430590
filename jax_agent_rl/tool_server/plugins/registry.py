"""The tool server's tools by name."""

from __future__ import annotations

import importlib
import inspect

from jax_agent_rl.config.commands import ToolServerSettings
from jax_agent_rl.errors import ConfigError
from jax_agent_rl.tool_server.plugins.base import ServerTool
from jax_agent_rl.utils.packages import install_command
from jax_agent_rl.utils.plugins import load_user_module

FINISH = "finish"
"""Name of the tool that every server has: the end of a trajectory."""


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
        module = importlib.import_module(f"{__package__}.{module_name}")
        return getattr(module, class_name)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"tool {name!r} needs {error.name}, which is not installed:"
            f" {install_command('tool-server')}"
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
