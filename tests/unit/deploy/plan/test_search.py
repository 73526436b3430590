"""Which layouts are worth compiling; nothing is compiled here."""

import dataclasses
import functools
import operator
from collections.abc import Sequence

import pytest

from jax_agent_rl.config import build
from jax_agent_rl.config.loading import read_tree
from jax_agent_rl.deploy.plan.architectures import architecture_folder
from jax_agent_rl.deploy.plan.compiled import format_bytes
from jax_agent_rl.deploy.plan.estimate import PlanEstimate, estimate
from jax_agent_rl.deploy.plan.result import PlanResult
from jax_agent_rl.deploy.plan.search import (
    Candidate,
    candidates,
    estimate_table,
    layout_table,
    search,
    verdict,
)
from jax_agent_rl.deploy.plan.topology import AXES, CHIPS, GIB, engine_meshes
from jax_agent_rl.errors import CompilerError, ConfigError
from jax_agent_rl.models.hf import load_config
from tests.messages import raises
from tests.unit.deploy.plan.recipe import recipe
from tests.unit.deploy.plan.slices import described


@pytest.fixture(scope="module")
def search_layouts(tmp_path_factory):
    """Searches layouts, each search once: hundreds of them are estimated."""
    folder = tmp_path_factory.mktemp("searched")
    tree = read_tree(recipe(folder))
    model = load_config(folder / "model")

    @functools.cache
    def run(topology="v5e:2x2", *overrides, hosts=1):
        configured = lambda changes: build(tree, [*overrides, *changes])  # noqa: E731
        return candidates(configured, model, described(topology, hosts=hosts))

    return run


def test_estimates_are_shown_before_anything_is_compiled(search_layouts):
    layouts = search_layouts()[:2]
    table = estimate_table(layouts)
    assert [column.header for column in table.columns] == ["learning", "sampling", "change"]
    assert list(table.columns[2].cells)[1] == " ".join(layouts[1].changes)
    sampling = list(table.columns[1].cells)[0]
    assert sampling == format_bytes(layouts[0].estimate.rollout_bytes)


def test_every_layout_takes_all_chips_and_divides_the_model(search_layouts):
    layouts = search_layouts()
    shape_of = operator.attrgetter(*AXES)
    meshes = {shape_of(layout.config.learner.mesh) for layout in layouts}
    # 4 = 4 x 1 = 2 x 2 over fsdp, context and tensor; no experts. Of 4 heads with 2 for keys 4
    # chips take one each.
    assert meshes == {
        (4, 1, 1, 1),
        (1, 1, 4, 1),
        (1, 1, 1, 4),
        (2, 1, 2, 1),
        (2, 1, 1, 2),
        (1, 1, 2, 2),
    }
    assert {layout.config.rollout.jetstream.mesh.tensor for layout in layouts} == {1, 2, 4}
    assert {layout.config.learner.micro_batch_size for layout in layouts} == {1, 2, 4, 8}


def test_what_runs_at_once_is_searched_too(search_layouts):
    layouts = search_layouts("v5e:2x2", "rollout.max_in_flight=24")
    assert {layout.config.learner.remat for layout in layouts} == {"none", "dots", "full"}
    # Half of the configured 8, twice and four times, as far as so many are in flight.
    assert {layout.config.rollout.jetstream.max_concurrent_decodes for layout in layouts} == {
        4,
        8,
        16,
        24,
    }


def test_changes_are_all_that_differs_from_what_is_configured_and_nothing_else(search_layouts):
    by_changes = {layout.changes: layout for layout in search_layouts()}
    assert () in by_changes, "what is configured is among them"
    with_context = "learner.mesh.tensor=1 learner.mesh.context=2".split()
    # The configured mesh is fsdp=2 tensor=2: without tensor=1 these would be 8 chips.
    assert any(
        set(with_context) <= set(changes) and "learner.mesh.fsdp=2" not in changes
        for changes in by_changes
    )


def test_the_estimated_best_come_first(search_layouts):
    seconds = [layout.estimate.seconds for layout in search_layouts()]
    assert seconds == sorted(seconds)
    assert seconds[0] < seconds[-1]


