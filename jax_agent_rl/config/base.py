"""The base class and the value types of all configuration sections, and the conditions under which keys are used.

A condition annotates a field; on a section it applies to all of its keys::

    lam: Annotated[float, WhenKey("algorithm.adv_estimator", "gae")] = Field(default=1.0, ...)
    max_turns: Annotated[int, UsedByAgents("server_tool_agent")] = Field(default=5, ...)
    critic: Annotated[CriticConfig, WhenKey("algorithm.adv_estimator", "gae")] = Field(...)

A key that differs from its default is refused if its condition does not hold, because it would have
no effect. As long as that is unknown (which agents the rows select, which model is used), nothing
is refused. ``config explain``, ``docs/config.md`` and the editor's schema show conditions in words.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationInfo, field_validator
from pydantic_core import core_schema

from jax_agent_rl.utils.plugins import InstalledName, Kind, installed
from jax_agent_rl.validation import did_you_mean

Positive = Annotated[int, Field(ge=1)]
NonNegative = Annotated[int, Field(ge=0)]
_Items = TypeVar("_Items", bound=tuple[Any, ...])


def _distinct(value: _Items) -> _Items:
    if len(set(value)) < len(value):
        raise ValueError(f"names an item twice: {list(value)}; name each once")
    return value


Distinct = AfterValidator(_distinct)
"""Annotates a tuple that must not repeat an item."""


def _compiles(value: str) -> str:
    try:
        re.compile(value)
    except re.error as error:
        raise ValueError(f"{value!r} is not a regular expression: {error}") from None
    return value


Expression = Annotated[str, AfterValidator(_compiles)]
"""A regular expression."""


class OrInstalled:
    """Annotates a choice (a ``Literal``) to which installed packages may add names.

    Args:
        kind: of what they register.
    """

    def __init__(self, kind: Kind) -> None:
        self._kind: Kind = kind
        self._own: tuple[str, ...] = ()

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> core_schema.CoreSchema:
        self._own = get_args(source)
        return core_schema.no_info_after_validator_function(
            self._check, core_schema.str_schema(strict=True)
        )

    def __get_pydantic_json_schema__(self, schema: Any, handler: Any) -> dict[str, Any]:
        return {
            "anyOf": [
                {"type": "string", "enum": list(self._own)},
                {"type": "string", "format": INSTALLED_FORMAT},
            ]
        }

    def _check(self, value: str) -> str:
        if value in self._own:
            return value
        if value in (known := installed(self._kind)):
            return InstalledName(value)
        names = [*self._own, *sorted(known)]
        *others, last = map(repr, names)
        raise ValueError(
            f"no such name; {did_you_mean(value, names)}choose {', '.join(others)} or {last}"
            " (installed packages may register more, in the entry-point group"
            f" jax_agent_rl.{self._kind})"
        )


INSTALLED_FORMAT = "installed-name"
"""JSON Schema's ``format`` of a name that an installed package registers."""


class Section(BaseModel):
    """A frozen mapping of known keys; an unknown one is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _true_is_no_number(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse booleans where a number is expected: pydantic, like Python, takes them for 1 and 0."""
        assert info.field_name is not None
        annotation = cls.model_fields[info.field_name].annotation
        if (
            _holds_bool(value)
            and _mentions(annotation, (int, float))
            and not _mentions(annotation, (bool, Any))
        ):
            raise ValueError("true and false are no numbers; give a number")
        return value

    def changed(self, key: str) -> bool:
        """Return whether a key differs from its default."""
        return getattr(self, key) != type(self).model_fields[key].get_default(
            call_default_factory=True
        )


def _holds_bool(value: Any) -> bool:
    return (
        isinstance(value, bool) or isinstance(value, (list, tuple)) and any(map(_holds_bool, value))
    )


def _mentions(annotation: Any, types: tuple[Any, ...]) -> bool:
    return annotation in types or any(_mentions(part, types) for part in get_args(annotation))


# --- conditions -----------------------------------------------------------------------------------

SCHEMA_KEY = "x-used-only"  # in a key's JSON Schema: its condition in words


@dataclass(frozen=True, kw_only=True)
class Facts:
    """Facts about a run besides its configuration.

    Attributes:
        agents: names of the agent loops that rows can select, and of their base classes. None: not
            known yet, or the user's own loops are among them, which may read any key.
        has_vision: whether the model reads images; None: not known yet.
    """

    agents: frozenset[str] | None = None
    has_vision: bool | None = None


class Condition(ABC):
    """Condition under which a key is used."""

    @abstractmethod
    def holds(self, config: Section, facts: Facts) -> bool | None:
        """Return whether the condition holds for the whole tree ``config``; None if unknown."""

    @abstractmethod
    def words(self) -> str:
        """Return the end of "is used only …"; may be empty."""

    def instead(self, config: Section, facts: Facts) -> str:
        """Return the situation in which the condition does not hold; may be empty."""
        return ""

    def __or__(self, other: Condition) -> Condition:
        return Either(self, other)

    def __and__(self, other: Condition) -> Condition:
        return Both(self, other)

    def __get_pydantic_json_schema__(self, core_schema: Any, handler: Any) -> dict[str, Any]:
        """Add the condition to the key's JSON Schema."""
        schema = handler(core_schema)
        words = f"{schema[SCHEMA_KEY]} and {self.words()}" if SCHEMA_KEY in schema else self.words()
        return {**schema, SCHEMA_KEY: words}


