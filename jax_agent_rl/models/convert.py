"""Conversion of model files to Hugging Face folders: another precision, or Llama models in GGUF.

GGUF weights are dequantized to float32 and the tokenizer is rebuilt. llama.cpp interleaves the two
rotary halves of Q and K; Hugging Face separates them. The file only names the tokenizer's
pre-tokenization (``tokenizer.ggml.pre``); reading it wrongly gives plausible but different ids.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import jax.numpy as jnp
import numpy as np

from jax_agent_rl.errors import ModelError
from jax_agent_rl.models.hf import LAYER, TOP, load_hf, save_hf
from jax_agent_rl.models.tensors import HEAD, save_tensors
from jax_agent_rl.utils.files import (
    make_folder,
    make_temp_folder,
    remove_temp_folder,
    replacing_folder,
    require_new,
)
from jax_agent_rl.utils.packages import install_command

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
_TOP_NAMES = {
    "token_embd": f"model.{TOP['embed']}",
    "output_norm": f"model.{TOP['final_norm']}",
    "output": HEAD,
}
_CONTROL_TOKEN = 3
_USER_TOKEN = 4
"""Values of ``tokenizer.ggml.token_type``."""
T = TypeVar("T")
DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16, "float16": jnp.float16}


def convert(source: Path, target: Path, *, dtype: str = "float32") -> Path:
    """Convert a GGUF file or a Hugging Face folder to a Hugging Face folder, and return it.

    Args:
        source: the file or folder.
        target: a new or empty folder.
        dtype: of the written weights, one of :data:`DTYPES`.

    Raises:
        ModelError: ``dtype`` is unknown, the source is unreadable or of an unknown family, or the
            target is not empty.
    """
    target_dtype = named_dtype(dtype)
    require_new(target, error=ModelError)
    if source.suffix != ".gguf":
        _change_dtype(source, target, target_dtype)
        return target
    if dtype == "float32":
        convert_gguf(source, target)
        return target

    # In two steps, the first of which gives float32.
    make_folder(target.parent)
    temporary = make_temp_folder(".float32-", target.parent)
    try:
        convert_gguf(source, temporary / "model")
        _change_dtype(temporary / "model", target, target_dtype)
    finally:
        remove_temp_folder(temporary)
    return target


def _change_dtype(source: Path, target: Path, dtype: jnp.dtype) -> None:
    config, params = load_hf(source, dtype=dtype)
    save_hf(target, config, params, tokenizer_from=source)


def named_dtype(name: str) -> jnp.dtype:
    """Return the type a ``--dtype`` option names.

    Raises:
        ModelError: it is not one of :data:`DTYPES`.
    """
    if name not in DTYPES:
        raise ModelError(f"--dtype {name!r} is not known; there are {', '.join(DTYPES)}")
    return DTYPES[name]


def convert_gguf(source: Path, target: Path) -> None:
    """Convert a GGUF file to a Hugging Face folder.

    It holds ``config.json``, ``generation_config.json``, ``model.safetensors`` and the tokenizer's
    files.

    Args:
        target: a folder that does not exist or is empty.

    Raises:
        ModelError: the file is not of the Llama architecture, its tokenizer is of an unknown kind,
            or something in it is not known: it might change what the model computes.
    """
    try:
        from gguf import GGUFReader
    except ImportError:
        raise ModelError(
            f"reading GGUF files needs the package 'gguf': {install_command()}"
        ) from None
    reader = GGUFReader(source)
    fields = Metadata(source, {name: field.contents() for name, field in reader.fields.items()})
    architecture = fields.get("general.architecture", str)
    if architecture != "llama":
        raise ModelError(f"{source}: architecture {architecture!r} is not supported, only 'llama'")
    fields.require("general.type", "model")

    with replacing_folder(target, error=ModelError) as folder:
        tensors, rope_factors = _read_tensors(reader, fields)
        save_tensors(tensors, folder / "model.safetensors")
        _write_configs(fields, folder, tied=HEAD not in tensors, rope_factors=rope_factors)
        _write_tokenizer(fields, folder)
        fields.require_known()


_READ_NAMESPACES = ("adapter.", "llama.", "split.", "tokenizer.")
"""What llama.cpp computes by; keys elsewhere (``general.license``) describe the file."""
_INERT_TOKENS = (
    "cls",
    "mask",
    "middle",
    "prefix",
    "seperator",
    "suffix",
    "fim_mid",
    "fim_pad",
    "fim_pre",
    "fim_rep",
    "fim_sep",
    "fim_suf",
)
_INERT_KEYS = frozenset(
    {
        "llama.rope.scaling.finetuned",  # how the model was made
        "tokenizer.chat_templates",
        "tokenizer.huggingface.json",
        "tokenizer.ggml.scores",  # of other kinds of tokenizers
        "tokenizer.ggml.token_type_count",
        *(f"tokenizer.ggml.{token}_token_id" for token in _INERT_TOKENS),
    }
)
_INERT_PREFIXES = ("tokenizer.chat_template.",)  # templates for other uses


class Metadata:
    """The metadata of a GGUF file, which remember which of their keys were read.

    Args:
        source: the file, for messages.
        content: values by key.
    """

    def __init__(self, source: Path, content: Mapping[str, Any]) -> None:
        self.source = source
        self._content = content
        self._read: set[str] = set()

    def __contains__(self, name: str) -> bool:
        return name in self._content

    def get(self, name: str, kind: type[T], default: T | None = None) -> T:
        """Return the value of a key; the default if it is absent.

        Raises:
            ModelError: it is of another type, or absent without a default.
        """
        self._read.add(name)
        value: Any = self._content.get(name, default)
        # Python counts a bool as an int.
        is_number = isinstance(value, int) and not isinstance(value, bool)
        if kind is float and is_number:
            value = float(value)
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            problem = f"{name}={value!r}" if name in self._content else f"{name} is missing"
            raise ModelError(
                f"{self.source}: {problem}, expected {kind.__name__}; the file is damaged, or of"
                " another model"
            )
        return value

    def require(self, name: str, supported: Any) -> None:
        """Refuse a key with another value; one that is absent passes."""
        self._read.add(name)
        value = self._content.get(name, supported)
        if value != supported:
            raise ModelError(
                f"{self.source}: {name}={value!r} is not supported, only {supported!r}"
            )

    def require_known(self) -> None:
        """Refuse keys that were not read, unless they are known to have no effect.

        Raises:
            ModelError: names one.
        """
        for name in sorted(self._content.keys() - self._read - _INERT_KEYS):
            if name.startswith(_INERT_PREFIXES) or not name.startswith(_READ_NAMESPACES):
                continue
            raise ModelError(
                f"{self.source}: {name}={str(self._content[name])[:80]} is not known here, so the"
                " converted model may compute something else; convert from the original Hugging"
                " Face folder"
            )


def _read_tensors(reader: Any, fields: Metadata) -> tuple[dict[str, np.ndarray], np.ndarray | None]:
    """Return the weights under their Hugging Face names, and the factors of rotary frequencies.

    The factors are None if the file has none.
    """
    from gguf.quants import dequantize

    fields.require("split.count", 1)
    for name in ("split.no", "split.tensors.count"):
        if name in fields:
            fields.get(name, int)
    count = fields.get("llama.attention.head_count", int)
    kv_count = fields.get("llama.attention.head_count_kv", int, count)
    heads = {"attn_q": count, "attn_k": kv_count}  # of matrices whose rows llama.cpp reorders
    tensors: dict[str, np.ndarray] = {}
    rope_factors = None
    for tensor in reader.tensors:
        *block, kind, role = tensor.name.split(".")
        weight = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        is_layer = len(block) == 2 and block[0] == "blk" and kind in _LAYER_NAMES
        is_top = not block and kind in _TOP_NAMES
        if role == "weight" and is_layer:
            if kind in heads:
                weight = unpermute(weight, heads[kind])
            name = f"model.layers.{block[1]}.{_LAYER_NAMES[kind]}.weight"
            tensors[name] = np.ascontiguousarray(weight)
        elif role == "weight" and is_top:
            tensors[_TOP_NAMES[kind]] = np.ascontiguousarray(weight)
        elif tensor.name == "rope_freqs.weight":
            rope_factors = weight
        else:
            raise ModelError(
                f"{fields.source}: tensor {tensor.name!r} is not part of a Llama model"
            )
    return tensors, rope_factors


def unpermute(weight: np.ndarray, heads: int) -> np.ndarray:
    """Reorder [heads·h, D] from interleaved rotary pairs (llama.cpp) to halves (Hugging Face)."""
    rows, columns = weight.shape
    pairs = weight.reshape(heads, rows // heads // 2, 2, columns)
    return pairs.swapaxes(1, 2).reshape(rows, columns)


def _write_configs(
    fields: Metadata, target: Path, *, tied: bool, rope_factors: np.ndarray | None
) -> None:
    hidden = fields.get("llama.embedding_length", int)
    heads = fields.get("llama.attention.head_count", int)
    head_dim = fields.get("llama.attention.key_length", int, hidden // heads)
    fields.require("llama.attention.value_length", head_dim)
    fields.require("llama.rope.dimension_count", head_dim)
    fields.require("llama.attention.causal", True)
    fields.require("llama.expert_count", 0)
    fields.require("llama.expert_used_count", 0)
    tokens = fields.get("tokenizer.ggml.tokens", list)
    fields.require("llama.vocab_size", len(tokens))

    theta = fields.get("llama.rope.freq_base", float, 10000.0)
    # Stored as float32: without rounding, 1e-5 would be 9.99999974737875e-06.
    rms_norm_eps = float(f"{fields.get('llama.attention.layer_norm_rms_epsilon', float):.6g}")
    special = {
        "bos_token_id": fields.get("tokenizer.ggml.bos_token_id", int),
        "eos_token_id": _end_ids(fields),
        "pad_token_id": _optional_id(fields, "padding"),
    }
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": "float32",
        "vocab_size": len(tokens),
        "hidden_size": hidden,
        "intermediate_size": fields.get("llama.feed_forward_length", int),
        "num_hidden_layers": fields.get("llama.block_count", int),
        "num_attention_heads": heads,
        "num_key_value_heads": fields.get("llama.attention.head_count_kv", int, heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": fields.get("llama.context_length", int),
        "rms_norm_eps": rms_norm_eps,
        "rope_theta": theta,
        "rope_scaling": _read_scaling(fields, rope_factors, head_dim=head_dim, theta=theta),
        "tie_word_embeddings": tied,
        "attention_bias": False,
        "mlp_bias": False,
        **special,
    }
    (target / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    (target / "generation_config.json").write_text(json.dumps(special, indent=2) + "\n")


def _optional_id(fields: Metadata, name: str) -> int | None:
    key = f"tokenizer.ggml.{name}_token_id"
    if key not in fields:
        return None
    return fields.get(key, int)


def _end_ids(fields: Metadata) -> int | list[int]:
    """Return the ids that end a generation in llama.cpp.

    They end the text, a turn (``eot``) or a message (``eom``).
    """
    ids = [fields.get("tokenizer.ggml.eos_token_id", int)]
    for name in ("eot", "eom"):
        end_id = _optional_id(fields, name)
        if end_id is not None and end_id not in ids:
            ids.append(end_id)
    if len(ids) == 1:
        return ids[0]
    return ids


def _read_scaling(
    fields: Metadata, rope_factors: np.ndarray | None, *, head_dim: int, theta: float
) -> dict[str, Any] | None:
    """Return ``rope_scaling`` of a ``config.json``.

    Args:
        rope_factors: [h / 2], by which rotary frequencies are divided; None if there are none.
        head_dim: h.
        theta: base of the rotary embedding.

    Raises:
        ModelError: Hugging Face has no such scaling.
    """
    prefix = "llama.rope.scaling"
    kind = fields.get(f"{prefix}.type", str, "none")
    if "llama.rope.scale_linear" in fields:  # of old files
        factor = fields.get("llama.rope.scale_linear", float)
        if factor != 1:
            kind = "linear"
    else:
        factor = fields.get(f"{prefix}.factor", float, 1.0)
    for name in ("yarn_log_multiplier", "alpha"):
        fields.require(f"{prefix}.{name}", 0.0)

    if rope_factors is not None:
        if kind != "none":
            raise ModelError(
                f"{fields.source}: rope_freqs.weight and {prefix}.type={kind!r} scale positions"
                " twice"
            )
        return _llama3_scaling(fields, rope_factors, head_dim=head_dim, theta=theta)

    match kind:
        case "none":
            if factor != 1:
                raise ModelError(
                    f"{fields.source}: {prefix}.factor={factor:g} without a {prefix}.type"
                )
            return None
        case "linear":
            return {"rope_type": "linear", "factor": factor}
        case "yarn":
            fields.require(f"{prefix}.yarn_ext_factor", 1.0)
            fields.require(f"{prefix}.yarn_attn_factor", 1.0)
            sharpened = fields.get(f"{prefix}.attn_factor", float, 1.0)
            return {
                "rope_type": "yarn",
                "factor": factor,
                "original_max_position_embeddings": fields.get(
                    f"{prefix}.original_context_length", int
                ),
                "beta_fast": fields.get(f"{prefix}.yarn_beta_fast", float, 32.0),
                "beta_slow": fields.get(f"{prefix}.yarn_beta_slow", float, 1.0),
                "attention_factor": sharpened * (1 + 0.1 * math.log(factor)),
            }
    raise ModelError(
        f"{fields.source}: {prefix}.type={kind!r} is not supported, only 'linear' and 'yarn'"
    )


_LLAMA3 = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
"""Settings of all Llama 3.1 and 3.2 models; a file only holds the factors that they result in."""


def _llama3_scaling(
    fields: Metadata, rope_factors: np.ndarray, *, head_dim: int, theta: float
) -> dict[str, Any]:
    """Return the scaling of Llama 3.1 that has these factors; see :func:`_read_scaling`."""
    factor = float(rope_factors.max())
    wavelengths = 2 * np.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    low = _LLAMA3["low_freq_factor"]
    high = _LLAMA3["high_freq_factor"]
    turns = _LLAMA3["original_max_position_embeddings"] / wavelengths
    unscaled_share = np.clip((turns - low) / (high - low), 0, 1)
    expected = 1 / ((1 - unscaled_share) / factor + unscaled_share)

    has_shape = rope_factors.shape == expected.shape
    if not has_shape or not np.allclose(rope_factors, expected, rtol=1e-4):
        raise ModelError(
            f"{fields.source}: rope_freqs.weight is not the scaling of Llama 3.1; convert from the"
            " original Hugging Face folder"
        )
    return {"rope_type": "llama3", "factor": round(factor, 4), **_LLAMA3}


def _write_tokenizer(fields: Metadata, target: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, processors
    from transformers import PreTrainedTokenizerFast

    kind = fields.get("tokenizer.ggml.model", str)
    pre_tokenizer = fields.get("tokenizer.ggml.pre", str, "default")
    if kind != "gpt2" or pre_tokenizer not in _PRE_TOKENIZERS:
        known = sorted(_PRE_TOKENIZERS)
        raise ModelError(
            f"{fields.source}: tokenizer {kind!r} with pre-tokenizer {pre_tokenizer!r} is not"
            f" supported; known: {known}"
        )
    for name in ("add_eos_token", "add_sep_token", "add_space_prefix", "remove_extra_whitespaces"):
        fields.require(f"tokenizer.ggml.{name}", False)
    tokens = fields.get("tokenizer.ggml.tokens", list)
    kinds = fields.get("tokenizer.ggml.token_type", list)
    merges = [tuple(merge.split(" ")) for merge in fields.get("tokenizer.ggml.merges", list)]

    vocabulary = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = _PRE_TOKENIZERS[pre_tokenizer]()
    tokenizer.decoder = decoders.ByteLevel()

    control_tokens = []
    user_tokens = []
    for token, kind_of_token in zip(tokens, kinds, strict=True):
        if kind_of_token == _CONTROL_TOKEN:
            control_tokens.append(AddedToken(token, special=True, normalized=False))
        elif kind_of_token == _USER_TOKEN:
            user_tokens.append(AddedToken(token, special=False, normalized=False))
    tokenizer.add_special_tokens(control_tokens)
    tokenizer.add_tokens(user_tokens)

    def special_token(name: str) -> str | None:
        index = _optional_id(fields, name)
        if index is None:
            return None
        return tokens[index]

    bos = special_token("bos")
    if fields.get("tokenizer.ggml.add_bos_token", bool, False):
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, tokens.index(bos))]
        )

    fast_tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=bos,
        eos_token=special_token("eos"),
        pad_token=special_token("padding"),
        unk_token=special_token("unknown"),
        model_max_length=fields.get("llama.context_length", int),
        clean_up_tokenization_spaces=False,
    )
    if "tokenizer.chat_template" in fields:
        fast_tokenizer.chat_template = fields.get("tokenizer.chat_template", str)
    fast_tokenizer.save_pretrained(target)


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
