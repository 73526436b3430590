"""Ray for a run: a cluster that is there already, or one of this machine's own, and a place in it for every engine."""

from __future__ import annotations

import asyncio
import os
import secrets
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from jax_agent_rl.errors import ConfigError

_READY_SECONDS = 60.0
_LOOPBACK_SWITCH = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
"""Set to 0 it makes Ray listen on loopback alone, as it does on its own only on Windows and macOS."""


@asynccontextmanager
async def open_ray(address: str | None, *, bundles: int = 1) -> AsyncIterator[None]:
    """Connects to Ray while the context lasts. What was not started here goes on after it.

    Without an address, one is started on this machine: on loopback alone, and for those who have its token, which is
    made anew. Processes of it see the variables of this one.

    Args:
        address: of a running cluster, whose token is where Ray looks for it (``RAY_AUTH_TOKEN``); None: that in
            ``RAY_ADDRESS``, if there is one.
        bundles: places the own cluster has room for, however few cores there are.

    Raises:
        ConfigError: Ray is not installed, or there is no cluster at the address.
    """
    address = address or os.environ.get("RAY_ADDRESS")
    if not address:
        secure_own_cluster()
    try:
        import ray
        from ray.exceptions import RayError
    except ImportError as error:
        raise ConfigError(f"engines in Ray actors need Ray ({error}): pip install 'jax_agent_rl[ray]'") from None
    if ray.is_initialized():
        yield
        return
    options: dict[str, Any] = {"log_to_driver": False, "configure_logging": False}
    if not address:
        cores = max(os.cpu_count() or 1, bundles)
        options |= {"_node_ip_address": "127.0.0.1", "include_dashboard": False, "num_cpus": cores}
    try:  # in a thread, where it installs no signal handlers
        await asyncio.to_thread(ray.init, address or "local", **options)
    except (ConnectionError, RuntimeError, ValueError, RayError) as error:
        where = f"rollout.ray_address={address}" if address else "a Ray cluster of this machine"
        raise ConfigError(f"{where}: {error}") from error
    try:
        yield
    finally:
        await asyncio.to_thread(ray.shutdown)


def secure_own_cluster() -> None:
    """Sets what Ray reads when it is first imported, for clusters that this process starts: token and loopback.

    :func:`open_ray` does it. Call it before, where something else (vLLM does) imports Ray first.

    Raises:
        ConfigError: something else has imported it before.
    """
    variables = {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        _LOOPBACK_SWITCH: "0",
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    missing = sorted(name for name in variables if name not in os.environ)
    imported = sys.modules.get("ray")
    if missing and imported is not None and not imported.is_initialized():
        raise ConfigError(
            "Ray was imported before the run could secure the cluster it starts on this machine: import it later, set "
            f"{', '.join(missing)} before the program starts, or give rollout.ray_address"
        )
    for name in missing:
        os.environ[name] = variables[name]


@asynccontextmanager
async def reserve(engines: int, *, gpus_per_engine: int, learner_gpus: int = 0) -> AsyncIterator[list[dict[str, Any]]]:
    """A bundle of a placement group for the learner, on this node, and one for every engine.

    Engines with GPUs are packed onto as few nodes as hold them, nearest to the learner; those that compute on CPUs are
    spread, as on one node they would share its cores. Of the GPUs of its bundle alone this process is told
    (``CUDA_VISIBLE_DEVICES``): it must not have looked at any before.

    Yields:
        Ray's actor options of each engine.

    Raises:
        ConfigError: the cluster has not so much, or not within a minute.
    """
    import ray
    from ray.util.placement_group import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    engine = _bundle(gpus_per_engine)
    learner = _bundle(learner_gpus) | {f"node:{ray.util.get_node_ip_address()}": 0.001}
    _check_room(ray.cluster_resources(), engines, gpus_per_engine, learner_gpus)
    group = placement_group([learner, *([engine] * engines)], strategy="PACK" if gpus_per_engine else "SPREAD")
    try:
        try:
            async with asyncio.timeout(_READY_SECONDS):
                await group.ready()
        except TimeoutError:
            raise ConfigError(
                f"rollout.num_engines={engines}: Ray found no place for them within {_READY_SECONDS:g} s; free are "
                f"{_plain(ray.available_resources())}; end what uses the rest, or lower rollout.num_engines"
            ) from None
        places = [PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=i) for i in range(1 + engines)]
        if learner_gpus:
            look = ray.remote(ray.get_gpu_ids).options(num_gpus=learner_gpus, scheduling_strategy=places[0])
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, await look.remote()))
        yield [{"num_cpus": 1, "num_gpus": gpus_per_engine, "scheduling_strategy": place} for place in places[1:]]
    finally:
        remove_placement_group(group)


def _bundle(gpus: int) -> dict[str, float]:
    return {"CPU": 1, "GPU": gpus} if gpus else {"CPU": 1}


def _check_room(total: Mapping[str, float], engines: int, gpus_per_engine: int, learner_gpus: int) -> None:
    need = {"CPU": 1 + engines, "GPU": engines * gpus_per_engine + learner_gpus}
    for name, count in need.items():
        if total.get(name, 0) < count:
            raise ConfigError(
                f"rollout.num_engines={engines} with rollout.gpus_per_engine={gpus_per_engine} and a learner need "
                f"{count} "
                f"{name}s, the Ray cluster has {_plain(total)}; lower them, or add nodes"
            )


def _plain(resources: Mapping[str, float]) -> str:
    return ", ".join(f"{resources.get(name, 0):g} {name}s" for name in ("CPU", "GPU"))
