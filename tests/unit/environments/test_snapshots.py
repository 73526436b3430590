"""Snapshots of environments: found by trajectory and turn, bounded, forgotten."""

import pytest

from jax_agent_rl.environments.snapshots import EnvironmentSnapshot, SnapshotStore


def snapshot(turns: int, size: int = 10) -> EnvironmentSnapshot:
    return EnvironmentSnapshot(turns=turns, data=b"x" * size)


def test_the_newest_one_that_is_not_too_late_is_found():
    store = SnapshotStore(1000)
    for turns in (1, 2, 5):
        store.add("t", snapshot(turns))
    found = {turns: store.newest("t", turns) for turns in range(7)}
    expected = {0: None, 1: 1, 2: 2, 3: 2, 4: 2, 5: 5, 6: 5}
    assert {turns: s and s.turns for turns, s in found.items()} == expected
    assert store.newest("u", 5) is None


def test_the_oldest_make_room():
    store = SnapshotStore(25)
    for turns in (1, 2, 3):
        store.add("t", snapshot(turns))
    assert store.newest("t", 1) is None
    assert store.newest("t", 2) == snapshot(2)
    assert store.num_bytes == 20


def test_one_that_is_too_large_is_refused_and_costs_no_other():
    store = SnapshotStore(15)
    assert store.add("t", snapshot(1))
    assert not store.add("t", snapshot(2, size=16))
    assert store.newest("t", 2) == snapshot(1)
    assert not SnapshotStore(0).add("t", snapshot(1))


def test_one_that_is_replaced_or_forgotten_takes_no_room():
    store = SnapshotStore(100)
    store.add("t", snapshot(1, size=40))
    store.add("t", snapshot(1, size=30))
    store.add("u", snapshot(1, size=20))
    assert store.num_bytes == 50
    store.forget("t")
    assert store.num_bytes == 20
    assert store.newest("t", 9) is None and store.newest("u", 9) is not None


def test_it_follows_a_turn():
    with pytest.raises(ValueError, match="turns=0"):
        snapshot(0)
