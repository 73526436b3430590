"""Waiting for a server: whose turn it is, and for how long there is any use in it."""

import asyncio

from jax_agent_rl.rollout.protocol import GenerateRequest
from jax_agent_rl.rollout.request_queue import RequestQueue
from jax_agent_rl.rollout.routing import RequestCosts
from jax_agent_rl.rollout.server import AsyncServer
from jax_agent_rl.types import SamplingParams, StopReason
from tests.fleet import EngineSpeed, in_virtual_time, now

LIMITED = {"max_in_flight_per_server": 2, "wait_for_server_seconds": 50.0}


class Costs(RequestCosts):
    """Costs that are known: seconds of a request, and of computing its prompt."""

    def __init__(self, *, request: float, prompt: float) -> None:
        super().__init__()
        self._request = request
        self._prompt = prompt

    @property
    def request_seconds(self) -> float:
        return self._request

    def prefill_seconds(self, ids: int) -> float:
        return self._prompt


def asked(fleet, name):
    return [request.request_id for request in fleet[name].asked]


def test_servers_keep_their_limit_and_sessions_their_order():
    async def main(fleet):
        await fleet.start("a")
        first = fleet.ask(5, session_id="old")
        await asyncio.sleep(0)
        held = [fleet.ask(20), fleet.ask(20), fleet.ask(5, session_id="new")]  # r2, r3, r4
        await first
        again = fleet.ask(5, session_id="old")  # r5
        await asyncio.gather(again, *held)
        assert asked(fleet, "a") == ["r1", "r2", "r3", "r5", "r4"]

    in_virtual_time(main, **LIMITED)


def test_a_server_that_joins_late_has_work_at_once():
    async def main(fleet):
        await fleet.start("a")
        tasks = [fleet.ask(10, session_id=f"s{i}") for i in range(4)]
        await asyncio.sleep(3)
        assert fleet.client.waiting == 2
        await fleet.client.pool.join("b", fleet.make("b"))
        assert fleet.client.waiting == 0
        await asyncio.gather(*tasks)
        assert asked(fleet, "b") == ["r3", "r4"]

    in_virtual_time(main, **LIMITED)


def test_a_session_waits_while_others_use_the_room_elsewhere():
    async def main(fleet):
        await fleet.start("a", "b")
        await asyncio.gather(
            fleet.ask(1, session_id="on a"), fleet.ask(1, session_id="on b")
        )  # r1, r2
        held = [fleet.ask(20), fleet.ask(5), fleet.ask(20), fleet.ask(20)]  # a: r3, r5; b: r4, r6
        await asyncio.sleep(1)
        waiting = [fleet.ask(1, session_id="on a"), fleet.ask(1)]  # r7 waits for a, r8 for any
        await asyncio.gather(*held, *waiting)
        assert asked(fleet, "b") == ["r2", "r4", "r6", "r8", "r7"], (
            "r8 took b's room first, then nobody else wanted it"
        )

    in_virtual_time(main, **LIMITED)


def test_a_session_of_a_full_server_moves_and_stays():
    async def main(fleet):
        await fleet.start("a", "b")
        await fleet.ask(1, session_id="s")
        held = [fleet.ask(20), fleet.ask(5), fleet.ask(20)]  # a: r2, r4; b: r3
        await asyncio.sleep(1)
        await fleet.ask(1, session_id="s")
        await asyncio.gather(*held)
        await fleet.ask(1, session_id="s")
        assert asked(fleet, "b") == ["r3", "r5", "r6"]

    in_virtual_time(main, **LIMITED)


def test_a_session_waits_where_a_new_prefill_takes_longer():
    async def main(fleet):
        await fleet.start("a", "b")
        await fleet.ask(1, session_id="s")
        fleet.client.pool.queue.costs = Costs(
            request=10, prompt=6
        )  # with two at a time, a turn comes every 5 s
        held = [fleet.ask(20), fleet.ask(20), fleet.ask(20)]  # a: r2, r4; b: r3
        await asyncio.sleep(1)
        waiting = [fleet.ask(1, session_id="s")]
        await asyncio.sleep(1)
        assert fleet.client.waiting == 1, "b has room, but it would take 6 s there"
        waiting.append(fleet.ask(1, session_id="s"))
        await asyncio.sleep(1)
        assert fleet.client.waiting == 1 and asked(fleet, "b") == ["r3", "r6"], (
            "after r5 it would take 10 s on a"
        )
        await asyncio.gather(*held, *waiting)

    in_virtual_time(main, **LIMITED)


