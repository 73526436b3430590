"""What sampling replay, router replay and pages on the host add to a plan; sizes are worked out by
hand.
"""

import dataclasses

import jax
import pytest

from jax_agent_rl.config import load
from jax_agent_rl.deploy.plan.engine_programs import CACHE, RecordingTable
from jax_agent_rl.deploy.plan.estimate import estimate
from jax_agent_rl.deploy.plan.plan import Replay, ResourcePlan, inventory, loads, sum_step
from jax_agent_rl.deploy.plan.report import as_json
from jax_agent_rl.deploy.plan.topology import CHIPS, GIB, DevicePlacement, place_devices
from jax_agent_rl.jetstream.engine import JaxEngine
from jax_agent_rl.jetstream.sharding import make_engine_mesh
from jax_agent_rl.learner.learner import Learner
from jax_agent_rl.learner.optimized_params import OptimizedParams
from jax_agent_rl.models.config import Experts
from jax_agent_rl.runtime.engine_devices import ResidentBytes, engine_shapes
from tests.tiny import EXPERTS, TINY, tiny_params
from tests.trajectories import random_groups, with_routed_experts, with_supports
from tests.unit.deploy.plan.recipe import recipe
from tests.unit.deploy.plan.slices import described
from tests.unit.deploy.plan.test_fit import compiled, program
from tests.unit.deploy.plan.test_inventory_of_a_run import ONE_DEVICE, Stop, shapes
from tests.unit.deploy.plan.test_report import plan, shown  # noqa: F401

RESTRICTED = {"rollout": {**ONE_DEVICE["rollout"], "top_p": 0.9}}
WORDS = 4  # of 32 bits, for 97 ids


def configured(folder, *changes: str, **sections):
    return load(recipe(folder, **{**ONE_DEVICE, **sections}), list(changes))


def planned_inventory(config, model=TINY):
    return inventory(config, model, place_devices(config, jax.devices()[:1]))


def test_a_gradient_is_planned_for_the_supports_and_experts_a_learner_gives_it(
    tmp_path, monkeypatch
):
    config = configured(tmp_path, **RESTRICTED)
    seen = []

    def gradients(self, micro_batches, tick=None):
        seen.append(next(iter(micro_batches)))
        raise Stop

    monkeypatch.setattr(OptimizedParams, "gradients", gradients)
    learner = Learner(
        EXPERTS,
        tiny_params(config=EXPERTS),
        algorithm=config.algorithm,
        config=config.learner,
        temperature=1.0,
        critic=config.critic,
    )
    groups = with_routed_experts(with_supports(random_groups(0)), layers=2, experts=8, per_token=2)
    with pytest.raises(Stop):
        learner.update(groups)
    programs = planned_inventory(config, EXPERTS).programs
    (gradient,) = [program for program in programs if program.name == "policy gradient"]
    (*_, batch), _ = gradient.traced.in_avals
    assert shapes(batch) == shapes(seen[0])
    assert shapes(batch)["target_support"] == ((1, 128, WORDS), "uint32")
    assert shapes(batch)["routed_experts"] == ((1, 128, 2, 2), "int16")


@pytest.mark.parametrize(
    ("settings", "kind", "steps"),
    [
        ([], "decode", 16),
        (["rollout.top_k=20"], "decode truncated", 16),
        (["agent.constrain_tool_calls=true"], "decode constrained", 1),
        (
            ["agent.constrain_tool_calls=true", "rollout.min_p=0.1"],
            "decode truncated constrained",
            1,
        ),
    ],
)
def test_the_program_that_samples_is_the_one_for_the_runs_restrictions(
    tmp_path, settings, kind, steps
):
    config = configured(tmp_path, *settings)
    (decode,) = [
        program
        for program in planned_inventory(config).programs
        if program.name.startswith("decode")
    ]
    assert decode.name == f"{kind} 8 slots of 128"
    assert (decode.loops, decode.tokens) == (
        steps,
        8 * steps,
    )
    assert decode.model_flops and decode.model_bytes, "it runs the model"
    _, out = decode.traced.out_info
    assert out.shape == (
        2 if kind == "decode" else 2 + WORDS,
        steps,
        8,
    ), "masks leave the chip with the ids"
    keys = JaxEngine(TINY, engine_shapes(config)).decoder.restricted_keys()
    assert kind == "decode" or (kind, 1 + engine_shapes(config).pages, 8, 128) in keys


def test_pages_that_move_to_the_host_are_planned_with_the_engines_programs(tmp_path):
    plain = configured(tmp_path / "a")
    config = configured(tmp_path / "b", "rollout.jetstream.kv_offloading_size=1")
    program_table = RecordingTable()
    planned = planned_inventory(config)
    names = [program.name for program in planned.programs]
    assert names.count("pages to the host") == names.count("pages from the host") == 1
    assert not any("host" in program.name for program in planned_inventory(plain).programs)
    moved = next(program for program in planned.programs if program.name == "pages to the host")
    page = engine_shapes(config).page
    # Keys and values of 32 pages: 3 layers, 2 heads of 8 numbers in float32.
    sizes = [x.size * x.dtype.itemsize for x in jax.tree.leaves(moved.traced.out_info)]
    assert sum(sizes) == 32 * 2 * 3 * 2 * page * 8 * 4
    assert moved.holds == {CACHE}
    assert not program_table.recorded


