"""Tool classes written for verl, unchanged.

They have ``__init__(config, tool_schema)`` and ``create() -> (id, ToolResponse)``.
:func:`verl_modules` lets such classes import what they need of verl while they are loaded. A verl
that can be imported is used itself. Where there is none, or packages that all of verl needs are
missing, these modules stand in::

    verl.tools.base_tool       BaseTool, and the schemas and ToolResponse it imports itself
    verl.tools.schemas         OpenAIFunctionToolSchema and its parts, ToolResponse
    verl.tools.function_tool   function_tool
    verl.utils.rollout_trace   rollout_trace_op, which does nothing: sessions trace every call

Every other module comes from verl's own files, if they are there: its GSM8K tool needs neither Ray
nor PyTorch. A folder that only has the name, such as a clone beside the configuration, is not verl:
the package is the folder in it.

:class:`VerlTool` runs an instance of such a class, for all trajectories.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import inspect
import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from jax_agent_rl.checks import is_number
from jax_agent_rl.errors import ConfigError, ToolDefinitionError
from jax_agent_rl.tools.base import BaseTool, ToolResponse, ToolResult
from jax_agent_rl.tools.function_tool import function_tool

logger = logging.getLogger(__name__)

_Function = TypeVar("_Function", bound=Callable[..., Any])


class OpenAIFunctionPropertySchema(BaseModel):
    """The JSON Schema of one argument."""

    model_config = ConfigDict(extra="allow")
    type: str | list[str]
    description: str | None = None
    enum: list[Any] | None = None


class OpenAIFunctionParametersSchema(BaseModel):
    """The JSON Schema of all arguments."""

    model_config = ConfigDict(extra="allow")
    type: str
    properties: dict[str, OpenAIFunctionPropertySchema]
    required: list[str] = Field(default_factory=list)


class OpenAIFunctionSchema(BaseModel):
    """A function: its name, description and arguments."""

    name: str
    description: str
    parameters: OpenAIFunctionParametersSchema = Field(
        default_factory=lambda: OpenAIFunctionParametersSchema(type="object", properties={})
    )
    strict: bool = False


class OpenAIFunctionToolSchema(BaseModel):
    """A tool in OpenAI's format, the ``tool_schema`` of a class."""

    type: str
    function: OpenAIFunctionSchema


class VerlResponse(BaseModel):
    """A tool's answer: text, images and videos; the text may be positional."""

    text: str | None = None
    image: list[Any] | None = None
    video: list[Any] | None = None

    def __init__(self, text: str | None = None, **media: Any):
        super().__init__(text=text, **media)

    def is_empty(self) -> bool:
        """Return whether there is nothing to show."""
        return not (self.text or self.image or self.video)

    def is_text_only(self) -> bool:
        """Return whether there is text and nothing else."""
        return bool(self.text) and not (self.image or self.video)


class VerlBaseTool:
    """The base class that verl's tools extend; the methods do as little as verl's.

    Args:
        config: the entry's ``config``.
        tool_schema: the entry's ``tool_schema``; None: :meth:`get_openai_tool_schema` makes it.
    """

    def __init__(self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | None):
        self.config = config
        # Set it first: the default get_openai_tool_schema returns the attribute.
        self.tool_schema: OpenAIFunctionToolSchema | None = tool_schema
        self.tool_schema = tool_schema or self.get_openai_tool_schema()
        if self.tool_schema is None:
            raise ToolDefinitionError(
                f"{type(self).__name__} has no schema; give the entry a tool_schema, or the class a"
                " get_openai_tool_schema"
            )
        self.name = self.tool_schema.function.name

    def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema | None:
        """Return the schema."""
        return self.tool_schema

    async def create(
        self, instance_id: str | None = None, **kwargs: Any
    ) -> tuple[str | None, VerlResponse]:
        """Prepare for a trajectory."""
        return instance_id, VerlResponse()

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[VerlResponse, float, dict[str, Any]]:
        """Run one call; returns the answer, its reward and metrics."""
        return VerlResponse("Updated the tool state."), 0.0, {}

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        """Score the trajectory."""
        return 0.0

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        """Free what ``create`` made."""


def rollout_trace_op(function: _Function) -> _Function:
    """Return the function as it is."""
    return function


