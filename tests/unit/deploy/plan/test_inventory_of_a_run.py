"""What is described is compared with what a real learner and a real engine do."""

import math

import jax
import pytest

from jax_agent_rl.config import load
from jax_agent_rl.deploy.plan.engine_programs import RecordingTable, running_share
from jax_agent_rl.deploy.plan.plan import inventory
from jax_agent_rl.deploy.plan.topology import place_devices
from jax_agent_rl.jetstream.decode_batch import make_decode_batch
from jax_agent_rl.jetstream.engine import JaxEngine
from jax_agent_rl.jetstream.programs import ProgramTable
from jax_agent_rl.learner.learner import Learner
from jax_agent_rl.learner.optimized_params import OptimizedParams
from jax_agent_rl.models.hf import load_config
from jax_agent_rl.runtime.engines import engine_shapes
from tests.tiny import TINY, tiny_params
from tests.trajectories import random_groups
from tests.unit.deploy.plan.recipe import recipe

ONE_DEVICE = {
    "learner": {"pack_length": 128, "mesh": {}},
    "rollout": {"jetstream": {"prefill_buckets": [32]}},
}


def shapes(tree):
    return jax.tree.map(lambda x: (x.shape, str(x.dtype)), tree)


class CountingTable(ProgramTable):
    """Runs programs, and notes their keys in order."""

    def __init__(self) -> None:
        super().__init__()
        self.recorded = {}

    def call(self, key, *args, **options):
        self.recorded[key] = True
        return super().call(key, *args, **options)


class Stop(Exception):
    """The first micro-batch is there."""


def first_batch(config, monkeypatch) -> dict:
    """The micro-batch a real learner gives to a gradient first."""
    seen = []

    def gradients(self, micro_batches, tick=None):
        seen.append(next(iter(micro_batches)))
        raise Stop

    monkeypatch.setattr(OptimizedParams, "gradients", gradients)
    learner = Learner(
        TINY,
        tiny_params(),
        algorithm=config.algorithm,
        config=config.learner,
        temperature=1.0,
        critic=config.critic,
    )
    with pytest.raises(Stop):
        learner.update(random_groups(0))
    return seen[0]


ALGORITHMS = {
    "policy": {
        "kl": {"where": "loss", "coef": 0.1},
        "policy_loss": {"loss_mode": "clip_cov"},
        "rollout_correction": {"rollout_is": "token"},
    },
    "critic": {"adv_estimator": "gae"},
    "policy over candidates": {"kl": {"where": "loss", "top_k": 4}},
}


@pytest.mark.parametrize("trained", ALGORITHMS)
def test_a_gradient_is_planned_for_the_arrays_a_learner_gives_it(trained, tmp_path, monkeypatch):
    config = load(
        recipe(tmp_path, **ONE_DEVICE, algorithm=ALGORITHMS[trained]), ["learner.ppo_epochs=2"]
    )
    run_inventory = inventory(config, TINY, place_devices(config, jax.devices()[:1]))
    (program,) = [
        program
        for program in run_inventory.programs
        if program.name == f"{trained.split()[0]} gradient"
    ]
    (*_, planned), _ = program.traced.in_avals
    assert shapes(planned) == shapes(first_batch(config, monkeypatch))


def test_a_teacher_is_planned_as_the_reference_in_the_learners_compute_dtype(tmp_path):
    file = recipe(tmp_path, **ONE_DEVICE)
    config = load(
        file, [f"distill.teachers={tmp_path / 'model'}", "learner.compute_dtype=bfloat16"]
    )
    device = jax.devices()[0]
    planned = inventory(config, TINY, place_devices(config, [device]))
    name = f"teacher {tmp_path / 'model'}"
    sizes = {resident.name: resident.bytes[device] for resident in planned.residents}
    teacher = load_config(tmp_path / "model").parameter_shapes()
    count = sum(
        math.prod(shape)
        for shape in jax.tree.leaves(teacher, is_leaf=lambda x: isinstance(x, tuple))
    )
    assert sizes[name] == 2 * count
    assert "reference" not in sizes
    (scoring,) = [program for program in planned.programs if program.name == name]
    assert scoring.holds == {name}