def test_a_session_does_not_wait_for_ever_for_a_server_that_hangs():
    async def main(fleet):
        await fleet.start("a", "b")
        await fleet.ask(1, session_id="s")
        fleet.client.pool.queue.costs = Costs(request=10, prompt=6)
        held = [fleet.ask(500), fleet.ask(1), fleet.ask(500)]  # a: r2, r4; b: r3
        await asyncio.sleep(10)
        waiting = fleet.ask(1, session_id="s")  # a turn is expected to come after 5 s
        await asyncio.sleep(25)
        assert fleet.client.waiting == 1
        await asyncio.sleep(2)
        assert fleet.client.waiting == 0
        assert asked(fleet, "b") == ["r3", "r5"]
        await waiting
        for task in held:
            task.cancel()
        await asyncio.gather(*held, return_exceptions=True)

    in_virtual_time(main, **LIMITED)


def test_room_elsewhere_takes_a_waiting_session_only_where_that_pays():
    async def main(fleet, prompt: float) -> list[str]:
        await fleet.start("a", "b")
        await fleet.ask(1, session_id="s")
        held = [fleet.ask(20), fleet.ask(5), fleet.ask(20), fleet.ask(20)]  # a: r2, r4; b: r3, r5
        await asyncio.sleep(1)
        fleet.client.pool.queue.costs = Costs(request=10, prompt=prompt)
        await asyncio.gather(fleet.ask(1, session_id="s"), *held)  # r6 waits; b has room after 5 s
        return asked(fleet, "b")

    assert in_virtual_time(lambda fleet: main(fleet, 4.0), **LIMITED) == ["r3", "r5", "r6"]
    assert in_virtual_time(lambda fleet: main(fleet, 6.0), **LIMITED) == ["r3", "r5"]


def test_a_waiting_request_can_be_aborted_and_cancelled():
    async def main(fleet):
        await fleet.start("a")
        held = [fleet.ask(20), fleet.ask(20)]
        aborted = fleet.ask(5)
        cancelled = fleet.ask(5)
        last = fleet.ask(5)
        await asyncio.sleep(1)
        assert fleet.client.waiting == 3
        assert await fleet.client.abort("r3")
        output = await aborted
        assert (output.token_ids, output.stop_reason) == ((), StopReason.ABORTED)
        assert now() < 2
        cancelled.cancel()
        await asyncio.gather(*held, last)
        assert asked(fleet, "a") == ["r1", "r2", "r5"]
        assert cancelled.cancelled()

    in_virtual_time(main, **LIMITED)


def test_room_of_a_cancelled_request_goes_to_the_next():
    async def main(fleet):
        queue = RequestQueue(max_in_flight=1, wait_seconds=0.0)
        queue.add(AsyncServer(fleet.make("a")()))

        def enter(name):
            request = GenerateRequest(
                request_id=name, prompt_ids=(1,), sampling=SamplingParams(max_tokens=1)
            )
            return asyncio.ensure_future(queue.acquire(request))

        server = await enter("first")
        waiting = enter("waiting")
        last = enter("last")
        await asyncio.sleep(0)
        queue.release(server)  # it is the turn of the one that waits, which does not know it yet
        waiting.cancel()
        assert await last is server
        assert waiting.cancelled()
        assert not queue.waiting

    in_virtual_time(main)


def test_one_that_is_cancelled_in_the_moment_all_hope_is_lost_is_cancelled():
    async def main(fleet):
        queue = RequestQueue(max_in_flight=1, wait_seconds=10.0)
        queue.expect("a")
        request = GenerateRequest(
            request_id="r", prompt_ids=(1,), sampling=SamplingParams(max_tokens=1)
        )
        waiting = asyncio.ensure_future(queue.acquire(request))
        await asyncio.sleep(0)
        queue.stop_expecting("a")
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        assert waiting.cancelled()

    in_virtual_time(main)


def test_those_that_wait_for_a_lost_server_go_elsewhere():
    async def main(fleet):
        await fleet.start("a", "b")
        await fleet.ask(1, session_id="on a")
        held = [fleet.ask(9) for _ in range(4)]
        await asyncio.sleep(1)
        task = fleet.ask(1, session_id="on a")
        fleet.unreachable.add("a")
        fleet["a"].die()
        await asyncio.gather(task, *held)
        assert fleet.up == ["b"] and "r6" in asked(fleet, "b")

    in_virtual_time(main, **LIMITED)


def test_a_thousand_requests_keep_two_servers_full_to_the_end():
    async def main(fleet):
        await fleet.start("a", "b")
        await asyncio.gather(*(fleet.ask(4, session_id=f"s{i}") for i in range(1000)))
        # 2 x 2 slots, 4 seconds each
        assert 1000 <= now() < 1010
        assert len(asked(fleet, "a")) == len(asked(fleet, "b")) == 500

    in_virtual_time(
        main, speed=EngineSpeed(slots=2, step_seconds=1.0, prefill_tokens_per_step=10**9), **LIMITED
    )
