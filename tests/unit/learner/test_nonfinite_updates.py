"""Updates whose gradients are not finite: who counts them, what they cost, and what is learned
beside them.
"""

from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_agent_rl.collect.accounting import Accounting
from jax_agent_rl.collect.filters import Selection
from jax_agent_rl.config import AlgorithmConfig, CriticConfig, LearnerConfig, LoraConfig
from jax_agent_rl.errors import NonFiniteError
from jax_agent_rl.learner.checkpoint import Checkpointer
from jax_agent_rl.learner.learner import Learner
from jax_agent_rl.learner.multi_adapter import MultiAdapterLearner
from jax_agent_rl.learner.sequence_learner import AdamParams, SequenceLearner
from jax_agent_rl.learner.sequences import TrainingSequence
from jax_agent_rl.trainer.record import account
from jax_agent_rl.types import DropReason, Group
from tests.messages import raises
from tests.tiny import TINY, tiny_params
from tests.trajectories import random_groups, trajectories_of

ADAPTIVE = {"where": "loss", "coef": 0.1, "controller": "adaptive", "target": 1e-4, "horizon": 10}


def make_learner(
    algorithm: dict | None = None, *, critic_warmup: int = 0, **changes: object
) -> Learner:
    config = {"learning_rate": 1e-2, "pack_length": 64, "remat": "none"} | changes
    return Learner(
        TINY,
        tiny_params(),
        algorithm=AlgorithmConfig.model_validate({"adv_estimator": "dr_grpo"} | (algorithm or {})),
        config=LearnerConfig.model_validate(config),
        temperature=1.0,
        critic=CriticConfig(learning_rate=1e-2, critic_warmup=critic_warmup),
    )


def poisoned(group: Group) -> Group:
    """Rewards whose advantages no float32 holds: the gradient of their mini-batch is not finite."""
    members = tuple(replace(t, reward=t.reward * 1e300) for t in group.trajectories)
    return replace(group, trajectories=members)


def groups_with_poison(seed: int = 1, *, groups: int = 2, at: int = 1) -> list[Group]:
    sampled = random_groups(seed, groups=groups, members=3)
    sampled[at] = poisoned(sampled[at])
    return sampled


def ids(groups: list[Group]) -> set[str]:
    return {t.trajectory_id for t in trajectories_of(groups)}


def bits(tree: object) -> list[bytes]:
    return [np.asarray(x).tobytes() for x in jax.tree.leaves(tree)]


def with_nan(learner: Learner, *, critic: bool = False) -> None:
    """Make a model's every gradient NaN."""
    state = learner.state
    model = state.critic if critic else state.policy
    assert model is not None
    params = model.params | {"final_norm": jnp.full_like(model.params["final_norm"], jnp.nan)}
    learner.state = replace(
        state, **{"critic" if critic else "policy": replace(model, params=params)}
    )


# --- guards belong to one model -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "fix"), [("policy", "learner.learning_rate"), ("critic", "critic.learning_rate")]
)
def test_a_finite_model_does_not_reset_the_count_of_the_other(model: str, fix: str):
    learner = make_learner({"adv_estimator": "gae"}, max_nonfinite_steps=3)
    with_nan(learner, critic=model == "critic")
    groups = random_groups(7)
    learner.update(groups)
    learner.update(groups)
    with raises(NonFiniteError, key=model, fix=f"Lower {fix}"):
        learner.update(groups)


def test_steps_are_counted_not_updates():
    """Each step has six updates, none of them finite; the third step is one too many."""
    learner = make_learner(max_nonfinite_steps=3, ppo_epochs=3, num_minibatches=2)
    with_nan(learner)
    groups = random_groups(7)
    for _ in range(2):
        result = learner.update(groups)
        assert result.skipped
        assert result.metrics["nonfinite_updates"] == result.metrics["updates"] == 6
    with raises(NonFiniteError, key="learner.max_nonfinite_steps", value=3):
        learner.update(groups)


def test_a_step_with_one_finite_update_starts_the_count_again():
    learner = make_learner(max_nonfinite_steps=2, num_minibatches=2)
    for seed in range(3):
        assert learner.update([poisoned(group) for group in random_groups(seed, groups=2)]).skipped
        assert not learner.update(groups_with_poison(seed)).skipped


