"""``jax-agent-rl config`` and ``import-config``: keys, and configurations of verl."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from jax_agent_rl.cli.options import (
    HELP_OPTIONS,
    ConfigArgument,
    ConfigOption,
    Overrides,
    Panel,
    add_group,
    command,
    given_config,
    settings_model,
)

if TYPE_CHECKING:
    from rich.console import Console

    from jax_agent_rl.config.reference import KeyInfo


app = typer.Typer(
    context_settings=HELP_OPTIONS,
    help="Explain keys, show a resolved configuration, print the schema for editors.",
    no_args_is_help=True,
)

CommandName = Literal["train", "sft", "dpo", "tool-server", "tinker-server"]
CommandOption = Annotated[CommandName, typer.Option("--command", help="Whose configuration.")]


def register(parent: typer.Typer) -> None:
    """Add ``import-config``, and the group ``config``."""
    command(
        parent,
        Panel.CHECK,
        "import-config verl run.sh > mine.yaml",
        "import-config verl base.yaml run.sh --out mine.yaml",
    )(import_config)
    add_group(
        parent,
        app,
        Panel.CHECK,
        "config explain rollout.group_size",
        "config show lora trainer.steps=5",
        name="config",
    )


def complete_path(context: typer.Context, incomplete: str) -> list[tuple[str, str]]:
    """Complete the keys and sections of the chosen tree."""
    from jax_agent_rl.config.reference import list_keys

    keys = list_keys(settings_model(context.params.get("command") or "train"))
    return [(path, key.description) for path, key in keys.items() if path.startswith(incomplete)]


@command(
    app,
    Panel.CHECK,
    "config explain",
    "config explain learner.lora",
    "config explain group_size",
    name="explain",
)
def explain_key(
    key: Annotated[
        str | None,
        typer.Argument(
            help="A key or a section: group_size, learner.lora.", autocompletion=complete_path
        ),
    ] = None,
    command: CommandOption = "train",
) -> None:
    """Explain a key: what it does, accepted values, default.

    For a section, list its keys; by default, all sections.
    """
    from rich.console import Console

    from jax_agent_rl.config.reference import find, list_keys

    keys = list_keys(settings_model(command))
    console = Console()
    if key is None:
        _print_section("", keys, console)
        return
    for match in find(key, keys):
        _print_key(match, keys, console)


@command(app, Panel.CHECK, "config show quickstart seed=1 > mine.yaml")
def show(
    config: ConfigArgument = None,
    overrides: Overrides = None,
    config_file: ConfigOption = None,
) -> None:
    """Print a configuration as a usable YAML file: base, overrides and all defaults filled in."""
    import yaml

    from jax_agent_rl.config import load

    command_line = given_config(config, overrides, config_file)
    settings = load(command_line.required("config show"), command_line.overrides)
    yaml.safe_dump(
        settings.model_dump(mode="json"),
        sys.stdout,
        sort_keys=False,
        allow_unicode=True,
        width=120,
    )


@command(app, Panel.CHECK, "config schema > configs/schema.json")
def schema(command: CommandOption = "train") -> None:
    """Print the JSON Schema with which editors complete and check YAML files."""
    import json

    from jax_agent_rl.config.reference import editor_schema

    json_schema = editor_schema(settings_model(command), title=f"jax-agent-rl {command}")
    print(json.dumps(json_schema, indent=1, ensure_ascii=False))


@command(app, Panel.CHECK, "config reference > docs/config.md")
def reference() -> None:
    """Print every key as Markdown: docs/config.md."""
    from jax_agent_rl.config.reference import reference

    server = "Keys of `jax-agent-rl {}`, and of the YAML file that it may be given."
    pages = {
        "train": (
            "A run",
            "Keys of `jax-agent-rl train` and of every command that takes a recipe.",
        ),
        "sft": ("Supervised fine-tuning", "Keys of `jax-agent-rl sft`."),
        "dpo": ("Preferences", "Keys of `jax-agent-rl dpo`."),
        "tool-server": ("The tool server", server.format("tool-server")),
        "tinker-server": ("The Tinker server", server.format("tinker-server")),
    }
    print(reference([(*texts, settings_model(name)) for name, texts in pages.items()]), end="")


def import_config(
    framework: Annotated[
        Literal["verl"], typer.Argument(help="Whose settings: verl's, or verl-tool's.")
    ],
    files: Annotated[
        list[Path],
        typer.Argument(
            help="Shell scripts, overrides or YAML files; a later file takes precedence."
        ),
    ],
    out: Annotated[
        Path | None, typer.Option("--out", help="File to write; default standard output.")
    ] = None,
) -> None:
    """Translate another framework's settings into a configuration, and list what needs a decision.

    Nothing in the files is run. What was not translated, and why, is listed on standard error.
    """
    from jax_agent_rl.config.from_verl import as_yaml, import_verl
    from jax_agent_rl.config.overrides_script import read_overrides
    from jax_agent_rl.utils.files import write_atomically
    from jax_agent_rl.utils.text import printable

    verl_settings = {}
    for file in files:
        verl_settings |= read_overrides(file)
    translation = import_verl(verl_settings)
    text = as_yaml(translation)
    if out is None:
        print(text, end="")
    else:
        write_atomically(out, text, message="--out {file} could not be written ({reason})")

    leftovers = translation.leftovers
    sections = {
        "Needs a decision": leftovers.get("choice", []),
        "Unknown here": leftovers.get("unknown", []),
        "Has no effect with the other settings": leftovers.get("no effect", []),
        "Has no meaning here": leftovers.get("no meaning", []),
        "Is the same as the default here": leftovers.get("same", []),
        "Defaults of verl's that differ from ours, and were written": translation.defaults,
    }
    for heading, lines in sections.items():
        if not lines:
            continue
        print(f"\n{heading}:", file=sys.stderr)
        for line in lines:
            print(f"  {printable(line, one_line=True)}", file=sys.stderr)


def _print_key(key: KeyInfo, keys: Mapping[str, KeyInfo], console: Console) -> None:
    """Print one key, or a section with its keys."""
    from rich.markup import escape
    from rich.padding import Padding
    from rich.table import Table

    console.print(f"[bold]{escape(key.path)}[/]", highlight=False)
    console.print(Padding(escape(key.description), (0, 2)), highlight=False)
    if not key.is_section or key.default is not None:
        default = "none, it must be set"
        if key.default is not None:
            default = escape(key.default)
        facts = Table.grid(padding=(0, 2))
        facts.add_row("type", escape(key.type))
        facts.add_row("default", default)
        console.print(Padding(facts, (0, 2)))

    # When the key has an effect: its own condition, and the conditions of sections around it.
    parts = key.path.split(".")
    for end in range(1, len(parts) + 1):
        part = keys[".".join(parts[:end])]
        if part.used_only:
            condition = f"used only {part.used_only}"
            if part is not key:
                condition = f"{part.path}: {condition}"
            console.print(Padding(escape(condition), (0, 2)), highlight=False)

    if key.is_section:
        _print_section(key.path, keys, console)


def _print_section(path: str, keys: Mapping[str, KeyInfo], console: Console) -> None:
    """Print the keys directly in a section; the empty path is the root."""
    from rich.markup import escape
    from rich.padding import Padding
    from rich.table import Table

    table = Table("key", "default", "what it does", box=None, pad_edge=False, header_style="bold")
    for key in keys.values():
        if key.section == path:
            name = key.path.rpartition(".")[2]
            default = key.default or ("(section)" if key.is_section else "(required)")
            table.add_row(escape(name), escape(default), escape(key.description))
    console.print(Padding(table, (1, 2)))
