"""Profiles: what the predicted time of a program is made of, by place in the code."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

from rich.console import Console
from rich.table import Table

from jax_agent_rl.config import Config
from jax_agent_rl.deploy.plan.compiled import Compiled, compile_program, format_seconds, ideal_seconds
from jax_agent_rl.deploy.plan.programs import inventory
from jax_agent_rl.deploy.plan.topology import Chip, Slice, place_devices
from jax_agent_rl.errors import ConfigError
from jax_agent_rl.models.config import DecoderConfig

ROWS = 25
"""Places that are shown; the others count together."""

Profile = Literal["decode", "prefill", "learner"]


def compile_profiled(
    config: Config,
    model: DecoderConfig,
    slice: Slice,
    *,
    devices: Sequence[Any],
    profile: Profile,
    on_progress: Callable[[str], None] = lambda text: None,
) -> list[Compiled]:
    """Compile the programs of a run that are of one kind, and no others.

    Args:
        config: configuration of the run.
        model: its architecture.
        slice: the slice to compile for.
        devices: devices of the slice.
        profile: the kind.
        on_progress: takes a line of progress.

    Raises:
        ConfigError: the configuration does not go with the slice, or the run has no such program.
    """
    on_progress("tracing")
    only = "learner" if profile == "learner" else "rollout"
    programs = inventory(config, model, place_devices(config, devices), only=only).programs
    chosen = [one for one in programs if profile in (one.phase, one.name.split()[0])]
    if not chosen:
        names = ", ".join(one.name for one in programs)
        raise ConfigError(f"--profile {profile}: this run has no such program on the slice, only {names}")
    compiled = []
    for one in chosen:
        on_progress(f"compiling {one.name}")
        compiled.append(compile_program(one, slice.chip))
    return compiled


def show_profiles(compiled: Sequence[Compiled], chip: Chip, console: Console) -> None:
    """Print the profile of each program."""
    for one in compiled:
        name, steps, ideal = one.program.name, one.program.loops, ideal_seconds(one, chip)
        if one.prediction is None:
            console.print(f"{name} does not fit: {one.problem}", "", highlight=False, soft_wrap=True, markup=False)
            continue
        predicted, least = one.prediction.seconds, format_seconds(ideal.total / steps)
        console.print(
            f"[bold]{name}[/bold]: {format_seconds(predicted / steps)} a {'step' if steps > 1 else 'call'}, "
            f"{ideal.total / predicted:.0%} of the ideal ({least}, bound by {ideal.bound})",
            highlight=False,
            soft_wrap=True,
        )
        console.print(profile_table(one), "")


def profile_table(one: Compiled) -> Table:
    """Return a table of the parts of a program that the compiler took, longest first."""
    assert one.prediction is not None
    whole, steps = one.prediction.seconds, one.program.loops
    made = Table(box=None, padding=(0, 1, 0, 0))
    for heading in ("time", "share", "runs"):
        made.add_column(heading, justify="right", no_wrap=True)
    for heading in ("what", "operation", "where, and from where"):
        made.add_column(heading, overflow="fold")
    shown, others = one.prediction.parts[:ROWS], one.prediction.parts[ROWS:]
    for part in shown:
        numbers = format_seconds(part.seconds / steps), f"{part.seconds / whole:.1%}", f"{part.runs / steps:.4g}"
        made.add_row(*numbers, part.what, part.operation, "  ".join(part.source[:2]) or "(the compiler)")
    if rest := sum(part.seconds for part in others):
        made.add_row(format_seconds(rest / steps), f"{rest / whole:.1%}", "", f"{len(others)} others")
    return made


def as_json(compiled: Sequence[Compiled], chip: Chip) -> dict[str, Any]:
    """Return the profiles in seconds of a call, by program; and whether the compiler took all of them."""
    return {
        "fits": all(one.memory is not None for one in compiled),
        "profiles": {
            one.program.name: {
                "ideal": ideal_seconds(one, chip).total,
                "predicted": one.prediction.seconds,
                "steps": one.program.loops,
                "parts": [vars(part) for part in one.prediction.parts],
            }
            for one in compiled
            if one.prediction is not None
        },
    }
