"""Commands ``doctor``, ``certify``, ``conformance``, ``plan``, ``redteam``: checks before a run."""

from __future__ import annotations

import os
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from jax_agent_rl.cli.options import (
    ConfigArgument,
    ConfigOption,
    JsonOption,
    Overrides,
    Panel,
    command,
    console_of,
    exit_if_interrupted,
    given_config,
    print_object,
    run_to_end,
)
from jax_agent_rl.observe.progress import print_line

if TYPE_CHECKING:
    from rich.console import Console

    from jax_agent_rl.config import Config
    from jax_agent_rl.deploy.doctor.machine import Finding


def register(app: typer.Typer) -> None:
    """Add the commands."""
    command(
        app,
        Panel.CHECK,
        "doctor",
        "doctor quickstart",
        "doctor ppo_tool rollout.backend=vllm --json",
    )(doctor)
    command(
        app,
        Panel.CHECK,
        "certify",
        "certify my.yaml learner.mesh.fsdp=4 --out reports/v5e",
        "certify --only kernels --only speed",
    )(certify)
    command(
        app,
        Panel.CHECK,
        "conformance --backend jetstream",
        "conformance --backend vllm --model ~/models/Qwen3-0.6B --tolerance 0.1",
        "conformance --backend my_project.engine:make --json",
    )(conformance)
    command(
        app,
        Panel.CHECK,
        "plan tpu_8b --topology v5p:2x2x1",
        "plan my.yaml --topology v5p:2x2x2 --architecture qwen3-14b",
        "plan my.yaml --topology v5e:4x4 --search --price-per-chip-hour 1.2 --plot memory.png",
        "plan tpu_8b --topology v5p:2x2x1 --profile decode",
        "plan my.yaml --topology h100:8 --architecture qwen3-8b",
    )(plan)
    command(
        app,
        Panel.CHECK,
        "redteam",
        "redteam --only sandbox --only tests --html redteam.html",
        "redteam --tool-server http://127.0.0.1:5000 --json",
        "redteam --endpoint http://127.0.0.1:8000/v1 --model Qwen3-0.6B",
    )(redteam)


_STYLES = {"ok": "green", "warn": "yellow", "fail": "bold red"}


def doctor(
    config: ConfigArgument = None,
    overrides: Overrides = None,
    config_file: ConfigOption = None,
    json: JsonOption = False,
) -> None:
    """Check, before a run, what would stop or spoil it, and say what to do about it.

    There is a line for each thing, with what to do where it is not ok. Without CONFIG, the machine:
    Python, packages, cores, memory, disk, limits, ports, accelerators, sandbox. With it, also what
    it names: code, tools, model, tokenizer, rows, prompts, rewards, agents and their servers,
    engine. Nothing is trained and no weights are loaded. Exits with 1 if anything fails.
    """
    from dataclasses import asdict

    from jax_agent_rl.config import load
    from jax_agent_rl.errors import ConfigError

    command_line = given_config(config, overrides, config_file)
    settings = None
    if command_line.file is not None:
        settings = load(command_line.file, command_line.overrides)
    elif command_line.overrides:
        keys = " ".join(command_line.overrides)
        raise ConfigError(
            f"{keys}: without a configuration there are no keys to change; also give its file"
        )
    findings = run_to_end(_print_findings(settings, console_of(json)))
    failed = [finding for finding in findings if finding.status == "fail"]
    if json:
        print_object({"ok": not failed, "findings": [asdict(finding) for finding in findings]})
    if failed:
        raise typer.Exit(1)


async def _print_findings(config: Config | None, console: Console) -> list[Finding]:
    """Print each finding of ``doctor`` as it comes, and their counts by status."""
    from collections import Counter

    from rich.text import Text

    from jax_agent_rl.deploy.doctor.command import examine
    from jax_agent_rl.utils.text import printable

    findings = []
    async for finding in examine(config):
        findings.append(finding)
        line = Text(f"{finding.status:<5}", style=_STYLES[finding.status])
        line.append(f"{finding.check}: ", style="bold")
        line.append(printable(finding.text), style="default")
        console.print(line, soft_wrap=True)

    counts = Counter(finding.status for finding in findings)
    console.print(
        f"{counts['ok']} ok, {counts['warn']} warned, {counts['fail']} failed", highlight=False
    )
    return findings


