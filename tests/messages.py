"""Messages of errors are judged by what they name, not by their sentences."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

import pytest

Named = object | tuple[object, ...]
"""A word, number or phrase that a message names; a tuple for several."""


@contextlib.contextmanager
def raises(
    kind: type[BaseException] | tuple[type[BaseException], ...],
    *,
    key: Named = (),
    value: Named = (),
    fix: Named = (),
) -> Iterator[pytest.ExceptionInfo[BaseException]]:
    """Expect an error whose message names these; see :func:`assert_message`."""
    with pytest.raises(kind) as caught:
        yield caught
    assert_message(caught.value, key=key, value=value, fix=fix)


def assert_message(message: object, *, key: Named = (), value: Named = (), fix: Named = ()) -> None:
    """Assert that a message names what is wrong, the wrong value, and what to do.

    Each is found as a whole: 2 is not in "12", nor "seed" in "seeds".
    """
    text = str(message)
    for part, named in (("key", key), ("value", value), ("fix", fix)):
        words = named if isinstance(named, tuple) else (named,)
        for word in words:
            assert _names(text, str(word)), f"{part} {str(word)!r} is not in the message: {text}"


def _names(text: str, word: str) -> bool:
    pattern = re.escape(word)
    if re.match(r"\w", word):
        pattern = r"(?<!\w)" + pattern
    if re.search(r"\w$", word):
        pattern += r"(?!\w)"
    # A number is not part of a longer one: neither 5 nor 1 is in "1.5". A name may be
    # part of a path: "state" is in "state.1.count".
    if re.match(r"\d", word):
        pattern = r"(?<!\d\.)" + pattern
    if re.search(r"\d$", word):
        pattern += r"(?!\.\d)"
    return re.search(pattern, text) is not None
