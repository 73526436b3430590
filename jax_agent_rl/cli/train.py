"""``jax-agent-rl train``, ``quickstart``, ``init``, ``distill``, ``sft``, ``dpo``: training."""

from __future__ import annotations

import asyncio
import functools
import shlex
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jax_agent_rl.cli.options import (
    ConfigArgument,
    ConfigOption,
    GivenConfig,
    Overrides,
    Panel,
    command,
    config_of,
    exit_if_interrupted,
    given_config,
    overrides_of,
    settings_model,
)

if TYPE_CHECKING:
    from jax_agent_rl.config import Config


def register(app: typer.Typer) -> None:
    """Add the commands."""
    command(
        app, Panel.TRAIN, "quickstart", "quickstart trainer.steps=12 seed=1", "quickstart --resume"
    )(quickstart)
    command(app, Panel.TRAIN, "init trains", "init ~/agents/mine")(init)
    command(
        app,
        Panel.TRAIN,
        "train quickstart",
        "train quickstart trainer.steps=5 seed=1",
        "train quickstart --resume trainer.steps=12",
        "train my.yaml --auto-resume",
    )(train)
    command(
        app,
        Panel.TRAIN,
        "distill distill distill.teachers=~/models/teacher",
        "distill quickstart distill.teachers=~/models/teacher algorithm.kl.top_k=32",
    )(distill)
    command(
        app,
        Panel.TRAIN,
        "sft supervised/sft",
        "sft supervised/sft data.train=rollouts.parquet data.best_of=1",
    )(sft)
    command(
        app,
        Panel.TRAIN,
        "dpo supervised/dpo",
        "dpo supervised/dpo model.path=runs/sft dpo.beta=0.3",
    )(dpo)


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
SupervisedConfig = Annotated[str | None, config_of("dpo")]
SupervisedKeys = Annotated[list[str] | None, overrides_of("dpo")]


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
