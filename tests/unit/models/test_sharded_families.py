"""Families with experts, biases, windows and eyes: read onto a mesh, and trained there as on one
device.
"""

import pytest

from tests.simulated import run_on_devices

SCRIPT = """
import sys, tempfile, numpy as np, jax, optax
from dataclasses import replace
from jax_agent_rl.config import AlgorithmConfig, LearnerConfig
from jax_agent_rl.models.sharding import make_mesh, parameter_shardings
from jax_agent_rl.learner.learner import Learner
from jax_agent_rl.models.config import (
    DecoderConfig, Experts, LatentAttention, PerLayerInputs, Rope,
)
from jax_agent_rl.models.hf import load_hf, save_hf
from tests.tiny import (
    GEMMA4, GEMMA4_EXPERTS, GEMMA4_SMALL, OLMO3, QWEN3_5_MOE, TINY, tiny_params,
)
from tests.trajectories import random_groups

base = replace(TINY, vocab_size=96, num_layers=2)
experts = Experts(count=4, per_token=2, intermediate_size=16, normalize=True)
gemma = {"qk_norm": True, "norms": "around", "norm_offset": 1.0, "activation": "gelu_tanh",
         "attention_scale": 0.25, "sliding_window": 4, "windowed_layers": (True, False),
         "local_rope": Rope(theta=100.0), "embed_scale": 32**0.5}

def trained(learner):
    "Parameters and gradients after one step."
    first_moments = optax.tree_utils.tree_get(learner.state.policy.opt_state, "mu")
    gradients = jax.tree.map(lambda m: m / 0.1, first_moments)
    params = {**learner.params, "layers": dict(learner.params["layers"])}
    for name in ("router_correction", "layer_scalar"):  # have no gradient
        if name in params["layers"]:
            first = tiny_params(config=learner.model)["layers"][name]
            np.testing.assert_array_equal(params["layers"].pop(name), first)
    return jax.tree.map(np.asarray, (params, gradients))

def check(results, gradients_alone=False, looser=1):
    (params, gradients), (mesh_params, mesh_gradients) = results
    jax.tree.map(lambda *x: check_gradient(*x, looser), gradients, mesh_gradients)
    if not gradients_alone:
        jax.tree.map(check_step, params, mesh_params, gradients, mesh_gradients)

def check_gradient(one_gradients, mesh_gradients, looser):
    np.testing.assert_allclose(
        one_gradients, mesh_gradients, atol=looser * 2e-6, rtol=looser * 3e-5)

def check_step(one_params, mesh_params, one_gradients, mesh_gradients):
    # AdamW divides a gradient by its own size: one of rounding size moves its parameter by up to
    # the learning rate.
    exact = (np.abs(one_gradients) > 1e-7) | (one_gradients == mesh_gradients)
    assert (~exact).sum() <= 1 + exact.size // 100
    np.testing.assert_allclose(one_params[exact], mesh_params[exact], atol=2e-5)
    np.testing.assert_allclose(one_params, mesh_params, atol=2e-3)  # two steps of the learning rate

sigmoid = {"count": 8, "groups": 4, "groups_per_token": 2, "scoring": "sigmoid", "scale": 2.0,
           "correction": True, "shared_size": 32, "first_dense_layers": 1}
glm4_moe = replace(base, family="glm4_moe", num_layers=3, qkv_bias=True, qk_norm=True,
                   rope=Rope(partial_rotary=0.5), experts=replace(experts, **sigmoid))
over_heads = {"qk_norm": True, "qk_norm_over": "heads", "rope": Rope(partial_rotary=0.5)}
minimax_m2 = replace(base, family="minimax_m2", **over_heads, experts=replace(
    experts, intermediate_size=base.intermediate_size, scoring="sigmoid", correction=True))
latent = LatentAttention(q_rank=12, kv_rank=16, nope_dim=8, rope_dim=4, value_dim=6)
deepseek_v3 = replace(base, family="deepseek_v3", num_layers=3, num_kv_heads=4, head_dim=12,
                      latent=latent, rope=Rope(interleaved=True),
                      experts=replace(experts, **sigmoid | {"shared_size": 16}))
gpt_oss = {"qkv_bias": True, "o_bias": True, "attention_sinks": True,
           "activation": "clamped_swiglu", "sliding_window": 4, "windowed_layers": (True, False),
           "experts": replace(experts, intermediate_size=base.intermediate_size, bias=True)}
qwen3_5_moe = replace(QWEN3_5_MOE, vocab_size=96)
FAMILIES = {
    "qwen2": replace(base, family="qwen2", qkv_bias=True),
    "gpt_oss": replace(base, family="gpt_oss", **gpt_oss),
    "glm4": replace(base, family="glm4", norms="around",
                    rope=Rope(partial_rotary=0.5, interleaved=True)),
    "qwen3_moe": replace(base, family="qwen3_moe", qk_norm=True, experts=experts),
    "gemma3_text": replace(base, family="gemma3_text", **gemma),
    "glm4_moe": glm4_moe,
    "minimax_m2": minimax_m2,
    "deepseek_v3": deepseek_v3,
    "olmo3": replace(OLMO3, vocab_size=96),
    "gemma4_text": replace(GEMMA4, vocab_size=96),
    "gemma4_text, per-layer inputs": replace(
        GEMMA4_SMALL, vocab_size=96, per_layer_inputs=PerLayerInputs(vocab_size=96, size=4)),
    "gemma4_text, experts": replace(GEMMA4_EXPERTS, vocab_size=96),
    "qwen3_5_moe_text": qwen3_5_moe,
    "qwen3_next": replace(
        qwen3_5_moe, family="qwen3_next", delta_net=replace(qwen3_5_moe.delta_net, fused=True)),
}
EXPERT_MESHES = (
    "glm4_moe", "minimax_m2", "gemma4_text, experts", "qwen3_5_moe_text", "qwen3_next",
)
for name in sys.argv[1:]:
    config = FAMILIES[name]
    results = []
    third_axis = "expert" if name in EXPERT_MESHES else "data"
    mesh = {"fsdp": 2, "tensor": 2, third_axis: 2}
    if config is deepseek_v3:
        mesh = {"expert": 2, "context": 2, "tensor": 2}
    with tempfile.TemporaryDirectory() as folder:
        save_hf(folder, config, tiny_params(config=config))
        for shape in ({}, mesh):
            settings = LearnerConfig(learning_rate=1e-3, pack_length=32, mesh=shape)
            shardings = parameter_shardings(make_mesh(settings.mesh), config.parameter_shapes())
            read, params = load_hf(folder, shardings=shardings)
            assert replace(read, bos_token_id=1) == config, (read, config)
            assert params["layers"]["o"].sharding == shardings["layers"]["o"]
            made = Learner(
                config, params, algorithm=AlgorithmConfig(), config=settings, temperature=1.0
            )
            made.update(random_groups(0, vocabulary=96))
            results.append(trained(made))
    # The layers' scales leave some of Gemma's layers gradients of rounding size. A norm follows the
    # delta rule: it divides by numbers close to 0, and makes more of what rounds otherwise.
    has_delta_nets = config.delta_net is not None
    check(results, gradients_alone=config.layer_scale or has_delta_nets,
          looser=10 if has_delta_nets else 1)
    print(name, "equal")
"""

