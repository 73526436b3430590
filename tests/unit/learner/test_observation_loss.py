"""The observation loss (ECHO) against plain passes over every trajectory by itself."""

from collections.abc import Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_agent_rl.config import AlgorithmConfig, LearnerConfig
from jax_agent_rl.learner.learner import Learner
from jax_agent_rl.learner.observations import observed_positions
from jax_agent_rl.models.decoder import Decoder
from jax_agent_rl.types import Group, Trajectory
from tests.gradients import policy_batch, policy_gradient
from tests.tiny import TINY, logprobs_of, tiny_params
from tests.trajectories import group_of, random_groups, trajectories_of, trajectory, with_supports

COEF = 0.3
ALONE = {"share_prefixes": False, "pack_length": 32, "micro_batch_size": 1}


def is_even(appended_ids: Sequence[int]) -> list[bool]:
    """Stands for a template that writes all odd ids."""
    return [token % 2 == 0 for token in appended_ids]


def make_learner(coef: float = COEF, *, is_text=is_even, **changes) -> Learner:
    config = LearnerConfig(**{"learning_rate": 1e-2, "pack_length": 64, "remat": "none"} | changes)
    algorithm = AlgorithmConfig.model_validate({"observation_loss": {"coef": coef}})
    return Learner(
        TINY,
        tiny_params(),
        algorithm=algorithm,
        config=config,
        temperature=1.0,
        is_text=is_text,
    )


def observed_nlls(trajectories: Sequence[Trajectory]) -> list[float]:
    """Negative log-probs of even inserted ids, in float64, each trajectory in a pass of its own."""
    nlls = []
    for member in trajectories:
        logprobs = np.asarray(
            logprobs_of(tiny_params(), member.prompt_ids, member.response_ids), np.float64
        )
        for position, token in enumerate(member.response_ids):
            if not member.response_mask[position] and token % 2 == 0:
                nlls.append(-logprobs[position])
    return nlls


def leaves(tree) -> list[np.ndarray]:
    return [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]


def branches() -> list[Group]:
    """Three trajectories of one prompt; two share a turn and its observation, and one fails."""
    shared = [10, 11, 40, 41, 42]
    members = [
        trajectory([3, 4], [*shared, 12], mask=[1, 1, 0, 0, 0, 1], reward=1.0, index=0),
        trajectory([3, 4], [*shared, 13, 44], mask=[1, 1, 0, 0, 0, 1, 0], index=1),
        trajectory([3, 4], [10, 46, 48, 14], mask=[1, 0, 0, 1], index=2),
    ]
    return [group_of(members)]


def test_the_loss_is_the_mean_over_all_observed_ids():
    for groups in (branches(), random_groups(3)):
        expected = observed_nlls(trajectories_of(groups))
        metrics = make_learner().update(groups).metrics
        assert metrics["observed_tokens"] == len(expected) > 0
        assert metrics["observation_loss"] == pytest.approx(np.mean(expected), rel=1e-5)


def test_its_gradient_is_that_of_plain_passes():
    groups = branches()
    with_it, _ = policy_gradient(make_learner(), groups)
    without, _ = policy_gradient(make_learner(0.0), groups)

    def mean_nll(params) -> jax.Array:
        nlls = []
        for member in trajectories_of(groups):
            ids = jnp.array([*member.prompt_ids, *member.response_ids])
            model = Decoder.from_params(TINY, params)
            logprobs = jax.nn.log_softmax(model.logits(model(ids[None])[0])[0])
            for position, token in enumerate(member.response_ids):
                if not member.response_mask[position] and token % 2 == 0:
                    parent = len(member.prompt_ids) + position - 1
                    nlls.append(-logprobs[parent, token])
        return jnp.mean(jnp.stack(nlls))

    expected = leaves(jax.grad(mean_nll)(tiny_params()))
    for total, policy, by_hand in zip(leaves(with_it), leaves(without), expected, strict=True):
        difference = (total - policy) / COEF
        np.testing.assert_allclose(difference, by_hand, atol=3e-5 * np.abs(by_hand).max())


@pytest.mark.parametrize(
    ("layout", "restricted"),
    [({}, False), ({"pack_length": 40, "micro_batch_size": 3}, True)],
    ids=str,
)
def test_rows_and_token_trees_have_the_gradient_of_unpacked_sequences(
    layout: dict, restricted: bool
):
    groups = [*branches(), *random_groups(0)]
    if restricted:
        groups = with_supports(groups)
    expected, _ = policy_gradient(make_learner(**ALONE), groups)
    got, _ = policy_gradient(make_learner(**layout), groups)
    for a, b in zip(leaves(got), leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5 * np.abs(b).max())


def test_an_id_that_two_branches_observed_is_computed_once_and_weighs_twice():
    batch = policy_batch(make_learner(), branches())
    assert batch.observation_weights is not None
    # 40 and 42 twice; 44, 46 and 48 once: seven observed ids at five targets
    weights = batch.observation_weights[batch.observation_weights > 0]
    np.testing.assert_allclose(sorted(weights), np.array([1, 1, 1, 2, 2]) / 7, rtol=1e-6)


def test_masked_trajectories_are_not_predicted():
    groups = branches()
    masked = {trajectories_of(groups)[0].trajectory_id, trajectories_of(groups)[1].trajectory_id}
    metrics = make_learner().update(groups, masked=masked).metrics
    expected = observed_nlls(trajectories_of(groups)[2:])
    assert metrics["observation_loss"] == pytest.approx(np.mean(expected), rel=1e-5)


def test_failures_of_a_whole_group_teach_what_tools_say():
    """No advantage differs from 0; the environment's answers are predicted all the same."""
    groups = [
        replace(
            group, trajectories=tuple(replace(member, reward=0.0) for member in group.trajectories)
        )
        for group in branches()
    ]
    without, _ = policy_gradient(make_learner(0.0), groups)
    assert max(np.abs(leaf).max() for leaf in leaves(without)) == 0
    learner = make_learner()
    losses = [learner.update(groups).metrics["observation_loss"] for _ in range(4)]
    assert losses[-1] < losses[0]


def test_ids_in_the_policys_loss_and_those_beside_images_are_left_out():
    member = trajectory([3], [4, 40, 5, 42, 6, 44], mask=[1, 0, 1, 0, 1, 0])
    assert observed_positions(member, is_even).tolist() == [1, 3, 5]
    first, second, third = member.turns
    turns = (replace(first, learn_appended=True), second, third)
    assert observed_positions(replace(member, turns=turns), is_even).tolist() == [3, 5]
    turns = (first, replace(second, appended_media={"image": ("picture",)}), third)
    assert observed_positions(replace(member, turns=turns), is_even).tolist() == [1, 5]


def test_without_observations_nothing_is_lost():
    groups = [group_of(trajectory([3], [4, 5], reward=float(i), index=i) for i in range(2))]
    result = make_learner().update(groups)
    assert not result.skipped
    assert result.metrics["observation_loss"] == result.metrics["observed_tokens"] == 0
