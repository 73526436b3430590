"""Reading and writing Hugging Face folders: ``config.json`` and safetensors, one shard or many."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_agent_rl.errors import ModelError
from jax_agent_rl.models.config import DecoderConfig, Params
from jax_agent_rl.models.families import FAMILIES, read_config, write_config
from jax_agent_rl.models.parameters import PARAMETERS, dtype_of, leaves_by_key
from jax_agent_rl.models.sharding import Device
from jax_agent_rl.models.tensors import (
    HEAD,
    Names,
    Tensors,
    has_own_head,
    named_tensors,
    of_prediction_layers,
    open_tensors,
    read_slice,
    require_finite,
    save_tensors,
    split_experts,
    tensor_name,
    unstack,
)
from jax_agent_rl.utils.files import replacing_folder
from jax_agent_rl.utils.hub import model_folder, require_model_file
from jax_agent_rl.utils.text import counted
from jax_agent_rl.utils.weight_transfer import AS_THEY_ARE, rounded

logger = logging.getLogger(__name__)

TOP = {
    "embed": "embed_tokens.weight",
    "final_norm": "norm.weight",
    "per_layer_embed": "embed_tokens_per_layer.weight",
    "per_layer_model_projection": "per_layer_model_projection.weight",
    "per_layer_model_norm": "per_layer_projection_norm.weight",
}
LAYER = {
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "q_a": "self_attn.q_a_proj",
    "q_a_norm": "self_attn.q_a_layernorm",
    "q_b": "self_attn.q_b_proj",
    "kv_a": "self_attn.kv_a_proj_with_mqa",
    "kv_a_norm": "self_attn.kv_a_layernorm",
    "kv_b": "self_attn.kv_b_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
    "delta_qkv": "linear_attn.in_proj_qkv",
    "delta_z": "linear_attn.in_proj_z",
    "delta_b": "linear_attn.in_proj_b",
    "delta_a": "linear_attn.in_proj_a",
    "delta_qkvz": "linear_attn.in_proj_qkvz",
    "delta_ba": "linear_attn.in_proj_ba",
    "delta_conv": "linear_attn.conv1d",
    "delta_norm": "linear_attn.norm",
    "delta_out": "linear_attn.out_proj",
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
    "router": "mlp.gate",
    "router_correction": "mlp.gate.e_score_correction_bias",
    "expert_gate": "mlp.experts.{expert}.gate_proj",
    "expert_up": "mlp.experts.{expert}.up_proj",
    "expert_down": "mlp.experts.{expert}.down_proj",
    "shared_gate": "mlp.shared_experts.gate_proj",
    "shared_up": "mlp.shared_experts.up_proj",
    "shared_down": "mlp.shared_experts.down_proj",
    "shared_router": "mlp.shared_expert_gate",
    "input_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
}


def load_config(path: str | Path, *, weights: bool = False) -> DecoderConfig:
    """Read ``config.json`` (and the EOS ids of ``generation_config.json``) of a model folder.

    A model whose files hold a separate output matrix is untied, whatever its ``config.json`` says.

    Args:
        path: the folder, or a Hub name.
        weights: also download the weights of a Hub model. Without them only ``config.json`` says
            whether the model is untied.

    Raises:
        ModelError: the folder is missing, a file is damaged, or the architecture is not supported.
    """
    folder = model_folder(path, weights=weights)
    raw = read_json(require_model_file(folder, "config.json"))
    generation_file = folder / "generation_config.json"
    if generation_file.is_file():
        eos_token_id = read_json(generation_file).get("eos_token_id")
        if eos_token_id is not None:
            raw["eos_token_id"] = eos_token_id

    try:
        config = read_config(raw)
    except ModelError as error:
        raise ModelError(f"{folder}: {error}") from None

    if config.tie_word_embeddings and _is_untied(folder):
        config = replace(config, tie_word_embeddings=False)
    return config


def _is_untied(folder: Path) -> bool:
    """Return whether the weights of a folder hold a separate output matrix.

    Return False if the weights are not there.
    """
    if not _has_weights(folder):
        return False
    files = list(weight_files(folder))
    if not files or not all(file.is_file() for file in files):
        return False
    if not has_own_head(files):
        return False

    if folder not in _warned_untied:
        _warned_untied.add(folder)
        logger.warning(
            "%s: config.json ties the output matrix to the embeddings, but the weights hold another"
            " %s: it is used, as in transformers and vLLM; set tie_word_embeddings to false there",
            folder,
            HEAD,
        )
    return True


_warned_untied: set[Path] = set()


def load_hf(
    path: str | Path, *, dtype: jnp.dtype = jnp.float32, shardings: Params | None = None
) -> tuple[DecoderConfig, Params]:
    """Read a model folder.

    Args:
        path: the folder, or a Hub name.
        shardings: a sharding per parameter: each host reads only its devices' parts, one at a time.
            None puts everything on the default device.

    Raises:
        ModelError: files are missing or damaged, or tensors are missing, left over or of a wrong
            shape.
    """
    folder = model_folder(path, weights=True)
    config = load_config(folder, weights=True)
    return config, load_params(list(weight_files(folder)), config, dtype=dtype, shardings=shardings)


def check_files(path: str | Path) -> DecoderConfig:
    """Check a model folder without reading weights.

    Every tensor must be present, readable and of the right shape.

    Raises:
        ModelError: as :func:`load_hf`.
    """
    folder = model_folder(path, weights=True)
    config = load_config(folder, weights=True)
    tensors = _tensors(list(weight_files(folder)), config)

    def check(names: Names, shape: tuple[int, ...]) -> None:
        if isinstance(names, list):
            for layer_names in names:
                check(layer_names, shape[1:])
        else:
            nothing = (slice(0, 0),) * len(shape)
            read_slice(tensors, names, nothing, shape, str(folder))

    jax.tree.map(
        check,
        tensor_names(config),
        config.parameter_shapes(),
        is_leaf=lambda x: isinstance(x, (list, tuple)),
    )
    _require_none_left(tensors, config, str(folder))
    return config


def load_params(
    files: Sequence[str | Path],
    config: DecoderConfig,
    *,
    dtype: jnp.dtype = jnp.float32,
    shardings: Params | None = None,
) -> Params:
    """Read safetensors files of a known model, Hugging Face names; see :func:`load_hf`.

    Raises:
        ModelError: a file is missing or damaged, or tensors are missing, left over or of a wrong
            shape.
    """
    folder = str(Path(files[0]).parent) if files else "an empty list of files"
    tensors = _tensors(files, config)
    if config.tie_word_embeddings and HEAD in tensors and has_own_head(files):
        raise ModelError(
            f"{folder}: {HEAD} differs from the embeddings, to which this model's output matrix is"
            " tied"
        )

    shapes = config.parameter_shapes()
    if shardings is None:
        default = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        shardings = jax.tree.map(lambda _: default, shapes, is_leaf=lambda x: isinstance(x, tuple))
    params = jax.tree_util.tree_map_with_path(
        lambda path, names, shape, sharding: _read(
            tensors, names, shape, dtype_of(path[-1].key, dtype), sharding, folder
        ),
        tensor_names(config),
        shapes,
        shardings,
        is_leaf=lambda x: isinstance(x, list),
    )
    _require_none_left(tensors, config, folder)
    return params


def save_hf(
    path: str | Path,
    config: DecoderConfig,
    params: Params,
    *,
    tokenizer_from: str | Path | None = None,
) -> None:
    """Write ``config.json``, ``generation_config.json`` and ``model.safetensors``, all or none.

    Args:
        path: a new folder, or one with files of these names and no others, which is replaced as a
            whole.
        tokenizer_from: a model folder whose tokenizer, chat template and generation settings are
            copied.

    Raises:
        ModelError: the folder holds other files, such as shards of another model, or a parameter is
            not finite: its type may be too small for it.
        StorageError: the folder cannot be written.
    """
    with replacing_folder(Path(path), replaces=WRITTEN_FILES, error=ModelError) as folder:
        tensors = dict(hf_tensors(config, params))
        for name, tensor in tensors.items():
            require_finite(name, tensor)
        save_tensors(tensors, folder / "model.safetensors")

        raw = write_config(config) | {"dtype": str(params["embed"].dtype)}
        (folder / "config.json").write_text(json.dumps(raw, indent=2) + "\n")

        generation = {key: raw[key] for key in ("bos_token_id", "eos_token_id")}
        if tokenizer_from is not None:
            generation = _copy_tokenizer(model_folder(tokenizer_from), folder) | generation
        (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")


TOKENIZER_FILES = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "vocab.*",
    "merges.txt",
    "*processor_config.json",
)


WRITTEN_FILES = ("config.json", "generation_config.json", "model.safetensors", *TOKENIZER_FILES)
"""What an exported model consists of, as globs."""


def _copy_tokenizer(source: Path, target: Path) -> dict[str, Any]:
    """Copy tokenizer and processor files; return the source's generation settings."""
    for file in tokenizer_files(source):
        shutil.copy(file, target)

    generation_file = source / "generation_config.json"
    if not generation_file.is_file():
        return {}
    return read_json(generation_file)


