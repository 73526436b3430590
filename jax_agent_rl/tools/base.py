"""The interface of a tool: a name, a schema the model reads, and ``create / execute / release``.

Life of a tool in one trajectory (``instance_id`` is the trajectory's id)::

    create(id, **create_kwargs) ──► execute(id, arguments, **execute_kwargs) …
        ──► calc_reward(id, **calc_reward_kwargs) ──► release(id, **release_kwargs)

``create`` and ``release`` are called exactly once, ``release`` also when the trajectory fails or is cancelled, so
a tool may keep per-trajectory state under ``instance_id``. The keyword arguments come from the dataset row:
``extra_info.tools_kwargs[tool name] = {"create_kwargs": …, "execute_kwargs": …, "calc_reward_kwargs": …,
"release_kwargs": …}``.
"""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from numbers import Real
from typing import Any, ClassVar, SupportsFloat

from jax_agent_rl.errors import ToolDefinitionError


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolResponse:
    """Result of a tool call.

    Attributes:
        text: what the model reads.
        image: images (PIL) for a multi-modal model, in the order in which it sees them, before the text. A model or
            engine that takes none makes the call fail with a message.
        video: videos, likewise (each a sequence of frames, or whatever the engine takes).
        reward: reward the call itself earns; reaches the reward function, is never shown to the model. Any finite
            number, also NumPy's; a bool is 1 or 0. Kept as a float.
        metrics: numbers to add up over the trajectory, by name; kept as floats, too.
    """

    text: str = ""
    image: tuple[Any, ...] = ()
    video: tuple[Any, ...] = ()
    reward: float = 0.0
    metrics: Mapping[str, float] = field(default_factory=dict)

    @property
    def media(self) -> dict[str, tuple[Any, ...]]:
        """Images and videos by kind, without empty kinds."""
        return {kind: tuple(items) for kind, items in (("image", self.image), ("video", self.video)) if items}

    def __post_init__(self) -> None:
        if not isinstance(self.text, str):
            raise TypeError(f"ToolResponse.text must be str, got {type(self.text).__name__}")
        for kind in ("image", "video"):
            if not isinstance(getattr(self, kind), tuple | list):
                raise TypeError(
                    f"ToolResponse.{kind} must be a tuple or list, got {type(getattr(self, kind)).__name__}"
                )
        # The dataclass is frozen, but not before it is made: what reads it reads plain floats.
        object.__setattr__(self, "reward", as_float(self.reward, "a tool's reward"))
        if not isinstance(self.metrics, Mapping):
            raise ValueError(f"a tool's metrics must be a mapping of finite numbers, got {self.metrics!r}")
        metrics = {key: as_float(value, f"a tool's metric {key!r}") for key, value in self.metrics.items()}
        object.__setattr__(self, "metrics", metrics)


def as_float(value: object, what: str) -> float:
    """Return a finite number as a float; a bool is 1.0 or 0.0, and NumPy's numbers count.

    Args:
        value: the number.
        what: its name in the message.

    Raises:
        ValueError: it is not a number, or not finite.
    """
    try:
        if isinstance(value, SupportsFloat) and math.isfinite(number := float(value)):
            return number
    except (TypeError, ValueError, OverflowError):  # an array of several numbers, an int beyond all floats
        pass
    raise ValueError(f"{what} must be a finite number, got {value!r:.200}")


def is_number(value: object) -> bool:
    """Return whether a value is a finite real number, NumPy's included; a bool is none."""
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)


ToolResult = str | float | Mapping[str, Any] | list[Any] | ToolResponse | tuple[Any, ...]
"""What a tool may return::

    "text"                          as it is
    3, 2.5, True                    as Python writes it
    {...}, [...]                    as JSON
    ToolResponse(...)
    (one of these,)
    (one of these, reward)          reward None: none of its own
    (one of these, reward, metrics)

Only a tuple is taken apart. A list is a result like any other: ``["Paris", 2]`` earns nothing.
"""


def as_response(result: ToolResult) -> ToolResponse:
    """Bring everything a tool may return into one form.

    Raises:
        TypeError: the tool returned something else, e.g. None.
        ValueError: its reward or a metric is not a finite number.
    """
    match result:
        case tuple((response, *rest)) if len(rest) <= 2:
            named = zip(("reward", "metrics"), rest, strict=False)
            return replace(_single_response(response), **{name: value for name, value in named if value is not None})
        case _:
            return _single_response(result)


