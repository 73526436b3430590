"""Conversion of model files to Hugging Face folders: another precision, Llama models in GGUF, the quickstart's.

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
    require_new,
    whole_folder,
)

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
_CONTROL_TOKEN, _USER_TOKEN = 3, 4
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
    if source.suffix == ".gguf" and dtype == "float32":
        convert_gguf(source, target)
        return target
    if source.suffix != ".gguf":
        _change_dtype(source, target, target_dtype)
        return target
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
    """Return the type a ``--dtype`` option names; raise ModelError if it is not one of :data:`DTYPES`."""
    if name not in DTYPES:
        raise ModelError(f"--dtype {name!r} is not known; there are {', '.join(DTYPES)}")
    return DTYPES[name]


def convert_gguf(source: Path, target: Path) -> None:
    """Write ``config.json``, ``generation_config.json``, ``model.safetensors`` and tokenizer files into ``target``.

    Args:
        source: the file.
        target: a folder that does not exist or is empty.

    Raises:
        ModelError: the file is not of the Llama architecture, its tokenizer is of an unknown kind,
            or something in it is not known: it might change what the model computes.
    """
    try:
        from gguf import GGUFReader
    except ImportError:
        raise ModelError("reading GGUF files needs the package 'gguf': pip install gguf") from None
    reader = GGUFReader(source)
    fields = Metadata(source, {name: field.contents() for name, field in reader.fields.items()})
    architecture = fields.get("general.architecture", str)
    if architecture != "llama":
        raise ModelError(f"{source}: architecture {architecture!r} is not supported, only 'llama'")
    fields.require("general.type", "model")
    with whole_folder(target, error=ModelError) as folder:
        tensors, rope_factors = _read_tensors(reader, fields)
        save_tensors(tensors, folder / "model.safetensors")
        _write_configs(fields, folder, tied=HEAD not in tensors, rope_factors=rope_factors)
        _write_tokenizer(fields, folder)
        fields.require_known()


_READ_NAMESPACES = ("adapter.", "llama.", "split.", "tokenizer.")
"""What llama.cpp computes by; keys elsewhere (``general.license``) describe the file."""
_INERT_KEYS = frozenset(
    {
        "llama.rope.scaling.finetuned",  # how the model was made
        "tokenizer.chat_templates",
        "tokenizer.huggingface.json",
        *(
            f"tokenizer.ggml.{name}_token_id"
            for name in ("cls", "mask", "middle", "prefix", "seperator", "suffix")
        ),
        *(
            f"tokenizer.ggml.fim_{name}_token_id"
            for name in ("mid", "pad", "pre", "rep", "sep", "suf")
        ),
        "tokenizer.ggml.scores",  # of other kinds of tokenizers
        "tokenizer.ggml.token_type_count",
    }
)
_INERT_PREFIXES = ("tokenizer.chat_template.",)  # templates for other uses


class Metadata:
    """The metadata of a GGUF file, which remember what was read of them.

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
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if not isinstance(value, kind) or isinstance(value, bool) and kind is not bool:
            found = f"{name}={value!r}" if name in self._content else f"{name} is missing"
            raise ModelError(
                f"{self.source}: {found}, expected {kind.__name__}; the file is damaged, or of"
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
            if name.startswith(_READ_NAMESPACES) and not name.startswith(_INERT_PREFIXES):
                raise ModelError(
                    f"{self.source}: {name}={str(self._content[name])[:80]} is not known here, so"
                    " the converted model may compute something else; convert from the original"
                    " Hugging Face folder"
                )


def _read_tensors(reader: Any, fields: Metadata) -> tuple[dict[str, np.ndarray], np.ndarray | None]:
    """Return the weights under their Hugging Face names, and the factors of rotary frequencies, if there are any."""
    from gguf.quants import dequantize

    fields.require("split.count", 1)
    for name in ("split.no", "split.tensors.count"):
        if name in fields:
            fields.get(name, int)
    count = fields.get("llama.attention.head_count", int)
    heads = {"attn_q": count, "attn_k": fields.get("llama.attention.head_count_kv", int, count)}
    tensors: dict[str, np.ndarray] = {}
    rope_factors = None
    for tensor in reader.tensors:
        *block, kind, role = tensor.name.split(".")
        weight = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        is_layer = len(block) == 2 and block[0] == "blk" and kind in _LAYER_NAMES
        if role == "weight" and is_layer:
            if kind in heads:
                weight = unpermute(weight, heads[kind])
            tensors[f"model.layers.{block[1]}.{_LAYER_NAMES[kind]}.weight"] = np.ascontiguousarray(
                weight
            )
        elif role == "weight" and not block and kind in _TOP_NAMES:
            tensors[_TOP_NAMES[kind]] = np.ascontiguousarray(weight)
        elif tensor.name == "rope_freqs.weight":
            rope_factors = weight
        else:
            raise ModelError(
                f"{fields.source}: tensor {tensor.name!r} is not part of a Llama model"
            )
    return tensors, rope_factors


def unpermute(weight: np.ndarray, heads: int) -> np.ndarray:
    """Reorder [heads·h, D] from interleaved rotary pairs (llama.cpp) to consecutive halves (Hugging Face)."""
    rows, columns = weight.shape
    return (
        weight.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)
    )


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
        "rms_norm_eps": float(f"{fields.get('llama.attention.layer_norm_rms_epsilon', float):.6g}"),
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
    return fields.get(key, int) if key in fields else None


