"""What is proposed where a run does not fit; nothing is compiled here."""

from dataclasses import replace

import pytest

from jax_agent_rl.config import load
from jax_agent_rl.deploy.plan.compiled import Phase
from jax_agent_rl.deploy.plan.plan import TEMPORARIES, Load
from jax_agent_rl.deploy.plan.report import Adviser
from jax_agent_rl.deploy.plan.topology import Slice, check_layout
from jax_agent_rl.models.hf import load_config
from tests.tiny import DELTA_NETS
from tests.unit.deploy.plan.recipe import recipe
from tests.unit.deploy.plan.slices import described
from tests.unit.deploy.plan.test_fit import program

ROWS = "learner.micro_batch_size"
SMALLEST = ["learner.remat=full", "learner.compute_dtype=bfloat16"]


@pytest.fixture
def adviser(tmp_path):
    file = recipe(tmp_path)

    def run(changes=(), topology="v5e:2x2"):
        slice = described(topology)
        config = load(file, changes)
        model = load_config(config.model.path)
        check_layout(config, model, slice)
        return Adviser(config=config, model=model, slice=slice)

    return run


def filled(part: str, phase: Phase = "learner") -> Load:
    """A chip with too much of something."""
    return Load(program=program(phase=phase), parts={"code": 1, part: 2}, capacity=0)


@pytest.mark.parametrize(
    ("changes", "part", "phase", "first"),
    [
        ([], TEMPORARIES, "learner", "learner.remat=full"),
        (["learner.remat=full", f"{ROWS}=4"], TEMPORARIES, "learner", f"{ROWS}=2"),
        # Copies of parameters take most here, and the axis tensor splits what is computed, too.
        (["learner.mesh.fsdp=1", "learner.mesh.context=2"], "policy optimizer", "learner",
         "learner.mesh.context=1 learner.mesh.tensor=4"),
        ([], "KV cache", "rollout", "rollout.jetstream.kv_cache_tokens=512"),
        ([], "KV cache", "learner", "rollout.sleep_during_update=true"),
        (["rollout.sleep_during_update=true"], "engine weights", "rollout",
         "rollout.jetstream.dtype=bfloat16"),
        (["rollout.jetstream.dtype=bfloat16"], "engine weights", "rollout",
         "rollout.jetstream.mesh.tensor=4"),
    ],
)  # fmt: skip
def test_the_key_to_change_is_the_one_of_what_takes_most(changes, part, phase, first, adviser):
    assert adviser(changes).advice(filled(part, phase))[0] == first


def test_fewer_recurrent_states_are_proposed_for_models_that_have_them(adviser):
    fewer = "rollout.jetstream.state_checkpoints=5"
    attention = adviser(["rollout.jetstream.state_checkpoints=10"])
    recurrent = replace(attention, model=replace(DELTA_NETS, vocab_size=96))
    assert fewer in recurrent.advice(filled("KV cache", "rollout"))
    assert fewer not in attention.advice(filled("KV cache", "rollout"))


@pytest.mark.parametrize("part", ["policy optimizer", "engine weights", "KV cache", TEMPORARIES])
@pytest.mark.parametrize("mesh", [[4, 1, 1], [1, 4, 1], [1, 1, 4], [2, 2, 1]])
def test_what_is_proposed_can_be_set_on_the_slice(mesh, part, adviser, tmp_path):
    axes = [
        f"learner.mesh.{axis}={size}"
        for axis, size in zip(("fsdp", "context", "tensor"), mesh, strict=True)
    ]
    on_slice = adviser([*axes, *SMALLEST, "rollout.jetstream.mesh.tensor=4"])
    for phase in ("learner", "rollout"):
        proposed = on_slice.advice(filled(part, phase))
        assert proposed
        for hint in proposed:
            if "=" in hint:
                changed = load(tmp_path / "recipe.yaml", [*axes, *SMALLEST, *hint.split()])
                check_layout(changed, on_slice.model, on_slice.slice)
                assert changed.learner.mesh.devices == 4


def test_where_nothing_smaller_can_be_set_adapters_and_a_larger_slice_are_left(adviser):
    # Tokens are split as far as they go: any other mesh of 4 chips takes more of them, or more
    # parameters, at a time.
    *_, last = adviser(SMALLEST).advice(filled("policy optimizer"))
    assert last == "a larger --topology, as v5e:2x4"
    assert "learner.lora.rank=16" in adviser(SMALLEST).advice(filled("policy optimizer"))
    assert Slice.parse("v5e:16x16").larger is None
