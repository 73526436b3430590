"""``jax-agent-rl view RUN``: trajectories in the terminal."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import get_args

from rich.console import Console

from jax_agent_rl.errors import ConfigError, DataError
from jax_agent_rl.observe.report.run_data import decoder, read_run
from jax_agent_rl.observe.selection import Colour, Sort, TrajectoryFilter, tool_errors
from jax_agent_rl.observe.trajectories import COLOURS, LEGENDS, render, visible
from jax_agent_rl.observe.trees import groups_of, render_group


def view_run(
    run: Path,
    wanted: TrajectoryFilter,
    *,
    sort: Sort,
    limit: int,
    whole_prompt: bool,
    trees: bool = False,
    colour: Colour = "mask",
) -> None:
    """Print up to ``limit`` trajectories of a run folder, or of its groups as trees.

    Unreadable parts of the folder are reported on stderr; without the run's tokenizer, ids are shown.

    Args:
        run: the run folder.
        wanted: which trajectories.
        sort: their order.
        limit: most trajectories or groups, at least 1.
        whole_prompt: show prompts whole.
        trees: show groups as trees of turns.
        colour: what colours show, see :data:`jax_agent_rl.observe.trajectories.COLOURS`.

    Raises:
        DataError: not a run folder, or nothing in it matches.
        ConfigError: an unknown ``sort`` or ``colour``, a tool error that the run does not have, or ``trees`` together
            with options that do not affect them.
    """
    if colour not in COLOURS:
        raise ConfigError(f"--color {colour!r}: choose one of {', '.join(COLOURS)}")
    if sort not in (sorts := get_args(Sort)):
        raise ConfigError(f"--sort {sort!r}: choose one of {', '.join(sorts)}")
    if trees:
        _require_defaults(sort, colour, whole_prompt)
    if not (run / "trajectories.jsonl").is_file():
        raise DataError(f"{run} holds no trajectories.jsonl; give a run folder such as runs/quickstart")
    data = read_run(run, most=0)
    notes = list(data.notes)
    decode = decoder(data.config, notes)
    for note in notes:
        print(f"note: {visible(note)}", file=sys.stderr)
    wanted.require_tool_error_among(visible(kind) for record in data.trajectories for kind in tool_errors(record))
    records = [record for record in data.trajectories if wanted(record, decode)]
    if not records:
        raise DataError(f"no trajectory of {run} matches {wanted.describe()}")
    console = Console()
    if trees:
        for group in groups_of(records)[-limit:]:
            console.print(render_group(group, decode))
        return
    if sort != "time":
        records.sort(key=lambda r: r["reward"], reverse=sort == "worst")
    console.print(LEGENDS[colour], highlight=False)
    for record in records[-limit:]:
        console.print(render(record, decode, whole_prompt=whole_prompt, colour=colour))


def _require_defaults(sort: Sort, colour: Colour, whole_prompt: bool) -> None:
    """Refuse options without effect on trees, which show the start of every turn, in the run's order and one colour."""
    changed = {f"--sort {sort}": sort != "time", f"--color {colour}": colour != "mask", "--whole-prompt": whole_prompt}
    if given := [option for option, is_changed in changed.items() if is_changed]:
        raise ConfigError(f"{', '.join(given)}: of no effect on --tree; leave out one or the other")