IMAGES = """
# Four rows, each with two images and padding, on the mesh: what the tower gives, and its gradients.
from jax.sharding import PartitionSpec as P
from jax_agent_rl.models.sharding import ROWS
from jax_agent_rl.models.vision_context import layout
from jax_agent_rl.models.vision_tower import VisionTower
from tests.tiny_vision import TINY_QWEN3_5, TINY_VL, drawn

qwen3_5_moe_vl = replace(TINY_QWEN3_5, family="qwen3_5_moe", experts=QWEN3_5_MOE.experts)
TOWERS = {"qwen2_5_vl": TINY_VL, "qwen3_5_moe": qwen3_5_moe_vl}
config = replace(TOWERS[tower], vocab_size=96)
third_axis = "data" if config.experts is None else "expert"
vision_config = config.vision
frames = 1 if vision_config.tokens_per_second is None else 2  # that may read no videos
grids = 2 * [[(1, 4, 6), (frames, 4, 2)], [(1, 2, 2), (1, 8, 6)]]
layouts = jax.tree.map(lambda *x: np.stack(x), *(layout(vision_config, row, 64) for row in grids))
patches = np.zeros((len(grids), 64, vision_config.patch_dim), np.float32)
used = np.zeros(len(grids), int)  # features that are not padding
for number, items in enumerate(grids):
    cut = np.concatenate([drawn(seed, grid).patches for seed, grid in enumerate(items)])
    patches[number, : len(cut)] = cut
    used[number] = len(cut) // vision_config.merge_size**2

def loss(vision, patches, layouts, mesh):
    seen = VisionTower.from_params(vision_config, vision)(patches, layouts, remat="dots", mesh=mesh)
    return (jax.numpy.sin(seen).mean(-1) * (np.arange(16) < used[:, None])).sum()

results = []
with tempfile.TemporaryDirectory() as folder:
    save_hf(folder, config, tiny_params(config=config))
    axes = {"fsdp": 2, "tensor": 2, third_axis: 2}
    for mesh in (None, make_mesh(LearnerConfig(mesh=axes).mesh)):
        shardings = mesh and parameter_shardings(mesh, config.parameter_shapes())
        vision = load_hf(folder, shardings=shardings)[1]["vision"]
        batch = (patches, layouts)
        if mesh is not None:
            assert vision["layers"]["qkv"].sharding.spec == P(None, "tensor", "fsdp")
            rows = jax.sharding.NamedSharding(mesh, P(ROWS))
            batch = jax.device_put(batch, rows)
        results.append(jax.jit(jax.value_and_grad(loss), static_argnums=3)(vision, *batch, mesh))
jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5, rtol=1e-4), *results)
for x in jax.tree.leaves(results[0][1]):
    assert np.abs(x).max() > 1e-3, "a part of the tower has no gradient"

# A learner that packs images, two rows of them and one of text.
from jax_agent_rl.types import Group
from tests.tiny_vision import picture, seeing_trajectory, vision_processor

turns = [([7, 8], {"image": [picture(1)]}), ([9, 11], {"image": [picture(2, 12, 8)]}), ([12], {})]
members = tuple(seeing_trajectory([5, 6], *turns[-n:], index=n, reward=float(n)) for n in (1, 2, 3))
results = []
for shape in ({}, axes):
    settings = LearnerConfig(learning_rate=1e-3, pack_length=24, row_patches=48, mesh=shape)
    made = Learner(
        config, tiny_params(config=config), algorithm=AlgorithmConfig(), config=settings,
        temperature=1.0, vision_processor=vision_processor(vision_config),
    )
    made.update([Group(group_id="g", trajectories=members)])
    results.append(trained(made))
has_delta_nets = config.delta_net is not None
check(results, gradients_alone=has_delta_nets, looser=10 if has_delta_nets else 1)
print(config.family, "equal")
"""


# Adam makes more of what quick compilation rounds otherwise.
EXACTLY = ""


@pytest.mark.parametrize(
    "names",
    [
        ("gpt_oss", "gemma3_text"),
        ("glm4_moe", "minimax_m2"),
        ("deepseek_v3", "gemma4_text, per-layer inputs"),
        ("qwen2", "glm4", "qwen3_moe"),
        ("olmo3", "gemma4_text"),
        ("gemma4_text, experts",),
        ("qwen3_next",),
        ("qwen3_5_moe_text",),
    ],
    ids=", ".join,
)
def test_a_mesh_reads_and_trains_a_family_as_one_device_does(names: tuple[str, ...]):
    lines = run_on_devices(SCRIPT, *names, flags=EXACTLY)
    assert lines == [f"{name} equal" for name in names]


@pytest.mark.parametrize("tower", ["qwen2_5_vl", "qwen3_5_moe"])
def test_a_mesh_reads_and_trains_a_tower_as_one_device_does(tower: str):
    script = f"{SCRIPT}\ntower = {tower!r}\n{IMAGES}"
    assert run_on_devices(script, flags=EXACTLY) == [f"{tower} equal"]
