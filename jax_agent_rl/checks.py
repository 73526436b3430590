r"""Checks of values from outside (JSON, user code) that no type checker has seen.

Each check raises a ``ValueError`` that names the field, its value and the expected kind. Numbers
may be numpy's. JSON can spell one half of a surrogate pair (``"\ud83d"``), and models do, but
nothing can encode it. The digest of ids is here as well, and the search for the name that a user
may have meant.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from array import array
from collections.abc import Collection, Sequence
from numbers import Complex, Integral, Real
from typing import Any, SupportsFloat, TypeGuard, cast


def check_int(name: str, value: Any, *, least: int | None = None, below: int | None = None) -> None:
    """Require a whole number >= ``least`` and < ``below``."""
    if not isinstance(value, Integral):
        raise ValueError(f"{name}={value!r}: must be a whole number")
    number = int(value)
    if least is not None and number < least:
        raise ValueError(f"{name}={value}: must be >= {least}")
    if below is not None and number >= below:
        raise ValueError(f"{name}={value}: must be < {below}")


def check_finite(name: str, value: Any) -> None:
    """Require a number that a float can hold, neither infinite nor NaN."""
    try:
        is_finite = isinstance(value, Real) and math.isfinite(value)
    except OverflowError:  # an integer no float holds
        is_finite = False
    if not is_finite:
        raise ValueError(f"{name}={value!r}: must be a finite number")


FLOAT32_MAX = (2 - 2.0**-23) * 2.0**127
"""The largest number that float32 holds."""


def as_float(value: object, what: str) -> float:
    """Return a finite number as a float.

    A bool is 1.0 or 0.0, and numbers of NumPy and PyTorch count.

    Args:
        value: of any type, from user code, a file or a server.
        what: names it in the message.

    Raises:
        ValueError: it is not a single real number, or not finite.
    """
    number = _real(value)
    if number is None or not math.isfinite(number):
        raise ValueError(f"{what} must be a finite number, got {brief_repr(value)}")
    return number


def as_score(value: object, what: str) -> float:
    """Return a score, a reward or a part of one as a float.

    float32 holds it as well, in which the learner computes. Whatever earns a trajectory something
    comes through here, wherever it is from: reward functions and their servers, tools and tool
    servers, environments, simulated users, tables of trajectories.

    Args:
        value: of any type, from user code, a file or a server.
        what: names it in the message.

    Raises:
        ValueError: it is not a single real number, not finite, or larger than float32 can hold.
    """
    number = as_float(value, what)
    if abs(number) > FLOAT32_MAX:
        raise ValueError(
            f"{what} must be a number that float32 holds, at most 3.4e38, got {brief_repr(value)};"
            " scale it"
        )
    return number


def looks_like_number(value: object) -> bool:
    """Return whether a value is meant as a number, not as text or a collection.

    The number may be infinite, NaN, or too large for a float.
    """
    if isinstance(value, str | bytes):
        return False
    if getattr(value, "shape", ()) != ():  # an array
        return False
    return isinstance(value, SupportsFloat | Complex)


def _real(value: object) -> float | None:
    """Return a real number as a float, perhaps NaN or infinite.

    Returns:
        None if the value is no real number, or beyond all floats.
    """
    if not looks_like_number(value):
        return None
    if isinstance(value, Complex) and not isinstance(value, Real):
        return None
    try:
        return float(cast(SupportsFloat, value))
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return None


def brief_repr(value: object) -> str:
    """Return a value's representation for a message, at most 200 characters."""
    try:
        return repr(value)[:200]
    except ValueError:  # an integer of more digits than Python writes
        return f"an {type(value).__name__} of thousands of digits"


