"""``jax-agent-rl train`` that stops for ever in a named phase: a program of tests that interrupt it
there.

It prints ``HERE`` and waits. What it waits in is what cannot be interrupted in real runs: a
compiler's or a transfer's thread, or a coroutine.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import Callable
from typing import Any

from jax_agent_rl import cli
from jax_agent_rl.jetstream import backend, context
from jax_agent_rl.learner import checkpoint, learner, objective
from jax_agent_rl.rollout.client import LLMServerClient
from jax_agent_rl.types import TokenOutput

phase = os.environ["STALL_PHASE"]
when = int(os.environ["STALL_WHEN"])
calls = 0


def here() -> bool:
    """Whether this is the call to stop in; says so."""
    global calls
    calls += 1
    if calls == when:
        print("HERE", flush=True)
    return calls == when


def blocking(function: Callable[..., Any]) -> Callable[..., Any]:
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if here():
            threading.Event().wait()
        return function(*args, **kwargs)

    return wrapped


def saving(save: Callable[..., None]) -> Callable[..., None]:
    """Says so when arrays are on their way to disk, and goes on: a save must be finished."""

    def wrapped(*args: Any, **kwargs: Any) -> None:
        save(*args, **kwargs)
        here()

    return wrapped


def waiting(label: str) -> None:
    """Stop in a request to the engine; each trajectory of the recipe makes one."""
    generate = LLMServerClient.generate

    async def wrapped(self: LLMServerClient, request_id: str, **arguments: Any) -> TokenOutput:
        if request_id.startswith(label) and here():
            await asyncio.Event().wait()
        return await generate(self, request_id, **arguments)

    LLMServerClient.generate = wrapped


match phase:
    case "compile the engine":
        # As on an accelerator: before the first request.
        begin = backend.JetStreamBackend.__init__
        backend.JetStreamBackend.__init__ = lambda self, *args, **kwargs: begin(
            self, *args, **{**kwargs, "compile_ahead": True}
        )
        context.EngineContext.call = blocking(context.EngineContext.call)
    case "compile the learner":
        objective.scored_terms = blocking(
            objective.scored_terms
        )  # called while a program is traced
    case "rollout":
        waiting("train-")
    case "evaluate":
        waiting("heldout-")
    case "train":
        learner.Learner.gradients = blocking(learner.Learner.gradients)
    case "save":
        checkpoint.Checkpointer.save = saving(checkpoint.Checkpointer.save)

sys.argv = ["jax-agent-rl", "train", *sys.argv[1:]]
cli.main()
