"""Which devices engines take where the configuration leaves them open, and what is said about idle
ones.

Sizes are computed by hand from the models' published shapes.
"""

from __future__ import annotations

from typing import Any

import pytest

from jax_agent_rl import config
from jax_agent_rl.deploy.plan.architectures import architecture_folder
from jax_agent_rl.errors import ConfigError
from jax_agent_rl.models.hf import load_config
from jax_agent_rl.runtime.engine_devices import (
    ResidentBytes,
    engine_shapes,
    expect_idle,
    of_one_host,
    parameter_count,
    report_idle,
    resolve_engine_mesh,
)
from tests.messages import raises
from tests.tiny import DELTA_NETS, TINY

GIB = 1 << 30


class Device:
    """As much of a device as a mesh looks at."""

    device_kind = "chip"

    def __init__(self, number: int, *, platform: str = "gpu") -> None:
        self.id = number
        self.platform = platform
        self.process_index = 0

    def memory_stats(self) -> dict[str, int]:
        return {"bytes_limit": 16 * GIB}


def settings(
    *, engine: dict[str, Any] | None = None, learner: dict[str, Any] | None = None, **rollout: Any
):
    return config.build(
        {
            "run_dir": "run",
            "model": {"path": "m"},
            "data": {"train": "t"},
            "learner": learner or {},
            "rollout": {
                "max_model_len": 2048,
                "jetstream": {"dtype": "bfloat16", **(engine or {})},
                **rollout,
            },
        }
    )


def resolved(
    model: str, run_config: config.Config, *, devices: int = 4, **options: Any
) -> tuple[int | None, int | None]:
    with architecture_folder(model) as folder:
        run_config = resolve_engine_mesh(
            run_config, load_config(folder), devices=[Device(n) for n in range(devices)], **options
        )
    return run_config.rollout.jetstream.mesh.data, run_config.rollout.jetstream.mesh.tensor


SIXTEEN = {"mesh": {"fsdp": 16}}


def test_a_small_model_with_two_kv_heads_gets_an_engine_on_every_chip():
    assert resolved("qwen2.5-0.5b", settings(learner=SIXTEEN)) == (4, 1)
    assert resolved("qwen2.5-0.5b", settings(learner=SIXTEEN), devices=8) == (8, 1)


def test_engines_are_split_until_weights_cache_and_the_learners_state_fit():
    """Qwen3-8B: 8.19e9 parameters, 15.3 GiB in bfloat16; its learner on 64 chips keeps 1.9 GiB on
    each.

    KV: 36 layers x 8 heads x 128 x 2 x 2 B = 147,456 B a token. Of 0.8 x 16 GiB, one chip with 8 of
    32 contexts of 2048 has too little (1.9 + 15.3 + 2.3), and two with 16 of them have enough (1.9
    + 7.6 + 2.3).
    """
    learner = {"mesh": {"fsdp": 64}}
    assert resolved("qwen3-8b", settings(learner=learner, max_in_flight=32)) == (2, 2)
    assert resolved("qwen3-8b", settings(learner=learner, max_in_flight=32), memory=95 * GIB) == (
        4,
        1,
    )


def test_of_a_mixture_whole_experts_are_split():
    """Qwen3-30B-A3B: 30.5e9 parameters, 56.9 GiB in bfloat16.

    KV: 48 layers x 4 heads x 128 x 2 x 2 B = 98,304 B a token. Without the learner
    (``sleep_during_update``), of 0.8 x 32 GiB, two chips with 16 of 32 contexts of 2048 have too
    little (28.4 + 1.5 each), and four with 32 of them have enough (14.2 + 1.5).
    """

    def mesh(**engine: Any) -> tuple[int | None, ...]:
        run_config = settings(engine=engine, max_in_flight=32, sleep_during_update=True)
        with architecture_folder("qwen3-30b-a3b") as folder:
            devices = [Device(n) for n in range(4)]
            model = load_config(folder)
            resolved_mesh = resolve_engine_mesh(
                run_config, model, devices=devices, memory=32 * GIB
            ).rollout.jetstream.mesh
        return resolved_mesh.data, resolved_mesh.expert, resolved_mesh.tensor

    assert mesh() == (1, 4, 1)
    assert mesh(mesh={"expert": 1}) == (1, 1, 4)
    assert mesh(mesh={"expert": 2}) == (1, 2, 2)
    assert mesh(mesh={"tensor": 2}) == (2, 1, 2)


