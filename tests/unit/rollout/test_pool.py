"""The servers behind a client, in virtual time: engines sample an id a second and take a second to
load weights.
"""

import asyncio
from dataclasses import replace

import pytest

from jax_agent_rl.errors import BackendError, ConfigError, EngineDiedError, WeightUpdateError
from jax_agent_rl.rollout.server import AsyncServer
from jax_agent_rl.types import StopReason
from tests.fleet import in_virtual_time, now
from tests.messages import raises


def test_a_server_that_joins_gets_the_served_weights_before_any_request():
    async def main(fleet):
        await fleet.start("a")
        await fleet.publish(1)
        await fleet.client.pool.join("b", fleet.make("b"))
        assert fleet["b"].updates == [1] and fleet.up == ["a", "b"]
        outputs = await asyncio.gather(fleet.ask(3), fleet.ask(3))
        assert {output.policy_versions for output in outputs} == {(1, 1, 1)}
        assert fleet["b"].asked, "the engine itself asserts that it was not asked before"

    in_virtual_time(main)


def test_servers_are_paused_while_weights_are_made_in_their_memory():
    async def main(fleet):
        await fleet.start("a", "b")

        async def make():
            waiting = fleet.ask(3)
            await asyncio.sleep(10)
            assert not waiting.done()
            waits.append(waiting)

        waits = []
        await fleet.publish_in_place(1, make)
        assert (await waits[0]).policy_versions == (1, 1, 1)

        async def fail():
            assert fleet.up == ["a"]
            raise OSError("the offer failed")

        fleet["b"].die()
        with pytest.raises(OSError, match="the offer failed"):
            await fleet.publish_in_place(2, fail)
        assert (await fleet.ask(3)).policy_versions == (1, 1, 1)

    in_virtual_time(main, recovery_seconds=0.0)


def test_a_server_that_leaves_while_weights_are_made_is_resumed():
    async def main(fleet):
        await fleet.start("a", "b")
        tasks = [fleet.ask(10), fleet.ask(10)]
        await asyncio.sleep(4.5)
        leaving = []

        async def make():
            leaving.append(asyncio.create_task(fleet.client.pool.leave("a", drain=True)))
            await asyncio.sleep(5)

        await fleet.publish_in_place(1, make)
        await asyncio.wait_for(leaving[0], 20)
        assert fleet["a"].closed
        assert fleet.up == ["b"]
        outputs = await asyncio.gather(*tasks)
        assert [len(output.token_ids) for output in outputs] == [10, 10]

    in_virtual_time(main)


def test_a_server_that_recovers_while_weights_are_made_enters_after_them():
    async def main(fleet):
        await fleet.start("a", "b")
        fleet["b"].die()

        async def make():
            await asyncio.sleep(20)
            assert fleet.up == ["a"]
            assert fleet["b"].started, "another one waits for the weights"

        await fleet.publish_in_place(1, make, lasting=True)
        await asyncio.sleep(5)
        assert fleet.up == ["a", "b"]
        assert fleet["b"].updates == [1]

    in_virtual_time(main)


@pytest.mark.parametrize("call", ["pause", "resume"])
def test_servers_that_cannot_pause_or_resume_are_lost_and_the_others_go_on(call):
    async def main(fleet):
        await fleet.start("a", "b", "c")

        async def fail(*_):
            raise BackendError("HTTP 500")

        setattr(fleet["a"], call, fail)

        async def make():
            await asyncio.sleep(1)

        await fleet.publish_in_place(1, make)
        assert fleet.client.pool.servers_lost == 1
        assert fleet.up == ["b", "c"]
        assert (await fleet.ask(3)).policy_versions == (1, 1, 1)

        for name in ("b", "c"):
            setattr(fleet[name], call, fail)

        async def fail_to_make():
            raise OSError("the offer failed")

        with pytest.raises(OSError, match="the offer failed"):
            await fleet.publish_in_place(2, fail_to_make)
        assert fleet.client.pool.servers_lost == 3

    in_virtual_time(main, recovery_seconds=0.0)


def test_where_nothing_lasts_of_an_update_a_server_enters_with_the_next():
    async def main(fleet):
        await fleet.start("a")
        await fleet.publish(1, lasting=False)
        joining = asyncio.create_task(fleet.client.pool.join("b", fleet.make("b")))
        await asyncio.sleep(10)
        assert not joining.done() and fleet.up == ["a"]
        await fleet.publish(2, lasting=False)
        await joining
        assert fleet["b"].updates == [2] and fleet.up == ["a", "b"]

    in_virtual_time(main)


