"""Where the engines run: ``rollout.placement``.

::

    colocated   learner ─── engine              this process; with rollout.sleep_during_update:  [ sample ][ learn,
    engine asleep ]
                                                a learner of several: an engine in each, ``runtime.host_engines``
    separate    learner ─┬─ Ray actor: engine   a bundle of a placement group each
                         └─ Ray actor: engine
    hybrid      learner ─┬─ engine              in the rotation while the learner waits:  [ sample ][ learn ][ sample ]
                         └─ Ray actor: engine   always in the rotation
"""

from __future__ import annotations

import asyncio
import functools
import logging
import os
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from typing import Any, cast

from jax_agent_rl.config import Config
from jax_agent_rl.errors import BackendError, ConfigError
from jax_agent_rl.rollout.client import LLMServerClient
from jax_agent_rl.rollout.lifecycle import BackendFactory
from jax_agent_rl.rollout.protocol import RolloutBackend
from jax_agent_rl.rollout.server import AsyncServer
from jax_agent_rl.runtime.engines import UNTRAINED, make_engine
from jax_agent_rl.runtime.multihost_engines import on_every_host
from jax_agent_rl.runtime.ray_cluster import open_ray, reserve
from jax_agent_rl.utils.hub import placeless

logger = logging.getLogger(__name__)


@asynccontextmanager
async def open_places(config: Config, *, learner: bool = True) -> AsyncIterator[list[dict[str, Any]]]:
    """Ray, and a place for each of ``rollout.num_engines``, while the context lasts; none if all is colocated.

    Open it before anything computes: processes that Ray starts should not be copies of one with threads, and the GPUs
    the learner may see are known only now.

    Args:
        learner: there will be one in this process, which needs the GPUs of its mesh.

    Yields:
        Ray's actor options of each engine.

    Raises:
        ConfigError: there is no Ray, no cluster, or not enough in it.
    """
    rollout, mesh = config.rollout, config.learner.mesh
    if rollout.placement == "colocated":
        yield []
        return
    # The processes of a learner that has several are given their devices by whoever starts them.
    on_gpus = rollout.gpus_per_engine and os.environ.get("JAX_PLATFORMS") != "cpu"
    alone = config.learner.multihost.num_processes in (None, 1)
    async with (
        open_ray(rollout.ray_address, bundles=1 + rollout.num_engines),
        reserve(
            rollout.num_engines,
            gpus_per_engine=rollout.gpus_per_engine,
            learner_gpus=mesh.devices if on_gpus and alone and (learner or rollout.placement == "hybrid") else 0,
        ) as places,
    ):
        yield places


def place_engines(
    config: Config, places: Sequence[Mapping[str, Any]], colocated: Mapping[str, BackendFactory]
) -> dict[str, BackendFactory]:
    """The engines of ``rollout.placement``, by name.

    Args:
        places: of :func:`open_places`.
        colocated: what makes the engine of this process, by its name.
    """
    match config.rollout.placement:
        case "colocated":
            return dict(colocated)
        case "separate":
            return _in_actors(config, places)
        case "hybrid":
            return {name: functools.partial(_from_store, make) for name, make in colocated.items()} | _in_actors(
                config, places
            )


def first_version(config: Config) -> int:
    """The policy version engines start with: those that are not the learner's process alone read the model's files, and
    a run's first weights are newer than those.
    """
    alone = config.rollout.placement == "colocated" and not on_every_host(config)
    return 0 if alone and config.rollout.backend != "remote" else UNTRAINED


def _in_actors(config: Config, places: Sequence[Mapping[str, Any]]) -> dict[str, BackendFactory]:
    rollout = config.rollout.model_copy(update={"placement": "colocated", "sleep_during_update": False})
    model = config.model.model_copy(update={"path": placeless(config.model.path)})
    # A learner's GPU platform would fail where Ray shows none, and vLLM's own process needs none for JAX.
    on_cpu = not rollout.gpus_per_engine or rollout.backend == "vllm"
    variables = {"JAX_PLATFORMS": "cpu"} if on_cpu else {}
    factories: dict[str, BackendFactory] = {}
    for number, place in enumerate(places):
        name = f"ray-{number}"
        own = {"rollout": rollout, "model": model, "seed": config.seed + number, "run_dir": f"{config.run_dir}/{name}"}
        options = {**place, "runtime_env": {"env_vars": variables}}
        factories[name] = functools.partial(_actor, config.model_copy(update=own), name, options)
    return factories


def _actor(config: Config, name: str, options: Mapping[str, Any]) -> RolloutBackend:
    from jax_agent_rl.rollout.ray.backend import RayBackend

    return RayBackend(functools.partial(make_engine, config, version=UNTRAINED), name=name, options=options)


def _from_store(make: BackendFactory) -> RolloutBackend:
    from jax_agent_rl.rollout.ray.host import ObjectStoreBackend

    return cast(RolloutBackend, ObjectStoreBackend(make()))


def room_for_learning(
    config: Config, client: LLMServerClient, names: Sequence[str]
) -> Callable[[], AbstractAsyncContextManager]:
    """A context for the time in which the learner updates.

    Args:
        names: of the servers on the learner's devices.

    Raises:
        ConfigError: they should sleep and one cannot.
    """
    leaves, sleeps = config.rollout.placement == "hybrid", config.rollout.sleep_during_update
    if not (leaves or sleeps):
        return nullcontext
    if sleeps and not all(server.backend.capabilities.sleep for server in _find(client, names)):
        raise ConfigError(
            f"rollout.sleep_during_update: the {config.rollout.backend} engine cannot give its memory back here (vllm "
            f"does on CUDA); "
            "set rollout.sleep_during_update=false"
        )
    return functools.partial(_room, client, names, leaves=leaves, sleeps=sleeps)


@asynccontextmanager
async def _room(client: LLMServerClient, names: Sequence[str], *, leaves: bool, sleeps: bool) -> AsyncIterator[None]:
    """The servers leave the rotation, their requests move on, and they sleep; afterwards they are back with the weights
    they had, so that they take the next ones like all others. If no others are left, they stay.

    An engine that fails at it comes back, too: its next request or update says so, and is dealt with there.
    """
    servers = _find(client, names)
    if leaves and len(client.servers) == len(servers):
        yield
        return
    if leaves:
        for server in servers:
            await client.remove_server(server.name)
    try:
        if sleeps:
            await asyncio.gather(*(_try(server.backend.sleep, server.name) for server in servers))
        yield
    finally:
        if sleeps:
            await asyncio.gather(*(_try(server.backend.wake, server.name) for server in servers))
        if leaves:
            for server in servers:
                client.add_server(server)


async def _try(change: Callable[[], Any], name: str) -> None:
    try:
        await change()
    except BackendError as error:
        logger.warning("server %s could not %s: %s", name, change.__name__, error)


def _find(client: LLMServerClient, names: Sequence[str]) -> list[AsyncServer]:
    return [server for server in client.servers if server.name in names]
