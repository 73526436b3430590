"""The command line teaches: every command has examples, and keys complete."""

import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from jax_agent_rl.cli import app
from jax_agent_rl.cli.options import Panel, given_config
from jax_agent_rl.config import Config, build, load
from jax_agent_rl.config.commands import (
    DpoConfig,
    SftConfig,
    TinkerServerSettings,
    ToolServerSettings,
)
from jax_agent_rl.config.loading import load_tree, valid_keys
from jax_agent_rl.testing.simulate.workload import load_assumptions
from jax_agent_rl.tool_server.plugins.registry import tool_classes

ROOT = Path(__file__).parents[2]
REQUIRED = {
    "run_dir": "run",
    "model": {"path": "model"},
    "data": {"train": "t.jsonl", "eval": "h.jsonl"},
}
COMMANDS = sorted(typer.main.get_command(app).commands)


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_of_every_command_explains_it_and_ends_with_examples(name: str):
    result = CliRunner().invoke(app, [name, "--help"], env={"COLUMNS": "200"})
    assert result.exit_code == 0
    assert "Examples:" in result.output
    assert f"jax-agent-rl {name}" in result.output.partition("Examples:")[2]
    command = typer.main.get_command(app).commands[name]
    assert command.rich_help_panel in set(Panel), f"{name} is in no panel"
    assert all(p.help for p in command.params), [p.name for p in command.params if not p.help]


@pytest.mark.parametrize(
    "words", [[], *([name] for name in COMMANDS), ["config", "explain"], ["engines", "list"]]
)
def test_help_has_a_short_name_everywhere(words: list[str]):
    short = CliRunner().invoke(app, [*words, "-h"])
    long = CliRunner().invoke(app, [*words, "--help"])
    assert short.exit_code == long.exit_code == 0
    assert short.output == long.output and "--help" in short.output


def test_the_version_is_that_of_the_package():
    result = CliRunner().invoke(app, ["--version"])
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert result.exit_code == 0
    assert result.output.split()[:2] == ["jax-agent-rl", project["version"]]


def test_examples_are_shown_with_their_brackets():
    result = CliRunner().invoke(app, ["tool-server", "--help"], env={"COLUMNS": "200"})
    assert "tools=[python" in result.output


def examples() -> list[str]:
    """Return the examples of every command and group, without ``jax-agent-rl`` and redirections."""
    group = typer.main.get_command(app)
    groups = [command for command in group.commands.values() if hasattr(command, "commands")]
    commands = [
        *group.commands.values(),
        *(command for command_group in groups for command in command_group.commands.values()),
    ]
    lines = [
        line for command in commands for line in command.epilog.replace("\\[", "[").splitlines()
    ]
    return [
        line.removeprefix("jax-agent-rl ").partition(" > ")[0]
        for line in lines
        if line.startswith("jax-agent-rl")
    ]


def understood(example: str) -> tuple[str, dict[str, Any]]:
    """The command an example calls and its arguments, as the command line reads them."""
    command = typer.main.get_command(app)
    name, *words = shlex.split(example)
    command = command.commands[name]
    if hasattr(command, "commands") and words:
        command = command.commands[words.pop(0)]
    return name, command.make_context(name, words).params


@pytest.mark.parametrize("example", examples())
def test_examples_name_recipes_and_settings_that_there_are(
    example: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(ROOT)
    name, arguments = understood(example)
    chosen = given_config(
        arguments.get("config"), arguments.get("overrides"), arguments.get("config_file")
    )
    if name == "tool-server":
        tool_classes(load_tree(ToolServerSettings, chosen.file, chosen.overrides))
        return
    if name == "tinker-server":
        load_tree(TinkerServerSettings, chosen.file, chosen.overrides)
        return
    if name in ("sft", "dpo"):
        load_tree({"sft": SftConfig, "dpo": DpoConfig}[name], chosen.file, chosen.overrides)
        return
    mine = [item for item in chosen.overrides if not item.startswith("assume.")]
    if chosen.file and chosen.file.name != "my.yaml":  # the reader's own
        load(chosen.file, mine)
    else:
        build(REQUIRED, mine)
    load_assumptions(
        None, [item.removeprefix("assume.") for item in chosen.overrides if item not in mine]
    )


@pytest.mark.parametrize("example", examples())
def test_examples_work_on_what_the_quickstart_leaves(example: str):
    """Its checkpoints are those of the recipe's steps; rows are held out before the first and after
    the last.
    """
    trainer = load("quickstart").trainer
    checkpoints = {
        *range(trainer.checkpoint_every, trainer.steps + 1, trainer.checkpoint_every),
        trainer.steps,
    }
    name, arguments = understood(example)
    run = arguments.get("run")
    if not isinstance(run, Path) or name == "engines":  # which is about a run that is not over
        return
    assert run == Path(load("quickstart").run_dir) or arguments.get("adapter"), (
        "there is no such run"
    )
    if name == "view":
        assert (arguments["step"] or trainer.steps) in {0, trainer.steps}
        assert (arguments["min_step"] or 0) <= trainer.steps
    else:
        assert {arguments.get("step"), arguments.get("version")} <= {None, *checkpoints}


def test_help_loads_nothing_that_commands_need():
    program = (
        "import sys, jax_agent_rl.cli;"
        " print(*(n for n in sys.modules if n in ('pydantic', 'yaml', 'numpy')))"
    )
    loaded = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    ).stdout.split()
    assert loaded == []