def certify(
    config: ConfigArgument = None,
    overrides: Overrides = None,
    config_file: ConfigOption = None,
    only: Annotated[
        list[str] | None, typer.Option(help="Only this check; may be repeated.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for certify.json and certify.html.")] = Path(
        "certify"
    ),
    json: JsonOption = False,
) -> None:
    """Measure this machine and compare it with the documentation's claims, in about ten minutes.

    Kernels against float64, every backend against the protocol, engine against learner in every
    precision, speed and memory beside plan and the device's peaks, exchanges between devices, a
    checkpoint, a short training run; without CONFIG, of the quickstart's model and task. The report
    (certify.json, certify.html) says for each deviation which claim it concerns; it is meant to be
    sent to us. Exits with 1 if there are deviations.
    """
    # On GPUs, other engines need memory beside JAX.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    from jax_agent_rl.config import load
    from jax_agent_rl.deploy.preflight import check_certification

    command_line = given_config(config, overrides, config_file)
    settings = None
    if command_line.file is not None:
        settings = load(command_line.file, command_line.overrides)
    check_certification(settings, out=out)
    from jax_agent_rl.deploy.certify.command import run_command

    # Interrupted, the report ends before the check that was running.
    with exit_if_interrupted():
        report = run_command(
            command_line.file,
            command_line.overrides,
            only=only or [],
            out=out,
            arguments=["jax-agent-rl", *sys.argv[1:]],
            console=console_of(json),
        )
    if json:
        print_object(report)
    if not report["ok"]:
        raise typer.Exit(1)


def conformance(
    backend: Annotated[
        str,
        typer.Option(
            help=("jetstream, vllm, sglang, remote, ray, or your own as package.module:function.")
        ),
    ],
    model: Annotated[
        Path | None, typer.Option(help="Model folder; default a tiny random one.")
    ] = None,
    url: Annotated[
        str | None,
        typer.Option(
            help=(
                "Address of a running rollout server, for remote, or of SGLang's, for sglang;"
                " default one is started."
            )
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
        bool, typer.Option("--adapters", help="Also serve a LoRA adapter, and test it.")
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
    from jax_agent_rl.deploy.preflight import check_conformance
    from jax_agent_rl.utils.network import token_from

    token = token_from(token_env, key="--token-env")
    check_conformance(
        backend,
        model=model,
        url=url,
        engine=engine,
        engine_factory=engine_factory,
        adapters=adapters,
        data_parallel=data_parallel,
    )
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


def plan(
    topology: Annotated[
        str,
        typer.Option(
            help=(
                "The slice: v5e:4x4, v5p:4x4x4, or 2*v6e:16x16 for two. GPUs: h100:8, or 2*h100:8"
                " for two hosts, in the environment of launch/cuda_environment.sh."
            )
        ),
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
    """Compile a run's programs for TPUs or GPUs here: memory, speed, cost, and keys to change."""
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


def redteam(
    tool_server: Annotated[
        str | None,
        typer.Option(
            metavar="URL", help="Attack a tool server of verl-tool's protocol with a Python tool."
        ),
    ] = None,
    sandbox_fusion: Annotated[
        str | None, typer.Option(metavar="URL", help="Attack a SandboxFusion server.")
    ] = None,
    server: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Attack a server; the path takes JSON by POST."),
    ] = None,
    endpoint: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Attack the chat completions of a base URL (…/v1)."),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help=(
                "Folder of a model whose chat template is attacked, default the quickstart's; for"
                " --endpoint the model's name."
            )
        ),
    ] = None,
    only: Annotated[
        list[str] | None, typer.Option(help="Only attacks whose names begin so; repeatable.")
    ] = None,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the results as a page.")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Attack this installation, or servers on this machine, harmlessly, and say what broke.

    Without a URL the targets are this installation's sandbox, tests of programs, tool server, chat
    codec, judge and readers of files. Each attack looks for a mark that it leaves, and has a time
    limit. Servers elsewhere are refused. The exit status is 1 if something broke.
    """
    from jax_agent_rl.deploy.quickstart.model import quickstart_model_folder
    from jax_agent_rl.testing.redteam.attack import AttackVerdict
    from jax_agent_rl.testing.redteam.run import REPORT_A_HOLE, RedTeamRequest, page, summary
    from jax_agent_rl.testing.redteam.run import redteam as run_redteam
    from jax_agent_rl.utils.files import write_atomically

    if model is None and endpoint is None:
        folder = quickstart_model_folder()
        if folder.is_dir():
            model = str(folder)
    request = RedTeamRequest(
        tool_server=tool_server,
        sandbox_fusion=sandbox_fusion,
        server=server,
        endpoint=endpoint,
        model=model,
        only=only or [],
    )
    console = console_of(json)
    results = run_to_end(run_redteam(request, print_line=lambda line: print_line(console, line)))

    counts = summary(results)["counts"]
    print_line(console, ", ".join(f"{count} {verdict}" for verdict, count in counts.items()))
    if html is not None:
        write_atomically(html, page(results))
        print_line(console, f"page: {html}")
    if json:
        print_object(summary(results))
    if counts[AttackVerdict.BROKE]:
        print_line(console, REPORT_A_HOLE)
        raise typer.Exit(1)
