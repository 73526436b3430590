"""Which trainer, and what goes with it."""

import pytest

from jax_agent_rl import config
from jax_agent_rl.errors import ConfigError
from tests.messages import raises

BASE = {"run_dir": "r", "model": {"path": "m"}, "data": {"train": "t"}}


def build(trainer: dict, **sections) -> config.Config:
    return config.build({**BASE, "trainer": trainer, **sections})


@pytest.mark.parametrize(
    ("trainer", "bound"),
    [
        ({}, 0),
        ({"mode": "one_step_off"}, 1),
        ({"mode": "fully_async"}, 1),
        ({"mode": "fully_async", "max_staleness": 0}, 0),
        ({"mode": "fully_async", "max_staleness": 7}, 7),
        ({"mode": "one_step_off", "max_staleness": 1}, 1),
    ],
)
def test_each_mode_has_its_staleness(trainer: dict, bound: int):
    assert build(trainer).trainer.staleness_bound == bound


@pytest.mark.parametrize(
    ("trainer", "named"),
    [
        (
            {"max_staleness": 2},
            {"key": "trainer.max_staleness", "value": 2, "fix": ("trainer.mode=sync", "it is 0")},
        ),
        (
            {"mode": "one_step_off", "max_staleness": 2},
            {"key": "trainer.max_staleness", "fix": ("trainer.mode=one_step_off", "it is 1")},
        ),
        (
            {"stragglers": "drop"},
            (
                {
                    "key": "trainer.stragglers",
                    "value": ("drop", "trainer.mode is sync"),
                    "fix": "trainer.mode=fully_async",
                }
            ),
        ),
        (
            {"mode": "one_step_off", "in_flight_update": "keep"},
            {"key": "trainer.in_flight_update", "value": "keep"},
        ),
        (
            {"mode": "one_step_off", "oversample_prompts": 1},
            {"key": "trainer.oversample_prompts", "value": 1},
        ),
        (
            {"mode": "fully_async", "oversample_prompts": 1},
            (
                {
                    "key": "oversample_prompts",
                    "value": (1, "trainer.stragglers is wait"),
                    "fix": "trainer.stragglers=drop",
                }
            ),
        ),
        ({"mode": "async"}, {"value": "trainer.mode"}),
    ],
)
def test_settings_that_do_nothing_are_refused(trainer: dict, named: dict):
    with raises(ConfigError, **named):
        build(trainer)


@pytest.mark.parametrize(
    ("trainer", "algorithm", "level"),
    [
        ({"mode": "fully_async"}, None, "token"),
        ({"mode": "one_step_off"}, {"adv_estimator": "rloo"}, "token"),
        ({"mode": "fully_async", "max_staleness": 0}, None, "none"),
        ({}, None, "none"),
        ({"mode": "fully_async"}, {"policy_loss": {"loss_mode": "decoupled"}}, "none"),
        ({"mode": "fully_async"}, {"policy_loss": {"loss_mode": "gspo"}}, "token"),
        ({"mode": "fully_async"}, {"rollout_correction": {"rollout_is": "none"}}, "none"),
        ({"mode": "fully_async"}, {"rollout_correction": {"bypass_mode": True}}, "none"),
    ],
)
def test_stale_tokens_are_corrected_for_unless_a_user_says_how(
    trainer: dict, algorithm: dict | None, level: str
):
    sections = {} if algorithm is None else {"algorithm": algorithm}
    assert build(trainer, **sections).algorithm.rollout_correction.rollout_is == level


def test_overrides_count_as_said():
    tree = {**BASE, "trainer": {"mode": "fully_async"}}
    corrected = config.build(tree, ["algorithm.rollout_correction.rollout_is=sequence"])
    assert corrected.algorithm.rollout_correction.rollout_is == "sequence"
    assert (
        config.build(BASE, ["trainer.mode=fully_async"]).algorithm.rollout_correction.rollout_is
        == "token"
    )


def test_a_saved_configuration_says_the_same_when_it_is_read_again():
    first = build({"mode": "fully_async", "max_staleness": 2})
    assert config.build(first.model_dump(mode="json")) == first