def test_adapters_and_their_reference_are_planned_as_shapes(tmp_path):
    """A chip that is only described holds no arrays, so that a plan must not make any."""
    changes = ["learner.lora.rank=4", "algorithm.kl.where=loss", "algorithm.kl.coef=0.1"]
    config = load(recipe(tmp_path, **ONE_DEVICE), changes)
    device = jax.devices()[0]
    with jax.transfer_guard("disallow_explicit"):
        planned = inventory(config, TINY, place_devices(config, [device]))
    sizes = {resident.name: resident.bytes[device] for resident in planned.residents}
    assert sizes["reference"] == sizes["policy parameters"]
    assert sizes["policy parameters"] < sizes["policy frozen"]


def test_an_engine_is_planned_with_the_programs_it_compiles(tmp_path):
    config = load(recipe(tmp_path, **ONE_DEVICE))
    (mesh,) = place_devices(config, jax.devices()[:1]).engines
    params = tiny_params()
    described = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), params
    )
    described_programs = []
    for program_table, weights in ((CountingTable(), params), (RecordingTable(), described)):
        engine = JaxEngine(TINY, engine_shapes(config), mesh=mesh, program_table=program_table)
        served = engine.load_params(weights)
        cache = engine.init_cache()
        slots = make_decode_batch(8, engine.shapes.context_pages, 16)
        cache, sampled = engine.decode(served, cache, slots, 16, 1)
        described_programs.append((shapes(served), shapes((cache, sampled.ids, sampled.log_probs))))
        described_programs[-1] += ([key[0] for key in program_table.recorded],)
    assert described_programs[0] == described_programs[1]
    assert described_programs[1][2] == ["no weights", "weights", "weights", "empty", "decode"]


def test_one_program_is_planned_for_prompts_answers_and_old_log_probs(tmp_path):
    config = load(recipe(tmp_path, **ONE_DEVICE), ["rollout.deterministic=true"])
    planned = inventory(config, TINY, place_devices(config, jax.devices()[:1]))
    fed = [program for program in planned.programs if program.token_kind == "fed"]
    assert [program.phase for program in fed] == ["rollout"]
    kinds = {program.token_kind for program in planned.programs if program.phase == "rollout"}
    assert kinds == {"fed", None}
    assert "score" not in [program.name for program in planned.programs], "the engine scores"


def test_arrays_that_stay_are_counted_on_every_chip_that_holds_them(tmp_path):
    config = load(recipe(tmp_path, **ONE_DEVICE))
    device = jax.devices()[0]
    planned = inventory(config, TINY, place_devices(config, [device]))
    count = sum(x.size for x in jax.tree.leaves(tiny_params()))
    sizes = {resident.name: resident.bytes[device] for resident in planned.residents}
    shapes_ = engine_shapes(config)
    assert sizes["policy parameters"] == sizes["engine weights"] == 4 * count
    assert sizes["policy optimizer"] == 8 * count + 4  # two moments, and a counter
    assert sizes["KV cache"] == 2 * 3 * (1 + shapes_.pages) * 2 * shapes_.page * 8 * 4


def test_weights_that_engines_pull_stay_on_the_learners_chips(tmp_path):
    overrides = ["rollout.backend=remote", "rollout.urls=[http://engine:8100]"]
    overrides += ["rollout.weight_transport=jax_transfer", "rollout.jetstream.dtype=bfloat16"]
    config = load(recipe(tmp_path, **ONE_DEVICE), overrides)
    device = jax.devices()[0]
    planned = inventory(config, TINY, place_devices(config, [device]))
    count = sum(x.size for x in jax.tree.leaves(tiny_params()))
    (offered,) = [one for one in planned.residents if one.name == "offered weights"]
    assert offered.bytes[device] == 2 * count
    assert not offered.absent  # also while the learner works, for engines that join


@pytest.mark.parametrize(
    ("cache", "running"), [(None, 8), (512, 8), (256, 256 / (64 / 4 + 64 / 2)), (128, 128 / 48)]
)
def test_a_small_cache_keeps_fewer_slots_running(cache, running, tmp_path):
    """A group of four shares a prompt of 64; an answer of 64 is half done on average."""
    config = load(
        recipe(tmp_path, **ONE_DEVICE),
        [] if cache is None else [f"rollout.jetstream.kv_cache_tokens={cache}"],
    )
    planned = inventory(config, TINY, place_devices(config, jax.devices()[:1]), only="rollout")
    (decode,) = [program for program in planned.programs if program.token_kind == "sampled"]
    assert decode.tokens == round(running * engine_shapes(config).decode_steps)
    # On another three hosts, engines have a quarter of the eight trajectories each.
    assert running_share(config, 4) == pytest.approx(min(8 / 4, running) / 8)
