"""Predicted times of made-up programs, worked out by hand; and of a product, by the compiler."""

import io
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from rich.console import Console

from jax_agent_rl.deploy.plan.compiled import Program, compile_program, ideal_seconds
from jax_agent_rl.deploy.plan.hlo import parse
from jax_agent_rl.deploy.plan.prediction import (
    GRID_STEP,
    HOP,
    LAUNCH,
    SUSTAINED,
    Flops,
    Part,
    Prediction,
    kernel_grids,
    predict,
)
from jax_agent_rl.deploy.plan.profiles import profiles_as_json, show_profiles
from jax_agent_rl.deploy.plan.topology import CHIPS, Slice
from jax_agent_rl.learner.optimized_params import exchange_options
from tests.unit.deploy.plan.test_collectives import COUNTED, FOUND, mesh
from tests.unit.deploy.plan.test_fit import compiled, program

V5E = CHIPS["v5e"]
FOUR = mesh(tensor=4)
MEMORY = V5E.hbm_bandwidth * SUSTAINED
MIB = 1 << 20


def fusion(name: str, milliseconds: float, operands: str = "%p", *, what: str = "") -> str:
    cycles = round(milliseconds * 1e-3 * V5E.clock)
    return (
        f"%{name} = f32[8]{{0:T(256)S(1)}} fusion({operands}), kind=kLoop, calls=%fused.9{what}, "
        f'backend_config={{"window_config":{{"estimated_cycles":"{cycles}"}}}}'
    )


def predicted(*lines: str, preamble: str = "", **options) -> Prediction:
    entry = "".join(f"  {line}\n" for line in lines)
    nothing = "%fused.9 (p.9: f32[8]) -> f32[8] {\n  ROOT %p.9 = f32[8]{0} parameter(0)\n}\n\n"
    text = f"{preamble}{nothing}ENTRY %main.1 (p.1: f32[8]) -> f32[8] {{\n{entry}}}\n"
    return predict(parse(text), V5E, FOUR, **options)


def milliseconds(*lines: str, **options) -> float:
    return predicted(*lines, **options).seconds * 1e3


def test_the_compilers_cycles_add_up():
    assert milliseconds(fusion("a", 0.25), fusion("b", 0.5, "%a")) == pytest.approx(0.75)


START = "%copy-start = (f32[{0}]{{0:S(1)}}, f32[{0}]{{0}}, u32[]{{:S(2)}}) copy-start(%p)"
DONE = "%copy-done = f32[{0}]{{0:S(1)}} copy-done(%copy-start)"


def copy(size: float) -> tuple[str, str]:
    count = round(size / 4)
    return START.format(count), DONE.format(count)


def test_what_runs_beside_a_copy_hides_it_and_the_rest_is_a_wait():
    start, finish = copy(MEMORY * 1e-3)
    long = predicted(start, fusion("a", 0.4), finish, fusion("b", 0.1, "%copy-done"))
    assert long.seconds * 1e3 == pytest.approx(1.0 + 0.1)
    assert {part.what: part.seconds * 1e3 for part in long.parts}["wait for copy"] == pytest.approx(
        0.6
    )
    assert milliseconds(
        start, fusion("a", 1.4), finish, fusion("b", 0.1, "%copy-done")
    ) == pytest.approx(1.5)


def test_memory_serves_one_copy_after_the_other():
    start, finish = copy(MEMORY * 1e-3)
    second = [
        line.replace("copy-", "copy-2-")
        .replace("copy-2-start(", "copy-start(")
        .replace("copy-2-done(", "copy-done(")
        for line in (start, finish)
    ]
    assert milliseconds(start, second[0], finish, second[1]) == pytest.approx(2.0)


def test_what_a_kernel_reads_delays_a_copy():
    start, finish = copy(MEMORY * 1e-3)
    kernel = kernel_line(flops=0, size=round(MEMORY * 1e-3))
    assert milliseconds(start, kernel, finish) == pytest.approx(2.0, rel=2e-3)


