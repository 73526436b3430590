"""Engines that fetch their weights."""

import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jax_agent_rl.errors import WeightUpdateError
from jax_agent_rl.rollout.client import LLMServerClient
from jax_agent_rl.rollout.protocol import BROADCAST, FILES, OBJECT_STORE, WeightUpdate
from jax_agent_rl.rollout.transport import (
    fetch,
    fetching,
    from_object_store,
    store,
)
from jax_agent_rl.testing.conformance.backends import OTHER
from jax_agent_rl.utils.fingerprints import digest
from jax_agent_rl.utils.weight_transfer import check_files
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


# --- Ray's object store ---------------------------------------------------------------------------


class FakeStore:
    """A store without Ray."""

    def __init__(self) -> None:
        self.objects: list[Any] = []

    def put(self, value: Any) -> int:
        self.objects.append(value)
        return len(self.objects) - 1

    async def get(self, reference: int) -> Any:
        return self.objects[reference]


def written(folder: Path, content: bytes = b"weights") -> WeightUpdate:
    """An update of one file."""
    file = folder / "a.safetensors"
    file.write_bytes(content)
    return WeightUpdate(
        version=1,
        kind=FILES,
        payload=[str(file)],
        partial=True,
        digests={file.name: digest(content)},
    )


TREE = {
    "embed": np.arange(6, dtype=np.float32).reshape(2, 3),
    "layers": {0: {"scale": np.ones(3, ml_dtypes.bfloat16)}, 1: {"scale": np.float32(4)}},
}


def arrays(tree: Any = TREE) -> WeightUpdate:
    return WeightUpdate(version=3, kind="arrays", payload=tree)


async def test_arrays_come_back_as_they_were():
    objects = FakeStore()
    update = store(arrays(), objects.put)
    assert (update.kind, update.version) == (OBJECT_STORE, 3)
    async with fetch(update, get=objects.get) as fetched:
        assert (fetched.kind, fetched.version) == ("arrays", 3)
        np.testing.assert_array_equal(fetched.payload["embed"], TREE["embed"])
        scale = fetched.payload["layers"][0]["scale"]
        assert scale.dtype == ml_dtypes.bfloat16
        assert scale.tolist() == [1, 1, 1]
        assert fetched.payload["layers"][1]["scale"].shape == ()


async def test_what_the_store_holds_is_read_without_a_copy():
    objects = FakeStore()
    update = store(arrays(), objects.put)
    _, held = objects.objects[0]["embed"]
    async with fetch(update, get=objects.get) as fetched:
        assert np.shares_memory(fetched.payload["embed"], held)


@given(place=st.integers(0, 23), bit=st.integers(0, 7))
async def test_any_flipped_bit_is_found_before_the_engine_sees_it(place: int, bit: int):
    objects = FakeStore()
    update = store(arrays({"embed": TREE["embed"].copy()}), objects.put)
    _, held = objects.objects[0]["embed"]
    held.view(np.uint8).reshape(-1)[place] ^= 1 << bit
    with raises(WeightUpdateError, key="version 3", value="damaged"):
        async with fetch(update, get=objects.get):
            raise AssertionError("damaged weights were given out")


def test_the_digest_is_of_names_types_and_shapes_as_well():
    zeros = np.zeros((2, 2), np.float32)
    changed_weights = [{"b": zeros}, {"a": zeros.astype(np.int32)}, {"a": zeros.reshape(4)}]

    def digest_of(weights: dict[str, np.ndarray]) -> str:
        return store(arrays(weights), FakeStore().put).digests["arrays"]

    assert digest_of({"a": zeros}) not in {digest_of(weights) for weights in changed_weights}


async def test_files_come_back_with_their_bytes_and_do_not_stay(tmp_path: Path):
    objects = FakeStore()
    update = store(written(tmp_path), objects.put)
    assert update.kind == OBJECT_STORE
    async with fetch(update, get=objects.get) as fetched:
        (file,) = fetched.payload
        assert (fetched.kind, fetched.partial) == (FILES, True)
        assert Path(file).read_bytes() == b"weights"
        assert Path(file).parent != tmp_path
    assert not Path(file).parent.exists()


async def test_no_file_is_written_outside_of_the_folder(tmp_path: Path):
    objects = FakeStore()
    update = store(written(tmp_path), objects.put)
    objects.objects[0] = {"../../a.safetensors": objects.objects[0]["a.safetensors"]}
    async with fetch(update, get=objects.get) as fetched:
        (file,) = fetched.payload
        assert Path(file).name == "a.safetensors"
        assert Path(file).parent.name.startswith("jax_agent_rl-fetched-")


@given(place=st.integers(0, 6), bit=st.integers(0, 7))
async def test_any_flipped_bit_is_found_by_the_digests_that_came_along(
    tmp_path_factory, place: int, bit: int
):
    objects = FakeStore()
    update = store(written(tmp_path_factory.mktemp("files")), objects.put)
    content = np.array(objects.objects[0]["a.safetensors"])
    content[place] ^= 1 << bit
    objects.objects[0]["a.safetensors"] = content
    async with fetch(update, get=objects.get) as fetched:
        with raises(WeightUpdateError, key="a.safetensors", value="damaged"):
            check_files(fetched.payload, fetched.digests)


async def test_another_kind_than_stored_files_is_refused_by_its_name(tmp_path: Path):
    engine = from_object_store(ToyBackend(), get=FakeStore().get)
    with raises(WeightUpdateError, value="'safetensors'", fix="'object_store'"):
        await engine.update_weights(written(tmp_path))


@pytest.mark.parametrize("payload", [None, {"a": 1, "b": 2}, ["arrays", 1], ("arrays",)])
async def test_a_payload_that_refers_to_nothing_in_the_store_is_refused(payload: Any):
    update = WeightUpdate(version=3, kind=OBJECT_STORE, payload=payload)
    with raises(WeightUpdateError, key="version 3", value=type(payload).__name__):
        async with fetch(update):
            pass
