"""Arguments of the launchers: their parser, and types of options; the standard library only."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

ROOT = Path(__file__).parents[3]
T = TypeVar("T")


def script_parser(script: str) -> argparse.ArgumentParser:
    """Return a parser whose ``--help`` shows the comment at the top of a script of ``launch``."""
    lines = (ROOT / "launch" / script).read_text(encoding="utf-8").splitlines()[1:]
    comment = itertools.takewhile(lambda line: line.startswith("#"), lines)
    description = "\n".join(line.removeprefix("#").removeprefix(" ") for line in comment)
    style = argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(prog=script, description=description, formatter_class=style)


def _option_type(
    parse: Callable[[str], T], is_valid: Callable[[T], bool], expected: str
) -> Callable[[str], T]:
    """Return a type of options that refuses what cannot be parsed, or is not valid.

    Args:
        parse: raises ValueError for what cannot be parsed.
        expected: valid values in words, for the message.
    """

    def parse_valid(text: str) -> T:
        with contextlib.suppress(ValueError):
            value = parse(text)
            if is_valid(value):
                return value
        raise argparse.ArgumentTypeError(f"{text!r} is not {expected}")

    return parse_valid


positive = _option_type(int, lambda value: value >= 1, "a whole number, 1 or more")
count = _option_type(int, lambda value: value >= 0, "a whole number, 0 or more")
port = _option_type(int, lambda value: 0 < value < 65536, "a port, 1 to 65535")
seconds = _option_type(float, lambda value: 0 < value < math.inf, "seconds, more than 0")


def comma_separated(text: str) -> list[str]:
    """Parse names with commas between them."""
    return [part for part in text.split(",") if part]


def variable(text: str) -> tuple[str, str | None]:
    """Parse an environment variable: ``NAME=VALUE``, or ``NAME`` for its value here (None)."""
    name, separator, value = text.partition("=")
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not an environment variable: write NAME, or NAME=VALUE"
        )
    if not separator:
        return name, None
    return name, value
