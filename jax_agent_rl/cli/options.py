"""Shared parts of commands: registration, help, completion, arguments, interruption.

A command is a function with a typer signature that imports what it needs when it runs, so that
``--help`` and completion are fast.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import inspect
import os
import pkgutil
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Literal,
    TypeVar,
    get_args,
    get_origin,
    get_type_hints,
)

import typer
from typer.core import TyperCommand, TyperGroup

if TYPE_CHECKING:
    from rich.console import Console

    from jax_agent_rl.runtime.policy_choice import PolicyChoice

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
    """Return a decorator that registers a function as a command; its ``--help`` ends with examples.

    Args:
        app: application or group of the command.
        panel: heading of the command in ``--help``.
        *examples: command lines, without ``jax-agent-rl``.
        name: None: the function's, with hyphens.
    """

    def register(function: Callable[..., None]) -> Callable[..., None]:
        # Each paragraph on one line, or its lines would stay broken.
        paragraphs = inspect.cleandoc(function.__doc__ or "").split("\n\n")
        help_text = "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)
        _name_values(function)
        return app.command(
            name,
            cls=PlainCommand,
            help=help_text,
            rich_help_panel=panel.value,
            epilog=_format_examples(examples),
            context_settings=HELP_OPTIONS,
        )(function)

    return register


def add_group(
    app: typer.Typer, group: typer.Typer, panel: Panel, *examples: str, name: str
) -> None:
    """Register several commands under one name; examples as for :func:`command`."""
    app.add_typer(
        group,
        name=name,
        cls=PlainGroup,
        rich_help_panel=panel.value,
        epilog=_format_examples(examples),
    )


_USER_ERRORS = {
    errno.EACCES,
    errno.EDQUOT,
    errno.EISDIR,
    errno.ELOOP,
    errno.ENAMETOOLONG,
    errno.ENOSPC,
    errno.ENOTDIR,
    errno.EPERM,
    errno.EROFS,
}
"""What the system says of a file that a user named wrongly, or may not use.

A mistake of the code has other numbers.
"""


class PlainCommand(TyperCommand):
    """A command whose ``--help`` writes flags as they are typed, and whose errors name files."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command.

        Raises:
            StorageError: the system refused a file or folder, for a reason that its user can mend.
        """
        from jax_agent_rl.errors import StorageError

        try:
            return super().invoke(ctx)
        except OSError as error:
            if error.filename is None or error.errno not in _USER_ERRORS:
                raise
            name = os.fsdecode(error.filename)
            raise StorageError(
                f"{name[:300]}: {error.strerror}; name another file or folder, or mend this one"
            ) from error

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the parameters."""
        return _as_typed(super().get_params(ctx))


class PlainGroup(TyperGroup):
    """A group of commands whose ``--help`` writes flags and arguments as they are typed."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the parameters."""
        return _as_typed(super().get_params(ctx))


def _as_typed(parameters: list[Any]) -> list[Any]:
    """Take the type from flags, which have no value, and from arguments, whose name says it."""
    for parameter in parameters:
        if parameter.param_type_name == "argument":
            parameter.display_type_rich = lambda ctx: None
        elif parameter.is_flag:
            parameter.metavar = ""
    return parameters


_VALUE_NAMES: Mapping[Any, str] = {int: "N", float: "X", str: "TEXT", Path: "PATH"}
"""What ``--help`` calls the value of an option, by its type."""


def _name_values(function: Callable[..., None]) -> None:
    """Name the arguments and values of a command that have no ``metavar``, in capitals."""
    hints = get_type_hints(function, include_extras=True)
    for name in inspect.signature(function).parameters:
        # Evaluated again, the annotation would lose the metavar that is set below.
        function.__annotations__[name] = hints[name]
        kind, info = get_args(hints[name])
        if info.metavar is not None:
            continue
        if isinstance(info, typer.models.ArgumentInfo):
            info.metavar = name.upper()
        else:
            info.metavar = _value_name(kind)


def _value_name(kind: Any) -> str | None:
    """Return the name of an option's value.

    None for a flag, which has no value, and for a choice, which shows its values.
    """
    if kind in _VALUE_NAMES:
        return _VALUE_NAMES[kind]
    if get_origin(kind) is Literal:
        return None
    for part in get_args(kind):
        name = _value_name(part)
        if name is not None:
            return name
    return None


