"""The learner step: the gradient is independent of how the batch is laid out, and bad gradients
change nothing.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_agent_rl.config import AlgorithmConfig, LearnerConfig
from jax_agent_rl.errors import ConfigError, NonFiniteError
from jax_agent_rl.learner.learner import Learner
from jax_agent_rl.models.sharding import make_mesh, parameter_shardings
from jax_agent_rl.types import Group
from tests.gradients import policy_gradient
from tests.simulated import run_on_devices
from tests.tiny import TINY, logprobs_of, tiny_params
from tests.trajectories import random_groups, trajectories_of, trajectory, with_supports


def make_learner(**changes) -> Learner:
    algorithm = AlgorithmConfig(**changes.pop("algorithm", {}))
    config = LearnerConfig(**{"learning_rate": 1e-2, "pack_length": 64, "remat": "none"} | changes)
    return Learner(TINY, tiny_params(), algorithm=algorithm, config=config, temperature=1.0)


def gradient(learner: Learner, groups) -> list[np.ndarray]:
    """The accumulated gradient of one update, before the optimizer."""
    grads, _ = policy_gradient(learner, groups)
    return [np.asarray(g) for g in jax.tree.leaves(grads)]


REFERENCE = {"share_prefixes": False, "pack_length": 32, "micro_batch_size": 1}


def test_halved_rows_change_no_number_and_compile_nothing():
    members = []
    for i in range(5):
        response = [5 + (i + j) % 20 for j in range(60)]
        members.append(trajectory([3 + i] * 60, response, reward=float(i % 2), index=i))
    groups = [Group(group_id="g", trajectories=tuple(members))]
    learner = make_learner(pack_length=512)
    assert learner.scorer.lengths == 2
    assert make_learner(pack_length=510).scorer.lengths == 1
    of_halves = gradient(learner, groups) + learner.logprobs(groups)
    compiled = learner.programs_compiled
    learner.scorer.lengths = 1
    of_full_rows = gradient(learner, groups) + learner.logprobs(groups)
    assert learner.programs_compiled == compiled
    for actual, expected in zip(of_halves, of_full_rows, strict=True):
        np.testing.assert_allclose(actual, expected, atol=1e-6)


@pytest.mark.parametrize(
    ("layout", "mode"),
    [
        ({"share_prefixes": True}, "token-mean"),
        ({"share_prefixes": True, "pack_length": 160}, "seq-mean-token-mean"),
        ({"share_prefixes": False, "pack_length": 300}, "seq-mean-token-sum"),
        ({"share_prefixes": True, "pack_length": 40, "micro_batch_size": 3}, "seq-mean-token-mean"),
        ({"remat": "dots"}, "token-mean"),
        ({"remat": "full"}, "token-mean"),
    ],
    ids=str,
)
def test_the_gradient_does_not_depend_on_the_layout(layout: dict, mode: str):
    groups = random_groups(0)
    algorithm = {"loss_agg_mode": mode}
    expected = gradient(make_learner(algorithm=algorithm, **REFERENCE), groups)
    got = gradient(make_learner(algorithm=algorithm, **layout), groups)
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5 * np.abs(b).max())


@pytest.mark.parametrize(
    "layout", [{"share_prefixes": True}, {"pack_length": 40, "micro_batch_size": 3}], ids=str
)
def test_the_gradient_over_supports_does_not_depend_on_the_layout(layout: dict):
    groups = with_supports(random_groups(0))
    algorithm = {"entropy_coeff": 0.01}
    expected = gradient(make_learner(algorithm=algorithm, **REFERENCE), groups)
    got = gradient(make_learner(algorithm=algorithm, **layout), groups)
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5 * np.abs(b).max())


def test_old_logprobs_are_those_of_plain_full_passes():
    groups = random_groups(1)
    learner = make_learner(num_minibatches=2)
    _, experience = learner.prepare(groups)
    assert experience.old_logprobs is not None
    got = sorted(np.concatenate(experience.old_logprobs).tolist())
    params = tiny_params()
    expected = []
    for t in trajectories_of(groups):
        scores = logprobs_of(params, t.prompt_ids, t.response_ids)
        expected += scores[np.array(t.response_mask) == 1].tolist()
    np.testing.assert_allclose(got, sorted(expected), atol=1e-4)


def test_the_gap_is_measured_against_what_the_engine_reported():
    prompt = [5, 6, 7]
    sampled = [8, 9, 10, 11]
    exact = logprobs_of(tiny_params(), prompt, sampled)
    exact[2] += 0.25
    group = random_groups(2, groups=1, members=2)[0]
    ts = tuple(
        trajectory(
            prompt, sampled, logprobs=exact.tolist(), reward=float(i), index=i, group=group.group_id
        )
        for i in range(2)
    )
    learner = make_learner()
    result = learner.update([type(group)(group_id=group.group_id, trajectories=ts)])
    assert result.metrics["logprob_gap_max"] == pytest.approx(0.25, abs=1e-4)


def test_training_raises_the_probability_of_what_was_rewarded():
    groups = random_groups(3)
    learner = make_learner(learning_rate=3e-3)
    good = [t for t in trajectories_of(groups) if t.reward]
    bad = [t for t in trajectories_of(groups) if not t.reward]

    def mean(ts) -> float:
        values = [
            logprobs_of(learner.params, t.prompt_ids, t.response_ids)[
                np.array(t.response_mask) == 1
            ].mean()
            for t in ts
        ]
        return float(np.mean(values))

    initial_gap = mean(good) - mean(bad)
    for _ in range(5):
        learner.update(groups)
    assert mean(good) - mean(bad) > initial_gap + 0.05


def test_one_program_serves_batches_of_every_size():
    learner = make_learner()
    learner.update(random_groups(4))
    compiled = learner.programs_compiled
    learner.update(random_groups(5, groups=7, members=6))
    learner.update(random_groups(6, groups=1, members=2))
    assert learner.programs_compiled == compiled


def test_nonfinite_gradients_change_nothing_and_three_stop_the_run():
    learner = make_learner(max_nonfinite_steps=3)
    policy = learner.state.policy
    poisoned = policy.params | {"final_norm": jnp.full_like(policy.params["final_norm"], jnp.nan)}
    learner.state = replace(learner.state, policy=replace(policy, params=poisoned))
    initial_policy = jax.device_get(learner.state.policy)
    groups = random_groups(7)
    assert learner.update(groups).skipped
    assert learner.update(groups).skipped
    with pytest.raises(NonFiniteError, match="learning_rate"):
        learner.update(groups)
    jax.tree.map(
        np.testing.assert_array_equal, jax.device_get(learner.state.policy), initial_policy
    )  # NaN is equal to itself


def test_a_mesh_that_does_not_divide_names_the_parameter():
    class FakeMesh:
        shape = {"data": 1, "fsdp": 5, "tensor": 1}

    with pytest.raises(ConfigError, match="'embed'.*32.*fsdp=5"):
        parameter_shardings(FakeMesh(), {"embed": (97, 32)})  # type: ignore[arg-type]


def test_more_devices_than_there_are_is_refused():
    with pytest.raises(ConfigError, match="= 64 devices"):
        make_mesh(LearnerConfig(mesh={"data": 64}).mesh)


SHARDED = """
import sys, numpy as np, jax
from dataclasses import replace
from jax_agent_rl.config import AlgorithmConfig, LearnerConfig
from jax_agent_rl.learner.learner import Learner
from tests.tiny import TINY, tiny_params
from jax_agent_rl.types import Group
from tests.trajectories import random_groups

