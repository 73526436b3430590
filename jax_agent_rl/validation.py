r"""Checks of values from outside (JSON, user code) that no type checker has seen, and the digest of ids.

Each check raises a ``ValueError`` that names the field, its value and the expected kind. Numbers
may be numpy's. JSON can spell one half of a surrogate pair (``"\ud83d"``), and models do, but
nothing can encode it.
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
        finite = isinstance(value, Real) and math.isfinite(value)
    except OverflowError:  # an integer no float holds
        finite = False
    if not finite:
        raise ValueError(f"{name}={value!r}: must be a finite number")


FLOAT32_MAX = (2 - 2.0**-23) * 2.0**127
"""The largest number that float32 holds."""


def as_float(value: object, what: str) -> float:
    """Return a finite number as a float; a bool is 1.0 or 0.0, and numbers of NumPy and PyTorch count.

    Args:
        value: of any type, from user code, a file or a server.
        what: names it in the message.

    Raises:
        ValueError: it is not a single real number, or not finite.
    """
    number = _real(value)
    if number is None or not math.isfinite(number):
        raise ValueError(f"{what} must be a finite number, got {shown(value)}")
    return number


def as_score(value: object, what: str) -> float:
    """Return a score, a reward or a part of one as a float that float32 holds, too: the learner computes in it.

    Whatever earns a trajectory something comes through here, wherever it is from: reward functions
    and their servers, tools and tool servers, environments, simulated users, tables of
    trajectories.

    Args:
        value: see :func:`as_float`.
        what: names it in the message.

    Raises:
        ValueError: it is not a single real number, not finite, or larger than float32 can hold.
    """
    number = as_float(value, what)
    if abs(number) > FLOAT32_MAX:
        raise ValueError(
            f"{what} must be a number that float32 holds, at most 3.4e38, got {shown(value)};"
            " scale it"
        )
    return number


def looks_like_number(value: object) -> bool:
    """Return whether a value is meant as a number, be it finite or not, or too large: not text, not a collection."""
    if isinstance(value, str | bytes) or getattr(value, "shape", ()) != ():
        return False
    return isinstance(value, SupportsFloat | Complex)


def _real(value: object) -> float | None:
    """Return a number as a float, perhaps NaN or infinite; None if it is none, or beyond all floats."""
    if not looks_like_number(value) or isinstance(value, Complex) and not isinstance(value, Real):
        return None
    try:
        return float(cast(SupportsFloat, value))
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return None


def shown(value: object) -> str:
    """Return a value's representation for a message, at most 200 characters."""
    try:
        return repr(value)[:200]
    except ValueError:  # an integer of more digits than Python writes
        return f"an {type(value).__name__} of thousands of digits"


def is_number(value: object) -> TypeGuard[float]:
    """Return whether a value is a finite real number, NumPy's included, and not a bool."""
    return (
        isinstance(value, Real)
        and not isinstance(value, bool)
        and -math.inf < cast(float, value) < math.inf
    )


def check_str(name: str, value: Any) -> None:
    """Require a string."""
    if not isinstance(value, str):
        raise ValueError(f"{name}={value!r}: must be a string")


def check_bool(name: str, value: Any) -> None:
    """Require True or False: any text, even "false", would count as true."""
    if not isinstance(value, bool):
        raise ValueError(f"{name}={value!r}: must be True or False")


def check_collection(name: str, value: Any, of: str) -> None:
    """Require a collection, and not a string, which would count as one of characters."""
    if isinstance(value, str) or not isinstance(value, Collection):
        raise ValueError(f"{name}={value!r}: must be a tuple of {of}")


def check_ids(name: str, ids: tuple[Any, ...]) -> None:
    """Require whole numbers; checked once per type, since a context has many thousands."""
    for kind in set(map(type, ids)):
        if not issubclass(kind, Integral):
            wrong = next(i for i in ids if type(i) is kind)
            raise ValueError(f"{name} holds {wrong!r}: ids must be whole numbers")


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
    near = nearest(name, known)
    return f"did you mean {near[0]!r}? " if near else ""


def nearest(name: str, known: Collection[str]) -> list[str]:
    """Return up to three known names that may have been meant, the nearest first; none for what is far from all.

    A name is near if few letters have been inserted, left out, replaced or swapped with their
    neighbour (one in a name of up to seven letters, two up to eleven, three in longer ones), or if
    it has all words of the other and few more. Upper case and hyphens do not count.

    >>> nearest("prompt_length", ["max_prompt_length", "max_response_length"]), nearest("optimizer", ["steps"])
    (['max_prompt_length'], [])
    """
    found = [(_distance(name, other), other) for other in known]
    return [
        other for distance, other in sorted(found, key=lambda pair: pair[0]) if distance < math.inf
    ][:3]


def nearest_keys(path: str, keys: Collection[str]) -> list[str]:
    """Return keys ``section.leaf`` that may have been meant by another path, the nearest first.

    Section and leaf have to be near, each by itself: long paths of one section look alike although
    their leaves have nothing in common. A leaf alone may be in any section; one in a wrong section
    is found if only one other has it: a section inside the same one, or one that is no deeper.

    >>> nearest_keys("trainer.step", ["trainer.steps", "learner.stop"])
    ['trainer.steps']
    """
    section, _, leaf = path.rpartition(".")
    near: list[tuple[float, str]] = []
    in_same_part: list[str] = []
    in_other_part: list[str] = []
    for key in keys:
        its_section, _, its_leaf = key.rpartition(".")
        between_leaves = _distance(leaf, its_leaf)
        between_sections = _distance(section, its_section) if section else 0.0
        if between_leaves + between_sections < math.inf:
            near.append((between_leaves + between_sections, key))
        elif leaf == its_leaf and key.partition(".")[0] == section.partition(".")[0]:
            in_same_part.append(key)
        elif leaf == its_leaf and key.count(".") <= path.count("."):
            in_other_part.append(key)
    for misplaced in (in_same_part, in_other_part):
        if not near and len(misplaced) == 1:
            return misplaced
    return [
        key
        for _, key in sorted(
            near, key=lambda pair: (pair[0], abs(pair[1].count(".") - path.count(".")))
        )
    ]


_MORE_LETTERS = 0.5
"""Letters that a name may have besides all words of another one, by that one's."""


def _distance(name: str, other: str) -> float:
    """Return how far two names are apart, infinite if they are not near."""
    one, two = (text.casefold().replace("-", "_") for text in (name, other))
    shorter, longer = sorted((one, two), key=len)
    if len(longer) < 3:
        allowed = 0
    elif len(longer) <= 7:
        allowed = 1
    elif len(longer) <= 11:
        allowed = 2
    else:
        allowed = 3
    if len(longer) - len(shorter) <= allowed:
        edits = _edits(one, two)
        if edits <= allowed:
            return float(edits)
    words_of_shorter, words_of_longer = set(shorter.split("_")), set(longer.split("_"))
    more = len(longer) - len(shorter)
    if words_of_shorter < words_of_longer and more <= _MORE_LETTERS * len(shorter):
        return float(more)
    return math.inf


def _edits(one: str, two: str) -> int:
    """Return the number of letters inserted, left out, replaced or swapped: optimal string alignment."""
    previous_row: list[int] = []
    row = list(range(len(two) + 1))
    for i, letter in enumerate(one, 1):
        next_row = [i]
        for j, other in enumerate(two, 1):
            edits = min(row[j] + 1, next_row[j - 1] + 1, row[j - 1] + (letter != other))
            if i > 1 and j > 1 and letter == two[j - 2] and one[i - 2] == other:
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
