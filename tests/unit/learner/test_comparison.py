"""Which tokens engine and learner are compared on, and that the learner looks before it learns."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from jax_agent_rl.config import AlgorithmConfig, LearnerConfig
from jax_agent_rl.errors import DisagreementError
from jax_agent_rl.learner.cancellation import StepCancellation, StepCancelled
from jax_agent_rl.learner.comparison import AgreementCheck, Comparison, cancel_on_breach, comparable
from jax_agent_rl.learner.learner import Learner
from jax_agent_rl.types import Group, Trajectory
from tests.tiny import TINY, logprobs_of, tiny_params
from tests.trajectories import random_groups, trajectories_of, trajectory


def _mask(versions: tuple[tuple[int, ...], ...]) -> list[int]:
    mask = []
    for of_turn in versions:
        mask += [1] * len(of_turn) + [0, 0]
    return mask


def of_versions(*versions: tuple[int, ...], learn_appended: bool = False) -> Trajectory:
    """A trajectory whose turns were sampled by these versions, two ids appended to each."""
    base = trajectory(
        [1, 2, 3], [4 if mine else 5 for mine in _mask(versions)], mask=_mask(versions)
    )
    turns = [
        replace(turn, output=replace(turn.output, policy_versions=v), learn_appended=learn_appended)
        for turn, v in zip(base.turns, versions, strict=True)
    ]
    return Trajectory.from_turns(
        prompt_ids=base.prompt_ids,
        turns=turns,
        trajectory_id="t",
        group_id="g",
        agent_name="a",
        finish_reason=base.finish_reason,
    )


@pytest.mark.parametrize(
    ("versions", "since", "expected"),
    [
        (((3, 3), (3, 3, 3)), 3, [1, 1, 1, 1, 1]),
        (((2, 2), (3, 3, 3)), 3, [0, 0, 1, 1, 1]),
        (((2, 3, 3), (3,)), 3, [0, 0, 0, 1]),  # its keys and values may be those of version 2
        (((3, 3, 4), (4,)), 3, [1, 1, 0, 1]),
        (((2, 2),), 0, [1, 1]),  # nothing has been learnt since version 0
    ],
)
def test_tokens_of_the_learners_version_alone_are_compared(versions, since, expected):
    assert comparable(of_versions(*versions), since).astype(int).tolist() == expected


def test_what_was_appended_is_never_compared_even_where_it_is_trained_on():
    compared = of_versions((3,), (3,), learn_appended=True)
    assert comparable(compared, 3).astype(int).tolist() == [1, 0, 0, 1, 0, 0]
    assert len(comparable(compared, 3)) == sum(compared.loss_mask)


def test_constrained_tokens_are_not_compared():
    trajectory = of_versions((3, 3, 3), (3,))
    first = replace(
        trajectory.turns[0],
        output=replace(trajectory.turns[0].output, constrained=(False, True, False)),
    )
    trajectory = replace(trajectory, turns=(first, *trajectory.turns[1:]))
    assert comparable(trajectory, 3).tolist() == [True] * 3
    assert sum(trajectory.loss_mask) == 3


def test_an_infinite_gap_is_a_breach_and_nan_is_none():
    assert Comparison.of(np.array([np.inf, 0.0])).largest > 1000
    assert Comparison.of(np.array([np.nan, 0.25])) == Comparison(tokens=1, mean=0.25, largest=0.25)
    assert Comparison.of(np.zeros(0)).tokens == 0


def make_learner(*, algorithm: dict | None = None, **config) -> Learner:
    settings = LearnerConfig(**{"learning_rate": 1e-2, "pack_length": 64, "remat": "none"} | config)
    return Learner(
        TINY,
        tiny_params(),
        algorithm=AlgorithmConfig(**algorithm or {}),
        config=settings,
        temperature=1.0,
    )


def on_policy(groups: list[Group], off: float = 0.0) -> list[Group]:
    """Give groups the tiny model's log-probs; the first token of the first trajectory is off."""
    params = tiny_params()
    sampled_groups = []
    for group in groups:
        members = []
        for t in group.trajectories:
            sampled = logprobs_of(params, t.prompt_ids, t.response_ids)
            begin = 0
            turns = []
            for turn in t.turns:
                end = begin + len(turn.output.token_ids)
                values = sampled[begin:end].tolist()
                values[0] += off
                off = 0.0
                turns.append(replace(turn, output=replace(turn.output, log_probs=tuple(values))))
                begin = end + len(turn.appended_ids)
            fields = {
                n: getattr(t, n)
                for n in ("trajectory_id", "group_id", "agent_name", "finish_reason", "reward")
            }
            members.append(Trajectory.from_turns(prompt_ids=t.prompt_ids, turns=turns, **fields))
        sampled_groups.append(replace(group, trajectories=tuple(members)))
    return sampled_groups


