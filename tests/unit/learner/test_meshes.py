"""Every mesh of simulated devices gives the losses and gradients of one device."""

import json

import pytest

from jax_agent_rl.config import LearnerConfig
from jax_agent_rl.errors import ConfigError
from jax_agent_rl.models.sharding import make_mesh, parameter_shardings
from tests.messages import raises
from tests.simulated import run_on_devices

SCRIPT = """
import sys, json, numpy as np, jax
from dataclasses import replace
from jax_agent_rl.config import AlgorithmConfig, LearnerConfig
from jax_agent_rl.models.sharding import place
from jax_agent_rl.learner.learner import Learner
from jax_agent_rl.models.config import Experts, Rope
from tests.gradients import policy_batch, policy_gradient
from tests.tiny import TINY, tiny_params
from tests.trajectories import random_groups, with_routed_experts, with_supports

base = replace(TINY, vocab_size=96, num_layers=2)
MODELS = {
    "dense": replace(
        base, qk_norm=True, qk_norm_over="heads", norms="around", sliding_window=4,
        windowed_layers=(True, False), local_rope=Rope(theta=100.0), qkv_bias=True, o_bias=True,
        attention_sinks=True,
    ),
    "experts": replace(
        base, qk_norm=True,
        experts=Experts(
            count=8, per_token=2, intermediate_size=16, normalize=True, scoring="sigmoid",
            groups=4, groups_per_token=3, scale=2.0, correction=True, shared_size=16,
            shared_gated=True,
        ),
    ),
}
MODELS["restricted"] = base
config, groups = MODELS[sys.argv[1]], random_groups(0, vocabulary=96)
if config.experts:  # half of the choices are given, the others are the router's
    groups = with_routed_experts(groups, layers=2, experts=8, per_token=2)
if sys.argv[1] == "restricted":
    groups = with_supports(groups, vocabulary=96)

def results(mesh, **changes):
    coef = 1.0 if config.experts else 0.0
    defaults = {"pack_length": 48, "mesh": mesh, "router_aux_loss_coef": coef}
    settings = LearnerConfig(**defaults | changes)
    made = Learner(
        config, tiny_params(config=config), algorithm=AlgorithmConfig(entropy_coeff=0.01),
        config=settings, temperature=0.8,
    )
    if settings.lora:  # at the start b is 0, and a has no gradient
        drawn = np.random.default_rng(4)
        def draw(x):
            return place(0.1 * drawn.standard_normal(x.shape).astype(np.float32), x.sharding)
        moved = jax.tree.map(draw, made.policy.state.params)
        made.policy.state = replace(made.policy.state, params=moved)
    gradients, statistics = policy_gradient(made, groups)
    read = [gradients, made.params] if settings.lora else [gradients]
    loss = float(statistics["sum"]["loss"])
    return policy_batch(made, groups).num_rows, loss, [np.asarray(x) for x in jax.tree.leaves(read)]

always = json.loads(sys.argv[3])
rows, loss, expected = results({}, **always)
for case in json.loads(sys.argv[2]):
    _, own, got = results(case["mesh"], **always, **case.get("changes", {}))
    assert abs(own - loss) < 1e-5 * max(1, abs(loss)), (case, own, loss)
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_allclose(a, b, atol=3e-5 * np.abs(b).max(), err_msg=str(case))
    print("equal", case, flush=True)
print("rows", rows)
"""