def tokenizer_files(folder: Path) -> list[Path]:
    """Return the tokenizer and processor files of a folder, sorted; patterns may overlap."""
    files: set[Path] = set()
    for pattern in TOKENIZER_FILES:
        files.update(folder.glob(pattern))
    return sorted(files)


def read_json(file: Path) -> dict[str, Any]:
    """Read the object in a JSON file.

    Raises:
        ModelError: the file cannot be read, or holds something else.
    """
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:  # also undecodable bytes
        raise ModelError(
            f"{file} is not valid JSON ({error}); download or convert the model again"
        ) from None
    if not isinstance(content, dict):
        raise ModelError(
            f"{file} must hold a JSON object, got {type(content).__name__}; download the model"
            " again"
        )
    return content


def hf_tensors(
    config: DecoderConfig, params: Params, *, dtype: str = AS_THEY_ARE
) -> Iterator[tuple[str, np.ndarray]]:
    """Yield every tensor on the host under its Hugging Face name, stacked ones layer by layer.

    Args:
        dtype: what the parameters are rounded to, on their devices.
    """
    names_of_parameters = _leaves(tensor_names(config))

    # A generator: the host need not hold more than one parameter at a time.
    def named_arrays() -> Iterator[tuple[Any, np.ndarray]]:
        for names, (key, value) in zip(names_of_parameters, leaves_by_key(params), strict=True):
            yield names, np.asarray(rounded(value, dtype, key))

    yield from named_tensors(named_arrays())