def test_the_counts_of_both_models_continue_from_a_checkpoint(tmp_path: Path):
    learner = make_learner({"adv_estimator": "gae"}, max_nonfinite_steps=3)
    restored = make_learner({"adv_estimator": "gae"}, max_nonfinite_steps=3)
    with_nan(learner)
    groups = random_groups(7)
    for _ in range(2):
        learner.update(groups)
    checkpointer = Checkpointer(tmp_path / "c", keep=1)
    checkpointer.save(2, learner.state, {})
    checkpointer.wait()
    _, restored.state, _ = checkpointer.restore(restored.state)
    checkpointer.close()
    assert bits(restored.state) == bits(learner.state)
    with pytest.raises(NonFiniteError, match="policy"):
        restored.update(groups)


def test_adapters_count_their_own_steps_and_name_themselves():
    lora = LoraConfig(rank=2)
    single = make_learner(lora=lora.model_dump(), max_nonfinite_steps=2)
    learner = MultiAdapterLearner(single, lora, ("solver", "checker"))

    def played(group: Group, name: str) -> Group:
        return replace(
            group,
            trajectories=tuple(replace(t, role=name, adapter=name) for t in group.trajectories),
        )

    good, bad = random_groups(3, groups=2)
    groups = [played(good, "checker"), played(poisoned(bad), "solver")]
    result = learner.update(groups)
    assert not result.skipped and result.unapplied == ids(groups[1:])
    assert (result.metrics["updates"], result.metrics["nonfinite_updates"]) == (2, 1)
    previous_state = bits(learner.state)
    with pytest.raises(NonFiniteError, match="'solver'"):
        learner.update(groups)
    assert bits(learner.state) == previous_state, "neither adapter changed in the step that failed"


# --- a step of which a part was applied -----------------------------------------------------------


@pytest.mark.parametrize("at", [0, 1])
def test_half_a_step_trains_its_half(at: int):
    learner = make_learner(num_minibatches=2)
    groups = groups_with_poison(at=at)
    initial = bits(learner.params)
    result = learner.update(groups)
    assert bits(learner.params) != initial and not result.skipped
    assert result.unapplied == ids([groups[at]]) and not result.rejected
    assert (result.metrics["updates"], result.metrics["nonfinite_updates"]) == (2, 1)
    assert np.isfinite(
        [result.metrics[name] for name in ("loss", "grad_norm", "entropy", "clip_fraction")]
    ).all()
    trained = sum(t.num_sampled for t in groups[1 - at].trajectories)
    assert result.metrics["trained_tokens"] == trained


def test_half_a_step_learns_what_the_half_alone_would():
    learner = make_learner(num_minibatches=2)
    alone = make_learner(num_minibatches=1)
    groups = groups_with_poison(at=1)
    learner.update(groups)
    alone.update(groups[:1])
    for got, expected in zip(
        jax.tree.leaves(learner.params), jax.tree.leaves(alone.params), strict=True
    ):
        # AdamW divides a gradient by its own size, so one of rounding size moves its parameter by
        # up to the rate.
        assert np.mean(np.abs(np.asarray(got) - np.asarray(expected)) > 1e-4) < 0.01


@pytest.mark.parametrize("epochs", [1, 2])
def test_every_trajectory_of_half_a_step_is_accounted_for(epochs: int):
    groups = groups_with_poison(groups=3, at=1)
    masked = groups[0].trajectories[0].trajectory_id
    accounting = Accounting()
    for trajectory_id in ids(groups):
        accounting.start(trajectory_id)
    selection = Selection(groups=tuple(groups), masked={masked: DropReason.OVERLONG}, dropped={})
    result = make_learner(num_minibatches=3, ppo_epochs=epochs).update(groups, masked=[masked])
    account(accounting, selection, result)
    assert accounting.summary() == {
        "started": 9,
        "trained": 5,
        "in_flight": 0,
        "dropped": 4,
        "dropped/non_finite": 3,
        "dropped/overlong": 1,
    }


def test_a_trajectory_with_every_token_rejected_is_rejected_in_any_step():
    reject = {"rollout_correction": {"rollout_rs": ["seq_max_k2"], "rollout_rs_threshold": [1e-12]}}
    groups = groups_with_poison()
    result = make_learner(reject, num_minibatches=2).update(groups)
    assert result.rejected == ids(groups)
    assert not result.unapplied
    assert not result.skipped


def large_rewards(group: Group) -> Group:
    """Returns whose squared errors no float32 holds; whitened advantages are as small as ever."""
    return replace(
        group, trajectories=tuple(replace(t, reward=t.reward * 1e25) for t in group.trajectories)
    )


