"""With ``--json``, standard output is one object for a script; what people read goes to standard
error.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from jax_agent_rl.cli import app
from jax_agent_rl.cli.options import console_of, print_object


def with_json() -> set[str]:
    """Commands that have the option, those of groups among them."""
    names = set()
    for name, command in typer.main.get_command(app).commands.items():
        for inner, subcommand in getattr(command, "commands", {"": command}).items():
            if any("--json" in parameter.opts for parameter in subcommand.params):
                names.add(f"{name} {inner}".strip())
    return names


def test_every_command_with_a_table_or_a_report_has_it():
    reports = {
        "doctor",
        "certify",
        "conformance",
        "plan",
        "simulate",
        "diagnose",
        "eval",
        "rollout",
        "rescore",
    }
    assert with_json() >= reports | {"engines list", "engines add", "engines remove"}


@pytest.mark.parametrize("words", [["simulate", "quickstart", "assume.steps=2"], ["doctor"]])
def test_standard_output_is_the_object_alone(words: list[str]):
    result = CliRunner().invoke(app, [*words, "--json"])
    printed = json.loads(result.stdout)
    assert isinstance(printed, dict)
    assert result.stderr.strip()
    without = CliRunner().invoke(app, words)
    assert without.stdout.strip()
    assert not without.stdout.lstrip().startswith("{")


def test_a_list_of_engines_is_an_object_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    answer = {"policy_version": 3, "engines": [{"name": "a", "policy_version": 3, "requests": 0}]}

    async def asked(folder: Path, path: str, body: Any) -> dict[str, Any]:
        return answer

    monkeypatch.setattr("jax_agent_rl.rollout.http.membership.command_run", asked)
    assert (
        json.loads(CliRunner().invoke(app, ["engines", "list", str(tmp_path), "--json"]).stdout)
        == answer
    )
    assert "version 3" in CliRunner().invoke(app, ["engines", "list", str(tmp_path)]).stdout


def test_the_console_leaves_standard_output_to_the_object(capsys: pytest.CaptureFixture[str]):
    console_of(True).print("progress")
    print_object({"a": "é"})
    said = capsys.readouterr()
    assert json.loads(said.out) == {"a": "é"}
    assert said.err.strip() == "progress"
