"""Self-distillation from feedback (SDPO) against plain passes over the teacher's context."""

from collections.abc import Sequence
from dataclasses import replace

import jax
import numpy as np
import pytest

from jax_agent_rl.config import AlgorithmConfig, LearnerConfig
from jax_agent_rl.learner.learner import Learner
from jax_agent_rl.types import Group, Trajectory
from tests.gradients import policy_gradient
from tests.tiny import TINY, logprobs_of, tiny_params
from tests.trajectories import random_groups, trajectories_of

COEF = 0.5
SDPO = {
    "adv_estimator": "none",
    "kl": {"where": "advantage", "estimator": "k1", "coef": COEF, "reference": "feedback"},
}


def make_learner(algorithm=SDPO, **changes) -> Learner:
    config = LearnerConfig(**{"learning_rate": 1e-2, "pack_length": 64, "remat": "none"} | changes)
    return Learner(
        TINY,
        tiny_params(),
        algorithm=AlgorithmConfig.model_validate(algorithm),
        config=config,
        temperature=1.0,
    )


def with_feedback(groups: Sequence[Group]) -> list[Group]:
    """The groups; every second member has three more ids in its teacher's prompt."""
    changed = []
    for group in groups:
        members = []
        for number, member in enumerate(group.trajectories):
            if number % 2:
                prompt_ids = (*member.prompt_ids[:-1], 50 + number, 60, 61, member.prompt_ids[-1])
                member = replace(member, teacher_prompt_ids=prompt_ids)
            members.append(member)
        changed.append(replace(group, trajectories=tuple(members)))
    return changed


def sampled_logprobs(member: Trajectory, prompt_ids: Sequence[int]) -> np.ndarray:
    logprobs = logprobs_of(tiny_params(), prompt_ids, member.response_ids)
    return logprobs[np.asarray(member.response_mask) == 1]


def test_a_tokens_advantage_is_what_feedback_adds_to_its_log_prob():
    groups = with_feedback(random_groups(0))
    _, experience = make_learner().prepare(groups)
    for member, advantages in zip(trajectories_of(groups), experience.advantages, strict=True):
        plain = sampled_logprobs(member, member.prompt_ids)
        if not member.teacher_prompt_ids:
            np.testing.assert_array_equal(advantages, np.zeros(len(plain)))
            continue
        informed = sampled_logprobs(member, member.teacher_prompt_ids)
        np.testing.assert_allclose(advantages, COEF * (informed - plain), atol=1e-5)
    assert experience.metrics["feedback_share"] == 0.5


def test_it_adds_to_the_advantages_of_rewards():
    groups = with_feedback(random_groups(0))
    _, of_both = make_learner(SDPO | {"adv_estimator": "grpo"}).prepare(groups)
    _, of_rewards = make_learner({"adv_estimator": "grpo"}).prepare(groups)
    _, of_feedback = make_learner().prepare(groups)
    for both, reward, feedback in zip(
        of_both.advantages, of_rewards.advantages, of_feedback.advantages, strict=True
    ):
        np.testing.assert_allclose(both, reward + feedback, atol=1e-6)


@pytest.mark.parametrize("kl", [{}, {"where": "loss", "estimator": "k1+"}], ids=str)
def test_the_gradient_does_not_depend_on_the_layout(kl: dict):
    groups = with_feedback(random_groups(0))
    algorithm = SDPO | {"kl": SDPO["kl"] | kl}
    alone = {"share_prefixes": False, "pack_length": 40, "micro_batch_size": 1}
    expected, _ = policy_gradient(make_learner(algorithm, **alone), groups)
    got, _ = policy_gradient(make_learner(algorithm, micro_batch_size=3), groups)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, atol=3e-5 * np.abs(b).max())


def test_without_feedback_there_is_nothing_to_learn():
    for kl in ({}, {"where": "loss", "estimator": "k1+"}):
        algorithm = SDPO | {"kl": SDPO["kl"] | kl}
        gradient, _ = policy_gradient(make_learner(algorithm), random_groups(0))
        assert max(np.abs(np.asarray(leaf)).max() for leaf in jax.tree.leaves(gradient)) == 0


@pytest.mark.parametrize("num_minibatches", [1, 2])
def test_trajectories_without_feedback_are_not_scored_again(monkeypatch, num_minibatches: int):
    learner = make_learner(num_minibatches=num_minibatches)
    plain = random_groups(0)
    packed = []
    pack = learner.packer.pack

    def recorded_pack(trajectories, **options):
        packed.extend(trajectories)
        return pack(trajectories, **options)

    monkeypatch.setattr(learner.packer, "pack", recorded_pack)
    learner.prepare(plain)
    num_members = len(trajectories_of(plain))
    assert len(packed) == num_members

    packed.clear()
    groups = with_feedback(plain)
    learner.prepare(groups)
    taught = [member for member in trajectories_of(groups) if member.teacher_prompt_ids]
    prompts_of_teachers = [member.prompt_ids for member in packed[num_members:]]
    assert prompts_of_teachers == [member.teacher_prompt_ids for member in taught]


def test_the_policy_comes_to_answer_as_if_it_had_read_the_feedback():
    groups = with_feedback(random_groups(0))
    kl = SDPO["kl"] | {"where": "loss", "estimator": "k2", "coef": 1.0}
    learner = make_learner(SDPO | {"kl": kl})
    losses = [learner.update(groups).metrics["kl_loss"] for _ in range(6)]
    assert losses[-1] < losses[0]
