"""New weights from a learner through each transport, over HTTP, into an engine."""

import asyncio
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_agent_rl.config import build
from jax_agent_rl.errors import ConfigError, WeightUpdateError
from jax_agent_rl.jetstream.backend import JetStreamBackend
from jax_agent_rl.models import stored
from jax_agent_rl.models.config import Params
from jax_agent_rl.models.decoder import score_probe
from jax_agent_rl.models.hf import device_tensors, hf_tensors
from jax_agent_rl.models.layers import EightBits
from jax_agent_rl.rollout.client import LLMServerClient
from jax_agent_rl.rollout.http.client import RemoteBackend
from jax_agent_rl.rollout.http.server import RolloutServer
from jax_agent_rl.rollout.protocol import GenerateRequest, WeightUpdate
from jax_agent_rl.rollout.server import AsyncServer
from jax_agent_rl.rollout.transport import from_object_store
from jax_agent_rl.runtime.transports import make_transport
from jax_agent_rl.testing.conformance.backends import BASE, OTHER
from jax_agent_rl.types import SamplingParams
from tests.messages import raises
from tests.served import note_uploads
from tests.tiny import TINY, TWO_SLOTS, greedy, tiny_params
from tests.toy_backend import ToyBackend

PROMPT = (5, 6, 7)


def configured(**rollout):
    rollout = {"backend": "remote", "urls": ["http://127.0.0.1:1"]} | rollout
    return build(
        {"run_dir": "x", "model": {"path": "x"}, "data": {"train": "x"}, "rollout": rollout}
    )


@dataclass
class Engines:
    """What the engines of a run take."""

    dtype: str = "float32"
    payloads: frozenset[str] = frozenset()

    def weight_dtype(self) -> str:
        return self.dtype

    def weight_payloads(self) -> frozenset[str]:
        return self.payloads


@dataclass
class Parameters:
    """A learner that has been trained."""

    params: Params


@pytest.mark.parametrize("kind", ["files", "tensorstore"])
async def test_what_a_learner_publishes_a_remote_engine_serves(tmp_path: Path, kind: str):
    config = configured(weight_dir=str(tmp_path), weight_transport=kind)
    transport = make_transport(config, TINY, Engines(), probe_ids=[3, 4, 5])
    backend = JetStreamBackend(TINY, tiny_params(), TWO_SLOTS, version=-1)
    await backend.start()
    server = RolloutServer(backend, weight_dir=str(tmp_path))
    await server.start()
    remote = RemoteBackend(server.url, shares_disk=True)
    await remote.start()
    try:
        for version in range(3):
            update = transport.offer(Parameters(tiny_params(version)), version)
            assert update.lasting and update.digests
            await remote.update_weights(update)
            sampling = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
            request = GenerateRequest(
                request_id=f"r{version}", prompt_ids=PROMPT, sampling=sampling
            )
            output = await remote.generate(request)
            assert list(output.token_ids) == greedy(tiny_params(version), PROMPT, 6, frozenset())
            (kept_folder,) = tmp_path.iterdir()
            assert {path.name[:2] for path in kept_folder.iterdir()} == {f"v{version}"}, (
                "the one before is removed"
            )
        transport.release()
        assert not list(tmp_path.iterdir())
    finally:
        await remote.close()
        await server.close()
        await backend.close()


def engine(dtype: str, *, quantize: EightBits | None = None) -> JetStreamBackend:
    """An engine that was started with weights in the dtype it takes."""
    params = jax.tree.map(lambda x: x.astype("float32" if quantize else dtype), tiny_params())
    return JetStreamBackend(TINY, params, TWO_SLOTS, version=-1, dtype=dtype, quantize=quantize)


