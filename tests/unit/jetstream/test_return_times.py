"""What keeping the KV of a waiting session is worth, from when others came back."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jax_agent_rl.jetstream.admission import MAX_SESSIONS, MIN_WAITS, RecentWaits, ReturnTimes

waits = st.lists(st.floats(0.01, 1000.0), min_size=1, max_size=40)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def best_bet(known: list[float], waited: float) -> float:
    """The definition, one horizon after the other, with one more wait that never ends."""
    remaining_waits = [wait - waited for wait in known if wait > waited]
    bets = []
    for horizon in [max(wait_left, waited / 8) for wait_left in remaining_waits]:
        returned = [wait_left for wait_left in remaining_waits if wait_left <= horizon]
        if 8 * len(returned) >= len(remaining_waits):
            bets.append(
                len(returned)
                / (sum(returned) + (len(remaining_waits) - len(returned) + 1) * horizon)
            )
    return max(bets, default=1 / ((len(known) + 1) * waited))


def rates(known: list[float], at: list[float]) -> list[float]:
    recent = RecentWaits()
    for wait in known:
        recent.add(wait)
    return [recent.rate(waited) for waited in at]


@given(known=waits, step=st.integers(-40, 80))
def test_the_rate_is_that_of_the_best_horizon(known: list[float], step: int):
    waited = 2 ** (step / 8)  # to which times are rounded
    assert rates(known, [waited * (1 + 1e-9)]) == pytest.approx([best_bet(known, waited)])


def test_steady_tools_are_awaited_more_the_longer_they_have_taken():
    fresh, half, nearly = rates([10.0, 10.1, 9.9] * 20, [0.1, 5.0, 9.0])
    assert fresh < half < nearly


def test_tools_that_may_hang_are_awaited_less_the_longer_they_have_taken():
    known = np.random.default_rng(0).lognormal(0.0, 2.0, 128).tolist()
    fresh, later, long = rates(known, [0.01, 5.0, 500.0])
    assert fresh > later > long > 0


def test_the_memoryless_wait_is_worth_the_same_at_any_time():
    known = (-np.log(1 - (np.arange(128) + 0.5) / 128) * 10).tolist()  # quantiles of a mean of 10 s
    assert rates(known, [0.1, 5.0, 15.0]) == pytest.approx([0.1] * 3, rel=0.25)


def came_back(times: ReturnTimes, clock: Clock, session: str, *waits: float) -> None:
    for wait in waits:
        times.leave(session)
        clock.now += wait
        times.come_back(session)


def test_the_last_wait_tells_sessions_of_fast_and_slow_tools_apart():
    clock = Clock()
    times = ReturnTimes(clock)
    for number in range(MIN_WAITS):
        came_back(times, clock, f"fast {number}", 1.0, 1.0)
        came_back(times, clock, f"slow {number}", 60.0, 60.0)
    for session in ("fast 0", "slow 0"):
        times.leave(session)
    clock.now += 0.5
    assert times.rate("fast 0") > 20 * times.rate("slow 0")


def test_queued_sessions_come_before_all_and_unknown_ones_after():
    clock = Clock()
    times = ReturnTimes(clock)
    came_back(times, clock, "a", *[2.0] * MIN_WAITS)
    assert times.rate("a") == math.inf
    assert times.rate("b") == 0.0
    times.leave("a")
    assert 0 < times.rate("a") < math.inf
    times.forget("a")
    assert times.rate("a") == 0.0


def test_without_waits_to_learn_from_all_sessions_are_alike():
    times = ReturnTimes(Clock())
    times.leave("a")
    assert times.rate("a") == 0.0


def test_sessions_that_never_come_back_do_not_add_up():
    times = ReturnTimes(Clock())
    for number in range(MAX_SESSIONS + 10):
        times.leave(str(number))
    assert len(times.sessions) == MAX_SESSIONS
