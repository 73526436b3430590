"""What a learner reads beside records: stored and read again to the bit, and nothing else is."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays_of
from safetensors.numpy import load_file, save

from jax_agent_rl.errors import DataError
from jax_agent_rl.observe.attachments import Attachments
from jax_agent_rl.observe.learner_inputs import learner_inputs, with_learner_inputs
from jax_agent_rl.observe.run_dir import RunDir, read_trajectories, restore_trajectory
from jax_agent_rl.types import Group, RoutedExperts, TokenScores, Trajectory
from jax_agent_rl.utils.fingerprints import PREFIX, digest
from tests.trajectories import group_of, session, trajectory

LAYERS = 3
PER_TOKEN = 2


def with_experts(original: Trajectory, seed: int, *, wide: bool = False) -> Trajectory:
    """The trajectory with random experts of some of its turns, and of its segments'."""
    rng = np.random.default_rng(seed)
    sequences = []
    for sequence in (*original.segments, original):
        length = len(sequence.prompt_ids) + len(sequence.response_ids)
        turns = []
        for turn in sequence.turns:
            routed = None
            if rng.random() < 0.7:
                start = int(rng.integers(0, length))
                shape = (int(rng.integers(0, length - start + 1)), LAYERS, PER_TOKEN)
                choices = rng.integers(0, 60_000 if wide else 256, shape)
                routed = RoutedExperts.of(start, choices.astype("u2" if wide else "u1"))
            turns.append(replace(turn, output=replace(turn.output, routed_experts=routed)))
        sequences.append(replace(sequence, turns=tuple(turns)))
    *segments, last = sequences
    return replace(last, segments=tuple(segments))


def with_scores(original: Trajectory, seed: int, *, top_k: int) -> Trajectory:
    """The trajectory with random scores of a teacher; those of likely ids are float32."""
    rng = np.random.default_rng(seed)
    count = sum(sum(sequence.loss_mask) for sequence in original.sequences)
    scores = TokenScores(log_probs=tuple(rng.normal(size=count).tolist()))
    if top_k:
        top_log_probs = rng.normal(size=(count, top_k)).astype(np.float32)
        scores = replace(
            scores,
            top_ids=tuple(map(tuple, rng.integers(0, 97, (count, top_k)).tolist())),
            top_log_probs=tuple(map(tuple, top_log_probs.tolist())),
        )
    return replace(original, teacher_scores=scores)


def without_inputs(original: Trajectory) -> Trajectory:
    """The trajectory as its record has it."""
    stripped = []
    for sequence in (*original.segments, original):
        turns = []
        for turn in sequence.turns:
            turns.append(replace(turn, output=replace(turn.output, routed_experts=None)))
        stripped.append(replace(sequence, turns=tuple(turns)))
    *segments, last = stripped
    return replace(last, segments=tuple(segments), teacher_scores=None)


def outputs(of: Trajectory) -> list[RoutedExperts | None]:
    return [turn.output.routed_experts for s in (*of.segments, of) for turn in s.turns]


SEEDS = st.integers(0, 2**32 - 1)
ORIGINALS = st.sampled_from([session(), trajectory([1, 2], [5, 7, 8, 2], mask=[1, 0, 1, 1])])


@given(original=ORIGINALS, seed=SEEDS, wide=st.booleans(), top_k=st.sampled_from([None, 0, 1, 5]))
def test_what_is_stored_is_read_again_to_the_bit(
    tmp_path_factory, original: Trajectory, seed: int, wide: bool, top_k: int | None
):
    learned = with_experts(original, seed, wide=wide)
    if top_k is not None:
        learned = with_scores(learned, seed, top_k=top_k)
    attachments = Attachments(tmp_path_factory.mktemp("run") / "attachments")

    name = attachments.add_learner_inputs(learned)
    recorded = without_inputs(learned)
    if name is None:
        assert learned == recorded
        return
    restored = attachments.read_learner_inputs(name, recorded)
    assert outputs(restored) == outputs(learned)
    assert restored.teacher_scores == learned.teacher_scores
    assert without_inputs(restored) == recorded


