"""Fingerprints: equal for equal content, whatever it is called, and different for anything else."""

import dataclasses
import enum
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jax_agent_rl.utils.fingerprints import (
    RowFingerprint,
    code_fingerprint,
    file_fingerprint,
    fingerprint,
    folder_fingerprint,
)

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


def canonical(value: object) -> str:
    """Text that is equal for equal values: numbers with their types, keys in order."""
    return json.dumps(value, sort_keys=True)


@given(JSON, JSON)
def test_values_have_equal_fingerprints_if_they_are_equal(first: object, second: object):
    assert (fingerprint(first) == fingerprint(second)) == (canonical(first) == canonical(second))
    assert fingerprint(json.loads(json.dumps(first))) == fingerprint(first)


@given(st.dictionaries(st.text(), JSON, max_size=5))
def test_the_order_of_keys_does_not_matter(value: dict):
    assert fingerprint(dict(reversed(value.items()))) == fingerprint(value)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (["ab", "c"], ["a", "bc"]),
        ([[1], 2], [[1, 2]]),
        ({"a": {"b": 1}}, {"a": "b", "1": 1}),
        ("1", 1),
        (1, True),
        (b"a", "a"),
        (None, "None"),
        ([], {}),
        (np.zeros(2, np.float32), np.zeros(2, np.int32)),
        (np.zeros((1, 4)), np.zeros((2, 2))),
    ],
)
def test_what_looks_alike_is_told_apart(first: object, second: object):
    assert fingerprint(first) != fingerprint(second)


class Kind(enum.StrEnum):
    ONE = "one"


@dataclasses.dataclass(frozen=True)
class Thing:
    numbers: np.ndarray
    kind: Kind


def test_arrays_and_dataclasses_are_known_by_their_content():
    first = Thing(np.arange(4) / 3, Kind.ONE)
    same = Thing(np.arange(4) / 3, Kind.ONE)
    larger = Thing(np.arange(5) / 3, Kind.ONE)
    assert fingerprint(first) == fingerprint(same) != fingerprint(larger)
    assert fingerprint({3, 1}) == fingerprint({1, 3})
    assert fingerprint((1, 2)) == fingerprint([1, 2])
    with pytest.raises(TypeError, match="no fingerprint"):
        fingerprint(object())


def test_a_fingerprint_is_the_same_in_every_process():
    value = {"b": [1, 2.5, None], "a": {"x", "y", "z"}}
    program = (
        f"from jax_agent_rl.utils.fingerprints import fingerprint; print(fingerprint({value!r}))"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    said = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
    )
    assert said.stdout.strip() == fingerprint(value)


def test_a_file_with_the_old_size_and_time_is_read_again(tmp_path: Path):
    file = tmp_path / "a"
    file.write_text("one")
    status = file.stat()
    first = file_fingerprint(file)
    file.write_text("two")
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert file_fingerprint(file) != first
    file.write_text("one")
    assert file_fingerprint(file) == first


def test_a_folder_is_known_by_the_names_and_contents_of_its_files(tmp_path: Path):
    for name in ("one", "moved"):
        (tmp_path / name / "inner").mkdir(parents=True)
        (tmp_path / name / "inner" / "a").write_text("a")
    fingerprint = folder_fingerprint(tmp_path / "one")
    assert fingerprint == folder_fingerprint(tmp_path / "moved")
    (tmp_path / "one" / "inner" / "a").rename(tmp_path / "one" / "inner" / "b")
    assert folder_fingerprint(tmp_path / "one") != fingerprint


def test_code_is_known_by_its_file_and_a_module_by_where_it_lies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    file = tmp_path / "somebodys_reward.py"
    file.write_text("x = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert (
        code_fingerprint(str(file))
        == code_fingerprint("somebodys_reward")
        == file_fingerprint(file)
    )
    assert code_fingerprint("no.such.module") != code_fingerprint("no.other.module")


def test_a_module_in_the_working_directory_is_known_by_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("sys.path", [place for place in sys.path if place not in ("", ".")])
    monkeypatch.chdir(tmp_path)
    (tmp_path / "somebodys_package").mkdir()
    (tmp_path / "somebodys_package" / "__init__.py").write_text("raise RuntimeError('imported')\n")
    for name, file in (
        ("somebodys_module", "somebodys_module.py"),
        ("somebodys_package.a", "somebodys_package/a.py"),
    ):
        (tmp_path / file).write_text("x = 1\n")
        assert code_fingerprint(name) == file_fingerprint(tmp_path / file)


def test_a_package_is_all_its_files_but_what_python_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    package = tmp_path / "somebodys_tools"
    package.mkdir()
    (package / "__init__.py").write_text("from somebodys_tools.inner import f\n")
    (package / "inner.py").write_text("f = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    fingerprint = code_fingerprint(str(package))
    assert code_fingerprint("somebodys_tools") == fingerprint

    (package / "__pycache__").mkdir()
    (package / "__pycache__" / "inner.cpython-311.pyc").write_bytes(b"compiled")
    assert code_fingerprint(str(package)) == code_fingerprint("somebodys_tools") == fingerprint
    (package / "inner.py").write_text("f = 2\n")
    assert code_fingerprint(str(package)) == code_fingerprint("somebodys_tools") != fingerprint


def of_rows(*rows: dict) -> str:
    content = RowFingerprint()
    for row in rows:
        content.add(row)
    return content.value()


@given(st.lists(st.dictionaries(st.text(), JSON, max_size=3), max_size=5))
def test_rows_are_known_by_their_content_and_order(rows: list[dict]):
    assert of_rows(*rows) == of_rows(*json.loads(json.dumps(rows)))
    assert of_rows(*rows, {}) != of_rows(*rows)
    if canonical(rows) != canonical(rows[::-1]):
        assert of_rows(*rows[::-1]) != of_rows(*rows)


def test_columns_of_a_row_have_no_order_and_keys_inside_them_have_one():
    """A chat template writes a tool's arguments out as they come."""
    assert of_rows({"a": 1, "b": 2}) == of_rows({"b": 2, "a": 1})
    assert of_rows({"a": {"x": 1, "y": 2}}) != of_rows({"a": {"y": 2, "x": 1}})
