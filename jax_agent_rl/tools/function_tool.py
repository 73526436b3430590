"""``@function_tool``: a tool from a plain or async Python function.

::

    @function_tool
    def lookup(word: str, language: Literal["en", "fr"] = "en") -> str:
        \"""Looks a word up.

        Args:
            word: The word.
            language: Language of the answer.
        \"""

The schema comes from the annotations (see :mod:`jax_agent_rl.tools.signature`) and the Google-style docstring. A
parameter without a default is required. An async function runs on the event loop (it must not block); a plain one
runs in a thread of its own, so it may.
"""

from __future__ import annotations

import functools
import inspect
import re
import typing
from collections.abc import Callable, Mapping
from typing import Any, overload

from jax_agent_rl.errors import ToolDefinitionError
from jax_agent_rl.threads import DaemonThreads
from jax_agent_rl.tools.base import BaseTool, ToolResult
from jax_agent_rl.tools.signature import converter_of, schema_of

THREADS = DaemonThreads()
"""Threads of all synchronous function tools of the process."""


class FunctionTool(BaseTool):
    """A function as a tool. Calling the object calls the function, so it stays usable and testable.

    Args:
        function: with annotated parameters, all passable by keyword.
        name: overrides the function's name.
        description: overrides the first part of its docstring.
        threads: where a synchronous function runs.

    Raises:
        ToolDefinitionError: not a function, no or unsupported annotation, ``*args``, ``**kwargs``, positional-only
            parameters, or a docstring that describes a parameter which does not exist.
    """

    stateful = False  # a function is not told whose call it is

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        name: str | None = None,
        description: str | None = None,
        threads: DaemonThreads = THREADS,
    ):
        if not (inspect.isfunction(function) or inspect.ismethod(function)):
            raise ToolDefinitionError(f"@function_tool needs a function, got {function!r}; give a name as name=…")
        self.function = function
        self._threads = threads
        self._is_async = inspect.iscoroutinefunction(function)
        summary, documented = _parse_docstring(inspect.getdoc(function) or "")
        annotations = _annotations(function)
        parameters = _parameters(function, annotations, documented)
        self._converters = {key: convert for key, hint in annotations.items() if (convert := converter_of(hint))}
        name = function.__name__ if name is None else name
        description = summary if description is None else description
        super().__init__(name=name, description=description, parameters=parameters)
        functools.update_wrapper(self, function)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)

    async def execute(self, instance_id: str, arguments: Mapping[str, Any], **execute_kwargs: Any) -> ToolResult:
        converters = self._converters
        kwargs = {key: converters[key](v) if key in converters else v for key, v in arguments.items()}
        call = functools.partial(self.function, **kwargs, **execute_kwargs)
        return await call() if self._is_async else await self._threads.run(call, name=self.name)


@overload
def function_tool(function: Callable[..., Any], /) -> FunctionTool: ...
@overload
def function_tool(
    *, name: str | None = None, description: str | None = None
) -> Callable[[Callable[..., Any]], FunctionTool]: ...
def function_tool(
    function: Callable[..., Any] | None = None, /, *, name: str | None = None, description: str | None = None
) -> FunctionTool | Callable[[Callable[..., Any]], FunctionTool]:
    """Makes a :class:`FunctionTool`; use it plain or as ``@function_tool(name=…, description=…)``."""
    if function is not None:
        return FunctionTool(function, name=name, description=description)
    return functools.partial(FunctionTool, name=name, description=description)


def _annotations(function: Callable[..., Any]) -> dict[str, Any]:
    """Resolved annotations of the parameters."""
    try:
        hints = typing.get_type_hints(function, include_extras=True)
    except NameError as error:
        raise ToolDefinitionError(f"{_where(function)}: an annotation cannot be resolved: {error}") from None
    hints.pop("return", None)
    return hints


def _parameters(
    function: Callable[..., Any], annotations: Mapping[str, Any], documented: Mapping[str, str]
) -> dict[str, Any]:
    """The ``parameters`` schema of a function."""
    properties: dict[str, Any] = {}
    required = []
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            raise ToolDefinitionError(
                f"{_where(function)}: a tool cannot take {parameter}: name every parameter, passable by keyword"
            )
        if name not in annotations:
            raise ToolDefinitionError(f"{_where(function)}: parameter {name!r} has no type annotation")
        try:
            properties[name] = schema_of(annotations[name])
        except TypeError as error:
            raise ToolDefinitionError(f"{_where(function)}: parameter {name!r}: {error}") from None
        if name in documented:
            properties[name]["description"] = documented[name]
        if parameter.default is parameter.empty:
            required.append(name)
    if unknown := sorted(documented.keys() - properties.keys()):
        raise ToolDefinitionError(f"{_where(function)}: its docstring describes {unknown}, which it does not take")
    return {"type": "object", "properties": properties, "required": required}


def _where(function: Callable[..., Any]) -> str:
    code = inspect.unwrap(function).__code__
    return f"tool function {function.__qualname__} ({code.co_filename}:{code.co_firstlineno})"


_SECTION = re.compile(r"^(Args|Arguments|Parameters|Returns?|Raises|Yields|Examples?|Notes?|References):\s*$")
_ENTRY = re.compile(r"^(\w+)\s*(?:\([^)]*\))?:\s*(.*)$")


def _parse_docstring(text: str) -> tuple[str, dict[str, str]]:
    """Splits a cleaned Google-style docstring into its free text and the ``Args:`` descriptions by name."""
    summary: list[str] = []
    described: dict[str, list[str]] = {}
    section, indent, current = "", 0, ""
    for line in text.splitlines():
        if header := _SECTION.match(line):
            section, indent, current = header[1], 0, ""
        elif not section:
            summary.append(line)
        elif section in ("Args", "Arguments", "Parameters") and line.strip():
            width = len(line) - len(line.lstrip())
            indent = indent or width
            entry = _ENTRY.match(line.strip()) if width <= indent else None
            if entry:
                current = entry[1]
                described[current] = [entry[2]]
            elif current:
                described[current].append(line.strip())
    return "\n".join(summary).strip(), {name: " ".join(lines).strip() for name, lines in described.items()}
