"""Adapters: the right gradients, a base that never changes, what engines and PEFT get."""

import json
import os
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from jax_agent_rl.config import AlgorithmConfig, LearnerConfig, LoraConfig
from jax_agent_rl.config.learner import LoraTarget
from jax_agent_rl.errors import ConfigError
from jax_agent_rl.learner.checkpoint import Checkpointer
from jax_agent_rl.learner.learner import Learner
from jax_agent_rl.learner.parameterization import merge_adapters, new_adapters, with_adapters
from jax_agent_rl.models.config import DecoderConfig, Experts, Params, Rope
from jax_agent_rl.models.hf import save_hf
from jax_agent_rl.models.lora import describe_adapters, save_peft
from tests.messages import raises
from tests.tiny import (
    GEMMA4,
    GEMMA4_EXPERTS,
    GEMMA4_SMALL,
    LATENT,
    OLMO3,
    QWEN3_5_MOE,
    TINY,
    full_logits,
    tiny_params,
)
from tests.tiny_vision import TINY_QWEN3_5, TINY_VL
from tests.trajectories import random_groups

LORA = LoraConfig(rank=3, alpha=6.0)

GLM4_MOE = replace(
    TINY,
    family="glm4_moe",
    rope=Rope(partial_rotary=0.5),
    experts=Experts(
        count=4,
        per_token=2,
        intermediate_size=16,
        normalize=True,
        first_dense_layers=1,
        scoring="sigmoid",
        correction=True,
        shared_size=16,
    ),
)
"""A dense layer, then mixtures with a shared expert."""
assert LATENT.latent is not None
DEEPSEEK_V3 = replace(
    LATENT,
    family="deepseek_v3",
    latent=replace(LATENT.latent, q_rank=32, kv_rank=32, value_dim=8),
    experts=GLM4_MOE.experts,
)
"""The same with latent attention; matrices have 32 inputs each, whole tiles."""
assert QWEN3_5_MOE.delta_net is not None
QWEN3_5 = replace(QWEN3_5_MOE, family="qwen3_5_text", experts=None)
QWEN3_NEXT = replace(
    QWEN3_5_MOE, family="qwen3_next", delta_net=replace(QWEN3_5_MOE.delta_net, fused=True)
)

OF_ATTENTION: tuple[LoraTarget, ...] = ("q_proj", "k_proj", "v_proj", "o_proj")
OF_LLAMA: tuple[LoraTarget, ...] = (*OF_ATTENTION, "gate_proj", "up_proj", "down_proj")
OF_LATENTS: tuple[LoraTarget, ...] = (
    "q_a_proj",
    "q_b_proj",
    "kv_a_proj_with_mqa",
    "kv_b_proj",
    "o_proj",
)
OF_FUSED_DELTA_NETS: tuple[LoraTarget, ...] = ("in_proj_qkvz", "in_proj_ba", "out_proj")
OF_DELTA_NETS: tuple[LoraTarget, ...] = ("in_proj_qkv", "in_proj_z", "out_proj")


def make_learner(lora: dict | None = None, **algorithm) -> Learner:
    settings = {"rank": 3, "alpha": 6.0} | (lora or {})
    config = LearnerConfig(learning_rate=1e-2, pack_length=64, remat="none", lora=settings)
    return Learner(
        TINY, tiny_params(), algorithm=AlgorithmConfig(**algorithm), config=config, temperature=1.0
    )


def drawn_adapters(model: DecoderConfig = TINY, lora: LoraConfig = LORA) -> Params:
    """Adapters whose ``b`` is not zero."""
    rng = np.random.default_rng(4)
    adapters = new_adapters(lora, model)
    return jax.tree.map(
        lambda x: jnp.asarray(rng.standard_normal(x.shape) * 0.1, jnp.float32), adapters
    )


def test_the_seed_draws_the_first_values():
    seeded = [LoraConfig(rank=3, seed=seed) for seed in (0, 0, 1)]
    first, again, other_seed = (jax.tree.leaves(new_adapters(lora, TINY)) for lora in seeded)
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    assert any(not np.array_equal(a, b) for a, b in zip(first, other_seed, strict=True))


