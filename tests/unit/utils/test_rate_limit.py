"""No second has more starts than the limit allows."""

from hypothesis import given
from hypothesis import strategies as st

from jax_agent_rl.utils.rate_limit import RateLimit


@given(
    waits=st.lists(st.floats(0, 3), max_size=40),
    per_second=st.sampled_from([0.25, 1.0, 2.5, 10.0]),
    burst=st.sampled_from([None, 1, 3]),
)
async def test_no_second_has_more_starts_than_the_limit_and_a_first_burst(waits, per_second, burst):
    now = 0.0
    starts = []

    async def sleep(seconds):
        starts.append(now + seconds)

    limit = RateLimit(per_second, burst=burst, clock=lambda: now, sleep=sleep)
    for wait in waits:
        now += wait
        earlier = len(starts)
        await limit.wait()
        if len(starts) == earlier:
            starts.append(now)
    assert starts == sorted(starts), "first come, first served"
    max_starts = burst or max(1.0, per_second)
    for first in range(len(starts)):
        for last in range(first, len(starts)):
            count = last - first + 1
            assert count <= max_starts + (starts[last] - starts[first]) * per_second + 1e-6
