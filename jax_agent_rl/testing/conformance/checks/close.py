"""Closing a backend."""

from __future__ import annotations

import asyncio
import time

from jax_agent_rl.errors import BackendClosedError
from jax_agent_rl.testing.conformance.check import check
from jax_agent_rl.testing.conformance.probe import Probe

_SETTLE_SECONDS = 10.0


@check("close-ends-everything", last=True)
async def close(probe: Probe) -> None:
    """After close, running requests have failed, new ones are refused, and no thread or process is left."""
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