_SCHEMAS = {
    "OpenAIFunctionPropertySchema": OpenAIFunctionPropertySchema,
    "OpenAIFunctionParametersSchema": OpenAIFunctionParametersSchema,
    "OpenAIFunctionSchema": OpenAIFunctionSchema,
    "OpenAIFunctionToolSchema": OpenAIFunctionToolSchema,
    "ToolResponse": VerlResponse,
}
_MODULES: Mapping[str, Mapping[str, Any]] = {
    "verl": {},
    "verl.tools": {},
    "verl.tools.schemas": _SCHEMAS,
    "verl.tools.base_tool": {**_SCHEMAS, "BaseTool": VerlBaseTool},
    "verl.tools.function_tool": {"function_tool": function_tool},
    "verl.utils": {},
    "verl.utils.rollout_trace": {"rollout_trace_op": rollout_trace_op},
}


@contextmanager
def verl_modules() -> Iterator[type[BaseModel]]:
    """Make ``verl``, or at least its tool interface, importable within the context.

    Yields:
        Its ``OpenAIFunctionToolSchema``.

    Raises:
        ConfigError: the context was left with a ConfigError about a missing module of verl; says
            what to install.
    """
    modules_before = set(sys.modules)
    package = _find_package()
    problem = _import_verl(package)
    if problem is None:
        yield sys.modules["verl.tools.schemas"].OpenAIFunctionToolSchema
        return

    stand_ins = {name: ModuleType(name) for name in _MODULES}
    for name, module in stand_ins.items():
        vars(module).update(_MODULES[name], __path__=_package_path(package, name))
        parent, _, leaf = name.rpartition(".")
        if parent:
            setattr(stand_ins[parent], leaf, module)
    sys.modules.update(stand_ins)
    try:
        yield OpenAIFunctionToolSchema
    except ConfigError as error:
        cause = error.__cause__
        if not isinstance(cause, ModuleNotFoundError):
            raise
        missing_package, _, _ = (cause.name or "").partition(".")
        if missing_package != "verl":
            raise
        raise ConfigError([f"{message}; {problem}" for message in error.problems]) from cause
    finally:
        _forget_modules(modules_before)


def _find_package() -> Path | None:
    """Return the folder of a verl that is installed or on the path.

    A folder without ``__init__.py`` is none.
    """
    spec = importlib.machinery.PathFinder.find_spec("verl")
    if spec is None or spec.origin is None:
        return None
    return Path(spec.origin).parent


def _import_verl(package: Path | None) -> str | None:
    """Import verl itself; return why it cannot be used, as advice, or None if it can."""
    if "verl.tools.schemas" in sys.modules:
        return None
    if package is None:
        clone = Path("verl")
        hint = ""
        if (clone / "verl" / "__init__.py").is_file():
            hint = f"The folder {clone.resolve()} is a clone of it, so PYTHONPATH={clone} has it. "
        return (
            f"verl is not installed, only its tool interface is built in. {hint}Of its versions,"
            " 0.7.1 is the last with tool classes of its own: pip install --no-deps verl==0.7.1"
        )

    modules_before = set(sys.modules)
    try:
        importlib.import_module("verl.tools.schemas")
    except Exception as error:  # whatever is raised where a part of what verl needs is missing
        _forget_modules(modules_before)
        return (
            f"{package} has no such module (as a whole it cannot be imported:"
            f" {type(error).__name__}: {error})"
        )
    return None


def _package_path(package: Path | None, module: str) -> list[str]:
    """Return the ``__path__`` of a stand-in: verl's own folder of that name, if there is one."""
    if package is None:
        return []
    folder = package.joinpath(*module.split(".")[1:])
    if not folder.is_dir():
        return []
    return [str(folder)]


def _forget_modules(modules_before: set[str]) -> None:
    """Forget the modules of verl that were imported since."""
    for name in list(sys.modules):
        if name.partition(".")[0] == "verl" and name not in modules_before:
            del sys.modules[name]


def is_verl_tool(cls: object) -> bool:
    """Return whether ``cls`` has the methods of verl's tools; it need not extend their base."""
    if not isinstance(cls, type):
        return False
    for name in ("create", "execute", "calc_reward", "release"):
        if not inspect.iscoroutinefunction(inspect.getattr_static(cls, name, None)):
            return False
    return True


