"""Which engines have stalled, and which only have nothing to do, compile or take weights."""

import pytest

from jax_agent_rl.rollout.watchdog import StallDetector


class Server:
    """Something to look at."""


WORKING = {"busy": True, "updating": False}


def looks(*readings, stall=10.0):
    """What the watch says at each look; readings are (seconds, counters, and what the engine is
    doing).
    """
    watch = StallDetector(stall)
    server = Server()
    return [watch.check(server, progress, now=now, **state) for now, progress, state in readings]


def test_counters_that_stand_still_with_requests_inside_are_a_stall():
    assert looks((0, (5,), WORKING), (10, (5,), WORKING), (11, (5,), WORKING)) == [
        False,
        False,
        True,
    ]


def test_any_counter_that_moves_is_work():
    assert looks((0, (5, 1), WORKING), (9, (5, 2), WORKING), (18, (6, 2), WORKING)) == [False] * 3


def test_an_idle_engine_has_not_stalled():
    idle = {"busy": False, "updating": False}
    seen = looks(
        (0, (5,), WORKING),
        (8, (5,), idle),
        (30, (5,), idle),
        (39, (5,), WORKING),
        (41, (5,), WORKING),
    )
    assert seen == [False, False, False, False, True]


def test_one_that_does_not_even_tell_its_counters_stalls_as_well():
    assert looks((0, (5,), WORKING), (9, None, WORKING), (11, None, WORKING)) == [
        False,
        False,
        True,
    ]


@pytest.mark.parametrize(
    ("progress", "state", "times"),
    [((0,), WORKING, 3), (None, WORKING, 3), ((5,), {"busy": False, "updating": True}, 10)],
)
def test_compiling_and_taking_weights_may_take_longer(progress, state, times):
    assert looks(
        (0, progress, state), (10 * times, progress, state), (10 * times + 1, progress, state)
    ) == [
        False,
        False,
        True,
    ]


def test_servers_are_watched_apart():
    watch = StallDetector(10.0)
    stuck = Server()
    working = Server()
    for server in (stuck, working):
        watch.check(server, (5,), now=0, **WORKING)
    assert watch.check(stuck, (5,), now=11, **WORKING)
    assert not watch.check(working, (6,), now=11, **WORKING)
