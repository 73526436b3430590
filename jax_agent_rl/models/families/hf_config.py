"""Reading Hugging Face's ``config.json``: typed fields, and the fields that all families share.

A reader takes :class:`Fields`, which remember what was read of them. A field that no reader looked
at cannot have an effect here, so it must be one that has none in the model either. :data:`INERT`
and ``ModelFamily.inert`` list those; any other is refused by name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from jax_agent_rl.errors import ModelError
from jax_agent_rl.models.config import (
    DecoderConfig,
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    Params,
    ProportionalScaling,
    Rope,
    Scaling,
    VisionConfig,
    YarnScaling,
)
from jax_agent_rl.models.tensors import Fp8Slice, Packed


class Fields:
    """An object of a ``config.json``, which remembers which of its fields were read.

    Args:
        path: where the object stands in the file, with a dot at the end; empty for the whole file.
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
        """Return the fields that nobody has read; the fields of a section are nested in it."""
        unread = {name: value for name, value in self._content.items() if name not in self._read}
        for name, section in self._sections.items():
            unread_in_section = section.unread()
            if unread_in_section:
                unread[name] = unread_in_section
        return unread


@dataclass(frozen=True, kw_only=True)
class ModelFamily:
    """A model family; ``docs/write/model.md`` tells how to add one.

    Attributes:
        model_types: values of ``model_type`` in ``config.json``.
        inert: fields that ``read`` leaves alone because they have no effect in this family, besides
            :data:`INERT`.
        names: Hugging Face's modules by parameter of a layer, where they differ from
            ``models.hf.LAYER``.
        packed: parameters of a layer that share a tensor, or are stored transposed; names without
            the layer's prefix.
        prefix: of the decoder's tensors.
        prefixes: from the beginning of tensor names in newer files to the one in published files.
        flatten: from a file with a ``text_config`` to one with all fields of the decoder at the
            top, which may be of another family; None if ``read`` takes files as they are.
        nest: from what ``write`` returned, with carried fields, to the file that is written; None
            if that is the file.
        left_out: beginnings of the names of tensors that a folder may hold, but the model does not
            have.
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
    flatten: Callable[[Mapping[str, Any]], Mapping[str, Any]] | None = None
    nest: Callable[[Mapping[str, Any]], dict[str, Any]] | None = None
    left_out: Callable[[DecoderConfig], tuple[str, ...]] | None = None
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
"""Fields about a file rather than its model: without effect, and not written again.

Fields that begin with ``_`` are treated in the same way.
"""
ROPE_SECTIONS = ("rope_scaling", "rope_parameters")
"""Where files hold the rotary settings; newer ones use the latter."""
INERT = BOOKKEEPING | {
    # token ids that only tokenizers and pipelines use
    "cls_token_id",
    "decoder_start_token_id",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "mask_token_id",
    "pad_token_id",
    "sep_token_id",
    "unk_token_id",
    # training: drawing weights, dropout, losses
    "attention_dropout",
    "attention_probs_dropout_prob",
    "classifier_dropout",
    "embd_pdrop",
    "gradient_checkpointing",
    "hidden_dropout",
    "hidden_dropout_prob",
    "initializer_factor",
    "initializer_range",
    "resid_pdrop",
    "router_aux_loss_coef",
    "router_jitter_noise",
    # how a library computes or returns the same numbers
    "attn_implementation",
    "cache_implementation",
    "chunk_size_feed_forward",
    "experts_implementation",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "output_scores",
    "pretraining_tp",
    "return_dict",
    "return_dict_in_generate",
    "tf_legacy_loss",
    "tie_encoder_decoder",
    "tie_last_hidden_states",
    "torchscript",
    "use_bfloat16",
    "use_cache",
    # other tasks, and the tokenizer
    "finetuning_task",
    "id2label",
    "label2id",
    "num_labels",
    "prefix",
    "problem_type",
    "task_specific_params",
    "max_sequence_length",
    "model_max_length",
    "tokenizer_class",
    # generation settings of old files
    "bad_words_ids",
    "begin_suppress_tokens",
    "diversity_penalty",
    "do_sample",
    "early_stopping",
    "encoder_no_repeat_ngram_size",
    "exponential_decay_length_penalty",
    "length_penalty",
    "max_length",
    "max_new_tokens",
    "min_length",
    "min_new_tokens",
    "no_repeat_ngram_size",
    "num_beam_groups",
    "num_beams",
    "num_return_sequences",
    "remove_invalid_values",
    "repetition_penalty",
    "suppress_tokens",
    "temperature",
    "top_k",
    "top_p",
    "typical_p",
    # marks of other tools
    "is_llama_config",
    "unsloth_fixed",
    "unsloth_version",
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
    """Refuse fields that were not read and may have an effect.

    Fields that are null, false or empty have none.

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
    """Return the unread fields that still hold when the model is written again."""
    carried: dict[str, Any] = {}
    for name, value in unread.items():
        if name in BOOKKEEPING or name in ROPE_SECTIONS or name.startswith("_"):
            continue
        # An inert object, such as id2label, has keys that are not fields.
        if isinstance(value, Mapping) and name not in INERT:
            section = carried_fields(value)
            if section:
                carried[name] = section
        else:
            carried[name] = value
    return carried


