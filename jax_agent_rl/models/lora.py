"""Low-rank adapters, W + scale B A, not multiplied out, and PEFT's files.

See Hu et al. 2021, LoRA, arXiv 2106.09685. The base may be quantized (Dettmers et al. 2023, QLoRA,
arXiv 2305.14314) and is then dequantized layer by layer. An adapter's files are
``adapter_config.json`` and ``adapter_model.safetensors``.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load_file

from jax_agent_rl.config.learner import LoraConfig, LoraTarget
from jax_agent_rl.errors import ConfigError, ModelError
from jax_agent_rl.models.config import DecoderConfig, Params
from jax_agent_rl.models.families import FAMILIES
from jax_agent_rl.models.hf import tensor_names
from jax_agent_rl.models.identity import WEIGHTS, model_fingerprints
from jax_agent_rl.models.parameters import PARAMETERS
from jax_agent_rl.models.tensors import require_finite, save_tensors
from jax_agent_rl.utils.files import replacing_folder
from jax_agent_rl.utils.packages import import_installed, install_command

TILE = 32  # values that share one scale


class LoRA(nnx.Module):
    """A low-rank addition to a weight, ``scale * b @ a``; stacked over layers or of one.

    Args:
        a: [r, in].
        b: [out, r].
        scale: alpha / r.
    """

    def __init__(self, a: jax.Array, b: jax.Array, *, scale: float) -> None:
        self.a = nnx.LoRAParam(a)
        self.b = nnx.LoRAParam(b)
        self.scale = scale

    def __call__(self, x: jax.Array) -> jax.Array:
        """Return ``scale * x @ (b a).T`` for x [.., in]."""
        low = jnp.einsum("...d,rd->...r", x, self.a[...])
        return jnp.einsum("...r,or->...o", low, self.b[...]) * self.scale

    def merged(self, base: Any) -> jax.Array:
        """Return a stack of weights [L, out, in] with the addition, float32."""
        low_rank = jnp.einsum(
            "lor,lri->loi", self.b[...], self.a[...], preferred_element_type=jnp.float32
        )
        return restore(base).astype(jnp.float32) + self.scale * low_rank


def quantize(weight: jax.Array, kind: Literal["int8", "nf4"]) -> Any:
    """Quantize a stack [L, out, in] to 8 or 4 bits, with a scale per 32 values along ``in``.

    Raises:
        ConfigError: qwix is not installed, or ``in`` is not a multiple of 32.
    """
    try:
        qwix = import_installed("qwix")
    except ImportError:
        raise ConfigError(
            f"learner.lora.quantize={kind} needs the package qwix: {install_command('qlora')}"
        ) from None
    if weight.shape[-1] % TILE:
        raise ConfigError(
            f"learner.lora.quantize={kind}: a weight of {weight.shape[-1]} inputs does not divide"
            f" into tiles of {TILE}; set learner.lora.quantize=none for this model"
        )
    return qwix.quantize(weight, kind, channelwise_axes=[0, 1], tiled_axes={2: TILE})


def restore(weight: Any) -> jax.Array:
    """Return a weight in floats, quantized or not."""
    if isinstance(weight, jax.Array):
        return weight
    import qwix

    return qwix.dequantize(weight)


ADAPTABLE = frozenset(
    name
    for name, parameter in PARAMETERS.items()
    if parameter.is_matrix and not parameter.is_of_experts
)
"""Matrices of the parameter tree that engines adapt."""
TARGETS: Mapping[LoraTarget, tuple[str, ...]] = {
    "q_proj": ("q", "global_q"),
    "k_proj": ("k", "global_k"),
    "v_proj": ("v", "global_v"),
    "q_a_proj": ("q_a",),
    "q_b_proj": ("q_b",),
    "kv_a_proj_with_mqa": ("kv_a",),
    "kv_b_proj": ("kv_b",),
    "o_proj": ("o", "global_o"),
    "gate_proj": ("gate", "shared_gate", "wide_gate"),
    "up_proj": ("up", "shared_up", "wide_up"),
    "down_proj": ("down", "shared_down", "wide_down"),
    "per_layer_input_gate": ("per_layer_gate",),
    "per_layer_projection": ("per_layer_projection",),
    "in_proj_qkv": ("delta_qkv",),
    "in_proj_z": ("delta_z",),
    "in_proj_b": ("delta_b",),
    "in_proj_a": ("delta_a",),
    "in_proj_qkvz": ("delta_qkvz",),
    "in_proj_ba": ("delta_ba",),
    "out_proj": ("delta_out",),
}
"""``ADAPTABLE`` by the last part of Hugging Face's names: PEFT adapts all that a target names."""