def test_the_learners_state_counts_only_where_it_is():
    """Qwen2.5-1.5B: 1.54e9 parameters, 2.9 GiB in bfloat16; of the learner's 23 GiB, two chips hold
    11.5 each.

    Beside it 0.8 x 16 GiB have room for 1.3 GiB: a quarter of the weights.
    """
    two = {"mesh": {"fsdp": 2}}
    engine = {"kv_cache_tokens": 4096}
    assert resolved("qwen2.5-1.5b", settings(learner=two, engine=engine)) == (1, 4)
    assert resolved(
        "qwen2.5-1.5b", settings(learner=two, engine={**engine, "device_offset": 2})
    ) == (2, 1)
    assert resolved(
        "qwen2.5-1.5b", settings(learner=two, engine=engine, sleep_during_update=True)
    ) == (4, 1)


def test_the_largest_split_that_divides_the_heads_is_taken_if_none_fits():
    """Qwen2.5-0.5B: 14 query heads over 2 key/value heads suit 1, 2, 7 or 14 devices, and 7 do not
    divide the rest.
    """
    assert resolved("qwen2.5-0.5b", settings(), memory=GIB) == (2, 2)
    assert resolved("qwen2.5-0.5b", settings(), devices=8, memory=GIB) == (4, 2)


def test_what_is_set_is_kept():
    assert resolved("qwen2.5-0.5b", settings(engine={"mesh": {"tensor": 2}})) == (2, 2)
    assert resolved("qwen2.5-0.5b", settings(engine={"mesh": {"data": 1}}), memory=GIB) == (1, 2)
    assert resolved("qwen2.5-0.5b", settings(engine={"mesh": {"data": 3, "tensor": 1}})) == (3, 1)


def test_simulated_devices_get_one_engine():
    with architecture_folder("qwen2.5-0.5b") as folder:
        devices = [Device(n, platform="cpu") for n in range(8)]
        mesh = resolve_engine_mesh(
            settings(), load_config(folder), devices=devices
        ).rollout.jetstream.mesh
    assert (mesh.data, mesh.tensor) == (1, 1)


def test_one_program_for_engine_and_learner_runs_on_every_chip():
    assert resolved(
        "qwen2.5-0.5b", settings(deterministic=True, jetstream={"dtype": "float32"})
    ) == (4, 1)


def test_more_devices_than_there_are_is_refused():
    with raises(ConfigError, value=("8 devices", "number 0", "has 4")):
        resolved("qwen2.5-0.5b", settings(engine={"mesh": {"data": 8}}))


def test_each_engine_has_slots_and_cache_for_its_part_of_the_trajectories():
    run_config = settings(
        engine={"mesh": {"data": 4, "tensor": 1}, "max_concurrent_decodes": 16}, max_in_flight=96
    )
    shapes = engine_shapes(run_config)
    assert shapes.max_concurrent_decodes == 16
    assert shapes.kv_cache_tokens == 16 * 2048 + 8 * 1024, (
        "16 contexts, and half of the 8 others of 24"
    )


