"""``jax-agent-rl serve`` and the other servers, ``engines`` and ``diagnose``: command lines."""

from __future__ import annotations

import functools
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jax_agent_rl.cli.options import (
    HELP_OPTIONS,
    ConfigArgument,
    ConfigOption,
    EmaOption,
    JsonOption,
    ModelOption,
    Overrides,
    Panel,
    RunOption,
    StepOption,
    add_group,
    command,
    config_of,
    console_of,
    given_config,
    overrides_of,
    policy_choice,
    print_object,
    settings_model,
)
from jax_agent_rl.observe.progress import print_line
from jax_agent_rl.utils.text import counted

if TYPE_CHECKING:
    from jax_agent_rl.runtime.policy_choice import PolicyChoice

engines = typer.Typer(
    help="List, add and remove the engines of a run that trains.",
    context_settings=HELP_OPTIONS,
    no_args_is_help=True,
)

TrainingRun = Annotated[
    Path, typer.Argument(help="The folder of a run that trains on this machine.")
]


def register(app: typer.Typer) -> None:
    """Add the commands."""
    command(
        app,
        Panel.SERVE,
        "tool-server",
        "tool-server tool_server port=5002",
        "tool-server port=5001 workers=4 tools=[python,search] search.corpus=passages.jsonl",
        name="tool-server",
    )(tool_server)
    command(
        app,
        Panel.SERVE,
        "serve quickstart",
        "serve --run runs/quickstart --step 6 --port 8001",
        "serve --model ~/models/Qwen3-0.6B rollout.max_model_len=4096",
    )(serve)
    command(
        app,
        Panel.SERVE,
        "rollout-server quickstart --port 8100",
        "train quickstart rollout.backend=remote rollout.urls=[http://127.0.0.1:8100]",
        name="rollout-server",
    )(rollout_server)
    command(
        app,
        Panel.SERVE,
        "tinker-server model.path=~/.cache/jax_agent_rl/models/smollm2-135m-instruct",
        "tinker-server model.path=runs/sft port=8001 lora.rank=8",
        name="tinker-server",
    )(tinker_server)
    add_group(
        app,
        engines,
        Panel.SERVE,
        "engines list runs/quickstart",
        "engines add runs/quickstart http://10.0.0.7:8100",
        "engines remove runs/quickstart http://10.0.0.5:8100 --drain",
        name="engines",
    )
    command(
        app, Panel.CHECK, "diagnose runs/quickstart", "diagnose runs/quickstart --version 4 --json"
    )(diagnose)


def tool_server(
    config: Annotated[str | None, config_of("tool-server")] = None,
    overrides: Annotated[list[str] | None, overrides_of("tool-server")] = None,
    config_file: ConfigOption = None,
) -> None:
    """Serve tools to agents over HTTP; programs that a model wrote run in a sandbox.

    Agents send POST /get_observation.
    """
    from jax_agent_rl.config.loading import load_tree
    from jax_agent_rl.deploy.preflight import check_tool_server

    command_line = given_config(config, overrides, config_file)
    settings = load_tree(settings_model("tool-server"), command_line.file, command_line.overrides)
    check_tool_server(settings)
    from jax_agent_rl.tool_server.server import run
    from jax_agent_rl.utils.shutdown import run_server

    run_server(run(settings, print_line=print))


def tinker_server(
    config: Annotated[str | None, config_of("tinker-server")] = None,
    overrides: Annotated[list[str] | None, overrides_of("tinker-server")] = None,
    config_file: ConfigOption = None,
) -> None:
    """Serve the Tinker API: clients sample, compute gradients and update models through its SDK."""
    from jax_agent_rl.config.loading import load_tree
    from jax_agent_rl.deploy.preflight import check_tinker_server

    command_line = given_config(config, overrides, config_file)
    settings = load_tree(settings_model("tinker-server"), command_line.file, command_line.overrides)
    check_tinker_server(settings)
    from jax_agent_rl.runtime.compilation_cache import use_compilation_cache
    from jax_agent_rl.utils.shutdown import run_server

    try:
        from jax_agent_rl.tinker_server.app import serve as run
    except ModuleNotFoundError as error:
        from jax_agent_rl.errors import ConfigError
        from jax_agent_rl.utils.packages import install_command

        raise ConfigError(
            f"tinker-server needs the extra `tinker`: {install_command('tinker')}"
        ) from error
    use_compilation_cache()
    run_server(run(settings, print_line=print))


