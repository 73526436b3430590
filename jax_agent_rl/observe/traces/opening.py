"""The tracer of a run, from its configuration."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from jax_agent_rl.config import TraceConfig
from jax_agent_rl.observe.metrics import RunFolder
from jax_agent_rl.observe.traces.sinks import open_sinks
from jax_agent_rl.observe.traces.writer import TraceWriter
from jax_agent_rl.tracing import Tracer


@asynccontextmanager
async def open_tracer(config: TraceConfig, folder: RunFolder) -> AsyncIterator[Tracer | None]:
    """The tracer of ``trace.sinks``, None if there are none; in the end the sinks finish.

    Raises:
        ConfigError: a sink's package is missing, or it cannot be reached.
    """
    if not config.sinks:
        yield None
        return
    writer = TraceWriter(open_sinks(config, folder))
    try:
        yield Tracer(writer, most_per_step=config.max_trajectories_per_step)
    finally:
        await asyncio.to_thread(writer.close)
