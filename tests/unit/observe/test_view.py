"""Trajectories in the terminal: which are shown and how, what makes no sense, and folders that are damaged."""

import json
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from jax_agent_rl.cli import app
from jax_agent_rl.errors import JaxAgentRLError
from tests.report_runs import make_run


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """Three steps of four trajectories; its tokenizer is gone."""
    return make_run(tmp_path_factory.mktemp("view") / "run")


def view(run: Path, *options: str) -> Result:
    return CliRunner().invoke(app, ["view", str(run), *options], env={"COLUMNS": "200"})


def shown(run: Path, *options: str) -> list[str]:
    """Ids of the trajectories that are shown."""
    result = view(run, "--limit", "99", *options)
    assert result.exit_code == 0, result.output
    titles = (line for line in result.stdout.splitlines() if line.startswith("╭"))
    return [title.split()[1] for title in titles]


@pytest.mark.parametrize(
    ("options", "ids"),
    [
        ("--text [900][901]", ["train-1-0-3", "train-2-0-3", "train-3-0-3"]),
        ("--text TRAIN-2-0-1", ["train-2-0-1"]),
        ("--min-step 2 --max-step 2 --max-reward 0", ["train-2-0-1", "train-2-0-2"]),
        ("--min-step 3 --tool-error timeout", ["train-3-0-2"]),
        ("--finish-reason response_length --step 1", ["train-1-0-3"]),
    ],
)
def test_it_filters_as_the_page_does(run, options, ids):
    assert shown(run, *options.split()) == ids


def test_a_limit_below_one_is_refused(run):
    assert len(shown(run)) == 12
    for limit in ("0", "-1"):
        result = view(run, "--limit", limit)
        assert result.exit_code == 2 and "--limit" in result.output


def test_an_error_no_tool_had_is_a_message_with_those_they_had(run):
    error = view(run, "--tool-error", "foo").exception
    assert isinstance(error, JaxAgentRLError) and "'foo'" in str(error) and "any, none, timeout" in str(error)


@pytest.mark.parametrize("options", ["--sort worst", "--color gap", "--whole-prompt"])
def test_what_is_of_no_effect_on_trees_is_refused(run, options):
    assert view(run, "--tree").exit_code == 0
    error = view(run, "--tree", *options.split()).exception
    assert isinstance(error, JaxAgentRLError) and options in str(error)


def test_a_gap_between_engine_and_learner_is_coloured_where_it_is_known():
    from jax_agent_rl.observe.trajectories import COLOURS

    record = {"rollout_logprobs": [-1.0] * 5, "old_logprobs": [-1.001, -1.05, -0.5, -3.0, None]}
    gap = COLOURS["gap"]
    assert [gap(record, at) for at in range(5)] == ["green", "yellow", "dark_orange", "bold red", "dim"]
    assert gap({"rollout_logprobs": [-1.0]}, 0) == "dim"


def test_a_damaged_folder_is_shown_as_far_as_it_can_be_read(tmp_path):
    run = make_run(tmp_path / "run", steps=1)
    whole = (run / "trajectories.jsonl").read_bytes()
    (run / "trajectories.jsonl").write_bytes(b'{"step": 1, \n\xff\xfe\n[]\n{"step": 1}\n' + whole + whole[:100])
    (run / "config.json").write_text("{")
    result = view(run)
    assert result.exit_code == 0 and "[4][2]" in result.stdout
    for said in ("config.json cannot be read", "shown as ids", "trajectories.jsonl: 4 (cut off or damaged)"):
        assert said in result.stderr
    (run / "config.json").unlink()
    assert "note: config.json" in view(run).stderr


def test_notes_do_not_steer_the_terminal(tmp_path):
    run = make_run(tmp_path / "run", steps=1)
    (run / "config.json").write_text(json.dumps({"model": {"path": "\x1b[2Jnowhere"}}))
    assert "\\x1b[2Jnowhere" in view(run).stderr and "\x1b" not in view(run).stderr