def kernel_line(*, flops: int, size: int) -> str:
    cost = f'"cost_estimate":{{"flops":"{flops}","transcendentals":"0","bytes_accessed":"{size}"}}'
    return (
        '%k = f32[8]{0} custom-call(%p), custom_call_target="tpu_custom_call", '
        f'backend_config={{"custom_call_config":{{"body":"TUzv",{cost}}}}}'
    )


def test_a_kernel_takes_as_long_as_the_longest_of_products_memory_and_steps():
    flops = round(V5E.flops * 1e-3)
    size = round(MEMORY * 2e-3)
    kernel = kernel_line(flops=flops, size=size)
    assert milliseconds(kernel) == pytest.approx(2.0 + LAUNCH * 1e3)
    assert milliseconds(kernel_line(flops=flops, size=0)) == pytest.approx(1.0 + LAUNCH * 1e3)
    steps = {(flops, 0, size): 10_000}
    assert milliseconds(kernel, grids=steps) == pytest.approx((10_000 * GRID_STEP + LAUNCH) * 1e3)


def test_a_scatter_reads_its_updates_and_reads_and_writes_where_they_go():
    size = round(MEMORY * 1e-3 / 4)
    scatter = (
        f"%inner.1 (r: f32[8], i: s32[9], u: f32[{size}]) -> f32[8] {{\n"
        "  %r = f32[8]{0} parameter(0)\n"
        "  %i = s32[9]{0} parameter(1)\n"
        f"  %u = f32[{size}]{{0}} parameter(2)\n"
        "  ROOT %s = f32[8]{0} scatter(%r, %i, %u), to_apply=%add.1\n"
        "}\n\n"
        f"%outer.1 (r.2: f32[8], i.2: s32[9], u.2: f32[{size}]) -> f32[8] {{\n"
        "  %r.2 = f32[8]{0} parameter(0)\n"
        "  %i.2 = s32[9]{0} parameter(1)\n"
        f"  %u.2 = f32[{size}]{{0}} parameter(2)\n"
        "  ROOT %f = f32[8]{0} fusion(%r.2, %i.2, %u.2), kind=kCustom, calls=%inner.1\n"
        "}\n\n"
    )
    line = "%x = f32[8]{0} fusion(%p, %p, %p), kind=kCustom, calls=%outer.1"
    assert milliseconds(line, preamble=scatter) == pytest.approx(3.0 + LAUNCH * 1e3)
    updates = f"%u = f32[{size}]{{0}} parameter(1)"
    alone = "%s = f32[8]{0} scatter(%p, %p, %u), to_apply=%add.1"
    assert milliseconds(updates, alone) == pytest.approx(3.0 + LAUNCH * 1e3)


def test_grids_are_found_by_the_cost_that_kernels_state():
    def double(x_ref, out_ref):
        out_ref[...] = 2 * x_ref[...]

    def run(x):
        cost = pl.CostEstimate(flops=5, transcendentals=6, bytes_accessed=7)
        block = pl.BlockSpec((8, 128), lambda i, j: (i, j))
        return pl.pallas_call(
            double, grid=(3, 4), in_specs=[block], out_specs=block, out_shape=x, cost_estimate=cost
        )(x)

    traced = jax.make_jaxpr(lambda x: jax.lax.cond(True, jax.jit(run), jnp.negative, x))(
        jnp.zeros((24, 512))
    )
    assert kernel_grids(traced) == {(5, 6, 7): 12}


def test_an_exchange_takes_its_bytes_in_two_directions_and_its_hops():
    # A sum of 1 MiB over 4 chips: each sends 2 x 3/4 of it, and it takes two rounds of two hops.
    line = (
        f"%r = f32[{MIB // 4}]{{0:S(1)}} all-reduce(%p), channel_id=1, replica_groups=[1,4]<=[4],"
        " to_apply=%add"
    )
    assert milliseconds(line) == pytest.approx((1.5 * MIB / 100e9 + 4 * HOP) * 1e3)