def linear_targets(model: DecoderConfig) -> tuple[LoraTarget, ...]:
    """Return the targets that a model has, without those it stores in one matrix with others."""
    layers = model.parameter_shapes()["layers"].keys()
    packed = FAMILIES[model.family].packed.keys()
    targets = []
    for target, names in TARGETS.items():
        present = layers & set(names)
        if present and not present & packed:
            targets.append(target)
    return tuple(targets)


def adapted_targets(lora: LoraConfig, model: DecoderConfig) -> tuple[LoraTarget, ...]:
    """Return the targets by name."""
    if lora.targets == "all-linear":
        return linear_targets(model)
    return lora.targets


def describe_adapters(lora: LoraConfig, model: DecoderConfig) -> str:
    """Return a line that names the linear layers with adapters, and those without."""
    adapted = adapted_targets(lora, model)
    layers = model.parameter_shapes()["layers"].keys()
    frozen: list[str] = []
    for target, names in TARGETS.items():
        if layers & set(names) and target not in adapted:
            frozen.append(target)
    if model.experts is not None:
        frozen.append("experts")

    text = f"adapters of rank {lora.rank} on {', '.join(adapted)}"
    if frozen:
        text += f"; none on {', '.join(frozen)}"
    return text


def target_parameters(lora: LoraConfig, model: DecoderConfig) -> dict[LoraTarget, list[str]]:
    """Return the model's parameters that each of the targets names."""
    layers = model.parameter_shapes()["layers"]
    parameters = {}
    for target in adapted_targets(lora, model):
        parameters[target] = [name for name in TARGETS[target] if name in layers]
    return parameters


@dataclass(frozen=True, kw_only=True)
class PeftAdapter:
    """A LoRA adapter read from disk; float32 on the host.

    Attributes:
        rank: r.
        weights: for each adapted matrix of the parameter tree (``q``, ``down``, …) ``a`` [L, r, in]
            and ``b`` [L, out, r]; the scale alpha / r is multiplied into ``b``. A layer without an
            adapter has zeros.
    """

    rank: int
    weights: Mapping[str, tuple[np.ndarray, np.ndarray]]


_PLAIN_VALUES: Mapping[str, tuple[Any, ...]] = {
    "bias": ("none",),
    # Those that leave the base as it is; PiSSA, OLoRA, CorDA, LoftQ and LoRA-GA change it before
    # they train.
    "init_lora_weights": (True, False, "eva", "gaussian", "orthogonal"),
    "peft_type": ("LORA",),
}
"""Values of ``adapter_config.json`` that plain LoRA has, besides null, false and empty ones."""
_INERT_FIELDS = frozenset(
    {
        "auto_mapping",
        "base_model_name_or_path",
        "inference_mode",
        "peft_version",
        "revision",
        "task_type",
        # which modules were adapted, as the tensors say, and how they were trained
        "exclude_modules",
        "layers_pattern",
        "layers_to_transform",
        "target_modules",
        "ensure_weight_tying",
        "lora_dropout",
        "runtime_config",
        # settings of an initialization, which is refused above where it matters, and of what is off
        "corda_config",
        "eva_config",
        "loftq_config",
        "lora_ga_config",
        "megatron_core",
        "qalora_group_size",
    }
)
"""Fields of ``adapter_config.json`` that do not change what an adapter computes."""
_READ_FIELDS = frozenset({"lora_alpha", "r", "use_rslora"})
_DEFAULT_ALPHA = 8  # of PEFT, where lora_alpha is absent