def device_tensors(
    config: DecoderConfig, params: Params, *, dtype: str = AS_THEY_ARE
) -> dict[str, jax.Array] | None:
    """Return every tensor under its Hugging Face name on one device.

    Return None if a tensor of the files holds several parameters.

    Args:
        params: on devices of this process.
        dtype: what the parameters are rounded to.
    """
    device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    tensors: dict[str, jax.Array] = {}
    stored_names = _leaves(tensor_names(config))
    for names, (key, value) in zip(stored_names, leaves_by_key(params), strict=True):
        for stored, part in unstack(names, value):
            if not isinstance(stored, str):
                return None
            # A copy, even of a whole parameter: the learner's next step reuses its memory.
            tensors[stored] = jax.device_put(jnp.array(rounded(part, dtype, key)), device)
    return tensors


def tensor_names(config: DecoderConfig) -> Params:
    """Return where Hugging Face stores parameters, in the shape of their tree.

    A parameter that is stacked over layers has a list of names, experts a list of lists.
    """
    prefix = FAMILIES[config.family].prefix
    shapes = config.parameter_shapes()
    tree: Params = {"layers": {key: _layer_names(config, key) for key in shapes["layers"]}}
    for key, name in TOP.items():
        if key in shapes:
            tree[key] = prefix + name
    if not config.tie_word_embeddings:
        tree["lm_head"] = HEAD
    if config.vision is not None:
        vision_names = FAMILIES[config.family].vision_names
        assert vision_names is not None
        tree["vision"] = vision_names(config.vision)
    return tree


def _layer_names(config: DecoderConfig, key: str) -> Names:
    """Return where the layers' parts of a parameter are stored."""
    family = FAMILIES[config.family]
    layers = [f"{family.prefix}layers.{i}" for i in config.layers_with(key)]
    packed = family.packed.get(key)
    if packed is not None:
        return [replace(packed, name=f"{layer}.{packed.name}") for layer in layers]

    parameter = key.removesuffix("_bias")
    suffix = ".bias" if key.endswith("_bias") else ".weight"
    if not PARAMETERS[key].is_trained:
        suffix = ""  # its name is the tensor's
    module = family.names.get(parameter) or LAYER.get(parameter)
    if module is None:
        raise ValueError(
            f"the parameter {key!r} has no published name in the family {config.family!r}; add it"
            " to the family's names, or to models.hf.LAYER if others share it"
        )
    if "{expert}" not in module:
        return [f"{layer}.{module}{suffix}" for layer in layers]

    assert config.experts is not None
    modules = [module.format(expert=expert) for expert in range(config.experts.count)]
    names: list[Names] = []
    for layer in layers:
        names.append([f"{layer}.{expert_module}{suffix}" for expert_module in modules])
    return names


