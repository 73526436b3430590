"""``jax-agent-rl view RUN``: trajectories in the terminal."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from jax_agent_rl.chat.codec import ChatCodec
from jax_agent_rl.errors import ConfigError, DataError
from jax_agent_rl.observe.filters import TrajectoryFilter
from jax_agent_rl.observe.metrics import RunFolder, read_records
from jax_agent_rl.observe.trajectories import COLOURS, LEGENDS, render
from jax_agent_rl.observe.trees import groups_of, render_group

SORTS = ("time", "best", "worst")


def view_run(
    run: Path,
    wanted: TrajectoryFilter,
    *,
    sort: str,
    limit: int,
    whole_prompt: bool,
    trees: bool = False,
    colour: str = "mask",
) -> None:
    """Prints up to ``limit`` trajectories of a run folder, or of its groups as trees.

    Args:
        wanted: which trajectories.
        colour: what colours show, see :data:`jax_agent_rl.observe.trajectories.COLOURS`.

    Raises:
        DataError: not a run folder, or nothing in it matches.
        ConfigError: an unknown ``sort`` or ``colour``.
    """
    if colour not in COLOURS:
        raise ConfigError(f"--color {colour!r}: choose one of {', '.join(COLOURS)}")
    if sort not in SORTS:
        raise ConfigError(f"--sort {sort!r}: choose one of {', '.join(SORTS)}")
    if not (run / "trajectories.jsonl").is_file():
        raise DataError(f"{run} holds no trajectories.jsonl; give a run folder such as runs/quickstart")
    folder = RunFolder(run)
    codec = ChatCodec.from_pretrained(json.loads(folder.config.read_text())["model"]["path"])
    records = [record for record in read_records(folder.trajectories) if wanted(record)]
    if not records:
        raise DataError(f"no trajectory of {run} matches {wanted.describe()}")
    console = Console()
    if trees:
        for group in groups_of(records)[-limit:]:
            console.print(render_group(group, lambda ids: codec.decode(ids)))
        return
    if sort != "time":
        records.sort(key=lambda r: r["reward"], reverse=sort == "worst")
    console.print(LEGENDS[colour], highlight=False)

    def decode(ids: Sequence[int]) -> str:
        return codec.decode(ids, skip_special_tokens=False)

    for record in records[-limit:]:
        console.print(render(record, decode, whole_prompt=whole_prompt, colour=colour))
