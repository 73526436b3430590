"""Memory and time of made-up programs on one real device; numbers are worked out by hand."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType

from jax_agent_rl.config import load
from jax_agent_rl.deploy.plan.compiled import (
    Compiled,
    Inventory,
    Memory,
    Phase,
    Program,
    ideal_seconds,
    required_bytes,
)
from jax_agent_rl.deploy.plan.hlo import Collective
from jax_agent_rl.deploy.plan.plan import BATCH, CODE, TEMPORARIES, loads, sum_step
from jax_agent_rl.deploy.plan.prediction import Flops
from jax_agent_rl.deploy.plan.topology import CHIPS, GIB
from tests.unit.deploy.plan.recipe import recipe

V5E = CHIPS["v5e"]
MESH = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:1])
HERE = jax.sharding.NamedSharding(MESH, jax.sharding.PartitionSpec())
NOTHING = jax.jit(lambda: 0).trace()


def array(count: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((count,), jnp.float32, sharding=HERE)


def program(name: str = "p", phase: Phase = "learner", **fields) -> Program:
    holds, donates = (frozenset(fields.pop(key, ())) for key in ("holds", "donates"))
    return Program(
        name=name, phase=phase, traced=NOTHING, mesh=MESH, holds=holds, donates=donates, **fields
    )


NO_WORK = Flops()


def compiled(
    of: Program, *, work: Flops = NO_WORK, exchanges: tuple = (), **memory: int
) -> Compiled:
    fields = dict.fromkeys(("arguments", "outputs", "aliased", "temporaries", "code"), 0) | memory
    sizes = Memory(**fields)
    return Compiled(
        program=of,
        memory=sizes,
        required_bytes=sizes.total,
        work=work,
        exchanges=exchanges,
        seconds=1.0,
    )


def inventory(**sizes: int) -> Inventory:
    residents = Inventory()
    for name, count in sizes.items():
        residents.keep(
            name, array(count), absent=frozenset({"learner"}) if name == "asleep" else frozenset()
        )
    return residents


def test_a_program_is_charged_for_what_stays_beside_it_and_what_it_adds():
    charged = compiled(
        program(holds=["weights"]),
        arguments=400 + 70,
        outputs=400 + 5,
        aliased=400,
        temporaries=30,
        code=2,
    )
    (load,) = loads(inventory(weights=100, cache=200), [charged], capacity=1400)
    assert load.parts == {"weights": 400, "cache": 800, BATCH: 70 + 5, TEMPORARIES: 30, CODE: 2}
    assert load.total == 1307
    assert load.fits
    assert not dataclasses.replace(load, capacity=1306).fits


def test_an_engine_that_sleeps_leaves_its_memory_to_the_learner_only():
    programs = [compiled(program(phase="learner")), compiled(program(phase="weights"))]
    learning, weights = loads(inventory(asleep=10), programs, capacity=100)
    assert "asleep" not in learning.parts
    assert weights.parts["asleep"] == 40


def test_padding_is_what_a_compiler_says_of_donated_memory():
    two_donated = compiled(program(donates=["weights", "cache"]), aliased=500 + 900)
    one_donated = compiled(program(donates=["weights"]), aliased=500)
    parts = loads(
        inventory(weights=100, cache=200, other=10), [two_donated, one_donated], capacity=1
    )[0].parts
    assert (parts["weights"], parts["cache"], parts["other"]) == (500, 900, 40)


def test_a_refusal_of_the_compiler_is_counted_by_the_amount_it_names():
    text = (
        "RESOURCE_EXHAUSTED: … memory required for HLO temporaries (768.00G) exceeds available HBM"
        " (15.75G)."
    )
    assert required_bytes(text) == 768 * GIB
    assert (
        required_bytes(
            "RESOURCE_EXHAUSTED: … Used 21.50G of 15.75G hbm. Exceeded hbm capacity by 5.75G"
        )
        == 21.5 * GIB
    )
    assert required_bytes("RESOURCE_EXHAUSTED") == 0
    refused = Compiled(
        program=program(holds=["weights"]),
        memory=None,
        required_bytes=1000,
        problem=text,
        work=Flops(),
        seconds=1,
    )
    (load,) = loads(inventory(weights=100), [refused], capacity=999)
    # What it says is of the temporaries alone: the weights are there besides.
    assert load.total == 1400
    assert not load.fits
    silent = dataclasses.replace(refused, required_bytes=0, problem="RESOURCE_EXHAUSTED")
    assert not loads(inventory(weights=100), [silent], capacity=999)[0].fits


def load_recipe(folder, changes=()):
    return load(recipe(folder), changes)


def test_a_call_takes_as_long_as_its_slowest_part():
    links = Collective(
        kind="all-gather", axes=("fsdp",), between_slices=False, members=4, times=1, bytes=1e9
    )
    timed = compiled(program(), work=Flops(flops=197e12, bytes=819e9 / 2), exchanges=(links,))
    seconds = ideal_seconds(timed, V5E)
    assert (seconds.products, seconds.memory, seconds.links) == (1.0, 0.5, 1e9 / (2 * 50e9))
    assert (seconds.total, seconds.bound) == (1.0, "products")
    far = compiled(program(), exchanges=(dataclasses.replace(links, between_slices=True),))
    assert ideal_seconds(far, V5E).links == 1e9 / 3.1e9


def test_what_a_refused_program_exchanges_is_not_known_and_its_time_a_bound(tmp_path):
    known = compiled(
        program("decode", "rollout", tokens=128, token_kind="sampled"), work=Flops(flops=197e12)
    )
    refused = dataclasses.replace(
        known, program=program("gradient", tokens=128, token_kind="trained"), memory=None
    )
    config = load_recipe(tmp_path)
    assert refused.exchanges_known, "one chip has nobody to exchange with"
    wide = dataclasses.replace(refused.program, mesh=AbstractMesh((2,), ("data",)))
    refused = dataclasses.replace(refused, program=wide)
    step = sum_step(config, [known, refused], V5E, engines=1, disjoint=False, utilization=1)
    assert step.bounds == ("learner",)
    assert sum_step(config, [known], V5E, engines=1, disjoint=False, utilization=1).bounds == ()


def test_bytes_are_counted_of_products_and_else_of_all_that_is_given():
    products = compiled(program(), work=Flops(flops=1.0, bytes=6.0), arguments=70, outputs=5)
    assert products.bytes_accessed == 6
    assert compiled(program(), arguments=70, outputs=5).bytes_accessed == 75


def test_a_step_counts_every_program_as_often_as_it_runs_and_says_who_waits(tmp_path):
    second = Flops(flops=197e12)
    programs = [
        compiled(program("gradient", tokens=256, token_kind="trained", calls=2), work=second),
        compiled(program("decode", "rollout", tokens=128, token_kind="sampled"), work=second),
        compiled(program("prefill", "rollout", tokens=128, token_kind="prompts"), work=second),
        compiled(program("take", "weights"), work=second),
    ]
    config = load_recipe(tmp_path, ["trainer.mode=one_step_off"])
    step = sum_step(config, programs, V5E, engines=1, disjoint=True, utilization=0.5)
    # 2 prompts of 64, 2 x 4 responses of 64: 128, 512 and together 640 tokens; half the peak
    # doubles all times.
    assert (step.sampled, step.trained) == (512, 640)
    assert (step.learner, step.rollout, step.weights) == (2 * 3 * 2, 2 * (4 + 1), 2)
    assert step.seconds == 12 + 2
    assert step.waits == ("engines", pytest.approx(2 / 14))
    in_turn = sum_step(config, programs, V5E, engines=1, disjoint=False, utilization=0.5)
    assert in_turn.seconds == 12 + 10 + 2
