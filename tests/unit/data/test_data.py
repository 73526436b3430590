"""Rows, their order, and the calculator task."""

import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jax_agent_rl.data.cursor import DataCursor, Mixture
from jax_agent_rl.data.tasks import prepare_calculator
from jax_agent_rl.errors import CheckpointError, DataError
from tests.dataset_rows import load_rows
from tests.messages import raises

GOOD = {"data_source": "x", "prompt": [{"role": "user", "content": "hi"}]}


def write(path: Path, *rows: object) -> Path:
    path.write_text(
        "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)
    )
    return path


@pytest.mark.parametrize(
    ("row", "named"),
    [
        ("{oops", {"value": "not valid JSON"}),
        ("[" * 10**5, {"value": "not valid JSON"}),
        ([1], {"fix": "an object"}),
        ({"data_source": "x"}, {"value": ("'prompt'", "'data_source'")}),
        (
            {"data_source": "x", "question": "2 + 2?", "answer": "4"},
            {"value": ("'prompt'", "'data_source', 'question', 'answer'")},
        ),
        (
            {"data_source": "x", "Prompt": GOOD["prompt"]},
            {"value": ("'prompt'", "'data_source', 'Prompt'"), "fix": "did you mean 'Prompt'?"},
        ),
        (
            {"prompt": GOOD["prompt"], "source": "x"},
            {"value": ("'data_source'", "'prompt', 'source'")},
        ),
        ({}, {"value": ("'prompt'", "no columns")}),
        ({"data_source": "x", "prompt": [{"content": "hi"}]}, {"value": "every message"}),
        (GOOD | {"prompt": [{"role": "user"}]}, {"value": "'prompt'", "fix": "'content'"}),
        (
            GOOD | {"prompt": [{"role": "user", "content": None}]},
            {"value": "'prompt'", "fix": "'content'"},
        ),
        (
            GOOD | {"prompt": [{"role": "assistant", "content": None}]},
            {"value": "'prompt'", "fix": "'content'"},
        ),
        ({"prompt": GOOD["prompt"]}, {"value": "'data_source'"}),
        (GOOD | {"agent_name": 3}, {"value": ("'agent_name'", 3), "fix": "a name or absent"}),
        (
            GOOD | {"agent_name": "tool_agnet"},
            {"value": ("agent_name", "'tool_agnet'"), "fix": "'tool_agent'"},
        ),
        (
            GOOD | {"reward_model": "408"},
            {"value": ("'reward_model'", "'408'"), "fix": "an object or absent"},
        ),
        (GOOD | {"extra_info": []}, {"value": "'extra_info'", "fix": "an object or absent"}),
        (
            GOOD | {"extra_info": {"tool_selection": "add"}},
            {"value": "got 'add'", "fix": "a list of tool names"},
        ),
        (
            GOOD | {"extra_info": {"tool_selection": ["ad"]}},
            {"value": "'ad'", "fix": "'add'"},
        ),
        (
            GOOD | {"extra_info": {"tools_kwargs": {"add": 1}}},
            {"value": ("'add'", 1), "fix": "an object or absent"},
        ),
        (
            GOOD | {"extra_info": {"tools_kwargs": {"ad": {"create_kwargs": {}}}}},
            {"value": "'ad'", "fix": "'add'"},
        ),
        (
            GOOD | {"extra_info": {"tools_kwargs": {"add": {"creat_kwargs": {}}}}},
            {"value": "'creat_kwargs'", "fix": "'create_kwargs'"},
        ),
        (
            GOOD | {"extra_info": {"tools_kwargs": {"add": {"create_kwargs": 1}}}},
            {"value": "'create_kwargs'", "fix": "an object"},
        ),
    ],
)
def test_a_bad_row_is_named_with_what_is_wrong(tmp_path: Path, row: object, named: dict):
    file = write(tmp_path / "a.jsonl", GOOD, "", row)
    with raises(DataError, key=f"{file}, line 3", **named):
        load_rows(file, agents=["single_turn_agent", "tool_agent"], tools=["add"])


def test_what_is_told_of_a_row_is_short_whatever_its_columns_are_called(tmp_path: Path):
    columns = {f"{number}" + "x" * 100_000: number for number in range(1000)}
    with raises(DataError, key="'prompt'", value="1000 in all") as refused:
        load_rows(write(tmp_path / "rows.jsonl", columns))
    assert len(str(refused.value)) < 4000


def test_a_line_that_is_no_text_is_named(tmp_path: Path):
    file = tmp_path / "a.jsonl"
    file.write_bytes(json.dumps(GOOD).encode() + b"\n\xff\xfe\n")
    with raises(DataError, key="line 2", value="not UTF-8"):
        load_rows(file)


