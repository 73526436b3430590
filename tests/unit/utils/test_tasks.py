import asyncio

import pytest

from jax_agent_rl.utils.tasks import gather_or_cancel


async def result(value: int) -> int:
    await asyncio.sleep(0)
    return value


async def never(ended: list[str]) -> int:
    try:
        return await asyncio.get_running_loop().create_future()
    except asyncio.CancelledError:
        await asyncio.sleep(0)
        ended.append("cancelled")
        raise


async def failure() -> int:
    await asyncio.sleep(0)
    raise ValueError("wrong")


async def test_results_are_in_the_order_of_what_was_given():
    assert await gather_or_cancel(result(value) for value in (3, 1, 2)) == [3, 1, 2]
    assert await gather_or_cancel([]) == []


async def test_the_first_exception_ends_the_others_before_it_is_raised():
    ended: list[str] = []
    with pytest.raises(ValueError, match="wrong"):
        await gather_or_cancel([never(ended), failure(), never(ended)])
    assert ended == ["cancelled", "cancelled"]


async def test_a_cancellation_ends_all():
    ended: list[str] = []
    waiting = asyncio.ensure_future(gather_or_cancel([never(ended), never(ended)]))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert ended == ["cancelled", "cancelled"]