@pytest.mark.parametrize("path", ["files", "tensorstore", "upload", "object_store"])
async def test_weights_are_rounded_for_the_transfer_as_an_engine_would(
    tmp_path: Path, path: str, monkeypatch
):
    """Bit by bit, in half the bytes; the yardstick is the learner's own arrays, given to an engine
    in this process.
    """
    learner = Parameters(tiny_params(7))
    folder = tmp_path / "weights"
    folder.mkdir()
    receiver = engine("bfloat16")
    # Its parameters are float32, so it takes the learner's and rounds them itself.
    expected = JetStreamBackend(TINY, tiny_params(), TWO_SLOTS, version=-1, dtype="bfloat16")
    server = RolloutServer(receiver, weight_dir=None if path == "upload" else str(folder))
    remote = RemoteBackend(server.url, shares_disk=path != "upload")
    for service in (receiver, expected, server):
        await service.start()
    remote.url = server.url
    await remote.start()
    client = LLMServerClient([AsyncServer(remote)])
    try:
        rollout: dict[str, Any] = {"weight_dir": str(folder)}
        stored_objects: list[Any] = []
        if path == "tensorstore":
            rollout["weight_transport"] = "tensorstore"
        if path == "object_store":
            rollout = {"backend": "jetstream", "urls": [], "placement": "separate"}
            ray = SimpleNamespace(
                put=lambda contents: stored_objects.append(contents) or len(stored_objects) - 1
            )
            monkeypatch.setitem(sys.modules, "ray", ray)
        transport = make_transport(configured(**rollout), TINY, client.pool, probe_ids=[3, 4, 5])
        update = transport.offer(learner, 1)
        assert update.dtype == "bfloat16"
        if path == "object_store":

            async def get(reference: int) -> Any:
                return stored_objects[reference]

            await from_object_store(receiver, get=get).update_weights(update)
            tensors = stored.named(stored_objects[0]).values()
            size = sum(numbers.nbytes for _, numbers in tensors)
        else:
            await client.pool.update_weights(update)
            size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
        full_size = sum(x.nbytes for x in jax.tree.leaves(learner.params))
        assert size < 0.75 * full_size, "half, and names, digests and the probe"
        await expected.update_weights(
            WeightUpdate(version=1, kind="arrays", payload=learner.params)
        )
        ours = receiver.core.scheduler.params
        theirs = expected.core.scheduler.params
        for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
            assert a.dtype == b.dtype == jnp.bfloat16
            np.testing.assert_array_equal(
                np.asarray(a).view(np.uint16), np.asarray(b).view(np.uint16)
            )
        request = GenerateRequest(
            request_id="r", prompt_ids=PROMPT, sampling=SamplingParams(max_tokens=6, seed=1)
        )
        a = await remote.generate(request)
        b = await expected.generate(request)
        assert (a.token_ids, a.log_probs) == (b.token_ids, b.log_probs)
        transport.release()
    finally:
        for service in (remote, server, receiver, expected):
            await service.close()


def test_weights_are_rounded_only_for_engines_that_round_all_of_them_alike():
    assert engine("bfloat16").capabilities.weight_dtype == "bfloat16"
    assert engine("float32").capabilities.weight_dtype == "float32"
    assert engine("bfloat16", quantize="int8").capabilities.weight_dtype == "float32", (
        "8 bits are made of 32"
    )
    rounding = AsyncServer(engine("bfloat16"), name="bfloat16")
    exact = AsyncServer(engine("float32"), name="float32")
    assert LLMServerClient([rounding]).pool.weight_dtype() == "bfloat16"
    assert LLMServerClient([rounding, exact]).pool.weight_dtype() == "float32"
    assert LLMServerClient().pool.weight_dtype() == "float32"


async def test_an_engine_that_takes_other_weights_waits_for_the_next_ones():
    """Weights that were rounded for the others would change what it computes."""
    backend = ToyBackend()
    client = LLMServerClient([AsyncServer(ToyBackend(weight_dtype="bfloat16"))])
    rounded = WeightUpdate(version=1, kind="toy", payload=OTHER, lasting=True, dtype="bfloat16")
    await client.pool.update_weights(rounded)
    joining = asyncio.create_task(client.pool.join("late", lambda: backend))
    while backend not in client.pool.backends:
        await asyncio.sleep(0)
    assert client.pool.weight_dtype() == "float32"
    assert len(client.pool.servers) == 1
    with raises(WeightUpdateError, key="late", value="rounded to bfloat16", fix="float32"):
        await AsyncServer(backend, name="late").update_weights(rounded)
    await client.pool.update_weights(
        WeightUpdate(version=2, kind="toy", payload=BASE, lasting=True)
    )
    await joining
    assert len(client.pool.servers) == 2 and backend.policy_version == 2
    await client.pool.close()


@pytest.mark.parametrize(
    ("rollout", "named"),
    [
        (
            {"weight_transport": "tensorstore"},
            ("rollout.weight_dir=None", "set rollout.weight_dir"),
        ),
        (
            {
                "weight_transport": "tensorstore",
                "weight_dir": "/x",
                "backend": "jetstream",
                "urls": [],
            },
            ("tensorstore", "rollout.backend=jetstream"),
        ),
        ({"weight_dir": "gs://bucket/weights"}, ("gs://bucket/weights", "=tensorstore")),
        (
            {"weight_transport": "broadcast"},
            ("broadcast", "rollout.backend=remote", "set rollout.placement=separate"),
        ),
    ],
)
def test_a_transport_that_cannot_reach_the_engines_is_refused(rollout: dict, named):
    with raises(ConfigError, value=named):
        configured(**rollout)


