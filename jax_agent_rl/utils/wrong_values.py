"""What is wrong with a value that a schema refused: what it must be, and so what to write.

Whoever catches a ``ValidationError`` describes it with this module: configurations, requests to
every server, answers of tool servers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from pydantic import ValidationError

from jax_agent_rl.utils.text import counted

_SENTENCES: Mapping[str, str | Callable[[Mapping[str, Any]], str]] = {
    "missing": "required, not set",
    "missing_argument": "required, not set",
    "extra_forbidden": "unknown key",
    "unexpected_keyword_argument": "unknown key",
    "int_type": "must be a whole number",
    "int_parsing": "must be a whole number",
    "int_parsing_size": "must be a whole number of fewer digits",
    "int_from_float": "must be a whole number",
    "float_type": "must be a number",
    "float_parsing": "must be a number",
    "decimal_type": "must be a number",
    "decimal_parsing": "must be a number",
    "finite_number": "must be a finite number",
    "bool_type": "must be true or false",
    "bool_parsing": "must be true or false",
    "string_type": "must be text",
    "string_unicode": "must be text in UTF-8",
    "string_sub_type": "must be text",
    "bytes_type": "must be bytes",
    "none_required": "must be null",
    "list_type": "must be a list",
    "tuple_type": "must be a list",
    "set_type": "must be a list",
    "frozen_set_type": "must be a list",
    "iterable_type": "must be a list",
    "dict_type": "must be a mapping of names to values",
    "mapping_type": "must be a mapping of names to values",
    "model_type": "must be a mapping of names to values",
    "model_attributes_type": "must be a mapping of names to values",
    "dataclass_type": "must be a mapping of names to values",
    "json_invalid": lambda about: f"must be JSON ({about.get('error', 'it is cut off')})",
    "json_type": "must be JSON text",
    "greater_than": lambda about: f"must be more than {_number(about['gt'])}",
    "greater_than_equal": lambda about: f"must be at least {_number(about['ge'])}",
    "less_than": lambda about: f"must be less than {_number(about['lt'])}",
    "less_than_equal": lambda about: f"must be at most {_number(about['le'])}",
    "multiple_of": lambda about: f"must be a multiple of {about['multiple_of']}",
    "literal_error": lambda about: f"must be {about['expected']}",
    "enum": lambda about: f"must be {about['expected']}",
    "union_tag_invalid": lambda about: (
        f"{about['discriminator']} must be one of {about['expected_tags']}"
    ),
    "union_tag_not_found": lambda about: f"{about['discriminator']} is required, not set",
    "too_short": lambda about: f"must have at least {counted(about['min_length'], 'item')}",
    "too_long": lambda about: f"must have at most {counted(about['max_length'], 'item')}",
    "string_too_short": lambda about: (
        f"must have at least {counted(about['min_length'], 'character')}"
    ),
    "string_too_long": lambda about: (
        f"must have at most {counted(about['max_length'], 'character')}"
    ),
    "string_pattern_mismatch": lambda about: (
        f"must match the regular expression {about['pattern']}"
    ),
    "recursion_loop": "must not contain itself",
}

OUR_CHECKS = frozenset({"value_error", "assertion_error"})
"""Kinds of problems that a validator of ours has found, and worded."""


def describe_value(problem: Mapping[str, Any]) -> str:
    """Return what a value must be.

    A validator of ours says it in its message. For pydantic's own checks this module has a
    sentence by the kind of problem.

    Args:
        problem: one item of ``ValidationError.errors()``.
    """
    kind = problem["type"]
    context = problem.get("ctx", {})
    if kind in OUR_CHECKS:
        return re.sub(r"^(Value error|Assertion failed), ", "", problem["msg"])
    sentence = _SENTENCES.get(kind)
    if sentence is None:  # a kind that no schema here has yet
        return re.sub(r"^(Input|Value|Object) should ", "must ", problem["msg"])
    if isinstance(sentence, str):
        return sentence
    return sentence(context)


def place_of(problem: Mapping[str, Any]) -> str:
    """Return the path of the value, such as ``tools.0.name``; empty for a problem of no field."""
    return ".".join(map(str, problem["loc"]))[:200]


def describe_first(error: ValidationError) -> str:
    """Return the first problem of an answer with its field and value, bounded."""
    problem = error.errors(include_url=False)[0]
    field = place_of(problem) or "the answer"
    return f"{field}: {describe_value(problem)}, got {problem['input']!r:.200}"


def describe_problems(error: ValidationError, *, limit: int = 5) -> str:
    """Return the first problems of a request's body, each with its field.

    Values are left out, since the client knows them.
    """
    lines = []
    for problem in error.errors(include_url=False)[:limit]:
        field = place_of(problem)
        description = describe_value(problem)
        lines.append(f"{field}: {description}" if field else description)
    return "; ".join(lines)


def _number(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    return str(value)
