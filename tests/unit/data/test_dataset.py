"""Several files, globs and streamed Parquet; what is in memory at a time."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jax_agent_rl.config import DataSource
from jax_agent_rl.data.cursor import DataCursor
from jax_agent_rl.data.dataset import RowGroups, RowsWithoutPrompts, open_dataset
from jax_agent_rl.data.reader import ParquetFile
from jax_agent_rl.data.rows import RowChecks
from jax_agent_rl.errors import DataError
from tests.messages import raises


def row(number: int, **fields: object) -> dict:
    return {"data_source": "x", "prompt": [{"role": "user", "content": f"Q{number}"}], **fields}


def write(file: Path, numbers: range, *, group: int = 1000, **fields: object) -> Path:
    file.parent.mkdir(exist_ok=True)
    rows = [row(number, **fields) for number in numbers]
    if file.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), file, row_group_size=group)
    else:
        file.write_text("".join(json.dumps(each) + "\n" for each in rows))
    return file


def questions(rows) -> list[int]:
    return [int(each["prompt"][0]["content"][1:]) for each in rows]


def test_files_and_globs_are_one_data_set_in_the_order_they_are_named(tmp_path: Path):
    write(tmp_path / "b.parquet", range(5), group=2)
    write(tmp_path / "parts" / "2.jsonl", range(10, 13))
    write(tmp_path / "parts" / "1.parquet", range(5, 10))
    rows = open_dataset([tmp_path / "b.parquet", f"{tmp_path}/parts/*"])
    assert questions(rows) == list(range(13))
    assert len(rows) == 13
    assert questions(rows[4:6]) == [4, 5]
    assert questions([rows[-1]]) == [12]
    with pytest.raises(IndexError):
        rows[13]


@pytest.mark.parametrize("limit", [1, 4, 5, 6, 100])
def test_a_limit_counts_over_all_files(tmp_path: Path, limit: int):
    write(tmp_path / "a.parquet", range(5), group=2)
    write(tmp_path / "b.jsonl", range(5, 8))
    rows = open_dataset([f"{tmp_path}/*"], limit=limit)
    assert questions(rows) == list(range(8))[:limit]
    assert len(RowsWithoutPrompts(rows)) == len(list(RowsWithoutPrompts(rows))) == min(limit, 8)


@pytest.mark.parametrize(
    ("path", "named"),
    [
        ("*.json", {"value": "no file matches", "fix": "*.json'"}),
        ("", {"value": "a folder", "fix": "*.parquet"}),
        ("b.parquet", {"value": "does not exist"}),
        ("a.csv", {"value": "'.csv'"}),
        ("empty.parquet", {"value": "holds no rows"}),
        ("damaged.parquet", {"fix": "Parquet"}),
    ],
)
def test_a_source_without_rows_says_what_to_do(tmp_path: Path, path: str, named: dict):
    (tmp_path / "a.csv").write_text("x")
    (tmp_path / "damaged.parquet").write_text("x")
    pq.write_table(pa.table({"prompt": pa.array([], pa.string())}), tmp_path / "empty.parquet")
    with raises(DataError, **named):
        open_dataset([f"{tmp_path}/{path}"])


def test_name_and_split_are_refused_for_files_of_this_machine(tmp_path: Path):
    file = write(tmp_path / "a.jsonl", range(2))
    with raises(DataError, key="a.jsonl", value="split=test", fix="Hub datasets"):
        open_dataset([DataSource(path=str(file), split="test")])


def test_a_bad_row_of_a_parquet_file_is_named(tmp_path: Path):
    rows = [
        row(number, agent_name=name)
        for number, name in enumerate(["tool_agent", None, "tool_agnet"])
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet", row_group_size=2)
    with raises(
        DataError, key=("a.parquet, row 3", "agent_name"), value="tool_agnet", fix="tool_agent"
    ):
        open_dataset([tmp_path / "a.parquet"], RowChecks(agents=["tool_agent"]))


@pytest.fixture
def most_held(monkeypatch) -> list[int]:
    """How many row groups are in memory after each that was read from its file."""
    counts = []
    read = RowGroups.read
    read_group = ParquetFile.read_group

    def counted(self, file, group):
        known = len(counts)
        row_group = read(self, file, group)
        counts[known:] = [len(self)] * (len(counts) - known)
        return row_group

    def counted_group(self, group, columns=None):
        if columns is None:
            counts.append(0)
        return read_group(self, group, columns)

    monkeypatch.setattr(RowGroups, "read", counted)
    monkeypatch.setattr(ParquetFile, "read_group", counted_group)
    return counts


def test_no_more_row_groups_than_allowed_are_in_memory_whatever_is_done_with_them(
    tmp_path: Path, most_held
):
    """``data.shuffle_row_groups``."""
    for name in "ab":
        write(tmp_path / f"{name}.parquet", range(20), group=2)
    rows = open_dataset([f"{tmp_path}/*.parquet"], row_groups=3)
    cursor = DataCursor(rows, seed=0)
    assert sorted(questions(cursor.next_rows(40))) == sorted([*range(20)] * 2)
    assert len(list(rows)) == len(list(RowsWithoutPrompts(rows))) == 40
    assert max(most_held) == 3


def test_an_epoch_reads_every_row_group_once(tmp_path: Path, most_held):
    write(tmp_path / "a.parquet", range(40), group=4)
    rows = open_dataset([tmp_path / "a.parquet"], row_groups=3)
    most_held.clear()
    cursor = DataCursor(rows, seed=0)
    assert sorted(questions(cursor.next_rows(40))) == list(range(40))
    assert len(most_held) <= 10


def test_a_resumed_cursor_over_parquet_draws_what_the_first_would_have(tmp_path: Path):
    write(tmp_path / "a.parquet", range(40), group=4)
    first, second = (
        DataCursor(open_dataset([tmp_path / "a.parquet"], row_groups=2), seed=5) for _ in range(2)
    )
    first.next_rows(53)
    second.restore(json.loads(json.dumps(first.state())))
    assert questions(second.next_rows(50)) == questions(first.next_rows(50))


def test_files_that_fit_in_memory_are_shuffled_as_one_like_json_lines(tmp_path: Path):
    parquet_rows = open_dataset(
        [write(tmp_path / "a.parquet", range(3000), group=1000)], row_groups=3
    )
    json_rows = open_dataset([write(tmp_path / "a.jsonl", range(3000))], row_groups=3)
    assert questions(DataCursor(parquet_rows, seed=0).next_rows(99)) == questions(
        DataCursor(json_rows, seed=0).next_rows(99)
    )


def test_outlines_have_every_field_but_the_prompt(tmp_path: Path):
    fields = {"extra_info": {"index": 1}, "agent_name": "a"}
    rows = open_dataset([write(tmp_path / "a.parquet", range(3), **fields)])
    assert list(RowsWithoutPrompts(rows)) == [{"data_source": "x", **fields}] * 3
