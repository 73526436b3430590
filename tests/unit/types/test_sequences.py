"""How far two sequences are equal."""

from os.path import commonprefix

from hypothesis import given
from hypothesis import strategies as st

from jax_agent_rl.types.sequences import common_prefix_length

TEXTS = st.text("ab", max_size=6)


@given(TEXTS, TEXTS)
def test_the_common_beginning_is_that_of_paths(one: str, other: str):
    assert common_prefix_length(one, other) == len(commonprefix([one, other]))
    assert common_prefix_length(iter(one), list(other)) == common_prefix_length(other, one)
