"""A learner's whole state through a checkpoint: critic, KL controller and counters; other meshes;
cancellation.
"""

import math
import threading
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest

from jax_agent_rl.config import AlgorithmConfig, CriticConfig, LearnerConfig
from jax_agent_rl.errors import CheckpointError, NonFiniteError
from jax_agent_rl.learner.cancellation import StepCancellation, StepCancelled
from jax_agent_rl.learner.checkpoint import Checkpointer
from jax_agent_rl.learner.learner import Learner
from tests.messages import raises
from tests.simulated import run_on_devices
from tests.tiny import TINY, tiny_params
from tests.trajectories import random_groups

PPO = {
    "adv_estimator": "gae",
    "kl": {"where": "loss", "coef": 0.1, "controller": "adaptive", "target": 1e-4, "horizon": 50},
}


def ppo(**changes) -> Learner:
    return Learner(
        TINY,
        tiny_params(),
        algorithm=AlgorithmConfig(**PPO),
        config=LearnerConfig(
            **{"learning_rate": 1e-2, "pack_length": 64, "remat": "none"} | changes
        ),
        temperature=1.0,
        critic=CriticConfig(learning_rate=1e-2),
        total_steps=4,
    )


def leaves(learner: Learner) -> list[bytes]:
    return [np.asarray(x).tobytes() for x in jax.tree.leaves(learner.state)]


def test_a_restored_learner_takes_the_very_same_steps(tmp_path: Path):
    decay = {"lr_scheduler_type": "cosine", "lr_warmup_steps": 1}
    learner = ppo(**decay)
    restored = ppo(**decay)
    for seed in (0, 1):
        learner.update(random_groups(seed))
    assert float(learner.state.kl_coef) != np.float32(0.1), (
        "the controller must have moved for this to prove something"
    )
    checkpointer = Checkpointer(tmp_path / "c", keep=1)
    checkpointer.save(2, learner.state, {})
    checkpointer.wait()
    rate = learner.update(random_groups(2)).metrics["learning_rate"]
    _, restored.state, _ = checkpointer.restore(restored.state)
    checkpointer.close()
    result = restored.update(random_groups(2))
    assert leaves(restored) == leaves(learner)
    assert (
        result.metrics["learning_rate"] == rate == pytest.approx(1e-2 * (1 + np.cos(np.pi / 3)) / 2)
    )
    assert result.metrics["kl_coef"] == float(learner.state.kl_coef)


def test_a_checkpoint_with_a_critic_does_not_fit_a_learner_without(tmp_path: Path):
    checkpointer = Checkpointer(tmp_path / "c", keep=1)
    checkpointer.save(1, ppo().state, {})
    checkpointer.wait()
    config = LearnerConfig(pack_length=64)
    plain = Learner(
        TINY, tiny_params(), algorithm=AlgorithmConfig(), config=config, temperature=1.0
    )
    with raises(CheckpointError, key="critic.", value="missing here"):
        checkpointer.restore(plain.state)
    checkpointer.close()


def test_a_cancelled_step_keeps_the_state_to_the_bit_and_its_buffers_alive():
    learner = ppo()
    learner.update(random_groups(0))
    initial = leaves(learner)
    cancellation = StepCancellation()
    assert cancellation.cancel()
    with pytest.raises(StepCancelled):
        learner.update(random_groups(1), cancellation=cancellation)
    assert leaves(learner) == initial


def test_a_step_with_a_final_update_cannot_be_cancelled():
    cancellation = StepCancellation()
    ppo().update(random_groups(1), cancellation=cancellation)
    assert cancellation.has_begun and not cancellation.cancel()


@pytest.mark.parametrize("share", [0.3, 0.6, 1.0])
def test_several_updates_are_undone_to_the_bit_when_cancelled_between_them(share: float):
    """Two epochs of a critic's and a policy's update, cancelled after a share of their
    micro-batches.
    """
    cancelled = ppo(ppo_epochs=2)
    undisturbed = ppo(ppo_epochs=2)
    cancellation = StepCancellation()
    for learner in (cancelled, undisturbed):
        learner.update(random_groups(0))
    initial = leaves(cancelled)
    meanwhile = []

    def cancel(finished: int, total: int) -> None:
        if finished == math.ceil(share * total):
            assert cancellation.cancel()
            meanwhile.append((cancellation.has_begun, leaves(cancelled)))

    with pytest.raises(StepCancelled):
        cancelled.update(random_groups(1), tick=cancel, cancellation=cancellation)
    assert meanwhile == [(True, initial)]
    assert leaves(cancelled) == initial
    assert not cancellation.is_partly_applied
    assert (
        cancelled.update(random_groups(1)).metrics["loss"]
        == undisturbed.update(random_groups(1)).metrics["loss"]
    )
    assert leaves(cancelled) == leaves(undisturbed)


def test_several_updates_are_undone_when_one_of_them_fails():
    learner = ppo(ppo_epochs=3, max_nonfinite_steps=1)
    cancellation = StepCancellation()
    initial = leaves(learner)

    def poison(finished: int, total: int) -> None:
        if finished == 1:  # the critic's first update follows, then the policy's
            policy = learner.policy.state
            learner.policy.state = replace(
                policy, params=jax.tree.map(lambda x: x * np.nan, policy.params)
            )

    with pytest.raises(NonFiniteError):
        learner.update(random_groups(1), tick=poison, cancellation=cancellation)
    assert cancellation.has_begun
    assert not cancellation.is_partly_applied
    assert leaves(learner) == initial


