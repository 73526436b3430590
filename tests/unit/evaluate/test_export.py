"""Journals to files: the ids that come out are those that went in, in the order of prompts."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
from typer.testing import CliRunner

from jax_agent_rl.cli import app
from jax_agent_rl.data import reader
from jax_agent_rl.errors import ConfigError, DataError
from jax_agent_rl.evaluate import export
from jax_agent_rl.evaluate.export import Target, is_table, read_table, records, schema, write
from jax_agent_rl.evaluate.journal import Journal
from jax_agent_rl.observe.run_dir import restore_trajectory
from jax_agent_rl.types import Fork, Group
from tests.messages import raises
from tests.trajectories import call, trajectory

SUMMARY = {"policy": "models/tiny", "data": "rows.jsonl", "kept": 3, "started": 3}


def group(number: int, *, window: int | None = None) -> Group:
    name = f"rollout-0-{number}"
    member = trajectory(
        [1, 2, number],
        [10, 11, 30, 12, 31, 13],
        mask=[1, 1, 0, 1, 0, 1],
        logprobs=[-0.5, -0.25, 0.0, -1.5, 0.0, -2.0],
        reward=0.5,
        group=name,
        calls=[[call(error="timeout")]],
        messages=[{"role": "user", "content": "hallo"}, {"role": "assistant", "content": "十"}],
    )
    row = {"data_source": "sums", "reward_model": {"ground_truth": "4"}, "extra_info": {"level": 1}}
    member = replace(member, row=row, history_window=window)
    return Group(group_id=name, trajectories=(member,))


def written(target: Target, *groups: Group) -> None:
    with Journal(target.journal, {"seed": 0}) as journal:
        for each in groups:
            number = int(each.group_id.rpartition("-")[2])
            journal.add(number, records(each, number), {})
        write(target, journal, SUMMARY)
    assert not target.journal.exists()
    assert json.loads(target.summary.read_text()) == SUMMARY


def test_parquet_holds_the_exact_ids_in_the_order_of_the_prompts(tmp_path: Path):
    written(Target.from_path(tmp_path / "out.parquet"), group(2), group(0), group(1))
    exported = pyarrow.parquet.read_table(tmp_path / "out.parquet")
    assert exported.schema.equals(schema())
    assert exported["row"].to_pylist() == [0, 1, 2]
    first, *_ = exported.to_pylist()
    assert first["prompt_ids"] == [1, 2, 0]
    assert first["response_ids"] == [10, 11, 30, 12, 31, 13]
    assert first["response_mask"] == first["loss_mask"] == [1, 1, 0, 1, 0, 1]
    assert first["rollout_logprobs"] == [-0.5, -0.25, 0.0, -1.5, 0.0, -2.0]
    assert first["policy_versions"] == [0, 0, -1, 0, -1, 0]
    assert first["stop_reasons"] == ["eos"] * 3
    assert (first["reward"], first["num_turns"], first["finish_reason"]) == (0.5, 3, "answer")
    assert first["messages"][1] == {"role": "assistant", "content": "十"}
    assert first["tool_calls"][0]["error"] == "timeout"
    assert json.loads(first["extra_info"]) == {"level": 1}


def test_json_lines_hold_the_same_as_parquet(tmp_path: Path):
    written(Target.from_path(tmp_path / "out.parquet"), group(0), group(1))
    written(Target.from_path(tmp_path / "out.jsonl"), group(0), group(1))
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert lines == pyarrow.parquet.read_table(tmp_path / "out.parquet").to_pylist()


@pytest.mark.parametrize("name", ["out.parquet", "out.jsonl", "out"])
def test_half_a_surrogate_pair_becomes_a_question_mark(tmp_path: Path, name: str):
    half = "\ud83d"
    surrogate_call = replace(call(), name=half, arguments={"text": half}, observation=half)
    member = trajectory(
        [1],
        [10],
        group="rollout-0-0",
        calls=[[surrogate_call]],
        messages=[{"role": "user", "content": half}],
    )
    member = replace(member, row={"data_source": half, "extra_info": {half: half}})
    written(
        Target.from_path(tmp_path / name), Group(group_id="rollout-0-0", trajectories=(member,))
    )
    if name == "out.jsonl":
        row = json.loads((tmp_path / name).read_text())
    else:
        (row,) = pyarrow.parquet.read_table(
            tmp_path / name / "data" if name == "out" else tmp_path / name
        ).to_pylist()
    (told,) = row["tool_calls"]
    assert (told["name"], json.loads(told["arguments"]), told["observation"]) == (
        "?",
        {"text": "?"},
        "?",
    )
    assert row["messages"] == [{"role": "user", "content": "?"}]
    assert (row["data_source"], json.loads(row["extra_info"])) == ("?", {"?": "?"})


def test_a_folder_is_cut_into_shards_that_its_card_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(export, "SHARD_BYTES", 1)
    written(Target.from_path(tmp_path / "out"), group(1), group(0), group(2))
    shards = sorted((tmp_path / "out" / "data").iterdir())
    assert [shard.name for shard in shards] == [f"train-{i:05}-of-00003.parquet" for i in range(3)]
    assert [pyarrow.parquet.read_table(shard)["row"].to_pylist() for shard in shards] == [
        [0],
        [1],
        [2],
    ]
    assert "path: data/train-*.parquet" in (tmp_path / "out" / "README.md").read_text()


def test_a_trajectory_of_several_contexts_is_several_rows_of_one_reward():
    rows = records(group(0, window=1), 0)
    assert [row["sequence"] for row in rows] == [0, 1]
    assert {row["reward"] for row in rows} == {0.5}
    assert rows[0]["response_ids"] == [
        10,
        11,
        30,
        12,
    ]  # what follows the last turn of a context is not in it
    assert rows[1]["prompt_ids"] == [1, 2, 0, 12, 31]
    assert rows[1]["response_ids"] == [13]


def test_a_branch_says_whom_it_left():
    branch = replace(
        group(0).trajectories[0],
        fork=Fork(tree_id="rollout-0-0-0", parent_id="rollout-0-0-0", turns=1, tokens=2),
    )
    (row,) = records(Group(group_id="rollout-0-0", trajectories=(branch,)), 0)
    assert (row["fork_parent"], row["fork_turns"], row["fork_tokens"]) == ("rollout-0-0-0", 1, 2)


@pytest.mark.parametrize("name", ["out.parquet", "out.jsonl", "out"])
def test_trajectories_are_restored_from_each_kind_of_table(tmp_path: Path, name: str):
    (root,) = group(0).trajectories
    branches = [
        replace(
            root,
            trajectory_id=f"branch-{i}",
            fork=Fork(tree_id=root.trajectory_id, parent_id=parent, turns=i),
        )
        for i, parent in enumerate((root.trajectory_id, "branch-0"))
    ]
    groups = Group(group_id=root.group_id, trajectories=(root, *branches)), group(1, window=1)
    written(Target.from_path(tmp_path / name), *groups)
    assert is_table(tmp_path / name)
    data = read_table(tmp_path / name)
    assert data.notes == []
    assert data.summary == SUMMARY
    recorded = list(data.trajectories)
    for numbers in (
        [2],
        [1, 0],
        [3, 2, 1, 0],
        [],
        [0, 3, 0],
    ):  # of a branch, the tree is known from those before it
        assert list(data.trajectories.read(numbers)) == [recorded[number] for number in numbers]
    members = [member for each in groups for member in each.trajectories]
    for record, member in zip(data.trajectories, members, strict=True):
        calls = [call["error"] for turn in record["turns"] for call in turn["tool_calls"]]
        assert calls == ["timeout"]
        assert record["row"] == member.row
        assert record["reward"] == member.reward
        back = restore_trajectory(record)
        assert (back.trajectory_id, back.fork) == (member.trajectory_id, member.fork)
        for ours, theirs in zip(back.sequences, member.sequences, strict=True):
            for arrays in (
                "prompt_ids",
                "response_ids",
                "response_mask",
                "rollout_logprobs",
                "policy_versions",
            ):
                assert getattr(ours, arrays) == getattr(theirs, arrays)


@pytest.mark.parametrize("name", ["out.parquet", "out.jsonl", "out"])
def test_a_long_trajectory_is_shown_from_each_kind_of_table(tmp_path: Path, name: str):
    (member,) = group(0).trajectories
    long = replace(
        member, messages=({"role": "user", "content": "x" * 3_000_000}, *member.messages[1:])
    )
    written(
        Target.from_path(tmp_path / name), Group(group_id=member.group_id, trajectories=(long,))
    )
    (record,) = read_table(tmp_path / name).trajectories
    assert record["messages"] == long.messages


def test_log_probs_of_both_tables_are_the_same_numbers(tmp_path: Path):
    (member,) = group(0).trajectories
    outputs = [
        replace(turn.output, log_probs=(-0.1,) * len(turn.output.token_ids))
        for turn in member.turns
    ]
    turns = tuple(
        replace(turn, output=output) for turn, output in zip(member.turns, outputs, strict=True)
    )
    exact = Group(group_id=member.group_id, trajectories=(replace(member, turns=turns),))
    for name in ("out.parquet", "out.jsonl"):
        written(Target.from_path(tmp_path / name), exact)
    parquet, lines = (
        read_table(tmp_path / name).trajectories for name in ("out.parquet", "out.jsonl")
    )
    assert list(parquet) == list(lines)


@pytest.mark.parametrize("content", [{"question": "1 + 1"}, {"prompt_ids": "text"}])
def test_a_table_of_something_else_is_refused(tmp_path: Path, content: dict):
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([content]), tmp_path / "rows.parquet")
    (tmp_path / "rows.jsonl").write_text(json.dumps(content) + "\n")
    for file in ("rows.parquet", "rows.jsonl", "missing.parquet"):
        with raises(DataError, fix="jax-agent-rl rollout"):
            list(read_table(tmp_path / file).trajectories)


@pytest.mark.parametrize(
    ("column", "value"), [("stop_reasons", []), ("response_mask", [0, 1]), ("tool_calls", None)]
)
def test_a_damaged_table_is_refused(tmp_path: Path, column: str, value: Any):
    (row,) = records(group(0), 0)
    pyarrow.parquet.write_table(
        pyarrow.Table.from_pylist([row | {column: value}], schema=schema()),
        tmp_path / "out.parquet",
    )
    with raises(DataError, key="out.parquet"):
        list(read_table(tmp_path / "out.parquet").trajectories)


def counted_rows(monkeypatch) -> Counter:
    """Counts how many rows of a Parquet file are made of Arrow's values at a time."""
    sizes: Counter = Counter()
    real = reader.ParquetFile.rows

    def rows(self, record_batch, *arguments):
        sizes[record_batch.num_rows] += 1
        return real(self, record_batch, *arguments)

    monkeypatch.setattr(reader.ParquetFile, "rows", rows)
    return sizes


