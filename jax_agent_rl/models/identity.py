"""What a model folder is of: fingerprints of its weights, its configuration and its tokenizer.

Weights are known tensor by tensor, so that a model in one file equals the same model in shards,
wherever it lies.
"""

from __future__ import annotations

import functools
import json
import mmap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jax_agent_rl.errors import ModelError
from jax_agent_rl.models.families.common import BOOKKEEPING
from jax_agent_rl.models.hf import TOKENIZER_FILES, read_json, weight_files
from jax_agent_rl.utils.files import Stamp, file_stamp
from jax_agent_rl.utils.fingerprints import digest, file_fingerprint, fingerprint
from jax_agent_rl.utils.hub import model_folder

_MAX_HEADER = 100 << 20  # bytes, as in safetensors
WEIGHTS = "weights"
"""Key of the weights in :func:`model_fingerprints`."""


def model_fingerprints(path: str | Path, *, weights: bool = True) -> dict[str, str]:
    """Return the fingerprints of a model's parts: ``weights``, ``config.json``, and each file of the tokenizer.

    Args:
        path: a model folder, or a Hub name.
        weights: False leaves the weights and the configuration out, of a model that is served
            elsewhere.

    Raises:
        ModelError: a file is missing or damaged.
    """
    folder = model_folder(path, weights=weights)
    found: dict[str, str] = {}
    if weights:
        found[WEIGHTS] = weights_fingerprint(list(weight_files(folder)))
        config = read_json(folder / "config.json")
        found["config.json"] = fingerprint(
            {name: value for name, value in config.items() if not _is_bookkeeping(name)}
        )
    for file in sorted({file for pattern in TOKENIZER_FILES for file in folder.glob(pattern)}):
        found[file.name] = _of_file(file)
    return found


def _is_bookkeeping(name: str) -> bool:
    return name.startswith("_") or name in BOOKKEEPING - {"model_type"}


def _of_file(file: Path) -> str:
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
        with memoryview(content) as whole, whole[begin:] as data:
            return dict(_tensors(data, header))


def _read_header(content: mmap.mmap) -> tuple[int, Mapping[str, Any]]:
    size = int.from_bytes(content[:8], "little")
    if not 0 < size <= min(_MAX_HEADER, len(content) - 8):
        raise ValueError(f"a header of {size} bytes")
    header = json.loads(content[8 : 8 + size])
    if not isinstance(header, dict):
        raise ValueError("its header is no object")
    return 8 + size, header


def _tensors(
    data: memoryview, header: Mapping[str, Any]
) -> Iterator[tuple[str, tuple[str, tuple[int, ...], str]]]:
    for name, about in header.items():
        if name == "__metadata__":
            continue
        first, last = about["data_offsets"]
        if not 0 <= first <= last <= len(data):
            raise ValueError(f"tensor {name!r} is cut off")
        with data[first:last] as part:
            yield name, (str(about["dtype"]), tuple(about["shape"]), digest(part))
