"""Instances of environments: how many, how long, closed exactly once."""

import asyncio
import random
import subprocess
import sys

import pytest

from jax_agent_rl import environments
from jax_agent_rl.collect.accounting import LostBatchGuard
from jax_agent_rl.environments import Environment, EnvironmentPool, EnvironmentPools, Observation
from jax_agent_rl.environments import base as environment_base
from jax_agent_rl.errors import (
    ConfigError,
    DataError,
    EnvironmentFailedError,
    EnvironmentTimeoutError,
    NothingToTrainError,
)
from jax_agent_rl.types import DropReason, Group
from jax_agent_rl.utils.failures import FailureLog
from tests.messages import raises
from tests.trajectories import trajectory


async def settle():
    for _ in range(20):
        await asyncio.sleep(0)


class Room(Environment):
    """Counts what happens to it."""

    instances: list["Room"]

    def __init__(self):
        self.instances.append(self)
        self.resets = self.closes = 0

    async def reset(self, *, size: int = 1) -> Observation:
        self.resets += 1
        return Observation.say(f"a room of {size}")

    async def step(self, reply):
        return Observation(done=True)

    async def close(self):
        self.closes += 1


@pytest.fixture
def room():
    return type("Room", (Room,), {"instances": []})


def pool_of(cls, *, scope="rollout", max_instances=2, timeout=5.0):
    return EnvironmentPool(
        cls, name="room", scope=scope, max_instances=max_instances, timeout=timeout
    )


async def test_each_trajectory_has_an_instance_of_its_own_that_is_closed_once(room):
    pool = pool_of(room)
    for _ in range(3):
        async with pool.lease() as leased:
            assert (await leased.reset(size=2)).messages == (
                {"role": "user", "content": "a room of 2"},
            )
    await pool.close()
    assert [(r.resets, r.closes) for r in room.instances] == [(1, 1)] * 3


async def test_global_instances_are_reset_and_used_again(room):
    pool = pool_of(room, scope="global")

    async def live():
        async with pool.lease() as leased:
            await leased.reset()

    await asyncio.gather(*(live() for _ in range(6)))
    assert len(room.instances) <= 2
    assert sum(r.resets for r in room.instances) == 6
    assert not any(r.closes for r in room.instances)
    await pool.close()
    assert all(r.closes == 1 for r in room.instances)


async def test_an_instance_that_failed_is_not_used_again(room):
    pool = pool_of(room, scope="global")
    with pytest.raises(ValueError):
        async with pool.lease():
            raise ValueError
    async with pool.lease():
        pass
    assert [r.closes for r in room.instances] == [1, 0]
    await pool.close()


async def test_there_are_never_more_instances_than_the_limit(room):
    pool = pool_of(room, max_instances=3)
    living = 0
    most_living = 0

    async def live():
        nonlocal living, most_living
        async with pool.lease():
            living += 1
            most_living = max(most_living, living)
            await asyncio.sleep(0)
            living -= 1

    await asyncio.gather(*(live() for _ in range(20)))
    assert most_living == 3
    assert len(room.instances) == 20


async def test_a_cancelled_trajectory_closes_its_instance_and_frees_its_place(room):
    pool = pool_of(room, max_instances=1)
    inside = asyncio.Event()

    async def live():
        async with pool.lease():
            inside.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(live())
    await inside.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert [r.closes for r in room.instances] == [1]
    async with pool.lease():
        pass


async def test_after_the_pool_is_closed_what_comes_back_is_closed_too(room):
    pool = pool_of(room, scope="global")
    async with pool.lease():
        await pool.close()
    assert [r.closes for r in room.instances] == [1]


async def test_a_call_that_hangs_is_given_up_and_named(room):
    class Stuck(room):
        async def step(self, reply):
            await asyncio.Event().wait()

    async with pool_of(Stuck, timeout=0.05).lease() as leased:
        with raises(
            EnvironmentTimeoutError,
            key=("'room'", "step", "environments.timeout"),
            value=0.05,
        ):
            await leased.step(None)


@pytest.mark.parametrize(
    "problem", [ZeroDivisionError("x"), SystemExit(3), asyncio.CancelledError()]
)
async def test_whatever_an_environment_raises_loses_one_trajectory(room, problem):
    class Broken(room):
        async def reset(self):
            raise problem

    async with pool_of(Broken).lease() as leased:
        with raises(EnvironmentFailedError, key="environment 'room'", value="reset") as caught:
            await leased.reset()
    assert caught.value.drop_reason is DropReason.ENVIRONMENT_ERROR