def _single_response(result: object) -> ToolResponse:
    match result:
        case ToolResponse():
            return result
        case str():
            return ToolResponse(text=result)
        case Mapping() | list():
            return ToolResponse(text=json.dumps(result, ensure_ascii=False))
        case SupportsFloat():
            return ToolResponse(text=str(result))
    raise TypeError(
        "a tool must return str, a number, dict, list, ToolResponse, (response, reward) or (response, reward, "
        f"metrics), got {type(result).__name__}"
    )


class BaseTool(ABC):
    """Base class of tools; ``@function_tool`` makes one from a function.

    Args:
        name: what the model calls it.
        description: what the model is told about it.
        parameters: JSON Schema of the arguments, an ``object``. Arguments it does not name are refused unless it
            sets ``additionalProperties``.

    Raises:
        ToolDefinitionError: no name, or ``parameters`` is not an object schema.
    """

    stateful: ClassVar[bool] = True
    """The answer to a call may depend on the trajectory's earlier calls. When a trajectory branches (tree rollouts),
    the earlier calls are then made again for the branch. Set it to False where that would be a waste or a wrong: a
    search, or a server whose state all trajectories share."""

    def __init__(self, *, name: str, description: str, parameters: Mapping[str, Any]):
        if not name:
            raise ToolDefinitionError(f"{type(self).__name__} has no name")
        if parameters.get("type") != "object":
            raise ToolDefinitionError(f"tool {name!r}: parameters must be a schema of type object, got {parameters!r}")
        self.name = name
        self.description = description
        self.parameters = parameters

    @property
    def schema(self) -> dict[str, Any]:
        """The tool in OpenAI's format, as chat templates expect it."""
        function = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": function}

    async def create(self, instance_id: str, **create_kwargs: Any) -> None:
        """Prepare the tool for one trajectory. The default takes no arguments and does nothing."""
        if create_kwargs:
            raise TypeError(f"tool {self.name!r} takes no create_kwargs, got {sorted(create_kwargs)}")

    @abstractmethod
    async def execute(self, instance_id: str, arguments: Mapping[str, Any], **execute_kwargs: Any) -> ToolResult:
        """Run one call.

        Args:
            instance_id: id of the trajectory.
            arguments: what the model wrote, already valid under ``parameters``.
            execute_kwargs: what the dataset row adds, unseen by the model.

        Raises:
            ToolError: the call failed; the message is what the model reads. Any other exception is shown with its
                type.
        """

    async def calc_reward(self, instance_id: str, **calc_reward_kwargs: Any) -> float | None:
        """Score the whole trajectory once it is over, from the state the tool kept of it.

        Returns:
            A finite number, which reaches the reward function as ``extra_info["tool_scores"][name]``; None (the
            default): the tool has no opinion.
        """
        if calc_reward_kwargs:
            raise TypeError(f"tool {self.name!r} takes no calc_reward_kwargs, got {sorted(calc_reward_kwargs)}")
        return None

    @classmethod
    def from_config(cls, config: Mapping[str, Any], schema: Mapping[str, Any] | None) -> BaseTool:
        """Build the tool of an entry of ``tools.tool_config_path``.

        Args:
            config: the entry's ``config``: keyword arguments of the constructor.
            schema: the entry's ``tool_schema["function"]``, whose parts are keyword arguments too; None: the class
                has a schema of its own.
        """
        return cls(**config, **(schema or {}))

    async def release(self, instance_id: str, **release_kwargs: Any) -> None:
        """Free what ``create`` and ``execute`` made. The default takes no arguments and does nothing."""
        if release_kwargs:
            raise TypeError(f"tool {self.name!r} takes no release_kwargs, got {sorted(release_kwargs)}")


def function_of(schema: object, where: str) -> Mapping[str, Any]:
    """Return the ``function`` of a schema in OpenAI's format.

    Args:
        schema: ``{type: function, function: {name, description, parameters}}``.
        where: what it is, for the message.

    Raises:
        ToolDefinitionError: it is something else.
    """
    if isinstance(schema, Mapping) and schema.get("type", "function") == "function":
        if isinstance(function := schema.get("function"), Mapping):
            return function
    raise ToolDefinitionError(f"{where} must be {{type: function, function: {{…}}}}, got {schema!r:.100}")


def check_parameters(parameters: Mapping[str, Any], what: str) -> None:
    """Refuse an invalid schema.

    Args:
        parameters: JSON Schema of a tool's arguments.
        what: what it is, for the message.

    Raises:
        ToolDefinitionError: it is not valid.
    """
    from jsonschema import Draft202012Validator, SchemaError  # here: importing it takes longer than the whole package

    try:
        Draft202012Validator.check_schema(parameters)
    except SchemaError as error:
        raise ToolDefinitionError(f"{what} are no valid JSON Schema: {error.json_path}: {error.message}") from None
