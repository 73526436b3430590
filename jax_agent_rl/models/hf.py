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
from jax_agent_rl.models.sharding import Device
from jax_agent_rl.models.tensors import (
    HEAD,
    Names,
    Tensors,
    has_own_head,
    named_tensors,
    open_tensors,
    read_slice,
    require_finite,
    save_tensors,
    tensor_name,
    unstack,
)
from jax_agent_rl.utils.files import whole_folder
from jax_agent_rl.utils.hub import model_folder, require_model_file
from jax_agent_rl.utils.weight_transfer import AS_THEY_ARE, rounded

logger = logging.getLogger(__name__)

TOP = {"embed": "embed_tokens.weight", "final_norm": "norm.weight"}
LAYER = {
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
    "router": "mlp.gate",
    "expert_gate": "mlp.experts.{expert}.gate_proj",
    "expert_up": "mlp.experts.{expert}.up_proj",
    "expert_down": "mlp.experts.{expert}.down_proj",
    "input_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
}


def load_config(path: str | Path, *, weights: bool = False) -> DecoderConfig:
    """Read ``config.json`` (and the EOS ids of ``generation_config.json``) of a model folder.

    A model whose files hold an output matrix of its own is untied, whatever its ``config.json``
    says.

    Args:
        path: the folder, or a Hub name.
        weights: download the weights of a Hub model, too: without them, nothing but ``config.json``
            tells.

    Raises:
        ModelError: the folder is missing, a file is damaged, or the architecture is not supported.
    """
    folder = model_folder(path, weights=weights)
    raw = read_json(require_model_file(folder, "config.json"))
    generation = folder / "generation_config.json"
    if generation.is_file() and (eos := read_json(generation).get("eos_token_id")) is not None:
        raw["eos_token_id"] = eos
    try:
        config = read_config(raw)
    except ModelError as error:
        raise ModelError(f"{folder}: {error}") from None
    if config.tie_word_embeddings and _is_untied(folder):
        config = replace(config, tie_word_embeddings=False)
    return config


def _is_untied(folder: Path) -> bool:
    """Return whether the weights of a folder hold an output matrix of their own; False where they are not there."""
    files = list(weight_files(folder)) if _has_weights(folder) else []
    if not files or not all(file.is_file() for file in files) or not has_own_head(files):
        return False
    if folder not in _told_untied:
        _told_untied.add(folder)
        logger.warning(
            "%s: config.json ties the output matrix to the embeddings, but the weights hold another"
            " %s: it is used, as in transformers and vLLM; set tie_word_embeddings to false there",
            folder,
            HEAD,
        )
    return True


_told_untied: set[Path] = set()


def load_hf(
    path: str | Path, *, dtype: jnp.dtype = jnp.float32, shardings: Params | None = None
) -> tuple[DecoderConfig, Params]:
    """Read a model folder.

    Args:
        path: the folder, or a Hub name.
        dtype: of the parameters.
        shardings: a sharding per parameter: each host reads only its devices' parts, one at a time.
            None puts everything on the default device.

    Returns:
        The config, and the parameter tree.

    Raises:
        ModelError: files are missing or damaged, or tensors are missing, left over or of a wrong
            shape.
    """
    folder = model_folder(path, weights=True)
    config = load_config(folder, weights=True)
    return config, load_params(list(weight_files(folder)), config, dtype=dtype, shardings=shardings)