def test_a_join_during_an_update_ends_with_one_version():
    async def main(fleet):
        await fleet.start("a")
        await fleet.publish(1)
        await asyncio.gather(
            fleet.client.pool.join("b", fleet.make("b")), fleet.publish(2), fleet.publish(3)
        )
        assert {engine.policy_version for engine in fleet.client.pool.backends} == {3}
        assert len(fleet.up) == 2

    in_virtual_time(main)


@pytest.mark.parametrize("why", ["unreachable", "newer", "refuses", "cancelled", "in use"])
def test_a_join_that_fails_leaves_everything_as_it_was(why):
    async def main(fleet):
        await fleet.start("a")
        await fleet.publish(1)
        make = fleet.make("b", version=7 if why == "newer" else 0)
        if why == "unreachable":
            fleet.unreachable.add("b")
            with pytest.raises(EngineDiedError, match="to be reached"):
                await fleet.client.pool.join("b", make)
        elif why == "newer":
            with raises(WeightUpdateError, value=("version 7", 1), fix="restart it"):
                await fleet.client.pool.join("b", make)
        elif why == "refuses":

            def stubborn():
                engine = make()
                engine.refuses = True
                return engine

            with raises(WeightUpdateError, key="b refuses", value="version 1"):
                await fleet.client.pool.join("b", stubborn)
        elif why == "in use":
            with pytest.raises(ValueError, match="'a' already"):
                await fleet.client.pool.join("a", make)
        else:
            joining = asyncio.create_task(fleet.client.pool.join("b", make))
            await asyncio.sleep(0.5)  # it is loading weights
            joining.cancel()
            await asyncio.gather(joining, return_exceptions=True)
        assert fleet.up == ["a"]
        assert len(fleet.client.pool.backends) == 1
        assert all(engine.closed for engine in fleet.engines.get("b", []))
        await fleet.publish(2)
        fleet.unreachable.clear()
        await fleet.client.pool.join("b", fleet.make("b"))
        assert fleet.up == ["a", "b"], "the name and the lock are free again"

    in_virtual_time(main)


@pytest.mark.parametrize("drain", [False, True])
def test_a_server_that_leaves_loses_no_request(drain):
    async def main(fleet):
        await fleet.start("a", "b")
        tasks = [fleet.ask(10), fleet.ask(10)]
        await asyncio.sleep(4.5)
        await fleet.client.pool.leave("a", drain=drain)
        assert fleet.up == ["b"] and fleet["a"].closed
        outputs = await asyncio.gather(*tasks)
        assert [len(output.token_ids) for output in outputs] == [10, 10]
        resumed = [request.sampling.max_tokens for request in fleet["b"].asked]
        assert resumed == ([10] if drain else [10, 6]), "what was sampled counts against the budget"
        with pytest.raises(KeyError):
            await fleet.client.pool.leave("a")

    in_virtual_time(main)


def test_a_lost_server_is_replaced_updated_and_takes_part_again():
    async def main(fleet):
        await fleet.start("a", "b")
        await fleet.publish(1)
        tasks = [fleet.ask(10), fleet.ask(10)]
        await asyncio.sleep(4.5)
        fleet["a"].die()
        await asyncio.sleep(5)
        assert fleet.up == ["a", "b"] and len(fleet.engines["a"]) == 2
        assert fleet["a"].updates == [1]
        assert fleet.engines["a"][0].closed
        assert [len(output.token_ids) for output in await asyncio.gather(*tasks)] == [10, 10]
        stats = fleet.client.stats()
        assert (stats.servers_up, stats.servers_lost, stats.servers_joined, stats.stale_served) == (
            2,
            1,
            1,
            0,
        )

    in_virtual_time(main)


def test_requests_wait_for_a_server_that_is_being_replaced():
    async def main(fleet):
        await fleet.start("a")
        fleet["a"].capabilities = replace(fleet["a"].capabilities, multi_modal=frozenset({"image"}))
        fleet.unreachable.add("a")
        task = fleet.ask(5)
        await asyncio.sleep(2)
        fleet["a"].die()
        late = fleet.ask(5)
        await asyncio.sleep(20)
        assert not fleet.up and fleet.client.modalities == {"image"}, (
            "nobody believes that the model went blind"
        )
        fleet.client.require_server()
        fleet.unreachable.clear()
        assert [len(output.token_ids) for output in await asyncio.gather(task, late)] == [5, 5]

    in_virtual_time(main)


