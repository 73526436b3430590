"""Deltas of weight files: the result is the new file byte for byte, or it is refused."""

import os
import zlib
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from jax_agent_rl.errors import WeightUpdateError
from jax_agent_rl.utils.fingerprints import read_fingerprint
from jax_agent_rl.utils.weight_deltas import apply_delta, delta_path, write_delta
from tests.examples import examples
from tests.messages import raises

NUMBERS = 40_000


def write(path: Path, values: np.ndarray, **metadata: str) -> Path:
    half = len(values) // 2
    save_file(
        {"a": values[:half].reshape(-1, 4), "b": values[half:]},
        path,
        metadata={"format": "pt", **metadata},
    )
    return path


def stepped(values: np.ndarray, share: float, seed: int = 0) -> np.ndarray:
    """Numbers of which a share moved a little, as by a training step."""
    rng = np.random.default_rng(seed)
    moved = np.where(rng.random(len(values)) < share, 1.01, 1.0)
    return (values.astype(np.float32) * moved).astype(values.dtype)


@pytest.fixture
def numbers() -> np.ndarray:
    return np.random.default_rng(1).normal(size=NUMBERS).astype(ml_dtypes.bfloat16)


@pytest.mark.parametrize("share", [0.0, 0.015, 0.2])
def test_the_result_is_the_new_file_byte_for_byte(
    tmp_path: Path, numbers: np.ndarray, share: float
):
    old = write(tmp_path / "v1.safetensors", numbers, probe="old")
    new = write(tmp_path / "v2.safetensors", stepped(numbers, share), probe="of another length")
    delta = write_delta(old, read_fingerprint(old), new)
    assert delta == delta_path(new)
    # 1.5 % of the numbers, 4 bytes each at most (a gap and a change, where the whole file has 2
    # bytes per number).
    assert share > 0.015 or delta.stat().st_size < 0.06 * new.stat().st_size
    content = new.read_bytes()
    new.unlink()
    apply_delta(delta, {"of another": tmp_path, read_fingerprint(old): old})
    assert new.read_bytes() == content
    assert list(tmp_path.iterdir()) == [new], "the delta and the old file are gone"


@settings(
    max_examples=examples(40),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    old=st.binary(min_size=64, max_size=64),
    edits=st.dictionaries(st.integers(0, 31), st.integers(0, 65535), max_size=9),
)
def test_any_words_may_change(tmp_path: Path, old: bytes, edits: dict[int, int]):
    for file in tmp_path.iterdir():
        file.unlink()
    old_words = np.frombuffer(old, np.uint16)
    new_words = old_words.copy()
    for place, word in edits.items():
        new_words[place] = word
    files = [tmp_path / f"v{i}.safetensors" for i in (1, 2)]
    for file, words in zip(files, (old_words, new_words), strict=True):
        write(file, words)
    if (delta := write_delta(files[0], "d", files[1])) is not None:
        files[1].unlink()
        apply_delta(delta, {"d": files[0]})
        np.testing.assert_array_equal(load_file(files[1])["b"], new_words[16:])


def test_where_most_numbers_changed_or_the_sizes_differ_there_is_no_delta(
    tmp_path: Path, numbers: np.ndarray
):
    old = write(tmp_path / "v1.safetensors", numbers)
    changed_file = write(tmp_path / "v2.safetensors", stepped(numbers, 0.9))
    longer = write(tmp_path / "v3.safetensors", np.concatenate([numbers, numbers[:8]]))
    assert write_delta(old, "d", changed_file) is None
    assert write_delta(old, "d", longer) is None
    assert not list(tmp_path.glob("*.delta.*"))


def rewrite(delta: Path, metadata: dict[str, str] | None = None, **tensors: np.ndarray) -> None:
    save_file(
        load_file(delta) | tensors, delta, metadata={"base": "d", "count": "3"} | (metadata or {})
    )


def compressed(values: list[int], dtype: str) -> np.ndarray:
    planes = np.array(values, dtype).view(np.uint8).reshape(len(values), -1).T
    return np.frombuffer(zlib.compress(planes.tobytes()), np.uint8)


@pytest.mark.parametrize(
    ("spoil", "named"),
    [
        (lambda d: d.write_bytes(b"no delta"), {"value": "not a weight delta"}),
        (
            lambda d: save_file({"header": np.zeros(3, np.uint8)}, d, metadata={"base": "d"}),
            {"value": "not a weight delta"},
        ),
        (lambda d: rewrite(d, {"count": "-1"}), {"value": "-1 changes"}),
        (
            lambda d: rewrite(d, {"count": str(10**12)}),
            {"value": ("1000000000000 changes", "40000 words")},
        ),
        (
            lambda d: rewrite(d, gaps=compressed([0, 0, NUMBERS], "<u4")),
            {"value": ("word 40002", 40000)},
        ),
        (
            lambda d: rewrite(d, gaps=compressed([0] * 9, "<u4")),
            {"value": ("12 bytes", "13 found")},
        ),
        (lambda d: rewrite(d, changes=np.zeros(9, np.uint8)), {"value": "decompressing"}),
        (lambda d: rewrite(d, changes=compressed([1], "<u2")), {"value": ("6 bytes", "2 found")}),
    ],
)
def test_a_damaged_delta_is_refused_and_never_expanded_beyond_its_numbers(
    tmp_path: Path, numbers: np.ndarray, spoil, named: dict
):
    old = write(tmp_path / "v1.safetensors", numbers)
    changed = numbers.copy()
    changed[[3, 5, 7]] = 1.5
    new = write(tmp_path / "v2.safetensors", changed)
    delta = write_delta(old, "d", new)
    assert delta is not None
    new.unlink()
    spoil(delta)
    with raises(WeightUpdateError, **named):
        apply_delta(delta, {"d": old})
    assert not new.exists()


def test_a_delta_of_a_file_that_is_not_there_is_refused(tmp_path: Path, numbers: np.ndarray):
    old = write(tmp_path / "v1.safetensors", numbers)
    delta = write_delta(old, "d", write(tmp_path / "v2.safetensors", stepped(numbers, 0.01)))
    assert delta is not None
    with raises(WeightUpdateError, key="v2.delta.safetensors", value="d", fix="the whole file"):
        apply_delta(delta, {"other": old})


def test_a_result_from_another_base_has_another_digest(tmp_path: Path, numbers: np.ndarray):
    """What the receiver's check of the result finds."""
    old = write(tmp_path / "v1.safetensors", numbers)
    new = write(tmp_path / "v2.safetensors", stepped(numbers, 0.01))
    base = read_fingerprint(old)
    delta = write_delta(old, base, new)
    assert delta is not None
    with old.open("r+b") as stream:
        stream.seek(-2, os.SEEK_END)
        stream.write(b"\xff\x00")
    digest = read_fingerprint(new)
    new.unlink()
    apply_delta(delta, {base: old})
    assert read_fingerprint(new) != digest
