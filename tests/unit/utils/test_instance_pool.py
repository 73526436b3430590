"""Instances that are started ahead: handed out once, bounded, closed if nobody takes them."""

import asyncio
import random

import pytest

from jax_agent_rl.utils.instance_pool import InstancePool


class Instance:
    def __init__(self, key: str) -> None:
        self.key = key
        self.closes = 0


class Factory:
    """Starts instances, each when the test lets it; ``failing`` keys fail instead."""

    def __init__(self) -> None:
        self.instances: list[Instance] = []
        self.starts: list[asyncio.Event] = []
        self.started_keys: list[str] = []
        self.stopped = 0
        self.failing: set[str] = set()
        self.reports: list[str] = []
        self.now = 0.0

    def pool(self, size: int) -> InstancePool[str, Instance]:
        return InstancePool(
            close=self.close,
            size=size,
            report=lambda error: self.reports.append(str(error)),
            clock=lambda: self.now,
        )

    def start(self, key: str):
        async def start() -> Instance:
            may_end = asyncio.Event()
            self.starts.append(may_end)
            self.started_keys.append(key)
            try:
                await may_end.wait()
            except asyncio.CancelledError:
                self.stopped += 1
                raise
            if key in self.failing:
                raise OSError(f"no {key} today")
            instance = Instance(key)
            self.instances.append(instance)
            return instance

        return start

    async def close(self, instance: Instance) -> None:
        instance.closes += 1

    async def let_start(self) -> None:
        """Let all that is starting end."""
        await settle()
        for start in self.starts:
            start.set()
        await settle()

    async def take(self, pool: InstancePool[str, Instance], key: str = "a"):
        """Take an instance, however long its start lasts."""
        taking = asyncio.create_task(pool.take(key, self.start(key)))
        await self.let_start()
        return await taking


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def test_what_was_taken_is_replaced_and_the_replacement_is_ready():
    factory = Factory()
    pool = factory.pool(1)
    first = await factory.take(pool)
    assert not first.was_ready
    await factory.let_start()
    second = await pool.take("a", factory.start("a"))
    assert second.was_ready
    assert second.instance is not first.instance
    await pool.close()


async def test_without_a_size_nothing_is_started_ahead():
    factory = Factory()
    pool = factory.pool(0)
    await factory.take(pool)
    await factory.take(pool)
    assert len(factory.instances) == 2
    await pool.close()


async def test_the_wait_for_a_start_is_measured():
    factory = Factory()
    pool = factory.pool(2)
    taking = asyncio.create_task(pool.take("a", factory.start("a")))
    await settle()
    factory.now = 30.0
    await factory.let_start()
    assert (await taking).seconds == 30.0
    await factory.let_start()
    assert (await pool.take("a", factory.start("a"))).seconds == 0.0
    await pool.close()


async def test_there_are_more_when_somebody_had_to_wait_but_never_more_than_the_size():
    factory = Factory()
    pool = factory.pool(3)
    await factory.take(pool)
    await settle()
    assert len(factory.starts) == 1 + 2
    sizes = []
    for _ in range(4):
        # No replacement has started yet: this one waits for one.
        taking = asyncio.create_task(pool.take("a", factory.start("a")))
        await settle()
        (waited_for, *_) = [start for start in factory.starts if not start.is_set()]
        waited_for.set()
        assert not (await taking).was_ready
        await settle()
        sizes.append(sum(not start.is_set() for start in factory.starts))
    assert sizes == [3, 3, 3, 3]
    await pool.close()


async def test_the_key_that_was_taken_longest_ago_makes_room():
    factory = Factory()
    pool = factory.pool(2)
    for key in ("old", "new", "newest"):
        await factory.take(pool, key)
        await factory.let_start()
    spare = [instance for instance in factory.instances if instance.closes]
    assert [instance.key for instance in spare] == ["old", "old"]
    assert (await pool.take("new", factory.start("new"))).was_ready
    await pool.close()


