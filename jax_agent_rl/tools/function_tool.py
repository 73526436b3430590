'''``@function_tool``: a tool from a plain or async Python function.

::

    @function_tool
    def lookup(word: str, language: Literal["en", "fr"] = "en") -> str:
        """Look a word up.

        Args:
            word: The word.
            language: Language of the answer.
        """

The schema is derived from the annotations (see :mod:`jax_agent_rl.tools.schema`) and the
Google-style docstring. A parameter without a default is required. ``@function_tool("name")``
renames the tool; ``@function_tool(schema={…})`` sets a schema in OpenAI's format for a function
whose signature cannot express it. An async function runs on the event loop (it must not block); a
plain one runs in a thread of its own, so it may block.
'''  # noqa: D214

from __future__ import annotations

import functools
import inspect
import re
import typing
from collections.abc import Callable, Collection, Mapping
from typing import Any, overload

from pydantic import BaseModel

from jax_agent_rl.errors import ToolDefinitionError
from jax_agent_rl.tools.base import BaseTool, ToolResult
from jax_agent_rl.tools.schema import check_parameters, json_schema, make_converter, unwrap_function
from jax_agent_rl.utils.threads import DaemonThreads

THREADS = DaemonThreads()
"""Threads of all synchronous function tools of the process."""


class FunctionTool(BaseTool):
    """A function as a tool. Calling the object calls the function, so it stays usable and testable.

    Args:
        function: with annotated parameters, all passable by keyword.
        name: overrides the function's name.
        description: overrides the first part of its docstring.
        schema: ``{type: function, function: {name, description, parameters}}`` or a pydantic model
            of it, instead of the derived one. Parameters of the function that it does not name are
            left to ``execute_kwargs``.
        threads: where a synchronous function runs.
        given: parameters that a subclass passes, no part of the schema.

    Raises:
        ToolDefinitionError: not a function; no or unsupported annotation, ``*args``, ``**kwargs``,
            positional-only parameters, or a docstring that describes a parameter which does not
            exist; or a schema that is invalid or names parameters that the function does not take.
    """

    stateful = False  # a function does not know which trajectory calls it

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        name: str | None = None,
        description: str | None = None,
        schema: Mapping[str, Any] | BaseModel | None = None,
        threads: DaemonThreads = THREADS,
        given: Collection[str] = (),
    ):
        if not (inspect.isfunction(function) or inspect.ismethod(function)):
            raise ToolDefinitionError(
                f"@function_tool needs a function, got {function!r}; give a name as name=…"
            )
        self.function = function
        self._threads = threads
        self._is_async = inspect.iscoroutinefunction(function)
        summary, documented = _parse_docstring(inspect.getdoc(function) or "")
        annotations, documented = (
            {key: value for key, value in part.items() if key not in given}
            for part in (_annotations(function), documented)
        )
        declared: dict[str, Any] = {"name": function.__name__, "description": summary}
        if schema is None:
            declared["parameters"] = _parameters(function, annotations, documented, given)
        else:
            declared |= _check_schema(schema, function, name)
        parameters = declared["parameters"]
        named = annotations.keys() & parameters.get("properties", {}).keys()
        self._converters = {
            key: convert for key in named if (convert := make_converter(annotations[key]))
        }
        super().__init__(
            name=declared["name"] if name is None else name,
            description=declared["description"] if description is None else description,
            parameters=parameters,
        )
        functools.update_wrapper(self, function)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)

    async def execute(
        self, instance_id: str, arguments: Mapping[str, Any], **execute_kwargs: Any
    ) -> ToolResult:
        converters = self._converters
        kwargs = {
            key: converters[key](v) if key in converters else v for key, v in arguments.items()
        }
        call = functools.partial(self.function, **kwargs, **execute_kwargs)
        return await call() if self._is_async else await self._threads.run(call, name=self.name)


@overload
def function_tool(function: Callable[..., Any], /) -> FunctionTool: ...
@overload
def function_tool(
    tool_name: str | None = None,
    /,
    *,
    name: str | None = None,
    description: str | None = None,
    schema: Mapping[str, Any] | BaseModel | None = None,
) -> Callable[[Callable[..., Any]], FunctionTool]: ...
def function_tool(
    function: Callable[..., Any] | str | None = None,
    /,
    *,
    name: str | None = None,
    description: str | None = None,
    schema: Mapping[str, Any] | BaseModel | None = None,
) -> FunctionTool | Callable[[Callable[..., Any]], FunctionTool]:
    """Create a :class:`FunctionTool` from a function.

    Use it plain, as ``@function_tool("name")``, or as ``@function_tool(name=…, description=…,
    schema=…)``.
    """
    if isinstance(function, str):
        if name not in (None, function):
            raise ToolDefinitionError(
                f"@function_tool is given two names, {function!r} and {name!r}; give one"
            )
        function, name = None, function
    make = functools.partial(FunctionTool, name=name, description=description, schema=schema)
    return make if function is None else make(function)


