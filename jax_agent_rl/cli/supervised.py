"""``jax-agent-rl sft`` and ``dpo``: training on conversations and preferences."""

from __future__ import annotations

import asyncio
import functools
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from jax_agent_rl.cli.options import Panel, command, key_completer

if TYPE_CHECKING:
    from jax_agent_rl.config.supervised import SftConfig

ConfigFile = Annotated[Path, typer.Argument(help="YAML configuration, see configs/supervised.")]
Resume = Annotated[bool, typer.Option("--resume", help="Continue from the newest checkpoint of run_dir.")]


def _models() -> dict[str, type[SftConfig]]:
    from jax_agent_rl.config.supervised import DpoConfig

    return {"": DpoConfig}


Settings = Annotated[
    list[str] | None,
    typer.Argument(help="Changes: learner.learning_rate=1e-5", autocompletion=key_completer(_models)),
]


def register(app: typer.Typer) -> None:
    """Add both commands."""
    command(
        app,
        Panel.TRAIN,
        "sft configs/supervised/sft.yaml",
        "sft configs/supervised/sft.yaml data.train=rollouts.parquet data.best_of=1",
    )(sft)
    command(
        app,
        Panel.TRAIN,
        "dpo configs/supervised/dpo.yaml",
        "dpo configs/supervised/dpo.yaml model.path=runs/sft dpo.beta=0.3",
    )(dpo)


def sft(config: ConfigFile, overrides: Settings = None, resume: Resume = False) -> None:
    """Fine-tune on conversations, or on the best trajectories that `rollout` wrote (rejection sampling)."""
    from jax_agent_rl.config.loading import load_tree
    from jax_agent_rl.config.supervised import SftConfig

    _train(load_tree(SftConfig, config, overrides or []), resume)


def dpo(config: ConfigFile, overrides: Settings = None, resume: Resume = False) -> None:
    """Train on preferences, or on the best and the worst trajectory of each group that `rollout` wrote."""
    from jax_agent_rl.config.loading import load_tree
    from jax_agent_rl.config.supervised import DpoConfig

    _train(load_tree(DpoConfig, config, overrides or []), resume)


def _train(settings: SftConfig, resume: bool) -> None:
    from rich.console import Console

    from jax_agent_rl.runtime import use_compilation_cache
    from jax_agent_rl.supervised.train import train
    from jax_agent_rl.utils.interrupt import EXIT_CODE, exit_within

    use_compilation_cache()
    console = Console()
    exit_soon = functools.partial(exit_within, console.print)
    try:
        asyncio.run(train(settings, resume=resume, console=console, exit_within=exit_soon))
    except (asyncio.CancelledError, KeyboardInterrupt):
        raise typer.Exit(EXIT_CODE) from None