@pytest.mark.parametrize("config", [TINY, GLM4_MOE], ids=lambda config: config.family)
def test_an_adapted_model_computes_what_the_merged_one_does(config: DecoderConfig):
    params = tiny_params(config=config)
    adapters = drawn_adapters(config)
    ids = np.random.default_rng(0).integers(3, 97, 20)
    adapted = with_adapters(LORA, config, params, adapters)
    got = adapted.logits(adapted(ids[None])[0])[0]
    expected = full_logits(merge_adapters(adapted), ids.tolist(), config)
    np.testing.assert_allclose(got, expected, atol=5e-4 * np.abs(expected).max())
    assert np.abs(expected - full_logits(params, ids.tolist(), config)).max() > 0.1


def test_a_target_adapts_dense_and_shared_networks():
    names = new_adapters(LoraConfig(targets=("gate_proj", "q_proj")), GLM4_MOE)["adapters"]
    assert {name: adapter["b"].shape for name, adapter in names.items()} == {
        "gate": (1, 48, 16),
        "shared_gate": (2, 16, 16),
        "q": (3, 32, 16),
    }


def test_gradients_are_those_of_torch_in_float64():
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(1)
    x = rng.standard_normal((7, 8))
    w = rng.standard_normal((5, 8))
    a = rng.standard_normal((3, 8))
    b = rng.standard_normal((5, 3))
    target = rng.standard_normal((7, 5))

    from jax_agent_rl.models.layers import linear
    from jax_agent_rl.models.lora import LoRA

    def loss(ab: tuple[jax.Array, jax.Array]) -> jax.Array:
        return jnp.mean(
            jnp.square(
                linear(jnp.float32(x), jnp.float32(w), adapter=LoRA(*ab, scale=2.0)) - target
            )
        )

    got = jax.grad(loss)((jnp.float32(a), jnp.float32(b)))
    ta = torch.tensor(a, requires_grad=True)
    tb = torch.tensor(b, requires_grad=True)
    out = torch.tensor(x) @ (torch.tensor(w) + 2.0 * tb @ ta).T
    torch.mean((out - torch.tensor(target)) ** 2).backward()
    for mine, theirs in zip(got, (ta.grad, tb.grad), strict=True):
        np.testing.assert_allclose(mine, theirs.numpy(), rtol=2e-5, atol=1e-6)


def leaves_of(tree) -> list[bytes]:
    return [np.asarray(x).tobytes() for x in jax.tree.leaves(tree)]


@pytest.mark.parametrize("quantize", ["none", "int8", "nf4"])
def test_only_adapters_change_and_have_optimizer_state(quantize: str):
    if quantize != "none":
        pytest.importorskip("qwix")
    targets = ("q_proj", "v_proj", "up_proj")  # of 32 inputs each: whole tiles
    learner = make_learner({"quantize": quantize, "targets": targets})
    base = leaves_of(learner.policy.frozen)
    previous_q = np.asarray(learner.params["layers"]["q"])
    for _ in range(2):
        assert not learner.update(random_groups(0)).skipped
    assert leaves_of(learner.policy.frozen) == base
    assert not np.array_equal(np.asarray(learner.params["layers"]["q"]), previous_q)
    np.testing.assert_array_equal(learner.params["layers"]["down"], tiny_params()["layers"]["down"])
    shapes = {x.shape for x in jax.tree.leaves(learner.state)}
    assert shapes == {(), (3, 3, 32), (3, 32, 3), (3, 16, 3), (3, 48, 3)}


@pytest.mark.parametrize(("quantize", "error"), [("int8", 0.01), ("nf4", 0.2)])
def test_a_quantised_base_is_near_the_model(quantize: str, error: float):
    pytest.importorskip("qwix")
    learner = make_learner({"quantize": quantize, "targets": ("q_proj",)})
    exact = tiny_params()["layers"]["q"]
    rough = learner.params["layers"]["q"]
    distance = np.abs(np.asarray(exact) - np.asarray(rough)).max() / np.abs(np.asarray(exact)).max()
    assert 0 < distance < error
    stored = learner.policy.frozen["layers"]["q"]
    assert stored.qvalue.dtype == {"int8": jnp.int8, "nf4": jnp.uint4}[quantize]