def merge_fields(raw: Mapping[str, Any], carried: Mapping[str, Any]) -> dict[str, Any]:
    """Return a ``config.json`` with the fields carried over from the file it was read from.

    Sections are merged field by field.
    """
    merged = dict(raw)
    for name, value in carried.items():
        section = merged.get(name)
        if isinstance(section, Mapping) and isinstance(value, Mapping):
            merged[name] = merge_fields(section, value)
        else:
            merged[name] = value
    return merged


def flat_fields(
    raw: Mapping[str, Any], model_type: str, *, left_out: Collection[str] = ()
) -> dict[str, Any]:
    """Return a ``config.json`` that has the text model's fields as ``text_config`` on one level.

    ``text_config`` describes the text model, so what it holds counts. Only the ids that end an
    answer are the top's where both have some: ``hf.load_config`` puts the ids of
    ``generation_config.json`` there. Null at the top says nothing.

    Args:
        model_type: of what is returned.
        left_out: fields at the top that are of no use to it, such as the towers'.

    Raises:
        ModelError: there is no ``text_config``, or the two levels disagree about ties.
    """
    text = raw.get("text_config")
    if not isinstance(text, Mapping):
        raise ModelError(
            f"config.json: text_config={text!r}, expected an object: the text model of a"
            f" {raw['model_type']}; download the model again"
        )
    top = {}
    for name, value in raw.items():
        if name != "text_config" and name not in left_out and value is not None:
            top[name] = value

    text_tied = text.get("tie_word_embeddings")
    if text_tied is None:
        text_tied = top.get("tie_word_embeddings")
    tied = top.get("tie_word_embeddings", text_tied)
    if tied != text_tied:
        raise ModelError(
            f"config.json: tie_word_embeddings={tied!r}, but text_config.tie_word_embeddings="
            f"{text_tied!r}; make them equal"
        )

    merged = {**top, **text, "model_type": model_type}
    if tied is not None:
        merged["tie_word_embeddings"] = tied
    if "eos_token_id" in top:
        merged["eos_token_id"] = top["eos_token_id"]
    return merged


def integer(config: Fields, name: str, default: int | None = None, *, least: int = 1) -> int:
    """Read an integer from ``least`` on; the default if absent or null."""
    value = config.get(name)
    if value is None:
        value = default
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        expected = "a positive integer" if least == 1 else f"an integer of at least {least}"
        raise bad_field(config, name, expected)
    return value


def number(config: Fields, name: str, default: float | None = None) -> float:
    """Read a positive number; the default if absent or null."""
    value = config.get(name)
    if value is None:
        value = default
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
        raise bad_field(config, name, "a positive number")
    return float(value)


