r"""The one reader of JSON from outside: answers, requests, replies of models, files.

Python's decoder reads more than JSON can say, and more than memory can hold. A few bytes become a
lot: ``[],`` is 64 bytes of Python, and ``[[[[…`` overflows what recurses. What is read here is
bounded, and can be written as JSON again and encoded: no ``NaN``, no ``1e999``, no half of a
surrogate pair (``"\ud83d"``), which models and programs do write.

Every message begins with "not valid JSON".
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any, Literal

from jax_agent_rl.utils.files import read_regular_file
from jax_agent_rl.utils.surrogates import has_lone_surrogate

MAX_NESTING = 100
"""Maximum levels of arrays and objects; recursive code can handle several times as many."""
MAX_VALUES = 2_000_000
"""Maximum values in one text: as Python objects they take half a gigabyte at most."""


class TooDeepError(ValueError):
    """JSON that is nested too deep."""


def decode_json(
    content: bytes | bytearray,
    *,
    max_values: int = MAX_VALUES,
    max_nesting: int = MAX_NESTING,
    errors: Literal["strict", "replace"] = "strict",
    non_finite: bool = False,
    lone_surrogates: bool = False,
    unique_keys: bool = False,
) -> Any:
    """Return the value of a JSON text in UTF-8.

    Args:
        max_values: maximum number of values; commas and brackets within strings count as well.
        max_nesting: maximum levels of arrays and objects.
        errors: what to do about invalid UTF-8.
        non_finite: read ``NaN``, ``Infinity`` and ``1e999`` as floats, where whoever uses the value
            checks it.
        lone_surrogates: read halves of surrogate pairs, where whoever uses the value checks it.
        unique_keys: refuse an object that has a key twice. Python would silently take the last.

    Raises:
        TooDeepError: it is nested too deep.
        ValueError: it is not JSON in UTF-8, or holds what is refused.
    """
    # Every value but the first follows a comma or an opening bracket.
    count = content.count(b",") + content.count(b"[") + content.count(b"{")
    if count > max_values:
        raise ValueError(f"not valid JSON: it has more than {max_values} values")

    try:
        text = content.decode("utf-8", errors)
    except UnicodeDecodeError as error:
        raise ValueError(
            f"not valid JSON: not UTF-8 text ({error.reason} at byte {error.start})"
        ) from None

    reader = _Reader(
        max_nesting=max_nesting,
        non_finite=non_finite,
        lone_surrogates=lone_surrogates,
        unique_keys=unique_keys,
    )
    return reader.read(text)


MAX_FILE_BYTES = 64 * 2**20
"""Limit of a file that holds one object: a configuration, a summary, an address."""


def read_json_object(file: Path) -> dict[str, Any]:
    """Return the object in a file that this project wrote.

    A crash, a full disk or a user may have damaged the file.

    Raises:
        OSError: it cannot be opened.
        ValueError: it is not a regular file, is too large, or holds no JSON object.
    """
    content = read_regular_file(file, MAX_FILE_BYTES)
    value = decode_json(content, non_finite=True)
    if not isinstance(value, dict):
        raise ValueError(f"it holds a {type(value).__name__}, not an object")
    return value


def parse_json(text: str) -> Any:
    """Return the value of a JSON text.

    Raises:
        TooDeepError: it is nested too deep.
        ValueError: it is not JSON, or more than JSON.
    """
    return _STRICT.read(text)


def parse_json_at(text: str, start: int) -> tuple[Any, int]:
    """Return the JSON value that begins at an offset, after white space, and where it ends.

    Raises:
        TooDeepError: it is nested too deep.
        ValueError: there is no JSON, or more than JSON.
    """
    return _STRICT.read_at(text, start)


class _Reader:
    """A decoder with its limits; see :func:`decode_json`."""

    def __init__(
        self,
        *,
        max_nesting: int = MAX_NESTING,
        non_finite: bool = False,
        lone_surrogates: bool = False,
        unique_keys: bool = False,
    ) -> None:
        self._max_nesting = max_nesting
        self._lone_surrogates = lone_surrogates
        self._decoder = json.JSONDecoder(
            parse_constant=None if non_finite else _refuse_constant,
            parse_float=None if non_finite else _finite_float,
            object_pairs_hook=_with_unique_keys if unique_keys else None,
        )

    def read(self, text: str) -> Any:
        value, end = self.read_at(text, 0)
        trailing_text = text[end:].strip(_SPACE)
        if trailing_text:
            raise ValueError(f"not valid JSON: unexpected text after it: {trailing_text[:40]!r}")
        return value

    def read_at(self, text: str, start: int) -> tuple[Any, int]:
        while start < len(text) and text[start] in _SPACE:
            start += 1

        too_deep = f"not valid JSON: it is nested more than {self._max_nesting} levels deep"
        try:
            value, end = self._decoder.raw_decode(text, start)
        except RecursionError:
            raise TooDeepError(too_deep) from None
        except ValueError as error:
            raise ValueError(f"not valid JSON: {str(error)[:200]}") from None

        if _is_deeper_than(self._max_nesting, value):
            raise TooDeepError(too_deep)
        if not self._lone_surrogates and _holds_lone_surrogate(value, text, start, end):
            raise ValueError(
                r"not valid JSON: a lone surrogate, \ud800 to \udfff, is half of a surrogate pair"
            )
        return value, end


_SPACE = " \t\n\r"
_SURROGATE = re.compile("[\ud800-\udfff]")
_ESCAPED_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def _holds_lone_surrogate(value: Any, text: str, start: int, end: int) -> bool:
    """Return whether a value holds a lone surrogate, read from ``text[start:end]``."""
    surrogate = _ESCAPED_SURROGATE.search(text, start, end) or _SURROGATE.search(text, start, end)
    if surrogate is None:  # nearly always, and much cheaper than writing the value again
        return False
    return has_lone_surrogate(json.dumps(value, ensure_ascii=False))


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _finite_float(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise ValueError(f"{text[:40]} is larger than any float")
    return number


def _with_unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        keys: set[str] = set()
        for key, _ in pairs:
            if key in keys:
                raise ValueError(f"an object has the key {key!r} twice; rename one")
            keys.add(key)
    return value


def _is_deeper_than(limit: int, value: Any) -> bool:
    """Return whether containers are nested deeper, level by level, as recursion would overflow."""
    containers = [value] if isinstance(value, dict | list) else []
    for _ in range(limit):
        if not containers:
            return False
        inner_containers: list[Any] = []
        for container in containers:
            items = container.values() if isinstance(container, dict) else container
            inner_containers += [item for item in items if isinstance(item, dict | list)]
        containers = inner_containers
    return bool(containers)


_STRICT = _Reader()
