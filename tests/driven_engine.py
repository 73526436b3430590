"""An engine's scheduler, driven step by step without a backend."""

from __future__ import annotations

from jax_agent_rl.jetstream.scheduler import Scheduler
from jax_agent_rl.rollout.protocol import TokenChunk
from jax_agent_rl.types import TokenOutput


def finished(on: Scheduler) -> dict[str, TokenOutput]:
    """Run until nothing does; outputs by request id."""
    outputs = {}
    while on.running or on.waiting:
        for run, chunk in on.step():
            assert isinstance(chunk, TokenChunk), chunk
            if chunk.final is not None:
                outputs[run.request.request_id] = chunk.final
    return outputs