def switch(config: Fields, name: str, default: bool) -> bool:
    """Read true or false; the default if absent or null."""
    value = config.get(name)
    if value is None:
        value = default
    if not isinstance(value, bool):
        raise bad_field(config, name, "true or false")
    return value


def token_ids(config: Fields, name: str, default: tuple[int, ...]) -> tuple[int, ...]:
    """Read a token id or a list of them; none if null."""
    value = config.get(name, default)
    if value is None:
        return ()
    ids = tuple(value) if isinstance(value, list | tuple) else (value,)
    for token_id in ids:
        if not isinstance(token_id, int) or isinstance(token_id, bool) or token_id < 0:
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
    problem = f"{name}={config[name]!r}" if name in config else f"{name} is missing"
    return ModelError(
        f"config.json: {config.path}{problem}, expected {expected}; correct the file or download"
        " the model again"
    )


@dataclass(frozen=True, kw_only=True)
class Defaults:
    """What transformers takes for fields that a family's file leaves out.

    Attributes:
        eos_token_ids: where the field is absent; null in a file means no id, as for
            ``bos_token_id``.
        num_kv_heads: None means the number of heads.
        head_dim: None means the heads' share of ``hidden_size``.
        max_positions: for ``max_position_embeddings``.
        intermediate_size: None means that the field is needed.
        tied: for ``tie_word_embeddings``.
        rope_theta: base of the rotary embedding.
    """

    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    num_kv_heads: int | None = None
    head_dim: int | None = None
    max_positions: int = 2048
    rms_norm_eps: float = 1e-6
    intermediate_size: int | None = None
    tied: bool = False
    rope_theta: float = 10000.0


def read_common(raw: Fields, defaults: Defaults, *, family: str | None = None) -> dict[str, Any]:
    """Read the arguments of :class:`DecoderConfig` that all families share, except ``rope``.

    Args:
        raw: a ``config.json``, or its section of the decoder.
        family: None means the ``model_type`` of ``raw``.
    """
    refuse(raw, **_FIXED)
    heads = integer(raw, "num_attention_heads")
    hidden = integer(raw, "hidden_size")

    # Only where a field is absent, the family's default holds; null is what it is in every family.
    default_kv_heads = heads
    if "num_key_value_heads" not in raw:
        default_kv_heads = defaults.num_kv_heads or heads
    default_head_dim = hidden // heads
    if "head_dim" not in raw:
        default_head_dim = defaults.head_dim or default_head_dim
    default_bos = () if defaults.bos_token_id is None else (defaults.bos_token_id,)

    return {
        "family": family or raw["model_type"],
        "vocab_size": integer(raw, "vocab_size"),
        "hidden_size": hidden,
        "intermediate_size": integer(raw, "intermediate_size", defaults.intermediate_size),
        "num_layers": integer(raw, "num_hidden_layers"),
        "num_heads": heads,
        "num_kv_heads": integer(raw, "num_key_value_heads", default_kv_heads),
        "head_dim": integer(raw, "head_dim", default_head_dim),
        "rms_norm_eps": number(raw, "rms_norm_eps", defaults.rms_norm_eps),
        "tie_word_embeddings": switch(raw, "tie_word_embeddings", defaults.tied),
        "max_position_embeddings": integer(raw, "max_position_embeddings", defaults.max_positions),
        "eos_token_ids": token_ids(raw, "eos_token_id", defaults.eos_token_ids),
        "bos_token_id": first_or_none(token_ids(raw, "bos_token_id", default_bos)),
    }


def first_or_none(ids: Sequence[int]) -> int | None:
    """Return the first of some ids; None if there are none."""
    return ids[0] if ids else None


FULL_ATTENTION = "full_attention"
SLIDING_ATTENTION = "sliding_attention"
LINEAR_ATTENTION = "linear_attention"