WORK = """
import sys, json, numpy as np, jax
from dataclasses import replace
from jax_agent_rl.config import AlgorithmConfig, LearnerConfig
from jax_agent_rl.learner.packing import pack
from jax_agent_rl.learner.objective import objective_config, policy_loss
from jax_agent_rl.models.sharding import make_mesh, parameter_shardings, row_sharding
from jax_agent_rl.models.config import Experts
from jax_agent_rl.models.decoder import Decoder
from tests.tiny import TINY
from tests.trajectories import random_groups

base = replace(TINY, vocab_size=2048, num_layers=2, hidden_size=128, intermediate_size=512)
experts = Experts(count=8, per_token=2, intermediate_size=128, normalize=True)
MODELS = {"dense": base, "experts": replace(base, experts=experts)}

def work(model, mesh):
    settings = LearnerConfig(pack_length=512, mesh=mesh, remat="full")
    mesh = make_mesh(settings.mesh)
    objective = objective_config(AlgorithmConfig(), settings, 1.0, mesh)
    places = parameter_shardings(mesh, model.parameter_shapes())
    params = jax.tree.map(
        lambda shape, place: jax.ShapeDtypeStruct(shape, np.float32, sharding=place),
        model.parameter_shapes(), places, is_leaf=lambda x: isinstance(x, tuple),
    )
    batch = pack(random_groups(0)[0].trajectories, pack_length=512)
    nothing = [np.zeros(sum(t.loss_mask)) for t in random_groups(0)[0].trajectories]
    batch = batch.with_terms(
        weight=nothing, advantage=nothing, rollout_logprob=nothing, comparable=nothing
    )
    arrays = {name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=row_sharding(mesh))
              for name, x in next(batch.micro_batches(8)).items()}
    loss = lambda params, batch: policy_loss(objective, Decoder.from_params(model, params), batch)
    def gradient(params, batch):
        return jax.grad(loss, has_aux=True)(params, batch)[0]
    step = jax.jit(gradient, out_shardings=places)
    compiled = step.lower(params, arrays).compile()
    return compiled.cost_analysis()["flops"], compiled.memory_analysis().temp_size_in_bytes

for name, meshes in json.loads(sys.argv[1]).items():
    whole = work(MODELS[name], {})
    for mesh in meshes:
        flops, scratch = work(MODELS[name], mesh)
        print(json.dumps([name, mesh, flops / whole[0], scratch / whole[1]]), flush=True)
"""

ONE_AXIS = [{"data": 8}, {"fsdp": 8}, {"tensor": 2}, {"context": 8}]
MIXED = [
    {"mesh": {"data": 2, "context": 2, "tensor": 2}},
    {"mesh": {"fsdp": 2, "context": 4}, "changes": {"remat": "full"}},
    {"mesh": {"context": 3, "fsdp": 2}, "changes": {"micro_batch_size": 2, "remat": "none"}},
    {"mesh": {"context": 2, "tensor": 4}},  # two key/value heads on four shards
]
WITH_EXPERTS = [
    {"mesh": {"expert": 8}},
    {"mesh": {"expert": 2, "fsdp": 2, "tensor": 2}},
    {"mesh": {"expert": 4, "context": 2}, "changes": {"remat": "full"}},
    {"mesh": {"data": 2, "fsdp": 2}, "changes": {"micro_batch_size": 2, "remat": "none"}},
]
WITH_ADAPTERS = [
    {"mesh": {"fsdp": 4, "tensor": 2}},
    {"mesh": {"context": 2, "fsdp": 2, "tensor": 2}, "changes": {"remat": "full"}},
]


@pytest.mark.parametrize(
    ("model", "cases", "always"),
    [
        ("dense", [{"mesh": mesh} for mesh in ONE_AXIS], {}),
        ("dense", MIXED, {}),
        ("experts", WITH_EXPERTS[:2], {}),
        ("experts", WITH_EXPERTS[2:], {}),
        ("restricted", MIXED[:1], {}),
        ("dense", WITH_ADAPTERS, {"lora": {"rank": 3, "alpha": 6.0}}),
        (
            "dense",
            WITH_ADAPTERS,
            {"lora": {"rank": 3, "targets": ["q_proj", "up_proj"], "quantize": "int8"}},
        ),
        (
            "dense",
            WITH_ADAPTERS,
            {"lora": {"rank": 3, "targets": ["q_proj", "up_proj"], "quantize": "nf4"}},
        ),
    ],
    ids=[
        "one axis",
        "mixed",
        "experts",
        "experts and other axes",
        "supports",
        "adapters",
        "int8",
        "nf4",
    ],
)
def test_a_mesh_gives_the_loss_and_gradient_of_one_device(
    model: str, cases: list[dict], always: dict
):
    if always.get("lora", {}).get("quantize"):
        pytest.importorskip("qwix")
    lines = run_on_devices(SCRIPT, model, json.dumps(cases), json.dumps(always))
    assert [line for line in lines if line.startswith("equal")] == [
        f"equal {case}" for case in cases
    ]
    rows = int(lines[-1].split()[1])
    assert rows % 8, "the test wants rows that do not divide"


