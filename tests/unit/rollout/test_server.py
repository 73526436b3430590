"""A server between client and backend: an update that does not come to its end leaves an engine
that serves.
"""

import asyncio

import pytest

from jax_agent_rl.errors import WeightUpdateError
from jax_agent_rl.rollout.protocol import GenerateRequest, WeightUpdate
from jax_agent_rl.rollout.server import AsyncServer
from jax_agent_rl.types import SamplingParams
from tests.fakes import FakeCodec, ScriptedBackend

REQUEST = GenerateRequest(
    request_id="r", prompt_ids=(5, 6), sampling=SamplingParams(max_tokens=3, seed=0)
)


def update(version: int) -> WeightUpdate:
    return WeightUpdate(version=version, kind="arrays", payload=None)


class HangsInPauses(ScriptedBackend):
    """Its pauses take hold, but never return."""

    async def pause(self, mode):
        await super().pause(mode)
        await asyncio.Event().wait()


async def test_an_update_that_is_called_off_while_it_pauses_leaves_no_pause():
    server = AsyncServer(HangsInPauses(FakeCodec(), ["a b c"]), name="s")
    updating = asyncio.ensure_future(server.update_weights(update(1)))
    while server.backend.unpaused.is_set():
        await asyncio.sleep(0)
    updating.cancel()
    await asyncio.gather(updating, return_exceptions=True)
    assert server.backend.unpaused.is_set() and not server.updating
    assert len((await server.generate(REQUEST)).token_ids) == 3


async def test_an_update_that_is_refused_leaves_no_pause():
    server = AsyncServer(ScriptedBackend(FakeCodec(), ["a b c"]), name="s")
    with pytest.raises(WeightUpdateError, match="version 0"):
        await server.update_weights(update(0))
    assert server.backend.unpaused.is_set()
