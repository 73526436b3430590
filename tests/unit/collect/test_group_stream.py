"""Groups that flow: who is started when, and what happens to those that are stopped. Groups grow
when told to.
"""

import asyncio
import itertools

import pytest

from jax_agent_rl.collect.buffer import RolloutBuffer
from jax_agent_rl.collect.groups import GroupStream
from jax_agent_rl.types import DropReason, Group
from tests.messages import raises


class Rollout:
    """Group n is complete when ``done(n)`` is called, and fails when ``fail(n)`` is."""

    def __init__(self, **settings):
        self.buffer = RolloutBuffer(**{"batch": 2, "staleness": 1} | settings)
        self.growing: dict[int, asyncio.Future[Group]] = {}
        self.stopped: dict[int, DropReason] = {}
        self.dropped: list[tuple[str, DropReason]] = []
        rows = ((number, f"row {number}") for number in itertools.count())
        self.stream = GroupStream(
            self.buffer,
            draw=lambda: next(rows),
            grow=self.grow,
            drop=lambda group, reason: self.dropped.append((group.group_id, reason)),
        )

    async def grow(self, ticket, row, why_stopped):
        future = self.growing[ticket.number] = asyncio.get_running_loop().create_future()
        try:
            return await future
        except asyncio.CancelledError:
            self.stopped[ticket.number] = why_stopped()
            raise

    async def done(self, *numbers: int) -> None:
        for number in numbers:
            self.growing[number].set_result(Group(group_id=f"g-{number}", trajectories=()))
        await settle()


async def settle() -> None:
    """Lets every task run until it waits."""
    for _ in range(5):
        await asyncio.sleep(0)


async def test_as_many_groups_start_as_are_wanted_and_admitted():
    rollout = Rollout()
    rollout.stream.want(3)
    await settle()
    assert sorted(rollout.growing) == [0, 1, 2]
    rollout.stream.want(9)
    await settle()
    assert sorted(rollout.growing) == [0, 1, 2, 3], "(S + 1) * batch"
    await rollout.stream.close()


async def test_take_waits_for_a_whole_batch_and_a_finished_step_makes_room():
    rollout = Rollout()
    rollout.stream.want(9)
    await settle()
    batch = asyncio.create_task(rollout.stream.take(2))
    await rollout.done(3)
    assert not batch.done()
    await rollout.done(1)
    assert list(await batch) == [1, 3]
    assert sorted(rollout.growing) == [0, 1, 2, 3]
    rollout.stream.finish_step(1, want=9)
    await settle()
    assert sorted(rollout.growing) == [0, 1, 2, 3, 4, 5]
    await rollout.stream.close()


async def test_discarded_groups_are_replaced_at_once():
    rollout = Rollout(staleness=0)
    rollout.stream.want(9)
    await settle()
    await rollout.done(0, 1)
    await rollout.stream.take(2)
    rollout.stream.discard([0], DropReason.ZERO_VARIANCE)
    await settle()
    assert sorted(rollout.growing) == [0, 1, 2]
    await rollout.stream.close()


async def test_what_was_taken_is_no_longer_wanted():
    rollout = Rollout(staleness=2)
    rollout.stream.want(2)
    await settle()
    await rollout.done(0, 1)
    await rollout.stream.take(2)
    rollout.stream.discard([0], DropReason.ZERO_VARIANCE)
    await settle()
    assert sorted(rollout.growing) == [0, 1, 2], "one in its place, though there is room for more"
    await rollout.stream.close()


async def test_what_gets_too_old_is_stopped_and_booked_as_stale():
    """Group 2 is complete in the very turn in which it is stopped."""
    rollout = Rollout(staleness=0, stragglers="drop", oversample=2)
    rollout.stream.want(9)
    await settle()
    await rollout.done(0, 3)
    await rollout.stream.take(2)
    rollout.growing[2].set_result(Group(group_id="g-2", trajectories=()))
    rollout.stream.finish_step(1, want=0)
    await settle()
    assert rollout.stopped | {int(name[2:]): reason for name, reason in rollout.dropped} == {
        1: DropReason.STALE,
        2: DropReason.STALE,
    }
    assert rollout.buffer.dropped == {DropReason.STALE: 2}
    assert not rollout.buffer.open


async def test_closing_books_open_groups_as_cancelled_and_keeps_them_for_later():
    rollout = Rollout()
    rollout.stream.want(9)
    await settle()
    await rollout.done(2)
    waiting = asyncio.create_task(rollout.stream.idle())
    await settle()
    await rollout.stream.close()
    await rollout.stream.close()
    await waiting
    assert rollout.stopped == dict.fromkeys((0, 1, 3), DropReason.CANCELLED)
    assert rollout.dropped == [("g-2", DropReason.CANCELLED)]
    assert rollout.buffer.state()["open"] == [0, 1, 2, 3]
    rollout.stream.want(9)
    await settle()
    assert sorted(rollout.growing) == [0, 1, 2, 3], "a closed stream starts nothing"


async def test_nobody_waits_for_a_stream_that_is_closed():
    rollout = Rollout()
    rollout.stream.want(4)
    batch = asyncio.create_task(rollout.stream.take(2))
    await settle()
    await rollout.stream.close()
    with raises(RuntimeError, value="closed"):
        await asyncio.wait_for(batch, timeout=30)


@pytest.mark.parametrize("wait", ["take", "idle"])
async def test_an_error_reaches_whoever_waits(wait: str):
    rollout = Rollout()
    rollout.stream.want(4)
    await settle()
    waiting = asyncio.create_task(
        rollout.stream.take(2) if wait == "take" else rollout.stream.idle()
    )
    await settle()
    rollout.growing[1].set_exception(KeyError("a bug"))
    with pytest.raises(KeyError, match="a bug"):
        await asyncio.wait_for(waiting, timeout=30)
    await rollout.stream.close()