def _leaves(names: Params) -> list[Names]:
    return jax.tree.leaves(names, is_leaf=lambda x: isinstance(x, list))


def _published(config: DecoderConfig, name: str) -> str:
    """Return a tensor's published name, whatever a newer file calls it."""
    for newer_prefix, published_prefix in FAMILIES[config.family].prefixes.items():
        if name.startswith(newer_prefix):
            return published_prefix + name.removeprefix(newer_prefix)
    return name


def _tensors(files: Sequence[str | Path], config: DecoderConfig) -> Tensors:
    """Open every tensor of the files, by its published name."""
    tensors = {_published(config, name): tensor for name, tensor in open_tensors(files).items()}
    if config.experts is not None and "expert_gate" not in FAMILIES[config.family].packed:
        return split_experts(tensors)
    return tensors


def _require_none_left(tensors: Tensors, config: DecoderConfig, folder: str) -> None:
    """Check that every tensor is part of the model, or one that the family leaves out."""
    family = FAMILIES[config.family]
    known = {tensor_name(stored) for stored in jax.tree.leaves(tensor_names(config))}
    if config.tie_word_embeddings:
        known.add(HEAD)  # a copy of the embeddings
    rest = sorted(tensors.keys() - known - of_prediction_layers(tensors))

    left_out = family.left_out(config) if family.left_out is not None else ()
    unknown = [name for name in rest if not name.startswith(left_out)]
    if unknown:
        raise ModelError(
            f"{folder} holds {counted(len(unknown), 'tensor')} that a {config.family} model does"
            f" not have: {unknown[:3]}"
        )
    if rest:
        logger.info(
            "%s: %s of towers and of other models are left out, among them %s",
            folder,
            counted(len(rest), "tensor"),
            ", ".join(rest[:3]),
        )


_INDEX = "model.safetensors.index.json"


def _has_weights(folder: Path) -> bool:
    return (folder / _INDEX).is_file() or (folder / "model.safetensors").is_file()


def weight_files(folder: Path) -> Iterator[Path]:
    """Yield the files that hold a model's weights; the files that an index names need not exist.

    Raises:
        ModelError: there are none, the index is damaged, or there are two sets of them.
    """
    index = folder / _INDEX
    single_file = folder / "model.safetensors"
    if index.is_file():
        shards = [folder / name for name in _indexed_files(index)]
        has_other_file = single_file.is_file() and single_file not in shards
        if has_other_file and all(shard.is_file() for shard in shards):
            raise ModelError(
                f"{folder} holds {single_file.name} and the shards of {_INDEX}, which may be of"
                " different models; remove what is not meant"
            )
        yield from shards
    elif single_file.is_file():
        yield single_file
    else:
        raise ModelError(f"{folder} holds no model.safetensors (other weight formats are not read)")


def _indexed_files(index: Path) -> list[str]:
    """Return the names of the files that an index leads to, sorted."""
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(
        isinstance(name, str) for name in weight_map.values()
    ):
        raise ModelError(
            f"{index}: 'weight_map' must map tensors to files; download or convert the model again"
        )
    return sorted(set(weight_map.values()))


def _read(
    tensors: Tensors,
    names: Names,
    shape: tuple[int, ...],
    dtype: jnp.dtype,
    sharding: jax.sharding.Sharding,
    folder: str,
) -> jax.Array:
    """Read one parameter part by part.

    The host holds one part at a time, which is read once for all devices that share it.
    """

    def read_part(names: Names, index: tuple[slice, ...], shape: tuple[int, ...]) -> np.ndarray:
        if isinstance(names, list):
            layers = names[index[0]]
            return np.stack([read_part(layer, index[1:], shape[1:]) for layer in layers])
        return read_slice(tensors, names, index, shape, folder).astype(dtype)

    devices_by_bounds: dict[tuple, list[Device]] = {}
    for device, index in sharding.devices_indices_map(shape).items():
        if device in sharding.addressable_devices:
            bounds = tuple(
                (axis.start, axis.stop) for axis in index
            )  # a slice has no hash before Python 3.12
            devices_by_bounds.setdefault(bounds, []).append(device)

    parts = []
    for bounds, devices in devices_by_bounds.items():
        value = read_part(names, tuple(slice(*ends) for ends in bounds), shape)
        for device in devices:
            parts.append(jax.device_put(value, device))
    return jax.make_array_from_single_device_arrays(shape, sharding, parts, dtype=dtype)
