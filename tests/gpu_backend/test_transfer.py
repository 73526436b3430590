"""Weights from a learner's device to vLLM's workers. CUDA's export and import are stood in for;
broadcasts are real.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch

from gpu_backend import broadcast, cuda_ipc
from gpu_backend.settings import TRANSFER
from jax_agent_rl.errors import WeightUpdateError
from jax_agent_rl.rollout.protocol import BROADCAST, WeightUpdate
from tests.messages import raises

worker = pytest.importorskip(
    "gpu_backend.worker", reason="vLLM is not installed (third_party/vllm.md says how)"
)
UUID = "GPU-1"


class Memory:
    """The memory of a GPU: what one process exports, another opens by its handle."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, seen: tuple[str, ...]) -> None:
        self._exported: dict[bytes, torch.Tensor] = {}
        self.devices: list[int] = []
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(seen))
        self._patch = monkeypatch
        self._seen = seen
        monkeypatch.setattr("torch.multiprocessing.reductions.reduce_tensor", self._reduce)
        monkeypatch.setattr("torch.multiprocessing.reductions.rebuild_cuda_tensor", self._rebuild)

    def of(self, *uuids: str) -> None:
        """Be a process that sees these GPUs."""
        self._patch.setattr(
            torch.cuda, "get_device_properties", lambda i: SimpleNamespace(uuid=uuids[i])
        )

    def _reduce(self, tensor: torch.Tensor) -> tuple[Any, tuple]:
        handle = b"\x00handle%d" % len(self._exported)
        self._exported[handle] = tensor
        storage = (handle, tensor.nbytes, 0, False, b"ref", 3, b"event", True)
        kinds = (
            type(tensor),
            tensor.size(),
            tensor.stride(),
            0,
            torch.storage.TypedStorage,
            tensor.dtype,
            0,
        )
        return None, (*kinds, *storage)

    def _rebuild(
        self, kind, size, stride, offset, storage, dtype, device, handle, nbytes, *arguments
    ) -> torch.Tensor:
        assert (kind, storage) == (torch.Tensor, torch.storage.TypedStorage)
        assert arguments == (0, False, b"ref", 3, b"event", True)
        exported = self._exported[handle]
        assert (exported.dtype, exported.nbytes, offset) == (dtype, nbytes, 0)
        self.devices.append(device)
        return exported.as_strided(size, stride)


class Model:
    def __init__(self) -> None:
        self.loaded: dict[str, torch.Tensor] = {}

    def load_weights(self, tensors) -> None:
        self.loaded |= dict(tensors)


def receiver(model: Model) -> Any:
    config = SimpleNamespace(parallel_config=None, model_config=None)
    return worker.InPlaceTransferEngine(
        SimpleNamespace(backend=TRANSFER), config, torch.device("cpu"), model
    )


def test_tensors_arrive_bit_by_bit_and_without_pickle(monkeypatch: pytest.MonkeyPatch):
    numbers = np.random.default_rng(0).normal(size=(6, 4)).astype(np.float32)
    arrays = {"a": jnp.asarray(numbers, jnp.bfloat16), "b": jnp.asarray(numbers[0])}
    memory = Memory(monkeypatch, seen=("GPU-0", UUID))
    memory.of(UUID)
    info, copies = cuda_ipc.export(arrays)
    assert len(copies) == 2
    assert all(not tensor.requires_grad for tensor in copies)
    json.dumps(info, default=bytes.hex)  # plain values and bytes, as vLLM's own messages have
    memory.of("GPU-0", UUID)  # the worker's numbers are others
    model = Model()
    engine = receiver(model)
    engine.start_weight_update()
    engine.receive_weights(engine.parse_update_info(info))
    engine.finish_weight_update()
    assert memory.devices == [1, 1]
    np.testing.assert_array_equal(
        model.loaded["a"].view(torch.int16), np.asarray(arrays["a"]).view(np.int16)
    )
    np.testing.assert_array_equal(model.loaded["b"], numbers[0])


def test_a_worker_that_does_not_see_the_learners_gpu_says_so(monkeypatch: pytest.MonkeyPatch):
    memory = Memory(monkeypatch, seen=("GPU-7",))
    memory.of(UUID)
    info, _ = cuda_ipc.export({"a": jnp.ones(3)})
    memory.of("GPU-7")
    engine = receiver(Model())
    with raises(ValueError, key="GPU-1", value="['GPU-7']", fix="CUDA_VISIBLE_DEVICES"):
        engine.receive_weights(engine.parse_update_info(info))


def test_an_update_of_unknown_fields_is_refused():
    with raises(ValueError, key=("update_info", "InPlaceTransferEngine")):
        receiver(Model()).parse_update_info({"names": ["a"]})


# --- broadcast ------------------------------------------------------------------------------------


def sent(arrays: dict[str, Any]) -> WeightUpdate:
    return WeightUpdate(version=1, kind=BROADCAST, payload=arrays)


async def test_a_broadcast_reaches_every_worker_of_an_engine_bit_by_bit():
    numbers = np.random.default_rng(0).normal(size=(6, 4)).astype(np.float32)
    arrays = {
        "b": jnp.asarray(numbers[0]),
        "a": jnp.asarray(numbers, jnp.bfloat16),
        "one": jnp.float32(3).reshape(1),
    }
    models = [Model(), Model()]

    def take(model: Model, info: dict[str, Any]) -> None:
        engine = receiver(model)
        engine.start_weight_update()
        engine.receive_weights(engine.parse_update_info(info))
        engine.finish_weight_update()

    async with broadcast.sending(sent(arrays), receivers=2, host="127.0.0.1") as update:
        info = {"broadcast": asdict(update.payload)}
        json.dumps(info)  # plain values
        assert list(update.payload.tensors) == list(arrays), "in one order everywhere"
        await asyncio.gather(*(asyncio.to_thread(take, model, info) for model in models))
    for model in models:
        assert model.loaded["a"].dtype == torch.bfloat16
        np.testing.assert_array_equal(
            model.loaded["a"].view(torch.int16), np.asarray(arrays["a"]).view(np.int16)
        )
        np.testing.assert_array_equal(model.loaded["b"], numbers[0])
        assert model.loaded["one"].tolist() == [3]


async def test_workers_that_do_not_come_end_the_broadcast_with_their_number(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(broadcast, "JOIN_SECONDS", 0.3)
    with raises(WeightUpdateError, key="127.0.0.1:", value="0 of 2 workers"):
        async with broadcast.sending(sent({"a": jnp.ones(3)}), receivers=2, host="127.0.0.1"):
            pass


async def test_an_update_that_the_engine_refuses_ends_the_broadcast_at_once():
    with pytest.raises(WeightUpdateError, match="refused"):
        async with broadcast.sending(sent({"a": jnp.ones(3)}), receivers=1, host="127.0.0.1"):
            raise WeightUpdateError("refused")
    loop = asyncio.get_running_loop()
    begin = loop.time()
    await loop.shutdown_default_executor()  # waits for its threads
    assert loop.time() - begin < broadcast.JOIN_SECONDS / 2
