"""Recorded trajectories, scored again: what a reward function reads of them is what it read in the
run, failures are counted, and a new table is whole.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
from typer.testing import CliRunner, Result

from jax_agent_rl.cli import app
from jax_agent_rl.config import build
from jax_agent_rl.errors import ConfigError, DataError
from jax_agent_rl.evaluate.atif import write_atif
from jax_agent_rl.evaluate.export import Target, read_recorded, read_table, records, write
from jax_agent_rl.evaluate.journal import Journal
from jax_agent_rl.observe.run_dir import RunDir, restore_trajectory, trajectory_record
from jax_agent_rl.rewards import registry
from jax_agent_rl.types import Group, Trajectory
from tests.messages import assert_message
from tests.trajectories import call, trajectory

REWARD = """
from jax_agent_rl.rewards import register_reward

@register_reward("sums")
def longer_pays(solution_str, ground_truth):
    if solution_str == "none":
        raise ValueError("no answer")
    return {"score": float(len(solution_str)), "right": float(solution_str == ground_truth)}
"""
READS_ALL = """
from jax_agent_rl.rewards import register_reward

@register_reward("sums")
def reads_all(num_turns, turn_scores, tool_rewards, tool_scores, role, level, hint, solution_str):
    seen = [num_turns, turn_scores, tool_rewards, tool_scores, role, level, hint, solution_str]
    assert seen == [2, [0.25, -1.0], [0.5], {"shop": 2.0}, "buyer", 3, "none", "4"], seen
    return 1.0
