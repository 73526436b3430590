"""Text that others wrote: what a person sees of it, and patterns that search it in linear time."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable

# --- what a person sees ---------------------------------------------------------------------------

_UNSEEN_CATEGORIES = frozenset({"Cc", "Cf", "Zl", "Zp", "Co", "Cs"})
_UNSEEN_LETTERS = frozenset(
    [
        0x034F,  # a joiner
        0x115F,  # from here on letters that only fill a gap
        0x1160,
        0x17B4,
        0x17B5,
        0x3164,
        0xFFA0,
        *range(0x180B, 0x1810),  # variation selectors
        *range(0xFE00, 0xFE10),
        0x2065,  # more selectors, and what is reserved for such
        *range(0xFFF0, 0xFFF9),
        *range(0xE0000, 0xE1000),
    ]
)
"""The rest of Unicode's ``Default_Ignorable_Code_Point``: letters and marks that are not drawn."""

_EMOJI = (
    "\u00a9\u00ae\u203c\u2049\u2122\u2139\u2194-\u21aa\u231a-\u23ff\u24c2\u25aa-\u25fe"
    "\u2600-\u27bf\u2934\u2935\u2b05-\u2b55\u3030\u303d\u3297\u3299\U0001f000-\U0001faff"
)
"""Ranges of emoji."""
_PART_OF_EMOJI = re.compile(
    f"((?<=[{_EMOJI}])[\ufe0e\ufe0f]"  # drawn in colour, or as text
    "|(?<=[0-9#*])\ufe0f(?=\u20e3)"  # a key
    f"|(?<=[{_EMOJI}])\u200d(?=[{_EMOJI}])"  # two joined to one
    f"|(?<=[{_EMOJI}]\ufe0f)\u200d(?=[{_EMOJI}]))"
)


class _Escapes(dict[int, str]):
    """Spelling of each character that is not seen; only these are kept."""

    def __missing__(self, code: int) -> int | str:
        is_unseen = code in _UNSEEN_LETTERS or unicodedata.category(chr(code)) in _UNSEEN_CATEGORIES
        if not is_unseen:
            return code
        escape = _escape(code)
        self[code] = escape
        return escape


_SHORT_ESCAPES = {ord("\t"): r"\t", ord("\n"): r"\n", ord("\r"): r"\r"}


def _escape(code: int) -> str:
    if code in _SHORT_ESCAPES:
        return _SHORT_ESCAPES[code]
    if code < 0x100:
        return f"\\x{code:02x}"
    if code < 0x10000:
        return f"\\u{code:04x}"
    return f"\\U{code:08x}"


_ESCAPES = _Escapes({ord("\t"): "\t", ord("\n"): "\n"})
_ONE_LINE_ESCAPES = _Escapes()


def counted(number: int, noun: str) -> str:
    """Return a number with its noun.

    >>> counted(1, "step"), counted(0, "trajectory"), counted(2000, "batch")
    ('1 step', '0 trajectories', '2000 batches')
    """
    return f"{number} {noun if number == 1 else plural(noun)}"


def plural(noun: str) -> str:
    """Return the plural of a regular noun.

    >>> plural("day"), plural("query"), plural("process")
    ('days', 'queries', 'processes')
    """
    if noun.endswith(("ch", "s", "sh", "x")):
        return f"{noun}es"
    if noun.endswith("y") and noun[-2] not in "aeiou":
        return f"{noun[:-1]}ies"
    return f"{noun}s"


def printable(text: str, *, one_line: bool = False) -> str:
    r"""Return text in which every character is spelt out that could deceive its reader.

    Such characters control a terminal, hide, or move what is next to them: Unicode's control,
    format, private and surrogate characters, line separators, and what is not drawn (variation
    selectors, tags, filling letters). What belongs to an emoji stays.

    Everything that a model, a tool, a client, a server or a file wrote goes through this before a
    person sees it. The report's page does the same.

    Args:
        one_line: also spell out tabs and ends of lines, so that a line cannot be forged.

    >>> printable("a\x1b[2J, b\u202ec\n"), printable("a\nERROR b", one_line=True)
    ('a\\x1b[2J, b\\u202ec\n', 'a\\nERROR b')
    """
    if text.isascii() and text.isprintable():
        return text
    escapes = _ONE_LINE_ESCAPES if one_line else _ESCAPES
    if text.isascii():
        return text.translate(escapes)
    # The pattern's matches, which stay, are every second part.
    parts = _PART_OF_EMOJI.split(text)
    parts[::2] = [part.translate(escapes) for part in parts[::2]]
    return "".join(parts)


# --- patterns -------------------------------------------------------------------------------------

NEVER = "(?!)"
"""A pattern that matches nothing."""


def any_of(words: Iterable[str]) -> str:
    """Return a pattern that matches the longest of some words; :data:`NEVER` if there are none.

    Words that begin alike share that part, so that a search reads each character once, however many
    words there are: an alternation of six thousand placeholders takes seconds for a text of their
    beginnings.

    >>> any_of(["<end>", "<endless>", "x"])
    '(?:<end(?:>|less>)|x)'
    """
    root: _Node = {}
    for word in words:
        node = root
        for character in word:
            node = node.setdefault(character, {})
        node[""] = {}
    if not root:
        return NEVER
    return _pattern(root)


_Node = dict[str, "_Node"]
"""What may follow, by its first character; "" ends a word."""

_MAX_BRANCHINGS = 24
"""How often other words may branch off one word.

The library that compiles patterns recurses into each branch.
"""


def _pattern(node: _Node, branchings: int = 0) -> str:
    """Return the pattern of what may follow.

    Args:
        branchings: how often other words branch off before.
    """
    start = ""
    while len(node) == 1:
        character, node = next(iter(node.items()))
        if not character:
            return start
        start += re.escape(character)

    if branchings == _MAX_BRANCHINGS:
        endings = sorted(_endings(node), key=len, reverse=True)
        return f"{start}(?:{'|'.join(map(re.escape, endings))})"

    branches = []
    for character, next_node in sorted(node.items()):
        if character:
            branches.append(re.escape(character) + _pattern(next_node, branchings + 1))
    pattern = f"{start}(?:{'|'.join(branches)})"
    if "" in node:
        pattern += "?"
    return pattern


def _endings(node: _Node) -> list[str]:
    """Return everything that may follow, word by word."""
    endings = []
    stack = [("", node)]
    while stack:
        text, node = stack.pop()
        for character, next_node in node.items():
            if character:
                stack.append((text + character, next_node))
            else:
                endings.append(text)
    return endings
