"""Truncation by tokens: exact fits are kept, the named side is cut, ten megabytes are cheap."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jax_agent_rl.tools.base import (
    CHARS_PER_TOKEN,
    MARKER,
    truncate_characters,
    truncate_text,
)
from tests.fakes import FakeCodec

codec = FakeCodec()


def cut(text, limit, side):
    return truncate_text(text, limit, side, encode=codec.encode_text, decode=codec.decode)


def words(n):
    return " ".join(f"w{i}" for i in range(n))


@pytest.mark.parametrize("side", ["left", "middle", "right"])
def test_a_result_that_fits_exactly_is_untouched(side):
    assert cut(words(10), 10, side) == words(10)


def test_half_a_surrogate_pair_becomes_text_that_can_be_tokenized():
    assert cut("a \ud83d b", 10, "right") == "a ? b"


@pytest.mark.parametrize(
    ("side", "expected"),
    [
        ("left", f"{MARKER} w8 w9"),
        ("right", f"w0 w1{MARKER}"),
        ("middle", f"w0{MARKER} w9"),
    ],
)
def test_the_side_named_is_the_side_cut(side, expected):
    assert cut(words(10), 3, side) == expected


@given(
    st.lists(st.text(alphabet="ab\n ", max_size=6), max_size=60),
    st.integers(1, 20),
    st.sampled_from(["left", "middle", "right"]),
)
def test_the_limit_is_never_exceeded_and_short_results_are_kept(pieces, limit, side):
    text = " ".join(pieces)
    result = cut(text, limit, side)
    assert len(codec.encode_text(result)) <= limit
    if len(codec.encode_text(text)) <= limit:
        assert result == text


@pytest.mark.parametrize(
    ("side", "expected"),
    [("left", f"{MARKER}wxyz"), ("right", f"abcd{MARKER}"), ("middle", f"ab{MARKER}yz")],
)
def test_characters_are_cut_on_the_same_sides(side, expected):
    alphabet = "abcdefghijklmnopqrstuvwxyz"
    assert truncate_characters(alphabet, len(MARKER) + 4, side) == expected
    assert truncate_characters(alphabet, len(alphabet), side) == alphabet


def _bytes(text: str) -> list[int]:
    return list(text.encode())


def _text(ids: Sequence[int]) -> str:
    return bytes(ids).decode(errors="replace")


@given(st.text(max_size=80), st.integers(1, 60), st.sampled_from(["left", "middle", "right"]))
def test_a_cut_inside_a_character_leaves_no_replacement_character(text, limit, side):
    text = text.replace("\ufffd", "")
    result = truncate_text(text, limit, side, encode=_bytes, decode=_text)
    assert "\ufffd" not in result
    assert len(result.encode()) <= limit


def test_ten_megabytes_are_not_tokenized():
    longest = 0

    def encode(text: str) -> list[int]:
        nonlocal longest
        longest = max(longest, len(text))
        return codec.encode_text(text)

    result = truncate_text("x " * 5_000_000, 8, "middle", encode=encode, decode=codec.decode)
    assert MARKER in result
    assert longest <= 8 * CHARS_PER_TOKEN
