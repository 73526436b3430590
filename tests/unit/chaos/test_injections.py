"""When and whom faults strike, in virtual time."""

import asyncio
import signal
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jax_agent_rl.testing.simulate.workload import VirtualLoop
from tests.chaos.faults import FAULTS, Injection, all_injections
from tests.chaos.proxy import Fault, FaultProxy


class FakeProcess:
    """Notes what is done to it, and when."""

    def __init__(self, start_seconds=0.5):
        self.busy = False
        self.diary = []
        self.start_seconds = start_seconds

    def note(self, what):
        self.diary.append((asyncio.get_running_loop().time(), what))

    async def start(self):
        assert self.busy
        await asyncio.sleep(self.start_seconds)
        self.note("start")

    async def kill(self):
        assert self.busy
        self.note("kill")

    def send(self, number):
        assert self.busy
        self.note(number)

    @property
    def done(self):
        return [what for _, what in self.diary]


def in_virtual_time(coroutine):
    loop = VirtualLoop()
    try:
        return loop.run_until_complete(coroutine)
    finally:
        loop.close()


def play(injection, seconds, seed=3):
    in_virtual_time(injection.run(seed, seconds))


@given(st.integers(0, 2**31), st.floats(1, 300))
def test_the_times_of_a_fault_follow_from_the_seed_and_keep_their_pace(seed, seconds):
    injection = Injection("kill_engine", [])
    times = injection.times(seed, seconds)
    assert times == injection.times(seed, seconds)
    assert times == sorted(times)
    assert all(0 < time < seconds for time in times)
    gaps = [later - earlier for earlier, later in zip([0.0, *times], times, strict=False)]
    assert all(0.6 * 5 <= gap <= 1.4 * 5 + 1e-9 for gap in gaps)
    assert len(times) >= seconds / 7 - 1


def test_an_engine_is_killed_every_five_seconds_and_started_again_each_time():
    engines = [FakeProcess() for _ in range(3)]
    injection = Injection("kill_engine", engines)
    play(injection, 60)
    assert 9 <= injection.strikes <= 14
    assert injection.skipped == 0
    assert all(engine.done == ["kill", "start"] * (len(engine.done) // 2) for engine in engines)
    assert sum(len(engine.done) for engine in engines) == 2 * injection.strikes
    assert not any(engine.busy for engine in engines)


def test_a_frozen_engine_is_thawed_after_one_to_five_seconds():
    engine = FakeProcess()
    injection = Injection("freeze_engine", [engine])
    play(injection, 60)
    assert engine.done == [signal.SIGSTOP, signal.SIGCONT] * injection.strikes
    assert injection.strikes >= 4
    frozen = [
        thawed_at - frozen_at
        for (frozen_at, _), (thawed_at, _) in zip(
            engine.diary[::2], engine.diary[1::2], strict=True
        )
    ]
    assert all(1 <= seconds <= 5.001 for seconds in frozen)


def test_a_hung_engine_goes_on_or_is_restarted():
    engine = FakeProcess()
    injection = Injection("hang_engine", [engine])
    play(injection, 400)
    ends = engine.done
    assert ends.count(signal.SIGUSR1) == injection.strikes
    assert ends.count(signal.SIGUSR2) > 5
    assert ends.count("kill") == ends.count("start") > 5
    assert ends.count(signal.SIGUSR2) + ends.count("kill") == injection.strikes


def test_the_tool_server_is_down_for_a_while_and_comes_back():
    tools = FakeProcess()
    injection = Injection("kill_tool_server", [tools])
    play(injection, 60)
    assert tools.done == ["kill", "start"] * injection.strikes
    assert injection.strikes >= 4


def test_a_network_fault_lasts_a_second_or_two_at_one_proxy():
    proxies = [FaultProxy(1, rng=Random(0)) for _ in range(2)]
    injection = Injection("network_stall", proxies)

    async def one():
        striking = asyncio.ensure_future(injection.strike(Random(1)))
        await asyncio.sleep(0.1)
        during = [proxy.fault for proxy in proxies]
        await striking
        return during

    during = in_virtual_time(one())
    assert sorted(map(str, during)) == ["None", "stall"]
    assert [proxy.fault for proxy in proxies] == [None, None]


def test_what_another_fault_has_in_hand_is_left_alone_and_counted():
    engine = FakeProcess()
    engine.busy = True
    injection = Injection("kill_engine", [engine])
    play(injection, 30)
    assert injection.strikes == 0
    assert injection.skipped >= 4
    assert engine.diary == []


def test_a_server_that_does_not_start_again_ends_the_run():
    class Dead(FakeProcess):
        async def start(self):
            raise OSError("no memory")

    engine = Dead()
    with pytest.raises(OSError, match="no memory"):
        play(Injection("kill_engine", [engine]), 30)
    assert not engine.busy


def test_every_fault_has_its_own_targets():
    engine = FakeProcess()
    tools = FakeProcess()
    proxy = FaultProxy(1, rng=Random(0))
    injections = all_injections([engine], tools, [proxy])
    assert [injection.name for injection in injections] == list(FAULTS)
    targets = {injection.name: injection.targets for injection in injections}
    assert [name for name, hit in targets.items() if hit == [engine]] == [
        "kill_engine",
        "freeze_engine",
        "hang_engine",
    ]
    assert targets["kill_tool_server"] == [tools]
    assert [name for name, hit in targets.items() if hit == [proxy]] == [
        f"network_{fault}" for fault in Fault
    ]
