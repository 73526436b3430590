"""Tasks of Inspect, unmodified, with the package itself: solver, tools and scorers are the task's.

Its dependencies do not fit this project's; the tests are skipped where it is not installed.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

pytest.importorskip("inspect_ai")

from jax_agent_rl.agents import get_agent
from jax_agent_rl.agents.inspect_tasks import task_rows
from jax_agent_rl.cli import app
from jax_agent_rl.config import DataSource
from jax_agent_rl.data.dataset import open_dataset
from jax_agent_rl.errors import ConfigError, TrajectoryError
from jax_agent_rl.rewards import score
from jax_agent_rl.types import Trajectory
from tests.agent_testbed import AgentHarness, assert_token_exact
from tests.messages import assert_message, raises
from tests.unit.docs.pages import DOCS, write_files

TASKS = '''
import anyio
from inspect_ai import Task, task
from inspect_ai.dataset import MemoryDataset, Sample
from inspect_ai.model import get_model
from inspect_ai.scorer import Score, Target, accuracy, includes, match, mean, scorer
from inspect_ai.scorer import model_graded_qa
from inspect_ai.solver import TaskState, generate, multiple_choice, solver, system_message
from inspect_ai.solver import use_tools
from inspect_ai.tool import tool
from inspect_ai.util import store

@tool
def add():
    async def execute(a: int, b: int) -> str:
        """Adds two numbers.

        Args:
            a: the first number
            b: the second number
        """
        store().set("calls", store().get("calls", 0) + 1)
        return str(a + b)
    return execute

@scorer(metrics={"calls": [mean()], "right": [accuracy()]})
def counted():
    async def score(state: TaskState, target: Target) -> Score:
        right = target.text in state.output.completion
        return Score(value={"calls": state.store.get("calls", 0), "right": "C" if right else "I"})
    return score

SAMPLES = [Sample(input=f"what is {n} + 2 ?", target=str(n + 2), id=f"s{n}") for n in (1, 5)]

@task
def sums(digits: int = 1):
    return Task(
        dataset=MemoryDataset(SAMPLES),
        solver=[system_message("You add."), use_tools(add()), generate()],
        scorer=[includes(), counted()],
    )

@task
def choices():
    sample = Sample(input="Which is even?", choices=["one", "two"], target="B")
    return Task(dataset=[sample], solver=multiple_choice(), scorer=match(location="any"))

@task
def short():
    return Task(dataset=SAMPLES, solver=[use_tools(add()), generate()], scorer=includes(),
                message_limit=2)

@task
def limited(limit: str, value: int):
    return Task(dataset=SAMPLES, solver=[use_tools(add()), generate()], scorer=includes(),
                **{limit: value})

@solver
def hangs():
    async def solve(state, generate):
        state = await generate(state)
        await anyio.sleep_forever()
    return solve

@task
def hanging():
    return Task(dataset=SAMPLES, solver=hangs(), scorer=includes(), working_limit=1)

@task
def graded():
    return Task(dataset=SAMPLES, solver=generate(), scorer=model_graded_qa())

@scorer(metrics=[mean()])
def grader_name():
    async def score(state: TaskState, target: Target) -> Score:
        return Score(value=float(get_model(role="grader").name == "model"))
    return score

@task
def named_grader():
    return Task(dataset=SAMPLES, solver=generate(), scorer=grader_name())

@task
def sandboxed():
    return Task(dataset=SAMPLES, solver=generate(), scorer=includes(), sandbox="docker")

@task
def unscored():
    return Task(dataset=SAMPLES, solver=generate())

@task
def priced():
    return Task(dataset=SAMPLES, solver=generate(), scorer=includes(), cost_limit=1.0)
'''


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    file = tmp_path / "my_tasks.py"
    file.write_text(TASKS)
    return file


def stage(script: Sequence[str]) -> AgentHarness:
    return AgentHarness(get_agent("inspect"), list(script))


async def played(stage: AgentHarness, row: dict[str, Any]) -> Trajectory:
    try:
        return await score(await stage.run(row))
    finally:
        await stage.agent.close()


async def test_a_task_is_solved_with_its_tools_and_scored_by_its_scorers(tasks: Path):
    rows = list(task_rows(f"{tasks}@sums", {"digits": 1}))
    assert [row["reward_model"]["ground_truth"] for row in rows] == ["3", "7"]
    assert rows[1]["prompt"] == [{"role": "user", "content": "what is 5 + 2 ?"}]
    harness = stage(['<call> add {"a": 5, "b": 2} </call>', "It is 7"])
    trajectory = await played(harness, rows[1])
    assert trajectory.reward == 1.0
    assert trajectory.reward_parts == {
        "includes": 1.0,
        "counted/calls": 1.0,
        "counted/right": 1.0,
        "scored": 1.0,
    }
    assert_token_exact(trajectory, harness.backend.requests)
    assert trajectory.num_turns == 2
    text = harness.codec.decode(trajectory.prompt_ids)
    assert "You add." in text


async def test_samples_side_by_side_have_stores_of_their_own(tasks: Path):
    rows = list(task_rows(f"{tasks}@sums", {}))
    call = '<call> add {"a": 1, "b": 2} </call>'
    stages = [stage([call, call, "It is 3"]), stage([call, "It is 7"])]
    first, second = await asyncio.gather(*map(played, stages, rows))
    assert first.reward_parts["counted/calls"] == 2.0
    assert second.reward_parts["counted/calls"] == 1.0


async def test_rows_written_to_a_file_are_rows_of_a_data_set(tasks: Path, tmp_path: Path):
    rows = list(task_rows(f"{tasks}@choices", {}))
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (row,) = open_dataset((DataSource(path=str(file)),))
    trajectory = await played(stage(["ANSWER: B"]), dict(row))
    assert trajectory.reward == 1.0
    wrong = await played(stage(["ANSWER: A"]), dict(row))
    assert wrong.reward == 0.0


def test_the_command_writes_rows_and_names_what_is_wrong(tasks: Path, tmp_path: Path):
    out = tmp_path / "new" / "rows.jsonl"
    words = ["inspect-rows", f"{tasks}@sums", "digits=2", "--out", str(out)]
    assert CliRunner().invoke(app, words).exit_code == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["extra_info"]["inspect"]["sample"] for row in rows] == [0, 1]
    assert rows[0]["extra_info"]["inspect"]["arguments"] == '{"digits": 2}'
    for wrong in (["digit=2"], ["digits"], ["digits={"]):
        result = CliRunner().invoke(app, [*words[:2], *wrong, "--out", str(tmp_path / "x.jsonl")])
        assert isinstance(result.exception, ConfigError)
        assert_message(result.exception, value=wrong[0].partition("=")[0])
    assert not (tmp_path / "x.jsonl").exists()


async def test_the_task_of_the_page_is_solved(tmp_path: Path):
    write_files(DOCS / "write" / "servers.md", tmp_path)
    rows = list(task_rows(f"{tmp_path / 'arithmetic.py'}@arithmetic", {"highest": 5}))
    assert len(rows) == 5
    script = ['<call> add {"a": 4, "b": 2} </call>', "It is 6"]
    trajectory = await played(stage(script), rows[4])
    assert trajectory.reward == 1.0
    assert [turn["role"] for turn in trajectory.messages[-3:]] == ["assistant", "tool", "assistant"]


async def test_a_sample_that_is_another_one_than_the_rows_is_not_played(tasks: Path):
    row = next(task_rows(f"{tasks}@sums", {}))
    row["prompt"] = [{"role": "user", "content": "what is 9 + 2 ?"}]
    with raises(TrajectoryError, value="what is 1 + 2 ?", fix="inspect-rows"):
        await played(stage(["It is 3"]), row)


async def test_a_limit_of_the_task_ends_the_solver_and_what_was_said_is_scored(tasks: Path):
    row = next(task_rows(f"{tasks}@short", {}))
    trajectory = await played(stage(['<call> add {"a": 1, "b": 2} </call>', "It is 3"]), row)
    assert trajectory.num_turns == 1
    assert trajectory.reward_parts == {"includes": 0.0, "scored": 1.0}


@pytest.mark.parametrize(
    ("limit", "value", "turns"),
    [
        ("turn_limit", 1, 2),  # Inspect ends a sample with the turn that is one too many
        ("token_limit", "output:1", 1),
    ],
)
async def test_every_limit_of_a_task_counts(tasks: Path, limit: str, value: Any, turns: int):
    row = next(task_rows(f"{tasks}@limited", {"limit": limit, "value": value}))
    call = '<call> add {"a": 1, "b": 2} </call>'
    trajectory = await played(stage([call, call, call, "It is 3"]), row)
    assert trajectory.num_turns == turns


async def test_a_limit_on_working_time_ends_a_solver_that_hangs(tasks: Path):
    row = next(task_rows(f"{tasks}@hanging", {}))
    trajectory = await played(stage(["It is 3"]), row)
    assert trajectory.reward_parts == {"includes": 1.0, "scored": 1.0}


async def test_the_policy_does_not_grade_itself(tasks: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("INSPECT_EVAL_MODEL", raising=False)
    row = next(task_rows(f"{tasks}@graded", {}))
    with raises(TrajectoryError, value="No model specified"):
        await played(stage(["It is 3", "GRADE: C"]), row)
    row = next(task_rows(f"{tasks}@named_grader", {}))
    row["extra_info"]["inspect"]["model_roles"] = {"grader": "mockllm/model"}
    assert (await played(stage(["It is 3"]), row)).reward == 1.0


@pytest.mark.parametrize(
    ("name", "named"),
    [
        ("sandboxed", {"value": "needs a sandbox", "fix": "jax-agent-rl serve"}),
        ("unscored", {"value": "no scorer"}),
        ("priced", {"value": "limit on cost"}),
        ("missing", {"value": "missing"}),
    ],
)
def test_a_task_that_cannot_run_here_is_refused(tasks: Path, name: str, named: dict[str, Any]):
    with raises(ConfigError, **named):
        list(task_rows(f"{tasks}@{name}", {}))
