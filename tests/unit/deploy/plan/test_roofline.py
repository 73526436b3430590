"""Texts are cut from programs compiled for H100s; what they come to is worked out by hand."""

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl

from jax_agent_rl.deploy.plan.prediction import kernel_costs, predict
from jax_agent_rl.deploy.plan.roofline import KERNEL_LAUNCH, PRODUCTS
from jax_agent_rl.deploy.plan.topology import CHIPS
from tests.unit.deploy.plan.test_collectives import mesh, program

H100 = CHIPS["h100"]
MEMORY = H100.hbm_bandwidth * 0.9


def seconds(*lines: str, preamble: str = "", **options) -> float:
    return predict(program(*lines, preamble=preamble), H100, mesh(), **options).seconds


PRODUCT = (
    "%product.1 (a: bf16[8192,4096], b: bf16[4096,4096]) -> bf16[8192,4096] {\n"
    "  %a = bf16[8192,4096]{1,0} parameter(0)\n"
    "  %b = bf16[4096,4096]{1,0} parameter(1)\n"
    "  ROOT %dot.1 = bf16[8192,4096]{1,0} dot(%a, %b), lhs_contracting_dims={1},"
    " rhs_contracting_dims={0}\n"
    "}\n\n"
)
NESTED = (
    "%outer.1 (a.2: bf16[8192,4096], b.2: bf16[4096,4096]) -> bf16[8192,4096] {\n"
    "  %a.2 = bf16[8192,4096]{1,0} parameter(0)\n"
    "  %b.2 = bf16[4096,4096]{1,0} parameter(1)\n"
    "  ROOT %f.2 = bf16[8192,4096]{1,0} fusion(%a.2, %b.2), kind=kCustom, calls=%product.1\n"
    "}\n\n"
)


@pytest.mark.parametrize(
    ("called", "preamble"), [("product.1", PRODUCT), ("outer.1", PRODUCT + NESTED)]
)
def test_a_large_product_takes_its_operations_at_the_stated_share_of_the_peak(called, preamble):
    line = f"%r = bf16[8192,4096]{{1,0}} fusion(%x, %y), kind=kCustom, calls=%{called}"
    operations = 2 * 8192 * 4096 * 4096
    expected = KERNEL_LAUNCH + operations / (H100.flops * PRODUCTS)
    assert seconds(line, preamble=preamble) == pytest.approx(expected)


def test_products_of_float32_take_twice_as_long():
    line = "%r = bf16[8192,4096]{1,0} fusion(%x, %y), kind=kCustom, calls=%product.1"
    slow = seconds(line, preamble=PRODUCT.replace("bf16", "f32")) - KERNEL_LAUNCH
    assert slow == pytest.approx(2 * (seconds(line, preamble=PRODUCT) - KERNEL_LAUNCH))


def test_a_call_of_cublas_takes_as_long_as_the_product_in_a_fusion():
    call = (
        "%r = (bf16[8192,4096]{1,0}, s8[4194304]{0}) custom-call(%x, %y),"
        ' custom_call_target="__cublas$lt$matmul", backend_config={"gemm_backend_config":'
        '{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],'
        '"rhs_contracting_dimensions":["0"]}}}'
    )
    x = "%x = bf16[8192,4096]{1,0} parameter(0)"
    y = "%y = bf16[4096,4096]{1,0} parameter(1)"
    expected = KERNEL_LAUNCH + 2 * 8192 * 4096 * 4096 / (H100.flops * PRODUCTS)
    assert seconds(x, y, call) == pytest.approx(expected)


SLICE_AND_UPDATE = (
    "%layer.1 (stack: f32[32,1048576], out: f32[32,1048576], i: s32[]) -> f32[32,1048576] {\n"
    "  %stack = f32[32,1048576]{1,0} parameter(0)\n"
    "  %out = f32[32,1048576]{1,0} parameter(1)\n"
    "  %i = s32[] parameter(2)\n"
    "  %zero = s32[] constant(0)\n"
    "  %one = f32[1,1048576]{1,0} dynamic-slice(%stack, %i, %zero),"
    " dynamic_slice_sizes={1,1048576}\n"
    "  %e = f32[1,1048576]{1,0} exponential(%one)\n"
    "  ROOT %u = f32[32,1048576]{1,0} dynamic-update-slice(%out, %e, %i, %zero)\n"
    "}\n\n"
)


def test_of_a_stack_of_layers_a_fusion_reads_and_writes_one():
    line = "%r = f32[32,1048576]{1,0} fusion(%x, %y, %i), kind=kLoop, calls=%layer.1"
    one_layer = 4 * 1048576
    expected = KERNEL_LAUNCH + 2 * one_layer / MEMORY
    # The index is read as well, which takes no time.
    assert seconds(line, preamble=SLICE_AND_UPDATE) == pytest.approx(expected, rel=1e-4)


def test_a_loops_iterations_are_those_that_the_compiler_counted():
    body = (
        "%body.1 (p: (s32[], f32[8])) -> (s32[], f32[8]) {\n"
        "  %r = bf16[8192,4096]{1,0} fusion(%x, %y), kind=kCustom, calls=%product.1\n"
        "}\n\n"
    )
    once = seconds("%r = bf16[8192,4096]{1,0} fusion(%x, %y), calls=%product.1", preamble=PRODUCT)
    loop = (
        "%w = (s32[], f32[8]{0}) while(%t), condition=%until.1, body=%body.1,"
        ' backend_config={"known_trip_count":{"n":"30"}}'
    )
    assert seconds(loop, preamble=PRODUCT + body) == pytest.approx(30 * once)


def test_a_pallas_kernel_takes_what_it_states():
    def double(x_ref, out_ref):
        out_ref[...] = 2 * x_ref[...]

    def run(x):
        cost = pl.CostEstimate(flops=10**12, transcendentals=0, bytes_accessed=7)
        return pl.pallas_call(double, out_shape=x, cost_estimate=cost, name="double")(x)

    costs = kernel_costs(jax.make_jaxpr(run)(jnp.zeros((8, 128))))
    line = (
        '%k = f32[8,128]{1,0} custom-call(%x), custom_call_target="__gpu$xla.gpu.triton",'
        ' metadata={op_name="jit(run)/double/pallas_call"}'
    )
    expected = KERNEL_LAUNCH + 10**12 / (H100.flops * PRODUCTS)
    assert seconds(line, costs=costs) == pytest.approx(expected)
