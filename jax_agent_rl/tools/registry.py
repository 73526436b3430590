"""The tools of a run: loaded from a file or module, unique by name, chosen per sample."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from jax_agent_rl.errors import DataError, ToolDefinitionError
from jax_agent_rl.tools.base import BaseTool
from jax_agent_rl.utils.plugins import load_user_module


class ToolRegistry:
    """Tools by name, in the order in which they were added.

    Args:
        tools: tools to begin with.
    """

    def __init__(self, tools: Iterable[BaseTool] = ()):
        self._tools: dict[str, BaseTool] = {}
        self._places: dict[str, str] = {}
        for tool in tools:
            self.add(tool, place="ToolRegistry(...)")

    @classmethod
    def from_path(cls, path: str | None) -> ToolRegistry:
        """Load the tools of ``tools.function_tool_path`` (None: no tools); see :meth:`load`."""
        registry = cls()
        if path is not None:
            registry.load(path)
        return registry

    def add(self, tool: BaseTool, *, place: str) -> None:
        """Add a tool; adding the same object again changes nothing.

        Args:
            tool: the tool.
            place: where it comes from, for error messages.

        Raises:
            ToolDefinitionError: another tool has the name; the message names both places.
        """
        known = self._tools.setdefault(tool.name, tool)
        if known is not tool:
            raise ToolDefinitionError(
                f"two tools are called {tool.name!r}: one in {self._places[tool.name]}, one in {place}; rename one"
            )
        self._places.setdefault(tool.name, place)

    def load(self, path: str) -> None:
        """Add every tool object at the top level of a Python file or module, imported ones included.

        Raises:
            ConfigError: it cannot be imported.
            ToolDefinitionError: it holds no tool, or a tool is wrongly declared or has a name in use.
        """
        module = load_user_module(path, key="tools.function_tool_path")
        tools = {id(value): value for value in vars(module).values() if isinstance(value, BaseTool)}
        if not tools:
            raise ToolDefinitionError(f"{path} defines no tool; put @function_tool above a function")
        for tool in tools.values():
            self.add(tool, place=path)

    def select(self, names: Sequence[str] | None = None) -> Mapping[str, BaseTool]:
        """Return the tools of one sample.

        Args:
            names: the row's ``extra_info.tool_selection``; None selects all.

        Raises:
            DataError: a name is unknown.
        """
        if names is None:
            return MappingProxyType(self._tools)
        if unknown := [name for name in names if name not in self._tools]:
            raise DataError(f"extra_info.tool_selection names unknown tools {unknown}; there are {list(self._tools)}")
        return {name: self._tools[name] for name in names}

    def __len__(self) -> int:
        return len(self._tools)

    def __iter__(self) -> Iterator[str]:
        return iter(self._tools)


def schemas_of(tools: Mapping[str, BaseTool]) -> tuple[dict[str, Any], ...]:
    """Return the tools in OpenAI's format, for the prompt."""
    return tuple(tool.schema for tool in tools.values())