def read_settings(folder: str | Path, *, key: str) -> dict[str, Any]:
    """Return ``adapter_config.json`` of a plain LoRA adapter, with its ``scale``.

    Args:
        folder: PEFT's folder.
        key: the configuration key that names it, for messages.

    Raises:
        ConfigError: there is no such file, or a field of it is not known to leave a plain LoRA
            adapter as it is (DoRA, PiSSA, trained biases or whole modules, a rank or alpha per
            module).
    """
    file = Path(folder).expanduser() / "adapter_config.json"
    setting = f"{key}={str(folder)!r}"
    if not file.is_file():
        raise ConfigError(
            f"{setting} holds no adapter_config.json; set it to a PEFT adapter's folder"
        )
    try:
        settings = json.loads(file.read_text(encoding="utf-8"))
        rank = int(settings["r"])
        alpha = float(settings.get("lora_alpha", _DEFAULT_ALPHA))
        if rank < 1:
            raise ValueError(f"r={rank}")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{file} names no rank r ({type(error).__name__}: {error}); save the adapter again"
        ) from None

    for name, value in settings.items():
        if name in _READ_FIELDS or name in _INERT_FIELDS or not value:
            continue
        if value not in _PLAIN_VALUES.get(name, ()):
            raise ConfigError(
                f"{setting}: {name}={value!r} in {file.name} is not supported, as this may be no"
                " plain LoRA adapter; merge it into its model with PEFT, and name that model"
                " instead"
            )

    if settings.get("use_rslora"):
        scale = alpha / math.sqrt(rank)
    else:
        scale = alpha / rank
    return settings | {"r": rank, "scale": scale}


def read_peft(folder: str | Path, model: DecoderConfig, *, key: str) -> PeftAdapter:
    """Read an adapter of this model.

    Args:
        folder: PEFT's folder.
        model: the base model; matrices have the shapes of its parameter tree.
        key: the configuration key that names the folder, for messages.

    Raises:
        ConfigError: see :func:`read_settings`; or a tensor is damaged, of another shape, or of a
            module that this model does not have or does not adapt (experts, embeddings, a vision
            tower).
    """
    settings = read_settings(folder, key=key)
    setting = f"{key}={str(folder)!r}"
    rank = settings["r"]
    file = Path(folder).expanduser() / "adapter_model.safetensors"
    try:
        tensors = {name: np.asarray(x, np.float32) for name, x in load_file(file).items()}
    except (OSError, SafetensorError) as error:
        raise ConfigError(
            f"{setting}: {file.name} cannot be read ({error}); save the adapter again"
        ) from None

    names = tensor_names(model)["layers"]
    shapes = model.parameter_shapes()["layers"]
    weights = {}
    for name in ADAPTABLE.intersection(names) - FAMILIES[model.family].packed.keys():
        layers, outputs, inputs = shapes[name]
        a = np.zeros((layers, rank, inputs), np.float32)
        b = np.zeros((layers, outputs, rank), np.float32)
        is_adapted = False
        for layer, module in enumerate(_modules(model, names[name])):
            for part, stacked in (("A", a), ("B", b)):
                tensor = tensors.pop(f"base_model.model.{module}.lora_{part}.weight", None)
                if tensor is None:
                    continue
                if tensor.shape != stacked[layer].shape:
                    raise ConfigError(
                        f"{setting}: {module}.lora_{part} has shape {tensor.shape}, this model"
                        f" takes {stacked[layer].shape}; the adapter is of another model"
                    )
                stacked[layer] = tensor
                is_adapted = True
        if is_adapted:
            weights[name] = (a, b * np.float32(settings["scale"]))

    # Every tensor of a matrix that can be adapted has been taken out.
    if tensors:
        raise ConfigError(
            f"{setting}: {sorted(tensors)[0]} (and {len(tensors) - 1} more) is of a module that"
            f" cannot be adapted in a {model.family} model; serve the model with the adapter merged"
            " into it"
        )
    return PeftAdapter(rank=rank, weights=weights)


def scaled_adapter(lora: LoraConfig, trained: Params) -> PeftAdapter:
    """Return adapters in training as engines take them.

    Args:
        trained: as :func:`jax_agent_rl.learner.parameterization.new_adapters` returns them, on the
            host.
    """
    scale = np.float32(lora.alpha / lora.rank)
    weights = {}
    for name, adapter in trained["adapters"].items():
        weights[name] = (np.asarray(adapter["a"]), np.asarray(adapter["b"]) * scale)
    return PeftAdapter(rank=lora.rank, weights=weights)


def blank_adapter(lora: LoraConfig, model: DecoderConfig) -> PeftAdapter:
    """Return an adapter that changes nothing, of the shapes that training will give it."""
    shapes = model.parameter_shapes()["layers"]
    weights = {}
    for name in itertools.chain.from_iterable(target_parameters(lora, model).values()):
        layers, outputs, inputs = shapes[name]
        weights[name] = (
            np.zeros((layers, lora.rank, inputs), np.float32),
            np.zeros((layers, outputs, lora.rank), np.float32),
        )
    return PeftAdapter(rank=lora.rank, weights=weights)