def test_more_tokens_at_once_and_more_kept_of_them_take_more(search_layouts):
    def passes(**wanted):
        mesh = {"fsdp": 2, "context": 1, "tensor": 2}
        settings = {"micro_batch_size": 1, "remat": "dots"}
        for key, value in wanted.items():
            if key in AXES:
                mesh[key] = value
            else:
                settings[key] = value
        sizes = set()
        for layout in search_layouts():
            learner = layout.config.learner.model_dump()
            if mesh.items() <= learner["mesh"].items() and settings.items() <= learner.items():
                sizes.add(layout.estimate.gradient_bytes)
        (size,) = sizes
        return size

    assert passes(remat="full") < passes() < passes(remat="none")
    assert passes(micro_batch_size=2) > passes()
    assert passes(fsdp=4, tensor=1) > passes()
    assert passes(context=2, tensor=1) < passes(fsdp=4, tensor=1)


def test_what_should_not_fit_is_tried_last(search_layouts):
    layouts = search_layouts("v5e:2x2", "rollout.max_in_flight=8", "learner.pack_length=3000000")
    fits = [layout.estimate.total <= 15.75 * GIB for layout in layouts]
    assert fits == sorted(fits, reverse=True)
    assert set(fits) == {True, False}


def test_every_host_samples(search_layouts):
    one_host = seconds_by_changes(search_layouts("v5e:2x4", hosts=1))
    two_hosts = seconds_by_changes(search_layouts("v5e:2x4", hosts=2))
    # Each of two hosts has half of the trajectories, so that other numbers of slots are searched.
    common = one_host.keys() & two_hosts.keys()
    assert common
    assert all(two_hosts[layout] < one_host[layout] for layout in common)


def seconds_by_changes(layouts: Sequence[Candidate]) -> dict[tuple[str, ...], float]:
    return {layout.changes: layout.estimate.seconds for layout in layouts}


def test_what_cannot_fit_is_not_compiled_and_if_nothing_fits_it_is_said(search_layouts):
    with raises(
        ConfigError,
        key="stays on a chip",
        value="15.8 GiB",
        fix=("smaller", "kv_cache_tokens"),
    ):
        search_layouts("v5e:2x2", "rollout.max_in_flight=2000000")


@pytest.fixture
def large_model(tmp_path):
    """Searches layouts of a well-known model."""
    tree = read_tree(recipe(tmp_path / "large"))

    def run(name, topology, *overrides, hosts):
        slice = described(topology, hosts=hosts)
        with architecture_folder(name) as folder:
            settings = [f"model.path={folder}", "rollout.jetstream.dtype=bfloat16", *overrides]
            model = load_config(folder)
            return candidates(lambda changes: build(tree, [*settings, *changes]), model, slice)

    return run


def test_where_no_host_holds_an_engine_that_is_said(large_model):
    with pytest.raises(ConfigError) as refusal:
        large_model("llama-3.3-70b", "v5p:2x2x4", hosts=16)
    assert "of an engine" in str(refusal.value)
    assert "of the learner" not in str(refusal.value), "it fits, over all chips"


def test_where_the_learner_needs_more_chips_that_is_said(large_model):
    with pytest.raises(ConfigError) as refusal:
        large_model("qwen3-32b", "v5p:2x2x1", hosts=1)
    assert "of the learner" in str(refusal.value)
    assert "of an engine" not in str(refusal.value), "it fits, over four chips"


def test_engines_that_run_elsewhere_take_nothing_of_a_chip(large_model):
    elsewhere = ("rollout.backend=remote", "rollout.urls=[http://engine:8000]")
    layouts = large_model("qwen3-14b", "v5p:2x2x1", *elsewhere, hosts=1)
    assert {layout.estimate.engine_bytes for layout in layouts} == {0.0}
    assert layouts[0].estimate.resident_bytes == layouts[0].estimate.learner_bytes