def all_but_every(nth: int, count: int) -> tuple[bool, ...]:
    """Return False for every ``nth`` of ``count`` layers, True for the others.

    >>> all_but_every(3, 4)
    (True, True, False, True)
    """
    return tuple((layer + 1) % nth != 0 for layer in range(count))


def read_layer_kinds(
    raw: Fields, count: int, *, default: tuple[bool, ...], kind: str = SLIDING_ATTENTION
) -> tuple[bool, ...]:
    """Read which of ``count`` layers are of a kind from ``layer_types``; the others are full ones.

    Args:
        default: if the field is absent or null.
        kind: what the file calls it.
    """
    kinds = raw.get("layer_types")
    if kinds is None:
        return default

    known = [FULL_ATTENTION, kind]
    is_list = isinstance(kinds, list) and len(kinds) == count
    if not is_list or any(name not in known for name in kinds):
        raise bad_field(raw, "layer_types", f"{count} of {known}")
    return tuple(name == kind for name in kinds)


def write_layer_kinds(config: DecoderConfig) -> list[str]:
    """Return ``layer_types`` of a ``config.json``."""
    kinds = []
    for layer in range(config.num_layers):
        if config.layer_kind(layer).mixer == "delta_net":
            kinds.append(LINEAR_ATTENTION)
        elif config.is_windowed(layer):
            kinds.append(SLIDING_ATTENTION)
        else:
            kinds.append(FULL_ATTENTION)
    return kinds


