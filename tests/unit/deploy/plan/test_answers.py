"""What the compiler answered for an earlier plan need not be asked again."""

import dataclasses
import gzip
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jax_agent_rl.deploy.plan.compiled import Compiled, Program, compile_program
from jax_agent_rl.deploy.plan.topology import Slice

pytest.importorskip("libtpu", reason="pip install 'jax_agent_rl[plan]'")

CHIPS = Slice.parse("v5e:2x2")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    folder = tmp_path / "cache"
    monkeypatch.setenv("JAX_AGENT_RL_CACHE", str(folder))
    return folder


def compiled_product(size: int = 256, *, first_chip: int = 0) -> Compiled:
    """A square product on one chip, as a plan compiles it."""
    device = CHIPS.devices[first_chip]
    mesh = Mesh(np.array([device]), ("data",), axis_types=(AxisType.Auto,))
    square = jax.ShapeDtypeStruct(
        (size, size), jnp.bfloat16, sharding=NamedSharding(mesh, PartitionSpec())
    )
    traced = jax.jit(lambda a, b: a @ b).trace(square, square)
    program = Program(name="product", phase="learner", traced=traced, mesh=mesh)
    return compile_program(program, CHIPS.chip, keeps_answers=True)


def findings(compiled: Compiled) -> dict:
    fields = {}
    for field in dataclasses.fields(compiled):
        if field.name not in ("program", "seconds", "from_earlier_plan"):
            fields[field.name] = getattr(compiled, field.name)
    return fields


def test_a_later_plan_has_all_findings_of_an_equal_program_without_its_compiler():
    first = compiled_product()
    second = compiled_product()
    assert not first.from_earlier_plan
    assert second.from_earlier_plan
    assert findings(second) == findings(first)
    assert second.summary(CHIPS.chip).endswith("compiled for an earlier plan")


def test_a_refusal_is_kept_as_well():
    first = compiled_product(100_000)
    second = compiled_product(100_000)
    assert first.memory is None
    assert second.from_earlier_plan
    assert findings(second) == findings(first)


@pytest.mark.parametrize("damage", ["cut off", "no archive", "of another version"])
def test_the_compiler_is_asked_again_where_what_was_kept_is_damaged(damage: str, cache: Path):
    first = compiled_product()
    (file,) = cache.glob("plans/*.json.gz")
    contents = {
        "cut off": file.read_bytes()[:-20],
        "no archive": b"{}",
        "of another version": gzip.compress(b'{"memory": {"bytes": 1}, "text": ""}'),
    }
    file.write_bytes(contents[damage])
    second = compiled_product()
    assert not second.from_earlier_plan
    assert findings(second) == findings(first)
    assert compiled_product().from_earlier_plan


def test_another_program_and_other_flags_of_the_compiler_ask_again(monkeypatch):
    compiled_product()
    assert not compiled_product(128).from_earlier_plan

    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--xla_tpu_enable_all_reduce_scatter_fusion=false")
    assert not compiled_product().from_earlier_plan


def test_a_plan_needs_no_room_for_answers(cache):
    cache.write_text("a file in place of the folder")
    assert compiled_product().memory is not None
    assert not compiled_product().from_earlier_plan
