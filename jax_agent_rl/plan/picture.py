"""Memory per chip by kind, as stacked bars: one for each program."""

from __future__ import annotations

from pathlib import Path

from matplotlib.figure import Figure

from jax_agent_rl.plan.chips import GIB
from jax_agent_rl.plan.plan import Plan


def draw(plan: Plan, file: Path) -> None:
    """Writes a picture; its format is that of the file's name.

    Raises:
        OSError, ValueError: it cannot be written, or no format is called so.
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
