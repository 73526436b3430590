"""The command line teaches: every command has examples, and keys complete."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import typer
from typer.testing import CliRunner

from jax_agent_rl.cli import app
from jax_agent_rl.commandline import Panel, complete_key, config_or_key
from jax_agent_rl.config import Config
from jax_agent_rl.config_tree import valid_keys

COMMANDS = sorted(typer.main.get_command(app).commands)


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_of_every_command_explains_it_and_ends_with_examples(name: str):
    result = CliRunner().invoke(app, [name, "--help"], env={"COLUMNS": "200"})
    assert result.exit_code == 0
    assert "Examples:" in result.output and f"jax-agent-rl {name}" in result.output.partition("Examples:")[2]
    command = typer.main.get_command(app).commands[name]
    assert command.rich_help_panel in set(Panel), f"{name} is in no panel"
    assert all(p.help for p in command.params), [p.name for p in command.params if not p.help]


def test_examples_are_shown_with_their_brackets():
    result = CliRunner().invoke(app, ["tool-server", "--help"], env={"COLUMNS": "200"})
    assert "tools=[python" in result.output


def test_examples_of_recipes_name_files_that_are_there():
    root = Path(__file__).parents[2]
    for name in COMMANDS:
        epilog = typer.main.get_command(app).commands[name].epilog
        for word in epilog.split():
            if word.startswith("configs/"):
                assert (root / word).is_file(), f"{name}: {word}"


def test_help_loads_nothing_that_commands_need():
    program = "import sys, jax_agent_rl.cli; print(*(n for n in sys.modules if n in ('pydantic', 'yaml', 'numpy')))"
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    assert loaded == []


def completed(incomplete: str, *before: str) -> list[str]:
    context = SimpleNamespace(params={"overrides": list(before)})
    return [value for value, _ in complete_key(context, incomplete)]


def test_every_key_of_the_configuration_completes():
    assert completed("") == [f"{key}=" for key in valid_keys(Config)]
    assert completed("rollout.back") == ["rollout.backend="]


def test_after_the_key_its_values_complete_in_either_way_shells_cut_words():
    assert completed("rollout.backend=v") == ["rollout.backend=vllm"]  # zsh, fish
    assert completed("v", "seed=1", "rollout.backend", "=") == ["vllm"]  # bash
    assert completed("", "rollout.backend") == ["jetstream", "vllm", "remote"]
    assert completed("learner.lora.quantize=n") == ["learner.lora.quantize=none", "learner.lora.quantize=nf4"]
    assert completed("rollout.deterministic=") == ["rollout.deterministic=true", "rollout.deterministic=false"]


def test_a_key_with_any_value_has_none_to_offer():
    assert completed("trainer.steps=") == completed("no.such.key=") == completed("seed.deeper=") == []


def test_a_key_may_stand_where_a_file_may_be_left_out(tmp_path: Path):
    odd = tmp_path / "a=b.yaml"
    odd.write_text("")
    url = "agent.tool_server_url=http://localhost:5000"
    assert config_or_key(url, ["a.b=2"]) == (None, [url, "a.b=2"])
    assert config_or_key("missing.yaml", None) == (Path("missing.yaml"), [])
    assert config_or_key(str(odd), None) == (odd, [])
    assert config_or_key(None, None) == (None, [])
