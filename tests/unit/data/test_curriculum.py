"""The curriculum: pools by running pass rates, gates, metrics, and what a checkpoint keeps."""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jax_agent_rl.config.task import CurriculumConfig
from jax_agent_rl.data.cursor import DataCursor, Mixture
from jax_agent_rl.trainer.curriculum import record_pass_rates
from jax_agent_rl.types import Group
from tests.trajectories import group_of, trajectory

ROWS = [{"question": number} for number in range(12)]
EASY, HARD, NORMAL = ROWS[0], ROWS[1], ROWS[2]


def cursor_of(rows=ROWS, *, seed: int = 0, **settings) -> DataCursor:
    curriculum = CurriculumConfig(**{"enabled": True} | settings)
    return DataCursor(rows, seed=seed, curriculum=curriculum)


def measured(**settings) -> DataCursor:
    """A cursor that knows three rows: one always solved, one never, one half of the time."""
    cursor = cursor_of(**settings)
    for _ in range(2):
        cursor.pools.record(EASY, 1.0)
        cursor.pools.record(HARD, 0.0)
        cursor.pools.record(NORMAL, 0.5)
    return cursor


def zero_variance_share(cursor: DataCursor, rates: np.ndarray, *, draws: int) -> float:
    """The share of the last half of the groups, of twelve members, that do equally well."""
    rng = np.random.default_rng(1)
    are_equal = []
    for _ in range(draws):
        (row,) = cursor.next_rows(1)
        scores = (rng.random(12) < rates[row["question"]]).astype(float)
        are_equal.append(len(set(scores)) == 1)
        if cursor.pools is not None:
            cursor.pools.record(row, scores.mean())
    return float(np.mean(are_equal[draws // 2 :]))


def test_rows_are_in_pools_by_the_mean_of_their_last_groups():
    pools = cursor_of(window=2, easy_threshold=0.9, hard_threshold=0.1).pools
    expected = ["hard", "normal", "normal", "easy", "easy", "normal"]
    assert pools.pool_of(EASY) == "new"
    for pass_rate, pool in zip([0.1, 0.5, 0.9, 0.9, 1.0, 0.5], expected, strict=True):
        pools.record(EASY, pass_rate)
        assert pools.pool_of(EASY) == pool
    assert pools.pool_of(HARD) == "new"


@pytest.mark.parametrize("fraction", [0.25, 0.75])
def test_easy_and_hard_rows_are_drawn_at_their_share_of_turns_and_others_at_each(fraction: float):
    cursor = measured(easy_fraction=fraction, hard_fraction=1 - fraction)
    drawn: Counter = Counter()
    epochs = 400
    while drawn[11] < epochs:  # a new row is drawn once in every epoch
        (row,) = cursor.next_rows(1)
        drawn[row["question"]] += 1
    deviation = 4 * np.sqrt(0.25 * epochs)  # four standard deviations
    assert abs(drawn[0] - fraction * epochs) < deviation
    assert abs(drawn[1] - (1 - fraction) * epochs) < deviation
    for number in range(2, 12):
        assert drawn[number] in (epochs - 1, epochs)


def test_without_a_curriculum_and_with_rows_that_are_all_new_the_order_is_the_same():
    plain = DataCursor(ROWS, seed=3)
    assert cursor_of(seed=3).next_rows(30) == plain.next_rows(30)
    disabled = DataCursor(ROWS, seed=3, curriculum=CurriculumConfig())
    assert disabled.pools is None
    assert disabled.next_rows(12) == DataCursor(ROWS, seed=3).next_rows(12)


def test_rows_that_are_all_easy_are_drawn_all_the_same():
    cursor = cursor_of(easy_fraction=0.0, hard_fraction=0.0)
    for row in ROWS:
        cursor.pools.record(row, 1.0)
    epoch = cursor.next_rows(12)
    assert sorted(row["question"] for row in epoch) == list(range(12))
    # Two epochs were passed over before the first, and nothing could be found after that.
    assert cursor.state()["curriculum"]["passed_over"] == 2 * len(ROWS)


def test_rows_are_looked_for_again_once_one_has_become_normal():
    cursor = cursor_of(easy_fraction=0.0, hard_fraction=0.0)
    for row in ROWS:
        cursor.pools.record(row, 1.0)
    cursor.next_rows(5)
    cursor.pools.record(EASY, 1.0)  # changes nothing
    cursor.next_rows(1)
    assert cursor.state()["curriculum"]["passed_over"] == 2 * len(ROWS)

    cursor.pools.record(NORMAL, 0.5)
    resumed = cursor_of(easy_fraction=0.0, hard_fraction=0.0)
    resumed.restore(json.loads(json.dumps(cursor.state())))
    assert cursor.next_rows(3) == [NORMAL] * 3
    assert resumed.next_rows(3) == [NORMAL] * 3


class CountedRows(Sequence):
    """Rows that count how often each is read, as from a file."""

    def __init__(self, rows):
        self.rows = rows
        self.reads: Counter = Counter()

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        self.reads[index] += 1
        return self.rows[index]


def test_a_row_that_is_passed_over_is_read_once():
    rows = CountedRows(ROWS)
    cursor = cursor_of(rows, easy_fraction=0.0, hard_fraction=0.0)
    for row in ROWS[1:]:
        cursor.pools.record(row, 1.0)
    assert cursor.next_rows(10) == ROWS[:1] * 10
    # The first row also each time that it was drawn.
    assert rows.reads == Counter(dict.fromkeys(range(12), 1)) + Counter({0: 10})


@given(
    st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=12, max_size=12),
    st.integers(0, 40),
    st.integers(0, 9),
)
def test_a_resumed_run_draws_what_the_first_would_have_drawn(rates, before, seed):
    settings = {"easy_fraction": 0.5, "hard_fraction": 0.25, "seed": seed}
    first = cursor_of(Mixture((ROWS[:5], ROWS[5:]), (1.0, 2.0)), **settings)
    for row, rate in zip(ROWS, rates, strict=True):
        first.pools.record(row, rate)
    first.next_rows(before)
    state = json.loads(json.dumps(first.state()))

    resumed = cursor_of(Mixture((ROWS[:5], ROWS[5:]), (1.0, 2.0)), **settings)
    resumed.restore(state)
    assert resumed.state() == first.state()
    assert resumed.next_rows(20) == first.next_rows(20)


def test_draws_in_flight_are_repeated_by_their_numbers():
    cursor = measured(easy_fraction=0.0, hard_fraction=0.0)
    draws = dict(cursor.draw() for _ in range(30))
    assert list(draws) == list(range(30))  # rows that are passed over have no number
    state = json.loads(json.dumps(cursor.state(again=[3, 28])))
    resumed = cursor_of(easy_fraction=0.0, hard_fraction=0.0)
    resumed.restore(state)
    for number in (3, 28):
        assert resumed.draw() == (number, draws[number])
    assert resumed.draw() == cursor.draw()


def test_a_checkpoint_of_a_run_without_a_curriculum_goes_on_with_one():
    plain = DataCursor(ROWS, seed=0)
    plain.next_rows(5)
    cursor = cursor_of()
    state = plain.state()
    del state["curriculum"]  # as in earlier versions
    cursor.restore(state)
    assert cursor.next_rows(4) == plain.next_rows(4)


def test_draws_of_a_run_without_a_curriculum_are_repeated_with_one_as_often_as_it_is_resumed():
    plain = DataCursor(ROWS, seed=0)
    draws = dict(plain.draw() for _ in range(30))
    cursor = cursor_of(easy_fraction=0.0, hard_fraction=0.0)
    cursor.restore(plain.state(again=[3, 28]))
    assert [cursor.draw(), cursor.draw()] == [(3, draws[3]), (28, draws[28])]

    assert cursor.pools is not None
    for row in ROWS[::2]:
        cursor.pools.record(row, 1.0)
    cursor.next_rows(5)
    assert cursor.state()["curriculum"]["passed_over"] > 0
    resumed = cursor_of(easy_fraction=0.0, hard_fraction=0.0)
    resumed.restore(json.loads(json.dumps(cursor.state(again=[3, 28]))))
    assert [resumed.draw(), resumed.draw()] == [(3, draws[3]), (28, draws[28])]


def test_fewer_groups_do_equally_well():
    """A third of the rows is hardly ever solved, a third nearly always, a third in between."""
    rates = np.concatenate([np.full(40, 0.005), np.full(40, 0.995), np.linspace(0.2, 0.8, 40)])
    rows = [{"question": number} for number in range(len(rates))]
    without = zero_variance_share(DataCursor(rows, seed=0), rates, draws=1200)
    settings = {"easy_fraction": 0.1, "hard_fraction": 0.1}
    gated = zero_variance_share(cursor_of(rows, **settings), rates, draws=1200)
    assert without > 0.55
    assert gated < 0.25


# --- pass rates of data sources -------------------------------------------------------------------

SOURCES = []
for number in range(40):
    SOURCES.append({"question": number, "data_source": ("sums", "chains")[number % 2]})
BY_SOURCE = {"pass_rate_of": "data_source", "easy_fraction": 0.0}


def test_a_data_source_that_is_solved_is_passed_over_in_the_first_epoch():
    cursor = cursor_of(SOURCES, **BY_SOURCE)
    first = cursor.next_rows(4)
    assert {row["data_source"] for row in first} == {"sums", "chains"}
    for row in first:
        cursor.pools.record(row, 1.0 if row["data_source"] == "sums" else 0.5)

    later = cursor.next_rows(10)
    assert {row["data_source"] for row in later} == {"chains"}
    drawn = [row["question"] for row in (*first, *later)]
    assert len(set(drawn)) == len(drawn)  # none was seen before
    assert cursor.pools.pool_of(SOURCES[0]) == "easy"
    assert cursor.pools.pool_of(SOURCES[1]) == "normal"


def test_rows_of_a_data_source_share_a_window():
    pools = cursor_of(SOURCES, window=2, **BY_SOURCE).pools
    for row in SOURCES[:6:2]:
        pools.record(row, 1.0)
    assert pools.pool_of(SOURCES[8]) == "easy"
    pools.record(SOURCES[8], 0.5)
    assert {pools.pool_of(row) for row in SOURCES[::2]} == {"normal"}
    assert pools.end_step()["curriculum/normal"] == 1  # the other one was not drawn


def test_how_a_row_was_drawn_is_known_by_the_row_though_its_source_has_the_pass_rate():
    cursor = cursor_of(SOURCES, pass_rate_of="data_source", easy_fraction=0.5)
    new_row = cursor.next_rows(1)[0]
    cursor.pools.record(SOURCES[0], 1.0)
    cursor.pools.record(SOURCES[1], 1.0)
    easy_row = cursor.next_rows(1)[0]
    # The groups end in another order than their rows were drawn in.
    assert cursor.pools.record(easy_row, 1.0).probability == 0.5
    assert cursor.pools.record(new_row, 1.0).pool == "new"


def test_a_resumed_run_knows_the_pass_rates_of_data_sources():
    first = cursor_of(SOURCES, **BY_SOURCE)
    for row in first.next_rows(4):
        first.pools.record(row, 1.0 if row["data_source"] == "sums" else 0.5)
    state = json.loads(json.dumps(first.state()))
    resumed = cursor_of(SOURCES, **BY_SOURCE)
    resumed.restore(state)
    assert resumed.next_rows(12) == first.next_rows(12)


def test_fewer_groups_do_equally_well_in_the_first_epoch():
    """One source is nearly always solved, the other half of the time; no row is seen twice."""
    rows = []
    for number in range(800):
        rows.append({"question": number, "data_source": ("sums", "chains")[number % 2]})
    rates = np.tile([0.99, 0.5], 400)
    without = zero_variance_share(DataCursor(rows, seed=0), rates, draws=200)
    settings = {"easy_threshold": 0.9, "easy_fraction": 0.1}
    gated = zero_variance_share(
        cursor_of(rows, pass_rate_of="data_source", **settings), rates, draws=200
    )
    of_rows = zero_variance_share(cursor_of(rows, **settings), rates, draws=200)
    assert of_rows == without > 0.35  # all rows are new
    assert gated < 0.2


# --- metrics --------------------------------------------------------------------------------------


def group_for(row: dict, number: int, *scores: float) -> Group:
    members = []
    for index, score in enumerate(scores):
        member = trajectory([3], [4], reward=score, index=index, group=f"g{number}")
        members.append(replace(member, row=row))
    return group_of(members)


def test_a_step_says_what_was_drawn_from_which_pool():
    cursor = measured(easy_fraction=1.0, hard_fraction=0.5)
    rows = cursor.next_rows(11)
    groups = [group_for(row, number, 1.0, 0.0) for number, row in enumerate(rows)]
    groups.append(Group(group_id="lost", trajectories=()))
    metrics = record_pass_rates(cursor.pools, groups)
    drawn = {pool: metrics[f"curriculum/drawn_{pool}"] for pool in ("new", "normal", "easy")}
    assert drawn["new"] == sum(row["question"] > 2 for row in rows)
    assert drawn["normal"] == rows.count(NORMAL)
    assert drawn["easy"] == rows.count(EASY)
    assert sum(metrics[f"curriculum/drawn_{p}"] for p in ("new", "normal", "easy", "hard")) == 11
    assert metrics["curriculum/passed_over"] == cursor.state()["curriculum"]["passed_over"]
    assert record_pass_rates(cursor.pools, [])["curriculum/passed_over"] == 0  # of each step


def test_accuracy_is_weighted_by_how_rarely_a_row_is_drawn():
    """One easy row in four turns is drawn, solved; the normal one always, solved half the time."""
    cursor = measured(easy_fraction=0.25, hard_fraction=0.0)
    seen: dict[int, dict] = {}
    while not {0, 2} <= set(seen):
        (row,) = cursor.next_rows(1)
        seen[row["question"]] = row
    groups = [group_for(EASY, 0, 1.0, 1.0), group_for(NORMAL, 1, 1.0, 0.0)]
    metrics = record_pass_rates(cursor.pools, groups)
    assert metrics["curriculum/accuracy"] == pytest.approx((4 * 1.0 + 1 * 0.5) / 5)
