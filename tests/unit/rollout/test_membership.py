"""Servers come, go, die, fall silent and refuse weights in any order: no request is lost, doubled
or served stale.
"""

import asyncio

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from jax_agent_rl.errors import BackendError, WeightUpdateError
from jax_agent_rl.testing.simulate.workload import VirtualLoop
from jax_agent_rl.types import StopReason
from tests.examples import examples
from tests.fleet import Fleet

NAMES = st.sampled_from("abcd")
FOREVER = 1e6


class Membership(RuleBasedStateMachine):
    """Every request is answered in the end, by weights that were served when it was sampled."""

    def __init__(self):
        super().__init__()
        self.loop = VirtualLoop()
        self.asked: list[tuple[asyncio.Task, int]] = []
        self.others: list[asyncio.Task] = []
        self.version = 0

    def do(self, coroutine):
        return self.loop.run_until_complete(coroutine)

    @initialize(limit=st.sampled_from([None, 2]))
    def begin(self, limit):
        async def start():
            self.fleet = Fleet(
                wait_for_server_seconds=FOREVER,
                max_in_flight_per_server=limit,
                recovery_seconds=FOREVER,
                stall_seconds=8.0,
            )
            await self.fleet.start("a", "b")

        self.limit = limit
        self.do(start())

    @rule(seconds=st.sampled_from([0.0, 0.3, 1.0, 7.0, 40.0]))
    def time_passes(self, seconds):
        self.do(asyncio.sleep(seconds))

    @rule(
        tokens=st.integers(1, 30), session=st.sampled_from([None, "s", "t"]), urgent=st.booleans()
    )
    def ask(self, tokens, session, urgent):
        async def begin():
            self.asked.append((self.fleet.ask(tokens, session_id=session), tokens))
            if urgent:
                await asyncio.sleep(0)

        self.do(begin())

    @rule(lasting=st.booleans(), refuses=st.none() | NAMES)
    def publish(self, lasting, refuses):
        self.version += 1

        async def publish(version):
            try:
                await self.fleet.publish(version, lasting=lasting)
            except (
                BackendError
            ) as error:  # while all are away, only weights that last can be kept for them
                assert not lasting and "no server is left" in str(error)
            except WeightUpdateError:  # the others died of it
                self.nobody_refuses()

        async def begin():
            if refuses in self.fleet.up and len(self.fleet.up) > 1:
                self.fleet[refuses].refuses = True
            self.others.append(asyncio.ensure_future(publish(self.version)))
            await asyncio.sleep(0)

        if not self.publishing:  # a learner publishes one after the other
            self.do(begin())

    def nobody_refuses(self):
        for engines in self.fleet.engines.values():
            engines[-1].refuses = False

    @property
    def publishing(self):
        return any(not task.done() for task in self.others if "publish" in repr(task.get_coro()))

    @rule(name=NAMES, how=st.sampled_from(["die", "fall_silent"]))
    def fail(self, name, how):
        async def fail():
            if name in self.fleet.up:
                getattr(self.fleet[name], how)()

        self.do(fail())

    @rule(name=NAMES)
    def out_of_reach_or_back(self, name):
        self.fleet.unreachable ^= {name}

    @rule(name=NAMES)
    def join(self, name):
        async def join():
            try:
                await self.fleet.client.pool.join(name, self.fleet.make(name))
            except (BackendError, ValueError, TimeoutError):
                return  # out of reach, or there is one

        async def begin():
            self.others.append(asyncio.ensure_future(join()))
            await asyncio.sleep(0)

        self.do(begin())

    @precondition(lambda self: len(self.fleet.up) > 1)
    @rule(drain=st.booleans(), data=st.data())
    def leave(self, drain, data):
        name = data.draw(st.sampled_from(self.fleet.up))

        async def begin():
            self.others.append(
                asyncio.ensure_future(self.fleet.client.pool.leave(name, drain=drain))
            )
            await asyncio.sleep(0)

        self.do(begin())

    @precondition(lambda self: self.asked)
    @rule(data=st.data())
    def cancel(self, data):
        task, _ = data.draw(st.sampled_from(self.asked))

        async def cancel():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

        if not task.done():
            self.asked = [(asked, tokens) for asked, tokens in self.asked if asked is not task]
            self.do(cancel())

    @invariant()
    def no_server_has_more_than_its_limit(self):
        if hasattr(self, "fleet") and self.limit is not None:
            assert all(
                len(server.running) <= self.limit for server in self.fleet.client.pool.servers
            )

    def teardown(self):
        if hasattr(self, "fleet"):
            self.do(self.finish())
        self.loop.close()

    async def finish(self):
        """Bring all in reach again and publish one more update: now everything has to end well."""
        fleet = self.fleet
        fleet.unreachable.clear()
        self.nobody_refuses()
        await asyncio.sleep(200)
        await fleet.publish(self.version + 1)
        await asyncio.sleep(200)
        assert all(task.done() for task in self.others)
        await asyncio.gather(*self.others)
        for task, tokens in self.asked:
            assert task.done(), "a request is lost"
            output = task.result()
            assert (len(output.token_ids), output.stop_reason) == (tokens, StopReason.LENGTH)
            assert list(output.policy_versions) == sorted(output.policy_versions)
        assert not fleet.inside
        assert not fleet.client.waiting
        assert fleet.client.stats().stale_served == 0
        assert {backend.policy_version for backend in fleet.client.pool.backends} == {
            self.version + 1
        }
        await fleet.client.pool.close()
        await asyncio.sleep(0)
        assert asyncio.all_tasks() == {asyncio.current_task()}, "a task is left"


TestMembership = Membership.TestCase
TestMembership.settings = settings(max_examples=examples(40), stateful_step_count=40)
