"""The built-in tools, and the lookup of tools by name.

``interpreters`` Python per action, Python and bash per trajectory (``kernel`` runs in the sandbox), SQLite databases,
programs against tests · ``search`` passages of a local corpus · ``files`` local pages as text, zooming into images ·
``mcp_gateway`` tools of MCP servers · ``markup`` parsing and formatting.
"""

from __future__ import annotations

import importlib
import inspect

from jax_agent_rl.config.servers import ToolServerSettings
from jax_agent_rl.errors import ConfigError
from jax_agent_rl.tool_server.plugin import FINISH, ServerTool
from jax_agent_rl.utils.plugins import load_user_module

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
    own = _load_classes(settings.tool_path) if settings.tool_path else {}
    if taken := sorted(set(own) & {*BUILTIN, FINISH}):
        raise ConfigError(f"tool_path={settings.tool_path!r} defines {taken}, names of built-in tools; rename them")
    return [_class(name, own) for name in settings.tools if name != FINISH]


def _class(name: str, own: dict[str, type[ServerTool]]) -> type[ServerTool]:
    if name in own:
        return own[name]
    if name not in BUILTIN:
        raise ConfigError(f"tools: there is no tool {name!r}; there are {sorted([*BUILTIN, *own, FINISH])}")
    module, _, attribute = BUILTIN[name].partition(":")
    try:
        return getattr(importlib.import_module(f"{__name__}.{module}"), attribute)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"tool {name!r} needs {error.name}, which is not installed: pip install 'jax_agent_rl[tool-server]'"
        ) from error


def _load_classes(path: str) -> dict[str, type[ServerTool]]:
    module = load_user_module(path, key="tool_path")
    found = {
        value.name: value
        for value in vars(module).values()
        if inspect.isclass(value) and issubclass(value, ServerTool) and not inspect.isabstract(value)
    }
    if not found:
        raise ConfigError(f"tool_path={path!r} defines no ServerTool class")
    return found