def test_engines_of_a_host_have_room_for_its_share_alone():
    run_config = settings(
        engine={"mesh": {"data": 2, "tensor": 1}, "max_concurrent_decodes": 16}, max_in_flight=97
    )
    shapes = engine_shapes(of_one_host(run_config, 5))
    assert shapes.max_concurrent_decodes == 10, "a fifth of 97 is 20, for two engines"
    assert shapes.kv_cache_tokens == 10 * 2048
    assert shapes.num_state_checkpoints == 10

    explicit = settings(
        engine={
            "mesh": {"data": 2, "tensor": 1},
            "kv_cache_tokens": 65536,
            "state_checkpoints": 7,
        },
        max_in_flight=97,
    )
    shapes = engine_shapes(of_one_host(explicit, 5))
    assert shapes.kv_cache_tokens == 65536
    assert shapes.num_state_checkpoints == 7


@pytest.mark.parametrize(("chosen", "checkpoints"), [(None, 24), (0, 0), (5, 5)])
def test_memory_for_recurrent_states_is_as_configured(chosen: int | None, checkpoints: int):
    run_config = settings(
        engine={
            "mesh": {"data": 4, "tensor": 1},
            "max_concurrent_decodes": 16,
            "state_checkpoints": chosen,
        },
        max_in_flight=96,
    )
    shapes = engine_shapes(run_config)
    assert shapes.num_states == 1 + 16 + checkpoints

    resident = ResidentBytes.estimate(run_config, DELTA_NETS, devices=1)
    pages = shapes.pages * shapes.page * resident.position
    # Of 2 key heads of 8 numbers and 4 value heads of 6: three inputs of a convolution of four, in
    # bfloat16, and a float32 matrix for each value head.
    state = 3 * (2 * 2 * 8 + 4 * 6) * 2 + 4 * 8 * 6 * 4
    assert resident.serving(shapes) == resident.weights + pages + shapes.num_states * state


@pytest.mark.parametrize("lora", [None, {"rank": 8}])
@pytest.mark.parametrize(
    ("engine", "number_bytes"), [({}, 2), ({"dtype": "float32"}, 4), ({"quantize": "int8"}, 4)]
)
def test_weights_that_wait_on_the_learners_devices_to_be_pulled_count_as_its_memory(
    engine: dict[str, Any], number_bytes: int, lora: dict[str, Any] | None
):
    """In the engines' precision; those that quantize get float32."""

    def learner_bytes(transport: str) -> float:
        run_config = settings(
            engine=engine,
            learner={"mesh": {"fsdp": 4}, "lora": lora},
            backend="remote",
            urls=["http://engine:8100"],
            weight_transport=transport,
        )
        return ResidentBytes.estimate(run_config, TINY, devices=1).learner

    copied = learner_bytes("jax_transfer") - learner_bytes("files")
    assert copied == number_bytes * parameter_count(TINY) / 4


def test_idle_devices_are_named_with_the_key_that_uses_them():
    """The launch page's command with one engine of two chips: what it did before engines took all
    of a host's chips.
    """
    run_config = settings(engine={"mesh": {"data": 1, "tensor": 2}}, learner=SIXTEEN)
    (line,) = report_idle(
        run_config, count=16, sampling={0, 1, 4, 5, 8, 9, 12, 13}, learning=range(16), hosts=4
    )
    assert (
        line == "devices 2-3, 6-7, 10-11, 14-15 of 16 have no engine to sample with: set"
        " rollout.jetstream.mesh.data=2, or leave it out"
    )
    odd = settings(engine={"mesh": {"tensor": 3}})
    assert expect_idle(odd, 4) == [
        (
            "device 3 of 4 have no engine to sample with:"
            " set rollout.jetstream.mesh.tensor to a divisor of 4"
        ),
        "devices 1-3 of 4 have no part in learning: set learner.mesh.fsdp=4",
    ]
    assert not expect_idle(settings(learner={"mesh": {"fsdp": 4}}), 4)


def test_learner_and_engines_on_devices_of_their_own_leave_none_idle():
    assert not expect_idle(settings(engine={"device_offset": 2}, learner={"mesh": {"fsdp": 2}}), 4)
    line, _ = expect_idle(
        settings(engine={"device_offset": 2, "mesh": {"data": 1, "tensor": 1}}), 4
    )
    assert line.startswith("devices 1, 3 of 4")
