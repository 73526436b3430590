"""Where engines run, and what goes with it."""

import pytest

from jax_agent_rl import config
from jax_agent_rl.errors import ConfigError
from tests.messages import raises

BASE = {"run_dir": "r", "model": {"path": "m"}, "data": {"train": "t"}}
SEPARATE = {"placement": "separate"}


def build(rollout: dict, mode: str = "sync") -> config.Config:
    return config.build({**BASE, "rollout": rollout, "trainer": {"mode": mode}})


@pytest.mark.parametrize(
    ("rollout", "mode"),
    [
        ({}, "fully_async"),
        ({"sleep_during_update": True}, "sync"),
        ({"placement": "hybrid", "sleep_during_update": True}, "fully_async"),
        (
            {**SEPARATE, "num_engines": 4, "gpus_per_engine": 1, "ray_address": "10.0.0.5:6379"},
            "fully_async",
        ),
        (
            {
                **SEPARATE,
                "backend": "vllm",
                "gpus_per_engine": 4,
                "vllm": {"tensor_parallel_size": 4},
            },
            "one_step_off",
        ),
    ],
)
def test_what_fits_together_is_taken(rollout: dict, mode: str):
    build(rollout, mode)


@pytest.mark.parametrize(
    ("rollout", "mode", "named"),
    [
        (
            {"num_engines": 2},
            "sync",
            {
                "key": "rollout.num_engines",
                "value": 2,
                "fix": "rollout.placement=separate or hybrid",
            },
        ),
        ({"gpus_per_engine": 1}, "sync", {"key": "rollout.gpus_per_engine", "value": 1}),
        ({"ray_address": "auto"}, "sync", {"key": "rollout.ray_address", "value": "auto"}),
        (
            {"sleep_during_update": True},
            "fully_async",
            {"fix": "set trainer.mode=sync"},
        ),
        (
            {**SEPARATE, "sleep_during_update": True},
            "sync",
            {"key": "rollout.sleep_during_update", "value": "the learner's devices"},
        ),
        (
            {"backend": "remote", "urls": ["http://h:1"], "sleep_during_update": True},
            "sync",
            {"key": "rollout.sleep_during_update", "fix": "remove it"},
        ),
        (
            {"backend": "remote", "urls": ["http://h:1"], **SEPARATE},
            "sync",
            {
                "key": "rollout.backend",
                "value": "remote",
                "fix": "remove rollout.placement",
            },
        ),
        (
            {**SEPARATE, "deterministic": True},
            "sync",
            {"key": "rollout.deterministic"},
        ),
        (
            {**SEPARATE, "gpus_per_engine": 2, "jetstream": {"mesh": {"data": 1, "tensor": 1}}},
            "sync",
            {"key": "rollout.jetstream.mesh", "fix": ("set 1", "0 for CPUs")},
        ),
        (
            {**SEPARATE, "gpus_per_engine": 3, "jetstream": {"mesh": {"tensor": 2}}},
            "sync",
            {"key": "rollout.jetstream.mesh", "fix": ("set 2", "0 for CPUs")},
        ),
        (
            {**SEPARATE, "backend": "vllm", "gpus_per_engine": 2},
            "sync",
            {"key": "rollout.vllm.tensor_parallel_size", "fix": "set 1"},
        ),
        ({**SEPARATE, "num_engines": 0}, "sync", {"key": "rollout.num_engines"}),
        ({"placement": "elsewhere"}, "sync", {"key": "rollout.placement"}),
    ],
)
def test_what_does_not_is_refused_with_the_fix(rollout: dict, mode: str, named: dict):
    with raises(ConfigError, **named):
        build(rollout, mode)
