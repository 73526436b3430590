"""Checks of values from outside (JSON, user code) that no type checker has seen.

Each check raises a ``ValueError`` that names the field, its value and the expected kind. Numbers
may be numpy's.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from numbers import Complex, Integral, Real
from typing import Any, SupportsFloat, TypeGuard, cast


def check_int(name: str, value: Any, *, least: int | None = None, below: int | None = None) -> None:
    """Require a whole number >= ``least`` and < ``below``."""
    if not isinstance(value, Integral):
        raise ValueError(f"{name}={value!r}: must be a whole number")
    number = int(value)
    if least is not None and number < least:
        raise ValueError(f"{name}={value}: must be >= {least}")
    if below is not None and number >= below:
        raise ValueError(f"{name}={value}: must be < {below}")


def check_finite(name: str, value: Any) -> None:
    """Require a number that a float can hold, neither infinite nor NaN."""
    try:
        is_finite = isinstance(value, Real) and math.isfinite(value)
    except OverflowError:  # an integer no float holds
        is_finite = False
    if not is_finite:
        raise ValueError(f"{name}={value!r}: must be a finite number")


FLOAT32_MAX = (2 - 2.0**-23) * 2.0**127
"""The largest number that float32 holds."""


def as_float(value: object, what: str) -> float:
    """Return a finite number as a float.

    A bool is 1.0 or 0.0, and numbers of NumPy and PyTorch count.

    Args:
        value: of any type, from user code, a file or a server.
        what: names it in the message.

    Raises:
        ValueError: it is not a single real number, or not finite.
    """
    number = _real(value)
    if number is None or not math.isfinite(number):
        raise ValueError(f"{what} must be a finite number, got {brief_repr(value)}")
    return number


def as_score(value: object, what: str) -> float:
    """Return a score, a reward or a part of one as a float.

    float32 holds it as well, in which the learner computes. Whatever earns a trajectory something
    comes through here, wherever it is from: reward functions and their servers, tools and tool
    servers, environments, simulated users, tables of trajectories.

    Args:
        value: of any type, from user code, a file or a server.
        what: names it in the message.

    Raises:
        ValueError: it is not a single real number, not finite, or larger than float32 can hold.
    """
    number = as_float(value, what)
    if abs(number) > FLOAT32_MAX:
        raise ValueError(
            f"{what} must be a number that float32 holds, at most 3.4e38, got {brief_repr(value)};"
            " scale it"
        )
    return number


def looks_like_number(value: object) -> bool:
    """Return whether a value is meant as a number, not as text or a collection.

    The number may be infinite, NaN, or too large for a float.
    """
    if isinstance(value, str | bytes):
        return False
    if getattr(value, "shape", ()) != ():  # an array
        return False
    return isinstance(value, SupportsFloat | Complex)


def _real(value: object) -> float | None:
    """Return a real number as a float, perhaps NaN or infinite.

    Returns:
        None if the value is not a real number, or beyond all floats.
    """
    if not looks_like_number(value):
        return None
    if isinstance(value, Complex) and not isinstance(value, Real):
        return None
    try:
        return float(cast(SupportsFloat, value))
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return None


def brief_repr(value: object) -> str:
    """Return a value's representation for a message, at most 200 characters."""
    try:
        return repr(value)[:200]
    except ValueError:  # an integer of more digits than Python writes
        return f"an {type(value).__name__} of thousands of digits"


def is_number(value: object) -> TypeGuard[float]:
    """Return whether a value is a finite real number, NumPy's included, and not a bool."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return False
    return -math.inf < cast(float, value) < math.inf


def check_str(name: str, value: Any) -> None:
    """Require a string."""
    if not isinstance(value, str):
        raise ValueError(f"{name}={value!r}: must be a string")


def check_bool(name: str, value: Any) -> None:
    """Require True or False: any text, even "false", would count as true."""
    if not isinstance(value, bool):
        raise ValueError(f"{name}={value!r}: must be True or False")


def check_collection(name: str, value: Any, of: str) -> None:
    """Require a collection, and not a string, which would count as a collection of characters."""
    if isinstance(value, str) or not isinstance(value, Collection):
        raise ValueError(f"{name}={value!r}: must be a tuple of {of}")


def check_ids(name: str, ids: tuple[Any, ...]) -> None:
    """Require whole numbers; checked once per type, since a context has many thousands."""
    for id_type in set(map(type, ids)):
        if not issubclass(id_type, Integral):
            wrong_id = next(token_id for token_id in ids if type(token_id) is id_type)
            raise ValueError(f"{name} holds {wrong_id!r}: ids must be whole numbers")
