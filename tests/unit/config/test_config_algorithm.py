"""Combinations that cannot work are refused, each with its fix."""

from pathlib import Path

import pytest

from jax_agent_rl import config
from jax_agent_rl.config.algorithm import AlgorithmConfig
from jax_agent_rl.errors import ConfigError
from tests.messages import raises

MINIMAL = {"run_dir": "r", "model": {"path": "m"}, "data": {"train": "t"}}


CONFIGS = sorted(
    p for p in (Path(__file__).parents[3] / "configs").glob("*.yaml") if p.stem != "tool_server"
)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.stem)
def test_every_recipe_is_valid(path: Path):
    assert config.load(path).model.path


def test_a_file_with_a_base_says_only_what_differs(tmp_path: Path):
    (tmp_path / "a.yaml").write_text(
        "{run_dir: r, model: {path: m}, data: {train: t}, rollout: {group_size: 4, max_model_len:"
        " 1024}}"
    )
    (tmp_path / "b.yaml").write_text("{base: a.yaml, rollout: {group_size: 6}}")
    merged = config.load(tmp_path / "b.yaml", ["rollout.prompts_per_step=3"])
    assert (merged.run_dir, merged.rollout.group_size, merged.rollout.prompts_per_step) == (
        "r",
        6,
        3,
    )


def test_a_base_that_leads_back_or_nowhere_is_refused(tmp_path: Path):
    (tmp_path / "a.yaml").write_text("base: b.yaml")
    (tmp_path / "b.yaml").write_text("base: a.yaml")
    with raises(ConfigError, value="leads back"):
        config.load(tmp_path / "a.yaml")
    (tmp_path / "a.yaml").write_text("base: c.yaml")
    with raises(ConfigError, value="c.yaml'"):
        config.load(tmp_path / "a.yaml")


def problems(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        config.build(MINIMAL, overrides)
    return "\n".join(caught.value.problems)


@pytest.mark.parametrize(
    ("overrides", "fix"),
    [
        (["rollout.group_size=1"],
         "set rollout.group_size >= 2, or algorithm.adv_estimator=reinforce_plus_plus"),
        (["critic.critic_warmup=3"],
         "only with algorithm.adv_estimator=gae; algorithm.adv_estimator is grpo"),
        (["algorithm.adv_estimator=gdpo"], "needs algorithm.gdpo.reward_keys"),
        (["algorithm.gdpo={reward_keys: [a, b], reward_weights: [1]}"], "1 numbers for 2"),
        (["algorithm.adv_estimator=mt_grpo"],
         "set algorithm.turn_reward=tool_reward or tool_success"),
        (["algorithm.adv_estimator=igpo"], "set algorithm.turn_reward=progress"),
        (["algorithm={adv_estimator: mt_grpo, turn_reward: progress}"], "set adv_estimator=igpo"),
        (["algorithm.turn_reward=progress"], "adv_estimator=grpo reads totals only"),
        (["algorithm.observation_loss.template=true"],
         "used only with algorithm.observation_loss.coef"),
        (["algorithm.observation_loss.coef=0.1", "agent.history_window=2"], "remove one of them"),
        (["algorithm.kl={where: loss, top_k: 8, reference: feedback}"], "set kl.top_k=0"),
        (["algorithm.feedback.max_length=9"],
         "used only with algorithm.kl.reference=feedback"),
        (["algorithm.kl={where: advantage, reference: feedback}",
          "algorithm.feedback.template=so"], "must contain {feedback}"),
        (["algorithm.adv_estimator=gae", "algorithm.max_resample_rounds=2"],
         "set algorithm.filter_zero_variance=true"),
        (["algorithm.policy_loss.loss_mode=geo_mean"],
         "set algorithm.loss_agg_mode=seq-mean-token-mean"),
        (["algorithm.loss_agg_mode=seq-mean-token-sum-norm"], "set algorithm.loss_scale_factor"),
        (["algorithm.kl={where: reward, estimator: k3+}"], "use k3, or kl.where=loss"),
        (["algorithm.kl={where: loss, estimator: k1}"], "use k1+, k2 or k3"),
        (["algorithm.rollout_correction={rollout_rs: [token_k2]}"],
         "1 rollout_rs rules and 0 rollout_rs_threshold"),
        (["algorithm.rollout_correction={rollout_rs: [token_k2], rollout_rs_threshold: [[1, 2]]}"],
         "only k1 rules"),
        (["algorithm.rollout_correction={rollout_rs: [token_k1], rollout_rs_threshold: [0.5]}"],
         "must be above 1"),
        (["algorithm.rollout_correction={rollout_is: token, rollout_is_threshold: [2, 1]}"],
         "[low, high] ascending"),
        (["algorithm.rollout_correction={bypass_mode: true, rollout_is: token}"],
         "drop one or the other"),
        (["algorithm={policy_loss: {loss_mode: decoupled}, "
          "rollout_correction: {rollout_is: token}}"],
         "is=none"),
        (["algorithm.filters.final_answer=x"],
         "void_turn is off and algorithm.filters.void_trajectory is off"),
        (["algorithm.filters={void_turn: mask, final_answer: '('}"], "not a regular expression"),
        (["algorithm.shaping.overlong_factor=2"],
         "used only with algorithm.shaping.overlong_buffer"),
        (["algorithm.shaping.overlong_buffer=9999"],
         "longer than agent.max_response_length=512; lower it"),
    ],
)  # fmt: skip
def test_a_combination_that_cannot_work_is_refused_with_the_fix(overrides: list[str], fix: str):
    assert fix in problems(*overrides)


@pytest.mark.parametrize("estimator", ["gae", "reinforce_plus_plus", "remax"])
def test_without_a_group_baseline_one_trajectory_per_prompt_is_enough(estimator: str):
    built = config.build(MINIMAL, [f"algorithm.adv_estimator={estimator}", "rollout.group_size=1"])
    assert not built.algorithm.filters_zero_variance


def test_a_resolved_configuration_can_be_read_again():
    built = config.build(MINIMAL, ["algorithm.adv_estimator=gae", "algorithm.kl.where=loss"])
    assert config.build(built.model_dump(mode="json")) == built


def test_groups_are_filtered_by_right_and_wrong_where_that_is_asked_for():
    by_accuracy = {}
    for filters in (None, True):
        for metric in (None, "accuracy", "reward"):
            algorithm = AlgorithmConfig(filter_zero_variance=filters, filter_metric=metric)
            by_accuracy[filters, metric] = algorithm.filters_by_accuracy
    assert [key for key, value in by_accuracy.items() if value] == [
        (None, "accuracy"),
        (True, None),
        (True, "accuracy"),
    ]
    assert "algorithm.filter_zero_variance=true" in problems(
        "algorithm.adv_estimator=gae", "algorithm.filter_metric=accuracy"
    )


def test_zero_variance_groups_are_kept_where_equal_totals_hide_differences():
    chosen = {
        name: AlgorithmConfig(adv_estimator=name).filters_zero_variance
        for name in ("grpo", "gigpo", "gae")
    }
    assert chosen == {"grpo": True, "gigpo": False, "gae": False}
    assert AlgorithmConfig(adv_estimator="gae", filter_zero_variance=True).filters_zero_variance
