"""``jax-agent-rl init`` writes a task that works as it is."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from jax_agent_rl import config
from jax_agent_rl.deploy.quickstart.commands import TASK, write_task
from jax_agent_rl.errors import ConfigError
from jax_agent_rl.rewards.registry import find_reward, load_rewards
from tests.messages import raises


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made") / "trains"
    write_task(folder)
    return folder


def rows(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_every_file_is_named_in_the_readme(task: Path):
    readme = (task / "README.md").read_text()
    names = {file.name for file in task.iterdir()}
    assert names == {file.name for file in TASK.iterdir() if file.is_file()} | {
        "train.jsonl",
        "heldout.jsonl",
    }
    assert {name for name in names - {"README.md"} if name not in readme} == set()


def test_its_configuration_is_valid_and_names_its_files(task: Path):
    settings = config.load(task / "config.yaml", [])
    data = [source.path for source in (*settings.data.train, *settings.data.eval)]
    for name in (*data, settings.tools.function_tool_path, settings.reward.path):
        assert (task / str(name)).is_file(), name


def test_no_heldout_question_is_trained_on(task: Path):
    asked = [
        {row["prompt"][-1]["content"] for row in rows(task / f"{name}.jsonl")}
        for name in ("train", "heldout")
    ]
    assert all(asked)
    assert asked[0] & asked[1] == set()


def test_a_folder_that_is_not_empty_is_left_alone(tmp_path: Path):
    (tmp_path / "mine.txt").write_text("mine")
    with raises(ConfigError, value="empty"):
        write_task(tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["mine.txt"]


def test_the_calls_that_its_prompts_show_give_the_results_that_they_show(task: Path):
    source = "import tools; print(tools.MINUTES['Oak'], 2 * tools.MINUTES['Ash'])"
    result = subprocess.run(
        [sys.executable, "-c", source], cwd=task, capture_output=True, text=True, check=True
    )
    shown_results = [
        m["content"] for m in rows(task / "train.jsonl")[0]["prompt"] if m["role"] == "tool"
    ]
    assert result.stdout.split() == shown_results


def test_its_reward_pays_for_right_answers_of_its_rows(task: Path):
    load_rewards(str(task / "reward.py"))
    for row in rows(task / "heldout.jsonl"):
        reward = find_reward(row["data_source"])
        truth = row["reward_model"]["ground_truth"]
        assert reward is not None
        assert reward.compute_score(solution_str=f"= {truth}", ground_truth=truth) == 1.0
        assert reward.compute_score(solution_str="= 1000", ground_truth=truth) == 0.0