def test_what_runs_beside_an_exchange_hides_it():
    count = round(50e9 * 1e-3 / 4)  # a permutation uses one link: a millisecond
    start = (
        f"%s = (f32[{count}]{{0}}, f32[{count}]{{0}}, u32[]{{:S(2)}}, u32[]{{:S(2)}})"
        " collective-permute-start(%p), source_target_pairs={{0,1},{1,0}}"
    )
    finish = f"%d = f32[{count}]{{0}} collective-permute-done(%s)"
    assert milliseconds(start, fusion("a", 0.3), finish) == pytest.approx(1.0, rel=2e-3)
    assert milliseconds(start, fusion("a", 3), finish) == pytest.approx(3.0)


def test_an_exchange_on_a_sparse_core_takes_as_long_and_is_hidden_likewise():
    count = round(1e-3 * 2 * V5E.link_bandwidth) // 4
    called = (
        f"%called (p.2: f32[{count}]) -> f32[{count}] {{\n"
        f"  ROOT %x = f32[{count}]{{0}} all-to-all(%p.2), replica_groups={{{{0,1,2,3}}}}\n}}\n\n"
    )
    shape = f"f32[{count}]{{0}}"
    start = (
        f'%s = (({shape}), {shape}) call-start(%p), async_execution_thread="sparsecore",'
        " to_apply=%called"
    )
    finish = f"%d = {shape} call-done(%s)"
    alone = milliseconds(start, finish, preamble=called)
    assert alone > 0.5
    assert milliseconds(start, fusion("a", 3), finish, preamble=called) == pytest.approx(3.0)
    assert milliseconds(start, fusion("a", alone / 2), finish, preamble=called) == pytest.approx(
        alone
    )


@pytest.mark.parametrize(("condition", "times"), [(COUNTED, 30), (FOUND, 16)])
def test_a_loops_body_counts_as_often_as_it_runs(condition, times):
    body = f"%body.1 (p: (s32[], f32[8])) -> (s32[], f32[8]) {{\n  {fusion('x', 1)}\n}}\n\n"
    loop = "%w = (s32[], f32[8]{0}) while(%t), condition=%until.1, body=%body.1"
    prediction = predicted(loop, preamble=body + condition, loops=16)
    assert prediction.seconds * 1e3 == pytest.approx(times)
    assert [part.runs for part in prediction.parts] == [times]


def test_of_branches_the_longest_counts_or_the_one_that_is_not_rare():
    branches = "".join(
        f"%{name} (p.2: f32[8]) -> f32[8] {{\n  {fusion(name + '.f', length)}\n}}\n\n"
        for name, length in (("rare.1", 3), ("common.1", 1))
    )
    line = "%c = f32[8]{0} conditional(%i, %a, %b), branch_computations={%rare.1, %common.1}"
    assert milliseconds(line, preamble=branches) == pytest.approx(3)
    assert milliseconds(line, preamble=branches, rare_branches=False) == pytest.approx(1)


FRAMES = """FileNames
1 "/site-packages/jax/_src/core.py"
2 "/home/user/jax_agent_rl/models/layers.py"
3 "/home/user/jax_agent_rl/learner/objective.py"

FileLocations
1 {file_name_id=3 function_name_id=1 line=12 end_line=12 column=10 end_column=44}
2 {file_name_id=1 function_name_id=2 line=99 end_line=99 column=29 end_column=32}
3 {file_name_id=2 function_name_id=2 line=34 end_line=35 column=29 end_column=32}

StackFrames
1 {file_location_id=1 parent_frame_id=1}
2 {file_location_id=2 parent_frame_id=2}
3 {file_location_id=3 parent_frame_id=3}

"""


def test_time_counts_for_the_lines_of_this_project_that_it_comes_from():
    start, finish = copy(MEMORY * 1e-3)
    at = ', metadata={op_name="jit(f)/while/mul" stack_frame_id=3}'
    prediction = predicted(
        fusion("a", 2, what=at),
        fusion("b", 1, what=at),
        start,
        finish,
        fusion("c", 5, "%copy-done"),
        fusion("d", 4, "%c", what=at),
        preamble=FRAMES,
    )
    source = ("models/layers.py:34", "learner/objective.py:12")
    first = prediction.parts[0]
    assert first.seconds == pytest.approx(12e-3)
    assert (first.what, first.source, first.operation, first.runs) == ("fusion", source, "mul", 4)
    # A copy has no line of its own: it counts for what it is for.
    assert prediction.parts[1].source == source
    assert prediction.parts[1].what == "wait for copy"


