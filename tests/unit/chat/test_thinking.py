"""What is thinking, for agents that look for calls in plain text."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jax_agent_rl.chat.thinking import ALL_THINK_TAGS, ends_thinking, outside_thinking

TAGS = [tag for tags in ALL_THINK_TAGS for tag in tags]
texts = st.lists(st.sampled_from([*TAGS, "a", "<tool>", "</tool>", "\n", " "]), max_size=12).map(
    "".join
)
one_kind = st.lists(st.sampled_from(["<think>", "</think>", "a"]), max_size=8).map("".join)


@pytest.mark.parametrize(("begin", "end"), ALL_THINK_TAGS)
def test_a_block_is_blanked_and_what_stands_around_it_keeps_its_place(begin, end):
    text = f"a {begin}\nlook: <tool>x</tool>{end} <tool>y</tool>"
    seen = outside_thinking(text)
    assert seen.split() == ["a", "<tool>y</tool>"]
    assert seen.index("<tool>y") == text.index("<tool>y")
    assert len(seen) == len(text)
    assert not ends_thinking(text)


@pytest.mark.parametrize(("begin", "end"), ALL_THINK_TAGS)
def test_a_block_that_was_cut_reaches_to_the_end(begin, end):
    assert outside_thinking(f"a {begin} <tool>x</tool>").split() == ["a"]
    assert ends_thinking(f"a {begin} x")


@pytest.mark.parametrize(("begin", "end"), ALL_THINK_TAGS)
def test_a_first_closing_tag_that_nothing_opened_hides_everything_before_it(begin, end):
    assert outside_thinking(f"<tool>x</tool>{end}y").split() == ["y"]


@pytest.mark.parametrize(("begin", "end"), ALL_THINK_TAGS)
def test_a_later_closing_tag_that_nothing_opened_is_text(begin, end):
    assert outside_thinking(f"{begin}a{end}b<tool>x</tool>{end}y").split() == [
        f"b<tool>x</tool>{end}y"
    ]
    assert outside_thinking(f"a{end}b {end}y", thinking=True).split() == ["b", f"{end}y"]


def test_a_text_that_begins_in_a_block_is_thinking_until_a_closing_tag():
    assert outside_thinking("<tool>x</tool>", thinking=True).split() == []
    assert ends_thinking("<tool>x</tool>", thinking=True)
    assert outside_thinking("x</think>y", thinking=True).split() == ["y"]
    assert not ends_thinking("x</think>y", thinking=True)


def test_only_its_own_closing_tag_ends_a_block():
    assert outside_thinking("<think>a[/THINK]b</think>c").split() == ["c"]


@given(texts, st.booleans())
def test_length_and_lines_are_kept_and_only_blanks_are_new(text, thinking):
    seen = outside_thinking(text, thinking=thinking)
    assert len(seen) == len(text)
    assert all(
        new == old or (new == " " and not old.isspace())
        for new, old in zip(seen, text, strict=True)
    )


@given(one_kind, one_kind, st.booleans())
def test_parts_of_a_turn_may_be_read_one_after_another(first, second, thinking):
    between = ends_thinking(first, thinking=thinking)
    assert ends_thinking(first + second, thinking=thinking) == ends_thinking(
        second, thinking=between
    )