async def test_a_key_that_is_taken_again_does_not_make_room():
    factory = Factory()
    pool = factory.pool(3)
    for key in ("a", "b", "a", "c"):
        await factory.take(pool, key)
        await factory.let_start()
    assert [instance.key for instance in factory.instances if instance.closes] == ["b"]
    await pool.close()


async def test_a_start_in_the_background_that_fails_costs_nobody_an_instance():
    factory = Factory()
    pool = factory.pool(1)
    await factory.take(pool)
    factory.failing.add("a")
    await factory.let_start()
    assert factory.reports == ["no a today"]
    assert len(factory.starts) == 2, "it is not tried again by itself"

    factory.failing.clear()
    taken = await factory.take(pool)
    assert (taken.failed_preparations, taken.was_ready) == (1, False)
    await factory.let_start()
    assert (await pool.take("a", factory.start("a"))).was_ready
    await pool.close()


async def test_a_start_that_fails_for_the_caller_is_raised_and_not_repeated():
    factory = Factory()
    pool = factory.pool(2)
    factory.failing.add("a")
    with pytest.raises(OSError, match="no a today"):
        await factory.take(pool)
    await factory.let_start()
    assert len(factory.starts) == 1
    await pool.close()


async def test_the_start_that_a_cancelled_caller_waited_for_is_stopped():
    factory = Factory()
    pool = factory.pool(1)
    await factory.take(pool)
    taking = asyncio.create_task(pool.take("a", factory.start("a")))
    await settle()
    taking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await taking
    await settle()
    assert factory.stopped == 1
    await pool.close()


@pytest.mark.parametrize("ticks", range(6))
async def test_an_instance_that_starts_while_its_caller_is_cancelled_is_not_lost(ticks: int):
    factory = Factory()
    pool = factory.pool(1)
    await factory.take(pool)
    taking = asyncio.create_task(pool.take("a", factory.start("a")))
    await settle()
    factory.starts[-1].set()
    for _ in range(ticks):
        await asyncio.sleep(0)
    taking.cancel()
    (result,) = await asyncio.gather(taking, return_exceptions=True)
    await pool.close()
    for instance in factory.instances[1:]:
        is_taken = not isinstance(result, BaseException) and result.instance is instance
        assert instance.closes == (0 if is_taken else 1)


async def test_closing_stops_what_starts_and_closes_what_is_ready():
    factory = Factory()
    pool = factory.pool(2)
    for key in ("a", "b"):
        await factory.take(pool, key)
    # The replacements of "a" started meanwhile; one of them made room for one of "b".
    await pool.close()
    assert factory.stopped == 1
    assert [instance.key for instance in factory.instances if instance.closes] == ["a", "a"]
    starts_before = len(factory.starts)
    await factory.take(pool)
    await settle()
    assert len(factory.starts) == starts_before + 1, "nothing is prepared any more"


@pytest.mark.parametrize("seed", range(20))
async def test_whatever_happens_every_instance_is_taken_or_closed_once(seed: int):
    draw = random.Random(seed)
    factory = Factory()
    pool = factory.pool(draw.randint(1, 4))
    takers: list[asyncio.Task] = []
    for _ in range(60):
        match draw.randrange(5):
            case 0 | 1:
                key = draw.choice("abc")
                takers.append(asyncio.create_task(pool.take(key, factory.start(key))))
            case 2:
                for start in factory.starts:
                    if draw.random() < 0.5:
                        start.set()
            case 3:
                factory.failing = set(draw.sample("abc", draw.randrange(3)))
            case 4 if takers:
                draw.choice(takers).cancel()
        for _ in range(draw.randrange(4)):
            await asyncio.sleep(0)

    factory.failing.clear()
    while any(not taker.done() for taker in takers):
        await factory.let_start()
    await pool.close()
    taken = []
    for taker in takers:
        if not taker.cancelled() and taker.exception() is None:
            taken.append(taker.result().instance)
    assert len(set(map(id, taken))) == len(taken)
    for instance in factory.instances:
        assert instance.closes == (0 if instance in taken else 1)
