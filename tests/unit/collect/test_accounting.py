"""The books balance at every moment, and nothing is counted twice."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jax_agent_rl.collect.accounting import Accounting
from jax_agent_rl.types import DropReason
from tests.messages import raises

names = st.sampled_from("abcdef")
events = st.lists(
    st.tuples(st.sampled_from(["start", "train", "drop"]), names, st.sampled_from(list(DropReason)))
)


@given(events)
def test_started_is_trained_plus_dropped_plus_in_flight(story):
    books = Accounting()
    open_ids = set()
    for event, name, reason in story:
        known = name in open_ids
        try:
            if event == "start":
                books.start(name)
                open_ids.add(name)
            elif event == "train":
                books.train([name])
                open_ids.discard(name)
            else:
                books.drop([name], reason)
                open_ids.discard(name)
        except ValueError:
            assert known is (event == "start")
        else:
            assert known is (event != "start")
        books.check()
        assert books.in_flight == open_ids


def test_a_batch_is_resolved_as_a_whole_or_not_at_all():
    books = Accounting()
    books.start("a")
    with raises(ValueError, value="'b'"):
        books.train(["a", "b"])
    with pytest.raises(ValueError):
        books.train(["a", "a"])
    assert books.in_flight == {"a"}
    assert books.trained == 0


def test_the_summary_names_reasons_that_occurred():
    books = Accounting()
    for name in "abc":
        books.start(name)
    books.train(["a"])
    books.drop(["b"], DropReason.TOKEN_DRIFT)
    books.drop([], DropReason.CANCELLED)
    expected = {"started": 3, "trained": 1, "in_flight": 1, "dropped": 1, "dropped/token_drift": 1}
    assert books.summary() == expected


def test_books_that_do_not_balance_are_noticed():
    books = Accounting()
    books.started += 1
    with raises(AssertionError, key="started", value=1):
        books.check()
