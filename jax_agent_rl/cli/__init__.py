"""The command line. Each command imports what it needs, so that ``--help`` is fast."""

from __future__ import annotations

import asyncio
import functools
import os
import platform
import shlex
import sys
from collections.abc import Callable, Coroutine
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from jax_agent_rl.cli.config import register as register_config
from jax_agent_rl.cli.evaluate import register as register_eval
from jax_agent_rl.cli.options import (
    HELP_OPTIONS,
    ConfigArgument,
    ConfigOption,
    GivenConfig,
    JsonOption,
    Overrides,
    Panel,
    PlainGroup,
    command,
    config_of,
    console_of,
    exit_if_interrupted,
    given_config,
    overrides_of,
    settings_model,
)
from jax_agent_rl.cli.serve import register as register_servers

if TYPE_CHECKING:
    from jax_agent_rl.config import Config

app = typer.Typer(
    cls=PlainGroup,
    context_settings=HELP_OPTIONS,
    help=(
        "Train language-model agents with reinforcement learning, JAX/TPU first. Begin with:"
        " jax-agent-rl quickstart. A task of your own: jax-agent-rl init FOLDER."
    ),
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from jax_agent_rl import __version__

        print(f"jax-agent-rl {__version__} (Python {platform.python_version()})")
        raise typer.Exit


Version = Annotated[
    bool,
    typer.Option(
        "--version", callback=_print_version, is_eager=True, help="Print the version and end."
    ),
]


@app.callback()
def main_options(version: Version = False) -> None:
    """Take the options that stand before a command."""


Dtype = Annotated[
    Literal["float32", "bfloat16", "float16"], typer.Option(help="Precision of the weights.")
]
Resume = Annotated[
    bool, typer.Option("--resume", help="Continue from the newest checkpoint of run_dir.")
]
AutoResume = Annotated[
    bool,
    typer.Option(
        "--auto-resume",
        help=(
            "Like --resume if there is a checkpoint, else start from the beginning: in the same"
            " folder, if a run was killed there before its first checkpoint."
        ),
    ),
]
AcceptChange = Annotated[
    list[str] | None,
    typer.Option(
        "--accept-change",
        metavar="KEY",
        help=(
            "With --resume: a key (or several, with commas) that defines what is trained and may"
            " differ from the checkpoint's all the same."
        ),
    ),
]
ResumeStep = Annotated[
    int | None,
    typer.Option(
        help=(
            "With --resume: continue from this step's checkpoint; newer ones are deleted after the"
            " next step."
        )
    ),
]


@command(
    app, Panel.TRAIN, "quickstart", "quickstart trainer.steps=12 seed=1", "quickstart --resume"
)
def quickstart(overrides: Overrides = None, resume: Resume = False) -> None:
    """Train a small agent here: fetch its model, write its data, train the recipe quickstart."""
    from jax_agent_rl.config import load
    from jax_agent_rl.deploy.preflight import check_quickstart
    from jax_agent_rl.deploy.quickstart.commands import RECIPE, prepare_quickstart

    settings = load(RECIPE, overrides or [])
    check_quickstart(settings)
    prepare_quickstart()
    print(
        "training (two to three minutes on two cores, one more the first time, for compilation)",
        flush=True,
    )
    _train(settings, resume, auto_resume=False, step=None, accept_change=None)


@command(app, Panel.TRAIN, "init trains", "init ~/agents/mine")
def init(folder: Annotated[Path, typer.Argument(help="A new or empty folder.")]) -> None:
    """Begin a task of your own: rows, tool, reward and configuration that work, with comments."""
    from jax_agent_rl.deploy.quickstart.commands import write_task

    for file in write_task(folder.expanduser()):
        print(file)
    quoted = shlex.quote(str(folder))
    print(
        f"next: cd {quoted} && jax-agent-rl fetch-model && jax-agent-rl train config.yaml"
        " (README.md says more)"
    )


@command(
    app,
    Panel.TRAIN,
    "train quickstart",
    "train quickstart trainer.steps=5 seed=1",
    "train quickstart --resume trainer.steps=12",
    "train my.yaml --auto-resume",
)
def train(
    config: ConfigArgument = None,
    overrides: Overrides = None,
    config_file: ConfigOption = None,
    resume: Resume = False,
    auto_resume: AutoResume = False,
    step: ResumeStep = None,
    accept_change: AcceptChange = None,
) -> None:
    """Train an agent; Ctrl-C and SIGTERM save a checkpoint, --resume continues from it."""
    from jax_agent_rl.config import load

    command_line = given_config(config, overrides, config_file)
    settings = load(command_line.required("train"), command_line.overrides)
    _train(settings, resume, auto_resume, step, accept_change)


@command(
    app,
    Panel.TRAIN,
    "distill distill distill.teachers=~/models/teacher",
    "distill quickstart distill.teachers=~/models/teacher algorithm.kl.top_k=32",
)
def distill(
    config: ConfigArgument = None,
    overrides: Overrides = None,
    config_file: ConfigOption = None,
    resume: Resume = False,
    auto_resume: AutoResume = False,
    step: ResumeStep = None,
    accept_change: AcceptChange = None,
) -> None:
    """Train an agent towards teachers on what it samples itself (on-policy distillation).

    It is `train` with the keys of distill.
    """
    from jax_agent_rl.config import load
    from jax_agent_rl.errors import ConfigError

    command_line = given_config(config, overrides, config_file)
    file = command_line.required("distill")
    settings = load(file, command_line.overrides)
    if settings.distill is None:
        raise ConfigError(f"{file} names no teacher; set distill.teachers to a model's folder")
    _train(settings, resume, auto_resume, step, accept_change)


def _train(
    settings: Config,
    resume: bool,
    auto_resume: bool,
    step: int | None,
    accept_change: list[str] | None,
) -> None:
    """Train with these settings, on process 0 or as one of the others."""
    from jax_agent_rl.errors import ConfigError

    if step is not None and not resume:
        raise ConfigError(
            f"--step {step} names the checkpoint to resume from; add --resume, or leave it out"
        )
    if resume and auto_resume:
        raise ConfigError(
            "--resume requires a checkpoint and --auto-resume does not; give one of them"
        )
    accepted = _accepted_changes(accept_change, resume or auto_resume)

    # Checks come before what takes seconds to import; of several processes, once all have joined.
    from jax_agent_rl.deploy.preflight import check_training, joins_processes

    if not joins_processes(settings):
        check_training(settings)

    from jax_agent_rl.runtime.build import follow_run
    from jax_agent_rl.runtime.compilation_cache import use_compilation_cache
    from jax_agent_rl.runtime.multihost import initialize, stopping_others_on_failure
    from jax_agent_rl.runtime.policy import with_resolved_model
    from jax_agent_rl.runtime.train import train as run

    use_compilation_cache()
    if initialize(settings.learner.multihost):  # process 0 leads
        follow_run(settings)
        return
    with stopping_others_on_failure():
        if joins_processes(settings):
            check_training(settings)
        settings = with_resolved_model(settings)

    _run_trainer(
        functools.partial(
            run,
            settings,
            resume="if_any" if auto_resume else resume,
            from_step=step,
            accept_changes=accepted,
        )
    )


def _accepted_changes(options: list[str] | None, resume: bool) -> list[str]:
    """Return the keys of ``--accept-change``."""
    from jax_agent_rl.errors import ConfigError

    keys = []
    for option in options or ():
        for key in option.split(","):
            if key.strip():
                keys.append(key.strip())
    if keys and not resume:
        raise ConfigError(
            f"--accept-change {','.join(keys)} is about a checkpoint; add --resume, or leave it out"
        )
    return keys


SupervisedConfig = Annotated[str | None, config_of("dpo")]
SupervisedKeys = Annotated[list[str] | None, overrides_of("dpo")]


@command(
    app,
    Panel.TRAIN,
    "sft supervised/sft",
    "sft supervised/sft data.train=rollouts.parquet data.best_of=1",
)
def sft(
    config: SupervisedConfig = None,
    overrides: SupervisedKeys = None,
    config_file: ConfigOption = None,
    resume: Resume = False,
    accept_change: AcceptChange = None,
) -> None:
    """Fine-tune on conversations, or on the best trajectories that `rollout` wrote.

    The latter is rejection sampling.
    """
    _train_supervised("sft", given_config(config, overrides, config_file), resume, accept_change)


@command(
    app,
    Panel.TRAIN,
    "dpo supervised/dpo",
    "dpo supervised/dpo model.path=runs/sft dpo.beta=0.3",
)
def dpo(
    config: SupervisedConfig = None,
    overrides: SupervisedKeys = None,
    config_file: ConfigOption = None,
    resume: Resume = False,
    accept_change: AcceptChange = None,
) -> None:
    """Train on preferences, or on the best and worst of each group that `rollout` wrote."""
    _train_supervised("dpo", given_config(config, overrides, config_file), resume, accept_change)


def _train_supervised(
    name: str, command_line: GivenConfig, resume: bool, accept_change: list[str] | None
) -> None:
    """Run ``sft`` or ``dpo``."""
    from jax_agent_rl.config.loading import load_tree
    from jax_agent_rl.deploy.preflight import check_supervised

    settings = load_tree(settings_model(name), command_line.required(name), command_line.overrides)
    accepted = _accepted_changes(accept_change, resume)
    check_supervised(settings)
    from jax_agent_rl.runtime.compilation_cache import use_compilation_cache
    from jax_agent_rl.supervised.train import train

    use_compilation_cache()
    _run_trainer(functools.partial(train, settings, resume=resume, accept_changes=accepted))


def _run_trainer(train: Callable[..., Coroutine[Any, Any, object]]) -> None:
    """Run a trainer until it ends, or saves and ends after Ctrl-C or SIGTERM."""
    from rich.console import Console

    from jax_agent_rl.utils.shutdown import exit_within

    console = Console()
    with exit_if_interrupted():
        asyncio.run(
            train(console=console, exit_within=functools.partial(exit_within, console.print))
        )


# The order of the commands in --help.
register_eval(app)
register_servers(app)
register_config(app)


@command(app, Panel.MODELS, "fetch-model", name="fetch-model")
def fetch_model() -> None:
    """Download the quickstart's model, SmolLM2-135M-Instruct, into the cache folder."""
    from jax_agent_rl.deploy.quickstart.model import fetch_quickstart_model

    print(fetch_quickstart_model())


@command(
    app,
    Panel.MODELS,
    "prepare shop",
    "prepare shop --calls json --out data/shop_json",
    "prepare calculator --out data/mine --seed 1",
)
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


@command(app, Panel.MODELS, "convert model.gguf ~/models/mine --dtype bfloat16")
def convert(
    source: Annotated[Path, typer.Argument(help="A GGUF file or a Hugging Face folder.")],
    target: Annotated[Path, typer.Argument(help="Folder to write.")],
    dtype: Dtype = "float32",
) -> None:
    """Write a model as a Hugging Face folder (safetensors) in a chosen precision."""
    from jax_agent_rl.models.convert import convert as run

    print(run(source, target, dtype=dtype))


@command(
    app,
    Panel.MODELS,
    "export runs/quickstart ~/models/mine --dtype bfloat16",
    "export runs/quickstart ~/models/mine --step 4",
    "export runs/lora ~/models/mine-adapter --adapter",
)
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


@command(
    app,
    Panel.CHECK,
    "conformance --backend jetstream",
    "conformance --backend vllm --model ~/models/Qwen3-0.6B --tolerance 0.1",
    "conformance --backend my_project.engine:make --json",
)
def conformance(
    backend: Annotated[
        str,
        typer.Option(help="jetstream, vllm, remote, ray, or your own as package.module:function."),
    ],
    model: Annotated[
        Path | None, typer.Option(help="Model folder; default a tiny random one.")
    ] = None,
    url: Annotated[
        str | None,
        typer.Option(
            help="Address of a running rollout server, for remote; default one is started."
        ),
    ] = None,
    engine: Annotated[
        str,
        typer.Option(
            help="What serves behind the rollout server that is started, or in the Ray actor."
        ),
    ] = "jetstream",
    engine_factory: Annotated[
        str | None,
        typer.Option(help="For jetstream: its rollout.jetstream.engine_factory."),
    ] = None,
    adapters: Annotated[
        bool, typer.Option("--adapters", help="Serve a LoRA adapter, too, and test it.")
    ] = False,
    data_parallel: Annotated[
        int, typer.Option(min=1, help="For jetstream: engines, each on a device of its own.")
    ] = 1,
    token_env: Annotated[
        str | None, typer.Option(help="Environment variable with the server's token.")
    ] = None,
    tolerance: Annotated[
        float, typer.Option(help="Largest log-prob error in nats; 0.1 suits bfloat16.")
    ] = 1e-3,
    max_model_len: Annotated[
        int, typer.Option(help="Context length to serve with, at least 128.")
    ] = 256,
    only: Annotated[
        list[str] | None, typer.Option(help="Only this check; may be repeated.")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Test a rollout backend by the protocol; a server's weights are changed and put back."""
    from jax_agent_rl.deploy.preflight import check_model
    from jax_agent_rl.utils.network import token_from

    token = token_from(token_env, key="--token-env")
    if model is not None:
        check_model(str(model))
    from jax_agent_rl.testing.conformance.runner import run_command

    report = run_command(
        backend,
        model=model,
        url=url,
        token=token,
        engine=engine,
        engine_factory=engine_factory,
        adapters=adapters,
        data_parallel=data_parallel,
        tolerance=tolerance,
        max_model_len=max_model_len,
        only=only or (),
        as_json=json,
        console=console_of(json),
    )
    if not report.ok:
        raise typer.Exit(1)


@command(
    app,
    Panel.CHECK,
    "plan tpu_8b --topology v5p:2x2x1",
    "plan my.yaml --topology v5p:2x2x2 --architecture qwen3-14b",
    "plan my.yaml --topology v5e:4x4 --search --price-per-chip-hour 1.2 --plot memory.png",
    "plan tpu_8b --topology v5p:2x2x1 --profile decode",
)
def plan(
    topology: Annotated[
        str, typer.Option(help="The slice: v5e:4x4, v5p:4x4x4, or 2*v6e:16x16 for two.")
    ],
    config: ConfigArgument = None,
    overrides: Overrides = None,
    config_file: ConfigOption = None,
    architecture: Annotated[
        str | None,
        typer.Option(
            help=(
                "Well-known model instead of model.path, without its files: qwen3-8b,"
                " llama-3.1-70b, …"
            )
        ),
    ] = None,
    utilization: Annotated[
        float,
        typer.Option(
            min=0.01,
            max=1,
            help="Assumed share of the ideal time, for programs that the compiler refuses.",
        ),
    ] = 0.4,
    profile: Annotated[
        Literal["decode", "prefill", "learner"] | None,
        typer.Option(
            help=(
                "Compile these programs only; show what their predicted time is made of, by line of"
                " code."
            )
        ),
    ] = None,
    search: Annotated[
        bool, typer.Option("--search", help="Find meshes, micro-batches and decode slots that fit.")
    ] = False,
    budget: Annotated[
        int,
        typer.Option(
            min=1,
            help=(
                "With --search: number of layouts to find; at most three times as many are"
                " compiled."
            ),
        ),
    ] = 3,
    price_per_chip_hour: Annotated[
        float | None, typer.Option(min=0, help="Price, for the cost of a step.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="File for a plot of the chips' memory (.png, .svg, …).")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Compile a run's programs for a TPU slice here: memory, speed, cost, and keys to change."""
    # Before JAX is loaded: it looks for no chips, and compiles for those described.
    os.environ["JAX_PLATFORMS"] = "cpu"
    from jax_agent_rl.config import load
    from jax_agent_rl.deploy.preflight import check_model

    command_line = given_config(config, overrides, config_file)
    recipe = str(command_line.required("plan"))
    overrides = list(command_line.overrides)
    if architecture is None:
        settings = load(recipe, overrides)
        check_model(settings.model.path)
    else:
        load(recipe, [*overrides, f"model.path={architecture}"])  # raises if it is wrong
    from jax_agent_rl.deploy.plan.architectures import architecture_folder
    from jax_agent_rl.deploy.plan.command import PlanTask, run_command

    console = console_of(json)
    with ExitStack() as stack:
        if architecture is not None:
            model = stack.enter_context(architecture_folder(architecture))
            overrides.append(f"model.path={model}")
        task = PlanTask(
            recipe=recipe,
            overrides=overrides,
            topology=topology,
            utilization=utilization,
            price=price_per_chip_hour,
            profile=profile,
            width=console.width,
            colours=console.is_terminal and not console.no_color,
        )
        result = run_command(
            task, console, budget=budget if search else None, picture=plot, as_json=json
        )
    if not result.fits:
        raise typer.Exit(1)


def main() -> None:
    """Run the command line; print errors a user can fix as one message, not a traceback."""
    from jax_agent_rl.errors import ConfigError, JaxAgentRLError
    from jax_agent_rl.utils.startup import ignore_absent_tpus, keep_freed_memory, quiet_logging
    from jax_agent_rl.utils.text import printable

    if sys.argv[1:2] == ["quickstart"]:
        keep_freed_memory()
    quiet_logging()
    ignore_absent_tpus()
    try:
        app()
    except JaxAgentRLError as error:
        message = str(error)
        if isinstance(error, ConfigError) and len(error.problems) == 1:
            message = error.problems[0]
        print(f"error: {printable(message)}", file=sys.stderr)
        sys.exit(2)
