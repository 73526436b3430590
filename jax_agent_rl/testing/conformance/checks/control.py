"""Abort, cancel, pause, sleep and close: control of a backend from outside."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

from jax_agent_rl.errors import BackendClosedError
from jax_agent_rl.testing.conformance.check import check
from jax_agent_rl.testing.conformance.probe import CheckFailed, Probe
from jax_agent_rl.types import PauseMode, StopReason, TokenOutput

_ATTEMPTS = 5
"""Attempts to abort: on a fast engine one may come after the last id, but not this often in a row."""
_SETTLE_SECONDS = 10.0


async def aborted_part(probe: Probe, prompt: list[int], max_tokens: int) -> TokenOutput:
    """Return the output of a request aborted after its first ids."""
    for _ in range(_ATTEMPTS):
        live = await probe.started(prompt, max_tokens=max_tokens)
        found = await probe.backend.abort(live.request_id)
        output = await live.task
        if found or not (output.stop_reason is StopReason.LENGTH and len(output.token_ids) == max_tokens):
            probe.equal(found, True, "abort of a running request", cause="abort does not find requests that run")
            return output
    raise CheckFailed(
        f"aborting a generation of {max_tokens} ids after its first ones",
        expected="abort returns True and the generation ends early",
        got=f"{_ATTEMPTS} times it returned False and the generation ran to its end",
        cause="aborts are handled only when the engine is idle, or under another id",
    )


@check("abort-returns-partials", needs=["abort"])
async def abort(probe: Probe) -> None:
    """Abort ends a request at once with its ids so far, from which it can be resumed exactly."""
    prompt, count = probe.prompt(8, seed=40), probe.room - 24
    part = await aborted_part(probe, prompt, count)
    probe.expect(
        part.stop_reason is StopReason.ABORTED and 0 < len(part.token_ids) < count,
        "output of a request aborted after its first ids",
        expected=f"stop_reason aborted and 1 to {count - 1} ids",
        got=f"stop_reason {part.stop_reason} and {len(part.token_ids)} ids",
        cause="ids sampled before the abort are thrown away, or the abort waits for the end",
    )
    context = [*prompt, *part.token_ids]
    rest = await probe.generate(context, max_tokens=8)
    probe.expect_greedy(
        prompt, part.then(rest), "partial and resumed ids", cause="an id was lost or doubled at the cut"
    )
    if probe.capabilities.logprobs:
        probe.expect_logprobs(prompt, part, "log-probs of the partial ids", cause="log-probs are shifted by the abort")


@check("abort-unknown", needs=["abort"])
async def abort_unknown(probe: Probe) -> None:
    """Abort of an unknown request returns False."""
    request_id = probe.new_id()
    await probe.generate(probe.prompt(5, seed=41), request_id=request_id)
    for name, which in (("conformance-nobody", "that never was"), (request_id, "that has ended")):
        probe.equal(
            await probe.backend.abort(name), False, f"abort of a request {which}", cause="ended requests stay known"
        )


@check("abort-waiting", needs=["abort", "pause_modes:keep"])
async def abort_waiting(probe: Probe) -> None:
    """While a request waits, it can be aborted and returns no ids."""
    await probe.backend.pause(PauseMode.KEEP)
    request_id = probe.new_id()
    task = probe.begin(probe.prompt(5, seed=42), request_id=request_id)
    await _waiting(probe, 1)
    probe.equal(
        await probe.backend.abort(request_id), True, "abort of a waiting request", cause="only running ones are"
    )
    output = await probe.within(30, task, "the output of an aborted request", cause="the abort tells nobody")
    probe.equal(
        (output.token_ids, output.stop_reason), ((), StopReason.ABORTED), "its output", cause="it ran all the same"
    )


@check("cancellation-frees-slot")
async def cancellation(probe: Probe) -> None:
    """When the caller is cancelled or closes its stream, the slot is freed at once."""
    count, each = min(2 * probe.capabilities.max_concurrent, 64), probe.room - 8
    cause = "a request nobody waits for keeps its slot: the engine fills up with ghosts"
    begin = (await probe.backend.metrics()).generated_tokens
    tasks = [probe.begin(probe.prompt(4, seed=500 + i), max_tokens=each) for i in range(count - 1)]
    tasks.append((await probe.started(probe.prompt(4, seed=499), max_tokens=each, priority=-1)).task)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    sampled = (await probe.backend.metrics()).generated_tokens
    await probe.until_idle(f"nothing runs after {count} callers were cancelled", cause=cause)
    wasted = (await probe.backend.metrics()).generated_tokens - sampled
    most = min(count, probe.capabilities.max_concurrent) * each // 4
    probe.expect(
        wasted <= most,
        f"ids sampled after all callers were cancelled, of {count * each + begin - sampled} left to sample",
        expected=f"at most {most} (steps in progress)",
        got=wasted,
        cause=cause,
    )
    if probe.capabilities.streaming:
        async with probe.streaming(probe.request(probe.prompt(4, seed=43), max_tokens=probe.room - 8)) as stream:
            await anext(stream)
        await probe.until_idle("nothing runs after a stream was closed in the middle", cause=cause)
    before = (await probe.backend.metrics()).generated_tokens
    await asyncio.sleep(0.1)
    sampled = (await probe.backend.metrics()).generated_tokens - before
    probe.equal(sampled, 0, "ids sampled while no request is alive", cause=cause)
    probe.equal(len((await probe.generate([5, 6, 7])).token_ids), 8, "ids of a request after that", cause=cause)


@check("pause-keep", needs=["pause_modes:keep"])
async def pause_keep(probe: Probe) -> None:
    """KEEP freezes running requests and holds new ones; after resume both continue unchanged."""
    prompt, count = probe.prompt(8, seed=44), probe.room - 24
    running = (await probe.started(prompt, max_tokens=count)).task
    await probe.backend.pause(PauseMode.KEEP)
    before = (await probe.backend.metrics()).generated_tokens
    late = probe.begin(probe.prompt(6, seed=45))
    await asyncio.sleep(0.2)
    sampled = (await probe.backend.metrics()).generated_tokens - before
    probe.equal(
        (sampled, late.done()),
        (0, False),
        "ids sampled while paused, and whether a new request ended",
        cause=_NOT_PAUSED,
    )
    await probe.backend.resume()
    output = await running
    probe.equal(
        (len(output.token_ids), output.stop_reason),
        (count, StopReason.LENGTH),
        "ids and reason of the frozen request",
        cause="freezing ended or restarted it",
    )
    probe.expect_greedy(prompt, output, "ids of the frozen request", cause="its KV or position was lost in the pause")
    probe.equal(len((await late).token_ids), 8, "ids of the held request", cause="it was dropped instead of held")


@check("pause-wait", needs=["pause_modes:wait"])
async def pause_wait(probe: Probe) -> None:
    """WAIT returns when running requests have ended; new ones are held until resume."""
    count = probe.room - 24
    for _ in range(_ATTEMPTS):
        running = (await probe.started(probe.prompt(8, seed=46), max_tokens=count)).task
        if not running.done():
            break
    await probe.backend.pause(PauseMode.WAIT)
    health = await probe.backend.health()
    late = probe.begin(probe.prompt(6, seed=47))
    await _waiting(probe, 1)
    await asyncio.sleep(0.1)
    probe.equal((health.running, late.done()), (0, False), "running after pause, new request ended", cause=_NOT_PAUSED)
    output = await probe.within(30, running, "the output of a finished request", cause="it is frozen instead")
    probe.equal(
        (len(output.token_ids), output.stop_reason),
        (count, StopReason.LENGTH),
        "ids and reason of the request that was let finish",
        cause="it was ended instead",
    )
    await probe.backend.resume()
    probe.equal(len((await late).token_ids), 8, "ids of the held request", cause="it was dropped instead of held")


@check("pause-wait-given-up", needs=["pause_modes:wait"])
async def pause_given_up(probe: Probe) -> None:
    """After resume, a WAIT whose caller gave up no longer holds requests."""
    count = probe.room - 24
    running = (await probe.started(probe.prompt(8, seed=53), max_tokens=count)).task
    pausing = asyncio.create_task(probe.backend.pause(PauseMode.WAIT))
    await asyncio.sleep(0)  # it is asked for; a small model would have ended everything soon
    pausing.cancel()
    await asyncio.gather(pausing, return_exceptions=True)
    await probe.backend.resume()
    output = await probe.within(30, running, "the output of a request that ran meanwhile", cause=_STILL_PAUSED)
    probe.equal(len(output.token_ids), count, "its ids", cause="it was ended instead of let finish")
    after = await probe.within(30, probe.begin(probe.prompt(6, seed=54)), "a request after it", cause=_STILL_PAUSED)
    probe.equal(len(after.token_ids), 8, "its ids", cause=_STILL_PAUSED)


@check("pause-wait-after-keep", needs=["pause_modes:wait", "pause_modes:keep"])
async def pause_after_keep(probe: Probe) -> None:
    """WAIT lets requests finish that KEEP has frozen."""
    count = probe.room - 24
    running = (await probe.started(probe.prompt(8, seed=55), max_tokens=count)).task
    await probe.backend.pause(PauseMode.KEEP)
    waiting = probe.backend.pause(PauseMode.WAIT)
    await probe.within(30, waiting, "the end of a pause(WAIT) after a pause(KEEP)", cause="it waits for what is frozen")
    output = await probe.within(30, running, "the output of the frozen request", cause="it is frozen still")
    probe.equal(len(output.token_ids), count, "its ids", cause="it was ended instead of let finish")
    late = probe.begin(probe.prompt(6, seed=56))
    await _waiting(probe, 1)
    probe.equal(late.done(), False, "a new request ended while paused", cause=_NOT_PAUSED)
    await probe.backend.resume()
    probe.equal(len((await late).token_ids), 8, "ids of the held request", cause=_STILL_PAUSED)


@check("pause-abort", needs=["pause_modes:abort"])
async def pause_abort(probe: Probe) -> None:
    """ABORT ends running requests with their ids so far; new ones are held until resume."""
    prompt, count = probe.prompt(8, seed=48), probe.room - 24
    for _ in range(_ATTEMPTS):
        running = (await probe.started(prompt, max_tokens=count)).task
        await probe.backend.pause(PauseMode.ABORT)
        output = await probe.within(30, running, "the output of the aborted request", cause="it is frozen instead")
        late = probe.begin(probe.prompt(6, seed=49))
        await asyncio.sleep(0.1)
        probe.equal(late.done(), False, "a new request ended while paused", cause=_NOT_PAUSED)
        await probe.backend.resume()
        probe.equal(len((await late).token_ids), 8, "ids of the held request", cause="it was dropped instead of held")
        if output.stop_reason is not StopReason.LENGTH:  # else it was over before the pause came
            break
    probe.expect(
        output.stop_reason is StopReason.ABORTED and 0 < len(output.token_ids) < count,
        "output of the request that ran when pause(ABORT) came",
        expected=f"stop_reason aborted and 1 to {count - 1} ids",
        got=f"stop_reason {output.stop_reason} and {len(output.token_ids)} ids",
        cause="running requests are let finish, or lose their ids",
    )
    probe.expect_greedy(prompt, output, "its ids", cause="wrong ids at the cut")


@check("sleep-and-wake", needs=["sleep"])
async def sleep_and_wake(probe: Probe) -> None:
    """Asleep, a backend holds new requests; awake again, it is as before with an empty cache."""
    prompt = probe.prompt(64, seed=52)
    await probe.generate(prompt)
    await probe.backend.sleep()
    held = probe.begin(prompt, max_tokens=8)
    await asyncio.sleep(0.1)
    probe.equal(held.done(), False, "a request ended while asleep", cause="the engine samples without its memory")
    await probe.backend.wake()
    output = await probe.within(60, held, "the end of a request that came while asleep", cause="it was dropped")
    probe.equal(output.cached_tokens, 0, "cached_tokens after waking", cause="KV that was released is reused")
    probe.expect_greedy(prompt, output, "ids after waking", cause="weights or cache are not those of before")


@check("undeclared-raises")
async def undeclared(probe: Probe) -> None:
    """Every operation that Capabilities do not declare raises an error."""
    capabilities, cause = probe.capabilities, "the call is accepted and silently does nothing"
    if not capabilities.sleep:
        await probe.raises(
            NotImplementedError, probe.backend.sleep(), "sleep() without Capabilities.sleep", cause=cause
        )
        await probe.raises(NotImplementedError, probe.backend.wake(), "wake() without Capabilities.sleep", cause=cause)
    if not capabilities.abort:
        await probe.raises(NotImplementedError, probe.backend.abort("x"), "abort() undeclared", cause=cause)
    for mode in sorted(set(PauseMode) - capabilities.pause_modes):
        await probe.raises(NotImplementedError, probe.backend.pause(mode), f"pause({mode}) undeclared", cause=cause)
    if not capabilities.lora:
        adapted = replace(probe.request(probe.prompt(5, seed=50)), lora="conformance")
        await probe.raises(Exception, probe.backend.generate(adapted), "a LoRA request undeclared", cause=cause)
    for kind in sorted({"image", "video"} - capabilities.multi_modal):
        seeing = replace(probe.request(probe.prompt(5, seed=51)), multi_modal={kind: (object(),)})
        await probe.raises(Exception, probe.backend.generate(seeing), f"a request with {kind} undeclared", cause=cause)


_NOT_PAUSED = "the pause does not hold: weights would change under a running step"
_STILL_PAUSED = "the pause holds on after resume: the engine stands still for good"


async def _waiting(probe: Probe, count: int) -> None:
    async def arrived() -> bool:
        return (await probe.backend.health()).waiting >= count

    await probe.until(arrived, what=f"health().waiting reaches {count}", cause="held requests are not counted")


@check("close-ends-everything", last=True)
async def close(probe: Probe) -> None:
    """Close fails running requests, refuses new ones, may be called twice, and leaves no thread or process."""
    running = (await probe.started(probe.prompt(6, seed=70), max_tokens=probe.room - 16)).task
    crowd = [
        probe.begin(probe.prompt(6, seed=71 + i), max_tokens=probe.room - 16)
        for i in range(min(2 * probe.capabilities.max_concurrent, 64))
    ]
    await asyncio.sleep(0)
    await probe.within(60, probe.backend.close(), "close under load", cause="it waits for requests, or for a lock")
    cause = "requests in flight are forgotten at close: their callers hang, or see an undocumented error"
    everybody = asyncio.gather(running, *crowd, return_exceptions=True)
    ended = await probe.within(30, everybody, f"the end of {1 + len(crowd)} requests after close", cause=cause)
    strange = [repr(e) for e in ended if isinstance(e, BaseException) and not isinstance(e, BackendClosedError)]
    probe.equal(strange[:3], [], "errors other than BackendClosedError of requests that were running", cause=cause)
    probe.expect(
        any(isinstance(e, BackendClosedError) for e in ended),
        f"{len(ended)} requests that were running or waiting at close",
        expected="BackendClosedError",
        got="all of them ended normally",
        cause="close waits for the work instead of ending it",
    )
    await probe.raises(BackendClosedError, probe.generate([5, 6]), "generate after close", cause=cause)
    await probe.within(10, probe.backend.close(), "a second close", cause="it waits for what is gone already")
    health = await probe.backend.health()
    probe.expect(
        not health.ok, "health after close", expected="not ok", got=health, cause="health is not told of close"
    )
    deadline = time.monotonic() + _SETTLE_SECONDS
    while (left := probe.footprint.added()) and time.monotonic() < deadline:
        await asyncio.sleep(0.05)
    probe.equal(left, [], "threads and processes left after close", cause="a worker is not joined; it keeps its memory")
