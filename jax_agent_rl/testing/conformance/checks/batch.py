"""Concurrent requests: they affect each other's speed and nothing else."""

from __future__ import annotations

import asyncio
import time

from jax_agent_rl.errors import BackendError
from jax_agent_rl.testing.conformance.check import check
from jax_agent_rl.testing.conformance.probe import DoesNotApply, Probe
from jax_agent_rl.types import PauseMode, digest_ids

_MOST_SLOTS = 128
"""Most slots that are filled to make requests queue; more would take too long."""


@check("seeds-reproduce", needs=["seeds"])
async def seeds(probe: Probe) -> None:
    """With a seed, a request's ids are the same whatever else is in the batch; other seeds give others."""
    prompt = probe.prompt(10, seed=30)
    options = {"max_tokens": 24, "temperature": 1.0}
    alone = await probe.generate(prompt, seed=42, **options)
    crowd = [probe.begin(probe.prompt(7 + i, seed=31), **options) for i in range(7)]
    again = await probe.generate(prompt, seed=42, **options)
    await asyncio.gather(*crowd)
    other = await probe.generate(prompt, seed=43, **options)
    probe.equal(
        again.token_ids,
        alone.token_ids,
        "ids of one seed, alone and in a crowd",
        cause="the seed is ignored, or randomness depends on the slot, the step or the batch",
    )
    probe.expect(
        other.token_ids != alone.token_ids,
        "ids of seeds 42 and 43",
        expected="different ones",
        got=other.token_ids,
        cause="all seeds are mapped to one",
    )


@check("unseeded-differ")
async def unseeded(probe: Probe) -> None:
    """Without a seed, requests draw their own: eight samples of a group are not all the same."""
    outputs = await probe.gather([probe.prompt(10, seed=32)] * 8, max_tokens=24, temperature=1.0)
    different = len({output.token_ids for output in outputs})
    probe.expect(
        different > 1,
        "different outputs of 8 equal requests at temperature 1",
        expected="more than 1",
        got=different,
        cause="unseeded requests share one random state, or temperature is ignored; a GRPO group would be all equal",
    )


@check("concurrency-64")
async def concurrency(probe: Probe) -> None:
    """64 concurrent requests of different lengths each get their own answer."""
    prompts = [probe.prompt(1 + (11 * i) % 60, seed=200 + i) for i in range(64)]
    lengths = [4 + i % 9 for i in range(64)]
    tasks = [probe.begin(p, max_tokens=n) for p, n in zip(prompts, lengths, strict=True)]
    outputs = await asyncio.gather(*tasks)
    for i, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
        probe.equal(
            (len(output.token_ids), output.context_digest),
            (lengths[i], digest_ids([*prompt, *output.token_ids])),
            f"length and context digest of request {i} of 64",
            cause="requests are mixed up: an answer goes to the wrong caller",
        )
        if i % 4 == 0:
            probe.expect_greedy(
                prompt, output, f"greedy ids of request {i} of 64", cause="a slot's KV or position leaks into another's"
            )


@check("prefix-reuse", needs=["prefix_reuse"])
async def prefix_reuse(probe: Probe) -> None:
    """On its next turn, a session reuses and counts cached KV, and gets the same ids as without."""
    prompt = probe.prompt(64, seed=33)
    before = await probe.backend.metrics()
    first = await probe.generate(prompt, session="conformance-prefix", max_tokens=12)
    longer = [*prompt, *first.token_ids, *probe.prompt(5, seed=34)]
    second = await probe.generate(longer, session="conformance-prefix")
    probe.expect(
        32 <= second.cached_tokens < len(longer),
        f"cached_tokens of a second turn that repeats {len(prompt) + 12} of its {len(longer)} ids",
        expected=f"between 32 and {len(longer) - 1}",
        got=second.cached_tokens,
        cause="the prefix cache is off, is looked up by session only, or hits are not counted",
    )
    counted = (await probe.backend.metrics()).cached_tokens - before.cached_tokens
    probe.equal(
        counted,
        first.cached_tokens + second.cached_tokens,
        "growth of metrics().cached_tokens",
        cause="outputs and metrics count differently",
    )
    probe.expect_greedy(longer, second, "greedy ids on a reused prefix", cause="the KV reused is not of these ids")
    await probe.backend.reset_prefix_cache()
    third = await probe.generate(longer)
    probe.equal(third.cached_tokens, 0, "cached_tokens after reset_prefix_cache", cause="the reset does nothing")


