"""One record of what a trajectory earned: filters, estimators, baselines and metrics read it where
they should.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jax_agent_rl.collect.filters import has_equal_outcomes, select, shape
from jax_agent_rl.config import AlgorithmConfig
from jax_agent_rl.config.algorithm import ADV_ESTIMATORS, ShapingConfig
from jax_agent_rl.learner.advantages.registry import compute_advantages
from jax_agent_rl.learner.advantages.scored_batch import scored_batch
from jax_agent_rl.observe.run_dir import restore_trajectory, trajectory_record
from jax_agent_rl.observe.warnings import rules
from jax_agent_rl.observe.watch import Watch
from jax_agent_rl.outcomes import accuracy, total_reward, unshaped_total
from jax_agent_rl.rollout.protocol import BackendMetrics, GenerateRequest
from jax_agent_rl.runtime.multihost import decode_groups, encode_groups
from jax_agent_rl.trainer.base import Trainer
from jax_agent_rl.trainer.record import evaluation_record, step_record
from jax_agent_rl.trainer.step import update_role_baselines
from jax_agent_rl.types import DropReason, Group, Trajectory
from tests.fake_training import Versions, books, finish, make_trainer, steps_of
from tests.fakes import FakeCodec
from tests.trajectories import call, group_of, trajectory

SHAPING = ShapingConfig(
    overlong_buffer=8, overlong_factor=1.0, repetition_factor=0.5, repetition_ngram=2
)
LIMIT = 10


def members(
    *scores: float, lengths: list[int] | None = None, parts: list[dict] | None = None
) -> Group:
    """Trajectories of these scores; the longer, the more they are penalized."""
    lengths = lengths or list(range(2, 2 + len(scores)))
    parts = parts or [{} for _ in scores]
    rows = zip(scores, lengths, parts, strict=True)
    return group_of(
        replace(
            trajectory([3], list(range(20, 20 + length)), reward=score, index=i),
            reward_parts=reward_parts,
        )
        for i, (score, length, reward_parts) in enumerate(rows)
    )


def shaped(group: Group) -> Group:
    return shape(group, SHAPING, max_response_length=LIMIT)


# --- the record -----------------------------------------------------------------------------------


def test_shaping_changes_the_reward_and_keeps_the_score():
    group = members(1.0, 1.0)
    first, second = shaped(group).trajectories
    assert [t.score for t in (first, second)] == [1.0, 1.0]
    assert second.reward < first.reward <= 1.0
    assert second.reward == pytest.approx(1.0 + sum(second.reward_parts.values()))


def test_penalties_are_taken_off_once_however_often():
    once = shaped(members(1.0, 0.0))
    assert shaped(once) == once


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ({"accuracy": 1.0}, 1.0),
        ({"acc": 0.0}, 0.0),
        ({"accuracy": 1.0, "acc": 0.0}, 1.0),
        ({"style": 1.0}, 0.25),
    ],
)
def test_accuracy_is_what_the_reward_function_says_or_its_score(parts: dict, expected: float):
    (member,) = members(0.25, parts=[parts]).trajectories
    assert accuracy(member) == expected
    (penalized,) = shaped(group_of([member])).trajectories
    assert accuracy(penalized) == expected


def test_the_record_survives_files_and_other_processes():
    group = shaped(members(1.0, 0.5))
    (read,) = decode_groups(encode_groups([group]))
    restored = [
        restore_trajectory(trajectory_record(t, step=1, split="train")) for t in group.trajectories
    ]
    for trajectories in (read.trajectories, restored):
        assert [(t.score, t.reward) for t in trajectories] == [
            (t.score, t.reward) for t in group.trajectories
        ]


# --- filters --------------------------------------------------------------------------------------

scores = st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=2, max_size=4)


@given(scores, st.data())
@pytest.mark.parametrize("filters", [None, True])
@pytest.mark.parametrize("turn_reward", ["none", "tool_reward"])
def test_shaping_never_changes_whether_a_group_did_equally_well(filters, turn_reward, scores, data):
    """What is left out unshaped is left out shaped, and nothing else, unless penalties make totals
    equal.
    """
    lengths = data.draw(st.lists(st.integers(1, LIMIT), min_size=len(scores), max_size=len(scores)))
    config = AlgorithmConfig(filter_zero_variance=filters, turn_reward=turn_reward)
    group = members(*scores, lengths=lengths)
    plain = select([group], config)
    penalized = select([shaped(group)], config)
    if len(set(scores)) == 1:
        assert not plain.groups and not penalized.groups
        assert penalized.dropped == plain.dropped
    else:
        totals = {total_reward(t, turn_reward) for t in shaped(group).trajectories}
        assert plain.groups
        assert bool(penalized.groups) == (len(totals) > 1)


@pytest.mark.parametrize(
    "estimator", [name for name in ADV_ESTIMATORS if name not in ("gae", "remax")]
)
def test_a_group_that_a_default_filter_leaves_out_has_no_advantages(estimator: str):
    parts = {"gdpo": {"reward_keys": ["score", "style"]}} if estimator == "gdpo" else {}
    config = AlgorithmConfig.model_validate(
        {"adv_estimator": estimator, "turn_reward": turns(estimator), **parts}
    )
    for values in ((1.0, 1.0, 1.0), (1.0, 0.0, 1.0)):
        group = members(*values, lengths=[2, 2, 2], parts=[{"style": 0.5}] * 3)
        advantages = compute_advantages(
            scored_batch([group], turn_reward=config.turn_reward), config
        ).advantages
        is_left_out = not select([group], config).groups
        assert not is_left_out or all(
            np.allclose(per_token, 0, atol=1e-3) for per_token in advantages
        )


def turns(estimator: str) -> str:
    return {"mt_grpo": "tool_success", "igpo": "progress"}.get(estimator, "none")


def test_rewards_of_turns_keep_a_group_that_its_estimator_compares_by_them():
    """GRPO's S is the reward and the turns' rewards: equal scores have advantages if tools paid
    differently.
    """
    group = members(1.0, 1.0)
    paid = tuple(
        replace(t, turns=(replace(t.turns[0], tool_calls=(replace(call(), reward=float(i)),)),))
        for i, t in enumerate(group.trajectories)
    )
    group = replace(group, trajectories=paid)
    assert select([group], AlgorithmConfig()).dropped == {DropReason.ZERO_VARIANCE: ("g-0", "g-1")}
    assert select([group], AlgorithmConfig(turn_reward="tool_reward")).groups == (group,)


ALL_RIGHT = {"accuracy": 1.0}


@pytest.mark.parametrize(
    ("settings", "is_left_out"),
    [
        ({}, False),  # different rewards have advantages
        ({"filter_metric": "accuracy"}, True),
        ({"filter_zero_variance": True}, True),  # DAPO: all right
        ({"filter_zero_variance": True, "filter_metric": "reward"}, False),
        ({"filter_zero_variance": False}, False),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["accuracy", "acc"])
def test_a_group_is_all_right_by_its_accuracy_or_equal_by_its_reward(
    name: str, settings: dict, is_left_out: bool
):
    group = members(1.0, 0.7, parts=[{name: 1.0}, {name: 1.0}])
    assert select([shaped(group)], AlgorithmConfig(**settings)).groups is not is_left_out


def test_penalties_that_make_totals_equal_leave_nothing_to_compare():
    """One is right and long, the other wrong and short: S is 0 for both, as is every advantage."""
    group = shape(
        members(1.0, 0.0, lengths=[10, 2]),
        ShapingConfig(overlong_buffer=8),
        max_response_length=LIMIT,
    )
    assert [t.reward for t in group.trajectories] == [0.0, 0.0]
    assert not has_equal_outcomes(
        group, AlgorithmConfig(adv_estimator="gae", filter_zero_variance=True)
    )
    assert has_equal_outcomes(group, AlgorithmConfig())


# --- baselines ------------------------------------------------------------------------------------


def test_running_baselines_have_what_they_are_subtracted_from():
    group = members(1.0)
    paid = replace(group.trajectories[0].turns[0], tool_calls=(replace(call(), reward=0.5),))
    group = replace(group, trajectories=(replace(group.trajectories[0], turns=(paid,)),))
    (without,) = update_role_baselines({}, [group]).values()
    (with_turns,) = update_role_baselines({}, [group], turn_reward="tool_reward").values()
    assert with_turns == pytest.approx(1.5 * without)
    assert scored_batch([group], turn_reward="tool_reward").totals == pytest.approx([1.5])


@pytest.mark.parametrize("turn_reward", ["none", "tool_reward", "tool_success", "progress"])
def test_totals_are_those_of_the_estimators(turn_reward: str):
    group = shaped(members(1.0, 0.5, 0.0))
    called = replace(
        group.trajectories[0].turns[0],
        tool_calls=(call(), replace(call(error="raised"), reward=0.25)),
    )
    first = replace(group.trajectories[0], turns=(called,))
    group = replace(group, trajectories=(first, *group.trajectories[1:]))
    totals = [total_reward(t, turn_reward) for t in group.trajectories]
    assert totals == pytest.approx(list(scored_batch([group], turn_reward=turn_reward).totals))
    penalties = [t.reward - t.score for t in group.trajectories]
    unshaped = [unshaped_total(t, turn_reward) for t in group.trajectories]
    assert [a - b for a, b in zip(totals, unshaped, strict=True)] == pytest.approx(penalties)


# --- metrics --------------------------------------------------------------------------------------


def line_of(*groups: Group, **fields: Any) -> dict[str, Any]:
    return step_record(
        1,
        groups,
        {},
        BackendMetrics(),
        accounting={},
        rollout_seconds=1.0,
        weight_update_seconds=0.0,
        step_seconds=1.0,
        recompilations=0,
        pipeline={},
        **fields,
    )


def test_a_step_shows_scores_and_what_is_learned_from_apart():
    line = line_of(shaped(members(1.0, 1.0)), shaped(members(0.0, 1.0)))
    assert (line["score_mean"], line["score_min"], line["score_max"]) == (0.75, 0.0, 1.0)
    assert line["reward_mean"] < 0.75
    assert line["zero_variance_share"] == 0.5
    mixed = members(1.0, 0.5, parts=[ALL_RIGHT, ALL_RIGHT])
    assert line_of(mixed)["zero_variance_share"] == 0.0
    assert (
        line_of(mixed, algorithm=AlgorithmConfig(filter_zero_variance=True))["zero_variance_share"]
        == 1.0
    )


def test_held_out_accuracy_reads_no_penalty():
    assert evaluation_record(1, [shaped(members(1.0, 0.0))], seconds=1.0)["accuracy"] == 0.5


def test_a_run_that_earns_nothing_but_penalties_is_told_so(tmp_path: Path):
    config = make_trainer(tmp_path, steps=1).runtime.config
    said: list[str] = []
    watch = Watch(rules(config), said.append)
    line = line_of(shaped(members(0.0, 0.0, lengths=[4, 9])))
    assert line["reward_min"] < 0
    watch.update(line | {"learner_idle_share": 0.0})
    assert "no_reward" in watch.active


# --- the trainers ---------------------------------------------------------------------------------

MODES = ["sync", "one_step_off", "fully_async"]


class LongAndShort:
    """A script: a group's second member is longer than the others, and so is a greedy rollout."""

    codec: FakeCodec

    def __call__(self, request: GenerateRequest) -> list[int]:
        session_id = str(request.session_id)
        is_long = session_id.endswith("-1") or session_id.startswith("greedy")
        return self.codec.reply_ids(
            "one two three four five six seven eight" if is_long else "one two"
        )


