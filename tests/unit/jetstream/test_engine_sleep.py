"""Sleep gives device memory back, and wake restores the engine as it was."""

import asyncio

import jax

from jax_agent_rl.rollout.protocol import WeightUpdate
from jax_agent_rl.types import StopReason
from tests.tiny import FOUR_SLOTS, TINY, greedy, tiny_params
from tests.unit.jetstream.test_jetstream_backend import prompt_of, request, running

KV_BYTES = 2 * FOUR_SLOTS.kv_cache_tokens * TINY.num_layers * TINY.num_kv_heads * TINY.head_dim * 4


def live_bytes() -> int:
    return sum(array.nbytes for array in jax.live_arrays())


async def test_asleep_neither_cache_nor_weights_are_on_the_device():
    params = tiny_params()
    weights = sum(x.nbytes for x in jax.tree.leaves(params))
    async with running(params) as backend:
        awake = live_bytes()
        await backend.sleep()
        asleep = live_bytes()
        assert awake - asleep >= KV_BYTES + weights
        await backend.wake()
        assert live_bytes() == awake


async def test_it_wakes_as_it_was_and_compiles_nothing():
    prompt = prompt_of(1, 20)
    params = tiny_params()
    async with running(params) as backend:
        await backend.generate(request("before", prompt))
        await backend.sleep()
        await backend.sleep()
        await backend.wake()
        await backend.wake()
        output = await backend.generate(request("after", prompt))
        assert list(output.token_ids) == greedy(params, prompt, 8)
        assert output.cached_tokens == 0
        assert (await backend.metrics()).recompilations == 0


async def test_what_runs_is_aborted_and_what_comes_waits():
    prompt = prompt_of(2, 5)
    params = tiny_params()
    async with running(params) as backend:
        for _ in range(20):  # a fast engine may be done before it hears of it
            stream = backend.stream(request("runs", prompt, max_tokens=50))
            first = await anext(stream)
            await backend.sleep()
            last = [first, *[chunk async for chunk in stream]][-1]
            if last.final.stop_reason is StopReason.ABORTED:
                break
            await backend.wake()
        assert last.final.stop_reason is StopReason.ABORTED
        assert 0 < len(last.final.token_ids) < 50
        late = asyncio.create_task(backend.generate(request("late", prompt)))
        while not (await backend.health()).waiting:
            await asyncio.sleep(0)
        await backend.wake()
        assert list((await late).token_ids) == greedy(params, prompt, 8)


async def test_weights_taken_asleep_are_those_it_wakes_with():
    prompt = prompt_of(3, 12)
    new = tiny_params(seed=1)
    async with running(tiny_params()) as backend:
        await backend.sleep()
        await backend.update_weights(WeightUpdate(version=2, kind="arrays", payload=new))
        await backend.wake()
        output = await backend.generate(request("new", prompt))
        assert list(output.token_ids) == greedy(new, prompt, 8)
        assert set(output.policy_versions) == {2}
