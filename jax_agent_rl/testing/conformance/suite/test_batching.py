"""Concurrent requests: they affect each other's speed and nothing else."""

from __future__ import annotations

import asyncio

import pytest

from jax_agent_rl.errors import BackendError
from jax_agent_rl.testing.conformance.client import CheckClient
from jax_agent_rl.testing.conformance.runner import check
from jax_agent_rl.types import PauseMode, digest_ids

_ATTEMPTS = 5
"""Attempts to send a request while another runs: that one may end first, but not this often."""
_MAX_SLOTS = 128
"""Most slots that are filled to make requests queue; more would take too long."""


@check("seeds")
async def test_seeds_reproduce(client: CheckClient) -> None:
    """With a seed, ids are the same whatever else is in the batch; other seeds give others."""
    prompt = client.prompt(10, seed=30)
    options = {"max_tokens": 24, "temperature": 1.0}
    alone = await client.generate(prompt, seed=42, **options)
    others = [client.begin(client.prompt(7 + i, seed=31), **options) for i in range(7)]
    batched = await client.generate(prompt, seed=42, **options)
    await asyncio.gather(*others)
    other_seed = await client.generate(prompt, seed=43, **options)
    cause = "the seed is ignored, or randomness depends on the slot, the step or the batch"
    assert batched.token_ids == alone.token_ids, cause
    assert other_seed.token_ids != alone.token_ids, "all seeds are mapped to one"


@check()
async def test_unseeded_differ(client: CheckClient) -> None:
    """Without a seed, requests draw their own: eight samples of a group are not all the same."""
    outputs = await client.gather([client.prompt(10, seed=32)] * 8, max_tokens=24, temperature=1.0)
    cause = (
        "unseeded requests share one random state, or temperature is ignored; a GRPO group would be"
        " all equal"
    )
    assert len({output.token_ids for output in outputs}) > 1, cause


@check()
async def test_concurrency_64(client: CheckClient) -> None:
    """64 concurrent requests of different lengths each get their own answer."""
    prompts = [client.prompt(1 + (11 * i) % 60, seed=200 + i) for i in range(64)]
    lengths = [4 + i % 9 for i in range(64)]
    tasks = []
    for prompt, length in zip(prompts, lengths, strict=True):
        tasks.append(client.begin(prompt, max_tokens=length))
    outputs = await asyncio.gather(*tasks)
    for i, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
        expected = (lengths[i], digest_ids([*prompt, *output.token_ids]))
        cause = f"request {i} of 64: requests are mixed up, an answer goes to the wrong caller"
        assert (len(output.token_ids), output.context_digest) == expected, cause
        if i % 4 == 0:
            cause = "a slot's KV or position leaks into another's"
            client.assert_greedy(prompt, output, f"greedy ids of request {i} of 64", cause=cause)


@check("prefix_reuse")
async def test_prefix_reuse(client: CheckClient) -> None:
    """On its next turn, a session reuses and counts cached KV, and gets the same ids as without."""
    prompt = client.prompt(64, seed=33)
    before = await client.backend.metrics()
    first = await client.generate(prompt, session="conformance-prefix", max_tokens=12)
    longer = [*prompt, *first.token_ids, *client.prompt(5, seed=34)]
    second = await client.generate(longer, session="conformance-prefix")

    cause = "the prefix cache is off, is looked up by session only, or hits are not counted"
    assert 32 <= second.cached_tokens < len(longer), (
        f"of a second turn that repeats {len(longer) - 5} ids: {cause}"
    )
    counted = (await client.backend.metrics()).cached_tokens - before.cached_tokens
    assert counted == first.cached_tokens + second.cached_tokens, (
        "outputs and metrics count differently"
    )
    client.assert_greedy(
        longer, second, "greedy ids on a reused prefix", cause="the KV reused is not of these ids"
    )
    await client.backend.reset_prefix_cache()
    assert (await client.generate(longer)).cached_tokens == 0, "reset_prefix_cache does nothing"


