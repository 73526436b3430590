"""Every parameter of every family has a kind and axes that say what it is, whatever the shape of
its array.
"""

import itertools
import re
from dataclasses import replace
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_agent_rl.config.learner import LoraConfig, LoraTarget, OptimizerSection
from jax_agent_rl.deploy.plan.architectures import ARCHITECTURES
from jax_agent_rl.deploy.plan.model_flops import pass_flops
from jax_agent_rl.jetstream.forward import QUANTIZED
from jax_agent_rl.learner.critic import critic_shapes
from jax_agent_rl.learner.optimizer import make_optimizer
from jax_agent_rl.learner.parameterization import new_adapters
from jax_agent_rl.models.config import DecoderConfig, Experts, VisionConfig
from jax_agent_rl.models.families import FAMILIES, read_config
from jax_agent_rl.models.lora import ADAPTABLE, TARGETS
from jax_agent_rl.models.parameters import PARAMETERS, STACKS, VISION_PARAMETERS, Kind, parameter_at
from tests.tiny import GEMMA4, GEMMA4_EXPERTS, GEMMA4_SMALL, LATENT, TINY
from tests.tiny_vision import TINY_QWEN3_5, TINY_VL

EXPERTS = Experts(count=4, per_token=2, intermediate_size=16, normalize=True)
SHARED = replace(
    EXPERTS, scoring="sigmoid", correction=True, shared_size=24, shared_gated=True, scale=2.0
)
SHARED_GATED = replace(EXPERTS, shared_size=24, shared_gated=True)
GPT_OSS = replace(
    TINY,
    family="gpt_oss",
    qkv_bias=True,
    o_bias=True,
    attention_sinks=True,
    activation="clamped_swiglu",
    experts=replace(EXPERTS, bias=True),
    tie_word_embeddings=False,
)
assert TINY_VL.vision is not None
QWEN3_TOWER: VisionConfig = replace(
    TINY_VL.vision,
    layer_norm=True,
    gated=False,
    patch_bias=True,
    position_grid=4,
    deepstack_layers=(0, 1),
)
TINY_FAMILIES = {
    "llama": TINY,
    "gemma3_text": replace(
        TINY, family="gemma3_text", qk_norm=True, norms="around", norm_offset=1.0
    ),
    "qwen3_moe": replace(TINY, family="qwen3_moe", qk_norm=True, experts=EXPERTS),
    "gemma4_text": GEMMA4,
    "gemma4 small": GEMMA4_SMALL,
    "gemma4 with experts": GEMMA4_EXPERTS,
    "gpt_oss": GPT_OSS,
    "deepseek_v3": replace(LATENT, family="deepseek_v3", experts=SHARED),
    "kimi_k2": replace(LATENT, family="kimi_k2", experts=SHARED),
    "shared experts": replace(TINY, family="qwen3_moe", experts=SHARED),
    "qwen2_5_vl": TINY_VL,
    "qwen3_vl": replace(
        TINY_VL, family="qwen3_vl", qk_norm=True, qkv_bias=False, vision=QWEN3_TOWER
    ),
    "qwen3_5": TINY_QWEN3_5,
    "qwen3_5_moe": replace(TINY_QWEN3_5, family="qwen3_5_moe", experts=SHARED_GATED),
}
FAMILY_CONFIGS = [
    *(read_config({"num_key_value_heads": 1, **fields}) for fields in ARCHITECTURES.values()),
    *TINY_FAMILIES.values(),
]
NO_MATRIX = re.compile(
    r"norm|bias|sinks|embed|head|router|positions|scalar|model_projection|conv|decay"
)


def leaves(shapes: Any) -> list[tuple[Any, tuple[int, ...]]]:
    return jax.tree_util.tree_leaves_with_path(shapes, is_leaf=lambda x: isinstance(x, tuple))


def test_all_families_are_among_the_configurations():
    # Of the last one only the text model is read.
    others = {"ministral", "gemma4"}
    assert {config.family for config in FAMILY_CONFIGS} | others == set(FAMILIES)


@pytest.mark.parametrize(
    "config", FAMILY_CONFIGS, ids=lambda config: f"{config.family}-{config.hidden_size}"
)
def test_every_parameter_of_a_family_is_known_with_its_axes(config: DecoderConfig):
    for path, shape in [*leaves(config.parameter_shapes()), *leaves(critic_shapes(config))]:
        parameter = parameter_at(path)
        assert len(parameter.axes) == len(shape), path
        assert parameter.is_matrix != bool(NO_MATRIX.search(path[-1].key)), path


