"""What is not seen is spelt out; patterns of many words find what an alternation of them finds."""

import itertools
import re
import sys
import unicodedata

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from jax_agent_rl.utils.text import any_of, printable

UNSEEN = ("Cc", "Cf", "Zl", "Zp", "Co", "Cs")
IGNORABLE = "\u034f\u115f\u1160\u17b4\u17b5\u180b\u180f\u3164\ufe00\ufe0f\uffa0\U000e0100\U000e01ef"
"""Of Unicode's DerivedCoreProperties.txt, Default_Ignorable_Code_Point: letters and marks of each
of its ranges."""


@pytest.mark.parametrize("category", UNSEEN)
def test_every_character_that_is_not_seen_is_spelt_out(category):
    characters = [
        chr(code)
        for code in range(sys.maxunicode + 1)
        if unicodedata.category(chr(code)) == category
    ]
    for character in characters:
        spelt = printable(character)
        assert (
            spelt == character if character in "\t\n" else spelt.isascii() and spelt.isprintable()
        )
        assert printable(character, one_line=True).isprintable()
    assert len({printable(character) for character in characters}) == len(characters)


def test_letters_that_nothing_is_drawn_for_are_spelt_out():
    for character in IGNORABLE:
        assert printable(f"a{character}b").isascii()


def test_what_is_seen_stays():
    seen = [
        chr(code)
        for code in range(sys.maxunicode + 1)
        if unicodedata.category(chr(code)) not in (*UNSEEN, "Cn")
    ]
    spelt = {ord(character) for character in seen if printable(character) != character}
    ranges = (range(0x180B, 0x1810), range(0xFE00, 0xFE10), range(0xE0100, 0xE01F0))
    assert spelt == {
        0x34F,
        0x115F,
        0x1160,
        0x17B4,
        0x17B5,
        0x3164,
        0xFFA0,
        *itertools.chain(*ranges),
    } - {0x180E}


EMOJI = (
    "\u2764\ufe0f",
    "\u260e\ufe0e",
    "1\ufe0f\u20e3",
    "\U0001f469\U0001f3fd\u200d\U0001f4bb",
    "\u2764\ufe0f\u200d\U0001f525",
)


@pytest.mark.parametrize("text", EMOJI)
def test_emoji_stay_readable(text):
    assert printable(f"a{text}b") == f"a{text}b"


BROKEN_EMOJI = (
    "a\ufe0f",
    "1\ufe0f2",
    "\u2764\u200da",
    "a\u200d\u2764",
    "\u2764\ufe0f\ufe0f",
    "\u2764\U000e0041",
)


@pytest.mark.parametrize("text", BROKEN_EMOJI)
def test_a_part_of_an_emoji_elsewhere_is_spelt_out(text):
    assert printable(text) != text


@given(st.text())
def test_no_text_ends_a_line_or_moves_the_cursor(text):
    assert len(f"a {printable(text, one_line=True)} b".splitlines()) == 1
    assert not set(printable(text)) & set("\x1b\x07\x08\x0b\x0c\r\x85\x9b\u202e\u2028")


words = st.sets(st.text("ab<|.(\\", min_size=1, max_size=6), max_size=12)


@given(words=words, text=st.text("ab<|.(\\", max_size=60))
@example(words={"a" * n for n in range(1, 300)}, text="a" * 1000)
def test_the_longest_word_at_a_place_is_found(words, text):
    plain = "|".join(re.escape(word) for word in sorted(words, key=len, reverse=True)) or "(?!)"
    assert re.findall(any_of(words), text) == re.findall(plain, text)
