"""GGUF conversion: a small file written here, read back as transformers would have it."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jax_agent_rl.errors import ModelError
from jax_agent_rl.models.config import LinearScaling, Llama3Scaling, YarnScaling
from jax_agent_rl.models.convert import convert_gguf, unpermute
from jax_agent_rl.models.hf import load_hf

HEADS = 4
KV_HEADS = 2
SIZE = 8
HIDDEN = 32
FORWARD = 48
LAYERS = 2
TOKENS = ["<unk>", "<bos>", "<eos>", *(chr(c) for c in range(33, 60)), "Ġ", "a", "b", "ab"]


def permute(weight: np.ndarray, heads: int) -> np.ndarray:
    """Permute as llama.cpp's converter does: halves of each head interleaved."""
    rows, columns = weight.shape
    return (
        weight.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)
    )


def weights() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    shapes = {"token_embd": (len(TOKENS), HIDDEN), "output_norm": (HIDDEN,)}
    for i in range(LAYERS):
        shapes |= {
            f"blk.{i}.attn_q": (HEADS * SIZE, HIDDEN),
            f"blk.{i}.attn_k": (KV_HEADS * SIZE, HIDDEN),
            f"blk.{i}.attn_v": (KV_HEADS * SIZE, HIDDEN),
            f"blk.{i}.attn_output": (HIDDEN, HEADS * SIZE),
            f"blk.{i}.ffn_gate": (FORWARD, HIDDEN),
            f"blk.{i}.ffn_up": (FORWARD, HIDDEN),
            f"blk.{i}.ffn_down": (HIDDEN, FORWARD),
            f"blk.{i}.attn_norm": (HIDDEN,),
            f"blk.{i}.ffn_norm": (HIDDEN,),
        }
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def write(
    path: Path,
    tensors: dict[str, np.ndarray],
    *,
    arch: str = "llama",
    pre: str = "smollm",
    heads: int = HEADS,
    freq_base: float = 10000.0,
    metadata: dict[str, Any] | None = None,
) -> Path:
    """A file with these tensors; ``metadata`` holds further keys, and tensors whose names end in
    ``.weight``.
    """
    from gguf import GGUFWriter

    writer = GGUFWriter(path, arch)
    for key, value in (metadata or {}).items():
        if isinstance(value, np.ndarray):
            writer.add_tensor(key, value)
        elif isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, list):
            writer.add_array(key, value)
        else:
            writer.add_uint32(key, value)
    writer.add_block_count(LAYERS)
    writer.add_context_length(64)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FORWARD)
    writer.add_head_count(heads)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(freq_base)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 3, 3, *[1] * (len(TOKENS) - 3)])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_chat_template("{{ messages[0].content }}")
    for name, tensor in tensors.items():
        kind = name.split(".")[-1]
        interleaved = {"attn_q": heads, "attn_k": KV_HEADS}.get(kind)
        writer.add_tensor(f"{name}.weight", permute(tensor, interleaved) if interleaved else tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_weights_and_config_survive_the_conversion(tmp_path: Path):
    tensors = weights()
    convert_gguf(write(tmp_path / "m.gguf", tensors), tmp_path / "hf")
    config, params = load_hf(tmp_path / "hf")
    assert (config.num_layers, config.num_kv_heads, config.tie_word_embeddings) == (
        LAYERS,
        KV_HEADS,
        True,
    )
    for i in range(LAYERS):
        np.testing.assert_array_equal(params["layers"]["q"][i], tensors[f"blk.{i}.attn_q"])
        np.testing.assert_array_equal(params["layers"]["k"][i], tensors[f"blk.{i}.attn_k"])
        np.testing.assert_array_equal(params["layers"]["down"][i], tensors[f"blk.{i}.ffn_down"])
    np.testing.assert_array_equal(params["embed"], tensors["token_embd"])
    assert json.loads((tmp_path / "hf" / "generation_config.json").read_text())["eos_token_id"] == 2


def test_unpermute_undoes_llama_cpps_permutation():
    weight = np.arange(HEADS * SIZE * 3).reshape(HEADS * SIZE, 3)
    np.testing.assert_array_equal(unpermute(permute(weight, HEADS), HEADS), weight)


def test_special_tokens_are_single_and_digits_are_split(tmp_path: Path):
    from transformers import AutoTokenizer

    convert_gguf(write(tmp_path / "m.gguf", weights()), tmp_path / "hf")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "hf")
    ids = tokenizer("<eos>12", add_special_tokens=False)["input_ids"]
    assert tokenizer.convert_ids_to_tokens(ids) == ["<eos>", "1", "2"]


@pytest.mark.parametrize(
    ("change", "message"), [({"arch": "bert"}, "bert"), ({"pre": "exotic"}, "exotic")]
)
def test_what_is_not_supported_is_named(tmp_path: Path, change: dict, message: str):
    with pytest.raises(ModelError, match=message):
        convert_gguf(write(tmp_path / "m.gguf", weights(), **change), tmp_path / "hf")


def converted(tmp_path: Path, metadata: dict[str, Any], **fields: Any):
    """The configuration of a file with more keys, as it is read after the conversion."""
    convert_gguf(
        write(tmp_path / "m.gguf", weights(), metadata=metadata, **fields), tmp_path / "hf"
    )
    return load_hf(tmp_path / "hf")[0]


