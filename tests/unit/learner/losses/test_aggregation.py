"""Weights make the loss the named mean; their ratio to a token's weight in verl and TRL.

verl's ``agg_loss(token-mean)``: sum / tokens of the update. TRL's ``dapo``: sum / tokens of the
rollout batch.
"""

from fractions import Fraction
from typing import get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jax_agent_rl.config import build
from jax_agent_rl.config.algorithm import LossAggMode
from jax_agent_rl.learner.losses.aggregation import (
    AGGREGATION_FORMULAS,
    describe_aggregation,
    describe_batch,
    term_weights,
    weight_ratios,
)
from jax_agent_rl.learner.packing import mini_batches, trained_lengths
from tests.trajectories import random_groups

UPDATES = ((2, 6), (4, 8, 4))  # 8 and 16 tokens, of 24
HERE = {  # weight of a token, by hand
    "token-mean": ([Fraction(1, 8)] * 2, [Fraction(1, 16)] * 3),
    "token-sum": ([Fraction(1)] * 2, [Fraction(1)] * 3),
    "seq-mean-token-sum": ([Fraction(1, 2)] * 2, [Fraction(1, 3)] * 3),
    "seq-mean-token-mean": (
        [Fraction(1, 4), Fraction(1, 12)],
        [Fraction(1, 12), Fraction(1, 24), Fraction(1, 12)],
    ),
    "seq-mean-token-sum-norm": ([Fraction(1, 20)] * 2, [Fraction(1, 30)] * 3),
}


@pytest.mark.parametrize("mode", HERE)
def test_the_ratios_are_those_of_the_formulas(mode: str):
    got = weight_ratios(mode, UPDATES, scale_factor=10)
    first, second = HERE[mode]
    over_verl = [w * 8 for w in first] + [w * 16 for w in second]
    over_trl = [w * 24 for w in (*first, *second)]
    assert got["verl"] == pytest.approx((float(min(over_verl)), float(max(over_verl))))
    assert got["trl"] == pytest.approx((float(min(over_trl)), float(max(over_trl))))


def said(*overrides: str) -> str:
    minimal = {"run_dir": "r", "model": {"path": "m"}, "data": {"train": "t"}}
    sizes = ["rollout.prompts_per_step=6", "rollout.group_size=8", "agent.max_response_length=96"]
    return describe_aggregation(build(minimal, [*sizes, *overrides]))


def test_one_update_of_token_mean_is_both_peers_default_and_nothing_is_said():
    assert said() == ""


@pytest.mark.parametrize(
    ("overrides", "verl", "trl"),
    [
        (["learner.num_minibatches=2"], "x1 that of verl", "x2 that of TRL"),
        (
            ["learner.num_minibatches=4"],
            "x1 that of verl",
            "x3 to x6 that of TRL",
        ),  # 2, 2, 1 and 1 of 6 prompts
        (["algorithm.loss_agg_mode=seq-mean-token-sum"], "x96 that of verl", "x96 that of TRL"),
        (
            ["algorithm.loss_agg_mode=token-sum"],
            "x4608 that of verl",
            "x4608 that of TRL",
        ),  # 48 * 96 = 4608
        (
            ["algorithm.loss_agg_mode=seq-mean-token-sum-norm", "algorithm.loss_scale_factor=48"],
            "x2 that of verl",
            "x2 that of TRL",
        ),
    ],
)
def test_what_depends_on_lengths_is_said_for_equal_ones(overrides: list[str], verl: str, trl: str):
    line = said(*overrides)
    assert "if all have agent.max_response_length=96" in line
    assert verl in line
    assert trl in line


@pytest.mark.parametrize("mode", get_args(LossAggMode))
def test_every_aggregation_is_said_with_its_formula(mode: str):
    constant = ["algorithm.loss_scale_factor=7"] if mode.endswith("norm") else []
    constant.append("learner.num_minibatches=2")  # by which some weight differs
    assert (
        f"{mode} = {AGGREGATION_FORMULAS[mode].format(scale_factor=7, units='trajectories')}, over"
        in said(f"algorithm.loss_agg_mode={mode}", *constant)
    )


def test_a_batch_is_weighed_by_its_own_lengths():
    algorithm = build(
        {"run_dir": "r", "model": {"path": "m"}, "data": {"train": "t"}},
        ["algorithm.loss_agg_mode=seq-mean-token-mean"],
    ).algorithm
    assert (
        describe_batch(algorithm, [[2, 6]])
        == "loss aggregation: seq-mean-token-mean, over this batch's 2 trajectories of 2 to 6"
        " trained tokens: a token's weight is x0.6667 to x2 that of verl's default (token-mean),"
        " x0.6667 to x2 that of TRL's (loss_type=dapo)"
    )


def test_lengths_are_counted_as_the_learner_cuts_and_masks_the_batch():
    groups = random_groups(0, groups=3, members=2)
    masked = {groups[2].trajectories[0].trajectory_id}
    got = trained_lengths(groups, 2, masked=masked, segment_weight="session")
    assert [[g.group_id for g in part] for part in mini_batches(groups, 2)] == [
        ["g0", "g1"],
        ["g2"],
    ]
    assert [len(part) for part in got] == [4, 1]
    assert got[1] == [groups[2].trajectories[1].num_sampled]
    assert len(mini_batches(groups, 5)) == 3


masks = st.lists(st.lists(st.booleans(), min_size=1, max_size=6), min_size=1, max_size=6)
MODES = (
    "token-mean",
    "token-sum",
    "seq-mean-token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum-norm",
)


@given(masks)
def test_weights_make_the_loss_the_named_mean(rows):
    active = [np.array(row) for row in rows]
    losses = [np.arange(len(row)) + 10.0 * i for i, row in enumerate(rows)]
    inside = [x[m] for x, m in zip(losses, active, strict=True) if m.any()]
    expected = dict.fromkeys(MODES, 0.0)
    if inside:
        sums = [x.sum() for x in inside]
        expected = {
            "token-mean": np.concatenate(inside).mean(),
            "token-sum": sum(sums),
            "seq-mean-token-sum": np.mean(sums),
            "seq-mean-token-mean": np.mean([x.mean() for x in inside]),
            "seq-mean-token-sum-norm": np.mean(sums) / 7,
        }
    for mode in MODES:
        weights = term_weights(mode, active, scale_factor=7)
        got = sum(float((w * x).sum()) for w, x in zip(weights, losses, strict=True))
        assert got == pytest.approx(expected[mode])
        assert all((w[~m] == 0).all() for w, m in zip(weights, active, strict=True))
