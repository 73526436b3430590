"""Fenced blocks are those of CommonMark, by markdown-it-py, which is written by others."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from jax_agent_rl.utils.fences import fenced, fenced_blocks

_COMMONMARK = MarkdownIt("commonmark").disable(["html_block", "list", "blockquote"])
_LINES = st.one_of(
    st.builds(
        lambda indent, kind, length, info: " " * indent + kind * length + info,
        st.integers(0, 5),
        st.sampled_from("`~"),
        st.integers(1, 6),
        st.sampled_from(["", " ", "python", " Python x", "a`b", "   "]),
    ),
    st.sampled_from(["", "   ", "word", "    four", "     five", "print(1)", "  two"]),
)


def contents(text):
    return [(block.language, block.fence, block.content) for block in fenced_blocks(text)]


@given(st.lists(_LINES, max_size=12).map("\n".join))
def test_blocks_are_those_of_commonmark(text):
    """A block that is not closed reaches to the end of the text."""
    expected = []
    for token in _COMMONMARK.parse(text):
        if token.type == "fence":
            words = token.info.split()
            language = words[0].lower().partition("`")[0] if words else ""
            expected.append((language, token.markup, token.content.rstrip()))
    found_blocks = [
        (language, fence, content.rstrip()) for language, fence, content in contents(text)
    ]
    assert found_blocks == expected


@pytest.mark.parametrize(
    ("text", "language", "content", "is_closed"),
    [
        ("```python\na\n```", "python", "a\n", True),
        ("```Python3 title=x\na\n```", "python3", "a\n", True),
        ("``` {.python .numbered}\na\n```", "python", "a\n", True),
        ("~~~\n```\n~~~~", "", "```\n", True),
        ("````\n```\n````", "", "```\n", True),
        ("```py\r\na\r\n```\r\n", "py", "a\r\n", True),
        ("```c++\na", "c++", "a", False),
        ("```\na\n``` b", "", "a\n``` b", False),
        ("```\n\x0b\u2028\n```", "", "\x0b\u2028\n", True),
        ("1. So:\n\n   ```python\n   a\n     b\n   ```", "python", "a\n  b\n", True),
        ("- x\n  - y\n\n      ```python\n      a\n      ```", "python", "a\n", True),
        (
            "2) So:\n   ```python\nnot indented like the item\n   ```",
            "python",
            "not indented like the item\n",
            True,
        ),
        ("* ```python\n  a\n  ```", "python", "a\n", True),
        ("```python print(3)```", "python", "print(3)", True),
        ("```python```", "python", "", True),
    ],
)
def test_one_block_is_found(text, language, content, is_closed):
    (block,) = fenced_blocks(text)
    assert (block.language, block.content, block.is_closed) == (language, content, is_closed)


@pytest.mark.parametrize(
    "text", ["", "``", "a ```python", "    ```\n", "```a`b\n", "1. x\ny\n    ```python\n"]
)
def test_text_without_fences_has_no_block(text):
    assert contents(text) == []


@given(st.lists(_LINES, max_size=6).map("\n".join), st.lists(_LINES, max_size=6).map("\n".join))
def test_what_follows_a_block_begins_at_its_end(head, tail):
    text = f"{head}\n{fenced('x')}\n{tail}"
    blocks = list(fenced_blocks(text))
    for block in blocks:
        if block.is_closed:
            later = [b.content for b in blocks if b.end > block.end]
            assert later == [b.content for b in fenced_blocks(text[block.end :])]


@given(st.text(alphabet="`~ \nab"), st.sampled_from(["", "python"]))
def test_no_text_ends_the_block_it_is_written_into(text, language):
    (block,) = fenced_blocks(fenced(text, language))
    assert block.is_closed and block.language == language
    assert block.content.removesuffix("\n") == text.removesuffix("\n")