SCALINGS = {
    "linear": (
        {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0},
        LinearScaling(factor=4.0),
    ),
    "of old files": ({"llama.rope.scale_linear": 2.0}, LinearScaling(factor=2.0)),
    "none": ({"llama.rope.scaling.type": "none"}, None),
    "yarn": (
        {
            "llama.rope.scaling.type": "yarn",
            "llama.rope.scaling.factor": 8.0,
            "llama.rope.scaling.original_context_length": 32,
            "llama.rope.scaling.finetuned": True,
        },
        YarnScaling(
            factor=8.0,
            original_max_position_embeddings=32,
            attention_factor=pytest.approx(0.1 * math.log(8) + 1),
        ),
    ),
}


@pytest.mark.parametrize("name", SCALINGS)
def test_scaled_positions_are_converted(tmp_path: Path, name: str):
    metadata, expected = SCALINGS[name]
    assert converted(tmp_path, metadata).rope.scaling == expected


def test_factors_of_frequencies_are_the_scaling_of_llama_3(tmp_path: Path):
    """Reference: transformers' frequencies with and without it."""
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    rope = {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling = rope | {"original_max_position_embeddings": 8192, "rope_theta": 500000.0}
    config = LlamaConfig(
        hidden_size=HIDDEN, num_attention_heads=HEADS, head_dim=SIZE, rope_parameters=scaling
    )
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config)
    plain, _ = LlamaRotaryEmbedding.compute_default_rope_parameters(config)
    factors = (plain / scaled).numpy().astype(np.float32)
    model = converted(tmp_path, {"rope_freqs.weight": factors}, freq_base=500000.0)
    assert model.rope.scaling == Llama3Scaling(
        factor=32.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=8192,
    )


def test_heads_may_be_larger_than_their_share_of_the_model(tmp_path: Path):
    metadata = {
        "llama.attention.key_length": SIZE,
        "llama.attention.value_length": SIZE,
        "llama.rope.dimension_count": SIZE,
    }
    tensors = weights()
    rows = {"attn_q": slice(0, 2 * SIZE), "attn_output": (slice(None), slice(0, 2 * SIZE))}
    for name, tensor in tensors.items():
        kind = name.split(".")[-1]
        if kind in rows:
            tensors[name] = np.ascontiguousarray(tensor[rows[kind]])
    convert_gguf(write(tmp_path / "m.gguf", tensors, heads=2, metadata=metadata), tmp_path / "hf")
    config, params = load_hf(tmp_path / "hf")
    assert (config.head_dim, config.num_heads, config.hidden_size) == (SIZE, 2, HIDDEN)
    np.testing.assert_array_equal(params["layers"]["q"][1], tensors["blk.1.attn_q"])


@pytest.mark.parametrize(
    "metadata",
    [
        {"llama.logit_scale": 0.5},
        {"llama.residual_scale": 0.5},
        {"llama.embedding_scale": 2.0},
        {"llama.attention.scale": 0.1},
        {"llama.attention.clamp_kqv": 8.0},
        {"llama.attention.sliding_window": 16},
        {"llama.attention.causal": False},
        {"llama.attention.value_length": 4},
        {"llama.rope.dimension_count": 4},
        {"llama.rope.scaling.type": "longrope"},
        {"llama.rope.scaling.factor": 2.0},
        {"llama.rope.scaling.alpha": 2.0},
        {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 2.0},
        {"llama.expert_count": 8},
        {"llama.vocab_size": 7},
        {"split.count": 2},
        {"tokenizer.ggml.add_eos_token": True},
        {"tokenizer.ggml.add_space_prefix": True},
        {"tokenizer.ggml.surprise": 1},
        {"general.type": "adapter"},
        {"rope_freqs.weight": np.full(SIZE // 2, 3.0, np.float32)},
        {"blk.0.attn_q.bias": np.zeros(HEADS * SIZE, np.float32)},
    ],
    ids=lambda metadata: next(iter(metadata)),
)
def test_what_would_change_the_model_and_is_not_converted_is_refused_by_name(
    tmp_path: Path, metadata: dict[str, Any]
):
    with pytest.raises(ModelError) as caught:
        converted(tmp_path, metadata)
    assert next(iter(metadata)).removesuffix(".type") in str(caught.value) or "longrope" in str(
        caught.value
    )
    assert not (tmp_path / "hf").exists()


def test_keys_that_describe_the_file_pass(tmp_path: Path):
    described = {"general.license": "mit", "quantize.imatrix.file": "x", "someone.note": "y"}
    assert converted(tmp_path, described) == converted_again(tmp_path)


def converted_again(tmp_path: Path):
    convert_gguf(write(tmp_path / "plain.gguf", weights()), tmp_path / "plain")
    return load_hf(tmp_path / "plain")[0]


def test_a_model_that_begins_texts_with_a_token_keeps_doing_so(tmp_path: Path):
    from transformers import AutoTokenizer

    metadata = {"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.eot_token_id": 3}
    convert_gguf(write(tmp_path / "m.gguf", weights(), metadata=metadata), tmp_path / "hf")
    assert AutoTokenizer.from_pretrained(tmp_path / "hf")("1")["input_ids"][0] == 1
    assert json.loads((tmp_path / "hf" / "generation_config.json").read_text())["eos_token_id"] == [
        2,
        3,
    ]