def test_a_policy_that_learned_is_trained_beside_a_critic_that_did_not():
    learner = make_learner({"adv_estimator": "gae"})
    initial = bits(learner.params)
    result = learner.update([large_rewards(group) for group in random_groups(4)])
    assert result.metrics["critic_nonfinite_updates"] == 1
    assert result.metrics["nonfinite_updates"] == 0
    assert bits(learner.params) != initial
    assert not result.skipped
    assert not result.unapplied


def test_during_the_critics_warm_up_its_updates_are_what_trains():
    learner = make_learner({"adv_estimator": "gae"}, critic_warmup=1, num_minibatches=2)
    groups = random_groups(1, groups=2, members=3)
    groups[1] = large_rewards(groups[1])
    result = learner.update(groups)
    assert result.unapplied == ids(groups[1:]) and not result.skipped
    assert result.metrics["critic_nonfinite_updates"] == 1
    assert "updates" not in result.metrics


def test_a_run_continues_from_half_a_step_as_if_never_saved(tmp_path: Path):
    algorithm = {"kl": ADAPTIVE}
    learner = make_learner(algorithm, num_minibatches=2)
    restored = make_learner(algorithm, num_minibatches=2)
    learner.update(groups_with_poison())
    checkpointer = Checkpointer(tmp_path / "c", keep=1)
    checkpointer.save(1, learner.state, {})
    checkpointer.wait()
    _, restored.state, _ = checkpointer.restore(restored.state)
    checkpointer.close()
    for each in (learner, restored):
        each.update(random_groups(2, groups=2))
    assert bits(learner.state) == bits(restored.state)


# --- the KL controller ----------------------------------------------------------------------------


def coefficients(learner: Learner, steps: list[list[Group]]) -> list[float]:
    return [learner.update(groups).metrics["kl_coef"] for groups in steps]


def test_the_kl_coefficient_adapts_after_half_a_step_and_not_after_none():
    half = groups_with_poison()
    none = [poisoned(group) for group in random_groups(1, groups=2, members=3)]
    learner = make_learner({"kl": ADAPTIVE}, num_minibatches=2)
    first, second, third = coefficients(learner, [half, none, half])
    assert first < np.float32(0.1), "the policy is the reference: the distance is below the target"
    assert second == first and third > second


def test_the_kl_coefficient_waits_for_the_critics_warm_up():
    """The policy does not move meanwhile: its distance of 0 says nothing about the coefficient."""
    learner = make_learner({"adv_estimator": "gae", "kl": ADAPTIVE}, critic_warmup=2)
    first, second, third = coefficients(learner, [random_groups(seed) for seed in range(3)])
    assert first == second == np.float32(0.1) and third != second


@pytest.mark.parametrize("where", ["reward", "advantage", "loss"])
@pytest.mark.filterwarnings("error")
def test_a_trajectory_without_a_free_token_leaves_the_kl_to_the_others(where: str):
    groups = random_groups(0)
    first = groups[0].trajectories[0]
    turns = tuple(
        replace(turn, output=replace(turn.output, constrained=(True,) * len(turn.output.token_ids)))
        for turn in first.turns
    )
    constrained = replace(first, turns=turns)
    groups[0] = replace(groups[0], trajectories=(constrained, *groups[0].trajectories[1:]))
    learner = make_learner({"kl": ADAPTIVE | {"where": where, "estimator": "k2"}})
    steps = [learner.update(groups, masked={constrained.trajectory_id}).metrics for _ in range(3)]
    assert all(np.isfinite(step["kl_reference"]) for step in steps)
    assert len({step["kl_coef"] for step in steps}) == 3


# --- learners of given sequences ------------------------------------------------------------------


def test_sequence_learners_count_their_own_steps_in_their_state():
    config = LearnerConfig(pack_length=64, remat="none", lora=LoraConfig(rank=2))
    first = SequenceLearner(TINY, tiny_params(), config=config)
    second = first.twin()
    data = [
        TrainingSequence(
            token_ids=np.array([5, 6, 7], np.int32), loss_mask=np.array([False, True, True])
        )
    ]
    poisoned_data = [replace(data[0], weight=np.array([np.inf, np.inf]))]
    for _ in range(2):
        first.forward_backward(poisoned_data)
        assert not first.optim_step(AdamParams()).finite
        second.forward_backward(data)
        assert second.optim_step(AdamParams()).finite
    second.require_finite(1)

    second.state = jax.tree.map(jnp.copy, first.state)
    second.require_finite(3)
    with pytest.raises(NonFiniteError):
        second.require_finite(2)
