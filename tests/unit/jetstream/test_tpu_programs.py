"""Attention of learner and engine compiles for slices of TPUs that are not here."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jax_agent_rl.jetstream.attention import chunk_attention, decode_attention
from jax_agent_rl.jetstream.engine import PREFILL_ROWS
from jax_agent_rl.jetstream.kv import LayerKV, stored
from jax_agent_rl.models.attention import sharded_tree_attention
from jax_agent_rl.models.mesh import MESH_AXES
from jax_agent_rl.models.sight import Sight
from jax_agent_rl.plan.topology import Slice

# What is kept of programs cannot be read again where the chips are not.
pytestmark = pytest.mark.filterwarnings("ignore:Error reading persistent compilation cache entry")

LANES, HEADS, KV_HEADS, SIZE, LENGTH, CHUNK = 64, 8, 4, 128, 8192, 64
PAGE = 128


@pytest.fixture(params=["v5e:2x2", "v5p:2x2x1", "v6e:2x2"])
def devices(request: pytest.FixtureRequest) -> np.ndarray:
    """Four chips, described."""
    pytest.importorskip("libtpu", reason="pip install 'jax_agent_rl[plan]'")
    return np.array(Slice.parse(request.param).devices())


def mesh_of(devices: np.ndarray, **sizes: int) -> Mesh:
    shape = [sizes.get(axis, 1) for axis in MESH_AXES]
    return Mesh(devices.reshape(shape), MESH_AXES, axis_types=(AxisType.Auto,) * len(shape))


def described(mesh: Mesh, shape: tuple[int, ...], dtype: jnp.dtype, *axes: str | None) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec(*axes)))


def learner_program(mesh: Mesh, length: int, *, windowed: bool) -> jax.stages.Lowered:
    """Attention of two rows and its gradients."""

    def loss(q, k, v, sight):
        return jnp.sum(sharded_tree_attention(q, k, v, sight, mesh).astype(jnp.float32))

    q = described(mesh, (2, HEADS, length, SIZE), jnp.bfloat16, None, "tensor", "context")
    k = described(mesh, (2, KV_HEADS, length, SIZE), jnp.bfloat16, None, "tensor", "context")
    marks = described(mesh, (2, length), jnp.int32, None, "context")
    sight = Sight(marks, marks, described(mesh, (), jnp.int32)) if windowed else Sight(marks)
    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2))).lower(q, k, k, sight)


@pytest.mark.parametrize("windowed", [False, True], ids=["dense", "windowed"])
def test_a_learners_attention_compiles_to_three_kernels(devices: np.ndarray, windowed: bool):
    program = learner_program(mesh_of(devices, context=2, tensor=2), 1024, windowed=windowed)
    assert program.compile().as_text().count('custom_call_target="tpu_custom_call"') == 3


def test_a_learners_program_does_not_grow_with_its_rows(devices: np.ndarray):
    mesh = mesh_of(devices, tensor=4)
    short, long = (learner_program(mesh, length, windowed=True).as_text() for length in (1024, 4096))
    assert len(long) < 1.1 * len(short)


def described_cache(mesh: Mesh, rows: int, length: int, dtype: jnp.dtype) -> LayerKV:
    def split(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        return described(mesh, x.shape, x.dtype, None, "tensor")

    heads_first = (rows, KV_HEADS, SIZE, length), (rows, KV_HEADS, length, SIZE)
    floats = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in heads_first]
    return jax.tree.map(split, jax.eval_shape(functools.partial(stored, dtype=dtype), *floats))


KEPT = pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.int8, jnp.float8_e4m3fn], ids=["bf16", "int8", "fp8"])


@KEPT
def test_an_engines_attention_compiles_to_kernels_and_turns_no_cache_around(devices: np.ndarray, dtype: jnp.dtype):
    mesh = mesh_of(devices, data=2, tensor=2)  # two key/value heads on each chip
    cached = described_cache(mesh, LANES * LENGTH // PAGE, PAGE, dtype)
    new = described(mesh, (LANES, KV_HEADS, SIZE), jnp.bfloat16, None, "tensor")
    q = described(mesh, (LANES, KV_HEADS, HEADS // KV_HEADS, SIZE), jnp.bfloat16, None, "tensor")
    at, pages = described(mesh, (LANES,), jnp.int32), described(mesh, (LANES, LENGTH // PAGE), jnp.int32)

    def step(cached, q, new, at, pages):
        return decode_attention(q, cached, (new, new), at, pages, window=256, mesh=mesh)

    program = jax.jit(step, donate_argnums=0).lower(cached, q, new, at, pages).compile()
    assert program.as_text().count('custom_call_target="tpu_custom_call"') == 2
    size = sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(cached)) / 2
    assert program.memory_analysis().temp_size_in_bytes < 0.05 * size


def test_prefill_compiles_to_a_kernel(devices: np.ndarray):
    mesh = mesh_of(devices, tensor=4)
    cached, new = (described_cache(mesh, PREFILL_ROWS, length, jnp.bfloat16) for length in (1024, CHUNK))
    q = described(mesh, (KV_HEADS, HEADS // KV_HEADS, SIZE, PREFILL_ROWS, CHUNK), jnp.bfloat16, "tensor")

    def chunk(q, cached, new, at):
        return chunk_attention(q, cached, new, at, mesh=mesh)

    program = jax.jit(chunk).lower(q, cached, new, described(mesh, (PREFILL_ROWS,), jnp.int32))
    assert program.compile().as_text().count('custom_call_target="tpu_custom_call"') == 1