def _format_examples(examples: Iterable[str]) -> str:
    paragraphs = ["Examples:"]
    for example in examples:
        escaped = example.replace("[", "\\[")  # or rich would read markup
        paragraphs.append(f"jax-agent-rl {escaped}")
    return "\n\n".join(paragraphs)


def settings_model(command: str) -> Any:
    """Return the root section of a command's settings; for ``simulate``, of its assumptions."""
    if command == "simulate":
        return pkgutil.resolve_name("jax_agent_rl.testing.simulate.workload:Assumptions")
    from jax_agent_rl.config.roots import root_model

    return root_model(command)


Completer = Callable[[typer.Context, str], list[tuple[str, str]]]
"""Maps the command line so far and an incomplete word to its completions, each with its help."""


def key_completer(trees: Mapping[str, str]) -> Completer:
    """Return a completer of keys as ``key=``, with descriptions, and of values after the ``=``.

    bash splits words at ``=``: the incomplete word is then the ``=`` or the value, and the key is
    the word before.

    Args:
        trees: commands with settings, by the prefix of their keys, usually empty.
    """

    def complete(context: typer.Context, incomplete: str) -> list[tuple[str, str]]:
        from jax_agent_rl.config.loading import valid_keys

        descriptions: dict[str, str] = {}
        values: dict[str, list[str]] = {}
        for prefix, command in trees.items():
            model = settings_model(command)
            for key, description in valid_keys(model).items():
                descriptions[f"{prefix}{key}"] = description
                values[f"{prefix}{key}"] = _values(model, key.split("."))

        key, equals, value_start = incomplete.partition("=")
        if equals and key:
            matches = _starting_with(value_start, values.get(key, []))
            return [(f"{key}={value}", "") for value in matches]

        previous_word = ""
        for word in _words(context):
            if word != "=":
                previous_word = word
        if previous_word in values:
            # The incomplete word is "=value", "value" or "=".
            matches = _starting_with(value_start or key, values[previous_word])
            return [(value, "") for value in matches]

        return [(f"{key}=", descriptions[key]) for key in _starting_with(incomplete, descriptions)]

    return complete


def _starting_with(start: str, words: Iterable[str]) -> list[str]:
    return [word for word in words if word.startswith(start)]


def _words(context: typer.Context) -> list[str]:
    """Return the words before the incomplete one where settings may stand."""
    words: list[str] = []
    for name in ("config", "overrides"):
        value = context.params.get(name) or ()
        if isinstance(value, list | tuple):
            words += [str(word) for word in value]
        else:
            words.append(str(value))
    return words


def file_or_key_completer(command: str) -> Completer:
    """Return a completer of keys for an argument that may be a file.

    Without matches, shells complete file names.
    """
    complete_key = key_completer({"": command})

    def complete(context: typer.Context, incomplete: str) -> list[tuple[str, str]]:
        return complete_key(context, incomplete) if incomplete else []

    return complete


def _values(model: Any, path: list[str]) -> list[str]:
    """Return the values of a key, if they are few."""
    info = getattr(model, "model_fields", {}).get(path[0])
    if info is None:
        return []

    # The types of an optional or annotated field are arguments of its annotation.
    kinds = [info.annotation, *get_args(info.annotation)]
    values: list[str] = []
    if len(path) > 1:
        for kind in kinds:
            values += _values(kind, path[1:])
        return values

    for kind in kinds:
        if get_origin(kind) is Literal:
            values += [str(value) for value in get_args(kind)]
    if not values and bool in kinds:
        return ["true", "false"]
    return values


def overrides_of(command: str) -> Any:
    """Return the argument ``KEY=VALUE …`` of a command; all runs have the one of ``train``."""
    return typer.Argument(
        metavar="KEY=VALUE",
        help="Configuration keys that override the file: " + _KEY_EXAMPLES[command],
        autocompletion=key_completer({"": command}),
    )


def config_of(command: str) -> Any:
    """Return the argument ``CONFIG`` of a command; a key may be given in its place."""
    return typer.Argument(
        metavar="CONFIG",
        help="YAML file, or the name of a recipe.",
        autocompletion=file_or_key_completer(command),
    )


