"""Memory per chip by kind, as stacked bars: one for each program."""

from __future__ import annotations

import os
from pathlib import Path

from matplotlib.figure import Figure

from jax_agent_rl.errors import ConfigError
from jax_agent_rl.plan.chips import GIB
from jax_agent_rl.plan.plan import Plan


def check_file(file: Path) -> None:
    """Before anything is compiled for a picture that could not be written.

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


def draw(plan: Plan, file: Path) -> None:
    """Writes a picture; its format is that of the file's name.

    Args:
        file: as :func:`check_file` lets it pass.

    Raises:
        OSError: it cannot be written.
    """
    names = list(dict.fromkeys(name for load in plan.loads for name in load.parts))
    figure = Figure(figsize=(10, 1.5 + 0.45 * len(plan.loads)), layout="constrained")
    axes = figure.subplots()
    programs = [load.program.name for load in plan.loads]
    left = [0.0] * len(programs)
    for name in names:
        sizes = [load.parts.get(name, 0) / GIB for load in plan.loads]
        axes.barh(programs, sizes, left=left, label=name)
        left = [begin + size for begin, size in zip(left, sizes, strict=True)]
    axes.axvline(plan.slice.chip.hbm_bytes / GIB, color="black", linestyle="--", label="capacity")
    axes.invert_yaxis()
    axes.set_xlabel("GiB of the fullest chip")
    axes.set_title(f"{plan.slice.name}: {'fits' if plan.fits else 'does not fit'}")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.15), ncols=4, fontsize="small")
    figure.savefig(file)