def rollout_server(
    config: ConfigArgument = None,
    overrides: Overrides = None,
    config_file: ConfigOption = None,
    model: ModelOption = None,
    run: RunOption = None,
    step: StepOption = None,
    ema: EmaOption = False,
    host: Annotated[
        str, typer.Option(help="Address to listen on; any but loopback needs a token.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port; 0 takes a free one.")] = 8100,
) -> None:
    """Serve the configured engine over HTTP, for runs with rollout.backend=remote."""
    from jax_agent_rl.deploy.preflight import check_policy
    from jax_agent_rl.runtime.policy_choice import choose

    choice = policy_choice(
        config,
        overrides,
        config_file,
        model=model,
        run=run,
        step=step,
        ema=ema,
    )
    settings = choose(choice)
    check_policy(
        choice, settings, listens=(host, port, settings.rollout.token_env, "rollout.token_env")
    )
    from jax_agent_rl.runtime.serve import serve_rollouts

    _serve(choice, functools.partial(serve_rollouts, host=host, port=port))


def serve(
    config: ConfigArgument = None,
    overrides: Overrides = None,
    config_file: ConfigOption = None,
    model: ModelOption = None,
    run: RunOption = None,
    step: StepOption = None,
    ema: EmaOption = False,
    host: Annotated[
        str, typer.Option(help="Address to listen on; any but loopback needs a token.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port; 0 takes a free one.")] = 8000,
    token_env: Annotated[
        str | None, typer.Option(help="Environment variable with the API key of clients.")
    ] = None,
    model_name: Annotated[str, typer.Option(help="Name of the model in /v1/models.")] = "policy",
) -> None:
    """Serve a model to OpenAI clients: chat, completions, tool calls, log-probs, streaming.

    The model is a configuration's, any Hugging Face folder of a known family (--model), or a run's
    checkpoint (--run). The configuration's model, rollout and agent are used, but for the lengths
    that training sets: contexts may be as long as the model reads and the KV cache holds, unless
    rollout.max_model_len=N is given here. With /sessions/ID/v1 as base_url, exact ids are recorded.
    """
    from jax_agent_rl.deploy.preflight import check_policy
    from jax_agent_rl.runtime.policy_choice import choose

    choice = policy_choice(
        config,
        overrides,
        config_file,
        model=model,
        run=run,
        step=step,
        ema=ema,
    )
    check_policy(choice, choose(choice), listens=(host, port, token_env, "--token-env"))
    from jax_agent_rl.runtime.serve import serve_openai

    keys = {override.partition("=")[0] for override in choice.overrides}
    _serve(
        choice,
        functools.partial(
            serve_openai,
            host=host,
            port=port,
            token_env=token_env,
            model_name=model_name,
            fixed_length="rollout.max_model_len" in keys,
        ),
    )


@command(engines, Panel.SERVE, "engines list runs/quickstart", name="list")
def list_engines(run: TrainingRun, json: JsonOption = False) -> None:
    """List the engines that serve a run."""
    _change_engines(run, "engines", None, as_json=json)