def is_number(value: object) -> TypeGuard[float]:
    """Return whether a value is a finite real number, NumPy's included, and not a bool."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return False
    return -math.inf < cast(float, value) < math.inf


def check_str(name: str, value: Any) -> None:
    """Require a string."""
    if not isinstance(value, str):
        raise ValueError(f"{name}={value!r}: must be a string")


def check_bool(name: str, value: Any) -> None:
    """Require True or False: any text, even "false", would count as true."""
    if not isinstance(value, bool):
        raise ValueError(f"{name}={value!r}: must be True or False")


def check_collection(name: str, value: Any, of: str) -> None:
    """Require a collection, and not a string, which would count as a collection of characters."""
    if isinstance(value, str) or not isinstance(value, Collection):
        raise ValueError(f"{name}={value!r}: must be a tuple of {of}")


def check_ids(name: str, ids: tuple[Any, ...]) -> None:
    """Require whole numbers; checked once per type, since a context has many thousands."""
    for id_type in set(map(type, ids)):
        if not issubclass(id_type, Integral):
            wrong_id = next(token_id for token_id in ids if type(token_id) is id_type)
            raise ValueError(f"{name} holds {wrong_id!r}: ids must be whole numbers")


def digest_ids(ids: Sequence[int]) -> str:
    """Return a short digest of a list of token ids (BLAKE2b, 64 bits).

    The engine digests the context it conditioned on, the agent loop the ids it will pass to the
    learner: equality proves, per generation, that no token drifted.
    """
    return hashlib.blake2b(array("i", ids).tobytes(), digest_size=8).hexdigest()


_SURROGATE = re.compile("[\ud800-\udfff]")


def did_you_mean(name: str, known: Collection[str]) -> str:
    """Return a question with the nearest known name and a trailing space; empty if none is near.

    >>> did_you_mean("tool_agnet", ["tool_agent", "search_agent"])
    "did you mean 'tool_agent'? "
    """
    candidates = nearest(name, known)
    if not candidates:
        return ""
    return f"did you mean {candidates[0]!r}? "


def nearest(name: str, known: Collection[str]) -> list[str]:
    """Return up to three known names that may have been meant, the nearest first.

    A name is near if few letters have been inserted, left out, replaced or swapped with their
    neighbour (one in a name of up to seven letters, two up to eleven, three in longer ones), or if
    it has all words of the other and few more. Upper case and hyphens do not count.

    >>> nearest("prompt_length", ["max_prompt_length", "max_response_length"])
    ['max_prompt_length']
    >>> nearest("optimizer", ["steps"])
    []
    """
    candidates = []
    for known_name in known:
        distance = _distance(name, known_name)
        if distance < math.inf:
            candidates.append((distance, known_name))
    candidates.sort(key=lambda candidate: candidate[0])
    return [known_name for _, known_name in candidates[:3]]


def nearest_keys(path: str, keys: Collection[str]) -> list[str]:
    """Return keys ``section.leaf`` that may have been meant by another path, the nearest first.

    Section and leaf have to be near, each by itself: long paths of one section look alike although
    their leaves have nothing in common. A leaf alone may be in any section. If no key is near, one
    with the same leaf in another section may be meant: in a section inside the same one or, failing
    that, in one that is no deeper. It is returned if it is the only one of its kind.

    >>> nearest_keys("trainer.step", ["trainer.steps", "learner.stop"])
    ['trainer.steps']
    """
    section, _, leaf = path.rpartition(".")
    top_section = section.partition(".")[0]
    depth = path.count(".")

    candidates: list[tuple[float, int, str]] = []
    in_same_section: list[str] = []
    in_other_section: list[str] = []
    for key in keys:
        key_section, _, key_leaf = key.rpartition(".")
        key_depth = key.count(".")
        distance = _distance(leaf, key_leaf)
        if section:
            distance += _distance(section, key_section)

        if distance < math.inf:
            candidates.append((distance, abs(key_depth - depth), key))
        elif leaf == key_leaf and key.partition(".")[0] == top_section:
            in_same_section.append(key)
        elif leaf == key_leaf and key_depth <= depth:
            in_other_section.append(key)

    if candidates:
        candidates.sort(key=lambda candidate: candidate[:2])
        return [key for _, _, key in candidates]
    if len(in_same_section) == 1:
        return in_same_section
    if len(in_other_section) == 1:
        return in_other_section
    return []


_MAX_EXTRA_LETTERS = 0.5
"""Letters that a name may have besides all words of another one, per letter of that one."""


def _distance(name: str, known_name: str) -> float:
    """Return how far two names are apart, infinite if they are not near."""
    name = name.casefold().replace("-", "_")
    known_name = known_name.casefold().replace("-", "_")
    shorter, longer = sorted((name, known_name), key=len)
    extra_letters = len(longer) - len(shorter)

    if len(longer) < 3:
        max_edits = 0
    elif len(longer) <= 7:
        max_edits = 1
    elif len(longer) <= 11:
        max_edits = 2
    else:
        max_edits = 3
    if extra_letters <= max_edits:
        edits = _edits(name, known_name)
        if edits <= max_edits:
            return float(edits)

    has_all_words = set(shorter.split("_")) < set(longer.split("_"))
    if has_all_words and extra_letters <= _MAX_EXTRA_LETTERS * len(shorter):
        return float(extra_letters)
    return math.inf


def _edits(one: str, two: str) -> int:
    """Return how many letters are inserted, left out, replaced or swapped with their neighbour.

    This is the optimal string alignment distance, row by row of its table.
    """
    previous_row: list[int] = []
    row = list(range(len(two) + 1))
    for i, letter in enumerate(one, 1):
        next_row = [i]
        for j, other_letter in enumerate(two, 1):
            replaced = row[j - 1]
            if letter != other_letter:
                replaced += 1
            edits = min(row[j] + 1, next_row[j - 1] + 1, replaced)

            swapped = i > 1 and j > 1 and letter == two[j - 2] and one[i - 2] == other_letter
            if swapped:
                edits = min(edits, previous_row[j - 2] + 1)
            next_row.append(edits)
        previous_row = row
        row = next_row
    return row[-1]


def has_lone_surrogate(text: str) -> bool:
    """Return whether the text holds a lone surrogate."""
    return _SURROGATE.search(text) is not None


def replace_lone_surrogates(text: str) -> str:
    r"""Replace each lone surrogate by a question mark.

    >>> replace_lone_surrogates("one \ud83d two")
    'one ? two'
    """
    return text.encode("utf-8", "replace").decode("utf-8")


def json_line(value: Any) -> str:
    r"""Return a line of JSON that every reader takes: each lone surrogate becomes a question mark.

    >>> json_line({"text": "one \ud83d two"})
    '{"text": "one ? two"}\n'
    """
    return replace_lone_surrogates(json.dumps(value, ensure_ascii=False)) + "\n"
