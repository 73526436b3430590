"""``./launch/gpu.sh``: a run as a Ray job, on this machine or on a cluster.

::

    gpu.sh ──► cluster: RAY_ADDRESS, or one of this machine ──► job: ray_driver
      │ ◄────────────────────────── its output ─────────────────────┘   │
      │                                                                 ▼
      │                                        learner processes (actors) ──► engines (actors)
      └─ Ctrl-C ──► SIGTERM: the run saves and ends; once more ──► its processes are killed

Reading order: ``__main__`` (the launcher), ``ray_driver`` (what the job runs), ``ray_process`` (a
process on a node). This module is shared with ``tpu``, and imports the standard library only:
parsers, types of options, templates.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math
import re
import shlex
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from jax_agent_rl.errors import LaunchError

ROOT = Path(__file__).parents[3]
T = TypeVar("T")


class TimedPrinter:
    """Prints the launcher's lines with the seconds since it began; other lines as they are."""

    def __init__(self) -> None:
        self._start_time = time.monotonic()

    def __call__(self, line: str) -> None:
        if not line.startswith("["):  # a process's line begins with its name
            elapsed = time.monotonic() - self._start_time
            line = f"[{elapsed:3.0f}s] {line}"
        with contextlib.suppress(BrokenPipeError):  # nobody reads it: still end in order
            print(line, flush=True)


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
            f"{text!r} is no environment variable: write NAME, or NAME=VALUE"
        )
    if not separator:
        return name, None
    return name, value


def render_template(name: str, **values: Any) -> str:
    """Render a file of ``launch/templates``.

    Raises:
        LaunchError: jinja2 is not installed; the launchers need no packages otherwise.
    """
    try:
        import jinja2
    except ImportError:
        raise LaunchError(
            "--render needs jinja2: pip install jinja2, or PYTHON=.venv/bin/python of an"
            " environment that has it"
        ) from None
    loader = jinja2.FileSystemLoader(ROOT / "launch" / "templates")
    environment = jinja2.Environment(
        loader=loader, undefined=jinja2.StrictUndefined, keep_trailing_newline=True
    )
    environment.filters |= {"quoted": shlex.quote, "json": json.dumps}
    return environment.get_template(name).render(values)