@check("priorities", needs=["priorities"])
async def priorities(probe: Probe) -> None:
    """Among waiting requests, the one with the lowest priority value runs first."""
    slots = probe.capabilities.max_concurrent
    if slots > _MOST_SLOTS:
        raise DoesNotApply(f"Capabilities.max_concurrent={slots}: too many slots to fill so that requests wait")
    prompt, done = probe.prompt(5, seed=35), []

    async def run(name: str, priority: int) -> None:
        await probe.begin(prompt, priority=priority, max_tokens=8)
        done.append(name)

    paused = PauseMode.KEEP in probe.capabilities.pause_modes
    if paused:
        await probe.backend.pause(PauseMode.KEEP)
        fillers = []
    else:
        fillers = [probe.begin(prompt, max_tokens=probe.room - 8) for _ in range(slots)]
    wanted = [("last", 9), *((f"mid{i}", 5) for i in range(2 * slots)), ("first", 1)]
    tasks = [asyncio.create_task(run(name, priority)) for name, priority in wanted]
    try:
        await _all_arrived(probe, len(wanted) + len(fillers))
        if paused:
            await probe.backend.resume()
        await asyncio.gather(*tasks, *fillers)
    finally:
        for task in tasks:
            task.cancel()
    probe.expect(
        done.index("first") < slots and done.index("last") >= len(done) - slots,
        f"order in which {len(done)} requests ended in {slots} slots",
        expected=f"'first' (priority 1) among the first {slots}, 'last' (9) among the last {slots}",
        got=f"'first' at {done.index('first')}, 'last' at {done.index('last')}",
        cause="priorities are ignored, or their order is reversed",
    )


@check("health-under-load")
async def health(probe: Probe) -> None:
    """Under load, health answers at once and counts every request, and then returns to zero."""
    count = min(2 * probe.capabilities.max_concurrent, 64)
    prompts = [probe.prompt(6, seed=300 + i) for i in range(count)]
    tasks = [probe.begin(prompt, max_tokens=probe.room - 8) for prompt in prompts]
    await _all_arrived(probe, count)
    begin = time.monotonic()
    state = await probe.backend.health()
    seconds = time.monotonic() - begin
    busy = sum(not task.done() for task in tasks)
    probe.expect(
        state.ok and state.policy_version == probe.backend.policy_version and seconds < 5,
        "health under load",
        expected=f"ok, version {probe.backend.policy_version}, within 5 s",
        got=f"{state} after {seconds:.1f} s",
        cause="health waits for the work in progress, or reports another version than is served",
    )
    probe.expect(
        busy <= state.running + state.waiting <= count and state.running <= probe.capabilities.max_concurrent,
        "running + waiting",
        expected=f"{busy} to {count}, of which at most {probe.capabilities.max_concurrent} running",
        got=f"{state.running} + {state.waiting}",
        cause="waiting requests are not counted, or more run than Capabilities.max_concurrent says",
    )
    await asyncio.gather(*tasks)
    await probe.until_idle("running and waiting go back to 0", cause="finished requests are still counted")


@check("metrics-count")
async def metrics(probe: Probe) -> None:
    """Metrics count each id and each request once."""
    before = await probe.backend.metrics()
    outputs = await probe.gather([probe.prompt(9, seed=400 + i) for i in range(10)], max_tokens=7)
    after = await probe.backend.metrics()
    probe.equal(
        (after.generated_tokens - before.generated_tokens, after.requests_finished - before.requests_finished),
        (sum(len(output.token_ids) for output in outputs), 10),
        "growth of generated_tokens, requests_finished",
        cause="ids past the end of a request are counted, or a request is counted twice",
    )
    probe.equal(
        after.recompilations,
        0,
        "programs compiled since warm-up",
        cause="a shape that warm-up does not cover: each new one stalls every request",
    )


@check("duplicate-id-refused")
async def duplicate(probe: Probe) -> None:
    """While a request runs, a second one with its id is refused, and the first continues."""
    prompt = probe.prompt(8, seed=36)
    live = await probe.started(prompt, max_tokens=probe.room - 16)
    if live.task.done():
        raise DoesNotApply(f"the backend samples {probe.room - 16} ids faster than a second request can be sent")
    await probe.raises(
        BackendError,
        probe.generate(prompt, request_id=live.request_id),
        "a second request with the id of a running one",
        cause="the second one replaces the first, whose caller then hangs or gets the wrong ids",
    )
    output = await live.task
    probe.equal(
        len(output.token_ids), probe.room - 16, "ids of the first request", cause="the refusal ended the first request"
    )


async def _all_arrived(probe: Probe, count: int) -> None:
    """Wait until the backend has counted so many requests as running, waiting or finished."""
    before = (await probe.backend.metrics()).requests_finished

    async def arrived() -> bool:
        state = await probe.backend.health()
        finished = (await probe.backend.metrics()).requests_finished - before
        return state.running + state.waiting + finished >= count

    await probe.until(
        arrived,
        what=f"{count} requests are running or waiting",
        cause="queued requests are not counted in health().waiting",
    )
