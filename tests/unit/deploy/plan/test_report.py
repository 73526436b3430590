"""What is printed of made-up programs; nothing is compiled here."""

import dataclasses
import io
import json

import pytest
from jax.sharding import AbstractMesh
from rich.console import Console

from jax_agent_rl.config import load
from jax_agent_rl.deploy.plan.command import print_plan
from jax_agent_rl.deploy.plan.plan import ResourcePlan, loads, sum_step
from jax_agent_rl.deploy.plan.prediction import Flops
from jax_agent_rl.deploy.plan.report import as_json, show
from jax_agent_rl.deploy.plan.result import PlanResult
from jax_agent_rl.deploy.plan.topology import GIB, DevicePlacement, Slice
from jax_agent_rl.errors import StorageError
from jax_agent_rl.models.hf import load_config
from tests.messages import raises
from tests.unit.deploy.plan.recipe import recipe
from tests.unit.deploy.plan.test_fit import MESH, compiled, inventory, program

ONE_CHIP = ["learner.mesh.fsdp=1", "learner.mesh.tensor=1", "rollout.jetstream.mesh.tensor=1"]


def gradient(*, refused=False):
    compiled_gradient = compiled(
        program("policy gradient", tokens=128, token_kind="trained"),
        work=Flops(flops=1e12, bytes=3 * GIB),
        temporaries=int(1.5 * GIB),
    )
    if not refused:
        return compiled_gradient
    wide = dataclasses.replace(compiled_gradient.program, mesh=AbstractMesh((4,), ("data",)))
    return dataclasses.replace(
        compiled_gradient,
        program=wide,
        memory=None,
        required_bytes=40 * GIB,
        problem="RESOURCE_EXHAUSTED",
    )


def rollouts(count=1, **memory):
    return [
        compiled(
            program(f"decode {n} lanes", "rollout", tokens=128, token_kind="sampled"), **memory
        )
        for n in range(count)
    ]


@pytest.fixture
def plan(tmp_path):
    file = recipe(tmp_path)

    def run(programs, *, engines=(MESH,), changes=()):
        config = load(file, [*ONE_CHIP, *changes])
        slice = Slice.parse("v5e:1x1")
        vars(slice)["devices"] = list(MESH.devices.flat)
        first = programs[0]
        on_mesh = dataclasses.replace(first, program=dataclasses.replace(first.program, mesh=MESH))
        sizes = loads(
            inventory(weights=GIB // 8), [on_mesh, *programs[1:]], capacity=slice.chip.hbm_bytes
        )
        return ResourcePlan(
            config=config,
            model=load_config(config.model.path),
            slice=slice,
            placement=DevicePlacement(learner=MESH, engines=engines),
            compiled=tuple(programs),
            loads=tuple(sizes),
            step=sum_step(
                config, programs, slice.chip, engines=len(engines), disjoint=False, utilization=0.4
            ),
            utilization=0.4,
        )

    return run


def shown(plan, width=100, **options):
    """Lines, as a screen of that width shows them."""
    screen = io.StringIO()
    show(plan, Console(file=screen, width=width), **options)
    return screen.getvalue().splitlines()


def rows(lines, first):
    return [line.split() for line in lines if line.startswith(first)]


def test_memory_is_shown_by_kind_for_every_program(plan):
    lines = shown(plan([gradient(), *rollouts(outputs=GIB // 4)]))
    assert rows(lines, "weights") == [["weights", "0.50", "0.50"]]
    assert rows(lines, "temporaries") == [["temporaries", "1.50", "0.00"]]
    assert rows(lines, "gradients") == [["gradients", "and", "batches", "0.00", "0.25"]]
    assert rows(lines, "together") == [["together", "2.00", "0.75"]]


def test_times_of_gpus_are_said_to_be_those_of_a_roofline(plan):
    on_tpus = plan([gradient()])
    on_gpus = dataclasses.replace(on_tpus, slice=Slice.parse("h100:1"))
    vars(on_gpus.slice)["devices"] = list(MESH.devices.flat)
    assert any("predicted: time by the compiler's estimates" in line for line in shown(on_tpus))
    assert any("predicted: time by a roofline" in line for line in shown(on_gpus))


@pytest.mark.parametrize("width", [80, 100])
def test_many_programs_are_shown_on_a_narrow_screen_with_no_number_broken(width, plan):
    lines = shown(plan([gradient(), *rollouts(10)]), width)
    assert sum(len(row) - 1 for row in rows(lines, "together")) == 11
    assert len(rows(lines, "policy gradient")) == 2, "its sizes and its times"
    assert any("  program:" in line for line in lines)
    for line in lines:
        if "  program:" in line:
            break
        assert len(line) <= width


def test_counted_bytes_are_shown(plan):
    report = plan([gradient(), *rollouts()])
    line, _ = rows(shown(report), "policy gradient")
    assert " ".join(line[2:]).startswith("1 2 GiB 1 3 GiB 0 B")
    assert as_json(report)["programs"][0]["bytes"] == 3 * GIB


def test_what_is_not_known_of_a_refused_program_is_not_shown_as_nothing(plan):
    report = plan([gradient(refused=True), *rollouts()])
    lines = shown(report, price=1.2)
    sizes, times = rows(lines, "policy gradient")[:2]
    sent = sizes[-1]
    (ideal, _, predicted, share, _) = times[-5:]
    assert (sent, predicted, share) == ("-", "-", "-")
    assert ideal.startswith(">=")
    text = "\n".join(lines)
    assert "learner: 640 tokens in at least" in text
    assert ", at most" in text
    assert "step: at least" in text
    assert "cost: at least" in text
    assert json.loads(json.dumps(as_json(report)))["programs"][0]["exchanged"] is None


def test_with_engines_elsewhere_the_cost_is_said_to_be_the_learners(plan):
    report = plan(
        [gradient()], engines=(), changes=["rollout.backend=vllm", "rollout.jetstream={}"]
    )
    text = "\n".join(shown(report, price=1.2))
    assert "cost of the learner: " in text
    assert "\ncost:" not in text
    assert as_json(report, price=1.2)["cost_of"] == "learner"


def test_the_cost_of_a_million_trained_tokens_is_the_steps_share(plan):
    report = plan([gradient(), *rollouts()])
    told = as_json(report, price=1.2)
    assert told["cost_of_million_trained_tokens"] == pytest.approx(
        told["cost"] / told["step"]["sampled"] * 1e6
    )
    assert f"{told['cost_of_million_trained_tokens']:.3g} a million trained tokens" in "\n".join(
        shown(report, price=1.2)
    )
    assert as_json(report)["cost_of_million_trained_tokens"] is None


def test_programs_that_ask_for_the_same_change_are_named_together(plan):
    lines = shown(plan([gradient(), *rollouts(3, temporaries=16 * GIB)]))
    (line,) = [line for line in lines if "not fit" in line]
    assert line.startswith(
        "decode 0 lanes, decode 1 lanes, decode 2 lanes do not fit:"
        " up to 768 MiB too much on a chip;"
    )


def test_what_a_plan_says_is_printed_even_if_its_picture_cannot_be_drawn(plan, tmp_path, capsys):
    planned = PlanResult(report="it fits\n", json=as_json(plan([gradient(), *rollouts()])))
    with raises(StorageError, value="nowhere"):
        print_plan(
            planned, [], Console(), picture=tmp_path / "nowhere" / "memory.png", as_json=True
        )
    *lines, last = capsys.readouterr().out.splitlines()
    assert lines[0] == "it fits"
    assert json.loads(last)["fits"]