def test_requests_wait_no_longer_than_allowed_and_a_late_server_serves_again():
    async def main(fleet):
        await fleet.start("a")
        fleet.unreachable.add("a")
        fleet["a"].die()
        for expected in (50.0, 50.0):
            with raises(EngineDiedError, key="a died", value="50 s"):
                await fleet.ask(5)
            assert now() == pytest.approx(expected, abs=0.1), "the outage has begun once"
        with pytest.raises(EngineDiedError, match="no rollout engine"):
            fleet.client.require_server()
        fleet.unreachable.clear()
        await asyncio.sleep(40)
        assert len((await fleet.ask(5)).token_ids) == 5

    in_virtual_time(main)


def test_when_time_is_up_a_server_is_given_up_and_its_loss_is_the_answer():
    async def main(fleet):
        await fleet.start("a")
        fleet.unreachable.add("a")
        fleet["a"].die()
        with raises(EngineDiedError, key="no server left", value="a died"):
            await fleet.ask(5)
        assert now() == pytest.approx(20, abs=0.1)
        tries = [at for _, at in fleet.starts[1:]]
        gaps = [later - earlier for earlier, later in zip(tries, tries[1:], strict=False)]
        assert (
            all(0.5 * 2**n <= gap <= 1.0 * 2**n for n, gap in enumerate(gaps)) and len(gaps) >= 3
        ), gaps

    in_virtual_time(main, recovery_seconds=20.0)


def test_without_recovery_a_loss_is_final_and_reported_at_once():
    async def main(fleet):
        await fleet.start("a")
        fleet["a"].die()
        with pytest.raises(EngineDiedError, match="a died"):
            await fleet.ask(5)
        assert now() < 1e-6 and len(fleet.starts) == 1
        await fleet.client.pool.join("a", fleet.make("a"))
        assert len((await fleet.ask(5)).token_ids) == 5

    in_virtual_time(main, recovery_seconds=0.0)


def test_a_request_that_kills_every_server_fails_in_the_end():
    async def main(fleet):
        await fleet.start("a")
        task = fleet.ask(50)
        while not task.done():
            fleet["a"].die()
            await asyncio.sleep(1)
        with raises(BackendError, value="20 servers"):
            await task

    in_virtual_time(main)


def test_an_engine_that_never_answers_loses_its_requests_to_others():
    async def main(fleet):
        await fleet.start("a", "b")
        assert len((await fleet.ask(30)).token_ids) == 30
        tasks = [fleet.ask(30), fleet.ask(30)]
        await asyncio.sleep(5.5)
        fleet["a"].fall_silent()
        outputs = await asyncio.gather(*tasks)
        assert [len(output.token_ids) for output in outputs] == [30, 30]
        assert fleet.client.stats().servers_lost == 1
        await asyncio.sleep(10)
        assert fleet.up == ["a", "b"] and len(fleet.engines["a"]) == 2

    in_virtual_time(main, stall_seconds=20.0)


def test_an_idle_engine_and_a_slow_one_have_not_stalled():
    async def main(fleet):
        await fleet.start("a")
        await asyncio.sleep(1000)
        assert len((await fleet.ask(2000)).token_ids) == 2000
        assert fleet.client.stats().servers_lost == 0

    in_virtual_time(main, stall_seconds=20.0)


def test_an_engine_that_dies_without_being_asked_is_noticed():
    async def main(fleet):
        await fleet.start("a")
        fleet["a"].die()
        await asyncio.sleep(15)
        assert fleet.up == ["a"] and len(fleet.engines["a"]) == 2

    in_virtual_time(main, stall_seconds=20.0)


def test_a_server_that_hangs_in_an_update_holds_nobody_up_forever():
    async def main(fleet):
        await fleet.start("a", "b")
        fleet["a"].fall_silent()
        await fleet.publish(1)
        assert fleet["b"].updates == [1] and now() < 12 * 20
        await asyncio.sleep(10)
        assert fleet.up == ["a", "b"] and fleet["a"].updates == [1]

    in_virtual_time(main, stall_seconds=20.0)


def test_a_server_that_refuses_what_another_took_is_fenced_and_tried_again():
    async def main(fleet):
        await fleet.start("a", "b")
        fleet["a"].refuses = True
        tasks = [fleet.ask(10), fleet.ask(10)]
        await asyncio.sleep(4.5)
        await fleet.publish(1)
        assert fleet.up == ["b"]
        await asyncio.sleep(5)
        assert fleet.up == ["a", "b"] and fleet["a"].updates == [1]
        outputs = await asyncio.gather(*tasks)
        assert [len(output.token_ids) for output in outputs] == [10, 10]
        assert fleet.client.stats().stale_served == 0

    in_virtual_time(main)


