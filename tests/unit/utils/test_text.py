"""Patterns of many words find what an alternation of them finds."""

import re

from hypothesis import example, given
from hypothesis import strategies as st

from jax_agent_rl.utils.text import any_of

words = st.sets(st.text("ab<|.(\\", min_size=1, max_size=6), max_size=12)


@given(words=words, text=st.text("ab<|.(\\", max_size=60))
@example(words={"a" * n for n in range(1, 300)}, text="a" * 1000)
def test_the_longest_word_at_a_place_is_found(words, text):
    plain = "|".join(re.escape(word) for word in sorted(words, key=len, reverse=True)) or "(?!)"
    assert re.findall(any_of(words), text) == re.findall(plain, text)
