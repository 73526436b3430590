"""Low-rank adapters, W + scale B A, not multiplied out (Hu et al. 2021, LoRA, arXiv 2106.09685), and PEFT's files.

The base may be quantized (Dettmers et al. 2023, QLoRA, arXiv 2305.14314) and is then dequantized
layer by layer. An adapter's files are ``adapter_config.json`` and ``adapter_model.safetensors``.
"""

from __future__ import annotations

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

from jax_agent_rl.config import LoraConfig
from jax_agent_rl.errors import ConfigError, ModelError
from jax_agent_rl.models.config import DecoderConfig, Params
from jax_agent_rl.models.families import FAMILIES
from jax_agent_rl.models.hf import tensor_names
from jax_agent_rl.models.identity import WEIGHTS, model_fingerprints
from jax_agent_rl.models.parameters import PARAMETERS
from jax_agent_rl.models.tensors import require_finite, save_tensors
from jax_agent_rl.utils.files import whole_folder
from jax_agent_rl.utils.packages import import_installed

TILE = 32  # values that share one scale


class LoRA(nnx.Module):
    """A low-rank addition to a weight, ``scale * b @ a``; stacked over layers or of one.

    Args:
        a: [r, in].
        b: [out, r].
        scale: alpha / r.
    """

    def __init__(self, a: jax.Array, b: jax.Array, *, scale: float) -> None:
        self.a, self.b, self.scale = nnx.LoRAParam(a), nnx.LoRAParam(b), scale

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
            f"learner.lora.quantize={kind} needs the package qwix: pip install"
            " 'jax_agent_rl[qlora]'"
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


_OF_PLAIN_LORA: Mapping[str, tuple[Any, ...]] = {
    "bias": ("none",),
    # Those that leave the base as it is; PiSSA, OLoRA, CorDA, LoftQ and LoRA-GA change it before
    # they train.
    "init_lora_weights": (True, False, "eva", "gaussian", "orthogonal"),
    "peft_type": ("LORA",),
}
"""Values of ``adapter_config.json`` besides null, false and empty ones."""
_WITHOUT_EFFECT = frozenset(
    {
        *(
            "auto_mapping",
            "base_model_name_or_path",
            "inference_mode",
            "peft_version",
            "revision",
            "task_type",
        ),
        # which modules were adapted, as the tensors say, and how they were trained
        *("exclude_modules", "layers_pattern", "layers_to_transform", "target_modules"),
        *("ensure_weight_tying", "lora_dropout", "runtime_config"),
        # settings of an initialization, refused above where it matters, and of what is off
        *(
            "corda_config",
            "eva_config",
            "loftq_config",
            "lora_ga_config",
            "megatron_core",
            "qalora_group_size",
        ),
    }
)
"""Fields of ``adapter_config.json`` that do not change what an adapter computes."""
_READ = frozenset({"lora_alpha", "r", "use_rslora"})
_ALPHA = 8  # of PEFT, where lora_alpha is absent


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
    file, where = Path(folder).expanduser() / "adapter_config.json", f"{key}={str(folder)!r}"
    if not file.is_file():
        raise ConfigError(
            f"{where} holds no adapter_config.json; set it to a PEFT adapter's folder"
        )
    try:
        settings = json.loads(file.read_text(encoding="utf-8"))
        rank = int(settings["r"])
        alpha = float(settings.get("lora_alpha", _ALPHA))
        if rank < 1:
            raise ValueError(f"r={rank}")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{file} names no rank r ({type(error).__name__}: {error}); save the adapter again"
        ) from None
    for name, value in settings.items():
        if (
            name in _READ
            or name in _WITHOUT_EFFECT
            or not value
            or value in _OF_PLAIN_LORA.get(name, ())
        ):
            continue
        raise ConfigError(
            f"{where}: {name}={value!r} in {file.name} is not supported, as this may be no plain"
            " LoRA adapter; merge it into its model with PEFT, and name that model instead"
        )
    scale = alpha / (math.sqrt(rank) if settings.get("use_rslora") else rank)
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
    settings, where = read_settings(folder, key=key), f"{key}={str(folder)!r}"
    file = Path(folder).expanduser() / "adapter_model.safetensors"
    try:
        tensors = {name: np.asarray(x, np.float32) for name, x in load_file(file).items()}
    except (OSError, SafetensorError) as error:
        raise ConfigError(
            f"{where}: {file.name} cannot be read ({error}); save the adapter again"
        ) from None
    names, shapes = tensor_names(model)["layers"], model.parameter_shapes()["layers"]
    weights = {}
    for name in ADAPTABLE.intersection(names) - FAMILIES[model.family].packed.keys():
        layers, *shape = shapes[name]
        a = np.zeros((layers, settings["r"], shape[1]), np.float32)
        b = np.zeros((layers, shape[0], settings["r"]), np.float32)
        found = False
        for i, module in enumerate(_modules(model, names[name])):
            for part, whole in (("A", a), ("B", b)):
                x = tensors.pop(f"base_model.model.{module}.lora_{part}.weight", None)
                if x is None:
                    continue
                if x.shape != whole[i].shape:
                    raise ConfigError(
                        f"{where}: {module}.lora_{part} has shape {x.shape}, this model takes"
                        f" {whole[i].shape}; the adapter is of another model"
                    )
                whole[i], found = x, True
        if found:
            weights[name] = a, b * np.float32(settings["scale"])
    if tensors:
        raise ConfigError(
            f"{where}: {sorted(tensors)[0]} (and {len(tensors) - 1} more) is of a module that"
            f" cannot be adapted in a {model.family} model; serve the model with the adapter merged"
            " into it"
        )
    return PeftAdapter(rank=settings["r"], weights=weights)