@check("priorities")
async def test_priorities(client: CheckClient) -> None:
    """Among waiting requests, the one with the lowest priority value runs first."""
    slots = client.capabilities.max_concurrent
    if slots > _MAX_SLOTS:
        pytest.skip(
            f"Capabilities.max_concurrent={slots}: too many slots to fill so that requests wait"
        )
    prompt = client.prompt(5, seed=35)
    done = []

    async def run(name: str, priority: int) -> None:
        # All are of one session, so that of several engines behind a backend one runs them all:
        # engines have no common order.
        await client.begin(prompt, priority=priority, max_tokens=8, session="priorities")
        done.append(name)

    # Let requests wait, behind a pause or behind others that fill all slots.
    can_pause = PauseMode.KEEP in client.capabilities.pause_modes
    fillers = []
    if can_pause:
        await client.backend.pause(PauseMode.KEEP)
    else:
        for _ in range(slots):
            fillers.append(client.begin(prompt, max_tokens=client.room - 8))

    early = [(f"early {i}", 5) for i in range(slots)]
    late = [(f"late {i}", 5) for i in range(2 * slots)]
    requests = [*early, ("last", 9), ("first", 1), *late, ("last", 9), ("first", 1)]
    tasks = [asyncio.create_task(run(name, priority)) for name, priority in requests]
    try:
        await _all_arrived(client, len(requests) + len(fillers))
        if can_pause:
            await client.backend.resume()
        await asyncio.gather(*tasks, *fillers)
    finally:
        for task in tasks:
            task.cancel()
    # Halves, and not the very first and last: answers of a backend in another process may overtake
    # each other on their way.
    half = len(done) // 2
    cause = f"priorities are ignored, or their order is reversed: {done}"
    assert done[:half].count("first") == done[-half:].count("last") == 2, cause


@check()
async def test_health_under_load(client: CheckClient) -> None:
    """Under load, health answers at once and counts every request, and then returns to zero."""
    slots = client.capabilities.max_concurrent
    count = min(2 * slots, 64)
    prompts = [client.prompt(6, seed=300 + i) for i in range(count)]
    tasks = [client.begin(prompt, max_tokens=client.room - 8) for prompt in prompts]
    await _all_arrived(client, count)
    health = await client.within(
        30, client.backend.health(), "health under load", cause="it waits for the work in progress"
    )

    busy = sum(not task.done() for task in tasks)
    version = client.backend.policy_version
    assert (health.ok, health.policy_version) == (
        True,
        version,
    ), "health reports another version than is served"
    assert busy <= health.running + health.waiting <= count, "waiting requests are not counted"
    assert health.running <= slots, "more run than Capabilities.max_concurrent says"
    await asyncio.gather(*tasks)
    await client.until_idle(
        "running and waiting go back to 0", cause="finished requests are still counted"
    )


@check()
async def test_metrics_count(client: CheckClient) -> None:
    """Metrics count each id and each request once."""
    before = await client.backend.metrics()
    outputs = await client.gather([client.prompt(9, seed=400 + i) for i in range(10)], max_tokens=7)
    after = await client.backend.metrics()
    generated = after.generated_tokens - before.generated_tokens
    assert generated == sum(len(output.token_ids) for output in outputs), (
        "ids past the end of a request are counted"
    )
    assert after.requests_finished - before.requests_finished == 10, (
        "a request is counted twice, or not at all"
    )
    cause = "a shape that warm-up does not cover: each new one stalls every request"
    assert after.recompilations == 0, cause


@check()
async def test_duplicate_id_refused(client: CheckClient) -> None:
    """While a request runs, a second one with its id is refused, and the first continues."""
    prompt = client.prompt(8, seed=36)
    count = client.room - 16
    for _ in range(_ATTEMPTS):
        first = await client.started(prompt, max_tokens=count)
        if first.task.done():
            pytest.skip(f"the backend samples {count} ids faster than a second request can be sent")

        second = client.begin(prompt, request_id=first.request_id)
        await asyncio.wait([second])
        has_ended = second.exception() is None and first.task.done()
        if not has_ended:
            break

    cause = "the second one replaces the first, whose caller then hangs or gets the wrong ids"
    await client.raises(
        BackendError, second, "a second request with the id of a running one", cause=cause
    )
    assert len((await first.task).token_ids) == count, "the refusal ended the first request"


async def _all_arrived(client: CheckClient, count: int) -> None:
    """Wait until the backend has counted so many requests as running, waiting or finished."""
    metrics = await client.backend.metrics()
    finished_before = metrics.requests_finished

    async def have_arrived() -> bool:
        health = await client.backend.health()
        metrics = await client.backend.metrics()
        finished = metrics.requests_finished - finished_before
        return health.running + health.waiting + finished >= count

    cause = "queued requests are not counted in health().waiting"
    await client.until(have_arrived, f"{count} requests are running or waiting", cause=cause)
