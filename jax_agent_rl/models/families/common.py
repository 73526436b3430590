"""Reading Hugging Face's ``config.json``: typed fields with named errors, and the fields all families share.

A reader takes :class:`Fields`, which remember what was read of them. A field that no reader looked
at cannot have an effect here, so it must be one that has none in the model either. :data:`INERT`
and ``ModelFamily.inert`` list those; any other is refused by name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from jax_agent_rl.errors import ModelError
from jax_agent_rl.models.config import (
    DecoderConfig,
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    Params,
    Rope,
    Scaling,
    VisionConfig,
    YarnScaling,
)
from jax_agent_rl.models.tensors import Packed


class Fields:
    """An object of a ``config.json``, which remembers which of its fields were read.

    Args:
        content: the object.
        path: where it stands in the file, with a dot at the end; empty for the whole file.
    """

    def __init__(self, content: Mapping[str, Any], path: str = "") -> None:
        self.path = path
        self._content = content
        self._read: set[str] = set()
        self._sections: dict[str, Fields] = {}

    def __contains__(self, name: str) -> bool:
        """Return whether there is such a field, without reading it."""
        return name in self._content

    def __bool__(self) -> bool:
        return bool(self._content)

    def __getitem__(self, name: str) -> Any:
        self._read.add(name)
        return self._content[name]

    def get(self, name: str, default: Any = None) -> Any:
        """Read a field; the default if it is absent."""
        self._read.add(name)
        return self._content.get(name, default)

    def section(self, name: str) -> Fields:
        """Read an object; empty if absent or null."""
        if name not in self._sections:
            value = self.get(name) or {}
            if not isinstance(value, Mapping):
                raise bad_field(self, name, "an object or null")
            self._sections[name] = Fields(value, f"{self.path}{name}.")
        return self._sections[name]

    def unread(self) -> dict[str, Any]:
        """Return the fields that nobody has read, those of sections within sections."""
        left = {name: value for name, value in self._content.items() if name not in self._read}
        for name, section in self._sections.items():
            inner = section.unread()
            if inner:
                left[name] = inner
        return left


@dataclass(frozen=True, kw_only=True)
class ModelFamily:
    """A model family; ``docs/write/model.md`` tells how to add one.

    Attributes:
        model_types: of ``config.json``.
        read: parses a ``config.json``.
        write: writes one.
        inert: fields that ``read`` leaves alone because they have no effect in this family, besides
            :data:`INERT`.
        names: Hugging Face's modules by parameter of a layer, where they differ from
            ``models.hf.LAYER``.
        packed: parameters of a layer that share a tensor, or are stored transposed; names without
            the layer's prefix.
        prefix: of the decoder's tensors.
        prefixes: how tensor names of newer files begin, and how published ones do.
        vision_names: where the vision tower's parameters are stored, in the shape of
            ``params["vision"]``.
    """

    model_types: tuple[str, ...]
    read: Callable[[Fields], DecoderConfig]
    write: Callable[[DecoderConfig], dict[str, Any]]
    inert: Collection[str] = ()
    names: Mapping[str, str] = field(default_factory=dict)
    packed: Mapping[str, Packed] = field(default_factory=dict)
    prefix: str = "model."
    prefixes: Mapping[str, str] = field(default_factory=dict)
    vision_names: Callable[[VisionConfig], Params] | None = None


BOOKKEEPING = frozenset(
    {
        "architectures",
        "auto_map",
        "dtype",
        "model_type",
        "torch_dtype",
        "transformers_version",
        "transformers.js_config",
    }
)
"""Fields about a file rather than its model: without effect, and not written again. So are those
that begin with _."""
ROPE_SECTIONS = ("rope_scaling", "rope_parameters")
"""Where files hold the rotary settings; newer ones use the latter."""
INERT = BOOKKEEPING | {
    # token ids that only tokenizers and pipelines use
    *(
        "cls_token_id",
        "decoder_start_token_id",
        "forced_bos_token_id",
        "forced_eos_token_id",
        "mask_token_id",
    ),
    *("pad_token_id", "sep_token_id", "unk_token_id"),
    # training: drawing weights, dropout, losses
    *(
        "attention_dropout",
        "attention_probs_dropout_prob",
        "classifier_dropout",
        "embd_pdrop",
        "gradient_checkpointing",
    ),
    *(
        "hidden_dropout",
        "hidden_dropout_prob",
        "initializer_factor",
        "initializer_range",
        "resid_pdrop",
    ),
    *("router_aux_loss_coef", "router_jitter_noise"),
    # how a library computes or returns the same numbers
    *(
        "attn_implementation",
        "cache_implementation",
        "chunk_size_feed_forward",
        "experts_implementation",
    ),
    *(
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "output_scores",
        "pretraining_tp",
    ),
    *(
        "return_dict",
        "return_dict_in_generate",
        "tf_legacy_loss",
        "tie_encoder_decoder",
        "tie_last_hidden_states",
    ),
    *("torchscript", "use_bfloat16", "use_cache"),
    # other tasks, and the tokenizer
    *(
        "finetuning_task",
        "id2label",
        "label2id",
        "num_labels",
        "prefix",
        "problem_type",
        "task_specific_params",
    ),
    *("max_sequence_length", "model_max_length", "tokenizer_class"),
    # generation settings of old files
    *("bad_words_ids", "begin_suppress_tokens", "diversity_penalty", "do_sample", "early_stopping"),
    *(
        "encoder_no_repeat_ngram_size",
        "exponential_decay_length_penalty",
        "length_penalty",
        "max_length",
    ),
    *(
        "max_new_tokens",
        "min_length",
        "min_new_tokens",
        "no_repeat_ngram_size",
        "num_beam_groups",
        "num_beams",
    ),
    *(
        "num_return_sequences",
        "remove_invalid_values",
        "repetition_penalty",
        "suppress_tokens",
        "temperature",
    ),
    *("top_k", "top_p", "typical_p"),
    # marks of other tools
    *("is_llama_config", "unsloth_fixed", "unsloth_version"),
}
"""Fields without effect on what a model computes, in every family and section."""
_FIXED = {
    "add_cross_attention": False,
    "is_causal": True,
    "is_encoder_decoder": False,
    "pruned_heads": {},
    "rope_interleaved": False,
}
"""Fields of every family with one supported value."""


def refuse_unknown(unread: Mapping[str, Any], inert: Collection[str], path: str = "") -> None:
    """Refuse fields that were not read, unless they are known to have no effect, or are null, false or empty.

    Args:
        unread: see :meth:`Fields.unread`.
        inert: fields without effect in this family, besides :data:`INERT`.
        path: of the section, with a dot at the end.

    Raises:
        ModelError: names one.
    """
    for name, value in unread.items():
        if name in INERT or name in inert or name.startswith("_") or not value:
            continue
        if isinstance(value, Mapping):
            refuse_unknown(value, inert, f"{path}{name}.")
            continue
        raise ModelError(
            f"config.json: {path}{name}={value!r} is not known here, so this model may compute"
            " something else than it would; remove the field from the file if it has no effect, or"
            " see docs/write/model.md"
        )


def carried_fields(unread: Mapping[str, Any]) -> dict[str, Any]:
    """Return what was not read and still holds of a model that is written again."""
    kept: dict[str, Any] = {}
    for name, value in unread.items():
        if name in BOOKKEEPING or name in ROPE_SECTIONS or name.startswith("_"):
            continue
        is_section = (
            isinstance(value, Mapping) and name not in INERT
        )  # what is inert holds no fields of ours
        kept[name] = carried_fields(value) if is_section else value
    return kept


def merge_fields(written: Mapping[str, Any], carried: Mapping[str, Any]) -> dict[str, Any]:
    """Return a ``config.json`` with the fields carried over from the file it was read from, section by section."""
    merged = dict(written)
    for name, value in carried.items():
        inner = merged.get(name)
        if isinstance(inner, Mapping) and isinstance(value, Mapping):
            merged[name] = merge_fields(inner, value)
        else:
            merged[name] = value
    return merged


_LLAMA3_FIELDS = (
    "factor",
    "low_freq_factor",
    "high_freq_factor",
    "original_max_position_embeddings",
)


def integer(config: Fields, name: str, default: int | None = None) -> int:
    """Read a positive integer; the default if absent or null."""
    value = config.get(name)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise bad_field(config, name, "a positive integer")
    return value


def number(config: Fields, name: str, default: float | None = None) -> float:
    """Read a positive number; the default if absent or null."""
    value = config.get(name)
    value = default if value is None else value
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
        raise bad_field(config, name, "a positive number")
    return float(value)


def switch(config: Fields, name: str, default: bool) -> bool:
    """Read true or false; the default if absent or null."""
    value = config.get(name)
    value = default if value is None else value
    if not isinstance(value, bool):
        raise bad_field(config, name, "true or false")
    return value


def token_ids(config: Fields, name: str, default: tuple[int, ...]) -> tuple[int, ...]:
    """Read a token id or a list of them; none if null."""
    value = config.get(name, default)
    ids = tuple(value) if isinstance(value, list | tuple) else () if value is None else (value,)
    if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
        raise bad_field(config, name, "a token id, a list of them, or null")
    return ids


def refuse(config: Fields, **expected: Any) -> None:
    """Refuse fields with values other than the supported ones; absent and null fields pass.

    Raises:
        ModelError: a field has another value.
    """
    for name, value in expected.items():
        if config.get(name) not in (None, value):
            raise ModelError(
                f"config.json: {config.path}{name}={config[name]!r} is not supported, only"
                f" {value!r}"
            )


def bad_field(config: Fields, name: str, expected: str) -> ModelError:
    """Make the error for a field that is missing or of a wrong type."""
    found = f"{name}={config[name]!r}" if name in config else f"{name} is missing"
    return ModelError(
        f"config.json: {config.path}{found}, expected {expected}; correct the file or download the"
        " model again"
    )


@dataclass(frozen=True, kw_only=True)
class Defaults:
    """What transformers takes for fields that a family's file leaves out.

    Attributes:
        eos_token_ids, bos_token_id: where they are absent; null is none.
        num_kv_heads, head_dim: None: the number of heads, and their share of ``hidden_size``.
        max_positions: of ``max_position_embeddings``.
        rms_norm_eps: of the norms.
        tied: of ``tie_word_embeddings``.
        rope_theta: base of the rotary embedding.
    """

    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    num_kv_heads: int | None = None
    head_dim: int | None = None
    max_positions: int = 2048
    rms_norm_eps: float = 1e-6
    tied: bool = False
    rope_theta: float = 10000.0


def read_common(raw: Fields, defaults: Defaults, *, family: str | None = None) -> dict[str, Any]:
    """Read the arguments of :class:`DecoderConfig` that all families share, except ``rope``.

    Args:
        raw: a ``config.json``, or its section of the decoder.
        defaults: of the family.
        family: None: the ``model_type`` of ``raw``.
    """
    refuse(raw, **_FIXED)
    heads = integer(raw, "num_attention_heads")
    hidden = integer(raw, "hidden_size")
    # Only an absent field has the family's default; null is none of its own.
    kv_heads = defaults.num_kv_heads if "num_key_value_heads" not in raw else None
    head_dim = defaults.head_dim if "head_dim" not in raw else None
    bos = () if defaults.bos_token_id is None else (defaults.bos_token_id,)
    return {
        "family": family or raw["model_type"],
        "vocab_size": integer(raw, "vocab_size"),
        "hidden_size": hidden,
        "intermediate_size": integer(raw, "intermediate_size"),
        "num_layers": integer(raw, "num_hidden_layers"),
        "num_heads": heads,
        "num_kv_heads": integer(raw, "num_key_value_heads", kv_heads or heads),
        "head_dim": integer(raw, "head_dim", head_dim or hidden // heads),
        "rms_norm_eps": number(raw, "rms_norm_eps", defaults.rms_norm_eps),
        "tie_word_embeddings": switch(raw, "tie_word_embeddings", defaults.tied),
        "max_position_embeddings": integer(raw, "max_position_embeddings", defaults.max_positions),
        "eos_token_ids": token_ids(raw, "eos_token_id", defaults.eos_token_ids),
        "bos_token_id": next(iter(token_ids(raw, "bos_token_id", bos)), None),
    }


_LAYER_KINDS = ("full_attention", "sliding_attention")


def read_layer_kinds(raw: Fields, count: int, *, default: tuple[bool, ...]) -> tuple[bool, ...]:
    """Read which of ``count`` layers are windowed from ``layer_types``; the default if absent or null."""
    kinds = raw.get("layer_types")
    if kinds is None:
        return default
    if (
        not isinstance(kinds, list)
        or len(kinds) != count
        or any(kind not in _LAYER_KINDS for kind in kinds)
    ):
        raise bad_field(raw, "layer_types", f"{count} of {list(_LAYER_KINDS)}")
    return tuple(kind == "sliding_attention" for kind in kinds)


def write_layer_kinds(config: DecoderConfig) -> list[str]:
    """Return ``layer_types`` of a ``config.json``."""
    return [_LAYER_KINDS[config.is_windowed(i)] for i in range(config.num_layers)]


def write_common(config: DecoderConfig, architecture: str) -> dict[str, Any]:
    """Write the shared fields; ``write`` of a family adds its own."""
    eos = (
        list(config.eos_token_ids)
        if len(config.eos_token_ids) > 1
        else next(iter(config.eos_token_ids), None)
    )
    partial = (
        {}
        if config.rope.partial_rotary == 1
        else {"partial_rotary_factor": config.rope.partial_rotary}
    )
    return partial | {
        "architectures": [architecture],
        "model_type": config.family,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "rope_theta": config.rope.theta,
        "rope_scaling": write_scaling(config.rope),
        "rms_norm_eps": config.rms_norm_eps,
        "tie_word_embeddings": config.tie_word_embeddings,
        "max_position_embeddings": config.max_position_embeddings,
        "eos_token_id": eos,
        "bos_token_id": config.bos_token_id,
    }


def read_rope(raw: Fields, defaults: Defaults, *, partial_rotary: float | None = None) -> Rope:
    """Read the rotary settings of ``rope_scaling`` or ``rope_parameters``, and those at the top of a file.

    Args:
        raw: a ``config.json``, or its section of the decoder.
        defaults: of the family.
        partial_rotary: fraction of a head that rotates by default; None: the family rotates whole
            heads.

    Raises:
        ModelError: the kind of scaling is not implemented, or the two sections differ.
    """
    sections = [raw.section(name) for name in ROPE_SECTIONS]
    ropes = [
        read_rope_section(raw, section, defaults, partial_rotary=partial_rotary)
        for section in sections
        if section
    ]
    if not ropes:
        return read_rope_section(raw, sections[0], defaults, partial_rotary=partial_rotary)
    if len(set(ropes)) > 1:
        raise ModelError(
            f"config.json: {raw.path}rope_scaling={raw['rope_scaling']!r} and rope_parameters="
            f"{raw['rope_parameters']!r} differ; remove one of them"
        )
    return ropes[0]


def read_rope_section(
    raw: Fields, section: Fields, defaults: Defaults, *, partial_rotary: float | None = None
) -> Rope:
    """Read the rotary settings of one section; what it lacks may stand at the top. See :func:`read_rope`."""
    theta = number(section, "rope_theta", number(raw, "rope_theta", defaults.rope_theta))
    fraction = number(
        section,
        "partial_rotary_factor",
        number(raw, "partial_rotary_factor", partial_rotary or 1.0),
    )
    if partial_rotary is None and fraction != 1:
        where = section if "partial_rotary_factor" in section else raw
        raise bad_field(where, "partial_rotary_factor", "1: these models rotate whole heads")
    return Rope(theta=theta, scaling=_read_scaling(raw, section, defaults), partial_rotary=fraction)


def _read_scaling(raw: Fields, section: Fields, defaults: Defaults) -> Scaling | None:
    old_name = section.get("type")
    kind = section.get("rope_type") or old_name or "default"
    if old_name not in (None, kind):
        raise bad_field(section, "type", f"{kind!r}, which rope_type is")
    longest = integer(raw, "max_position_embeddings", defaults.max_positions)
    match kind:
        case "default":
            return None
        case "linear":
            return LinearScaling(factor=number(section, "factor"))
        case "llama3":
            others = {name: number(section, name) for name in _LLAMA3_FIELDS[:-1]}
            return Llama3Scaling(
                **others, original_max_position_embeddings=_trained_positions(raw, section, None)
            )
        case "yarn":
            return _read_yarn(section, longest, _trained_positions(raw, section, longest))
        case "dynamic":
            trained = integer(
                section, "max_trained_positions", integer(raw, "max_trained_positions", longest)
            )
            return DynamicScaling(
                factor=number(section, "factor"), trained_positions=trained, positions=longest
            )
    raise ModelError(
        f"config.json: rope_scaling type {kind!r} is not supported, only 'linear', 'llama3', 'yarn'"
        " and 'dynamic'"
    )


def _trained_positions(raw: Fields, section: Fields, default: float | None) -> float:
    """Read the context length of the training before; at the top of the file it takes precedence."""
    name = "original_max_position_embeddings"
    return number(raw, name) if name in raw else number(section, name, default)


def _read_yarn(section: Fields, longest: int, original: float) -> YarnScaling:
    factor = number(section, "factor", longest / original)
    given = section.get("attention_factor")
    attention_factor = None if given is None else number(section, "attention_factor")
    scales = [section.get(name) for name in ("mscale", "mscale_all_dim")]
    if given is None and all(scales):
        stretched = [
            0.1 * number(section, name) * math.log(factor) + 1
            for name in ("mscale", "mscale_all_dim")
        ]
        attention_factor = stretched[0] / stretched[1]
    return YarnScaling(
        factor=factor,
        original_max_position_embeddings=original,
        beta_fast=number(section, "beta_fast", 32.0),
        beta_slow=number(section, "beta_slow", 1.0),
        attention_factor=attention_factor,
        truncate=switch(section, "truncate", True),
    )


def write_scaling(rope: Rope) -> dict[str, Any] | None:
    """Return ``rope_scaling`` of a ``config.json``."""
    match rope.scaling:
        case None:
            return None
        case LinearScaling(factor=factor):
            return {"rope_type": "linear", "factor": factor}
        case Llama3Scaling() as scaling:
            return {"rope_type": "llama3"} | {
                name: getattr(scaling, name) for name in _LLAMA3_FIELDS
            }
        case YarnScaling() as scaling:
            fields = {name: value for name, value in asdict(scaling).items() if value is not None}
            return {"rope_type": "yarn"} | fields
        case DynamicScaling(factor=factor, trained_positions=trained):
            return {"rope_type": "dynamic", "factor": factor, "max_trained_positions": trained}