def test_rows_that_name_what_there_is_are_taken(tmp_path: Path):
    row = GOOD | {
        "agent_name": "mine",
        "extra_info": {"tool_selection": ["add"], "tools_kwargs": {"add": {}, "other": None}},
    }
    nameless = GOOD | {"agent_name": None, "reward_model": None, "extra_info": None}
    rows = load_rows(write(tmp_path / "a.jsonl", row, nameless), agents=["mine"], tools=["add"])
    assert rows == [
        row | {"extra_info": {"tool_selection": ["add"], "tools_kwargs": {"add": {}}}},
        GOOD,
    ]


@pytest.mark.parametrize(
    ("name", "named"),
    [
        ("none.jsonl", {"value": ("none.jsonl", "does not exist")}),
        ("a.csv", {"value": "a.csv", "fix": ".jsonl or .parquet"}),
    ],
)
def test_a_missing_or_foreign_file_says_what_to_do(tmp_path: Path, name: str, named: dict):
    (tmp_path / "a.csv").write_text("x")
    with raises(DataError, **named):
        load_rows(tmp_path / name)


@given(st.integers(1, 12), st.lists(st.integers(1, 9), max_size=8), st.integers(0, 3))
def test_every_epoch_uses_every_row_once(rows: int, takes: list[int], seed: int):
    cursor = DataCursor(list(range(rows)), seed=seed)
    rows_read = [row for count in takes for row in cursor.next_rows(count)]
    for begin in range(0, len(rows_read) - rows + 1, rows):
        assert sorted(rows_read[begin : begin + rows]) == list(range(rows))


def test_rows_that_are_not_shuffled_come_in_their_order_in_every_epoch():
    """``data.shuffle=false``."""
    assert DataCursor("abc", seed=7, shuffle=False).next_rows(7) == list("abcabca")
    rows_read = DataCursor(Mixture(("abc", "de"), (1, 1)), seed=7, shuffle=False).next_rows(40)
    for part in ("abc", "de"):
        rows_of_part = "".join(row for row in rows_read if row in part)
        assert rows_of_part == (part * 40)[: len(rows_of_part)]
        assert len(rows_of_part) > 10


@given(st.integers(1, 12), st.integers(0, 30), st.integers(0, 30))
def test_a_restored_cursor_goes_on_as_if_nothing_had_happened(
    rows: int, count_before: int, count_after: int
):
    uninterrupted, interrupted, resumed = (DataCursor(list(range(rows)), seed=5) for _ in range(3))
    expected = uninterrupted.next_rows(count_before + count_after)
    got = interrupted.next_rows(count_before)
    resumed.restore(json.loads(json.dumps(interrupted.state())))
    assert got + resumed.next_rows(count_after) == expected


@pytest.mark.parametrize(
    ("other_cursor", "named"),
    [
        (DataCursor([1, 2, 3], seed=0), {"key": "data.train", "value": ("[3]", "now [2]")}),
        (DataCursor([1, 2], seed=1), {"key": "seed", "value": (1, "now 0")}),
        (
            DataCursor([1, 2], seed=0, shuffle=False),
            {"key": "data.shuffle", "value": ("False", "now True")},
        ),
    ],
)
def test_a_cursor_refuses_the_state_of_other_rows_or_another_order(
    other_cursor: DataCursor, named: dict
):
    with raises(CheckpointError, **named):
        DataCursor([1, 2], seed=0).restore(other_cursor.state())


def test_a_cursor_takes_a_state_from_before_seed_and_shuffle_were_part_of_it():
    state = {"drawn": 1, "rows": [2], "weights": [1.0], "again": []}
    cursor = DataCursor([1, 2], seed=0)
    fresh = DataCursor([1, 2], seed=0)
    cursor.restore(state)
    assert cursor.next_rows(3) == fresh.next_rows(4)[1:]


def test_calculator_rows_are_right_and_no_question_is_in_both_files(tmp_path: Path):
    train, heldout = (
        load_rows(file) for file in prepare_calculator(tmp_path, train=300, heldout=60)
    )
    assert (len(train), len(heldout)) == (300, 60)
    symbols = {"plus": "+", "minus": "-", "times": "*", "multiplied by": "*"}
    for row in [*train, *heldout]:
        a, words, b = re.fullmatch(
            r"What is (\d+) ([a-z ]+) (\d+)\?", row["prompt"][-1]["content"]
        ).groups()
        results = {"+": int(a) + int(b), "-": int(a) - int(b), "*": int(a) * int(b)}
        assert row["reward_model"]["ground_truth"] == str(results[symbols[words]])
        assert row["reward_model"]["ground_truth"] not in json.dumps(row["prompt"])

    def questions(rows: list) -> set[str]:
        return {row["prompt"][-1]["content"] for row in rows}

    assert not questions(train) & questions(heldout)
    assert len(questions(train)) == 300