@pytest.mark.parametrize(("draft_tokens", "calls"), [(0, []), (3, [0])])
def test_an_engine_that_verifies_drafts_is_planned_with_their_program(
    tmp_path, draft_tokens, calls
):
    config = configured(
        tmp_path, f"rollout.jetstream.num_speculative_tokens={draft_tokens}", "rollout.top_p=0.9"
    )
    programs = [
        program for program in planned_inventory(config).programs if program.name == "verify drafts"
    ]
    assert [program.calls for program in programs] == calls, (
        "it takes memory; how often it runs is not known"
    )


def test_an_estimate_counts_supports_and_experts(tmp_path):
    plain = configured(tmp_path / "a")
    restricted = configured(tmp_path / "b", **RESTRICTED)
    chip = CHIPS["v5e"]

    def passes(config, model):
        return estimate(config, model, chip, engines=1).gradient_bytes

    assert passes(restricted, TINY) - passes(plain, TINY) == 128 * 4 * WORDS
    assert passes(restricted, EXPERTS) - passes(plain, EXPERTS) == 128 * 4 * WORDS
    three = Experts(count=8, per_token=3, intermediate_size=16, normalize=True)
    three_per_token = dataclasses.replace(EXPERTS, experts=three)
    one_more = passes(plain, three_per_token) - passes(plain, EXPERTS)
    assert one_more >= 128 * 2 * EXPERTS.num_layers  # and its activations
    beside_dense = dataclasses.replace(three, per_token=2, beside_dense=True)
    with_dense = dataclasses.replace(EXPERTS, experts=beside_dense)
    assert passes(plain, with_dense) > passes(plain, EXPERTS)
    cache = next(r for r in planned_inventory(plain, EXPERTS).residents if r.name == CACHE)
    shapes_ = engine_shapes(plain)
    position = ResidentBytes.estimate(plain, EXPERTS, devices=1).position
    assert max(cache.bytes.values()) == (1 + shapes_.pages) * shapes_.page * position


def test_what_engines_report_of_a_step_is_counted(tmp_path):
    config = configured(tmp_path, **RESTRICTED)
    draws = 2 * 4 * 64
    assert Replay.of(config, TINY) == Replay(masks=draws * 16, supports=draws * 22, experts=0)
    many_experts = dataclasses.replace(
        EXPERTS, experts=Experts(count=512, per_token=2, intermediate_size=16, normalize=True)
    )
    free = configured(tmp_path / "free")
    assert Replay.of(free, EXPERTS) == Replay(masks=0, supports=0, experts=2 * 4 * 128 * 2 * 2)
    assert Replay.of(free, many_experts).experts == 2 * Replay.of(free, EXPERTS).experts


def host_plan(folder, *changes: str, hosts: int = 2):
    """Eight chips of which every two or four are a host's, an engine on each two."""
    slice = described("v5e:2x4", hosts=hosts)
    config = configured(folder, "rollout.jetstream.mesh.tensor=2", *changes)
    meshes = [
        make_engine_mesh(config.rollout.jetstream.mesh, devices=slice.devices[b : b + 4])
        for b in (0, 4)
    ]
    compiled_program = compiled(program())
    return ResourcePlan(
        config=config,
        model=TINY,
        slice=slice,
        placement=DevicePlacement(learner=compiled_program.program.mesh, engines=tuple(meshes)),
        compiled=(compiled_program,),
        loads=tuple(
            loads(planned_inventory(configured(folder / "loads")), [compiled_program], capacity=GIB)
        ),
        step=sum_step(
            config, [compiled_program], slice.chip, engines=4, disjoint=False, utilization=0.4
        ),
        utilization=0.4,
    )


def test_hosts_have_to_hold_the_pages_of_all_their_engines(tmp_path):
    two = ["rollout.jetstream.mesh.data=2"]
    fits = host_plan(tmp_path / "a", *two, "rollout.jetstream.kv_offloading_size=80")
    assert fits.host_pages == 2 * 80 * GIB
    assert fits.host_memory == 4 * 48 * 10**9
    assert fits.fits
    assert not host_plan(tmp_path / "b", *two, "rollout.jetstream.kv_offloading_size=90").fits
    assert host_plan(tmp_path / "c", *two).host_pages == 0
    # One host with all four engines.
    alone = host_plan(tmp_path / "d", *two, "rollout.jetstream.kv_offloading_size=80", hosts=1)
    assert alone.host_pages == 4 * 80 * GIB
    assert alone.host_memory == 8 * 48 * 10**9
    assert alone.fits


def test_replay_and_pages_on_the_host_are_said(plan):  # noqa: F811
    offloading = "rollout.jetstream.kv_offloading_size={}"
    restricted = "rollout.top_k=20"
    small = plan([compiled(program())], changes=[offloading.format(8), restricted])
    text = "\n".join(shown(small, width=200))
    assert "The engines keep up to 8 GiB of KV in a host's 44.7 GiB of memory" in text
    # 512 draws from 256 ids: 32 bytes of mask each.
    assert "sampling replay: 16 KiB of masks a step" in text
    assert "up to 21.5 KiB between processes" in text
    assert as_json(small)["host"] == {"pages": 8 * GIB, "memory": 48 * 10**9}
    assert as_json(small)["replay"] == {"masks": 512 * 32, "supports": 512 * 43, "experts": 0}
    large = plan([compiled(program())], changes=[offloading.format(64)])
    assert not large.fits
    assert "lower rollout.jetstream.kv_offloading_size" in "\n".join(shown(large, width=200))
    plain = "\n".join(shown(plan([compiled(program())]), width=200))
    assert "replay" not in plain
    assert "host's" not in plain
