"""``jax-agent-rl rollout``: command line and output."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from jax_agent_rl.cli.options import (
    JsonOption,
    ModelOption,
    OptionalConfig,
    Overrides,
    Panel,
    RunOption,
    StepOption,
    command,
    config_or_key,
    run_to_end,
)
from jax_agent_rl.observe.progress import print_line


def register(app: typer.Typer) -> None:
    """Add the command."""
    command(
        app,
        Panel.TRAIN,
        "rollout configs/quickstart.yaml --out rollouts.parquet",
        "rollout --run runs/quickstart --out data/distilled --temperature 0.7 -n 4",
        "rollout --model ~/models/Qwen3-0.6B --data gsm8k.jsonl --limit 100 --out rollouts.jsonl",
    )(rollout)


def rollout(
    out: Annotated[Path, typer.Option(help="FILE.parquet, FILE.jsonl, or a FOLDER that datasets.load_dataset reads.")],
    config: OptionalConfig = None,
    overrides: Overrides = None,
    model: ModelOption = None,
    run: RunOption = None,
    step: StepOption = None,
    data: Annotated[Path | None, typer.Option(help="Rows (.jsonl, .parquet) in place of data.train.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first so many rows.")] = None,
    n: Annotated[
        int | None, typer.Option("-n", "--samples", min=1, help="Trajectories per row; default rollout.group_size.")
    ] = None,
    temperature: Annotated[float | None, typer.Option(help="Default rollout.temperature.")] = None,
    json: JsonOption = False,
) -> None:
    """Collect trajectories without training: exact token ids, masks, log-probs, rewards, messages.

    Agents, tools, rewards and sampling are those of training; filters are not applied. A call that was interrupted goes
    on where it stopped when it is repeated. Every trajectory that was started is in the file, or counted by the reason
    it was lost in the summary beside it.
    """
    import json as json_module

    from rich.console import Console

    from jax_agent_rl.evaluate.collection.run import CollectionRequest, collect
    from jax_agent_rl.runtime import use_compilation_cache
    from jax_agent_rl.runtime.policy import PolicyChoice, choose, open_policy

    file, keys = config_or_key(config, overrides)
    choice = PolicyChoice(config=file, overrides=keys, model=model, run=run, step=step, data=data)
    request = CollectionRequest(group_size=n, temperature=temperature, data=data, limit=limit)
    request.file(choose(choice))  # or a message, before a checkpoint is written out
    use_compilation_cache()
    console = Console()
    with open_policy(choice) as subject:
        summary = run_to_end(collect(subject, request, out=out, console=console))
    lost = ", ".join(f"{reason} {count}" for reason, count in sorted(summary["dropped"].items())) or "none"
    print_line(
        console,
        f"{summary['started']} trajectories started = {summary['kept']} in {out} + lost ({lost}), "
        f"of {summary['prompts']} prompts",
    )
    if json:
        print(json_module.dumps(summary))