def write_common(config: DecoderConfig, architecture: str) -> dict[str, Any]:
    """Write the shared fields; ``write`` of a family adds its own."""
    if len(config.eos_token_ids) > 1:
        eos = list(config.eos_token_ids)
    else:
        eos = first_or_none(config.eos_token_ids)
    partial_rotary = {}
    if config.rope.partial_rotary != 1:
        partial_rotary["partial_rotary_factor"] = config.rope.partial_rotary
    return partial_rotary | {
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
    """Read the rotary settings of ``rope_scaling`` or ``rope_parameters``.

    Some may stand at the top of the file.

    Args:
        raw: a ``config.json``, or its section of the decoder.
        partial_rotary: fraction of a head that rotates by default; None if the family rotates whole
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
    """Read the rotary settings of one section, see :func:`read_rope`.

    Fields that the section lacks may stand at the top of the file.
    """
    top_theta = number(raw, "rope_theta", defaults.rope_theta)
    theta = number(section, "rope_theta", top_theta)
    top_fraction = number(raw, "partial_rotary_factor", partial_rotary or 1.0)
    fraction = number(section, "partial_rotary_factor", top_fraction)
    if partial_rotary is None and fraction != 1:
        holder = section if "partial_rotary_factor" in section else raw
        raise bad_field(holder, "partial_rotary_factor", "1: these models rotate whole heads")
    return Rope(theta=theta, scaling=_read_scaling(raw, section, defaults), partial_rotary=fraction)


def _read_scaling(raw: Fields, section: Fields, defaults: Defaults) -> Scaling | None:
    """Read how a section scales long contexts; None if it does not."""
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
            return Llama3Scaling(
                factor=number(section, "factor"),
                low_freq_factor=number(section, "low_freq_factor"),
                high_freq_factor=number(section, "high_freq_factor"),
                original_max_position_embeddings=_trained_positions(raw, section, None),
            )
        case "yarn":
            return _read_yarn(section, longest, _trained_positions(raw, section, longest))
        case "dynamic":
            top_trained = integer(raw, "max_trained_positions", longest)
            trained = integer(section, "max_trained_positions", top_trained)
            return DynamicScaling(
                factor=number(section, "factor"), trained_positions=trained, positions=longest
            )
    raise ModelError(
        f"config.json: rope_scaling type {kind!r} is not supported, only 'linear', 'llama3', 'yarn'"
        " and 'dynamic'"
    )


def _trained_positions(raw: Fields, section: Fields, default: float | None) -> float:
    """Read the context length before it was extended; the top of the file takes precedence."""
    name = "original_max_position_embeddings"
    if name in raw:
        return number(raw, name)
    return number(section, name, default)


def _read_yarn(section: Fields, longest: int, original: float) -> YarnScaling:
    factor = number(section, "factor", longest / original)
    sharpening: dict[str, float] = {}
    if section.get("attention_factor") is not None:
        sharpening["attention_factor"] = number(section, "attention_factor")
    for name in ("mscale", "mscale_all_dim"):
        # 0 is as good as none.
        if section.get(name):
            sharpening[name] = number(section, name)

    return YarnScaling(
        factor=factor,
        original_max_position_embeddings=original,
        beta_fast=number(section, "beta_fast", 32.0),
        beta_slow=number(section, "beta_slow", 1.0),
        truncate=switch(section, "truncate", True),
        **sharpening,
    )


def read_fp8(raw: Fields, *, fmt: str) -> None:
    """Check that weights are in FP8, in blocks, if they are quantized at all.

    ``models.tensors.Fp8Slice`` reads them.

    Args:
        raw: a ``config.json``, or its section of the decoder.
        fmt: what the family calls the type.
    """
    settings = raw.section("quantization_config")
    refuse(settings, quant_method="fp8", fmt=fmt, weight_block_size=[Fp8Slice.BLOCK] * 2)
    # Read only to count as known: activations are not quantized here, and the tensors' names say
    # which matrices are.
    settings.get("activation_scheme")
    settings.get("modules_to_not_convert")


def read_rope_sections(raw: Fields) -> tuple[Fields, Fields]:
    """Return the rotary settings of full layers, and of windowed ones.

    Older files have flat fields, newer ones a section per kind of layer. A flat ``rope_scaling`` is
    of full layers.
    """
    sections = raw.section("rope_parameters")
    full = sections.section("full_attention") or raw.section("rope_scaling")
    if "type" in full and "rope_type" not in full:  # transformers would scale nothing
        raise bad_field(full, "type", "its name rope_type")
    return full, sections.section("sliding_attention")


def write_ropes(config: DecoderConfig) -> dict[str, Any]:
    """Return ``rope_parameters`` with a section for each kind of layers."""
    sections = {}
    local_rope = config.local_rope or config.rope
    for kind, rope in ((FULL_ATTENTION, config.rope), (SLIDING_ATTENTION, local_rope)):
        scaling = write_scaling(rope) or {"rope_type": "default"}
        sections[kind] = {"rope_theta": rope.theta, **scaling}
    return sections


def write_scaling(rope: Rope) -> dict[str, Any] | None:
    """Return ``rope_scaling`` of a ``config.json``."""
    match rope.scaling:
        case None:
            return None
        case LinearScaling(factor=factor):
            return {"rope_type": "linear", "factor": factor}
        case Llama3Scaling() as scaling:
            return {"rope_type": "llama3"} | _scaling_fields(scaling)
        case YarnScaling() as scaling:
            return {"rope_type": "yarn"} | _scaling_fields(scaling)
        case DynamicScaling(factor=factor, trained_positions=trained):
            return {"rope_type": "dynamic", "factor": factor, "max_trained_positions": trained}
        case ProportionalScaling(fraction=fraction, factor=factor):
            return {
                "rope_type": "proportional",
                "partial_rotary_factor": fraction,
                "factor": factor,
            }


def _scaling_fields(scaling: Llama3Scaling | YarnScaling) -> dict[str, float]:
    """Return the fields that are set, under the same names.

    vLLM computes with ``mscale`` and ``mscale_all_dim``, not with the ``attention_factor`` that
    follows from them; so it is only written if it was read.
    """
    section: dict[str, float] = {}
    for name, value in asdict(scaling).items():
        if value is not None:
            section[name] = value

    # transformers warns of positions that are not an integer.
    positions = scaling.original_max_position_embeddings
    if positions == int(positions):
        section["original_max_position_embeddings"] = int(positions)
    return section
