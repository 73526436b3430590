r"""Fenced code blocks of Markdown, as CommonMark defines them.

See https://spec.commonmark.org/0.31.2/#fenced-code-blocks. A block begins with a line of at least
three backticks or tildes, and ends with a line of at least as many of the same kind and nothing
else. So a closing fence never opens a block, and a longer fence holds shorter ones::

    ````markdown
    ```python
    print(1)          <- one block of Markdown; there is no Python here
    ```
    ````

Models do not keep all of the rules. Two more forms are blocks here:

- ``- ```python`` and what follows it: fences in list items, also where the code below is not
  indented like the item.
- A line that holds everything: ```` ```python print(1)``` ````. To CommonMark it is text, so no
  other block changes.

Block quotes and HTML are not looked for. One pass over the text, in linear time.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

MAX_INDENT = 3
"""Columns by which a fence may be indented.

What is indented further is text of a block, or an indented block.
"""
_TAB = 4
_LINE = re.compile(r"[^\r\n]*+(?:\r\n|\n|\r|\Z)")
_FENCE = re.compile(r"(?P<indent>[ \t]*+)(?P<fence>`{3,}+|~{3,}+)(?P<info>[^\r\n]*)")
_LIST_MARKER = re.compile(r"[ \t]*+(?:[-+*]|[0-9]{1,9}[.)])[ \t]++")
_LANGUAGE = re.compile(r"[ \t{.]*+([\w+#-]*)")
_LEADING_FENCE = re.compile(r"^[ \t]*(`{3,})", re.MULTILINE)


@dataclass(frozen=True, kw_only=True, slots=True)
class FencedBlock:
    """One fenced block.

    Attributes:
        language: first word of the opening fence's info string, in lower case; "" if there is none.
        content: lines between the fences.
        fence: characters of the opening fence, such as three backticks.
        is_closed: whether there is a closing fence; a block without one reaches to the end of the
            text.
        end: offset in the text behind the block.
    """

    language: str
    content: str
    fence: str
    is_closed: bool
    end: int


def fenced_blocks(text: str) -> Iterator[FencedBlock]:
    r"""Yield the fenced blocks of a text, in order.

    >>> text = "So:\n```python\nprint(1)\n```\nprints 1."
    >>> [(block.language, block.content) for block in fenced_blocks(text)]
    [('python', 'print(1)\n')]
    """
    item_column = 0  # where the text of the last list item begins, 0 outside of lists
    lines = _LINE.finditer(text)
    for line in lines:
        if not line[0].strip():
            continue

        start = _skip_list_markers(text, line.start())
        if start > line.start():
            item_column = _width(text[line.start() : start])
        else:
            item_column = min(item_column, _indent_of(line[0]))

        opening = _FENCE.match(text, start)
        if opening is None:
            continue
        fence = opening["fence"]
        info = opening["info"].strip(" \t")
        column = _width(text[line.start() : opening.start("fence")])
        if column - item_column > MAX_INDENT:
            continue

        # An info string with backticks opens no block, but the whole block may be in this line.
        if fence[0] == "`" and "`" in info:
            if info.endswith(fence) and fence not in info[: -len(fence)]:
                yield _one_line_block(info.removesuffix(fence), fence, end=line.end())
            continue
        yield _read_block(lines, opening, column=column, item_column=item_column)


def _skip_list_markers(text: str, start: int) -> int:
    """Return the offset behind the markers of list items with which a line begins."""
    while marker := _LIST_MARKER.match(text, start):
        start = marker.end()
    return start


def _one_line_block(info: str, fence: str, *, end: int) -> FencedBlock:
    language = _LANGUAGE.match(info)
    assert language is not None  # the pattern matches an empty text as well
    content = info[language.end() :].strip()
    return FencedBlock(
        language=language[1].lower(), content=content, fence=fence, is_closed=True, end=end
    )


def _read_block(
    lines: Iterator[re.Match[str]], opening: re.Match[str], *, column: int, item_column: int
) -> FencedBlock:
    """Read a block from the lines that follow its opening fence.

    Args:
        lines: of the text; the block's lines are consumed.
        opening: match of the opening fence.
        column: where the opening fence begins.
        item_column: where the text of the list item begins that it is in; 0 outside of lists.
    """
    fence = opening["fence"]
    language = _LANGUAGE.match(opening["info"])
    assert language is not None  # the pattern matches an empty text as well

    content: list[str] = []
    is_closed = False
    for line in lines:
        if _closes(line[0], fence, item_column):
            is_closed = True
            break
        content.append(_without_indent(line[0], column))
    return FencedBlock(
        language=language[1].lower(),
        content="".join(content),
        fence=fence,
        is_closed=is_closed,
        end=line.end() if is_closed else len(opening.string),
    )


def _closes(line: str, fence: str, item_column: int) -> bool:
    closing = _FENCE.match(line)
    if closing is None:
        return False
    if not closing["fence"].startswith(fence):
        return False
    if closing["info"].strip(" \t"):
        return False
    return _width(closing["indent"]) - item_column <= MAX_INDENT


def _indent_of(line: str) -> int:
    return _width(line[: len(line) - len(line.lstrip(" \t"))])


def _width(indent: str) -> int:
    return len(indent.expandtabs(_TAB))


def _without_indent(line: str, columns: int) -> str:
    """Remove up to this many columns of white space from the beginning of a line."""
    indent = line[: len(line) - len(line.lstrip(" \t"))]
    if not columns or not indent:
        return line
    return indent.expandtabs(_TAB)[columns:] + line[len(indent) :]


def fenced(text: str, language: str = "") -> str:
    r"""Return a text as a fenced block that it cannot end: its fence is longer than those inside.

    >>> fenced("a", "text")
    '```text\na\n```'
    """
    longest = max((len(run) for run in _LEADING_FENCE.findall(text)), default=0)
    fence = "`" * max(3, longest + 1)
    line_end = "" if text.endswith("\n") else "\n"
    return f"{fence}{language}\n{text}{line_end}{fence}"
