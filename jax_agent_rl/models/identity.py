"""Fingerprints of a model folder: of its weights, its configuration and its tokenizer.

Weights are fingerprinted tensor by tensor, so that a model in one file equals the same model in
shards, in whatever folder.
"""

from __future__ import annotations

import functools
import json
import mmap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jax_agent_rl.errors import ModelError
from jax_agent_rl.models.families.hf_config import BOOKKEEPING
from jax_agent_rl.models.hf import read_json, tokenizer_files, weight_files
from jax_agent_rl.utils.files import Stamp, file_stamp
from jax_agent_rl.utils.fingerprints import digest, file_fingerprint, fingerprint
from jax_agent_rl.utils.hub import model_folder

_MAX_HEADER = 100 << 20  # bytes, as in safetensors
WEIGHTS = "weights"
"""Key of the weights in :func:`model_fingerprints`."""


def model_fingerprints(path: str | Path, *, weights: bool = True) -> dict[str, str]:
    """Return the fingerprints of a model's parts, by name.

    They are ``weights``, ``config.json``, and each file of the tokenizer.

    Args:
        path: a model folder, or a Hub name.
        weights: False leaves out the weights and the configuration, for a model that is served
            elsewhere.

    Raises:
        ModelError: a file is missing or damaged.
    """
    folder = model_folder(path, weights=weights)
    fingerprints: dict[str, str] = {}
    if weights:
        fingerprints[WEIGHTS] = weights_fingerprint(list(weight_files(folder)))
        fingerprints["config.json"] = _config_fingerprint(folder / "config.json")
    for file in tokenizer_files(folder):
        fingerprints[file.name] = _tokenizer_fingerprint(file)
    return fingerprints


def _config_fingerprint(file: Path) -> str:
    """Return the fingerprint of the fields that say something about the model."""
    content = {}
    for name, value in read_json(file).items():
        is_bookkeeping = name.startswith("_") or name in BOOKKEEPING - {"model_type"}
        if not is_bookkeeping:
            content[name] = value
    return fingerprint(content)


def _tokenizer_fingerprint(file: Path) -> str:
    try:
        return file_fingerprint(file)
    except OSError as error:
        raise ModelError(f"{file} cannot be read: {error}") from error


def weights_fingerprint(files: Sequence[Path]) -> str:
    """Return the fingerprint of all tensors of safetensors files: names, types, shapes and numbers.

    Raises:
        ModelError: a file is missing or damaged.
    """
    tensors: dict[str, Any] = {}
    for file in files:
        try:
            tensors |= _tensor_fingerprints(file, file_stamp(file))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ModelError(
                f"{file} cannot be read ({error}); download or convert the model again"
            ) from error
    return fingerprint(tensors)


@functools.lru_cache(1024)
def _tensor_fingerprints(
    file: Path, stamp: Stamp
) -> Mapping[str, tuple[str, tuple[int, ...], str]]:
    """Return type, shape and digest of a file's tensors, read once in a process."""
    with (
        file.open("rb") as stream,
        mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as content,
    ):
        begin, header = _read_header(content)
        with memoryview(content) as view, view[begin:] as data:
            return dict(_tensors(data, header))


def _read_header(content: mmap.mmap) -> tuple[int, Mapping[str, Any]]:
    """Return where a file's data begin, and its header: by name, what each tensor is."""
    size = int.from_bytes(content[:8], "little")
    if not 0 < size <= min(_MAX_HEADER, len(content) - 8):
        raise ValueError(f"a header of {size} bytes")
    header = json.loads(content[8 : 8 + size])
    if not isinstance(header, dict):
        raise ValueError("its header is not an object")
    return 8 + size, header


def _tensors(
    data: memoryview, header: Mapping[str, Any]
) -> Iterator[tuple[str, tuple[str, tuple[int, ...], str]]]:
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        begin, end = entry["data_offsets"]
        if not 0 <= begin <= end <= len(data):
            raise ValueError(f"tensor {name!r} is cut off")
        with data[begin:end] as part:
            yield name, (str(entry["dtype"]), tuple(entry["shape"]), digest(part))