def check_files(path: str | Path) -> DecoderConfig:
    """Check a model folder without reading weights: every tensor is present, readable and of the right shape.

    Raises:
        ModelError: as :func:`load_hf`.
    """
    folder = model_folder(path, weights=True)
    config = load_config(folder, weights=True)
    tensors = _tensors(list(weight_files(folder)), config)

    def check(names: Names, shape: tuple[int, ...]) -> None:
        if isinstance(names, list):
            for inner in names:
                check(inner, shape[1:])
        else:
            read_slice(tensors, names, tuple(slice(0, 0) for _ in shape), shape, str(folder))

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
    where = str(Path(files[0]).parent) if files else "an empty list of files"
    tensors = _tensors(files, config)
    if config.tie_word_embeddings and HEAD in tensors and has_own_head(files):
        raise ModelError(
            f"{where}: {HEAD} differs from the embeddings, to which this model's output matrix is"
            " tied"
        )
    shapes = config.parameter_shapes()
    if shardings is None:
        here = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        shardings = jax.tree.map(lambda _: here, shapes, is_leaf=lambda x: isinstance(x, tuple))
    params = jax.tree.map(
        lambda names, shape, sharding: _read(tensors, names, shape, dtype, sharding, where),
        tensor_names(config),
        shapes,
        shardings,
        is_leaf=lambda x: isinstance(x, list),
    )
    _require_none_left(tensors, config, where)
    return params


def save_hf(
    path: str | Path,
    config: DecoderConfig,
    params: Params,
    *,
    tokenizer_from: str | Path | None = None,
) -> None:
    """Write ``config.json``, ``generation_config.json`` and ``model.safetensors``: all of them, or nothing.

    Args:
        path: a new folder, or one with files of these names and no others, which is replaced as a
            whole.
        config: the model.
        params: its parameters.
        tokenizer_from: a model folder whose tokenizer, chat template and generation settings are
            copied.

    Raises:
        ModelError: the folder holds other files, such as shards of another model, or a parameter is
            not finite: its type may be too small for it.
        StorageError: the folder cannot be written.
    """
    with whole_folder(Path(path), replaces=WRITTEN_FILES, error=ModelError) as folder:
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
    for file in {file for pattern in TOKENIZER_FILES for file in source.glob(pattern)}:
        shutil.copy(file, target)
    settings = source / "generation_config.json"
    return read_json(settings) if settings.is_file() else {}


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
        config: the model.
        params: its parameters.
        dtype: what they are rounded to, on their devices.
    """
    yield from named_tensors(
        (names, np.asarray(rounded(value, dtype)))
        for names, value in zip(_leaves(tensor_names(config)), jax.tree.leaves(params), strict=True)
    )


def device_tensors(
    config: DecoderConfig, params: Params, *, dtype: str = AS_THEY_ARE
) -> dict[str, jax.Array] | None:
    """Return every tensor under its Hugging Face name on one device; None if a file's tensor holds several parameters.

    Args:
        config: the model.
        params: its parameters, on devices of this process.
        dtype: what they are rounded to.
    """
    device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    found: dict[str, jax.Array] = {}
    for names, value in zip(_leaves(tensor_names(config)), jax.tree.leaves(params), strict=True):
        for stored, part in unstack(names, value):
            if not isinstance(stored, str):
                return None
            # A copy, even of a whole parameter: the learner's next step reuses its memory.
            found[stored] = jax.device_put(jnp.array(rounded(part, dtype)), device)
    return found


def tensor_names(config: DecoderConfig) -> Params:
    """Return where Hugging Face stores parameters, in the shape of their tree; lists (of lists: experts) if stacked."""
    prefix = FAMILIES[config.family].prefix
    tree: Params = {
        "embed": prefix + TOP["embed"],
        "layers": {key: _layer_names(config, key) for key in config.parameter_shapes()["layers"]},
        "final_norm": prefix + TOP["final_norm"],
    }
    if not config.tie_word_embeddings:
        tree["lm_head"] = HEAD
    if config.vision is not None:
        vision_names = FAMILIES[config.family].vision_names
        assert vision_names is not None
        tree["vision"] = vision_names(config.vision)
    return tree


def _layer_names(config: DecoderConfig, key: str) -> Names:
    module, kind = (key.removesuffix("_bias"), "bias") if key.endswith("_bias") else (key, "weight")
    family = FAMILIES[config.family]
    layers = [f"{family.prefix}layers.{i}" for i in range(config.num_layers)]
    if packed := family.packed.get(key):
        return [replace(packed, name=f"{layer}.{packed.name}") for layer in layers]
    name = family.names.get(module) or LAYER[module]
    if "{expert}" not in name:
        return [f"{layer}.{name}.{kind}" for layer in layers]
    assert config.experts is not None
    return [
        [f"{layer}.{name.format(expert=e)}.{kind}" for e in range(config.experts.count)]
        for layer in layers
    ]


def _leaves(names: Params) -> list[Names]:
    return jax.tree.leaves(names, is_leaf=lambda x: isinstance(x, list))


def _published(config: DecoderConfig, name: str) -> str:
    """Return a tensor's published name, whatever a newer file calls it."""
    prefixes = FAMILIES[config.family].prefixes
    return next(
        (old + name.removeprefix(new) for new, old in prefixes.items() if name.startswith(new)),
        name,
    )


