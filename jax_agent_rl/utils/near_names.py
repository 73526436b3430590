"""The names that a user may have meant by a misspelt one."""

from __future__ import annotations

import math
from collections.abc import Collection


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