def _check_schema(
    schema: Mapping[str, Any] | BaseModel, function: Callable[..., Any], name: str | None
) -> Mapping[str, Any]:
    """Return the ``function`` of an explicit schema, checked against the function it describes."""
    where = _where(function)
    given = schema.model_dump(exclude_none=True) if isinstance(schema, BaseModel) else schema
    declared = unwrap_function(given, f"{where}: schema")
    if name is not None and declared.get("name", name) != name:
        raise ToolDefinitionError(
            f"{where} is called {name!r}, and {declared['name']!r} in its schema; give one name"
        )
    parameters = declared.get("parameters")
    if not isinstance(parameters, Mapping) or parameters.get("type") != "object":
        raise ToolDefinitionError(
            f"{where}: parameters must be a schema of type object, got {parameters!r:.100}"
        )
    check_parameters(parameters, f"{where}: the parameters")
    taken = inspect.signature(function).parameters.values()
    unknown = sorted(
        parameters.get("properties", {}).keys()
        - {p.name for p in taken if p.kind is not p.POSITIONAL_ONLY}
    )
    if unknown and not any(p.kind is p.VAR_KEYWORD for p in taken):
        raise ToolDefinitionError(f"{where}: its schema names {unknown}, which it does not take")
    return declared


def _annotations(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the resolved annotations of the parameters."""
    try:
        hints = typing.get_type_hints(function, include_extras=True)
    except NameError as error:
        raise ToolDefinitionError(
            f"{_where(function)}: an annotation cannot be resolved: {error}"
        ) from None
    hints.pop("return", None)
    return hints


def _parameters(
    function: Callable[..., Any],
    annotations: Mapping[str, Any],
    documented: Mapping[str, str],
    given: Collection[str],
) -> dict[str, Any]:
    """Build the ``parameters`` schema of a function, without those ``given``."""
    properties: dict[str, Any] = {}
    required = []
    for name, parameter in inspect.signature(function).parameters.items():
        if name in given:
            continue
        if parameter.kind in (
            parameter.VAR_POSITIONAL,
            parameter.VAR_KEYWORD,
            parameter.POSITIONAL_ONLY,
        ):
            raise ToolDefinitionError(
                f"{_where(function)}: a tool cannot take {parameter}: name every parameter,"
                " passable by keyword"
            )
        if name not in annotations:
            raise ToolDefinitionError(
                f"{_where(function)}: parameter {name!r} has no type annotation"
            )
        try:
            properties[name] = json_schema(annotations[name])
        except TypeError as error:
            raise ToolDefinitionError(f"{_where(function)}: parameter {name!r}: {error}") from None
        if name in documented:
            properties[name]["description"] = documented[name]
        if parameter.default is parameter.empty:
            required.append(name)
    if unknown := sorted(documented.keys() - properties.keys()):
        raise ToolDefinitionError(
            f"{_where(function)}: its docstring describes {unknown}, which it does not take"
        )
    return {"type": "object", "properties": properties, "required": required}


def _where(function: Callable[..., Any]) -> str:
    code = inspect.unwrap(function).__code__
    return f"tool function {function.__qualname__} ({code.co_filename}:{code.co_firstlineno})"


_SECTION = re.compile(
    r"^(Args|Arguments|Parameters|Returns?|Raises|Yields|Examples?|Notes?|References):\s*(.*)$"
)
_ENTRY = re.compile(r"^(\w+)\s*(?:\([^)]*\))?:\s*(.*)$")


def _parse_docstring(text: str) -> tuple[str, dict[str, str]]:
    """Split a cleaned Google-style docstring into its free text and the ``Args:`` descriptions by name."""
    summary: list[str] = []
    described: dict[str, list[str]] = {}
    section, indent, current = "", 0, ""
    for line in text.splitlines():
        header = _SECTION.match(line)
        # A section may stand on one line, as in "Returns: its price."; in the description that is a
        # sentence.
        if header and (section or not header[2]):
            section = header[1]
            indent = 0
            current = ""
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
    return "\n".join(summary).strip(), {
        name: " ".join(lines).strip() for name, lines in described.items()
    }