def test_a_trajectory_without_them_takes_no_file(tmp_path: Path):
    attachments = Attachments(tmp_path / "attachments")
    assert attachments.add_learner_inputs(session()) is None
    assert not (tmp_path / "attachments").exists()


# --- hostile files --------------------------------------------------------------------------------

NAMES = ["experts_start", "experts.0", "experts.3", "teacher_logprobs", "teacher_top_ids"]
NAMES += ["teacher_top_logprobs", "something_else"]
DTYPES = ["uint8", "uint16", "int32", "int64", "float16", "float32", "float64", "bool"]
ARRAY = st.sampled_from(DTYPES).flatmap(
    lambda dtype: arrays_of.arrays(dtype, arrays_of.array_shapes(min_dims=0, min_side=0))
)


@given(hostile=st.dictionaries(st.sampled_from(NAMES), ARRAY), seed=SEEDS)
def test_any_arrays_are_read_or_refused(hostile: dict[str, np.ndarray], seed: int):
    honest = learner_inputs(with_scores(with_experts(session(), seed), seed, top_k=2))
    for arrays in (hostile, honest | hostile):
        try:
            restored = with_learner_inputs(session(), arrays)
        except ValueError:
            continue
        scores = restored.teacher_scores
        if scores is not None:
            assert np.isfinite(scores.log_probs).all()
        for routed, sequence in zip(outputs(restored), sequences_of_turns(restored), strict=True):
            if routed is not None:
                assert routed.end <= len(sequence.prompt_ids) + len(sequence.response_ids)


def sequences_of_turns(of: Trajectory) -> list[Trajectory]:
    return [s for s in (*of.segments, of) for _ in s.turns]


CHANGES: dict[str, Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]]] = {
    "experts_start is int32": lambda a: {"experts_start": a["experts_start"][:0]},
    "experts.0 has 6 positions from 2": lambda a: {"experts_start": a["experts_start"] + 2},
    "lacks experts.0": lambda a: {"experts.7": a["experts.0"], "experts.0": None},
    "experts.0 is float32": lambda a: {"experts.0": a["experts.0"].astype(np.float32)},
    "teacher_logprobs has numbers": lambda a: {"teacher_logprobs": a["teacher_logprobs"] * np.nan},
    "teacher_logprobs is float64": lambda a: {"teacher_logprobs": a["teacher_logprobs"][1:]},
    "teacher_top_ids has negative": lambda a: {"teacher_top_ids": a["teacher_top_ids"] - 1000},
    "lacks teacher_top_logprobs": lambda a: {"teacher_top_logprobs": None},
    "nothing reads": lambda a: {"unheard_of": a["experts.0"]},
}


def learned_from() -> Trajectory:
    """A trajectory of three sampled ids with experts of six positions and scores of a teacher."""
    told = trajectory([1, 2, 3, 4], [5, 6, 2])
    (turn,) = told.turns
    choices = np.arange(6 * LAYERS * PER_TOKEN, dtype=np.uint8).reshape(6, LAYERS, PER_TOKEN)
    output = replace(turn.output, routed_experts=RoutedExperts.of(0, choices))
    return with_scores(replace(told, turns=(replace(turn, output=output),)), 1, top_k=2)


@pytest.mark.parametrize("message", CHANGES)
def test_arrays_of_another_form_are_named(tmp_path: Path, message: str):
    arrays = dict(learner_inputs(learned_from()))
    for name, array in CHANGES[message](arrays).items():
        arrays.pop(name, None)
        if array is not None:
            arrays[name] = array
    data = save(arrays)
    name = digest(data).removeprefix(PREFIX)
    (tmp_path / f"{name}.safetensors").write_bytes(data)
    with pytest.raises(DataError, match=message) as refused:
        Attachments(tmp_path).read_learner_inputs(name, without_inputs(learned_from()))
    assert name in str(refused.value) and "g-0" in str(refused.value)