@pytest.mark.parametrize("parameters", [PARAMETERS, VISION_PARAMETERS], ids=["decoder", "tower"])
def test_a_matrix_has_two_axes_behind_those_that_stack(parameters: dict):
    for name, parameter in parameters.items():
        stacks = [axis for axis in parameter.axes if axis in STACKS]
        assert list(parameter.axes[: len(stacks)]) == stacks, "stacks come first"
        if parameter.is_matrix:
            assert len(parameter.axes) - len(stacks) == 2, name
        if parameter.kind in (Kind.BIAS, Kind.NORM, Kind.FACTOR, Kind.SINK, Kind.CORRECTION):
            assert len(parameter.axes) - len(stacks) == 1, name


def test_towers_and_decoders_mean_the_same_by_a_name():
    for name in PARAMETERS.keys() & VISION_PARAMETERS.keys():
        assert PARAMETERS[name].kind is VISION_PARAMETERS[name].kind


def test_an_unknown_name_is_refused():
    with pytest.raises(ValueError, match=r"layers\.conv"):
        parameter_at(("layers", "conv"))


def test_adapters_and_eight_bits_are_for_matrices():
    assert TARGETS.keys() == set(get_args(LoraTarget))
    assert set(itertools.chain.from_iterable(TARGETS.values())) == ADAPTABLE
    assert not any(PARAMETERS[name].is_of_experts for name in ADAPTABLE)
    for path, shape in leaves(
        jax.tree.map(lambda x: x.shape, new_adapters(LoraConfig(rank=2), TINY))
    ):
        parameter = parameter_at(path)
        assert parameter.is_matrix
        assert len(parameter.axes) == len(shape)
        assert "rank" in parameter.axes
    dense = {"qkv", "o", "gate_up", "down", "shared_gate_up", "shared_down"}
    gemma4 = {"global_qkv", "global_o", "wide_gate_up", "wide_down"}
    gemma4 |= {"per_layer_gate", "per_layer_projection"}
    delta = {"delta_qkvz", "delta_out"}  # the decay does not tolerate them
    latent = {"q_a", "q_b", "kv_a", "k_b", "v_b"}
    experts = {"expert_gate", "expert_up", "expert_down"}
    assert dense | gemma4 | delta | latent | experts == QUANTIZED


def test_operations_of_a_pass_count_no_biases():
    plain = replace(GPT_OSS, experts=EXPERTS)
    assert pass_flops(GPT_OSS, 7, visible=3.0) == pass_flops(plain, 7, visible=3.0)


def one_update(optimizer: str, config: DecoderConfig) -> tuple[Any, Any]:
    """The parameters' shapes, and the update of the first step for random gradients."""
    rng = np.random.default_rng(0)
    shapes = critic_shapes(config) | {"lm_head": (config.vocab_size, config.hidden_size)}

    def draw(shape: tuple[int, ...]) -> jax.Array:
        return jnp.asarray(rng.standard_normal(shape), jnp.float32)

    gradients = jax.tree.map(draw, shapes, is_leaf=lambda x: isinstance(x, tuple))
    params = jax.tree.map(jnp.zeros_like, gradients)
    section = OptimizerSection.model_validate({"optimizer": optimizer, "max_grad_norm": 1e9})
    transformation = make_optimizer(section, 1.0)
    updates, _ = jax.jit(transformation.update)(gradients, transformation.init(params), params)
    return shapes, updates


@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_muon_orthogonalizes_each_matrix_of_a_stack_and_nothing_else(family: str):
    config = TINY_FAMILIES[family]
    shapes, muon = one_update("muon", config)
    _, adamw = one_update("adamw", config)
    ours = dict(jax.tree_util.tree_leaves_with_path(muon))
    theirs = dict(jax.tree_util.tree_leaves_with_path(adamw))
    for path, _ in leaves(shapes):
        if not parameter_at(path).is_matrix:
            np.testing.assert_array_equal(ours[path], theirs[path])
            continue
        matrices = np.asarray(ours[path]).reshape(-1, *ours[path].shape[-2:])
        for matrix in matrices:
            values = np.linalg.svd(matrix, compute_uv=False)
            # Five Newton-Schulz iterations bring all but the very smallest to 0.7 to 1.3; random
            # ones spread evenly.
            assert np.mean(values > 0.5 * values.max()) > 0.9, path


def test_adafactor_factors_no_bias_of_experts():
    """128 experts and 160 units: two axes long enough to be factored, but one of them stacks."""
    shapes = {"layers": {"expert_gate_bias": (2, 128, 160), "up": (2, 128, 160)}}
    params = jax.tree.map(jnp.ones, shapes, is_leaf=lambda x: isinstance(x, tuple))
    state = make_optimizer(OptimizerSection(optimizer="adafactor"), 0.0).init(params)
    sizes = sorted(x.size for x in jax.tree.leaves(state) if x.size > 1)
    assert sizes == [2 * 128, 2 * 160, 2 * 128 * 160]