async def test_an_instance_that_cannot_be_made_is_named():
    def broken():
        raise OSError("no display")

    with raises(EnvironmentFailedError, key="'room'", value=("making it", "OSError: no display")):
        async with pool_of(broken).lease():
            pass


async def test_a_close_that_fails_does_not_lose_the_trajectory(room):
    class Untidy(room):
        async def close(self):
            raise OSError("stuck door")

    async with pool_of(Untidy).lease() as leased:
        await leased.reset()


# --- prepared ahead -------------------------------------------------------------------------------


class House(Room):
    """Is built of a material, which takes the builder."""

    prepared_by = ("material",)
    builder: asyncio.Event
    residents: list["House"]
    strikes = False

    async def prepare(self, *, material):
        await self.builder.wait()
        if self.strikes:
            raise OSError("on strike")
        self.material = material

    async def reset(self, *, material=None, size=1):
        self.residents.append(self)
        return Observation.say(f"{size} of {self.material}")


@pytest.fixture
def house(own_registry):
    cls = type("House", (House,), {"instances": [], "residents": [], "builder": asyncio.Event()})
    cls.builder.set()
    environments.register_environment("house")(cls)
    return cls


async def live(pools, **kwargs):
    """One trajectory; returns what it was shown and how its instance was started."""
    async with pools.pool("house").lease(kwargs) as leased:
        opening = await leased.reset(**kwargs)
        return opening.messages[0]["content"], dict(leased.start_metrics)


async def test_an_instance_is_prepared_with_the_declared_arguments_of_the_row(house):
    pools = EnvironmentPools()
    said, start = await live(pools, material="brick", size=3)
    assert said == "3 of brick"
    assert start["environment_was_ready"] == 0.0
    assert (await live(pools, size=3))[0] == "3 of None"
    await pools.close()


async def test_warm_instances_are_ready_for_rows_of_the_same_kind_alone(house):
    pools = EnvironmentPools(warm_instances=2)
    starts = []
    for size, material in enumerate(["brick", "brick", "wood", "brick"]):
        said, start = await live(pools, material=material, size=size)
        assert said == f"{size} of {material}"
        starts.append(start["environment_was_ready"])
        await settle()
    assert starts == [0.0, 1.0, 0.0, 1.0]
    await pools.close()
    assert all(instance.closes == 1 for instance in house.instances)


async def test_no_warm_instance_serves_two_trajectories(house):
    pools = EnvironmentPools(warm_instances=3)
    for _ in range(4):
        await asyncio.gather(live(pools), live(pools), live(pools))
        await settle()
    assert len(set(house.residents)) == 12
    assert len(house.instances) <= 12 + 3
    await pools.close()
    assert all(instance.closes == 1 for instance in house.instances)


async def test_a_preparation_that_fails_loses_one_trajectory_and_leaves_no_instance(house):
    house.strikes = True
    pools = EnvironmentPools(warm_instances=2)
    with raises(EnvironmentFailedError, key="'house'", value=("prepare", "OSError: on strike")):
        await live(pools)
    house.strikes = False
    await live(pools)
    assert [instance.closes for instance in house.instances[:2]] == [1, 1]
    await pools.close()


async def test_a_preparation_ahead_that_fails_is_counted_and_loses_nothing(house):
    told = []
    pools = EnvironmentPools(warm_instances=1, failures=FailureLog(emit=told.append))
    async with pools.pool("house").lease():
        house.strikes = True
        await settle()
    house.strikes = False
    _, start = await live(pools)
    assert start["environment_failed_preparations"] == 1.0
    assert len(told) == 1 and "prepared ahead" in told[0] and "on strike" in told[0]
    await pools.close()


@pytest.mark.parametrize("seed", range(4))
async def test_starts_that_fail_half_of_the_time_lose_trajectories_and_nothing_else(house, seed):
    """No place is lost, no instance is used twice, and each is closed once."""
    luck = random.Random(seed)

    async def prepare(self, *, material):
        await asyncio.sleep(0)
        if luck.random() < 0.5:
            raise OSError("on strike")
        self.material = material

    house.prepare = prepare
    pools = EnvironmentPools(warm_instances=2, max_instances=3)
    results = []
    for _ in range(20):
        lives = [live(pools, material=luck.choice(["brick", "wood"])) for _ in range(5)]
        results += await asyncio.gather(*lives, return_exceptions=True)
        await settle()
    lost = [result for result in results if isinstance(result, BaseException)]
    assert {type(error) for error in lost} == {EnvironmentFailedError}
    assert len(house.residents) == len(set(house.residents)) == len(results) - len(lost) > 0

    luck.random = lambda: 1.0
    async with asyncio.timeout(10):
        await asyncio.gather(*(live(pools, material="brick") for _ in range(3)))
    await pools.close()
    assert all(instance.closes == 1 for instance in house.instances)


