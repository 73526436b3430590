"""Shared parts of commands: registration, help, completion, arguments, interruption.

A command is a function with a typer signature that imports what it needs when it runs, so that ``--help`` and
completion are fast.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import pkgutil
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

import typer

T = TypeVar("T")


HELP_OPTIONS = {"help_option_names": ["-h", "--help"]}


class Panel(StrEnum):
    """Headings of commands in ``--help``."""

    TRAIN = "Train"
    LOOK = "Look"
    SERVE = "Serve"
    CHECK = "Check"
    MODELS = "Models and data"


def command(
    app: typer.Typer, panel: Panel, *examples: str, name: str | None = None
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator that registers a function as a command whose ``--help`` ends with examples.

    Args:
        app: application or group of the command.
        panel: heading of the command in ``--help``.
        *examples: command lines, without ``jax-agent-rl``.
        name: default the function's, with hyphens.
    """

    def register(function: Callable[..., None]) -> Callable[..., None]:
        paragraphs = inspect.cleandoc(function.__doc__ or "").split("\n\n")
        explanation = "\n\n".join(" ".join(text.split()) for text in paragraphs)  # or lines would stay broken
        epilog = _shown(examples)
        return app.command(
            name, help=explanation, rich_help_panel=panel.value, epilog=epilog, context_settings=HELP_OPTIONS
        )(function)

    return register


def add_group(app: typer.Typer, group: typer.Typer, panel: Panel, *examples: str, name: str) -> None:
    """Register several commands under one name; examples as for :func:`command`."""
    app.add_typer(group, name=name, rich_help_panel=panel.value, epilog=_shown(examples))


def _shown(examples: Iterable[str]) -> str:
    lines = [f"jax-agent-rl {example}".replace("[", "\\[") for example in examples]  # no markup of rich's
    return "\n\n".join(["Examples:", *lines])


_SETTINGS = {
    "train": "jax_agent_rl.config:Config",
    "sft": "jax_agent_rl.config.commands:SftConfig",
    "dpo": "jax_agent_rl.config.commands:DpoConfig",
    "tool-server": "jax_agent_rl.config.commands:ToolServerSettings",
    "tinker-server": "jax_agent_rl.config.commands:TinkerServerSettings",
    "simulate": "jax_agent_rl.testing.simulate.workload:Assumptions",
}


def settings_model(command: str) -> Any:
    """Return the tree of a command's settings."""
    return pkgutil.resolve_name(_SETTINGS[command])


Completer = Callable[[typer.Context, str], list[tuple[str, str]]]
"""Maps the command line so far and an incomplete word to its completions, each with its help."""


def key_completer(trees: Mapping[str, str]) -> Completer:
    """Return a completer of keys as ``key=``, each with its description, and of values after the ``=``.

    bash splits words at ``=``: the incomplete word is then the ``=`` or the value, and the key is a word before.

    Args:
        trees: commands with settings, by the prefix of their keys, usually empty.
    """

    def complete(context: typer.Context, incomplete: str) -> list[tuple[str, str]]:
        from jax_agent_rl.config.loading import valid_keys

        texts, values = {}, {}
        for prefix, command in trees.items():
            model = settings_model(command)
            for key, text in valid_keys(model).items():
                texts[f"{prefix}{key}"], values[f"{prefix}{key}"] = text, _values(model, key.split("."))
        key, equals, begun = incomplete.partition("=")
        if equals and key:
            return [(f"{key}={value}", "") for value in values.get(key, ()) if value.startswith(begun)]
        before = next((word for word in reversed(_words(context)) if word != "="), "")
        if before in values:
            return [(value, "") for value in values[before] if value.startswith(begun or key)]
        return [(f"{name}=", text) for name, text in texts.items() if name.startswith(incomplete)]

    return complete


def _words(context: typer.Context) -> list[str]:
    """Return the words before the incomplete one where settings may stand."""
    given = (context.params.get(name) or () for name in ("config", "settings", "overrides"))
    return [str(word) for value in given for word in (value if isinstance(value, list | tuple) else [value])]


complete_key = key_completer({"": "train"})
"""Completer of the keys of a run's configuration."""


def complete_config(context: typer.Context, incomplete: str) -> list[tuple[str, str]]:
    """Complete a key where a file may stand, too; without matches, shells complete file names."""
    return complete_key(context, incomplete) if incomplete else []


def _values(model: Any, path: list[str]) -> list[str]:
    """Return the values of a key, if they are few."""
    info = getattr(model, "model_fields", {}).get(path[0])
    if info is None:
        return []
    kinds = [info.annotation, *get_args(info.annotation)]
    if len(path) > 1:
        return [value for kind in kinds for value in _values(kind, path[1:])]
    named = [str(value) for kind in kinds if get_origin(kind) is Literal for value in get_args(kind)]
    return named or (["true", "false"] if bool in kinds else [])


Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="KEY=VALUE",
        help="Configuration keys that override the file: trainer.steps=5 seed=1.",
        autocompletion=complete_key,
    ),
]
OptionalConfig = Annotated[  # a path would fold the slashes of key=http://…
    str | None,
    typer.Argument(
        metavar="CONFIG",
        help="YAML configuration, e.g. configs/quickstart.yaml.",
        autocompletion=complete_config,
    ),
]
ModelOption = Annotated[
    Path | None, typer.Option("--model", help="Hugging Face folder instead of the configuration's model.")
]
RunOption = Annotated[
    Path | None, typer.Option("--run", help="Run folder: use its checkpoint and, without CONFIG, its configuration.")
]
StepOption = Annotated[
    int | None, typer.Option("--step", help="With --run: step of the checkpoint; default the newest.")
]
EmaOption = Annotated[
    bool, typer.Option("--ema", help="With --run: the moving average of the weights (learner.ema_decay).")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object as the last line.")]


def config_or_key(config: str | None, overrides: Iterable[str] | None) -> tuple[Path | None, list[str]]:
    """Distinguish a file from a ``key=value`` in its place, where the file is optional.

    >>> config_or_key("seed=1", ["trainer.steps=5"])
    (None, ['seed=1', 'trainer.steps=5'])
    """
    rest = list(overrides or [])
    if config is None:
        return None, rest
    if "=" in config and not Path(config).is_file():
        return None, [config, *rest]
    return Path(config), rest


@contextlib.contextmanager
def exit_if_interrupted() -> Iterator[None]:
    """Exit with the status of an interruption where one leaves the block; what it interrupted has cleaned up."""
    from jax_agent_rl.utils.process import EXIT_CODE

    try:
        yield
    except (asyncio.CancelledError, KeyboardInterrupt):
        raise typer.Exit(EXIT_CODE) from None


def run_to_end(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on an event loop; Ctrl-C and SIGTERM cancel it and let it clean up.

    Raises:
        typer.Exit: it was interrupted.
    """
    from jax_agent_rl.utils.process import Interruption, InterruptStage, exit_within

    async def interruptible() -> T:
        with Interruption(print, functools.partial(exit_within, print), stage=InterruptStage.SAMPLING):
            return await main

    with exit_if_interrupted():
        return asyncio.run(interruptible())