def _tensors(files: Sequence[str | Path], config: DecoderConfig) -> Tensors:
    """Open every tensor of the files, by its published name."""
    return {_published(config, name): opened for name, opened in open_tensors(files).items()}


def _require_none_left(tensors: Tensors, config: DecoderConfig, where: str) -> None:
    known = {tensor_name(stored) for stored in jax.tree.leaves(tensor_names(config))}
    left = sorted(tensors.keys() - known - ({HEAD} if config.tie_word_embeddings else set()))
    if left:
        raise ModelError(
            f"{where}: {len(left)} tensors are not part of a {config.family} model, e.g. {left[:3]}"
        )


_INDEX = "model.safetensors.index.json"


def _has_weights(folder: Path) -> bool:
    return (folder / _INDEX).is_file() or (folder / "model.safetensors").is_file()


def weight_files(folder: Path) -> Iterator[Path]:
    """Yield the files that hold a model's weights; those of an index need not exist.

    Raises:
        ModelError: there are none, the index is damaged, or there are two sets of them.
    """
    index = folder / _INDEX
    single_file = folder / "model.safetensors"
    if index.is_file():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not all(
            isinstance(name, str) for name in weight_map.values()
        ):
            raise ModelError(
                f"{index}: 'weight_map' must map tensors to files; download or convert the model"
                " again"
            )
        shards = [folder / name for name in sorted(set(weight_map.values()))]
        if (
            single_file.is_file()
            and single_file not in shards
            and all(shard.is_file() for shard in shards)
        ):
            raise ModelError(
                f"{folder} holds {single_file.name} and the shards of {_INDEX}, which may be of"
                " different models; remove what is not meant"
            )
        yield from shards
    elif single_file.is_file():
        yield single_file
    else:
        raise ModelError(f"{folder} holds no model.safetensors (other weight formats are not read)")


def _read(
    tensors: Tensors,
    names: Names,
    shape: tuple[int, ...],
    dtype: jnp.dtype,
    sharding: jax.sharding.Sharding,
    where: str,
) -> jax.Array:
    """Read one parameter part by part: the host holds one at a time, read once for all devices that share it."""

    def part(names: Names, index: tuple[slice, ...], shape: tuple[int, ...]) -> np.ndarray:
        if isinstance(names, list):
            return np.stack([part(inner, index[1:], shape[1:]) for inner in names[index[0]]])
        return read_slice(tensors, names, index, shape, where).astype(dtype)

    sharing: dict[tuple, list[Device]] = {}
    for device, index in sharding.devices_indices_map(shape).items():
        if device in sharding.addressable_devices:
            sharing.setdefault(tuple((at.start, at.stop) for at in index), []).append(device)
    parts = []
    for bounds, devices in sharing.items():
        value = part(names, tuple(slice(*ends) for ends in bounds), shape)
        parts += [jax.device_put(value, device) for device in devices]
    return jax.make_array_from_single_device_arrays(shape, sharding, parts, dtype=dtype)
