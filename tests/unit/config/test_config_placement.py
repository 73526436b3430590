"""Where engines run, and what goes with it."""

import pytest

from jax_agent_rl import config
from jax_agent_rl.errors import ConfigError

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
    ("rollout", "mode", "message"),
    [
        (
            {"num_engines": 2},
            "sync",
            "rollout.num_engines=2 is used only with rollout.placement=separate or hybrid",
        ),
        ({"gpus_per_engine": 1}, "sync", "rollout.gpus_per_engine=1 is used only"),
        ({"ray_address": "auto"}, "sync", "rollout.ray_address=auto is used only"),
        (
            {"sleep_during_update": True},
            "fully_async",
            "the engine samples while the learner updates; set trainer.mode=sync",
        ),
        (
            {**SEPARATE, "sleep_during_update": True},
            "sync",
            "rollout.sleep_during_update: no engine shares the learner's devices",
        ),
        (
            {"backend": "remote", "urls": ["http://h:1"], "sleep_during_update": True},
            "sync",
            "no engine shares the learner's",
        ),
        (
            {"backend": "remote", "urls": ["http://h:1"], **SEPARATE},
            "sync",
            "remote runs where its servers are",
        ),
        (
            {**SEPARATE, "deterministic": True},
            "sync",
            "rollout.deterministic shares one program with the learner",
        ),
        (
            {**SEPARATE, "gpus_per_engine": 2, "jetstream": {"mesh": {"data": 1, "tensor": 1}}},
            "sync",
            "set 1, which rollout.jetstream.mesh needs, or 0 for CPUs",
        ),
        (
            {**SEPARATE, "gpus_per_engine": 3, "jetstream": {"mesh": {"tensor": 2}}},
            "sync",
            "set 2, which rollout.jetstream.mesh needs, or 0 for CPUs",
        ),
        (
            {**SEPARATE, "backend": "vllm", "gpus_per_engine": 2},
            "sync",
            "set 1, which rollout.vllm.tensor_parallel",
        ),
        ({**SEPARATE, "num_engines": 0}, "sync", "rollout.num_engines"),
        ({"placement": "elsewhere"}, "sync", "rollout.placement"),
    ],
)
def test_what_does_not_is_refused_with_the_fix(rollout: dict, mode: str, message: str):
    with pytest.raises(ConfigError, match=message):
        build(rollout, mode)
