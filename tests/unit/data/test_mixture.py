"""The order of training rows: windows of row groups, and mixtures of weighted sources."""

import json
from collections import Counter
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jax_agent_rl.data.cursor import DataCursor, Mixture
from jax_agent_rl.errors import CheckpointError
from tests.examples import examples
from tests.messages import raises


@dataclass
class Grouped(list):
    """Row numbers in groups, as a Parquet file has them."""

    row_groups: list[int]
    max_groups: int

    def __post_init__(self) -> None:
        self += range(sum(self.row_groups))

    def group_of(self, row: int) -> int:
        return int(np.searchsorted(np.cumsum(self.row_groups), row, side="right"))


groups = st.builds(Grouped, st.lists(st.integers(1, 5), min_size=1, max_size=9), st.integers(1, 4))


@given(groups, st.integers(0, 3))
def test_every_epoch_of_grouped_rows_uses_every_row_once(rows: Grouped, seed: int):
    cursor = DataCursor(rows, seed=seed)
    for _ in range(3):
        assert sorted(cursor.next_rows(len(rows))) == list(rows)


@given(groups, st.integers(0, 3))
def test_no_more_groups_are_needed_at_a_time_than_may_be_held(rows: Grouped, seed: int):
    """A group that was left is not needed again in its epoch, so as many as may be held never are
    too few.
    """
    order = [rows.group_of(row) for row in DataCursor(rows, seed=seed).next_rows(len(rows))]
    for position in range(len(order)):
        earlier = set(order[: position + 1])
        needed = set(order[position:])
        assert len(earlier & needed) <= rows.max_groups


def test_rows_of_a_window_and_the_groups_in_it_differ_from_epoch_to_epoch():
    rows = Grouped([50] * 8, max_groups=2)
    cursor = DataCursor(rows, seed=0)
    epochs = [cursor.next_rows(400) for _ in range(2)]
    windows = []
    for epoch in epochs:
        groups = {frozenset(map(rows.group_of, epoch[at : at + 100])) for at in range(0, 400, 100)}
        assert {len(pair) for pair in groups} == {2}
        windows.append(groups)
    assert windows[0] != windows[1]
    assert epochs[0][:100] != sorted(epochs[0][:100]), "rows of both groups are mixed"
    assert len({rows.group_of(row) for row in epochs[0][:10]}) == 2


def test_rows_without_groups_have_the_order_of_numpys_permutation_of_all():
    """Independent of the code: one permutation of all rows for each epoch, seeded by seed and
    epoch.
    """
    expected = []
    for epoch in (0, 1):
        expected += np.random.default_rng([3, epoch]).permutation(10).tolist()
    assert DataCursor(range(10), seed=3).next_rows(20) == expected


def mixture(
    sizes: tuple[int, ...] = (7, 1000, 40), weights: tuple[float, ...] = (0.5, 0.3, 0.2)
) -> Mixture:
    sources = []
    for source, size in enumerate(sizes):
        sources.append([(source, row) for row in range(size)])
    return Mixture(sources, weights)


def test_every_1024_draws_hold_each_sources_share_up_to_one():
    cursor = DataCursor(mixture(), seed=0)
    for _ in range(5):
        drawn = Counter(source for source, _ in cursor.next_rows(1024))
        assert all(abs(drawn[s] - share * 1024) < 1 for s, share in enumerate((0.5, 0.3, 0.2)))


def test_a_share_too_small_for_a_row_in_1024_is_exact_on_average():
    """Each of 200 blocks holds the rare row with probability 0.256.

    51.2 are expected, with a standard deviation of 6.2.
    """
    cursor = DataCursor(mixture((2, 2), (1.0, 3999.0)), seed=0)
    rare = sum(source == 0 for source, _ in cursor.next_rows(200 * 1024))
    assert 51.2 - 25 < rare < 51.2 + 25


def test_weights_count_relative_to_their_sum():
    large, small = (DataCursor(mixture(weights=w), seed=4) for w in ((5, 3, 2), (0.05, 0.03, 0.02)))
    assert large.next_rows(50) == small.next_rows(50)


def test_an_exhausted_source_begins_its_own_next_epoch_and_no_row_is_skipped():
    drawn = DataCursor(mixture(), seed=0).next_rows(4096)
    for source, size in ((0, 7), (1, 1000), (2, 40)):
        rows = [row for s, row in drawn if s == source]
        assert len(rows) > size
        for begin in range(0, len(rows) - size + 1, size):
            assert sorted(rows[begin : begin + size]) == list(range(size))


def test_sources_of_equal_size_are_in_different_orders():
    drawn = DataCursor(mixture((50, 50), (1, 1)), seed=0).next_rows(1024)
    first = [row for source, row in drawn if source == 0]
    second = [row for source, row in drawn if source == 1]
    assert first[:50] != second[:50]


@settings(max_examples=examples(25))
@given(st.integers(0, 3000), st.integers(0, 40), st.integers(0, 3))
def test_a_restored_mixture_goes_on_as_if_nothing_had_happened(
    count_before: int, count_after: int, seed: int
):
    uninterrupted, interrupted, resumed = (DataCursor(mixture(), seed=seed) for _ in range(3))
    expected = uninterrupted.next_rows(count_before + count_after)
    got = interrupted.next_rows(count_before)
    resumed.restore(json.loads(json.dumps(interrupted.state())))
    assert got + resumed.next_rows(count_after) == expected


def test_a_draw_is_repeated_by_its_number_in_a_mixture_too():
    cursor = DataCursor(mixture(), seed=1)
    draws = dict(cursor.draw() for _ in range(2000))
    resumed = DataCursor(mixture(), seed=1)
    resumed.restore(cursor.state(again=[3, 1500]))
    assert [resumed.draw() for _ in range(2)] == [(3, draws[3]), (1500, draws[1500])]
    assert resumed.draw()[0] == 2000


@pytest.mark.parametrize(
    ("other_mixture", "named"),
    [
        (
            mixture(sizes=(7, 1000, 41)),
            {"key": "data.train", "value": ("[7, 1000, 41]", "now [7, 1000, 40]")},
        ),
        (
            mixture(weights=(1.0, 1.0, 1.0)),
            {"key": "weights of data.train", "value": "[1.0, 1.0, 1.0]"},
        ),
    ],
)
def test_a_mixture_refuses_the_state_of_another(other_mixture: Mixture, named: dict):
    with raises(CheckpointError, **named):
        DataCursor(mixture(), seed=0).restore(DataCursor(other_mixture, seed=0).state())
