"""The base class and value types of configuration sections, and conditions of keys.

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
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationInfo, field_validator
from pydantic_core import core_schema

from jax_agent_rl.utils.near_names import did_you_mean
from jax_agent_rl.utils.plugins import InstalledName, Kind, installed

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
        kind: what the packages register, such as ``metric_sinks``.
    """

    def __init__(self, kind: Kind) -> None:
        self._kind: Kind = kind
        self._built_in: tuple[str, ...] = ()

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> core_schema.CoreSchema:
        self._built_in = get_args(source)
        return core_schema.no_info_after_validator_function(
            self._check, core_schema.str_schema(strict=True)
        )

    def __get_pydantic_json_schema__(self, schema: Any, handler: Any) -> dict[str, Any]:
        return {
            "anyOf": [
                {"type": "string", "enum": list(self._built_in)},
                {"type": "string", "format": INSTALLED_FORMAT},
            ]
        }

    def _check(self, value: str) -> str:
        if value in self._built_in:
            return value

        installed_names = installed(self._kind)
        if value in installed_names:
            return InstalledName(value)

        names = [*self._built_in, *sorted(installed_names)]
        *first_names, last_name = map(repr, names)
        raise ValueError(
            f"no such name; {did_you_mean(value, names)}choose {', '.join(first_names)} or"
            f" {last_name} (installed packages may register more, in the entry-point group"
            f" jax_agent_rl.{self._kind})"
        )


INSTALLED_FORMAT = "installed-name"
"""JSON Schema's ``format`` of a name that an installed package registers."""


class Section(BaseModel):
    """A frozen mapping of known keys; an unknown one is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _refuse_bool_as_number(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse booleans where a number is expected.

        Pydantic, like Python, would take them for 1 and 0.
        """
        if not _contains_bool(value):
            return value

        assert info.field_name is not None
        annotation = cls.model_fields[info.field_name].annotation
        takes_number = _mentions(annotation, (int, float))
        takes_bool = _mentions(annotation, (bool, Any))
        if takes_number and not takes_bool:
            raise ValueError("expected a number, got true or false")
        return value

    def changed(self, key: str) -> bool:
        """Return whether a key differs from its default."""
        default = type(self).model_fields[key].get_default(call_default_factory=True)
        return getattr(self, key) != default


def _contains_bool(value: Any) -> bool:
    """Return whether a value is a boolean, or a list with one in it at any depth."""
    if isinstance(value, bool):
        return True
    if isinstance(value, (list, tuple)):
        return any(map(_contains_bool, value))
    return False


def _mentions(annotation: Any, types: tuple[Any, ...]) -> bool:
    """Return whether a type annotation is, or has among its arguments, one of these types."""
    if annotation in types:
        return True
    return any(_mentions(argument, types) for argument in get_args(annotation))


# --- conditions -----------------------------------------------------------------------------------

SCHEMA_KEY = "x-used-only"  # in a key's JSON Schema: its condition in words


@dataclass(frozen=True, kw_only=True)
class Facts:
    """Facts about a run besides its configuration.

    Attributes:
        agents: names of the agent loops that rows can select, and of their base classes. None: not
            known yet, or the user's own loops are among them, which may read any key.
        has_vision: whether the model reads images; None: not known yet.
        is_recurrent: whether the model has recurrent layers; None: not known yet.
    """

    agents: frozenset[str] | None = None
    has_vision: bool | None = None
    is_recurrent: bool | None = None


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
        words = self.words()
        if SCHEMA_KEY in schema:  # a second condition of the same key
            words = f"{schema[SCHEMA_KEY]} and {words}"
        return {**schema, SCHEMA_KEY: words}


class WhenKey(Condition):
    """Another key has one of the values, or contains one if it is a list.

    Args:
        path: path of the other key, from the root.
        values: accepted values; none: the key is set, that is not null, false, 0 or empty.
        plugins: whether plugins of installed packages may also use the key. It is then unknown
            whether the condition holds while one of them is selected.
    """

    def __init__(self, path: str, *values: Any, plugins: bool = False) -> None:
        self.path = path
        self.values = values
        self.plugins = plugins

    def holds(self, config: Section, facts: Facts) -> bool | None:
        value = value_at(config, self.path)
        if not self.values:
            return bool(value)

        selected = value if isinstance(value, tuple) else (value,)
        if self.plugins and any(isinstance(item, InstalledName) for item in selected):
            return None
        return any(item in self.values for item in selected)

    def words(self) -> str:
        if not self.values:
            return f"with {self.path}"
        choices = " or ".join(map(_yaml, self.values))
        return f"with {self.path}={choices}"

    def instead(self, config: Section, facts: Facts) -> str:
        return f"{self.path} is {_yaml(value_at(config, self.path))}"


