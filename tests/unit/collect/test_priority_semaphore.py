"""Slots: never more than there are, the urgent first, none lost to a cancellation."""

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from jax_agent_rl.collect.priority_semaphore import PrioritySemaphore


async def test_the_most_urgent_are_next_and_among_equals_the_first():
    slots = PrioritySemaphore(1)
    order = []
    release = asyncio.Event()

    async def work(name: str, urgency: int):
        async with slots.take(urgency=urgency):
            order.append(name)
            await release.wait()

    async with asyncio.TaskGroup() as group:
        for name, urgency in [("holder", 0), ("a", 0), ("b", 1), ("c", 0), ("d", 2), ("e", 1)]:
            group.create_task(work(name, urgency))
        await asyncio.sleep(0)
        assert order == ["holder"]
        release.set()
    assert order == ["holder", "d", "b", "e", "a", "c"]


async def test_a_slot_handed_to_one_who_is_cancelled_is_handed_on():
    slots = PrioritySemaphore(1)
    entered = []

    async def wait(name: str):
        async with slots.take(urgency=0):
            entered.append(name)

    async with slots.take(urgency=0):
        waiting = [asyncio.create_task(wait(name)) for name in "ab"]
        await asyncio.sleep(0)
    waiting[0].cancel()  # a holds the slot by now, but has not run since
    await asyncio.gather(*waiting, return_exceptions=True)
    assert entered == ["b"]
    async with slots.take(urgency=0):
        pass


@given(
    st.integers(1, 3),
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 4), st.booleans()), max_size=12),
)
async def test_there_are_never_more_than_slots_and_all_come_back(
    count: int, workers: list[tuple[int, int, bool]]
):
    slots = PrioritySemaphore(count)
    running = 0
    most_running = 0

    async def work(urgency: int, ticks: int):
        nonlocal running, most_running
        async with slots.take(urgency=urgency):
            running += 1
            most_running = max(most_running, running)
            try:
                for _ in range(ticks):
                    await asyncio.sleep(0)
            finally:
                running -= 1

    tasks = [asyncio.create_task(work(urgency, ticks)) for urgency, ticks, _ in workers]
    await asyncio.sleep(0)
    for task, (*_, cancelled) in zip(tasks, workers, strict=True):
        if cancelled:
            task.cancel()
            await asyncio.sleep(0)
    await asyncio.gather(*tasks, return_exceptions=True)
    assert most_running <= count
    assert running == 0
    most_running = 0
    await asyncio.gather(*(work(0, 1) for _ in range(count + 1)))
    assert most_running == count, "none was lost, none was added"
