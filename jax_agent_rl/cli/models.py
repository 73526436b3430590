"""``jax-agent-rl fetch-model``, ``prepare``, ``inspect-rows``, ``convert``, ``export``."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Annotated, Literal

import typer

from jax_agent_rl.cli.options import Panel, command


def register(app: typer.Typer) -> None:
    """Add the commands."""
    command(app, Panel.MODELS, "fetch-model", name="fetch-model")(fetch_model)
    command(
        app,
        Panel.MODELS,
        "prepare shop",
        "prepare shop --calls json --out data/shop_json",
        "prepare calculator --out data/mine --seed 1",
    )(prepare)
    command(
        app,
        Panel.MODELS,
        "inspect-rows arithmetic.py@arithmetic highest=5 --out data/arithmetic.jsonl",
        name="inspect-rows",
    )(inspect_rows)
    command(app, Panel.MODELS, "convert model.gguf ~/models/mine --dtype bfloat16")(convert)
    command(
        app,
        Panel.MODELS,
        "export runs/quickstart ~/models/mine --dtype bfloat16",
        "export runs/quickstart ~/models/mine --step 4",
        "export runs/lora ~/models/mine-adapter --adapter",
    )(export)


Dtype = Annotated[
    Literal["float32", "bfloat16", "float16"], typer.Option(help="Precision of the weights.")
]


def fetch_model() -> None:
    """Download the quickstart's model, SmolLM2-135M-Instruct, into the cache folder."""
    from jax_agent_rl.deploy.quickstart.model import fetch_quickstart_model

    print(fetch_quickstart_model())


def prepare(
    task: Annotated[str, typer.Argument(help="shop (the quickstart's task) or calculator.")],
    out: Annotated[Path | None, typer.Option(help="Folder to write to; default data/TASK.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the questions.")] = 0,
    agent: Annotated[str, typer.Option(help="The rows' agent_name.")] = "tool_agent",
    calls: Annotated[
        Literal["python", "json"],
        typer.Option(
            help="With shop: how its prompts write calls, for agent.tool_format pythonic or hermes."
        ),
    ] = "python",
) -> None:
    """Write the training and held-out rows of a built-in task."""
    from jax_agent_rl.data.tasks import prepare_calculator, prepare_shop
    from jax_agent_rl.errors import ConfigError
    from jax_agent_rl.utils.near_names import did_you_mean

    tasks = {"shop": functools.partial(prepare_shop, calls=calls), "calculator": prepare_calculator}
    if task not in tasks:
        raise ConfigError(
            f"no built-in task is called {task!r}; {did_you_mean(task, tasks)}there are"
            f" {sorted(tasks)}"
        )
    if task != "shop" and calls != "python":
        raise ConfigError(
            f"--calls {calls} is of the task shop; the calculator's prompts write calls as JSON;"
            " remove it"
        )
    for file in tasks[task](out or Path("data") / task, seed=seed, agent_name=agent):
        print(file)


def inspect_rows(
    task: Annotated[str, typer.Argument(help="FILE.py@NAME, or the name of an installed task.")],
    out: Annotated[Path, typer.Option(help="File of rows to write, ending in .jsonl.")],
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE", help="Arguments of the task, in YAML."),
    ] = None,
) -> None:
    """Write the samples of a task of Inspect as rows, for eval, rollout and train."""
    from jax_agent_rl.agents.inspect_tasks import task_arguments, task_rows
    from jax_agent_rl.errors import ConfigError
    from jax_agent_rl.utils.files import make_folder, replacing
    from jax_agent_rl.utils.surrogates import json_line
    from jax_agent_rl.utils.text import counted

    if out.suffix != ".jsonl":
        raise ConfigError(f"--out {out}: rows are written as JSON Lines; name a file FILE.jsonl")
    make_folder(out.parent)
    count = 0
    with replacing(out) as stream:
        for row in task_rows(task, task_arguments(arguments or ())):
            stream.write(json_line(row).encode())
            count += 1
    print(f"{out}: {counted(count, 'row')}")


def convert(
    source: Annotated[Path, typer.Argument(help="A GGUF file or a Hugging Face folder.")],
    target: Annotated[Path, typer.Argument(help="Folder to write.")],
    dtype: Dtype = "float32",
) -> None:
    """Write a model as a Hugging Face folder (safetensors) in a chosen precision."""
    from jax_agent_rl.models.convert import convert as run

    print(run(source, target, dtype=dtype))


def export(
    run: Annotated[Path, typer.Argument(help="A run folder with a checkpoint.")],
    out: Annotated[Path, typer.Argument(help="Folder to write the Hugging Face model to.")],
    dtype: Dtype = "float32",
    adapter: Annotated[
        bool, typer.Option("--adapter", help="Write only the LoRA adapters, in PEFT's format.")
    ] = False,
    step: Annotated[
        int | None, typer.Option(help="Step of the checkpoint; default the newest.")
    ] = None,
    ema: Annotated[
        bool, typer.Option("--ema", help="The moving average of the weights (learner.ema_decay).")
    ] = False,
) -> None:
    """Write a run's checkpoint as a Hugging Face model folder; LoRA adapters are merged in."""
    from jax_agent_rl.deploy.preflight import check_checkpoint

    check_checkpoint(run, step, out=out)
    from jax_agent_rl.runtime.policy import export_run

    print(export_run(run, out, step=step, dtype=dtype, adapter=adapter, ema=ema))