config = replace(TINY, vocab_size=96)
PPO = {
    "adv_estimator": "gae", "lam": 0.9, "entropy_coeff": 0.01,
    "kl": {"where": "loss", "coef": 0.1},
}
GSPO = {"policy_loss": {"loss_mode": "gspo"}, "rollout_correction": {"rollout_is": "sequence"}}
MESHES = {"data": 8}, {"fsdp": 4, "tensor": 2}, {"data": 2, "fsdp": 2, "tensor": 2}
for algorithm, meshes in (({}, MESHES), (PPO, MESHES[2:]), (GSPO, MESHES[2:])):
    results = []
    for mesh in ({}, *meshes):
        settings = LearnerConfig(learning_rate=1e-3, pack_length=32, mesh=mesh)
        made = Learner(
            config, tiny_params(config=config), algorithm=AlgorithmConfig(**algorithm),
            config=settings, temperature=1.0,
        )
        for _ in range(2):
            made.update(random_groups(0, vocabulary=96))
        critic = made.state.critic and made.state.critic.params
        results.append([np.asarray(x) for x in jax.tree.leaves((made.params, critic))])
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            np.testing.assert_allclose(a, b, atol=2e-5)
print("equal on", jax.device_count(), "devices")
"""


def test_eight_simulated_devices_train_as_one_does():
    assert "equal on 8 devices" in run_on_devices(SHARDED)


@pytest.mark.parametrize("updates", [1, 2])
def test_observations_are_trained_on_when_asked_for_and_have_no_gap(updates: int):
    groups = random_groups(8, groups=2)
    learned = []
    for group in groups:
        members = []
        for member in group.trajectories:
            turns = [replace(turn, learn_appended=True) for turn in member.turns]
            members.append(replace(member, turns=tuple(turns)))
        learned.append(replace(group, trajectories=tuple(members)))
    plain = make_learner(num_minibatches=updates).update(groups).metrics
    learner = make_learner(num_minibatches=updates)
    result = learner.update(learned)
    ids = sum(len(t.response_ids) for t in trajectories_of(groups))
    assert result.metrics["trained_tokens"] == ids > plain["trained_tokens"]
    assert not result.skipped
    assert np.isfinite(list(result.metrics.values())).all()
    if updates == 1:  # later updates start from other weights
        assert result.metrics["logprob_gap_max"] == pytest.approx(
            plain["logprob_gap_max"], abs=1e-5
        )


def test_progress_is_learned_from_where_rewards_are_equal():
    """GRPO's gradient is 0; IGPO's is that of turns that gained more than others."""
    members = []
    for index, progress in enumerate(([1.0, 1.0], [0.0, 1.0])):
        member = trajectory([3], [4, 5, 7, 6 + index], mask=[1, 1, 0, 1], reward=1.0, index=index)
        parts = {f"progress/{n}": score for n, score in enumerate(progress, start=1)}
        members.append(replace(member, reward_parts=parts))
    groups = [Group(group_id="g", trajectories=tuple(members))]

    of_totals = gradient(make_learner(), groups)
    assert max(np.abs(g).max() for g in of_totals) == 0
    algorithm = {"adv_estimator": "igpo", "turn_reward": "progress"}
    of_turns = gradient(make_learner(algorithm=algorithm), groups)
    assert max(np.abs(g).max() for g in of_turns) > 0
    result = make_learner(algorithm=algorithm).update(groups)
    assert not result.skipped
    # rewards of turns 1 0 and 0 1; unbiased deviation 1 / sqrt(3)
    assert result.metrics["advantage_abs_max"] == pytest.approx(0.5 * np.sqrt(3), rel=1e-4)


@pytest.mark.parametrize(
    "algorithm",
    [{}, {"adv_estimator": "reinforce_plus_plus"}, {"loss_agg_mode": "seq-mean-token-mean"}],
    ids=str,
)
def test_constrained_tokens_are_context_like_inserted_ones(algorithm: dict):
    """Golden: the same ids with the constrained ones inserted between turns."""
    constrained = []
    inserted = []
    for t in random_groups(9, groups=1)[0].trajectories:
        ids = (*t.response_ids, *range(5, 11))[:6]
        fields = {
            "reward": t.reward,
            "index": int(t.trajectory_id.rpartition("-")[2]),
            "group": t.group_id,
        }
        sequence = trajectory(t.prompt_ids, ids, logprobs=[-9.0] * 6, **fields)
        marks = (False, True, False, False, True, True)  # the last one, too, where the reward is
        turn = replace(
            sequence.turns[0], output=replace(sequence.turns[0].output, constrained=marks)
        )
        constrained.append(replace(sequence, turns=(turn,)))
        inserted.append(
            trajectory(t.prompt_ids, ids, mask=[1, 0, 1, 1, 0, 0], logprobs=[-9.0] * 6, **fields)
        )
    gradients = [
        gradient(
            make_learner(algorithm=algorithm),
            [Group(group_id=t[0].group_id, trajectories=tuple(t))],
        )
        for t in (constrained, inserted)
    ]
    for a, b in zip(*gradients, strict=True):
        np.testing.assert_array_equal(a, b)
    assert max(np.abs(g).max() for g in gradients[0]) > 0