def test_a_profile_is_shown_per_step_and_as_json_per_call():
    decode = compiled(
        program("decode 8 slots of 64", "rollout", loops=16), work=Flops(flops=197e12 * 8e-3)
    )
    parts = tuple(
        Part(
            what="fusion",
            source=(f"a.py:{n}", "b.py:1", "c.py:1"),
            operation="mul",
            seconds=1e-3,
            runs=16 * 3,
        )
        for n in range(16)
    )
    object.__setattr__(decode, "prediction", Prediction(seconds=16e-3, parts=parts))
    screen = io.StringIO()
    show_profiles([decode], V5E, Console(file=screen, width=100))
    lines = screen.getvalue().splitlines()
    assert lines[0].startswith(
        "decode 8 slots of 64: 1 ms a step, 50% of the ideal (0.5 ms, bound by products)"
    )
    assert lines[2].split() == ["0.0625", "ms", "6.2%", "3", "fusion", "mul", "a.py:0"]
    assert lines[3].split() == ["b.py:1"]
    record = profiles_as_json([decode], V5E)
    assert record["fits"]
    assert record["profiles"]["decode 8 slots of 64"]["predicted"] == 16e-3


@pytest.mark.parametrize("topology", ["v5e:2x2", pytest.param("v5p:2x2x1", marks=pytest.mark.slow)])
def test_a_large_product_is_predicted_a_little_above_its_ideal(topology: str):
    """1024 x 4096 x 4096 in bfloat16 on v5e: 277,667 cycles of libtpu 0.0.42, 94 % of the peak."""
    pytest.importorskip("libtpu", reason="pip install 'jax_agent_rl[plan]'")
    slice = Slice.parse(topology)
    one_chip = Mesh(np.array(slice.devices[:1]), ("data",), axis_types=(AxisType.Auto,))
    everywhere = NamedSharding(one_chip, PartitionSpec())
    a, b = (
        jax.ShapeDtypeStruct((n, 4096), jnp.bfloat16, sharding=everywhere) for n in (1024, 4096)
    )
    traced = jax.jit(lambda a, b: a @ b).trace(a, b)
    product = compile_program(
        Program(name="product", phase="learner", traced=traced, mesh=one_chip), slice.chip
    )
    assert product.prediction is not None
    assert 0.85 < ideal_seconds(product, slice.chip).total / product.prediction.seconds < 1


@pytest.mark.parametrize(
    ("topology", "sparse"), [("v5e:2x2", False), ("v5p:2x2x1", True), ("v6e:2x2", True)]
)
def test_gradients_are_exchanged_on_sparse_cores_where_there_are_some(topology: str, sparse: bool):
    pytest.importorskip("libtpu", reason="pip install 'jax_agent_rl[plan]'")
    mesh = Mesh(np.array(Slice.parse(topology).devices), ("fsdp",), axis_types=(AxisType.Auto,))
    rows, columns = (
        NamedSharding(mesh, PartitionSpec(*axes)) for axes in (("fsdp",), (None, "fsdp"))
    )
    x = jax.ShapeDtypeStruct((8192, 4096), jnp.bfloat16, sharding=rows)
    weight = jax.ShapeDtypeStruct((4096, 4096), jnp.bfloat16, sharding=columns)

    def gradient(weight: jax.Array, x: jax.Array) -> jax.Array:
        return jax.grad(lambda weight: jnp.sum(jnp.tanh(x @ weight)))(weight)

    program = jax.jit(gradient, out_shardings=columns, compiler_options=exchange_options(mesh))
    text = program.lower(weight, x).compile().as_text()
    for exchange in ("all-gather", "reduce-scatter"):  # of the weight, and of its gradient
        assert (re.search(rf"%{exchange}[\w.]*call-start", text) is not None) == sparse
    assert not exchange_options(Mesh(mesh.devices[:1], ("fsdp",)))