def in_bash(line: str) -> list[str]:
    """What bash is offered at the end of a command line; it cuts words at ``=``."""
    words = ["jax-agent-rl", *re.findall(r"[^\s=]+|=", line), *([""] if line.endswith(" ") else [])]
    return offered("complete_bash", COMP_WORDS="\n".join(words), COMP_CWORD=str(len(words) - 1))


def in_fish(line: str) -> list[str]:
    """The same for fish, which leaves words whole, as zsh does."""
    line = f"jax-agent-rl {line}"
    return offered(
        "complete_fish", _TYPER_COMPLETE_ARGS=line, _TYPER_COMPLETE_FISH_ACTION="get-args"
    )


def offered(instruction: str, **environment: str) -> list[str]:
    """Asks as the shell's script does that ``--install-completion`` writes."""
    environment |= {"_JAX_AGENT_RL_COMPLETE": instruction}
    result = CliRunner().invoke(app, [], env=environment, prog_name="jax-agent-rl")
    assert result.exit_code == 0, result.output
    return [line.partition("\t")[0] for line in result.output.splitlines() if line]


def test_every_key_of_the_configuration_completes():
    assert in_bash("train c.yaml ") == [f"{key}=" for key in valid_keys(Config)]


@pytest.mark.parametrize(
    "words",
    [
        "train c.yaml",
        "eval",
        "eval c.yaml",
        "eval --run runs/x",
        "rollout",
        "doctor",
        "serve",
        "rollout-server --config c.yaml",
        "simulate c.yaml",
        "plan --config c.yaml --topology v5e:4x4",
        "config show c.yaml",
    ],
)
def test_keys_and_values_complete_wherever_they_may_stand(words: str):
    for complete in (in_bash, in_fish):
        assert complete(f"{words} rollout.back") == ["rollout.backend="]
    assert in_fish(f"{words} rollout.backend=v") == ["rollout.backend=vllm"]
    assert in_bash(f"{words} rollout.backend=v") == ["vllm"]
    assert in_bash(f"{words} seed=1 rollout.backend=") == ["jetstream", "vllm", "sglang", "remote"]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("config explain rollout.back", ["rollout.backend"]),
        ("config explain --command tool-server wor", ["workers"]),
        ("config explain learner.lo", ["learner.lora"]),
        ("tool-server wor", ["workers="]),
        ("tool-server port=1 sandbox=", ["bubblewrap", "unsafe_local"]),
        ("simulate c.yaml assume.st", ["assume.steps="]),
        ("view runs/x --color l", ["logprob"]),
        ("view --sort w", ["worst"]),
        ("view --split h", ["heldout"]),
        ("view --stop-reason e", ["eos"]),
        ("view --finish-reason user", ["user_done"]),
        ("export runs/x out --dtype b", ["bfloat16"]),
        ("train c.yaml learner.lora.quantize=n", ["none", "nf4"]),
        ("train c.yaml rollout.deterministic=", ["true", "false"]),
    ],
)
def test_what_has_names_of_its_own_completes(line: str, words: list[str]):
    completions = in_bash(line)
    assert [word for word in completions if not word.startswith("learner.lora.")] == words


@pytest.mark.parametrize("line", ["eval ", "eval configs/qu", "doctor "])
def test_where_a_file_may_stand_the_shell_completes_it(line: str):
    assert in_bash(line) == []  # then its script falls back to file names


def test_a_key_with_any_value_has_none_to_offer():
    assert (
        in_fish("eval trainer.steps=")
        == in_fish("eval no.such.key=")
        == in_fish("eval seed.deeper=")
        == []
    )
