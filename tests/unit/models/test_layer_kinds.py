"""Layers are split into runs that repeat a pattern: all of them, in order, in the fewest loops."""

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from jax_agent_rl.models.layer_kinds import repeating_runs
from tests.examples import examples

KINDS = st.lists(st.sampled_from("DAE"), min_size=1, max_size=9).map(tuple)


def split(kinds: str) -> list[tuple[str, int]]:
    return [("".join(run.pattern), run.repeats) for run in repeating_runs(tuple(kinds))]


def test_equal_layers_are_one_run():
    assert split("A" * 61) == [("A", 61)]
    assert split("A") == [("A", 1)]


def test_a_pattern_is_one_run_however_long_it_is():
    assert split("DDDA" * 12) == [("DDDA", 12)]


def test_first_and_last_layers_of_their_own_are_runs_of_their_own():
    assert split("D" * 3 + "E" * 58) == [("D", 3), ("E", 58)]
    assert split("LLLLLG" * 8 + "LL") == [("LLLLLG", 8), ("L", 2)]


@given(KINDS)
@settings(max_examples=examples(200))
def test_runs_are_all_layers_in_order(kinds: tuple[str, ...]):
    layers: list[str] = []
    for run in repeating_runs(kinds):
        assert run.first == len(layers)
        layers += run.pattern * run.repeats
        assert run.end == len(layers)
    assert tuple(layers) == kinds


@given(KINDS)
@settings(max_examples=examples(100))
def test_no_other_split_has_patterns_of_fewer_layers(kinds: tuple[str, ...]):
    found = sum(len(run.pattern) for run in repeating_runs(kinds))
    cuts_between = range(1, len(kinds))
    for count in range(len(kinds)):
        for cuts in itertools.combinations(cuts_between, count):
            bounds = [0, *cuts, len(kinds)]
            parts = [kinds[begin:end] for begin, end in itertools.pairwise(bounds)]
            assert found <= sum(period(part) for part in parts)


def period(part: tuple[str, ...]) -> int:
    """Return the length of the shortest pattern that repeats to these layers."""
    for size in range(1, len(part) + 1):
        if len(part) % size == 0 and part[:size] * (len(part) // size) == part:
            return size
    raise AssertionError