class Unless(WhenKey):
    """Another key has none of the values; without values: it is not set."""

    def holds(self, config: Section, facts: Facts) -> bool:
        return not super().holds(config, facts)

    def words(self) -> str:
        return super().words().replace("with", "without", 1)


class SwitchedOff(WhenKey):
    """A switch is off.

    The keys that the switch disables may stay in the configuration. The documentation does not
    mention the condition.
    """

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
        if facts.agents is None:
            return None
        return not facts.agents.isdisjoint(self.names)

    def words(self) -> str:
        if len(self.names) == 1:
            return f"by {self.names[0]}"
        return f"by {', '.join(self.names[:-1])} and {self.names[-1]}"

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


class WhenModelIsRecurrent(Condition):
    """The model has recurrent layers."""

    def holds(self, config: Section, facts: Facts) -> bool | None:
        return facts.is_recurrent

    def words(self) -> str:
        return "by models with recurrent layers"

    def instead(self, config: Section, facts: Facts) -> str:
        return "the one at model.path has none"


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
        answers = [part.holds(config, facts) for part in self.parts]
        if True in answers:
            return True
        if None in answers:
            return None
        return False

    def words(self) -> str:
        words = [part.words() for part in self.parts]
        return " or ".join(filter(None, words))

    def instead(self, config: Section, facts: Facts) -> str:
        situations = [part.instead(config, facts) for part in self.parts]
        return " and ".join(filter(None, situations))


class Both(Condition):
    """Each of several conditions holds."""

    def __init__(self, *parts: Condition) -> None:
        flat: list[Condition] = []  # `a & b & c` is one condition of three parts
        for part in parts:
            if isinstance(part, Both):
                flat += part.parts
            else:
                flat.append(part)
        self.parts = tuple(flat)

    def holds(self, config: Section, facts: Facts) -> bool | None:
        answers = [part.holds(config, facts) for part in self.parts]
        if False in answers:
            return False
        if None in answers:
            return None
        return True

    def words(self) -> str:
        first, *further = [part.words() for part in self.parts]
        joint = " and "
        if first.startswith("by ") and further[0].startswith("with "):
            joint = " "  # "by tool_agent with agent.x=1"
        return first + joint + " and ".join(further)

    def instead(self, config: Section, facts: Facts) -> str:
        situations = []
        for part in self.parts:
            if part.holds(config, facts) is False:
                situations.append(part.instead(config, facts))
        return " and ".join(situations)


def unused(config: Section, facts: Facts = Facts()) -> Iterator[str]:
    """Yield a message for each key of the whole tree that is set although nothing uses it."""
    yield from _unused(config, config, facts, "", ())


def conditions(section: type[Section]) -> Mapping[str, tuple[Condition, ...]]:
    """Return the conditions of each field of a section."""
    by_field = {}
    for name, info in section.model_fields.items():
        by_field[name] = tuple(item for item in info.metadata if isinstance(item, Condition))
    return by_field


def value_at(config: Section, path: str) -> Any:
    """Return the value of a key, or None where its section is null."""
    value: Any = config
    for name in path.split("."):
        if value is None:
            return None
        value = getattr(value, name)
    return value


def _unused(
    config: Section,
    section: Section,
    facts: Facts,
    prefix: str,
    section_conditions: tuple[Condition, ...],
) -> Iterator[str]:
    """Yield a message for each key of ``section`` that is set although nothing uses it.

    Args:
        config: the whole tree, in which conditions look up other keys.
        prefix: path of the section with a dot at its end; empty at the root.
        section_conditions: conditions of the section and of those it lies in.
    """
    for name, key_conditions in conditions(type(section)).items():
        if not section.changed(name):
            continue
        path = prefix + name
        value = getattr(section, name)
        all_conditions = section_conditions + key_conditions
        failed = _first_failed(all_conditions, config, facts)

        # A section that may be null is refused as a whole: giving it is a choice, as with a key.
        # Any other section is there always, so each of its changed keys gets its own message.
        is_optional = type(section).model_fields[name].default is None
        if isinstance(value, Section) and not (is_optional and failed):
            yield from _unused(config, value, facts, f"{path}.", all_conditions)
            continue
        if failed is None:
            continue

        assignment = path if isinstance(value, Section) else f"{path}={_yaml(value)}"
        or_section = ""
        if failed in section_conditions:
            or_section = f", or its section ({prefix[:-1]}=null)"
        yield (
            f"{assignment} is used only {failed.words()}; {failed.instead(config, facts)}; remove"
            f" it, or reset it ({path}=null){or_section}"
        )


def _first_failed(
    candidates: Iterable[Condition], config: Section, facts: Facts
) -> Condition | None:
    """Return the first condition that is known not to hold; None if there is none."""
    for condition in candidates:
        if condition.holds(config, facts) is False:
            return condition
    return None


def _yaml(value: Any) -> str:
    """Format a value as YAML."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_yaml, value))}]"
    return str(value)
