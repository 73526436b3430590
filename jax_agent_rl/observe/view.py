"""``jax-agent-rl view RUN``: trajectories in the terminal."""

from __future__ import annotations

import json
from pathlib import Path

from rich.console import Console

from jax_agent_rl.chat.codec import ChatCodec
from jax_agent_rl.errors import ConfigError, DataError
from jax_agent_rl.observe.metrics import RunFolder, read_records
from jax_agent_rl.observe.trajectories import LEGEND, render
from jax_agent_rl.observe.trees import groups_of, render_group

SORTS = ("time", "best", "worst")


def view_run(
    run: Path, *, split: str | None, step: int | None, sort: str, limit: int, whole_prompt: bool, trees: bool = False
) -> None:
    """Prints up to ``limit`` trajectories of a run folder, or of its groups as trees.

    Raises:
        DataError: not a run folder, or nothing in it matches.
        ConfigError: an unknown ``sort``.
    """
    if sort not in SORTS:
        raise ConfigError(f"--sort {sort!r}: choose one of {', '.join(SORTS)}")
    if not (run / "trajectories.jsonl").is_file():
        raise DataError(f"{run} holds no trajectories.jsonl; give a run folder such as runs/quickstart")
    folder = RunFolder(run)
    codec = ChatCodec.from_pretrained(json.loads(folder.config.read_text())["model"]["path"])
    records = [
        r
        for r in read_records(folder.trajectories)
        if (split is None or r["split"] == split) and (step is None or r["step"] == step)
    ]
    if not records:
        raise DataError(f"no trajectory of {run} matches split={split}, step={step}")
    console = Console()
    if trees:
        for group in groups_of(records)[-limit:]:
            console.print(render_group(group, lambda ids: codec.decode(ids)))
        return
    if sort != "time":
        records.sort(key=lambda r: r["reward"], reverse=sort == "worst")
    console.print(LEGEND, highlight=False)
    for record in records[-limit:]:
        console.print(
            render(record, lambda ids: codec.decode(ids, skip_special_tokens=False), whole_prompt=whole_prompt)
        )
