"""Configurations for tests that go through every key: with another value than the default, with a
condition met.
"""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic.fields import FieldInfo

from jax_agent_rl.config.base import Both, Condition, Either, Facts, Section, WhenKey, conditions


def keys(model: type[Section], prefix: str = "") -> Iterator[tuple[str, type[Section], str]]:
    """Path, section and name of every key that is no section itself."""
    for name, info in model.model_fields.items():
        section = section_of(info)
        if section is not None:
            yield from keys(section, f"{prefix}{name}.")
        else:
            yield prefix + name, model, name


def all_conditions(model: type[Section], path: str) -> tuple[Condition, ...]:
    """Return the conditions of a key and of the sections it stands in, from the top."""
    declared: tuple[Condition, ...] = ()
    for name in path.split("."):
        declared += conditions(model)[name]
        model = section_of(model.model_fields[name]) or model
    return declared


def section_of(info: FieldInfo) -> type[Section] | None:
    """The section that a field holds, if it holds one; a list of sections is a value."""
    if get_origin(info.annotation) is tuple:
        return None
    options = (info.annotation, *get_args(info.annotation))
    return next(
        (cls for cls in options if isinstance(cls, type) and issubclass(cls, Section)), None
    )


def replaced(config: Section, path: str, value: Any) -> Section:
    """The tree with one key set, unchecked; sections that are null come into being."""
    name, _, inner_path = path.partition(".")
    if inner_path:
        inner = getattr(config, name)
        value = replaced(_made(config, name) if inner is None else inner, inner_path, value)
    return config.model_copy(update={name: value})


def _made(config: Section, name: str) -> Section:
    section = section_of(type(config).model_fields[name])
    assert section is not None
    required = {key: info for key, info in section.model_fields.items() if info.is_required()}
    return section(**{key: other_value(info) for key, info in required.items()})


def with_condition(
    condition: Condition, config: Section, facts: Facts, *, holding: bool
) -> Section | None:
    """The tree changed so that a condition holds, or does not; None if no configuration does it."""
    if condition.holds(config, facts) is holding:
        return config
    if isinstance(condition, (Both, Either)):
        changed: Section | None = config
        for part in condition.parts:
            changed = changed and with_condition(part, changed, facts, holding=holding)
        return changed
    if not isinstance(condition, WhenKey):
        return None
    for value in (
        None,
        False,
        0,
        *condition.values,
        *_values(_annotation(type(config), condition.path), []),
    ):
        changed = replaced(config, condition.path, value)
        if condition.holds(changed, facts) is holding:
            return changed
    raise AssertionError(f"{condition.words()}: no value of {condition.path} does it")


def other_value(info: FieldInfo) -> Any:
    """A value of a key's type that is not its default."""
    default = None if info.is_required() else info.get_default(call_default_factory=True)
    limits = [item for item in info.metadata if isinstance(item, (Ge, Gt, Le, Lt))]
    return next(value for value in _values(info.annotation, limits) if value != default)


def _annotation(model: type[Section], path: str) -> Any:
    *sections, name = path.split(".")
    for part in sections:
        model = section_of(model.model_fields[part]) or model
    return model.model_fields[name].annotation


def _values(annotation: Any, limits: list[Any]) -> Iterator[Any]:
    """Some values of a type, within limits."""
    origin = get_origin(annotation)
    if origin is Annotated:
        base, *constraints = get_args(annotation)
        nested = [
            item
            for constraint in constraints
            for item in getattr(constraint, "metadata", [constraint])
        ]
        yield from _values(base, [*limits, *nested])
    elif origin is Literal:
        yield from get_args(annotation)
    elif origin in (Union, types.UnionType):
        for option in get_args(annotation):
            yield from () if option is type(None) else _values(option, limits)
    elif origin is tuple:
        parts = [part for part in get_args(annotation) if part is not ...]
        several = ... in get_args(annotation)
        yield tuple(next(_values(part, [])) for part in parts)
        yield tuple(value for part in parts for value in _values(part, [])) if several else ()
    elif origin is dict:
        key, value = get_args(annotation)
        yield {next(_values(key, [])): next(_values(value, []))}
    elif isinstance(annotation, type) and issubclass(annotation, Section):
        required = {
            key: info for key, info in annotation.model_fields.items() if info.is_required()
        }
        yield annotation(**{key: other_value(info) for key, info in required.items()})
    elif annotation is bool:
        yield from (True, False)
    elif annotation in (str, Any):
        yield from ("something", "something else")
    elif annotation in (int, float):
        yield from (
            value
            for value in (*range(1, 40), 0.3, 0.7, 300, 4096, 99999)
            if _within(annotation(value), limits)
        )
    else:
        raise AssertionError(f"no values for {annotation}")


def _within(value: float, limits: list[Any]) -> bool:
    tests = {Ge: lambda limit: value >= limit.ge, Gt: lambda limit: value > limit.gt}
    tests |= {Le: lambda limit: value <= limit.le, Lt: lambda limit: value < limit.lt}
    return all(tests[type(limit)](limit) for limit in limits if type(limit) in tests)
