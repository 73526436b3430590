"""Typed reading of a Hugging Face ``config.json``: every wrong value is named, with what was expected."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from jax_agent_rl.errors import ModelError


def integer(config: Mapping[str, Any], name: str, default: int | None = None) -> int:
    """A positive integer field; where it is absent or null, the default."""
    value = config.get(name)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise bad_field(config, name, "a positive integer")
    return value


def number(config: Mapping[str, Any], name: str, default: float | None = None) -> float:
    """A positive number field; where it is absent or null, the default."""
    value = config.get(name)
    value = default if value is None else value
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
        raise bad_field(config, name, "a positive number")
    return float(value)


def token_ids(config: Mapping[str, Any], name: str, default: tuple[int, ...]) -> tuple[int, ...]:
    """A token id or a list of them; none where it is null."""
    value = config.get(name, default)
    ids = tuple(value) if isinstance(value, list | tuple) else () if value is None else (value,)
    if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
        raise bad_field(config, name, "a token id, a list of them, or null")
    return ids


def section(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """A field that holds fields; empty where it is absent or null."""
    value = config.get(name) or {}
    if not isinstance(value, Mapping):
        raise bad_field(config, name, "an object or null")
    return value


def refuse(config: Mapping[str, Any], **expected: Any) -> None:
    """Fields whose other values this package does not honour; absent and null ones pass.

    Raises:
        ModelError: one has another value.
    """
    for name, value in expected.items():
        if config.get(name) not in (None, value):
            raise ModelError(f"config.json: {name}={config[name]!r} is not supported, only {value!r}")


def bad_field(config: Mapping[str, Any], name: str, expected: str) -> ModelError:
    """The error for a field that is missing or of a wrong kind."""
    found = f"{name}={config[name]!r}" if name in config else f"{name} is missing"
    return ModelError(f"config.json: {found}, expected {expected}; correct the file or download the model again")
