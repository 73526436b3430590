"""Attention, delta nets and experts compile for slices of TPUs that are not here."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jax_agent_rl.deploy.plan.topology import Slice
from jax_agent_rl.jetstream.attention import chunk_attention, decode_attention
from jax_agent_rl.jetstream.decode_batch import PREFILL_ROWS
from jax_agent_rl.jetstream.kv_cache import KVCache, LayerKV, to_cache, write_routed
from jax_agent_rl.models import delta_kernel
from jax_agent_rl.models.attention import sharded_tree_attention
from jax_agent_rl.models.delta_net import DeltaTokens
from jax_agent_rl.models.delta_tree import tree_delta_rule
from jax_agent_rl.models.layers import Quantized
from jax_agent_rl.models.moe import grouped_product
from jax_agent_rl.models.sharding import MESH_AXES
from jax_agent_rl.models.token_forest import plan_forest
from jax_agent_rl.models.tree_kernel import TreeMask

# What is kept of programs cannot be read again where the chips are not.
pytestmark = pytest.mark.filterwarnings("ignore:Error reading persistent compilation cache entry")

SLOT_COUNTS = 64
HEADS = 8
KV_HEADS = 4
SIZE = 128
LENGTH = 8192
CHUNK = 64


@pytest.fixture(
    params=[
        "v5e:2x2",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("v5p:2x2x1", "v6e:2x2")),
    ]
)
def devices(request: pytest.FixtureRequest) -> np.ndarray:
    """Four chips, described."""
    pytest.importorskip("libtpu", reason="pip install 'jax_agent_rl[plan]'")
    return np.array(Slice.parse(request.param).devices)


def mesh_of(devices: np.ndarray, **sizes: int) -> Mesh:
    shape = [sizes.get(axis, 1) for axis in MESH_AXES]
    return Mesh(devices.reshape(shape), MESH_AXES, axis_types=(AxisType.Auto,) * len(shape))


def described(
    mesh: Mesh, shape: tuple[int, ...], dtype: jnp.dtype, *axes: str | None
) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec(*axes)))


def learner_program(mesh: Mesh, length: int, *, windowed: bool) -> jax.stages.Lowered:
    """Attention of two rows, with sinks where there is a window, and its gradients."""

    def loss(q, k, v, sinks, tree_mask):
        return jnp.sum(sharded_tree_attention(q, k, v, tree_mask, mesh, sinks).astype(jnp.float32))

    q = described(mesh, (2, HEADS, length, SIZE), jnp.bfloat16, None, "tensor", "context")
    k = described(mesh, (2, KV_HEADS, length, SIZE), jnp.bfloat16, None, "tensor", "context")
    marks = described(mesh, (2, length), jnp.int32, None, "context")
    tree_mask = (
        TreeMask(marks, marks, described(mesh, (), jnp.int32)) if windowed else TreeMask(marks)
    )
    sinks = described(mesh, (HEADS,), jnp.bfloat16, "tensor") if windowed else None
    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2, 3))).lower(q, k, k, sinks, tree_mask)


@pytest.mark.parametrize("windowed", [False, True], ids=["dense", "windowed"])
def test_a_learners_attention_compiles_to_three_kernels(devices: np.ndarray, windowed: bool):
    program = learner_program(mesh_of(devices, context=2, tensor=2), 1024, windowed=windowed)
    assert kernels(program.compile()) == 3


def test_a_learners_program_does_not_grow_with_its_rows(devices: np.ndarray):
    mesh = mesh_of(devices, tensor=4)
    short, long = (
        learner_program(mesh, length, windowed=True).as_text() for length in (1024, 4096)
    )
    assert len(long) < 1.1 * len(short)


def test_a_learners_delta_rule_compiles_to_a_kernel_each_way(devices: np.ndarray):
    mesh = mesh_of(devices, tensor=4)
    length = 1024
    heads = described(mesh, (2, length, HEADS, SIZE), jnp.float32, None, None, "tensor")
    numbers = described(mesh, (2, length, HEADS), jnp.float32, None, None, "tensor")
    ends = described(mesh, (2, length), jnp.int32)

    def outputs_and_gradients(tokens, ends, d_outputs):
        forest = plan_forest(ends, chunk=delta_kernel.CHUNK)
        outputs, pull = jax.vjp(lambda tokens: tree_delta_rule(tokens, forest), tokens)
        return outputs, pull(d_outputs)

    split = PartitionSpec(None, None, "tensor")
    run = jax.shard_map(
        outputs_and_gradients,
        mesh=mesh,
        in_specs=(split, PartitionSpec(), split),
        out_specs=split,
        check_vma=False,
    )
    tokens = DeltaTokens(heads, heads, heads, numbers, numbers)
    program = jax.jit(run).lower(tokens, ends, heads).compile()
    assert kernels(program) == 2
    # Beside the arrays as the kernels read them: a correction of each value, and a state of each
    # chunk and its gradient. Solved systems of all chunks would not fit.
    memory = program.memory_analysis()
    assert memory.temp_size_in_bytes < 2.5 * memory.argument_size_in_bytes


def described_cache(
    mesh: Mesh, rows: int, length: int, dtype: jnp.dtype, size: int = SIZE
) -> LayerKV:
    def split(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        return described(mesh, x.shape, x.dtype, None, "tensor")

    heads_first = (rows, KV_HEADS, size, length), (rows, KV_HEADS, length, size)
    floats = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in heads_first]
    return jax.tree.map(split, jax.eval_shape(functools.partial(to_cache, dtype=dtype), *floats))


def kernels(program: jax.stages.Compiled) -> int:
    return program.as_text().count('custom_call_target="tpu_custom_call"')


def decode_step_of(
    mesh: Mesh,
    dtype: jnp.dtype,
    *,
    slots: int,
    length: int,
    page: int,
    size: int,
    window: int | None,
) -> tuple[jax.stages.Compiled, float]:
    """A step with sinks where there is a window; and each of two chips' bytes of the cache."""
    cached = described_cache(mesh, slots * length // page, page, dtype, size)
    new = described(mesh, (slots, KV_HEADS, size), jnp.bfloat16, None, "tensor")
    q = described(mesh, (slots, KV_HEADS, HEADS // KV_HEADS, size), jnp.bfloat16, None, "tensor")
    at = described(mesh, (slots,), jnp.int32)
    pages = described(mesh, (slots, length // page), jnp.int32)

    def step(cached, q, new, at, pages, sinks):
        return decode_attention(q, cached, (new, new), at, pages, sinks, window=window, mesh=mesh)

    sinks = (
        described(mesh, (KV_HEADS, HEADS // KV_HEADS), jnp.bfloat16, "tensor") if window else None
    )
    program = jax.jit(step, donate_argnums=0).lower(cached, q, new, at, pages, sinks).compile()
    return program, sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(cached)) / 2


@pytest.mark.parametrize(
    "dtype", [jnp.bfloat16, jnp.int8, jnp.float8_e4m3fn], ids=["bf16", "int8", "fp8"]
)
def test_an_engines_attention_compiles_to_kernels_and_turns_no_cache_around(
    devices: np.ndarray, dtype: jnp.dtype
):
    mesh = mesh_of(devices, data=2, tensor=2)  # two key/value heads on each chip
    program, held = decode_step_of(
        mesh, dtype, slots=SLOT_COUNTS, length=LENGTH, page=128, size=SIZE, window=256
    )
    assert kernels(program) == 2
    assert program.memory_analysis().temp_size_in_bytes < 0.05 * held


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.int8], ids=["bf16", "int8"])
def test_small_pages_and_heads_compile_to_kernels_too(devices: np.ndarray, dtype: jnp.dtype):
    mesh = mesh_of(devices, data=2, tensor=2)
    program, _ = decode_step_of(mesh, dtype, slots=8, length=128, page=32, size=64, window=None)
    assert kernels(program) == 2


@pytest.mark.parametrize(
    ("dtype", "size", "window"),
    [(jnp.bfloat16, 128, None), (jnp.bfloat16, 64, 256), (jnp.int8, 64, None)],
)
@pytest.mark.parametrize(
    ("rows", "count"), [(PREFILL_ROWS, CHUNK), (32, 6)], ids=["prefill", "verification"]
)
def test_chunks_compile_to_a_kernel(
    devices: np.ndarray, rows: int, count: int, dtype: jnp.dtype, size: int, window: int | None
):
    mesh = mesh_of(devices, tensor=4)
    cached, new = (described_cache(mesh, rows, length, dtype, size) for length in (1024, count))
    q = described(mesh, (KV_HEADS, HEADS // KV_HEADS, size, rows, count), jnp.bfloat16, "tensor")

    def chunk(q, cached, new, at):
        return chunk_attention(q, cached, new, at, window=window, mesh=mesh)

    program = jax.jit(chunk).lower(q, cached, new, described(mesh, (rows,), jnp.int32))
    assert kernels(program.compile()) == 1


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.int8], ids=["bf16", "int8"])
def test_a_product_with_experts_compiles_to_two_kernels(devices: np.ndarray, dtype: jnp.dtype):
    """One that says where groups begin, one that multiplies."""
    mesh = mesh_of(devices, data=4)
    tokens = 128
    experts = 16
    hidden = 512
    inputs = 1024
    weight = numbers = described(mesh, (experts, inputs, hidden), dtype)
    if dtype == jnp.int8:
        weight = Quantized(numbers, described(mesh, (experts, 1, hidden), jnp.float32))
    x = described(mesh, (tokens, inputs), jnp.bfloat16)
    group = described(mesh, (tokens,), jnp.int32)
    product = jax.jit(functools.partial(grouped_product, transposed=True))
    program = product.lower(x, weight, described(mesh, (experts,), jnp.int32), group).compile()
    assert kernels(program) == 2
    if (
        dtype == jnp.bfloat16 or "lite" in devices.flat[0].device_kind
    ):  # v5p's kernel multiplies no int8
        # Experts are read as they are kept: no copy of them.
        assert program.memory_analysis().temp_size_in_bytes < 0.05 * math.prod(numbers.shape)


def test_the_choice_of_experts_is_copied_once_at_most(devices: np.ndarray):
    """Once, to other tiles; transposed, the array would be padded to a multiple of its size."""
    mesh = mesh_of(devices, data=4)
    slots = 64
    layers = 48
    steps = 16
    cache = described(mesh, (1025, 1, 128, layers * 8), jnp.uint8)
    layer = LayerKV(*[described(mesh, (1025, 1, 1, 128), jnp.bfloat16)] * 2)
    positions = described(mesh, (slots,), jnp.int32)
    pages = described(mesh, (slots, 4), jnp.int32)

    def write(routed, layer, positions, pages):
        def step(i, routed):
            chosen = [jnp.full((slots, 8), i)] * layers
            return write_routed(KVCache((layer,), routed), chosen, positions + i, pages)

        return jax.lax.fori_loop(0, steps, step, routed)

    program = jax.jit(write, donate_argnums=0).lower(cache, layer, positions, pages).compile()
    assert program.memory_analysis().temp_size_in_bytes < 1.1 * math.prod(cache.shape)


@pytest.mark.parametrize(
    ("hidden", "inputs", "count"),
    # XLA's grouped product, for what no block of the kernel holds, is two kernels.
    [(768, 2048, 2), pytest.param(2880, 2880, 3, marks=pytest.mark.slow)],
    ids=["whole lanes", "gpt-oss"],
)
def test_gradients_of_a_product_with_experts_compute_each_row_once(
    devices: np.ndarray, hidden: int, inputs: int, count: int
):
    """XLA's own gradient with respect to the weights multiplies all rows for every expert."""
    mesh = mesh_of(devices, data=4)
    tokens = 2048
    experts = 16
    weight = described(mesh, (experts, hidden, inputs), jnp.bfloat16)
    x, d_out = (described(mesh, (tokens, size), jnp.bfloat16) for size in (inputs, hidden))
    sizes, group = (described(mesh, (size,), jnp.int32) for size in (experts, tokens))

    def gradients(x, weight, sizes, group, d_out):
        return jax.vjp(lambda x, weight: grouped_product(x, weight, sizes, group), x, weight)[1](
            d_out
        )

    sharded = jax.shard_map(
        gradients, mesh=mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec(), check_vma=False
    )
    program = jax.jit(sharded).lower(x, weight, sizes, group, d_out).compile()
    assert kernels(program) == count
    assert f"[{experts},{tokens}," not in program.as_text()