def test_if_all_refuse_the_old_weights_are_served():
    async def main(fleet):
        await fleet.start("a", "b")
        fleet["a"].refuses = fleet["b"].refuses = True
        with raises(WeightUpdateError, key="a refuses", value="version 1"):
            await fleet.publish(1)
        assert fleet.up == ["a", "b"]
        assert fleet.client.pool.policy_version == 0
        output = await fleet.ask(5)
        assert output.stop_reason is StopReason.LENGTH
        assert set(output.policy_versions) == {0}

    in_virtual_time(main)


def test_an_update_during_an_outage_is_kept_if_it_lasts():
    async def main(fleet):
        await fleet.start("a")
        fleet["a"].die()
        await fleet.publish(1)
        assert (await fleet.ask(3)).policy_versions == (1, 1, 1)
        fleet["a"].die()
        with raises(BackendError, key="no server", value="version 2"):
            await fleet.publish(2, lasting=False)

    in_virtual_time(main)


def test_nobody_slips_into_the_rotation_past_the_fence_while_weights_change():
    async def main(fleet):
        await fleet.start("a")
        publishing = asyncio.create_task(fleet.publish(1))
        await asyncio.sleep(0.5)
        with pytest.raises(ValueError, match="while weights are"):
            fleet.client.pool.add_server(AsyncServer(fleet.make("b")(), name="b"))
        await publishing

    in_virtual_time(main)


def test_a_server_that_dies_while_it_waits_is_replaced():
    async def main(fleet):
        await fleet.start("a", "b")
        await fleet.publish(1, lasting=False)
        fleet["b"].die()
        await asyncio.sleep(20)
        fleet["b"].die()  # this one is fenced, so nobody notices before the next update
        fleet["a"].refuses = True
        with raises(WeightUpdateError, key="a refuses", value="version 2"):
            await fleet.publish(2, lasting=False)
        await asyncio.sleep(5)
        fleet["a"].refuses = False
        await fleet.publish(3, lasting=False)
        assert fleet.up == ["a", "b"]
        assert len(fleet.engines["b"]) == 3
        assert fleet["b"].updates == [3]

    in_virtual_time(main, stall_seconds=20.0)


def test_a_server_that_is_lost_in_the_moment_it_came_back_is_recovered_again():
    async def main(fleet):
        await fleet.start("a", "b")
        await fleet.publish(1, lasting=False)
        fleet["b"].die()
        await asyncio.sleep(20)
        await fleet.publish(
            2
        )  # lets it in; its recovery has not heard of that when it is lost again
        (server,) = (server for server in fleet.client.pool.servers if server.name == "b")
        fleet.client.pool.mark_lost(server, "a test wants it")
        fleet.unreachable.add("b")
        await asyncio.sleep(10)
        await fleet.client.pool.leave("b")  # a KeyError if it were not being recovered
        assert fleet.up == ["a"] and len(fleet.engines["b"]) > 3

    in_virtual_time(main, stall_seconds=20.0)


def test_servers_that_start_with_different_weights_are_refused_and_closed():
    async def main(fleet):
        with raises(ConfigError, key="policy versions", value="{'a': 0, 'b': 3}"):
            await fleet.client.pool.start({"a": fleet.make("a"), "b": fleet.make("b", version=3)})
        assert fleet["a"].closed and fleet["b"].closed and not fleet.up

    in_virtual_time(main)


def test_closing_ends_what_waits_for_a_server():
    async def main(fleet):
        await fleet.start("a")
        await fleet.publish(1, lasting=False)
        joining = asyncio.create_task(fleet.client.pool.join("b", fleet.make("b")))
        await asyncio.sleep(1)
        fleet.unreachable.add("a")
        fleet["a"].die()
        task = fleet.ask(5)
        await asyncio.sleep(1)
        await fleet.client.pool.close()
        for error in await asyncio.gather(joining, task, return_exceptions=True):
            assert isinstance(error, BackendError)
        assert all(engine.closed for engines in fleet.engines.values() for engine in engines)

    in_virtual_time(main)


@pytest.mark.parametrize("answers", [True, False])
def test_a_server_that_keeps_failing_is_tried_ever_later(answers):
    async def main(fleet):
        await fleet.start("a", "b")
        for _ in range(7):
            if answers:
                await asyncio.gather(fleet.ask(3), fleet.ask(3))
            fleet.client.pool.mark_lost(
                next(s for s in fleet.client.pool.servers if s.name == "a"), "it died"
            )
            while "a" not in fleet.up:
                await asyncio.sleep(0.01)
        starts = [when for name, when in fleet.starts if name == "a"]
        last = starts[-1] - starts[-2]
        assert last < 5 if answers else last > 10

    in_virtual_time(main)