def test_a_learner_stays_while_engines_sample_although_they_sleep_while_it_learns(tmp_path):
    config = build(
        read_tree(recipe(tmp_path / "sleeping")),
        ["rollout.sleep_during_update=true", "rollout.jetstream.dtype=bfloat16"],
    )
    model = load_config(config.model.path)
    chip = CHIPS["v5p"]
    awake = {"rollout": config.rollout.model_copy(update={"sleep_during_update": False})}
    without_sleep = estimate(config.model_copy(update=awake), model, chip, engines=1)
    sleeping = estimate(config, model, chip, engines=1)
    assert sleeping.resident_bytes == sleeping.learner_bytes
    assert without_sleep.resident_bytes == sleeping.learner_bytes + sleeping.engine_bytes

    # Adam has two numbers for each weight and each gradient: a quarter is the gradient.
    state = sleeping.learner_bytes * 3 / 4
    assert sleeping.rollout_bytes == pytest.approx(state + sleeping.engine_bytes)
    assert without_sleep.rollout_bytes == sleeping.rollout_bytes

    # Weights are taken layer by layer, without a copy of them all; each host's engine keeps half of
    # the contexts.
    on_two_hosts = estimate(config, model, chip, engines=1, hosts=2)
    assert on_two_hosts.rollout_bytes == pytest.approx(state + on_two_hosts.engine_bytes)
    assert on_two_hosts.weight_bytes == sleeping.weight_bytes
    assert sleeping.weight_bytes < on_two_hosts.engine_bytes < sleeping.engine_bytes


def test_meshes_that_the_configuration_refuses_are_left_out(search_layouts):
    layouts = search_layouts("v5e:2x2", "rollout.deterministic=true")
    meshes = {layout.config.learner.mesh for layout in layouts}
    assert {(mesh.context, mesh.expert) for mesh in meshes} == {(1, 1)}
    # An engine of four chips would share two key/value heads.
    assert {layout.config.rollout.jetstream.mesh.tensor for layout in layouts} == {1, 2}


def test_one_program_for_engine_and_learner_needs_one_host(search_layouts):
    with raises(
        ConfigError, key="rollout.deterministic", value="2", fix="rollout.deterministic=false"
    ):
        search_layouts("v5e:2x4", "rollout.deterministic=true", hosts=2)


def test_an_engine_that_no_host_holds_is_refused_with_its_hosts_contexts(large_model):
    """Of one context or 16, each of 16 hosts has one."""
    messages = set()
    for in_flight in (1, 16):
        with pytest.raises(ConfigError) as refusal:
            overrides = f"rollout.max_in_flight={in_flight}"
            large_model("llama-3.3-70b", "v5p:2x2x4", overrides, hosts=16)
        messages.add(str(refusal.value))
    assert len(messages) == 1


def test_layouts_are_compared_by_the_slots_that_a_host_has(tmp_path):
    """Where each of two hosts has four contexts, no engine has more than four slots."""
    tree = read_tree(recipe(tmp_path / "compared"))

    def layout(slots: int, hosts: int) -> Candidate:
        config = build(tree, [f"rollout.jetstream.max_concurrent_decodes={slots}"])
        nothing = PlanEstimate(resident_bytes=0, gradient_bytes=0, seconds=0)
        return Candidate(changes=(), config=config, estimate=nothing, hosts=hosts)

    assert not layout(4, hosts=1).is_at_least(layout(8, hosts=1))
    assert layout(4, hosts=2).is_at_least(layout(8, hosts=2))


def test_engines_of_a_mixture_take_up_to_all_chips_of_a_host(tmp_path):
    config = build(read_tree(recipe(tmp_path / "mixture")), ["rollout.jetstream.mesh.tensor=4"])
    with architecture_folder("glm-4.5-air") as folder:
        model = load_config(folder)
    meshes = list(engine_meshes(config, model, described("v5p:2x2x4", hosts=4)))
    assert [mesh["rollout.jetstream.mesh.expert"] for mesh in meshes] == [1, 2, 4]


def planned(estimate: PlanEstimate, off: float, capacity: float = 10.0) -> PlanResult:
    """Plan as if compiled: a layout takes ``off`` times its estimate, and seconds as estimated."""
    total = estimate.total * off
    record = {
        "fits": total <= capacity,
        "programs": [{"total": total}],
        "step": {"seconds": estimate.seconds},
    }
    return PlanResult(report="", json=record)


