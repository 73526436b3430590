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
from jax_agent_rl.utils.timeouts import DaemonThreads

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
        supplied_parameters: parameters that a subclass passes, which are not part of the schema.

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
        supplied_parameters: Collection[str] = (),
    ):
        if not (inspect.isfunction(function) or inspect.ismethod(function)):
            raise ToolDefinitionError(
                f"@function_tool needs a function, got {function!r}; give a name as name=…"
            )
        self.function = function
        self._threads = threads
        self._is_async = inspect.iscoroutinefunction(function)

        summary, descriptions = _parse_docstring(inspect.getdoc(function) or "")
        annotations = _annotations(function)
        for parameter in supplied_parameters:
            annotations.pop(parameter, None)
            descriptions.pop(parameter, None)

        declared: dict[str, Any] = {"name": function.__name__, "description": summary}
        if schema is None:
            declared["parameters"] = _parameters(
                function, annotations, descriptions, supplied_parameters
            )
        else:
            declared |= _check_schema(schema, function, name)
        parameters = declared["parameters"]

        self._converters: dict[str, Callable[[Any], Any]] = {}
        for parameter in annotations.keys() & parameters.get("properties", {}).keys():
            converter = make_converter(annotations[parameter])
            if converter is not None:
                self._converters[parameter] = converter
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
        kwargs = dict(arguments)
        for parameter, convert in self._converters.items():
            if parameter in kwargs:
                kwargs[parameter] = convert(kwargs[parameter])
        call = functools.partial(self.function, **kwargs, **execute_kwargs)
        if self._is_async:
            return await call()
        return await self._threads.run(call, name=self.name)


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
        name = function
        function = None
    make = functools.partial(FunctionTool, name=name, description=description, schema=schema)
    if function is None:
        return make
    return make(function)


def _check_schema(
    schema: Mapping[str, Any] | BaseModel, function: Callable[..., Any], name: str | None
) -> Mapping[str, Any]:
    """Return the ``function`` of an explicit schema, checked against the function it describes."""
    where = _where(function)
    if isinstance(schema, BaseModel):
        schema = schema.model_dump(exclude_none=True)
    declared = unwrap_function(schema, f"{where}: schema")
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

    takes_any = False
    names = set()
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD:
            takes_any = True
        if parameter.kind is not parameter.POSITIONAL_ONLY:
            names.add(parameter.name)
    unknown = sorted(parameters.get("properties", {}).keys() - names)
    if unknown and not takes_any:
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
    descriptions: Mapping[str, str],
    supplied_parameters: Collection[str],
) -> dict[str, Any]:
    """Build the ``parameters`` schema of a function, without those that a subclass supplies."""
    properties: dict[str, Any] = {}
    required = []
    for name, parameter in inspect.signature(function).parameters.items():
        if name in supplied_parameters:
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
        if name in descriptions:
            properties[name]["description"] = descriptions[name]
        if parameter.default is parameter.empty:
            required.append(name)

    unknown = sorted(descriptions.keys() - properties.keys())
    if unknown:
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
    """Split a cleaned Google-style docstring.

    Returns:
        Its free text, and the descriptions of its ``Args:`` by name.
    """
    summary: list[str] = []
    entries: dict[str, list[str]] = {}
    section = ""
    entry_indent = 0
    name = ""
    for line in text.splitlines():
        header = _SECTION.match(line)
        # A section may stand on one line, as in "Returns: its price."; within the free text, that
        # is a sentence.
        if header and (section or not header[2]):
            section = header[1]
            entry_indent = 0
            name = ""
        elif not section:
            summary.append(line)
        elif section in ("Args", "Arguments", "Parameters") and line.strip():
            indent = len(line) - len(line.lstrip())
            if not entry_indent:
                entry_indent = indent
            entry = None
            if indent <= entry_indent:  # deeper lines continue the entry above
                entry = _ENTRY.match(line.strip())
            if entry:
                name = entry[1]
                entries[name] = [entry[2]]
            elif name:
                entries[name].append(line.strip())

    descriptions = {name: " ".join(lines).strip() for name, lines in entries.items()}
    return "\n".join(summary).strip(), descriptions