def test_a_mesh_splits_work_and_memory():
    # Eight devices, so an eighth each, but for what no axis splits: attention sees no causal half
    # where tokens are split, and a few arrays of a layer are gathered. What XLA cannot split it
    # silently computes everywhere.
    meshes = {
        "dense": [{"fsdp": 8}, {"context": 8}],
        "experts": [{"expert": 8}, {"expert": 4, "context": 2}],
    }
    lines = [json.loads(line) for line in run_on_devices(WORK, json.dumps(meshes), flags="")]
    expected = []
    for name, model_meshes in meshes.items():
        expected += [[name, mesh] for mesh in model_meshes]
    assert [line[:2] for line in lines] == expected
    for model, mesh, flops, memory in lines:
        assert flops < 0.2 and memory < 0.25, (model, mesh, flops, memory)


def test_more_devices_than_there_are_names_the_axes_asked_for():
    with raises(
        ConfigError,
        key=("context=16", "tensor=4"),
        value=("64 devices", "there are 1"),
        fix="learner.mesh",
    ):
        make_mesh(LearnerConfig(mesh={"context": 16, "tensor": 4}).mesh)


@pytest.mark.parametrize(
    ("name", "shape", "named"),
    [
        (
            "expert_up",
            (2, 6, 16, 32),
            {"value": ("experts", 6), "fix": "learner.mesh.expert=4"},
        ),
        (
            "expert_up",
            (2, 8, 15, 32),
            {"value": ("mlp", 15), "fix": "learner.mesh.tensor=2"},
        ),
        ("q", (2, 32, 33), {"value": ("embed", 33), "fix": "learner.mesh.fsdp=2"}),
    ],
)
def test_a_dimension_that_does_not_divide_names_parameter_and_key(
    name: str, shape: tuple[int, ...], named: dict
):
    class Mesh:
        shape = {"data": 1, "fsdp": 2, "expert": 4, "context": 1, "tensor": 2}

    with raises(ConfigError, key=f"parameter '{name}'", **named):
        parameter_shardings(Mesh(), {"layers": {name: shape}})  # type: ignore[arg-type]


def test_rows_that_do_not_divide_over_context_name_the_length_that_does():
    with raises(ValueError, key=("pack_length=1000", "learner.mesh.context=3"), fix=1002):
        LearnerConfig(pack_length=1000, mesh={"context": 3})


OPTIMIZERS = """
import numpy as np, jax
from dataclasses import replace
from jax_agent_rl.config import AlgorithmConfig, LearnerConfig
from jax_agent_rl.learner.learner import Learner
from tests.tiny import TINY, tiny_params
from tests.trajectories import random_groups

model = replace(
    TINY, vocab_size=256, hidden_size=128, intermediate_size=256, num_layers=2, head_dim=32
)

def trained(optimizer, mesh):
    config = LearnerConfig(
        optimizer=optimizer, learning_rate=1e-3, weight_decay=0.1, pack_length=48, mesh=mesh
    )
    params = jax.tree.map(lambda x: 0.2 * x, tiny_params(config=model))
    made = Learner(
        model, params, algorithm=AlgorithmConfig(), config=config, temperature=1.0
    )
    for seed in range(2):
        made.update(random_groups(seed))
    arrays = jax.tree.leaves(made.state.policy.opt_state)
    shared = 0
    for x in arrays:
        if len({str(s.index) for s in x.addressable_shards}) == 1:
            shared += x.size
    params = [np.asarray(x) for x in jax.tree.leaves(made.params)]
    return params, shared / sum(x.size for x in arrays)

for optimizer in ("adamw", "muon", "adafactor"):
    expected, _ = trained(optimizer, {})
    got, shared = trained(optimizer, {"fsdp": 2, "tensor": 2})
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-4, err_msg=optimizer)
    if optimizer != "adafactor":  # its moments are of rows and columns
        assert shared < 0.02, (optimizer, shared)
    print("equal", optimizer, flush=True)
"""


def test_optimizers_update_a_sharded_model_as_one_on_one_device():
    assert run_on_devices(OPTIMIZERS, devices=4) == ["equal adamw", "equal muon", "equal adafactor"]