async def all_right(original: Trajectory) -> Trajectory:
    return replace(original, reward=1.0)


async def second_is_right(original: Trajectory) -> Trajectory:
    return replace(original, reward=float(original.trajectory_id.endswith("-1")))


def penalizing_trainer(
    tmp_path: Path, mode: str, *, algorithm: dict | None = None, **sections: Any
) -> Trainer:
    """A trainer whose rewards fall from the seventh to the tenth token."""
    script = LongAndShort()
    training = make_trainer(
        tmp_path,
        steps=2,
        algorithm={"shaping": {"overlong_buffer": 4, "overlong_factor": 0.5}} | (algorithm or {}),
        trainer={"mode": mode},
        script=script,
        learner=Versions(),
        agent={"max_response_length": 10},
        **sections,
    )
    script.codec = training.runtime.codec
    return training


def learned(training: Trainer) -> list[Group]:
    return [group for groups in training.runtime.learner.steps for group in groups]


@pytest.mark.parametrize("mode", MODES)
async def test_no_trainer_learns_from_lengths_where_all_are_right(tmp_path: Path, mode: str):
    training = penalizing_trainer(
        tmp_path, mode, score=all_right, algorithm={"max_resample_rounds": 1}
    )
    await finish(training)
    assert not learned(training)
    assert set(books(training).dropped) == {DropReason.ZERO_VARIANCE}
    lines = steps_of(tmp_path)
    assert all(line["reward_min"] < line["reward_max"] == 1.0 for line in lines), (
        "penalties differed"
    )
    assert all(line["zero_variance_share"] == line["score_min"] == 1.0 for line in lines)


@pytest.mark.parametrize("mode", MODES)
async def test_every_trainer_learns_from_penalties_beside_scores(tmp_path: Path, mode: str):
    training = penalizing_trainer(tmp_path, mode, score=second_is_right)
    await finish(training)
    rewards = {(t.score, t.reward) for group in learned(training) for t in group.trajectories}
    assert {score for score, _ in rewards} == {0.0, 1.0}
    assert all(reward < score for score, reward in rewards if score)
    assert (0.0, 0.0) in rewards


@pytest.mark.parametrize("mode", MODES)
async def test_the_greedy_baseline_is_shaped_as_what_it_is_subtracted_from(
    tmp_path: Path, mode: str
):
    algorithm = {"adv_estimator": "remax"}
    training = penalizing_trainer(
        tmp_path, mode, score=all_right, algorithm=algorithm, group_size=1
    )
    await finish(training)
    assert len(learned(training)) == 2
    for group in learned(training):
        assert group.rewards == (1.0,)
        assert group.greedy_reward is not None
        assert group.greedy_reward < 1.0
