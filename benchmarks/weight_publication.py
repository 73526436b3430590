"""Time of a weight update from the learner's memory to an engine's, by each route.

    python benchmarks/weight_publication.py [--rounds 3] [--dtype bfloat16]
    python benchmarks/weight_publication.py --steps 4 [--learning-rate 1e-6]

SmolLM2-135M in float32; with ``--dtype bfloat16`` engines, files and folders have it in bfloat16.
The routes take turns, round by round, in one process; the shortest time counts, from the learner's
arrays to arrays in the engine's layout. On CPUs six devices are simulated:

    arrays            learner and engine on one device, one program
    arrays_resharded  learner fsdp 3 on devices 0-2 ─► engine tensor 3 on devices 3-5, by shards
    files             safetensors in shared memory with digests, read by an engine of one device
    upload            the same files over HTTP on loopback
    tensorstore       learner fsdp 3 ─► folder in shared memory ─► engine tensor 3
    pull              pulled from the learner's device over sockets on loopback (jax_transfer)
    pull_resharded    learner fsdp 3 ─► sockets ─► engine tensor 3, by shards

Log-probs of 32 ids are sent and compared with files, upload and pull.

With ``--steps``, the learner takes that many steps of AdamW (8 sequences of 256 random ids, a
policy gradient of advantage +-1), and each version goes over HTTP to two servers, in bfloat16: in
whole files, and as what changed. Adam's first steps are its largest, so later ones change less.

The yardstick of the routes is numpy copying the float32 weights. The last line is one JSON object:
per route ``seconds_per_billion`` parameters, ``bytes_per_parameter`` that cross, ``gb_per_s`` of
the learner's weights, and ``share_of_memcpy``; or, with ``--steps``, lists with a number per step.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

os.environ["XLA_FLAGS"] = (
    f"--xla_force_host_platform_device_count=6 {os.environ.get('XLA_FLAGS', '')}"
)
os.environ.setdefault("NPROC", "16")  # simulated devices wait for each other in XLA's threads

import jax
import jax.numpy as jnp
import numpy as np
from common import argument_parser, cpu, load_quickstart, make_learner, make_trajectory, random_ids

from jax_agent_rl.config.engines import EngineMeshConfig
from jax_agent_rl.config.learner import MeshConfig
from jax_agent_rl.jetstream.engine import EngineShapes, JaxEngine
from jax_agent_rl.jetstream.sharding import make_engine_mesh
from jax_agent_rl.jetstream.weights import WEIGHT_PAYLOADS, ServedWeights
from jax_agent_rl.models import stored
from jax_agent_rl.models.config import DecoderConfig, Params
from jax_agent_rl.models.decoder import score_probe
from jax_agent_rl.models.offered import OFFER, OfferedParams
from jax_agent_rl.models.parameters import rounded_params
from jax_agent_rl.models.sharding import make_mesh, parameter_shardings, place
from jax_agent_rl.rollout.http.client import RemoteBackend
from jax_agent_rl.rollout.http.server import RolloutServer
from jax_agent_rl.rollout.protocol import (
    PULL,
    BackendMetrics,
    Capabilities,
    Health,
    WeightUpdate,
)
from jax_agent_rl.runtime.transports import FileTransport
from jax_agent_rl.types import Group

SHAPES = EngineShapes(
    max_model_len=64,
    max_concurrent_decodes=2,
    kv_cache_tokens=128,
    decode_steps=4,
    prefill_buckets=(32,),
)
SHARED_MEMORY = Path("/dev/shm")
PROBE_IDS = list(range(3, 35))
MakeUpdate = Callable[[int], WeightUpdate]
SendUpdate = Callable[[WeightUpdate], Awaitable[None]]


class WeightReceiver:
    """The part of a backend that takes weights; no program that samples is compiled."""

    capabilities = Capabilities(max_model_len=64, max_concurrent=2, weight_payloads=WEIGHT_PAYLOADS)

    def __init__(
        self,
        model: DecoderConfig,
        params: Params,
        mesh: EngineMeshConfig,
        device_offset: int = 0,
        dtype: str = "float32",
    ) -> None:
        devices = make_engine_mesh(mesh, device_offset=device_offset)
        self._engine = JaxEngine(model, SHAPES, mesh=devices, dtype=jnp.dtype(dtype))
        self._weights = ServedWeights(model, params, devices)
        self._served = self._engine.load_params(params)
        self.policy_version = 0

    async def update_weights(self, update: WeightUpdate) -> None:
        update = await self._weights.receive(update)
        self._weights.check(update, self.policy_version)
        self._served = jax.block_until_ready(self._engine.load_params(update.payload, self._served))
        self.policy_version = update.version

    async def health(self) -> Health:
        return Health(ok=True)

    async def metrics(self) -> BackendMetrics:
        return BackendMetrics()


async def measure(rounds: int, dtype: str) -> dict[str, dict[str, float]]:
    """Time every route."""
    model, params = load_quickstart()
    shardings = parameter_shardings(make_mesh(MeshConfig(fsdp=3)), model.parameter_shapes())
    sharded_params = jax.tree.map(place, params, shardings)
    num_parameters = sum(x.size for x in jax.tree.leaves(params))
    files = FileTransport(model, probe_ids=[PROBE_IDS])
    root = tempfile.mkdtemp(
        prefix="jax_agent_rl-weights-", dir=SHARED_MEMORY if SHARED_MEMORY.is_dir() else None
    )

    # Arrays cross as they are, and are rounded by the engine; the others are rounded before.
    host_params = rounded_params(params, dtype)
    rounded_shards = rounded_params(sharded_params, dtype)
    one_device = EngineMeshConfig()
    three_devices = EngineMeshConfig(tensor=3)
    receivers = {
        "arrays": WeightReceiver(model, params, one_device, dtype=dtype),
        "arrays_resharded": WeightReceiver(
            model, sharded_params, three_devices, device_offset=3, dtype=dtype
        ),
        "files": WeightReceiver(model, host_params, one_device, dtype=dtype),
        "upload": WeightReceiver(model, host_params, one_device, dtype=dtype),
        "tensorstore": WeightReceiver(
            model, rounded_shards, three_devices, device_offset=3, dtype=dtype
        ),
        "pull": WeightReceiver(model, host_params, one_device, dtype=dtype),
        "pull_resharded": WeightReceiver(
            model, rounded_shards, three_devices, device_offset=3, dtype=dtype
        ),
    }
    stack = contextlib.AsyncExitStack()
    remotes = {}
    for name in ("upload", "pull", "pull_resharded"):
        server = RolloutServer(receivers[name])  # type: ignore[arg-type]
        await server.start()
        stack.push_async_callback(server.close)
        remotes[name] = RemoteBackend(server.url, shares_disk=False)
        await remotes[name].start()
        stack.push_async_callback(remotes[name].close)

    def make_arrays(version: int) -> WeightUpdate:
        return WeightUpdate(version=version, kind="arrays", payload=params)

    def make_sharded_arrays(version: int) -> WeightUpdate:
        return WeightUpdate(version=version, kind="arrays", payload=sharded_params)

    def write_files(version: int) -> WeightUpdate:
        return files.write(params, version, dtype=dtype)

    def write_shards(version: int) -> WeightUpdate:
        folder = stored.version_folder(root, version)
        digests = {stored.MANIFEST: stored.store(folder, sharded_params, dtype=dtype)}
        stored.remove(stored.version_folder(root, version - 1))
        return WeightUpdate(version=version, kind="tensorstore", payload=folder, digests=digests)

    def offer_from(source: Params, *, has_probe: bool) -> MakeUpdate:
        offers: list[OfferedParams] = []

        def offer(version: int) -> WeightUpdate:
            while offers:
                offers.pop().release()
            offers.append(OfferedParams(source, version=version, dtype=dtype))
            probe = None
            if has_probe:
                probe = score_probe(model, source, [PROBE_IDS], dtype=dtype)
            return WeightUpdate(
                version=version,
                kind=PULL,
                payload=offers[0],
                digests={OFFER: offers[0].digest},
                probe=probe,
            )

        return offer

    routes: dict[str, tuple[MakeUpdate, SendUpdate]] = {
        "arrays": (make_arrays, receivers["arrays"].update_weights),
        "arrays_resharded": (make_sharded_arrays, receivers["arrays_resharded"].update_weights),
        "files": (write_files, receivers["files"].update_weights),
        "upload": (write_files, remotes["upload"].update_weights),
        "tensorstore": (write_shards, receivers["tensorstore"].update_weights),
        "pull": (offer_from(params, has_probe=True), remotes["pull"].update_weights),
        "pull_resharded": (
            offer_from(sharded_params, has_probe=False),
            remotes["pull_resharded"].update_weights,
        ),
    }
    all_seconds: dict[str, list[float]] = {name: [] for name in ("memcpy", *routes)}
    source = np.ones(num_parameters, np.float32)
    target = np.zeros(num_parameters, np.float32)
    for version in range(1, rounds + 2):  # the first round compiles
        start = time.perf_counter()
        np.copyto(target, source)
        all_seconds["memcpy"].append(time.perf_counter() - start)
        for name, (make, send) in routes.items():
            start = time.perf_counter()
            await send(make(version))
            all_seconds[name].append(time.perf_counter() - start)

    await stack.aclose()
    files.release()
    stored.remove(stored.address(root))

    memcpy_seconds = min(all_seconds["memcpy"][1:])
    results = {}
    for name, round_seconds in all_seconds.items():
        seconds = min(round_seconds[1:])
        is_rounded = name not in ("memcpy", "arrays", "arrays_resharded")
        results[name] = {
            "seconds_per_billion": seconds / num_parameters * 1e9,
            "bytes_per_parameter": jnp.dtype(dtype).itemsize if is_rounded else 4,
            "gb_per_s": 4 * num_parameters / seconds / 1e9,
            "share_of_memcpy": memcpy_seconds / seconds,
        }
    return results


async def measure_deltas(steps: int, learning_rate: float) -> dict[str, list[float]]:
    """Send every version in whole files, and as what changed.

    Returns:
        Lists with a number per step: the share of numbers that stayed the same, and for both ways
        megabytes, and seconds to make and to send.
    """
    learner = make_learner(
        learning_rate=learning_rate,
        pack_length=256,
        micro_batch_size=4,
        share_prefixes=False,
        mesh=MeshConfig(fsdp=1),
    )
    members = []
    for i, row in enumerate(random_ids(8, 256).tolist()):
        members.append(make_trajectory(row[:1], row[1:], group="g", index=i))
    group = Group(group_id="g", trajectories=tuple(members))
    first_params = as_bfloat16(learner.params)

    result: dict[str, list[float]] = {"unchanged": []}
    async with contextlib.AsyncExitStack() as stack:
        routes = {}
        for name, full_every in (("whole", 1), ("changes", steps + 2)):
            receiver = WeightReceiver(
                learner.model, first_params, EngineMeshConfig(), dtype="bfloat16"
            )
            server = RolloutServer(receiver)  # type: ignore[arg-type]
            await server.start()
            stack.push_async_callback(server.close)
            remote = RemoteBackend(server.url, shares_disk=False)
            await remote.start()
            stack.push_async_callback(remote.close)
            files = FileTransport(learner.model, probe_ids=[PROBE_IDS], full_every=full_every)
            stack.callback(files.release)
            routes[name] = (files, remote)
            result |= {f"{name}_mb": [], f"{name}_make_seconds": [], f"{name}_send_seconds": []}

        for version in range(1, steps + 2):  # the first sends the weights before training
            previous_params = as_bfloat16(learner.params)
            if version > 1:
                learner.update([group])
                result["unchanged"].append(unchanged_share(previous_params, learner.params))

            for name, (files, remote) in routes.items():
                start = time.perf_counter()
                update = files.write(learner.params, version, dtype="bfloat16")
                make_seconds = time.perf_counter() - start
                start = time.perf_counter()
                await remote.update_weights(update)
                send_seconds = time.perf_counter() - start
                if version > 1:
                    sent_files = update.deltas or update.payload
                    num_bytes = sum(Path(file).stat().st_size for file in sent_files)
                    result[f"{name}_mb"].append(num_bytes / 1e6)
                    result[f"{name}_make_seconds"].append(make_seconds)
                    result[f"{name}_send_seconds"].append(send_seconds)
    return result


def as_bfloat16(params: Params) -> Params:
    return jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)


def unchanged_share(previous_params: Params, params: Params) -> float:
    """Return the share of numbers that are the same, in the dtype of ``previous_params``."""
    num_same = 0.0
    num_parameters = 0
    leaves = jax.tree.leaves(params)
    for previous, current in zip(jax.tree.leaves(previous_params), leaves, strict=True):
        num_same += float((previous == current.astype(previous.dtype)).sum())
        num_parameters += previous.size
    return num_same / num_parameters


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--steps", type=int, default=0)
    parser.add_argument("--learning-rate", type=float, default=1e-6)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    options = parser.parse_args()
    if options.steps:
        deltas = asyncio.run(measure_deltas(options.steps, options.learning_rate))
        print(json.dumps(deltas | {"cpu": cpu()}))
        return

    result = asyncio.run(measure(options.rounds, options.dtype))
    figures = {}
    for name, numbers in result.items():
        print(f"{name:17} " + "  ".join(f"{key} {value:.3g}" for key, value in numbers.items()))
        figures[name] = {key: round(value, 4) for key, value in numbers.items()}
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
