"""XXH3-128 digests of transferred weights, compared by the receiver.

They cost about as much as reading memory, and find damage and mistaken files; against forgery of both bytes and digest
there are tokens and TLS (``rollout.token_env``).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import xxhash

from jax_agent_rl.errors import WeightUpdateError


def digest(data: bytes | memoryview) -> str:
    """Return the XXH3-128 digest of ``data``."""
    return f"xxh3_128:{xxhash.xxh3_128(data).hexdigest()}"


def file_digest(file: str | Path) -> str:
    """Return the XXH3-128 digest of a file."""
    with open(file, "rb") as stream:
        return f"xxh3_128:{hashlib.file_digest(stream, xxhash.xxh3_128).hexdigest()}"


def check_files(paths: Sequence[str], digests: Mapping[str, str]) -> None:
    """Check files against digests by file name; without digests, do nothing.

    Raises:
        WeightUpdateError: a file is missing, damaged, truncated or another, or has no digest.
    """
    if not digests:
        return
    names = {Path(path).name for path in paths}
    if names != digests.keys():
        raise WeightUpdateError(f"the update has digests of {sorted(digests)}, but files {sorted(names)}")
    for path in paths:
        try:
            found = file_digest(path)
        except OSError as error:
            raise WeightUpdateError(f"weight file {path} cannot be read: {error}") from error
        check(Path(path).name, found, digests[Path(path).name])


def check(name: str, found: str, sent: str) -> None:
    """Compare two digests.

    Raises:
        WeightUpdateError: they differ.
    """
    if found != sent:
        raise WeightUpdateError(
            f"{name} is not what the learner wrote: its digest is {found}, that of the update {sent}; it was damaged, "
            "truncated or replaced by another version's"
        )