@command(
    engines,
    Panel.SERVE,
    "engines add runs/quickstart http://10.0.0.7:8100",
    "engines add runs/on_ray",
    name="add",
)
def add_engine(
    run: TrainingRun,
    url: Annotated[
        str | None,
        typer.Argument(
            help=(
                "A rollout server, for rollout.backend=remote; without it, one more Ray actor is"
                " started."
            )
        ),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Add an engine to a run. It receives the served weights before its first request."""
    _change_engines(run, "engines/add", {"url": url}, as_json=json)


@command(engines, Panel.SERVE, "engines remove runs/quickstart http://10.0.0.5:8100", name="remove")
def remove_engine(
    run: TrainingRun,
    name: Annotated[str, typer.Argument(help="Name of the engine, as listed.")],
    drain: Annotated[
        bool, typer.Option("--drain", help="Wait until it has finished its requests.")
    ] = False,
    json: JsonOption = False,
) -> None:
    """Remove an engine from a run. Its requests continue on the others."""
    _change_engines(run, "engines/remove", {"name": name, "drain": drain}, as_json=json)


def _change_engines(run: Path, path: str, body: dict[str, Any] | None, *, as_json: bool) -> None:
    """Send a command to the run and print its engines."""
    import asyncio

    from jax_agent_rl.rollout.http.membership import command_run
    from jax_agent_rl.utils.text import printable

    answer = asyncio.run(command_run(run, path, body))
    if as_json:
        print_object(answer)
        return
    print(f"version {answer['policy_version']} is served by {len(answer['engines'])}:")
    for engine in answer["engines"]:
        name = printable(engine["name"], one_line=True)
        requests = counted(engine["requests"], "request")
        print(f"  {name}  version {engine['policy_version']}, {requests}")


def _serve(choice: PolicyChoice, serve: Callable[..., Coroutine[Any, Any, None]]) -> None:
    """Run a server of the chosen model until it is stopped."""
    from rich.console import Console

    from jax_agent_rl.runtime.compilation_cache import use_compilation_cache
    from jax_agent_rl.runtime.policy import open_policy
    from jax_agent_rl.utils.shutdown import run_server

    use_compilation_cache()
    print_to_console = functools.partial(print_line, Console())
    with open_policy(choice) as policy:
        run_server(serve(policy.config, policy=policy.name, print_line=print_to_console))


def diagnose(
    run: Annotated[Path, typer.Argument(help="A run folder.")],
    version: Annotated[
        int | None,
        typer.Option(
            help=(
                "Version of the weights whose trajectories are compared; default the one that was"
                " diagnosed."
            )
        ),
    ] = None,
    seconds: Annotated[
        float,
        typer.Option(
            min=1.0, help="After so long no other hypothesis is tried; a larger model needs more."
        ),
    ] = 45.0,
    json: JsonOption = False,
) -> None:
    """Compare engine and learner of a run again, from its folder, and diagnose a disagreement.

    It needs the checkpoint of that version and no engine. The exit status is 1 if they disagree.
    """
    from dataclasses import asdict

    from jax_agent_rl.runtime.policy_choice import run_config

    run_config(run)  # before anything is imported for what is not a run
    from jax_agent_rl.agreement.report import breach_line
    from jax_agent_rl.runtime.diagnosis import diagnose_run

    console = console_of(json)
    result = diagnose_run(run, version=version, seconds=seconds)
    comparison = result.comparison
    allowed = result.allowed
    diagnosis = result.diagnosis
    print_line(console, f"comparing {counted(result.contexts, 'context')} of {result.source}")
    if diagnosis is None:
        print_line(
            console,
            f"engine and learner agree about the weights of version {result.version}: over"
            f" {comparison.tokens} tokens {comparison.mean:.1e} nats on average (allowed"
            f" {allowed.mean:.1e}), {comparison.largest:.1e} at most (allowed {allowed.token:.1e})",
        )
    else:
        print_line(console, breach_line(comparison, allowed, result.version))
        for line in diagnosis.lines():
            print_line(console, line)
        during_run = result.then
        if during_run is not None and during_run["cause"] != str(diagnosis.cause):
            print_line(console, f"while it ran, with the engine to look into: {during_run['line']}")

    if json:
        print_object(
            {
                "version": result.version,
                "comparison": asdict(comparison),
                "diagnosis": None if diagnosis is None else diagnosis.to_json(),
            }
        )
    if diagnosis is not None:
        raise typer.Exit(1)
