"""Checks of values that come from outside (JSON, a user's arithmetic), which no type checker has seen.

Each raises a ``ValueError`` that names the field, its value and what to give instead. Whole and real numbers may be
numpy's, too.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from numbers import Integral, Real
from typing import Any


def check_whole(name: str, value: Any, *, least: int | None = None, below: int | None = None) -> None:
    """A whole number of at least ``least``, and less than ``below``."""
    if not isinstance(value, Integral):
        raise ValueError(f"{name}={value!r}: must be a whole number")
    number = int(value)
    if least is not None and number < least:
        raise ValueError(f"{name}={value}: must be >= {least}")
    if below is not None and number >= below:
        raise ValueError(f"{name}={value}: must be < {below}")


def check_finite(name: str, value: Any) -> None:
    """A number that a float holds, neither infinite nor NaN."""
    try:
        finite = isinstance(value, Real) and math.isfinite(value)
    except OverflowError:  # an integer no float holds
        finite = False
    if not finite:
        raise ValueError(f"{name}={value!r}: must be a finite number")


def check_text(name: str, value: Any) -> None:
    """A string."""
    if not isinstance(value, str):
        raise ValueError(f"{name}={value!r}: must be a string")


def check_flag(name: str, value: Any) -> None:
    """True or False: a text, even "false", would be taken for true."""
    if not isinstance(value, bool):
        raise ValueError(f"{name}={value!r}: must be True or False")


def check_several(name: str, value: Any, of: str) -> None:
    """A collection, and not one string, which would be taken for one of single characters."""
    if isinstance(value, str) or not isinstance(value, Collection):
        raise ValueError(f"{name}={value!r}: must be a tuple of {of}")


def check_ids(name: str, ids: tuple[Any, ...]) -> None:
    """Whole numbers; looked at type by type, since a context has many thousands."""
    for kind in set(map(type, ids)):
        if not issubclass(kind, Integral):
            wrong = next(i for i in ids if type(i) is kind)
            raise ValueError(f"{name} holds {wrong!r}: ids must be whole numbers")