def save_peft(
    folder: Path,
    lora: LoraConfig,
    model: DecoderConfig,
    trained: Params,
    *,
    base: str,
    base_weights: str | None = None,
) -> None:
    """Write what ``PeftModel.from_pretrained(base_model, folder)`` loads.

    Args:
        folder: PEFT's folder: a new one, or one with an older adapter and nothing else, which is
            replaced.
        trained: adapters, see :func:`jax_agent_rl.learner.parameterization.new_adapters`.
        base: folder or hub name of the model they were trained over.
        base_weights: the fingerprint of its weights (``models.identity``), by which
            :func:`check_base` knows it; None records nothing.

    Raises:
        ModelError: the folder holds something else, or an adapter is not finite.
    """
    tensors = _adapter_tensors(model, trained)
    for name, tensor in tensors.items():
        require_finite(name, tensor)

    names = adapted_targets(lora, model)
    targets: list[str] | str = list(names)
    if model.vision is not None:
        # A vision tower has modules of the same names: only the decoder's are adapted.
        prefix = re.escape(_module_prefix(model))
        targets = rf"{prefix}.*\.({'|'.join(names)})"
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": targets,
        "inference_mode": True,
    }
    metadata = {}
    if base_weights:
        metadata[_BASE_WEIGHTS] = base_weights
    with replacing_folder(folder, replaces=PEFT_FILES, error=ModelError) as new_folder:
        save_tensors(tensors, new_folder / PEFT_FILES[0], metadata)
        (new_folder / PEFT_FILES[1]).write_text(json.dumps(config, indent=2) + "\n")


def _adapter_tensors(model: DecoderConfig, trained: Params) -> dict[str, np.ndarray]:
    """Return the tensors of adapters under PEFT's names, layer by layer."""
    names = tensor_names(model)["layers"]
    tensors = {}
    for name, adapter in trained["adapters"].items():
        modules = _modules(model, names[name])
        for part, stacked in adapter.items():
            for module, matrix in zip(modules, np.asarray(stacked), strict=True):
                tensors[f"base_model.model.{module}.lora_{part.upper()}.weight"] = matrix
    return tensors


PEFT_FILES = ("adapter_model.safetensors", "adapter_config.json")
_BASE_WEIGHTS = "base_weights"
"""Field of a file's header: the fingerprint of the base model's weights."""


def check_base(folder: str | Path, base: str, *, key: str) -> None:
    """Check that an adapter was trained over this model, if it says over which one.

    Args:
        folder: PEFT's folder.
        base: the model's folder, or Hub name.
        key: the configuration key that names the adapter, for messages.

    Raises:
        ConfigError: it was trained over another model, or cannot be read.
        ModelError: files of the model are missing or damaged.
    """
    file = Path(folder).expanduser() / PEFT_FILES[0]
    try:
        with safe_open(file, framework="numpy") as opened:
            metadata = opened.metadata() or {}
    except (OSError, SafetensorError) as error:
        raise ConfigError(
            f"{key}={str(folder)!r}: {file.name} cannot be read ({error}); save the adapter again"
        ) from None

    recorded = metadata.get(_BASE_WEIGHTS)
    if recorded is None:
        return
    if recorded != model_fingerprints(base)[WEIGHTS]:
        raise ConfigError(
            f"{key}={str(folder)!r} was trained over another model than model.path={base!r}: its"
            " weights are not those that the adapter names; set model.path to the model it was"
            " trained over"
        )


def _module_prefix(model: DecoderConfig) -> str:
    """Return the prefix of the decoder's modules, longer in a model with a vision tower."""
    if model.vision is None:
        return "model."
    return "model.language_model."


def _modules(model: DecoderConfig, weights: Sequence[str]) -> list[str]:
    """Return the modules of a decoder's tensors, given by their published names."""
    module_prefix = _module_prefix(model)
    tensor_prefix = FAMILIES[model.family].prefix
    modules = []
    for weight in weights:
        name = weight.removeprefix(tensor_prefix).removesuffix(".weight")
        modules.append(module_prefix + name)
    return modules
