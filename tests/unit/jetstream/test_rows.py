"""Which context stands in which cache row: the table against a model that remembers everything."""

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from jax_agent_rl.jetstream.rows import Placement, RowTable

ids = st.lists(st.integers(0, 2), min_size=1, max_size=10)


def test_the_next_turn_of_a_session_goes_on_in_its_own_row():
    table = RowTable(rows=3, length=16)
    first = table.place([1, 2, 3], session="s")
    table.set_ids(first.row, [1, 2, 3, 4, 5])
    table.release(first.row, session_ends=False)
    assert table.place([1, 2, 3, 4, 5, 6, 7], session="s") == Placement(row=first.row, reused=5, copy_from=None)


def test_members_of_a_group_copy_the_prompt_of_the_first():
    table = RowTable(rows=3, length=16)
    first = table.place([1, 2, 3, 4], session="a")
    table.append(first.row, [1, 2, 3])
    second = table.place([1, 2, 3, 4], session="b")
    assert (second.reused, second.copy_from) == (3, first.row) and second.row != first.row


def test_a_request_waits_while_every_row_is_active():
    table = RowTable(rows=1, length=16)
    assert table.place([1, 2], session=None) is not None
    assert table.place([3, 4], session=None) is None


def test_finished_sessions_give_up_their_rows_before_waiting_ones():
    table = RowTable(rows=2, length=16)
    waiting = table.place([1, 1, 1], session="waiting")
    table.set_ids(waiting.row, [1, 1])
    ended = table.place([2, 2, 2], session="ended")
    table.set_ids(ended.row, [2, 2])
    table.release(ended.row, session_ends=True)
    table.release(waiting.row, session_ends=False)  # more recently used or not: it will come back
    assert table.place([0, 0, 0], session=None).row == ended.row


def test_nothing_is_shared_across_a_reset():
    table = RowTable(rows=3, length=16)
    active = table.place([1, 2, 3], session="a")
    table.append(active.row, [1, 2])
    table.reset()
    assert table.place([1, 2, 3], session="b").reused == 0
    table.release(active.row, session_ends=False)
    assert table.place([1, 2, 3], session="a").reused == 0


class RowMachine(RuleBasedStateMachine):
    """Random requests; the model keeps, per row, the ids it must hold."""

    ROWS = 3

    def __init__(self) -> None:
        super().__init__()
        self.table = RowTable(rows=self.ROWS, length=32)
        self.held: dict[int, list[int]] = {row: [] for row in range(self.ROWS)}
        self.active: set[int] = set()

    @rule(prompt=ids, session=st.sampled_from(["a", "b", None]))
    def place(self, prompt: list[int], session: str | None) -> None:
        placement = self.table.place(prompt, session)
        if placement is None:
            assert len(self.active) == self.ROWS
            return
        assert placement.row not in self.active
        source = placement.row if placement.copy_from is None else placement.copy_from
        assert self.held[source][: placement.reused] == prompt[: placement.reused]
        assert placement.reused <= len(prompt) - 1
        self.held[placement.row] = prompt[:-1]
        self.table.append(placement.row, prompt[placement.reused : -1])
        self.active.add(placement.row)

    @precondition(lambda self: self.active)
    @rule(data=st.data(), new=ids, ends=st.booleans())
    def decode_and_release(self, data, new: list[int], ends: bool) -> None:
        row = data.draw(st.sampled_from(sorted(self.active)))
        self.table.append(row, new)
        self.held[row] += new
        self.table.release(row, session_ends=ends)
        self.active.remove(row)

    @invariant()
    def rows_hold_what_they_say(self) -> None:
        for row, expected in self.held.items():
            np.testing.assert_array_equal(self.table.ids(row), expected)


TestRowMachine = RowMachine.TestCase
TestRowMachine.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