@pytest.mark.parametrize(
    ("config", "algorithm"),
    [
        ({}, {}),
        ({"num_minibatches": 2}, {}),
        ({}, {"rollout_correction": {"bypass_mode": True}}),
    ],
    ids=["the update's own pass", "a scoring pass", "bypass"],
)
def test_a_check_before_the_first_update_can_stop_it_with_nothing_changed(config, algorithm):
    learner = make_learner(algorithm=algorithm, **config)
    seen = []
    initial_policy = jax.device_get(learner.state.policy)

    def refuse(comparison: Comparison) -> None:
        seen.append(comparison)
        raise DisagreementError("stop")

    groups = on_policy(random_groups(2), off=0.5)
    with pytest.raises(DisagreementError):
        learner.update(groups, check=AgreementCheck(since=0, inspect=refuse))
    (comparison,) = seen
    assert comparison.tokens > 10
    assert comparison.largest == pytest.approx(0.5, abs=1e-3)
    assert comparison.mean == pytest.approx(0.5 / comparison.tokens, abs=1e-4)
    jax.tree.map(
        np.testing.assert_array_equal, jax.device_get(learner.state.policy), initial_policy
    )


def test_the_learner_looks_once_a_step_and_only_at_tokens_of_its_own_version():
    learner = make_learner(ppo_epochs=2)
    seen = []
    groups = on_policy(random_groups(2))
    learner.update(groups, check=AgreementCheck(since=0, inspect=seen.append))
    learner.update(groups, check=AgreementCheck(since=10_000, inspect=seen.append))
    assert seen[0].tokens == sum(t.num_sampled for t in trajectories_of(groups))
    assert seen[0].largest < 1e-4
    assert seen[1].tokens == 0
    assert len(seen) == 2


def test_a_breach_cancels_the_step_and_raises_once_it_is_given_up():
    cancellation = StepCancellation()
    refusal = DisagreementError("stop")

    def refuse(comparison: Comparison) -> None:
        raise refusal

    with pytest.raises(DisagreementError) as caught:
        with cancel_on_breach(AgreementCheck(since=3, inspect=refuse), cancellation) as check:
            check.inspect(
                Comparison(tokens=1, mean=1.0, largest=1.0)
            )  # does not leave the others waiting
            with cancellation.update():
                raise AssertionError("the step is cancelled")
    assert caught.value is refusal and check.since == 3
    with (
        pytest.raises(StepCancelled),
        cancel_on_breach(AgreementCheck(since=0, inspect=refuse), cancellation),
    ):
        cancellation.check()  # cancelled by somebody else


@pytest.mark.parametrize("settings", [{}, {"weight_decay": 0.1}, {"lr_warmup_steps": 50}], ids=str)
def test_the_parameters_before_the_last_update_come_back(settings):
    learner = make_learner(**settings)
    assert learner.previous_params() is None
    learner.update(random_groups(1))
    previous_params = jax.device_get(learner.params)
    learner.update(random_groups(2))
    moved = max(
        float(abs(a - b).max())
        for a, b in zip(*map(jax.tree.leaves, (previous_params, learner.params)), strict=True)
    )
    back = learner.previous_params()
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-2 * moved, rtol=0),
        back,
        previous_params,
    )


def test_a_step_without_an_update_does_not_change_what_comes_back():
    """Its learning rate is not that of the update before it: of the warm-up's third step, not of
    its second.
    """
    learner = make_learner(lr_warmup_steps=50)
    learner.update(random_groups(1))
    previous_params = jax.device_get(learner.params)
    learner.update(random_groups(2))
    moved = max(
        float(abs(a - b).max())
        for a, b in zip(*map(jax.tree.leaves, (previous_params, learner.params)), strict=True)
    )
    masked = random_groups(3)
    learner.update(masked, masked={t.trajectory_id for t in trajectories_of(masked)})
    back = learner.previous_params()
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-2 * moved, rtol=0),
        back,
        previous_params,
    )


def test_scoring_for_a_diagnosis_gives_what_plain_passes_give():
    groups = on_policy(random_groups(4))
    scored = make_learner().logprobs(groups)
    for t, log_probs in zip(trajectories_of(groups), scored, strict=True):
        np.testing.assert_allclose(
            log_probs, np.asarray(t.rollout_logprobs)[np.asarray(t.loss_mask, bool)], atol=2e-4
        )