_KEY_EXAMPLES = {
    "train": "trainer.steps=5 seed=1.",
    "dpo": "learner.learning_rate=1e-5.",
    "tool-server": "port=5001 workers=4.",
    "tinker-server": "port=8001 lora.rank=8.",
}
Overrides = Annotated[list[str] | None, overrides_of("train")]
# Not a path, which would fold the slashes of key=http://…
ConfigArgument = Annotated[str | None, config_of("train")]
ConfigOption = Annotated[
    str | None, typer.Option("--config", metavar="FILE", help="CONFIG, given as an option.")
]
ModelOption = Annotated[
    Path | None,
    typer.Option("--model", help="Hugging Face folder instead of the configuration's model."),
]
RunOption = Annotated[
    Path | None,
    typer.Option(
        "--run", help="Run folder: use its checkpoint and, without CONFIG, its configuration."
    ),
]
StepOption = Annotated[
    int | None,
    typer.Option("--step", help="With --run: step of the checkpoint; default the newest."),
]
EmaOption = Annotated[
    bool,
    typer.Option(
        "--ema", help="With --run: the moving average of the weights (learner.ema_decay)."
    ),
]
JsonOption = Annotated[
    bool, typer.Option("--json", help="Print one JSON object; all else goes to standard error.")
]


def console_of(json: bool) -> Console:
    """Return where a command prints for people.

    With ``--json``, it is standard error: standard output is for the object alone.
    """
    from rich.console import Console

    return Console(stderr=json)


def print_object(value: Mapping[str, Any]) -> None:
    """Print the object of ``--json``, on one line of standard output."""
    import json

    print(json.dumps(value), flush=True)


@dataclass(frozen=True, kw_only=True)
class GivenConfig:
    """The configuration of a command line.

    Attributes:
        file: YAML file or the name of a recipe; None: none was given.
        overrides: ``key=value``.
    """

    file: Path | None
    overrides: list[str]

    def required(self, command: str) -> Path:
        """Return the file.

        Raises:
            ConfigError: none was given.
        """
        from jax_agent_rl.errors import ConfigError

        if self.file is None:
            recipes = {"sft": "supervised/sft", "dpo": "supervised/dpo", "distill": "distill"}
            recipe = recipes.get(command, "quickstart")
            raise ConfigError(
                f"{command} needs a configuration: a YAML file, or a recipe by name, as in "
                f"`jax-agent-rl {command} {recipe}`; --config FILE says the same"
            )
        return self.file


def given_config(
    argument: str | None, overrides: Iterable[str] | None, option: str | None
) -> GivenConfig:
    """Return the configuration and the keys of a command line.

    The configuration is named by ``CONFIG`` or ``--config FILE``.

    Raises:
        ConfigError: several files are named.

    >>> given_config("seed=1", ["trainer.steps=5"], "quickstart")
    GivenConfig(file=PosixPath('quickstart'), overrides=['seed=1', 'trainer.steps=5'])
    """
    from jax_agent_rl.utils.config_words import split_config

    words = list(overrides or ())
    if argument is not None:
        words.insert(0, argument)
    file, keys = split_config(words, option)
    return GivenConfig(file=file, overrides=keys)


def policy_choice(
    config: str | None,
    overrides: Iterable[str] | None,
    config_file: str | None,
    *,
    model: Path | None,
    run: Path | None,
    step: int | None,
    ema: bool,
    data: str | None = None,
) -> PolicyChoice:
    """Return the policy that a command line chooses; see :func:`given_config`.

    Raises:
        ConfigError: several files are named.
    """
    from jax_agent_rl.runtime.policy_choice import PolicyChoice

    command_line = given_config(config, overrides, config_file)
    return PolicyChoice(
        config=command_line.file,
        overrides=command_line.overrides,
        model=model,
        run=run,
        step=step,
        ema=ema,
        data=data,
    )


@contextlib.contextmanager
def exit_if_interrupted() -> Iterator[None]:
    """Exit with the status of an interruption if one leaves the block.

    What it interrupted has cleaned up by then.
    """
    from jax_agent_rl.utils.shutdown import EXIT_CODE

    try:
        yield
    except (asyncio.CancelledError, KeyboardInterrupt):
        raise typer.Exit(EXIT_CODE) from None


def run_to_end(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on an event loop; Ctrl-C and SIGTERM cancel it and let it clean up.

    Raises:
        typer.Exit: it was interrupted.
    """
    from jax_agent_rl.utils.shutdown import Interruption, InterruptStage, exit_within

    async def interruptible() -> T:
        with Interruption(
            print, functools.partial(exit_within, print), stage=InterruptStage.SAMPLING
        ):
            return await main

    with exit_if_interrupted():
        return asyncio.run(interruptible())