def test_what_is_broadcast_are_tensors_on_one_device_with_a_probe():
    transport = make_transport(
        configured(backend="vllm", urls=[], placement="separate", weight_transport="broadcast"),
        TINY,
        Engines("bfloat16", frozenset({"object_store", "broadcast"})),
        probe_ids=PROMPT,
    )
    params = tiny_params()
    update = transport.offer(Parameters(params), 1)
    assert update.kind == "broadcast"
    assert update.lasting
    assert update.probe is not None
    assert {array.dtype.name for array in update.payload.values()} == {"bfloat16"}
    expected = {name: np.shape(array) for name, array in hf_tensors(TINY, params)}
    assert {name: array.shape for name, array in update.payload.items()} == expected
    transport.release()
    assert not update.payload


def test_an_engine_that_reads_gpu_memory_gets_tensors_and_no_files(tmp_path: Path):
    engines = Engines("bfloat16", frozenset({"safetensors", "cuda_ipc"}))
    transport = make_transport(
        configured(backend="vllm", urls=[], weight_dir=str(tmp_path)),
        TINY,
        engines,
        probe_ids=[3, 4, 5],
    )
    learner = Parameters(tiny_params(1))
    update = transport.offer(learner, 1)
    assert (update.kind, update.dtype, update.lasting) == ("cuda_ipc", "bfloat16", True)
    assert update.probe == score_probe(TINY, learner.params, [[3, 4, 5]], dtype="bfloat16")
    assert not list(tmp_path.rglob("*.safetensors"))
    expected = dict(hf_tensors(TINY, learner.params, dtype="bfloat16"))
    assert update.payload.keys() == expected.keys()
    for name, tensor in update.payload.items():
        assert isinstance(tensor, jax.Array)
        assert len(tensor.devices()) == 1
        np.testing.assert_array_equal(
            np.asarray(tensor).view(np.uint16), expected[name].view(np.uint16)
        )
    second = transport.offer(learner, 2)
    assert not update.payload and second.payload, (
        "the version before is freed, whoever still refers to it"
    )
    engines.payloads = frozenset({"safetensors"})
    assert transport.offer(learner, 3).kind == "safetensors"
    assert list(tmp_path.rglob("*.safetensors"))
    transport.release()


def test_tensors_on_the_device_outlive_the_learners_next_step():
    params = tiny_params(1)
    tensors = device_tensors(TINY, params)
    assert tensors is not None
    for x in jax.tree.leaves(params):
        x.delete()
    assert all(np.isfinite(np.asarray(tensor)).all() for tensor in tensors.values())


@pytest.mark.parametrize(
    ("rollout", "sends_changes"),
    [
        ({"urls": ["http://10.0.0.5:8100"]}, True),
        ({"urls": ["http://127.0.0.1:1", "http://10.0.0.5:8100"]}, True),
        ({"urls": ["http://127.0.0.1:1"]}, False),
        ({"urls": ["http://10.0.0.5:8100"], "full_weights_every": 1}, False),
    ],
)
def test_changes_are_computed_where_bytes_are_sent(rollout: dict, sends_changes: bool):
    """``rollout.full_weights_every``; engines of this machine map the files."""
    transport = make_transport(configured(**rollout), TINY, Engines(), probe_ids=[3, 4, 5])
    try:
        first = transport.offer(Parameters(tiny_params()), 1)
        second = transport.offer(Parameters(tiny_params()), 2)
        assert (first.deltas, bool(second.deltas)) == (
            ({}, True) if sends_changes else (None, False)
        )
    finally:
        transport.release()


async def test_an_engine_serves_what_changes_make_of_the_version_before():
    transport = make_transport(
        configured(urls=["http://10.0.0.5:8100"]), TINY, Engines(), probe_ids=[3, 4, 5]
    )
    backend = JetStreamBackend(TINY, tiny_params(), TWO_SLOTS)
    server = RolloutServer(backend)
    uploads = note_uploads(server)
    await backend.start()
    await server.start()
    remote = RemoteBackend(server.url, shares_disk=False)
    await remote.start()
    try:
        old_params = tiny_params(1)
        await remote.update_weights(transport.offer(Parameters(old_params), 1))
        new_params = old_params | {"embed": old_params["embed"].at[:10].multiply(2.0)}
        update = transport.offer(Parameters(new_params), 2)
        uploads.clear()
        await remote.update_weights(update)
        assert [upload.name for upload in uploads] == ["v2-00000.delta.safetensors"]
        sampling = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
        output = await remote.generate(
            GenerateRequest(request_id="r", prompt_ids=PROMPT, sampling=sampling)
        )
        assert list(output.token_ids) == greedy(new_params, PROMPT, 6, frozenset())
        assert list(output.token_ids) != greedy(old_params, PROMPT, 6, frozenset())
    finally:
        for service in (remote, server, backend):
            await service.close()
        transport.release()