class WhenKey(Condition):
    """Another key has one of the values, or contains one if it is a list.

    Args:
        path: path of the other key, from the root.
        values: accepted values; none: the key is set, that is not null, false, 0 or empty.
        plugins: what an installed package registers may use the key, too.
    """

    def __init__(self, path: str, *values: Any, plugins: bool = False) -> None:
        self.path, self.values, self.plugins = path, values, plugins

    def holds(self, config: Section, facts: Facts) -> bool | None:
        value = value_at(config, self.path)
        if not self.values:
            return bool(value)
        if self.plugins and any(
            isinstance(x, InstalledName) for x in (value if isinstance(value, tuple) else [value])
        ):
            return None
        return (
            not set(self.values).isdisjoint(value)
            if isinstance(value, tuple)
            else value in self.values
        )

    def words(self) -> str:
        return f"with {self.path}" + (
            f"={' or '.join(map(_yaml, self.values))}" if self.values else ""
        )

    def instead(self, config: Section, facts: Facts) -> str:
        return f"{self.path} is {_yaml(value_at(config, self.path))}"


class Unless(WhenKey):
    """Another key has none of the values; without values: it is not set."""

    def holds(self, config: Section, facts: Facts) -> bool:
        return not super().holds(config, facts)

    def words(self) -> str:
        return super().words().replace("with", "without", 1)


class SwitchedOff(WhenKey):
    """A switch is off: the keys that it disables may stay in the configuration. The condition is not shown."""

    def __init__(self, path: str) -> None:
        super().__init__(path, False)

    def words(self) -> str:
        return ""

    def instead(self, config: Section, facts: Facts) -> str:
        return ""


class UsedByAgents(Condition):
    """A row selects one of these agent loops, or a subclass of one."""

    def __init__(self, *names: str) -> None:
        self.names = names

    def holds(self, config: Section, facts: Facts) -> bool | None:
        return None if facts.agents is None else not facts.agents.isdisjoint(self.names)

    def words(self) -> str:
        *others, last = self.names
        return f"by {', '.join(others)} and {last}" if others else f"by {last}"

    def instead(self, config: Section, facts: Facts) -> str:
        which = "it" if len(self.names) == 1 else "one of them"
        return f"no row selects {which} (by agent_name; agent.default_agent is for rows without)"


class WhenModelHasVision(Condition):
    """The model reads images."""

    def holds(self, config: Section, facts: Facts) -> bool | None:
        return facts.has_vision

    def words(self) -> str:
        return "by vision models"

    def instead(self, config: Section, facts: Facts) -> str:
        return "the one at model.path has no vision"


class WhenCommand(Condition):
    """A command uses the key. Always holds: a configuration may be written for that command."""

    def __init__(self, name: str) -> None:
        self.name = name

    def holds(self, config: Section, facts: Facts) -> bool:
        return True

    def words(self) -> str:
        return f"by `jax-agent-rl {self.name}`"


class Either(Condition):
    """One of several conditions holds."""

    def __init__(self, *parts: Condition) -> None:
        self.parts = parts

    def holds(self, config: Section, facts: Facts) -> bool | None:
        each = [part.holds(config, facts) for part in self.parts]
        return True if True in each else None if None in each else False

    def words(self) -> str:
        return " or ".join(words for part in self.parts if (words := part.words()))

    def instead(self, config: Section, facts: Facts) -> str:
        return " and ".join(words for part in self.parts if (words := part.instead(config, facts)))


class Both(Condition):
    """Each of several conditions holds."""

    def __init__(self, *parts: Condition) -> None:
        self.parts = tuple(
            one for part in parts for one in (part.parts if isinstance(part, Both) else (part,))
        )

    def holds(self, config: Section, facts: Facts) -> bool | None:
        each = [part.holds(config, facts) for part in self.parts]
        return False if False in each else None if None in each else True

    def words(self) -> str:
        first, *rest = (part.words() for part in self.parts)
        glue = " " if first.startswith("by ") and rest[0].startswith("with ") else " and "
        return first + glue + " and ".join(rest)

    def instead(self, config: Section, facts: Facts) -> str:
        failed = (part for part in self.parts if part.holds(config, facts) is False)
        return " and ".join(part.instead(config, facts) for part in failed)


def unused(config: Section, facts: Facts = Facts()) -> Iterator[str]:
    """Yield a message for each key of the whole tree that is set although nothing uses it."""
    yield from _unused(config, config, facts, "", ())


def conditions(section: type[Section]) -> Mapping[str, tuple[Condition, ...]]:
    """Return the conditions of each field of a section."""
    return {
        name: tuple(item for item in info.metadata if isinstance(item, Condition))
        for name, info in section.model_fields.items()
    }


def value_at(config: Section, path: str) -> Any:
    """Return the value of a key, or None where its section is null."""
    value: Any = config
    for name in path.split("."):
        value = None if value is None else getattr(value, name)
    return value


def _unused(
    config: Section, section: Section, facts: Facts, prefix: str, above: tuple[Condition, ...]
) -> Iterator[str]:
    for name, own in conditions(type(section)).items():
        if not section.changed(name):
            continue
        path, value, wanted = prefix + name, getattr(section, name), above + own
        failed = next((one for one in wanted if one.holds(config, facts) is False), None)
        optional = (
            type(section).model_fields[name].default is None
        )  # giving such a section is a choice, as of a key
        if isinstance(value, Section) and not (optional and failed):
            yield from _unused(config, value, facts, path + ".", wanted)
        elif failed:
            shown = "" if isinstance(value, Section) else f"={_yaml(value)}"
            reset = f", or its section ({prefix[:-1]}=null)" if failed in above else ""
            why = failed.instead(config, facts)
            yield (
                f"{path}{shown} is used only {failed.words()}; {why}; remove it, or reset it"
                f" ({path}=null){reset}"
            )


def _yaml(value: Any) -> str:
    """Format a value as YAML."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_yaml, value))}]"
    return str(value)
