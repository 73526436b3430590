"""New weights take the memory of the old ones, a layer at a time."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_agent_rl.config import MeshConfig
from jax_agent_rl.config.engines import EngineMeshConfig
from jax_agent_rl.errors import WeightUpdateError
from jax_agent_rl.jetstream.forward import EngineParams, engine_params
from jax_agent_rl.jetstream.programs import ProgramTable
from jax_agent_rl.jetstream.sharding import make_engine_mesh
from jax_agent_rl.jetstream.weights import GatherParams, JointLoader, JointParams, WeightLoader
from jax_agent_rl.models.config import DecoderConfig, Experts, Params
from jax_agent_rl.models.layers import DTYPES, EightBits
from jax_agent_rl.models.sharding import make_mesh, parameter_shardings, place
from tests.messages import raises
from tests.tiny import DELTA_NETS, GEMMA4, TINY, tiny_params

DEEP = replace(TINY, vocab_size=8, hidden_size=64, num_layers=16, intermediate_size=96)
MIXTURE = replace(DEEP, experts=Experts(count=4, per_token=2, intermediate_size=48, normalize=True))
MODELS = {"dense": DEEP, "mixture": MIXTURE, "delta nets": DELTA_NETS, "shared keys": GEMMA4}
BOTH_KINDS = pytest.mark.parametrize("quantize", [None, "int8"])


def bytes_of(tree: object) -> int:
    return sum(x.nbytes for x in jax.tree.leaves(tree))


class MeasuringTable(ProgramTable):
    """Notes how many bytes of arrays there are before each program."""

    def __init__(self) -> None:
        super().__init__()
        self.live_bytes: list[int] = []

    def call(self, key, *args, **options):
        self.live_bytes.append(sum(x.nbytes for x in jax.live_arrays() if not x.is_deleted()))
        return super().call(key, *args, **options)


def learners(model: DecoderConfig, seed: int) -> Params:
    """The parameters as a learner shards them."""
    shardings = parameter_shardings(make_mesh(MeshConfig()), model.parameter_shapes())
    return jax.tree.map(place, tiny_params(seed, model), shardings)


def loader(model: DecoderConfig, quantize: EightBits | None, table: ProgramTable) -> WeightLoader:
    return WeightLoader(
        model,
        model,
        make_engine_mesh(EngineMeshConfig()),
        dtype=jnp.dtype(jnp.bfloat16),
        quantize=None if quantize is None else DTYPES[quantize],
        call=table.call,
    )


def expected_weights(
    model: DecoderConfig, params: Params, quantize: EightBits | None
) -> EngineParams:
    dtype = None if quantize is None else DTYPES[quantize]
    return engine_params(model, params, dtype=jnp.dtype(jnp.bfloat16), quantize=dtype)


def require_equal(left: EngineParams, right: EngineParams) -> None:
    def compare(x: jax.Array, y: jax.Array) -> None:
        assert x.dtype == y.dtype
        # A program may multiply where single operations divide: numbers of 8 bits differ by one.
        tolerance = {"int8": {"atol": 1}, "float32": {"rtol": 1e-6}}.get(x.dtype.name, {})
        np.testing.assert_allclose(
            np.asarray(x, np.float32), np.asarray(y, np.float32), **{"rtol": 0} | tolerance
        )

    jax.tree.map(compare, left, right)


@pytest.mark.parametrize("name", MODELS)
@BOTH_KINDS
def test_layers_of_a_kind_share_a_program_and_are_as_if_converted_together(name, quantize):
    model = MODELS[name]
    table = ProgramTable()
    load = loader(model, quantize, table)
    params = learners(model, 1)
    require_equal(load(params), expected_weights(model, params, quantize))
    kinds = len(set(model.layer_kinds))
    assert len(table) == 1 + kinds + 1  # memory, kinds of layers, and all else


@pytest.mark.parametrize("is_joint", [False, True])
@BOTH_KINDS
def test_an_engine_never_holds_its_weights_twice(is_joint, quantize):
    table = MeasuringTable()
    load = loader(MIXTURE, quantize, table)
    old = load(learners(MIXTURE, 0))
    weights_bytes = bytes_of(old)
    params = learners(MIXTURE, 1)
    source = params
    if is_joint:
        mesh = make_engine_mesh(EngineMeshConfig())
        source = JointParams(params, GatherParams(MIXTURE, mesh, dtype="bfloat16"))

    table.live_bytes.clear()
    new = load(source, old)
    assert all(x.is_deleted() for x in jax.tree.leaves(old))
    before = table.live_bytes[0]
    after = max(table.live_bytes)
    # The learner's layer in bfloat16 beside one in the engine's own layout, of sixteen.
    layer_bytes = bytes_of(params) / 2 / MIXTURE.num_layers
    assert after - before < 1.5 * layer_bytes < weights_bytes / 4
    if not is_joint:
        require_equal(new, expected_weights(MIXTURE, params, quantize))


@BOTH_KINDS
def test_weights_made_by_all_processes_are_those_of_one(quantize):
    mesh = make_engine_mesh(EngineMeshConfig())
    load = JointLoader(DEEP, mesh, gathered_dtype="float32", dtype="bfloat16", quantize=quantize)
    first = load(learners(DEEP, 0), None)
    params = learners(DEEP, 1)
    pointer = first.layers[3]["o"]
    loaded = load(params, first)
    assert jax.tree.leaves(pointer)[0].is_deleted()
    require_equal(loaded, expected_weights(DEEP, params, quantize))
    assert not any(x.is_deleted() for x in jax.tree.leaves(params)), "the learner needs its own"


def test_an_external_engine_may_have_weights_on_the_host():
    gather = GatherParams(DEEP, make_engine_mesh(EngineMeshConfig()), dtype="float32")
    params = learners(DEEP, 0)
    on_device = jnp.zeros(3)
    copy = gather(params, {"on the host": np.zeros(3), "on the device": on_device})
    assert on_device.is_deleted()
    jax.tree.map(np.testing.assert_array_equal, copy, params)


def test_parameters_of_another_model_are_refused_before_any_memory_is_taken():
    mesh = make_engine_mesh(EngineMeshConfig())
    load = JointLoader(DEEP, mesh, gathered_dtype="float32", dtype="bfloat16", quantize=None)
    served = load(learners(DEEP, 0), None)
    with raises(WeightUpdateError, key="layers.down"):
        load(learners(replace(DEEP, intermediate_size=32), 0), served)
    assert not any(x.is_deleted() for x in jax.tree.leaves(served))