@pytest.fixture
def searched(search_layouts):
    """Searches layouts with made-up estimates (bytes, seconds), whose real size is ``off`` times
    that; on some the compiler ``fails``.
    """

    def run(estimates, *, off, budget, fails=lambda config: False):
        every = search_layouts("v5e:2x2", "rollout.max_in_flight=8")
        chosen = []
        for layout in every:
            estimate = estimates(layout.config)
            if estimate is not None:
                chosen.append(dataclasses.replace(layout, estimate=estimate))
        tried = []

        def plan(layout: Candidate) -> PlanResult:
            tried.append(layout.config)
            if fails(layout.config):
                raise CompilerError("a fault of the compiler")
            return planned(layout.estimate, off)

        return search(chosen, plan, capacity=10, budget=budget), tried

    return run


def one_mesh(config):
    """A mesh and one engine: a byte a row, and for each row less a second."""
    mesh = config.learner.mesh
    if (mesh.fsdp, config.learner.remat) != (
        4,
        "full",
    ) or config.rollout.jetstream.mesh.tensor != 1:
        return None
    if config.rollout.jetstream.max_concurrent_decodes != 8:
        return None
    rows = config.learner.micro_batch_size
    return PlanEstimate(resident_bytes=0, gradient_bytes=rows, seconds=10 - rows)


def test_after_a_layout_that_does_not_fit_smaller_ones_follow(searched):
    results, tried = searched(one_mesh, off=4, budget=1)
    # 8 rows take 32 of 10; by that 4 take 16, and 2 take 8. By the estimate alone 4 would be next.
    assert [config.learner.micro_batch_size for config in tried] == [8, 2]
    assert [result.plan.fits for result in results] == [True, False], "what fits is first"
    assert "the first, as overrides" in verdict(results)


def test_if_nothing_fits_that_is_said_and_what_takes_least_is_first(searched):
    results, tried = searched(one_mesh, off=100, budget=2)
    assert sorted(config.learner.micro_batch_size for config in tried) == [
        1,
        8,
    ], "fuller ones are not tried"
    assert [result.plan.memory for result in results] == [100, 800]
    assert verdict(results).startswith("none of these 2 fits")
    assert layout_table(results).row_count == 2


def test_meshes_that_the_compiler_fails_on_are_left_out_and_said(searched):
    def two_meshes(config):
        mesh = config.learner.mesh
        rows = config.learner.micro_batch_size
        if 4 not in (mesh.fsdp, mesh.tensor) or config.rollout.jetstream.mesh.tensor != 1:
            return None
        return PlanEstimate(resident_bytes=0, gradient_bytes=rows, seconds=10 - rows + mesh.tensor)

    results, tried = searched(
        two_meshes, off=1, budget=1, fails=lambda config: config.learner.mesh.fsdp == 4
    )
    assert [config.learner.mesh.fsdp for config in tried] == [
        4,
        1,
    ], "no other rows, slots or remat of that mesh"
    assert [result.plan is not None for result in results] == [True, False]
    assert [result.as_json()["problem"] for result in results] == [None, "a fault of the compiler"]
    assert list(layout_table(results).columns[1].cells) == ["8 B", "compiler failed"]
    with raises(CompilerError, key="2 layouts", value="a fault"):
        searched(two_meshes, off=1, budget=1, fails=lambda config: True)


def test_the_budget_counts_meshes_that_fit_and_bounds_what_is_tried(searched):
    def any_mesh(config):
        rows = config.learner.micro_batch_size
        tensor = config.rollout.jetstream.mesh.tensor
        return PlanEstimate(resident_bytes=tensor, gradient_bytes=rows, seconds=10 - rows)

    results, tried = searched(any_mesh, off=0.1, budget=3)
    assert len(tried) == 3 and len({result.meshes for result in results}) == 3, (
        "the best of each mesh is enough"
    )
    results, tried = searched(any_mesh, off=1000, budget=2)
    assert len(tried) == 6
    assert not results[0].plan.fits
