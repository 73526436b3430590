"""Adapters in training side by side: each learns from its own trajectories, as if it were alone."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from jax_agent_rl.config import AlgorithmConfig, LearnerConfig, LoraConfig
from jax_agent_rl.learner.comparison import AgreementCheck
from jax_agent_rl.learner.learner import Learner
from jax_agent_rl.learner.metrics import UpdateResult
from jax_agent_rl.learner.multi_adapter import MultiAdapterLearner, by_adapter, combined
from jax_agent_rl.types import Group
from tests.tiny import TINY, tiny_params
from tests.trajectories import random_groups, trajectories_of

LORA = LoraConfig(rank=3, alpha=6.0)
NAMES = ("solver", "checker")


def single(**learner) -> Learner:
    config = LearnerConfig(
        learning_rate=1e-2, pack_length=64, remat="none", lora=LORA.model_dump(), **learner
    )
    return Learner(TINY, tiny_params(), algorithm=AlgorithmConfig(), config=config, temperature=1.0)


def played(groups: list[Group], names=NAMES) -> list[Group]:
    """The same groups, their first two members played with one adapter, the others with another."""
    with_adapters = []
    for group in groups:
        members = []
        for i, member in enumerate(group.trajectories):
            name = names[i // 2]
            members.append(replace(member, role=name, adapter=name))
        with_adapters.append(replace(group, trajectories=tuple(members)))
    return with_adapters


def bits(tree) -> list[bytes]:
    return [np.asarray(x).tobytes() for x in jax.tree.leaves(tree)]


def test_an_adapter_alone_receives_the_gradient_of_its_trajectories():
    learner = MultiAdapterLearner(single(), LORA, NAMES)
    initial = {name: bits(state) for name, state in learner.state.items()}
    (solver,) = (
        part for name, part in by_adapter(played(random_groups(0))).items() if name == "solver"
    )
    assert not learner.update(solver).skipped
    assert bits(learner.state["checker"]) == initial["checker"], (
        "neither its values nor its optimizer"
    )
    assert bits(learner.state["solver"]) != initial["solver"]


def test_an_adapter_learns_beside_others_what_it_would_alone():
    groups = played(random_groups(1))
    together = MultiAdapterLearner(single(), LORA, NAMES)
    alone = single()
    for _ in range(2):
        result = together.update(groups)
        expected = alone.update(by_adapter(groups)["checker"])
    assert bits(together.state["checker"]) == bits(alone.state)
    assert result.metrics["adapter/checker/loss"] == expected.metrics["loss"]
    assert bits(together.state["solver"].policy.params) != bits(alone.state.policy.params)
    assert result.tokens.keys() == {t.trajectory_id for t in trajectories_of(groups)}


def test_a_step_that_fails_at_one_adapter_changes_none():
    learner = MultiAdapterLearner(single(), LORA, NAMES)
    seen = []

    def inspect(comparison):
        seen.append(comparison)
        if len(seen) == 2:
            assert bits(learner.learners["checker"].trained) != initial, (
                "the first one has learned by then"
            )
            raise RuntimeError("the second")

    initial = bits(learner.learners["checker"].trained)
    states = bits(learner.state)
    with pytest.raises(RuntimeError, match="the second"):
        learner.update(played(random_groups(0)), check=AgreementCheck(since=0, inspect=inspect))
    assert bits(learner.state) == states


def test_engines_get_the_model_below_the_adapters_and_each_adapter_scaled():
    learner = MultiAdapterLearner(single(), LORA, NAMES)
    learner.update(played(random_groups(0)))
    for (path, got), expected in zip(
        jax.tree_util.tree_leaves_with_path(learner.params),
        jax.tree.leaves(tiny_params()),
        strict=True,
    ):
        np.testing.assert_array_equal(got, expected, err_msg=str(path))
    for name, adapter in learner.adapters.items():
        merged = learner.learners[name].params["layers"]["q"]
        a, b = (x.astype(np.float64) for x in adapter.weights["q"])
        expected = np.asarray(tiny_params()["layers"]["q"], np.float64) + b @ a
        np.testing.assert_allclose(merged, expected, atol=1e-6)


def test_a_second_adapter_compiles_nothing():
    alone = single()
    learner = MultiAdapterLearner(single(), LORA, NAMES)
    groups = played(random_groups(0))
    alone.update(by_adapter(groups)["solver"])
    learner.update(groups)
    assert learner.programs_compiled == alone.programs_compiled


def test_a_saved_state_continues_as_if_never_saved():
    groups = played(random_groups(0))
    learner = MultiAdapterLearner(single(), LORA, NAMES)
    restored = MultiAdapterLearner(single(), LORA, NAMES)
    learner.update(groups)
    restored.state = jax.tree.map(lambda x: x.copy(), learner.state)
    learner.update(groups)
    restored.update(groups)
    assert bits(learner.state) == bits(restored.state)


def test_metrics_of_all_adapters_are_sums_maxima_rates_and_means():
    def result(loss, tokens, seconds, gap):
        numbers = {
            "loss": loss,
            "batch_tokens": tokens,
            "computed_tokens": tokens / 2,
            "learner_seconds": seconds,
        }
        return UpdateResult(metrics=numbers | {"logprob_gap_max": gap}, skipped=False)

    got = combined({"a": result(1.0, 30.0, 1.0, 0.5), "b": result(3.0, 10.0, 3.0, 0.25)}).metrics
    assert {key: value for key, value in got.items() if "/" not in key} == {
        "loss": 2.0,
        "batch_tokens": 40.0,
        "computed_tokens": 20.0,
        "learner_seconds": 4.0,
        "logprob_gap_max": 0.5,
        "sharing_factor": 2.0,
        "learner_tokens_per_second": 10.0,
        "computed_tokens_per_second": 5.0,
    }
    assert got["adapter/b/loss"] == 3.0
