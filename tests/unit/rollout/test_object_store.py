"""Weights in a store, without Ray: the store is a dictionary."""

from pathlib import Path

import ml_dtypes
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from jax_agent_rl.errors import WeightUpdateError
from jax_agent_rl.rollout.object_store import (
    fetch,
    from_object_store,
    store,
)
from jax_agent_rl.rollout.protocol import OBJECT_STORE, WeightUpdate
from tests.messages import raises
from tests.toy_backend import ToyBackend

TREE = {
    "embed": np.arange(6, dtype=np.float32).reshape(2, 3),
    "layers": {0: {"scale": np.ones(3, ml_dtypes.bfloat16)}, 1: {"scale": np.float32(4)}},
}


class FakeStore:
    def __init__(self) -> None:
        self.objects = []

    def put(self, value) -> int:
        self.objects.append(value)
        return len(self.objects) - 1

    async def get(self, reference: int):
        return self.objects[reference]


def arrays(tree=TREE) -> WeightUpdate:
    return WeightUpdate(version=3, kind="arrays", payload=tree)


async def test_arrays_come_back_as_they_were():
    shelf = FakeStore()
    update = store(arrays(), shelf.put)
    assert (update.kind, update.version) == (OBJECT_STORE, 3)
    async with fetch(update, get=shelf.get) as fetched:
        assert (fetched.kind, fetched.version) == ("arrays", 3)
        np.testing.assert_array_equal(fetched.payload["embed"], TREE["embed"])
        scale = fetched.payload["layers"][0]["scale"]
        assert scale.dtype == ml_dtypes.bfloat16
        assert scale.tolist() == [1, 1, 1]
        assert fetched.payload["layers"][1]["scale"].shape == ()


async def test_what_the_store_holds_is_read_without_a_copy():
    shelf = FakeStore()
    update = store(arrays(), shelf.put)
    _, held = shelf.objects[0]["embed"]
    async with fetch(update, get=shelf.get) as fetched:
        assert np.shares_memory(fetched.payload["embed"], held)


async def test_files_come_back_with_their_bytes_and_do_not_stay(tmp_path: Path):
    (tmp_path / "a.safetensors").write_bytes(b"weights")
    shelf = FakeStore()
    update = store(
        WeightUpdate(
            version=1, kind="safetensors", payload=[str(tmp_path / "a.safetensors")], partial=True
        ),
        shelf.put,
    )
    async with fetch(update, get=shelf.get) as fetched:
        (file,) = fetched.payload
        assert (fetched.kind, fetched.partial, Path(file).read_bytes()) == (
            "safetensors",
            True,
            b"weights",
        )
        assert Path(file).parent != tmp_path
    assert not Path(file).parent.exists()


@given(place=st.integers(0, 23), bit=st.integers(0, 7))
async def test_any_flipped_bit_is_found_before_the_engine_sees_it(place: int, bit: int):
    shelf = FakeStore()
    update = store(arrays({"embed": TREE["embed"].copy()}), shelf.put)
    _, held = shelf.objects[0]["embed"]
    held.view(np.uint8).reshape(-1)[place] ^= 1 << bit
    with raises(WeightUpdateError, key="version 3", value="damaged"):
        async with fetch(update, get=shelf.get):
            raise AssertionError("damaged weights were given out")


def test_the_fingerprint_is_of_names_types_and_shapes_too():
    zeros = np.zeros((2, 2), np.float32)
    changed_weights = [{"b": zeros}, {"a": zeros.astype(np.int32)}, {"a": zeros.reshape(4)}]

    def fingerprint(weights: dict[str, np.ndarray]) -> str:
        return store(arrays(weights), FakeStore().put).payload.fingerprint

    assert fingerprint({"a": zeros}) not in {fingerprint(weights) for weights in changed_weights}


async def test_another_kind_is_refused_by_its_name():
    engine = from_object_store(ToyBackend(), get=FakeStore().get)
    with raises(WeightUpdateError, value="'arrays'", fix="'object_store'"):
        await engine.update_weights(arrays())
