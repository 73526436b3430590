"""Memory per chip by kind, as stacked bars: one for each program."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from jax_agent_rl.deploy.plan.chips import GIB
from jax_agent_rl.errors import ConfigError


def check_file(file: Path) -> None:
    """Check that an image can be written, before anything is compiled.

    Raises:
        ConfigError: its name ends in no format, or its folder is not there.
    """
    kinds = Figure().canvas.get_supported_filetypes()
    if (kind := file.suffix.removeprefix(".").lower()) not in kinds:
        raise ConfigError(f"--picture {file}: no picture is of the kind {kind!r}; end it with .png, .pdf or .svg")
    if not file.parent.is_dir():
        raise ConfigError(f"--picture {file}: there is no folder {file.parent}; make it, or name one that is there")
    if file.is_dir() or not os.access(file if file.exists() else file.parent, os.W_OK):
        raise ConfigError(f"--picture {file} cannot be written; name a file in a folder of yours")


def draw(made: Mapping[str, Any], file: Path) -> None:
    """Draw a plan; the file's suffix names the format.

    Args:
        made: a plan, see :func:`~jax_agent_rl.deploy.plan.report.as_json`.
        file: as :func:`check_file` lets it pass.

    Raises:
        OSError: it cannot be written.
    """
    memory = {program["name"]: program["memory"] for program in made["programs"]}
    names = list(dict.fromkeys(name for parts in memory.values() for name in parts))
    figure = Figure(figsize=(10, 1.5 + 0.45 * len(memory)), layout="constrained")
    axes = figure.subplots()
    left = [0.0] * len(memory)
    for name in names:
        sizes = [parts.get(name, 0) / GIB for parts in memory.values()]
        axes.barh(list(memory), sizes, left=left, label=name)
        left = [begin + size for begin, size in zip(left, sizes, strict=True)]
    axes.axvline(made["capacity"] / GIB, color="black", linestyle="--", label="capacity")
    axes.invert_yaxis()
    axes.set_xlabel("GiB of the fullest chip")
    axes.set_title(f"{made['topology']}: {'fits' if made['fits'] else 'does not fit'}")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.15), ncols=4, fontsize="small")
    figure.savefig(file)
