"""PEFT's adapters: what is read computes what PEFT does, and what would not is refused by name."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jax_agent_rl.errors import ConfigError
from jax_agent_rl.models.decoder import Decoder
from jax_agent_rl.models.hf import load_hf
from jax_agent_rl.models.lora import read_peft, read_settings

peft = pytest.importorskip("peft")
torch = pytest.importorskip("torch")

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
IDS = np.random.default_rng(0).integers(3, 64, (1, 12))


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("lora") / "base"
    LlamaForCausalLM(
        LlamaConfig(vocab_size=64, **SIZES, **HEADS, initializer_range=0.3)
    ).save_pretrained(folder)
    return folder


def save_adapter(base: Path, folder: Path, **settings: Any) -> np.ndarray:
    """Save an adapter with PEFT; return the logits that PEFT computes with it."""
    from transformers import LlamaForCausalLM

    torch.manual_seed(1)
    lora = peft.LoraConfig(
        **{"r": 4, "target_modules": ["q_proj", "v_proj", "down_proj"]} | settings
    )
    model = peft.get_peft_model(LlamaForCausalLM.from_pretrained(base), lora)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter += torch.randn_like(parameter) * 0.1
    model.save_pretrained(folder)
    again = peft.PeftModel.from_pretrained(LlamaForCausalLM.from_pretrained(base), folder).eval()
    with torch.no_grad():
        return again(torch.tensor(IDS)).logits.numpy()


def our_logits(base: Path, adapter: Path) -> np.ndarray:
    """The logits of the model with the adapter multiplied out."""
    config, params = load_hf(base)
    for name, (a, b) in read_peft(adapter, config, key="rollout.adapters.x").weights.items():
        params["layers"][name] = params["layers"][name] + jnp.einsum("lor,lri->loi", b, a)
    model = Decoder.from_params(config, params)
    return np.asarray(model.logits(model(jnp.asarray(IDS))[0]))


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"lora_alpha": 3, "lora_dropout": 0.5, "task_type": "CAUSAL_LM"},
        {"use_rslora": True},
        {"init_lora_weights": "gaussian"},
        {"init_lora_weights": "orthogonal"},
        {"init_lora_weights": False},
        {"layers_to_transform": [1]},
        {"exclude_modules": ["layers.0.self_attn.q_proj"]},
    ],
    ids=str,
)
def test_a_plain_adapter_computes_what_peft_does(
    base: Path, tmp_path: Path, settings: dict[str, Any]
):
    expected = save_adapter(base, tmp_path, **settings)
    np.testing.assert_allclose(our_logits(base, tmp_path), expected, atol=2e-4)


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa'"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights='pissa_niter_4'"),
        ({"init_lora_weights": "olora"}, "init_lora_weights='olora'"),
        (
            {"alora_invocation_tokens": [60, 61], "task_type": "CAUSAL_LM"},
            "alora_invocation_tokens",
        ),
        ({"use_dora": True}, "use_dora"),
        ({"bias": "all"}, "bias='all'"),
        ({"lora_bias": True}, "lora_bias"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"rank_pattern": {"q_proj": 2}}, "rank_pattern"),
        ({"alpha_pattern": {"q_proj": 2}}, "alpha_pattern"),
        ({"trainable_token_indices": [3]}, "trainable_token_indices"),
        ({"layer_replication": [[0, 2], [1, 2]]}, "layer_replication"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_another_kind_of_adapter_is_refused_by_name(
    base: Path, tmp_path: Path, settings: dict[str, Any], field: str
):
    save_adapter(base, tmp_path, **settings)
    with pytest.raises(ConfigError, match=f"rollout.adapters.x=.*{field}"):
        read_peft(tmp_path, load_hf(base)[0], key="rollout.adapters.x")


@pytest.fixture
def plain(base: Path, tmp_path: Path) -> Path:
    save_adapter(base, tmp_path)
    return tmp_path


def test_every_field_of_the_installed_peft_is_off_or_known(plain: Path):
    """A field that is switched on is refused, unless it is one of those that leave a plain adapter
    as it is.
    """
    file = plain / "adapter_config.json"
    saved = json.loads(file.read_text())
    passing = set()
    for field in dataclasses.fields(peft.LoraConfig):
        file.write_text(json.dumps(saved | {field.name: {"switched": "on"}}))
        try:
            read_settings(plain, key="x")
        except ConfigError as error:
            assert field.name in str(error) or field.name in ("r", "lora_alpha")
        else:
            passing.add(field.name)
    assert passing == {
        *(
            "auto_mapping",
            "base_model_name_or_path",
            "inference_mode",
            "peft_version",
            "revision",
            "task_type",
        ),
        *(
            "exclude_modules",
            "layers_pattern",
            "layers_to_transform",
            "target_modules",
            "ensure_weight_tying",
        ),
        *(
            "lora_dropout",
            "runtime_config",
            "corda_config",
            "eva_config",
            "loftq_config",
            "lora_ga_config",
        ),
        *("megatron_core", "qalora_group_size", "use_rslora"),
    }


def test_a_field_of_a_later_peft_is_refused(plain: Path):
    file = plain / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"use_something_new": True}))
    with pytest.raises(ConfigError, match="use_something_new=True"):
        read_settings(plain, key="x")