def test_a_step_whose_updates_changed_nothing_can_be_cancelled():
    cancellation = StepCancellation()
    with cancellation.update():
        cancellation.unchanged()
    assert not cancellation.has_begun
    assert not cancellation.is_partly_applied
    with cancellation.update():
        pass
    with cancellation.update():
        cancellation.unchanged()
    assert cancellation.is_partly_applied and not cancellation.cancel()


def test_cancelling_waits_for_an_update_that_is_under_way():
    cancellation = StepCancellation()
    inside = threading.Event()
    finish = threading.Event()
    finished = []

    def update() -> None:
        with cancellation.update():
            inside.set()
            finish.wait()
            finished.append(True)

    worker = threading.Thread(target=update)
    worker.start()
    inside.wait()
    canceller = threading.Thread(target=lambda: finished.append(cancellation.cancel()))
    canceller.start()
    finish.set()
    worker.join()
    canceller.join()
    assert finished == [True, False]


@pytest.mark.parametrize("lora", [None, {"rank": 2}], ids=["whole", "adapters"])
def test_the_average_follows_every_update_and_no_other_number_changes(
    lora: dict | None, tmp_path: Path
):
    """The recurrence in float64, on the trained parameters after each update; one skipped update
    averages nothing.
    """

    def make_learner(**changes) -> Learner:
        config = LearnerConfig(
            **{"learning_rate": 1e-2, "pack_length": 64, "remat": "none", "lora": lora} | changes
        )
        return Learner(
            TINY, tiny_params(), algorithm=AlgorithmConfig(), config=config, temperature=1.0
        )

    averaging = make_learner(ema_decay=0.75, ppo_epochs=2)
    plain = make_learner(ppo_epochs=2)
    trained = [np.float64(x) for x in jax.tree.leaves(averaging.trained)]
    expected = trained
    apply = averaging.policy.apply

    def recorded(*arguments):
        nonlocal expected
        applied = apply(*arguments)
        reached = [np.float64(x) for x in jax.tree.leaves(averaging.trained)]
        expected = [0.75 * old + 0.25 * new for old, new in zip(expected, reached, strict=True)]
        return applied

    averaging.policy.apply = recorded
    for seed in (0, 1):
        averaging.update(random_groups(seed))
        plain.update(random_groups(seed))
    averaged = averaging.averaged()
    for got, wanted, new in zip(
        jax.tree.leaves(averaged.trained), expected, jax.tree.leaves(averaging.trained), strict=True
    ):
        np.testing.assert_allclose(got, wanted, atol=1e-6)
        assert not np.allclose(new, wanted, atol=1e-4)
    assert [np.asarray(x).tobytes() for x in jax.tree.leaves(averaging.params)] == [
        np.asarray(x).tobytes() for x in jax.tree.leaves(plain.params)
    ]
    again = make_learner(ema_decay=0.75)
    checkpointer = Checkpointer(tmp_path / "c", keep=1)
    checkpointer.save(2, averaging.state, {})
    checkpointer.wait()
    _, again.state, _ = checkpointer.restore(again.state)
    assert leaves(again.averaged()) == leaves(averaged)
    with raises(CheckpointError, key="opt_state"):
        checkpointer.restore(plain.state)
    checkpointer.close()


MESHES = """
import sys, pathlib, numpy as np, jax
from dataclasses import replace
from jax_agent_rl.config import AlgorithmConfig, LearnerConfig
from jax_agent_rl.learner.checkpoint import Checkpointer
from jax_agent_rl.learner.learner import Learner
from tests.tiny import TINY, tiny_params
from tests.trajectories import random_groups

model = replace(TINY, vocab_size=96)
def make_learner(mesh):
    config = LearnerConfig(learning_rate=1e-3, pack_length=64, mesh=mesh)
    algorithm = AlgorithmConfig(adv_estimator="gae")
    return Learner(
        model, tiny_params(config=model), algorithm=algorithm, config=config, temperature=1.0
    )

made = make_learner({"fsdp": 4, "tensor": 2})
made.update(random_groups(0, vocabulary=96))
saved = [np.asarray(x) for x in jax.tree.leaves(made.state)]
checkpointer = Checkpointer(pathlib.Path(sys.argv[1]), keep=1)
checkpointer.save(1, made.state, {})
checkpointer.wait()
made.update(random_groups(1, vocabulary=96))
for mesh in ({}, {"data": 8}, {"data": 2, "fsdp": 2, "tensor": 2}):
    other = make_learner(mesh)
    like = other.state
    _, other.state, _ = checkpointer.restore(like)
    restored = jax.tree.leaves(other.state)
    for x, y, wanted in zip(saved, restored, jax.tree.leaves(like), strict=True):
        np.testing.assert_array_equal(x, np.asarray(y))
        assert y.sharding == wanted.sharding
    other.update(random_groups(1, vocabulary=96))
    for x, y in zip(jax.tree.leaves(made.params), jax.tree.leaves(other.params), strict=True):
        np.testing.assert_allclose(np.asarray(x), np.asarray(y), atol=2e-5)
print("the same on", jax.device_count(), "devices")
"""


def test_a_checkpoint_restores_onto_other_meshes(tmp_path: Path):
    assert "the same on 8 devices" in run_on_devices(MESHES, str(tmp_path / "c"))
