"""When the simulated engine does things; expected times are worked out by hand from its rules."""

import asyncio
from contextlib import closing

import pytest

from jax_agent_rl.rollout.client import LLMServerClient
from jax_agent_rl.rollout.protocol import GenerateRequest, WeightUpdate
from jax_agent_rl.rollout.server import AsyncServer
from jax_agent_rl.testing.simulate.engine import SimulatedEngine
from jax_agent_rl.testing.simulate.workload import EngineSpeed, VirtualLoop
from jax_agent_rl.types import PauseMode, SamplingParams, StopReason, digest_ids

PROMPT = (1,) * 8
UPDATE = WeightUpdate(version=1, kind="arrays", payload=None)


def run(main, **speed):
    """``main(engine)`` on an engine of one-second steps whose prompts take no time worth a word."""
    defaults = {"slots": 4, "step_seconds": 1.0, "prefill_tokens_per_step": 10**9}

    async def on_engine():
        return await main(SimulatedEngine(EngineSpeed(**defaults | speed), max_model_len=4096))

    with closing(VirtualLoop()) as loop:
        return loop.run_until_complete(on_engine())


def request(name, tokens, prompt=PROMPT, **fields):
    return GenerateRequest(
        request_id=name, prompt_ids=prompt, sampling=SamplingParams(max_tokens=tokens), **fields
    )


async def finish(engine, *requests):
    """When each was done, and its output."""

    async def one(request):
        output = await engine.generate(request)
        return asyncio.get_running_loop().time(), output

    return await asyncio.gather(*map(one, requests))


def times(results):
    return [pytest.approx(at, abs=1e-4) for at, _ in results]


def test_slots_advance_together_and_a_free_one_is_taken():
    async def main(engine):
        return await finish(engine, request("a", 10), request("b", 3), request("c", 4))

    assert times(run(main, slots=2)) == [10.0, 3.0, 7.0]


def test_what_waits_is_served_by_priority_and_then_by_arrival():
    async def main(engine):
        urgent = request("d", 1, priority=-1)
        return await finish(
            engine, request("a", 10), request("b", 3), request("c", 4), urgent, request("e", 2)
        )

    # one slot: a has it, then d, which is urgent, then b, c and e as they came
    assert times(run(main, slots=1)) == [10.0, 14.0, 18.0, 11.0, 20.0]


def test_each_slot_in_use_slows_all_of_them():
    async def main(engine):
        return await finish(engine, request("a", 10), request("b", 5))

    # five steps of 1 + 2 * 0.5 seconds, then five of 1.5
    assert times(run(main, slot_seconds=0.5)) == [17.5, 10.0]


def test_prompts_take_their_time_and_what_a_session_left_behind_does_not():
    async def main(engine):
        ((first, output),) = await finish(engine, request("a/0", 5, session_id="a"))
        longer = PROMPT + output.token_ids + (1,) * 7
        ((second, again),) = await finish(engine, request("a/1", 5, longer, session_id="a"))
        return first, second - first, again.cached_tokens, (await engine.metrics()).prefill_tokens

    first, second, cached, prefilled = run(main, prefill_tokens_per_step=4)
    assert first == pytest.approx(8 / 4 + 5)
    assert second == pytest.approx(7 / 4 + 5)
    assert cached == 8 + 5 and prefilled == 8 + 7


def test_outputs_are_token_exact():
    async def main(engine):
        return await finish(engine, request("a", 6))

    ((_, output),) = run(main)
    assert len(output.token_ids) == len(output.log_probs) == len(output.policy_versions) == 6
    assert output.stop_reason is StopReason.LENGTH
    assert output.context_digest == digest_ids(PROMPT + output.token_ids)


@pytest.mark.parametrize(
    ("mode", "seconds", "versions"),
    [
        (
            PauseMode.KEEP,
            12.0,
            [0, 0, 0, 0, 1, 1, 1, 1, 1, 1],
        ),  # frozen while two seconds of loading pass
        (PauseMode.ABORT, 12.0, [0, 0, 0, 0, 1, 1, 1, 1, 1, 1]),  # the client resumes it
        (PauseMode.WAIT, 10.0, [0] * 10),
    ],
)
def test_new_weights_under_a_running_request(mode, seconds, versions):
    async def main(engine):
        server = AsyncServer(engine)
        client = LLMServerClient([server])
        sampling = SamplingParams(max_tokens=10)
        running = asyncio.create_task(
            client.generate("a", prompt_ids=PROMPT, sampling_params=sampling)
        )
        await asyncio.sleep(4.5)
        update = asyncio.create_task(server.update_weights(UPDATE, mode=mode))
        output = await running
        ended = asyncio.get_running_loop().time()
        await update
        return output, ended, engine.policy_version

    output, ended, version = run(main, load_seconds=2.0)
    assert list(output.policy_versions) == versions
    # An aborted request loses the half of a step it had not finished.
    assert ended == pytest.approx(seconds + 0.5 * (mode is PauseMode.ABORT), abs=1e-4)
    assert version == 1


def test_waiting_pauses_end_together():
    async def main(engine):
        first = asyncio.create_task(finish(engine, request("a", 5)))
        await asyncio.sleep(2.5)
        pauses = [asyncio.create_task(engine.pause(PauseMode.WAIT)) for _ in range(3)]
        await asyncio.sleep(0)
        pauses.pop().cancel()
        await asyncio.gather(*pauses)
        held = asyncio.create_task(finish(engine, request("b", 5)))
        await asyncio.sleep(10.0)
        assert not held.done()
        await engine.resume()
        await asyncio.sleep(2.5)
        given_up = asyncio.create_task(engine.pause(PauseMode.WAIT))
        await asyncio.sleep(0)
        given_up.cancel()
        await asyncio.gather(given_up, return_exceptions=True)
        return [*await first, *await held, *await finish(engine, request("c", 5))]

    assert [when for when, _ in run(main)] == pytest.approx([5.0, 20.0, 25.0], abs=1e-4)


def test_a_request_whose_caller_is_gone_frees_its_slot():
    async def main(engine):
        first = asyncio.create_task(engine.generate(request("a", 100)))
        second = asyncio.create_task(finish(engine, request("b", 5)))
        await asyncio.sleep(10.0)
        first.cancel()
        return times(await second), (await engine.health()).running

    assert run(main, slots=1) == ([15.0], 0)


def test_busy_is_the_time_in_which_something_runs():
    async def main(engine):
        await finish(engine, request("a", 4))
        await asyncio.sleep(100.0)
        await finish(engine, request("b", 3), request("c", 2))
        return await engine.metrics()

    metrics = run(main)
    assert metrics.busy_seconds == pytest.approx(7.0)
    assert metrics.generated_tokens == 9
    assert metrics.requests_finished == 3