"""


@pytest.fixture(autouse=True)
def own_registry(monkeypatch: pytest.MonkeyPatch):
    """Registrations of one test do not reach another."""
    monkeypatch.setattr(registry, "REWARDS", dict(registry.REWARDS))
    monkeypatch.setattr(registry, "_FROM_FILES", {})


def member(answer: str, *, index: int, group: str = "train-1-0", reward: float = 1.0) -> Trajectory:
    messages = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": answer}]
    recorded = trajectory([1, 2], [5, 6], index=index, group=group, messages=messages)
    row = {"data_source": "sums", "reward_model": {"ground_truth": "4"}, "extra_info": {"level": 3}}
    return replace(recorded, row=row, reward=reward)


def member_of_two_turns() -> Trajectory:
    """One of whose turns has no ids between it and the next, with everything a reward may read."""
    recorded = member("4", index=0)
    first, second = trajectory([1], [5, 30, 6], mask=[1, 0, 1]).turns
    turns = [
        replace(first, appended_ids=(), score=0.25, tool_calls=(call(reward=0.5),)),
        replace(second, score=-1.0),
    ]
    messages = (
        {"role": "user", "content": "2+2?"},
        {"role": "assistant", "content": "hm"},
        {"role": "assistant", "content": "4"},
    )
    return Trajectory.from_turns(
        prompt_ids=(1,),
        turns=turns,
        trajectory_id="train-1-0-0/buyer",
        group_id=recorded.group_id,
        agent_name=recorded.agent_name,
        finish_reason=recorded.finish_reason,
        messages=messages,
        row={**recorded.row, "hint": "none", "prompt": []},
        tool_scores={"shop": 2.0},
        role="buyer",
    )


def run_folder(path: Path, *steps: list[Trajectory]) -> Path:
    """A run that recorded these trajectories, a step each."""
    tree = {"run_dir": str(path), "model": {"path": "m"}, "data": {"train": "t"}}
    folder = RunDir(path)
    folder.write_json(folder.config, build(tree).model_dump(mode="json"))
    for number, trajectories in enumerate(steps, 1):
        folder.add_trajectories(number, "train", trajectories)
    return path


def table(path: Path, *trajectories: Trajectory) -> Path:
    """A table of ``rollout`` with these trajectories of one prompt."""
    target = Target.from_path(path)
    group = Group(group_id=trajectories[0].group_id, trajectories=trajectories)
    with Journal(target.journal, {}) as journal:
        journal.add(0, records(group, 0), {})
        write(target, journal, {"policy": "p", "data": "d", "kept": 1, "started": 1})
    return path


def rescore(source: Path, *words: str, code: str = REWARD, workers: int = 0) -> Result:
    reward = source.parent / "new_reward.py"
    reward.write_text(code)
    keys = [f"reward.workers={workers}", *words]
    return CliRunner().invoke(app, ["rescore", str(source), "--reward", str(reward), *keys])


def test_atif_documents_are_scored_like_the_run_that_they_are_of(tmp_path: Path):
    source = run_folder(tmp_path / "run", [member("4", index=0)])
    documents = tmp_path / "documents"
    write_atif(read_recorded(source), documents)
    result = rescore(documents, "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["trajectories"] == 1


def summary_of(result: Result) -> dict[str, Any]:
    assert result.exception is None, result.stderr
    return json.loads(result.stdout)


def test_a_run_is_scored_again_and_each_step_says_what_changed(tmp_path: Path):
    first = [member("4", index=0), member("four", index=1, reward=4.0)]
    second = [member("", index=0, group="train-2-0", reward=0.5)]
    run = run_folder(tmp_path / "run", first, second)
    summary = summary_of(rescore(run, "--json"))
    assert (summary["trajectories"], summary["changed"], summary["failed"]) == (3, 1, {})
    one, two = summary["steps"]
    assert (one["split"], one["step"], one["old_mean"], one["new_mean"]) == ("train", 1, 2.5, 2.5)
    assert (one["raised"], one["lowered"]) == (0, 0)
    assert (two["step"], two["old_mean"], two["new_mean"], two["lowered"]) == (2, 0.5, 0.0, 1)
    (biggest,) = summary["biggest"]
    assert (biggest["trajectory_id"], biggest["old"], biggest["new"]) == ("train-2-0-0", 0.5, 0.0)


def test_one_that_cannot_be_scored_is_counted_and_the_others_go_on(tmp_path: Path):
    members = [member("none", index=0), member("44", index=1), member("none", index=2)]
    result = rescore(run_folder(tmp_path / "run", members), "--json", "--biggest=0", workers=1)
    summary = summary_of(result)
    assert summary["failed"] == {"reward_error": 2}
    assert (summary["trajectories"], summary["old_mean"], summary["new_mean"]) == (1, 1.0, 2.0)
    assert summary["biggest"] == []
    assert_message(result.stderr, key="new_reward.py:7", value="no answer")


@pytest.mark.parametrize("source", ["run", "out.jsonl", "out.parquet", "out"])
def test_a_reward_reads_of_each_record_what_it_read_in_the_run(tmp_path: Path, source: str):
    recorded = member_of_two_turns()
    if source == "run":
        folder = run_folder(tmp_path / "run", [recorded])
    else:
        folder = table(tmp_path / source, recorded)
    summary = summary_of(rescore(folder, "--json", code=READS_ALL))
    assert (summary["trajectories"], summary["failed"]) == (1, {})


def test_a_record_is_restored_with_all_that_is_learned_and_read():
    recorded = member_of_two_turns()
    first, second = recorded.turns
    turns = (replace(first, learn_appended=True), second)
    recorded = replace(recorded, turns=turns, reward_parts={"right": 1.0}, metrics={"seconds": 2.0})
    record = json.loads(json.dumps(trajectory_record(recorded, step=1, split="train")))
    again = restore_trajectory(record)
    assert again.loss_mask == recorded.loss_mask
    for name in ("reward_parts", "metrics", "messages", "tool_scores", "turn_scores", "tool_calls"):
        assert getattr(again, name) == getattr(recorded, name), name


@pytest.mark.parametrize(
    ("source", "out"),
    [
        ("run", "new"),
        ("run", "new.jsonl"),
        ("out.jsonl", "new.parquet"),
        ("out.parquet", "new.jsonl"),
        ("out", "new"),
    ],
)
def test_a_new_table_has_the_new_rewards_and_all_else_as_it_was(
    tmp_path: Path, source: str, out: str
):
    members = [member("44", index=0), member("none", index=1)]
    calls = (replace(members[0].turns[0], tool_calls=(call(),)),)
    members[0] = replace(members[0], turns=calls)
    if source == "run":
        folder = run_folder(tmp_path / "run", members)
    else:
        folder = table(tmp_path / source, *members)
    summary_of(rescore(folder, "--out", str(tmp_path / out), "--json"))

    old = table(tmp_path / "expected.parquet", members[0])
    (expected,) = pyarrow.parquet.read_table(old).to_pylist()
    expected["reward"] = 2.0
    expected["reward_parts"] = json.dumps({"right": 0.0})
    if out == "new.jsonl":
        (row,) = [json.loads(line) for line in (tmp_path / out).read_text().splitlines()]
    else:
        file = tmp_path / "new" / "data" if out == "new" else tmp_path / out
        (row,) = pyarrow.parquet.read_table(file).to_pylist()
    assert row == expected
    data = read_table(tmp_path / out)
    assert (data.summary["started"], data.summary["kept"]) == (2, 1)
    assert data.summary["dropped"] == {"reward_error": 1}
    assert [path.name for path in tmp_path.glob(".*")] == []


def test_penalties_of_shaping_are_no_change(tmp_path: Path):
    shaped = replace(member("44", index=0), reward=1.5, raw_score=2.0)
    summary = summary_of(rescore(run_folder(tmp_path / "run", [shaped]), "--json"))
    assert (summary["old_mean"], summary["new_mean"], summary["changed"]) == (2.0, 2.0, 0)


def test_a_table_of_an_earlier_version_is_refused(tmp_path: Path):
    source = table(tmp_path / "old.jsonl", member("4", index=0))
    row = json.loads(source.read_text())
    del row["turn_scores"]
    source.write_text(json.dumps(row) + "\n")
    result = rescore(source)
    assert isinstance(result.exception, DataError)
    assert_message(result.exception, key="turn_scores", fix="collect it again")


def test_turn_lengths_that_are_not_the_masks_damage_a_table(tmp_path: Path):
    source = table(tmp_path / "damaged.jsonl", member("4", index=0))
    row = json.loads(source.read_text())
    for lengths in ([1], [3], [2, 1], [-1, 3]):
        source.write_text(json.dumps({**row, "turn_lengths": lengths}) + "\n")
        result = rescore(source)
        assert isinstance(result.exception, DataError)
        assert_message(result.exception, key="turn_lengths")


def test_windows_of_a_conversation_are_not_scored_as_if_they_were_whole(tmp_path: Path):
    turns = trajectory([1], [5, 30, 6, 31, 7], mask=[1, 0, 1, 0, 1]).turns
    recorded = member("4", index=0)
    long = Trajectory.from_turns(
        prompt_ids=(1,),
        turns=turns,
        trajectory_id=recorded.trajectory_id,
        group_id=recorded.group_id,
        agent_name=recorded.agent_name,
        finish_reason=recorded.finish_reason,
        messages=recorded.messages,
        row=recorded.row,
        history_window=1,
    )
    of_table = summary_of(rescore(table(tmp_path / "out.jsonl", long), "--json"))
    assert of_table["failed"] == {"reward_error": 1}
    of_run = summary_of(rescore(run_folder(tmp_path / "run", [long]), "--json"))
    assert of_run["failed"] == {}


def test_the_policy_cannot_judge_and_a_table_that_is_there_is_kept(tmp_path: Path):
    run = run_folder(tmp_path / "run", [member("4", index=0)])
    judged = replace(member("4", index=0), row={"data_source": "model_judge"})
    judged_run = run_folder(tmp_path / "judged", [judged])
    result = rescore(judged_run, "reward.judge.model=policy")
    assert isinstance(result.exception, ConfigError)
    assert_message(result.exception, key="reward.judge.model", value="policy")

    taken = table(tmp_path / "taken.jsonl", member("4", index=0))
    content = taken.read_bytes()
    result = rescore(run, "--out", str(taken))
    assert isinstance(result.exception, ConfigError)
    assert_message(result.exception, key="--out", value="taken.jsonl")
    assert taken.read_bytes() == content
