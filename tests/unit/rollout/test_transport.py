"""Engines that fetch their weights."""

import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from jax_agent_rl.errors import WeightUpdateError
from jax_agent_rl.rollout.client import LLMServerClient
from jax_agent_rl.rollout.protocol import BROADCAST, OBJECT_STORE, WeightUpdate
from jax_agent_rl.rollout.transport import fetching
from jax_agent_rl.testing.conformance.backends import OTHER
from tests.messages import raises
from tests.toy_backend import ToyBackend


def update(kind: str, version: int) -> WeightUpdate:
    return WeightUpdate(version=version, kind=kind, payload="an address")


class Engine(ToyBackend):
    """Notes the updates that reach it."""

    def __init__(self) -> None:
        super().__init__(weight_payloads=frozenset({OBJECT_STORE, "toy"}))
        self.updates: list[WeightUpdate] = []

    async def update_weights(self, update: WeightUpdate) -> None:
        self.updates.append(update)
        if update.kind == "toy":
            await super().update_weights(update)


class Transport:
    """Fetches a toy's weights, and knows while it lends them."""

    lends = False

    @contextlib.asynccontextmanager
    async def fetch(self, update: WeightUpdate) -> AsyncIterator[WeightUpdate]:
        self.lends = True
        try:
            yield replace(update, kind="toy", payload=OTHER)
        finally:
            self.lends = False


async def test_a_pool_knows_the_weights_of_an_engine_that_fetches_them():
    """Python 3.12 and later do not look through a wrapper when they ask for a protocol."""
    engine = Engine()
    engine.weights_fingerprint = "abc"  # type: ignore[attr-defined]
    client = LLMServerClient([])
    await client.pool.start({"one": lambda: fetching(engine, BROADCAST, Transport().fetch)})
    assert client.pool.weights_fingerprint == "abc"
    await client.pool.close()


async def test_an_engine_gets_what_was_fetched_while_it_loads_it():
    transport = Transport()

    class Loading(Engine):
        async def update_weights(self, update: WeightUpdate) -> None:
            assert transport.lends
            await super().update_weights(update)

    engine = Loading()
    await fetching(engine, BROADCAST, transport.fetch).update_weights(update(BROADCAST, 1))
    assert [received.payload for received in engine.updates] == [OTHER]
    assert engine.policy_version == 1 and not transport.lends


async def test_weights_are_given_back_when_the_engine_refuses_them():
    transport = Transport()
    backend = fetching(Engine(), BROADCAST, transport.fetch)
    with pytest.raises(WeightUpdateError, match="not newer"):
        await backend.update_weights(update(BROADCAST, 0))
    assert not transport.lends


async def test_one_kind_passes_and_others_are_refused():
    engine = Engine()
    backend = fetching(engine, BROADCAST, Transport().fetch, passes=OBJECT_STORE)
    assert backend.capabilities.weight_payloads == {BROADCAST, OBJECT_STORE}
    stored = update(OBJECT_STORE, 1)
    await backend.update_weights(stored)
    assert engine.updates == [stored]
    with raises(WeightUpdateError, key="kind", value="'toy'", fix="'broadcast'"):
        await backend.update_weights(update("toy", 1))


def test_a_kind_that_the_engine_does_not_take_does_not_pass():
    engine = ToyBackend(weight_payloads=frozenset({"safetensors"}))
    backend = fetching(engine, OBJECT_STORE, Transport().fetch, passes=BROADCAST)
    assert backend.capabilities.weight_payloads == {OBJECT_STORE}


async def test_a_kind_passes_to_an_engine_that_leaves_its_declaration_to_the_sender():
    """An engine in a Ray actor takes broadcasts, and the process that sends them declares it."""
    engine = Engine()
    backend = fetching(engine, OBJECT_STORE, Transport().fetch, passes=BROADCAST)
    sent = update(BROADCAST, 1)
    await backend.update_weights(sent)
    assert engine.updates == [sent]
    assert BROADCAST not in backend.capabilities.weight_payloads
