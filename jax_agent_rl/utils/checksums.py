"""Digests of weights that travel: whoever takes them compares the bytes it got with those that were sent.

XXH3 in 128 bits, which reads about as fast as memory does. It finds damage and mistaken files; against somebody who
forges both bytes and digest there are tokens and TLS (``rollout.token_env``).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import xxhash

from jax_agent_rl.errors import WeightUpdateError


def digest(data: bytes | memoryview) -> str:
    """Of bytes."""
    return f"xxh3_128:{xxhash.xxh3_128(data).hexdigest()}"


def file_digest(file: str | Path) -> str:
    """Of a file, read in blocks."""
    with open(file, "rb") as stream:
        return f"xxh3_128:{hashlib.file_digest(stream, xxhash.xxh3_128).hexdigest()}"


def check_files(paths: Sequence[str], digests: Mapping[str, str]) -> None:
    """Whether files are those that were sent.

    Args:
        digests: by file name; none checks nothing.

    Raises:
        WeightUpdateError: a file is missing, damaged, cut short or another, or one has no digest.
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
    """Whether two digests are equal.

    Raises:
        WeightUpdateError: they are not.
    """
    if found != sent:
        raise WeightUpdateError(
            f"{name} is not what the learner wrote: its digest is {found}, that of the update {sent}; it was damaged, "
            "cut short or replaced by another version's"
        )