def scaled_adapter(lora: LoraConfig, trained: Params) -> PeftAdapter:
    """Return adapters in training as engines take them.

    Args:
        lora: the training configuration.
        trained: as :func:`jax_agent_rl.learner.parameterization.new_adapters` returns them, on the
            host.
    """
    scale = np.float32(lora.alpha / lora.rank)
    weights = {
        name: (np.asarray(ab["a"]), np.asarray(ab["b"]) * scale)
        for name, ab in trained["adapters"].items()
    }
    return PeftAdapter(rank=lora.rank, weights=weights)


def blank_adapter(lora: LoraConfig, model: DecoderConfig) -> PeftAdapter:
    """Return an adapter that changes nothing, of the shapes that training will give it."""
    shapes = model.parameter_shapes()["layers"]
    weights = {}
    for name in (target.removesuffix("_proj") for target in lora.targets):
        layers, out, inputs = shapes[name]
        weights[name] = (
            np.zeros((layers, lora.rank, inputs), np.float32),
            np.zeros((layers, out, lora.rank), np.float32),
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
        lora: the training configuration.
        model: the base model.
        trained: adapters, see :func:`jax_agent_rl.learner.parameterization.new_adapters`.
        base: folder or hub name of the model they were trained over.
        base_weights: the fingerprint of its weights (``models.identity``), by which
            :func:`check_base` knows it; None: it is not recorded.

    Raises:
        ModelError: the folder holds something else, or an adapter is not finite.
    """
    names = tensor_names(model)["layers"]
    inner = _inner(model)
    # A vision tower has modules of the same names.
    targets = (
        list(lora.targets)
        if model.vision is None
        else rf"{re.escape(inner)}.*\.({'|'.join(lora.targets)})"
    )
    tensors = {
        f"base_model.model.{module}.lora_{part.upper()}.weight": matrix
        for name, adapter in trained["adapters"].items()
        for part, stack in adapter.items()
        for module, matrix in zip(_modules(model, names[name]), np.asarray(stack), strict=True)
    }
    for name, tensor in tensors.items():
        require_finite(name, tensor)
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
    with whole_folder(folder, replaces=PEFT_FILES, error=ModelError) as written:
        save_tensors(
            tensors, written / PEFT_FILES[0], {_BASE: base_weights} if base_weights else None
        )
        (written / PEFT_FILES[1]).write_text(json.dumps(config, indent=2) + "\n")


PEFT_FILES = ("adapter_model.safetensors", "adapter_config.json")
_BASE = "base_weights"


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
            recorded = (opened.metadata() or {}).get(_BASE)
    except (OSError, SafetensorError) as error:
        raise ConfigError(
            f"{key}={str(folder)!r}: {file.name} cannot be read ({error}); save the adapter again"
        ) from None
    if recorded is not None and recorded != model_fingerprints(base)[WEIGHTS]:
        raise ConfigError(
            f"{key}={str(folder)!r} was trained over another model than model.path={base!r}: its"
            " weights are not those that the adapter names; set model.path to the model it was"
            " trained over"
        )


def _inner(model: DecoderConfig) -> str:
    """Return the prefix of the decoder's modules, one level deeper beside a vision tower."""
    return "model." if model.vision is None else "model.language_model."


def _modules(model: DecoderConfig, weights: Sequence[str]) -> list[str]:
    """Return the modules of a decoder's tensors, given by their published names."""
    inner, prefix = _inner(model), FAMILIES[model.family].prefix
    return [inner + weight.removeprefix(prefix).removesuffix(".weight") for weight in weights]