class VerlTool(BaseTool):
    """An instance of a verl class as a tool of this package.

    verl calls ``create`` in two ways, with the row's ``create_kwargs`` as keyword arguments or as
    one argument of that name; the class gets what its signature takes. It may return ``(id,
    ToolResponse)`` or the id alone, and the id may be another one. Metrics and rewards that are no
    numbers are left out.

    Args:
        tool: the instance, kept as ``wrapped``.

    Raises:
        ToolDefinitionError: ``execute`` requires ``agent_data``, the state of verl's own agent
            loop.
    """

    def __init__(self, tool: Any):
        agent_data = inspect.signature(tool.execute).parameters.get("agent_data")
        if agent_data is not None and agent_data.default is agent_data.empty:
            raise ToolDefinitionError(
                f"{type(tool).__name__}.execute requires agent_data, which only verl's loop has;"
                " give it a default"
            )
        function = tool.tool_schema.model_dump(exclude_unset=True, exclude_none=True)["function"]
        parameters = function.get("parameters", {"type": "object", "properties": {}})
        super().__init__(
            name=tool.name, description=function.get("description", ""), parameters=parameters
        )
        self.wrapped = tool
        self._instance_ids: dict[str, str] = {}  # the class's ids, by ours

    @classmethod
    def make(
        cls, tool: type, config: Mapping[str, Any], schema: Mapping[str, Any] | None
    ) -> VerlTool:
        """Build the tool of an entry of ``tools.tool_config_path``.

        Args:
            tool: the verl class.
            config: the entry's ``config``, with its ``type``.
            schema: the entry's ``tool_schema``; None: the class makes its schema.
        """
        with verl_modules() as schema_class:
            tool_schema = None
            if schema is not None:
                tool_schema = schema_class.model_validate(schema)
            return cls(tool(config=dict(config), tool_schema=tool_schema))

    async def create(self, instance_id: str, **create_kwargs: Any) -> None:
        parameters = inspect.signature(self.wrapped.create).parameters
        takes_any = any(
            parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()
        )
        kwargs: dict[str, Any] = {}
        if takes_any or "create_kwargs" not in parameters:
            kwargs.update(create_kwargs)
        if takes_any or "create_kwargs" in parameters:
            kwargs["create_kwargs"] = create_kwargs
        if takes_any or "instance_id" in parameters:
            kwargs["instance_id"] = instance_id
        created = await self.wrapped.create(**kwargs)

        if isinstance(created, tuple):
            wrapped_id, answer = created[:2]
        else:
            wrapped_id = created
            answer = None
        if wrapped_id is None:
            wrapped_id = instance_id
        self._instance_ids[instance_id] = wrapped_id
        if answer is not None and not answer.is_empty():
            logger.warning(
                "what %s.create returned is not shown to the model, as in verl: %.200r",
                self.name,
                answer,
            )

    async def execute(
        self, instance_id: str, arguments: Mapping[str, Any], **execute_kwargs: Any
    ) -> ToolResult:
        result = await self.wrapped.execute(
            self._instance_ids[instance_id], dict(arguments), **execute_kwargs
        )
        if not isinstance(result, tuple):
            result = (result,)
        response, reward, metrics = (*result, None, None)[:3]
        if isinstance(response, BaseModel):  # this module's, or an installed verl's
            fields = response.model_dump(include={"text", "image", "video"}, exclude_none=True)
            response = ToolResponse(**fields)
        numbers = {key: value for key, value in (metrics or {}).items() if _is_number(value)}
        return response, reward, numbers

    async def calc_reward(self, instance_id: str, **calc_reward_kwargs: Any) -> float | None:
        wrapped_id = self._instance_ids[instance_id]
        score = await self.wrapped.calc_reward(wrapped_id, **calc_reward_kwargs)
        # verl's own search tool returns what it found; verl's loop asks no tool for this.
        if not _is_number(score):
            return None
        return float(score)

    async def release(self, instance_id: str, **release_kwargs: Any) -> None:
        wrapped_id = self._instance_ids.pop(instance_id, None)
        if wrapped_id is not None:  # else create failed
            await self.wrapped.release(wrapped_id, **release_kwargs)


def _is_number(value: Any) -> bool:
    """Return whether a value is a number; true and false count, as 1 and 0."""
    return isinstance(value, bool) or is_number(value)
