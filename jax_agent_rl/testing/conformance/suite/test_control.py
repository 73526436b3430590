"""Abort, cancel, pause, sleep and close: control of a backend from outside."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from functools import partial

from jax_agent_rl.errors import BackendClosedError
from jax_agent_rl.testing.conformance.client import CheckClient, CheckFailed
from jax_agent_rl.testing.conformance.runner import check
from jax_agent_rl.types import PauseMode, StopReason, TokenOutput

_ATTEMPTS = 5
"""Attempts to abort: on a fast engine one may be too late, but not this often in a row."""
SETTLE_SECONDS = 10.0
_DROPPED = "a held request was dropped"
_NOT_PAUSED = "the pause does not hold: weights would change under a running step"
_STILL_PAUSED = "the pause holds on after resume: the engine never continues"


@check("abort")
async def test_abort_returns_partials(client: CheckClient) -> None:
    """Abort ends a request at once with its ids so far, from which it can be resumed exactly."""
    prompt = client.prompt(8, seed=40)
    count = client.room - 24
    part = await _aborted_output(client, prompt, count)
    cause = "ids sampled before the abort are thrown away, or the abort waits for the end"
    assert part.stop_reason is StopReason.ABORTED, cause
    assert 0 < len(part.token_ids) < count, cause

    continuation = await client.generate([*prompt, *part.token_ids], max_tokens=8)
    cause = "an id was lost or doubled at the cut"
    client.assert_greedy(prompt, part.then(continuation), "partial and resumed ids", cause=cause)
    if client.capabilities.logprobs:
        client.assert_logprobs(
            prompt, part, "log-probs of the partial ids", cause="log-probs are shifted by the abort"
        )


async def _aborted_output(client: CheckClient, prompt: list[int], max_tokens: int) -> TokenOutput:
    """Return the output of a request aborted after its first ids."""
    for _ in range(_ATTEMPTS):
        request = await client.started(prompt, max_tokens=max_tokens)
        found = await client.backend.abort(request.request_id)
        output = await request.task
        is_whole = output.stop_reason is StopReason.LENGTH and len(output.token_ids) == max_tokens
        if found or not is_whole:
            assert found is True, "abort does not find requests that run"
            return output
    raise CheckFailed(
        f"aborting a generation of {max_tokens} ids after its first ones",
        expected="abort returns True and the generation ends early",
        got=f"{_ATTEMPTS} times it returned False and the generation ran to its end",
        cause="aborts are handled only when the engine is idle, or under another id",
    )


@check("abort")
async def test_abort_unknown(client: CheckClient) -> None:
    """Abort of an unknown request returns False."""
    request_id = client.new_id()
    await client.generate(client.prompt(5, seed=41), request_id=request_id)
    assert await client.backend.abort("conformance-unknown") is False, (
        "a request that never was is found"
    )
    assert await client.backend.abort(request_id) is False, "ended requests stay known"


@check("abort", "pause_modes:keep")
async def test_abort_waiting(client: CheckClient) -> None:
    """While a request waits, it can be aborted and returns no ids."""
    await client.backend.pause(PauseMode.KEEP)
    request_id = client.new_id()
    task = client.begin(client.prompt(5, seed=42), request_id=request_id)
    await _one_waits(client)
    assert await client.backend.abort(request_id) is True, "only running requests are aborted"
    output = await client.within(
        30, task, "the output of an aborted request", cause="its caller is not woken"
    )
    assert (output.token_ids, output.stop_reason) == ((), StopReason.ABORTED), "it ran all the same"


@check()
async def test_cancellation_frees_slot(client: CheckClient) -> None:
    """When the caller is cancelled or closes its stream, the slot is freed at once."""
    count = min(2 * client.capabilities.max_concurrent, 64)
    length = client.room - 8
    cause = "a request without a caller keeps its slot: the engine fills up with them"
    tasks = []
    for i in range(count - 1):
        tasks.append(client.begin(client.prompt(4, seed=500 + i), max_tokens=length))
    first = await client.started(client.prompt(4, seed=499), max_tokens=length, priority=-1)
    tasks.append(first.task)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    sampled = (await client.backend.metrics()).generated_tokens
    await client.until_idle(f"nothing runs after {count} callers were cancelled", cause=cause)
    wasted = (await client.backend.metrics()).generated_tokens - sampled
    # They go on until the engine learns of it, which a busy machine delays, but not to their end.
    tokens_to_the_end = min(count, client.capabilities.max_concurrent) * length
    assert wasted <= 3 * tokens_to_the_end // 4, cause

    if client.capabilities.streaming:
        request = client.request(client.prompt(4, seed=43), max_tokens=length)
        async with client.streaming(request) as stream:
            await anext(stream)
        await client.until_idle("nothing runs after a stream was closed in the middle", cause=cause)

    before = (await client.backend.metrics()).generated_tokens
    await asyncio.sleep(0.1)
    assert (await client.backend.metrics()).generated_tokens == before, cause
    assert len((await client.generate([5, 6, 7])).token_ids) == 8, cause


@check("pause_modes:keep")
async def test_pause_keep(client: CheckClient) -> None:
    """KEEP freezes running requests and holds new ones; after resume both continue unchanged."""
    prompt = client.prompt(8, seed=44)
    count = client.room - 24
    running = (await client.started(prompt, max_tokens=count)).task
    await client.backend.pause(PauseMode.KEEP)
    before = (await client.backend.metrics()).generated_tokens
    late = client.begin(client.prompt(6, seed=45))
    await asyncio.sleep(0.2)
    assert (await client.backend.metrics()).generated_tokens == before, _NOT_PAUSED
    assert late.done() is False, _NOT_PAUSED

    await client.backend.resume()
    output = await running
    cause = "freezing ended or restarted it"
    assert (len(output.token_ids), output.stop_reason) == (count, StopReason.LENGTH), cause
    client.assert_greedy(
        prompt,
        output,
        "ids of the frozen request",
        cause="its KV or position was lost in the pause",
    )
    assert len((await late).token_ids) == 8, _DROPPED


@check("pause_modes:wait")
async def test_pause_wait(client: CheckClient) -> None:
    """WAIT returns when running requests have ended; new ones are held until resume."""
    count = client.room - 24
    for _ in range(_ATTEMPTS):
        running = (await client.started(client.prompt(8, seed=46), max_tokens=count)).task
        if not running.done():
            break

    await client.backend.pause(PauseMode.WAIT)
    health = await client.backend.health()
    late = client.begin(client.prompt(6, seed=47))
    await _one_waits(client)
    await asyncio.sleep(0.1)
    assert (health.running, late.done()) == (0, False), _NOT_PAUSED
    output = await client.within(
        30, running, "the output of a finished request", cause="it is frozen instead"
    )
    cause = "a running request was ended instead of let finish"
    assert (len(output.token_ids), output.stop_reason) == (count, StopReason.LENGTH), cause

    await client.backend.resume()
    assert len((await late).token_ids) == 8, _DROPPED


@check("pause_modes:wait")
async def test_pause_wait_given_up(client: CheckClient) -> None:
    """After resume, a WAIT whose caller gave up no longer holds requests."""
    count = client.room - 24
    running = (await client.started(client.prompt(8, seed=53), max_tokens=count)).task
    pausing = asyncio.create_task(client.backend.pause(PauseMode.WAIT))
    await asyncio.sleep(0)  # the call is made; a small model would soon have ended everything
    pausing.cancel()
    await asyncio.gather(pausing, return_exceptions=True)

    await client.backend.resume()
    output = await client.within(
        30, running, "the output of a request that ran meanwhile", cause=_STILL_PAUSED
    )
    assert len(output.token_ids) == count, "a running request was ended instead of let finish"
    after = await client.within(
        30, client.begin(client.prompt(6, seed=54)), "a request after it", cause=_STILL_PAUSED
    )
    assert len(after.token_ids) == 8, _STILL_PAUSED


@check("pause_modes:wait", "pause_modes:keep")
async def test_pause_wait_after_keep(client: CheckClient) -> None:
    """WAIT lets requests finish that KEEP has frozen."""
    count = client.room - 24
    running = (await client.started(client.prompt(8, seed=55), max_tokens=count)).task
    await client.backend.pause(PauseMode.KEEP)
    await client.within(
        30,
        client.backend.pause(PauseMode.WAIT),
        "the end of a pause(WAIT) after a pause(KEEP)",
        cause="it waits for what is frozen",
    )

    output = await client.within(
        30, running, "the output of the frozen request", cause="it is frozen still"
    )
    assert len(output.token_ids) == count, "the frozen request was ended instead of let finish"

    late = client.begin(client.prompt(6, seed=56))
    await _one_waits(client)
    assert late.done() is False, _NOT_PAUSED

    await client.backend.resume()
    assert len((await late).token_ids) == 8, _STILL_PAUSED


@check("pause_modes:abort")
async def test_pause_abort(client: CheckClient) -> None:
    """ABORT ends running requests with their ids so far; new ones are held until resume."""
    prompt = client.prompt(8, seed=48)
    count = client.room - 24
    for _ in range(_ATTEMPTS):
        running = (await client.started(prompt, max_tokens=count)).task
        await client.backend.pause(PauseMode.ABORT)
        output = await client.within(
            30, running, "the output of the aborted request", cause="it is frozen instead"
        )
        late = client.begin(client.prompt(6, seed=49))
        await asyncio.sleep(0.1)
        assert late.done() is False, _NOT_PAUSED
        await client.backend.resume()
        assert len((await late).token_ids) == 8, _DROPPED
        if output.stop_reason is not StopReason.LENGTH:  # else it ended before the pause came
            break

    cause = "running requests are let finish, or lose their ids"
    assert output.stop_reason is StopReason.ABORTED, cause
    assert 0 < len(output.token_ids) < count, cause
    client.assert_greedy(prompt, output, "its ids", cause="wrong ids at the cut")


@check("sleep")
async def test_sleep_and_wake(client: CheckClient) -> None:
    """Asleep, a backend holds new requests; awake again, it is as before with an empty cache."""
    prompt = client.prompt(64, seed=52)
    await client.generate(prompt)
    await client.backend.sleep()
    held = client.begin(prompt, max_tokens=8)
    await asyncio.sleep(0.1)
    assert held.done() is False, (
        "a request ended while asleep: the engine samples without its memory"
    )
    await client.backend.wake()
    output = await client.within(
        60, held, "the end of a request that came while asleep", cause="it was dropped"
    )
    assert output.cached_tokens == 0, "KV that was released is reused"
    client.assert_greedy(
        prompt, output, "ids after waking", cause="weights or cache are not those of before"
    )


@check()
async def test_undeclared_raises(client: CheckClient) -> None:
    """Every operation that Capabilities do not declare raises an error."""
    backend = client.backend
    capabilities = client.capabilities
    calls = []
    if not capabilities.sleep:
        calls += [("sleep()", backend.sleep), ("wake()", backend.wake)]
    if not capabilities.abort:
        calls.append(("abort()", partial(backend.abort, "x")))
    for mode in sorted(set(PauseMode) - capabilities.pause_modes):
        calls.append((f"pause({mode})", partial(backend.pause, mode)))
    cause = "the call is accepted and silently does nothing"
    for name, call in calls:
        await client.raises(NotImplementedError, call(), f"{name} undeclared", cause=cause)

    if not capabilities.lora:
        adapted = replace(client.request(client.prompt(5, seed=50)), lora="conformance")
        await client.raises(
            Exception, backend.generate(adapted), "a LoRA request undeclared", cause=cause
        )
    for kind in sorted({"image", "video"} - capabilities.multi_modal):
        media = replace(client.request(client.prompt(5, seed=51)), multi_modal={kind: (object(),)})
        await client.raises(
            Exception, backend.generate(media), f"a request with {kind} undeclared", cause=cause
        )


async def _one_waits(client: CheckClient) -> None:
    async def waits() -> bool:
        return (await client.backend.health()).waiting >= 1

    await client.until(waits, "health().waiting reaches 1", cause="held requests are not counted")


@check()
async def test_close_ends_everything(client: CheckClient) -> None:
    """Close fails running requests, refuses new ones, may be repeated, and leaves nothing."""
    count = 1 + min(2 * client.capabilities.max_concurrent, 64)
    first = (await client.started(client.prompt(6, seed=70), max_tokens=client.room - 16)).task
    others = []
    for i in range(1, count):
        others.append(client.begin(client.prompt(6, seed=70 + i), max_tokens=client.room - 16))
    await asyncio.sleep(0)
    await client.within(
        60, client.backend.close(), "close under load", cause="it waits for requests, or for a lock"
    )
    cause = (
        "requests in flight are forgotten at close: their callers hang, or see an undocumented"
        " error"
    )
    await client.within(
        30, asyncio.wait([first, *others]), f"the end of {count} requests after close", cause=cause
    )
    results = await asyncio.gather(first, *others, return_exceptions=True)
    errors = [result for result in results if isinstance(result, BaseException)]
    undocumented = [repr(error) for error in errors if not isinstance(error, BackendClosedError)]
    assert undocumented[:3] == [], cause
    assert len(errors) > 0, "close waits for the work instead of ending it"

    await client.raises(
        BackendClosedError, client.generate([5, 6]), "generate after close", cause=cause
    )
    await client.within(
        10, client.backend.close(), "a second close", cause="it waits for what no longer exists"
    )
    assert (await client.backend.health()).ok is False, (
        "health does not report that the backend is closed"
    )

    deadline = time.monotonic() + SETTLE_SECONDS
    left_behind = client.footprint.added()
    while left_behind and time.monotonic() < deadline:
        await asyncio.sleep(0.05)
        left_behind = client.footprint.added()
    assert left_behind == [], "a worker is not joined; it keeps its memory"
