"""GGUF conversion: a small file written here, read back as transformers would have it."""

import json
from pathlib import Path

import numpy as np
import pytest

from jax_agent_rl.errors import ModelError
from jax_agent_rl.models.convert import convert_gguf, unpermute
from jax_agent_rl.models.hf import load_hf

HEADS, KV_HEADS, SIZE, HIDDEN, FORWARD, LAYERS = 4, 2, 8, 32, 48, 2
TOKENS = ["<unk>", "<bos>", "<eos>", *(chr(c) for c in range(33, 60)), "Ġ", "a", "b", "ab"]


def permute(weight: np.ndarray, heads: int) -> np.ndarray:
    """As llama.cpp's converter does: halves of each head interleaved."""
    rows, columns = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


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


def write(path: Path, tensors: dict[str, np.ndarray], *, arch: str = "llama", pre: str = "smollm") -> Path:
    from gguf import GGUFWriter

    writer = GGUFWriter(path, arch)
    writer.add_block_count(LAYERS)
    writer.add_context_length(64)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FORWARD)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(10000.0)
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
        heads = {"attn_q": HEADS, "attn_k": KV_HEADS}.get(kind)
        writer.add_tensor(f"{name}.weight", permute(tensor, heads) if heads else tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_weights_and_config_survive_the_conversion(tmp_path: Path):
    tensors = weights()
    convert_gguf(write(tmp_path / "m.gguf", tensors), tmp_path / "hf")
    config, params = load_hf(tmp_path / "hf")
    assert (config.num_layers, config.num_kv_heads, config.tie_word_embeddings) == (LAYERS, KV_HEADS, True)
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


@pytest.mark.parametrize(("change", "message"), [({"arch": "bert"}, "bert"), ({"pre": "exotic"}, "exotic")])
def test_what_is_not_supported_is_named(tmp_path: Path, change: dict, message: str):
    with pytest.raises(ModelError, match=message):
        convert_gguf(write(tmp_path / "m.gguf", weights(), **change), tmp_path / "hf")