@pytest.mark.parametrize(("quantize", "error"), [("int8", 0.01), ("nf4", 0.2)])
@pytest.mark.parametrize(
    ("model", "targets", "names"),
    [
        pytest.param(
            DEEPSEEK_V3,
            (*OF_LATENTS, "up_proj"),
            ("q_a", "q_b", "kv_a", "kv_b", "o", "up", "shared_up"),
            id="latent attention",
        ),
        pytest.param(
            QWEN3_5_MOE,
            (*OF_DELTA_NETS, "q_proj", "o_proj", "up_proj"),
            ("delta_qkv", "delta_z", "delta_out", "q", "o", "shared_up"),
            id="delta nets",
        ),
        pytest.param(
            GEMMA4_EXPERTS,
            ("q_proj", "k_proj", "v_proj", "up_proj"),
            ("q", "global_q", "k", "global_k", "v", "up"),
            id="experts beside dense",
        ),
    ],
)
def test_adapters_of_other_mixers_train_over_a_quantized_base(
    model: DecoderConfig,
    targets: tuple[LoraTarget, ...],
    names: tuple[str, ...],
    quantize: str,
    error: float,
):
    pytest.importorskip("qwix")
    lora = {"rank": 3, "targets": targets, "quantize": quantize}
    config = LearnerConfig(learning_rate=1e-2, pack_length=64, remat="none", lora=lora)
    params = tiny_params(config=model)
    learner = Learner(model, params, algorithm=AlgorithmConfig(), config=config, temperature=1.0)
    for name in names:
        exact = np.asarray(params["layers"][name])
        distance = np.abs(exact - np.asarray(learner.params["layers"][name])).max()
        assert 0 < distance < error * np.abs(exact).max(), name

    base = leaves_of(learner.policy.frozen)
    # The first update moves b alone, which starts at 0; a has a gradient from then on.
    for _ in range(2):
        assert not learner.update(random_groups(0)).skipped
    assert leaves_of(learner.policy.frozen) == base
    for name in names:
        assert np.abs(learner.trained["adapters"][name]["b"]).max() > 0, name


def test_new_adapters_are_the_model_itself_and_the_reference():
    learner = make_learner(kl={"where": "reward", "coef": 0.1})
    for a, b in zip(jax.tree.leaves(learner.params), jax.tree.leaves(tiny_params()), strict=True):
        np.testing.assert_array_equal(a, b)
    assert learner.update(random_groups(0)).metrics["kl_reference"] == pytest.approx(0.0, abs=1e-7)
    assert learner.update(random_groups(0)).metrics["kl_reference"] > 1e-6


def test_a_checkpoint_of_adapters_restores(tmp_path: Path):
    learner = make_learner()
    restored = make_learner()
    learner.update(random_groups(0))
    checkpointer = Checkpointer(tmp_path / "c", keep=1)
    checkpointer.save(1, learner.state, {})
    checkpointer.wait()
    _, restored.state, _ = checkpointer.restore(restored.state)
    checkpointer.close()
    learner.update(random_groups(1))
    restored.update(random_groups(1))
    assert leaves_of(learner.params) == leaves_of(restored.params)


# PEFT takes gate_proj, up_proj and down_proj for the experts' matrices.
@pytest.mark.parametrize(
    ("config", "targets"),
    [
        pytest.param(TINY, LORA.targets, id="llama"),
        pytest.param(TINY_VL, LORA.targets, id="qwen2_5_vl"),
        pytest.param(TINY_QWEN3_5, LORA.targets, id="qwen3_5"),
        pytest.param(OLMO3, LORA.targets, id="olmo3"),
        pytest.param(GEMMA4, LORA.targets, id="gemma4"),
        pytest.param(GEMMA4_SMALL, LORA.targets, id="gemma4 small"),
        pytest.param(GEMMA4_EXPERTS, LORA.targets, id="gemma4 experts"),
        pytest.param(GLM4_MOE, OF_ATTENTION, id="glm4_moe"),
        pytest.param(DEEPSEEK_V3, OF_LATENTS, id="deepseek_v3"),
        pytest.param(QWEN3_NEXT, OF_FUSED_DELTA_NETS + OF_ATTENTION, id="qwen3_next"),
    ],
)
def test_the_files_load_in_peft_and_give_the_merged_models_logits(
    config: DecoderConfig, targets: tuple[LoraTarget, ...], tmp_path: Path
):
    peft = pytest.importorskip("peft")
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    lora = LoraConfig(rank=3, alpha=6.0, targets=targets)
    params = tiny_params(config=config)
    adapters = drawn_adapters(config, lora)
    save_hf(tmp_path / "base", config, params)
    save_peft(tmp_path / "adapter", lora, config, adapters, base=str(tmp_path / "base"))
    kind = AutoModelForCausalLM if config.vision is None else AutoModelForImageTextToText
    model = peft.PeftModel.from_pretrained(
        kind.from_pretrained(tmp_path / "base"), tmp_path / "adapter"
    )
    assert not any("visual" in name for name, _ in model.named_parameters() if "lora" in name)
    ids = np.random.default_rng(2).integers(3, 97, 12).tolist()
    with torch.no_grad():
        theirs = model(torch.tensor([ids])).logits[0].numpy()
    mine = full_logits(merge_adapters(with_adapters(lora, config, params, adapters)), ids, config)
    np.testing.assert_allclose(mine, theirs, atol=2e-4 * np.abs(theirs).max())
    written = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert written["r"] == 3
    assert written["base_model_name_or_path"] == os.fspath(tmp_path / "base")