def _end_ids(fields: Metadata) -> int | list[int]:
    """Return the ids that end a generation in llama.cpp: of the text, of a turn and of a message."""
    ids = [fields.get("tokenizer.ggml.eos_token_id", int)]
    for name in ("eot", "eom"):
        found = _optional_id(fields, name)
        if found is not None and found not in ids:
            ids.append(found)
    return ids[0] if len(ids) == 1 else ids


def _read_scaling(
    fields: Metadata, rope_factors: np.ndarray | None, *, head_dim: int, theta: float
) -> dict[str, Any] | None:
    """Return ``rope_scaling`` of a ``config.json``.

    Args:
        fields: of the file.
        rope_factors: [h / 2], by which rotary frequencies are divided; None: by nothing.
        head_dim: h.
        theta: base of the rotary embedding.

    Raises:
        ModelError: Hugging Face has no such scaling.
    """
    prefix = "llama.rope.scaling"
    kind = fields.get(f"{prefix}.type", str, "none")
    if "llama.rope.scale_linear" in fields:  # of old files
        factor = fields.get("llama.rope.scale_linear", float)
        kind = "linear" if factor != 1 else kind
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
"""Of all Llama 3.1 and 3.2 models; the file has no other trace of it than its effect."""


def _llama3_scaling(
    fields: Metadata, rope_factors: np.ndarray, *, head_dim: int, theta: float
) -> dict[str, Any]:
    """Return the scaling of Llama 3.1 that has these factors; see :func:`_read_scaling`."""
    factor = float(rope_factors.max())
    wavelengths = 2 * np.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    low, high = _LLAMA3["low_freq_factor"], _LLAMA3["high_freq_factor"]
    smooth = np.clip(
        (_LLAMA3["original_max_position_embeddings"] / wavelengths - low) / (high - low), 0, 1
    )
    expected = 1 / ((1 - smooth) / factor + smooth)
    if rope_factors.shape != expected.shape or not np.allclose(rope_factors, expected, rtol=1e-4):
        raise ModelError(
            f"{fields.source}: rope_freqs.weight is not the scaling of Llama 3.1; convert from the"
            " original Hugging Face folder"
        )
    return {"rope_type": "llama3", "factor": round(factor, 4), **_LLAMA3}


def _write_tokenizer(fields: Metadata, target: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, processors
    from transformers import PreTrainedTokenizerFast

    kind = fields.get("tokenizer.ggml.model", str)
    pre = fields.get("tokenizer.ggml.pre", str, "default")
    if kind != "gpt2" or pre not in _PRE_TOKENIZERS:
        known = sorted(_PRE_TOKENIZERS)
        raise ModelError(
            f"{fields.source}: tokenizer {kind!r} with pre-tokenizer {pre!r} is not supported;"
            f" known: {known}"
        )
    for name in ("add_eos_token", "add_sep_token", "add_space_prefix", "remove_extra_whitespaces"):
        fields.require(f"tokenizer.ggml.{name}", False)
    tokens = fields.get("tokenizer.ggml.tokens", list)
    kinds = fields.get("tokenizer.ggml.token_type", list)
    merges = [tuple(merge.split(" ")) for merge in fields.get("tokenizer.ggml.merges", list)]
    tokenizer = Tokenizer(
        models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges)
    )
    tokenizer.pre_tokenizer = _PRE_TOKENIZERS[pre]()
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
        return None if index is None else tokens[index]

    bos = special_token("bos")
    if fields.get("tokenizer.ggml.add_bos_token", bool, False):
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, tokens.index(bos))]
        )
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=bos,
        eos_token=special_token("eos"),
        pad_token=special_token("padding"),
        unk_token=special_token("unknown"),
        model_max_length=fields.get("llama.context_length", int),
        clean_up_tokenization_spaces=False,
    )
    if "tokenizer.chat_template" in fields:
        wrapped.chat_template = fields.get("tokenizer.chat_template", str)
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
