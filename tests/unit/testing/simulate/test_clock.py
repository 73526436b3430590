"""Virtual time: it jumps to the next timer, and threads take the time they say."""

import asyncio
from contextlib import closing

import pytest

from jax_agent_rl.testing.simulate.workload import SimulationStuckError, VirtualLoop


def run(coroutine):
    with closing(VirtualLoop()) as loop:
        return loop.run_until_complete(coroutine)


def now() -> float:
    return asyncio.get_running_loop().time()


def test_sleeping_takes_virtual_time_and_none_of_ours():
    async def main():
        year = 365 * 86400.0
        await asyncio.gather(*(asyncio.sleep(year * i / 10) for i in range(11)))
        return now() / year

    assert run(main()) == pytest.approx(1.0)


def test_timers_fire_in_order():
    async def main():
        seen = []

        async def note(seconds):
            await asyncio.sleep(seconds)
            seen.append((seconds, now()))

        await asyncio.gather(*map(note, (3.0, 1.0, 2.5)))
        return seen

    assert run(main()) == [(at, pytest.approx(at)) for at in (1.0, 2.5, 3.0)]


def test_a_thread_is_done_when_its_time_is_over_and_others_go_on_meanwhile():
    async def main():
        loop = asyncio.get_running_loop()

        def work():
            loop.spend(2.0)
            loop.spend(3.0)
            return "done"

        async def other():
            await asyncio.sleep(1.0)
            return now()

        return await asyncio.gather(asyncio.to_thread(work), other()), now()

    assert run(main()) == (["done", pytest.approx(1.0)], pytest.approx(5.0))


def test_what_a_thread_raises_comes_when_its_time_is_over():
    async def main():
        def work():
            asyncio.get_running_loop().spend(4.0)
            raise ValueError("no")

        with pytest.raises(ValueError, match="no"):
            await asyncio.to_thread(work)
        return now()

    assert run(main()) == pytest.approx(4.0)


def test_a_cancelled_wait_for_a_thread_does_not_hang():
    async def main():
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1.0):
                await asyncio.to_thread(lambda: asyncio.get_running_loop().spend(9.0))
        await asyncio.sleep(20.0)
        return now()

    assert run(main()) == pytest.approx(21.0)


def test_a_simulation_in_which_nothing_can_happen_says_so():
    async def main():
        await asyncio.get_running_loop().create_future()

    with pytest.raises(SimulationStuckError, match="nothing is left"):
        run(main())
