"""The metrics of servers that come and go, as if they were one engine."""

import asyncio

from jax_agent_rl.errors import EngineDiedError
from jax_agent_rl.rollout.fleet_metrics import FleetMetrics
from jax_agent_rl.rollout.protocol import BackendMetrics
from tests.fleet import in_virtual_time, now


class Counting:
    """A backend as far as its metrics go."""

    def __init__(self, tokens):
        self.tokens = tokens
        self.answers = True

    async def metrics(self):
        if self.answers is None:
            await asyncio.get_running_loop().create_future()
        if not self.answers:
            raise EngineDiedError("gone")
        return BackendMetrics(generated_tokens=self.tokens, busy_seconds=self.tokens / 2)


async def test_what_a_lost_server_did_stays_and_one_that_joins_counts_from_then_on():
    first = Counting(10)
    second = Counting(20)
    backends = [first, second]
    fleet = FleetMetrics(lambda: backends)
    assert (await fleet.read()).generated_tokens == 30
    second.answers = False
    first.tokens = 15
    assert (await fleet.read()).generated_tokens == 35, "what it said last"
    backends[1] = again = Counting(
        22
    )  # the same server, reached again: most of this is counted already
    assert (await fleet.read()).generated_tokens == 35
    again.tokens = 30
    read = await fleet.read()
    assert (read.generated_tokens, read.busy_seconds) == (43, 21.5)


def test_one_that_does_not_answer_is_not_waited_for_forever():
    async def main(_):
        silent = Counting(10)
        well = Counting(20)
        fleet = FleetMetrics(lambda: [silent, well])
        silent.answers = None
        assert (await fleet.read()).generated_tokens == 20
        assert now() < 11

    in_virtual_time(main)
