"""Types of the launchers' command-line options, which refuse a wrong value with the required form, and their output."""

from __future__ import annotations

import argparse
import contextlib
import math
import re
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


class TimedPrinter:
    """Prints the launcher's own lines with the seconds since it began; lines of processes as they are."""

    def __init__(self) -> None:
        self._begin = time.monotonic()

    def __call__(self, line: str) -> None:
        own = "" if line.startswith("[") else f"[{time.monotonic() - self._begin:3.0f}s] "
        with contextlib.suppress(BrokenPipeError):  # nobody reads it: still end in order
            print(own + line, flush=True)


def positive(text: str) -> int:
    """Parse a positive whole number."""
    return _checked(text, int, lambda value: value >= 1, "a whole number, 1 or more")


def count(text: str) -> int:
    """Parse a whole number, 0 or more."""
    return _checked(text, int, lambda value: value >= 0, "a whole number, 0 or more")


def port(text: str) -> int:
    """Parse a TCP port."""
    return _checked(text, int, lambda value: 0 < value < 65536, "a port, 1 to 65535")


def seconds(text: str) -> float:
    """Parse a positive duration."""
    return _checked(text, float, lambda value: 0 < value < math.inf, "seconds, more than 0")


def variable(text: str) -> tuple[str, str | None]:
    """Parse an environment variable: ``NAME=VALUE``, or ``NAME`` for its value here (None)."""
    name, given, value = text.partition("=")
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
        raise argparse.ArgumentTypeError(f"{text!r} is no environment variable: write NAME, or NAME=VALUE")
    return name, value if given else None


def _checked(text: str, kind: Callable[[str], T], holds: Callable[[T], object], wanted: str) -> T:
    try:
        value = kind(text)
    except ValueError:
        value = None
    if value is None or not holds(value):
        raise argparse.ArgumentTypeError(f"{text!r} is not {wanted}")
    return value