@pytest.mark.parametrize("damage", [b"", b"not a file of arrays", b"\xff" * 64, None])
def test_a_file_that_is_damaged_or_missing_is_named(tmp_path: Path, damage: bytes | None):
    attachments = Attachments(tmp_path)
    name = attachments.add_learner_inputs(learned_from())
    assert name is not None
    (file,) = tmp_path.iterdir()
    if damage is None:
        file.unlink()
    else:
        file.write_bytes(damage)
    with pytest.raises(DataError, match=file.name):
        attachments.read_learner_inputs(name, learned_from())


@pytest.mark.parametrize("data", [b"", b"\xff" * 64, b"\x02" + bytes(7) + b"{}" + b"more"])
def test_bytes_that_hold_no_arrays_are_named(tmp_path: Path, data: bytes):
    name = digest(data).removeprefix(PREFIX)
    (tmp_path / f"{name}.safetensors").write_bytes(data)
    with pytest.raises(DataError, match=name):
        Attachments(tmp_path).read_learner_inputs(name, learned_from())


# --- a run folder ---------------------------------------------------------------------------------


def members(count: int) -> list[Trajectory]:
    return [replace(learned_from(), trajectory_id=f"g-{i}", reward=float(i)) for i in range(count)]


def test_a_training_step_is_recorded_with_all_that_its_learner_read(tmp_path: Path):
    group = group_of(members(2), greedy_reward=0.1 + 0.2)
    folder = RunDir(tmp_path)
    folder.store_attachments(1, group.trajectories, [group])
    folder.add_trajectories(1, "train", group.trajectories, groups=[group])

    (file,) = (tmp_path / "attachments").iterdir()  # both were learned from with the same
    for record in read_trajectories(folder.trajectories):
        assert record["greedy_reward"] == 0.1 + 0.2
        assert f"{record['learner_inputs']}.safetensors" == file.name
        assert "teacher_scores" not in record
        restored = restore_trajectory(record)
        restored = folder.attachments.read_learner_inputs(record["learner_inputs"], restored)
        assert restored.teacher_scores == learned_from().teacher_scores
    assert load_file(file)["experts.0"].nbytes == 6 * LAYERS * PER_TOKEN


def test_what_cannot_be_repeated_takes_no_files(tmp_path: Path):
    trajectories = members(4)
    group = group_of(trajectories)
    frozen = Group(group_id="g", trajectories=(), frozen=tuple(trajectories))
    sampled = RunDir(tmp_path / "sampled", keep_trajectories=2)
    sampled.store_attachments(1, trajectories, [group])
    sampled.add_trajectories(1, "train", trajectories, groups=[group])
    sampled.add_trajectories(2, "train", trajectories[:2], groups=[frozen])
    sampled.add_trajectories(2, "heldout", trajectories[:2])

    records = list(read_trajectories(sampled.trajectories))
    assert len(records) == 6
    assert not any(record.get("learner_inputs") for record in records)
    assert not (tmp_path / "sampled" / "attachments").exists()


@pytest.mark.parametrize("name", [5, "../../etc/passwd", "a" * 33, {"a": 1}])
def test_a_record_that_names_anything_else_is_no_record(tmp_path: Path, name: object):
    folder = RunDir(tmp_path)
    group = group_of(members(1))
    folder.add_trajectories(1, "train", group.trajectories, groups=[group])
    assert len(list(read_trajectories(folder.trajectories))) == 1
    (line,) = folder.trajectories.read_text().splitlines()
    folder.trajectories.write_text(json.dumps(json.loads(line) | {"learner_inputs": name}) + "\n")
    assert not list(read_trajectories(folder.trajectories))