def test_rows_are_converted_a_few_at_a_time_however_large_a_row_group_is(
    tmp_path: Path, monkeypatch
):
    rows = [row for number in range(500) for row in records(group(number), number)]
    file = tmp_path / "out.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows, schema=schema()), file)
    sizes = counted_rows(monkeypatch)
    trajectories = read_table(file).trajectories
    names = [record["trajectory_id"] for record in trajectories]
    assert len(names) == len(rows) == 500
    assert max(sizes) <= 64
    chosen = [499, 3, 250, *range(100, 300)]
    assert [record["trajectory_id"] for record in trajectories.read(chosen)] == [
        names[number] for number in chosen
    ]


def test_a_report_shows_a_table(tmp_path: Path):
    for name in ("out.parquet", "out.jsonl", "out"):
        written(Target.from_path(tmp_path / name), group(0), group(1, window=1))
        result = CliRunner().invoke(app, ["report", str(tmp_path / name)])
        assert result.exit_code == 0, result.output
        page = Path(result.stdout.strip()).read_text(encoding="utf-8")
        for each in (group(0), group(1, window=1)):
            assert all(member.trajectory_id in page for member in each.trajectories)


def test_every_record_has_just_the_columns():
    (row,) = records(group(0), 0)
    assert row.keys() == set(schema().names)


def test_an_ending_that_means_nothing_is_refused():
    with raises(ConfigError, fix=("FILE.parquet", "FILE.jsonl", "FOLDER")):
        Target.from_path(Path("out.csv"))


def test_a_table_of_something_else_is_told_by_the_column_it_lacks(tmp_path: Path):
    file = tmp_path / "rows.jsonl"
    file.write_text('{"prompt": "a question"}\n')
    with raises(DataError, key=("rows.jsonl", "'row'")):
        list(read_table(file).trajectories)
