"""Ids that other programs choose and that become parts of paths, keys and log lines."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator

MAX_ID_LENGTH = 128
_SAFE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._:@+-]*")


def check_safe_id(value: str) -> str:
    """Return an id that is safe in a path, a URL and a log line.

    It has up to :data:`MAX_ID_LENGTH` letters and digits of ASCII and ``. _ : @ + -``, and begins
    with a letter, a digit or ``_``: it is neither a path to elsewhere nor a hidden file nor an
    option of a command.

    Raises:
        ValueError: it is no such id; the message shows its beginning.
    """
    if len(value) > MAX_ID_LENGTH or not _SAFE.fullmatch(value):
        raise ValueError(
            f"{value[:80]!r} is not an id: it needs 1 to {MAX_ID_LENGTH} letters, digits and . _ :"
            " @ + -, and begins with a letter, a digit or _"
        )
    return value


SafeId = Annotated[str, AfterValidator(check_safe_id)]
"""An id that :func:`check_safe_id` accepts."""