async def test_a_preparation_that_hangs_is_given_up_and_names_its_setting(house):
    house.builder.clear()
    pools = EnvironmentPools(start_timeout=0.05)
    with raises(EnvironmentTimeoutError, key="environments.start_timeout", value=0.05):
        await live(pools)
    assert [instance.closes for instance in house.instances] == [1]


async def test_global_instances_are_used_again_for_rows_of_the_same_kind(house):
    pools = EnvironmentPools(scope="global", max_instances=2)
    for material in ("brick", "wood", "brick", "wood"):
        assert (await live(pools, material=material))[0] == f"1 of {material}"
    assert len(house.instances) == 2
    await live(pools, material="straw")
    assert [instance.closes for instance in house.instances] == [1, 0, 0]
    await pools.close()


@pytest.fixture
def own_registry(monkeypatch):
    monkeypatch.setattr(environment_base, "ENVIRONMENTS", dict(environment_base.ENVIRONMENTS))


async def test_environments_are_found_by_name(own_registry, room):
    environments.register_environment("room")(room)
    with raises(ConfigError, key="two environments", value="'room'"):
        environments.register_environment("room")(room)
    pools = EnvironmentPools(scope="global", max_instances=1, timeout=1.0)
    assert pools.pool("room") is pools.pool("room")
    with raises(ConfigError, value="'rom'", fix=("'room'", "'textworld'")):
        pools.pool("rom")
    await pools.close()


def test_a_users_file_registers_environments(own_registry, tmp_path):
    path = tmp_path / "my_world.py"
    path.write_text(
        "from jax_agent_rl.environments import Environment, Observation, register_environment\n"
        "@register_environment('mine')\n"
        "class Mine(Environment):\n"
        "    async def reset(self): return Observation.say('hi')\n"
        "    async def step(self, reply): return Observation(done=True)\n"
    )
    environments.load_environments(str(path))
    assert environments.get_environment("mine").name == "mine"
    with raises(ConfigError, key="environments.path", value="'missing.py'"):
        environments.load_environments("missing.py")
    environments.load_environments(None)


def row_in(**kwargs):
    return {"extra_info": {"environment_kwargs": kwargs}}


def test_rows_are_checked_before_a_run():
    environments.require_environment(row_in(name="textworld", game="x.z8"))
    for row in (
        {},
        {"extra_info": {}},
        row_in(game="x.z8"),
        {"extra_info": {"environment_kwargs": "textworld"}},
    ):
        with raises(DataError, key="environment_kwargs", fix="'name'"):
            environments.require_environment(row)
    with raises(ConfigError, fix="'textworld'"):
        environments.require_environment(row_in(name="textword"))
    with raises(DataError, key="'textworld'", value="{'gme': 'x'}"):
        environments.require_environment(row_in(name="textworld", gme="x"))


def test_importing_the_adapters_loads_none_of_their_packages():
    packages = {"reasoning_gym", "textworld", "verifiers"}
    code = f"import sys, jax_agent_rl.environments; print(sorted({packages} & set(sys.modules)))"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"


def lost(**reasons):
    return Group(
        group_id="g", trajectories=(), dropped={DropReason(k): v for k, v in reasons.items()}
    )


def test_a_run_that_loses_every_batch_stops_and_says_why():
    guard = LostBatchGuard(2)
    alive = Group(
        group_id="g", trajectories=(trajectory([1], [2]),), dropped={DropReason.REWARD_ERROR: 3}
    )
    losses = {DropReason.REWARD_TIMEOUT: "'mine' did not return within reward.timeout=60 seconds"}
    for groups in (
        [lost(reward_error=4)],
        [alive, lost(reward_error=4)],
        [lost(reward_error=4)],
        [],
    ):
        guard.check(groups, losses)
    with pytest.raises(NothingToTrainError) as caught:
        guard.check([lost(reward_timeout=3, reward_error=1), lost(reward_timeout=4)], losses)
    message = str(caught.value)
    assert (
        "every trajectory of 2 batches in a row was lost (reward_timeout 7, reward_error 1)"
        in message
    )
    assert "The newest reward_timeout: 'mine' did not return within reward.timeout=60" in message
    assert "trainer.max_failed_batches" in message