@pytest.mark.parametrize(
    ("config", "beside"),
    [
        pytest.param(TINY, set(), id="llama"),
        pytest.param(QWEN3_5, set(), id="qwen3_5"),
        pytest.param(GEMMA4_SMALL, {"per_layer_model_projection"}, id="gemma4 small"),
    ],
)
def test_by_default_all_modules_are_adapted_that_pefts_all_linear_adapts(
    config: DecoderConfig, beside: set[str], tmp_path: Path
):
    """But for those ``beside``, which are not of a layer. Of a mixture PEFT adapts other modules:
    it takes gate, up and down for the experts' matrices.
    """
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    save_hf(tmp_path / "base", config, tiny_params(config=config))
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    theirs = peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules="all-linear"))
    expected = {name for name, _ in theirs.named_modules() if name.endswith(".lora_A")}
    is_beside = tuple(f".{name}.lora_A" for name in beside)

    lora = LoraConfig(rank=2)
    adapters = drawn_adapters(config, lora)
    save_peft(tmp_path / "adapter", lora, config, adapters, base=str(tmp_path / "base"))
    tensors = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    modules = {name.removesuffix(".weight") for name in tensors if ".lora_A." in name}
    assert modules == {name for name in expected if not name.endswith(is_beside)}


def test_a_line_names_what_is_adapted_and_what_is_not():
    line = describe_adapters(LoraConfig(rank=3), QWEN3_5_MOE)
    adapted, frozen = line.split("; none on ")
    assert adapted.endswith(
        " q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj, in_proj_qkv, in_proj_z,"
        " in_proj_b, in_proj_a, out_proj"
    )
    assert frozen == "experts"

    line = describe_adapters(LoraConfig(targets=OF_LLAMA), QWEN3_5)
    assert line.endswith("; none on in_proj_qkv, in_proj_z, in_proj_b, in_proj_a, out_proj")
    assert "none" not in describe_adapters(LoraConfig(), TINY)
    assert describe_adapters(LoraConfig(), replace(TINY, family="glm4")).endswith(
        " q_proj, k_proj, v_proj, o_proj, down_proj; none on gate_proj, up_proj"
    )


def test_bad_settings_are_refused_with_the_fix():
    pytest.importorskip("qwix")
    with raises(ConfigError, value="tiles of 32", fix="learner.lora.quantize=none"):
        make_learner({"quantize": "int8", "targets": ("down_proj",)})  # 48 inputs
    with pytest.raises(ValueError, match="item twice"):
        LoraConfig(targets=("q_proj", "q_proj"))
    experts = Experts(count=4, per_token=2, intermediate_size=16, normalize=True)
    named = LoraConfig(targets=OF_LLAMA)
    mixture = DecoderConfig(**{**vars(TINY), "family": "qwen3_moe", "experts": experts})
    with raises(ConfigError, value=("gate_proj", "up_proj", "down_proj")):
        new_adapters(named, mixture)
    with raises(ConfigError, key="glm4", value=("gate_proj", "up_proj", "one matrix")):
        new_adapters(named, replace(TINY, family="glm4"))
    latent = replace(LATENT, family="deepseek_v3")
    has_not = ("q_proj", "k_proj", "v_proj")
    has = "q_a_proj, q_b_proj, kv_a_proj_with_mqa, kv_b_proj, o_proj, gate_proj, up_proj, down_proj"
    with raises(ConfigError, value=has_not, fix=f"some of {has}"):
        new_adapters(named, latent)
    with raises(ConfigError, fix="some of q_proj, k_proj, v_proj, o_proj, down_proj"):
        new_adapters(named, replace(TINY, family="glm4"))
