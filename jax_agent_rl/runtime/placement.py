"""Where the engines run (``rollout.placement``).

::

    colocated   learner ─── engine              this process; with rollout.sleep_during_update the engine sleeps while
                                                the learner updates; a learner of several processes: an engine in
                                                each, ``runtime.multihost_engines``
    separate    learner ─┬─ Ray actor: engine   a bundle of a placement group each
                         └─ Ray actor: engine
    hybrid      learner ─┬─ engine              in the rotation while the learner waits:  [ sample ][ learn ][ sample ]
                         └─ Ray actor: engine   always in the rotation
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import logging
import os
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from typing import Any

from jax_agent_rl.config import Config
from jax_agent_rl.errors import BackendError, ConfigError
from jax_agent_rl.rollout.client import LLMServerClient
from jax_agent_rl.rollout.object_store import from_object_store
from jax_agent_rl.rollout.pool import BackendFactory
from jax_agent_rl.rollout.protocol import BROADCAST
from jax_agent_rl.rollout.ray_backend import RayBackend
from jax_agent_rl.rollout.server import AsyncServer
from jax_agent_rl.runtime.engines import UNTRAINED, connect, make_engine, send_weights
from jax_agent_rl.runtime.multihost_engines import on_every_host
from jax_agent_rl.runtime.ray_cluster import open_ray, reserve
from jax_agent_rl.utils.hub import absolute_model_path

logger = logging.getLogger(__name__)


@asynccontextmanager
async def open_places(
    config: Config, *, learner: bool = True
) -> AsyncIterator[list[dict[str, Any]]]:
    """Reserve a place in Ray for each of ``rollout.num_engines``; none if all is colocated.

    Open it before anything computes: processes that Ray starts should not be forked from one with
    threads, and only the reservation decides which GPUs the learner sees.

    Args:
        config: the resolved configuration.
        learner: whether this process has a learner, which needs the GPUs of its mesh.

    Yields:
        Ray's actor options of each engine.

    Raises:
        ConfigError: Ray, its cluster or enough resources are missing.
    """
    rollout, mesh = config.rollout, config.learner.mesh
    if rollout.placement == "colocated":
        yield []
        return
    # A learner of several processes, or one that gpu.sh started, gets its devices from the
    # launcher.
    on_gpus = rollout.gpus_per_engine and os.environ.get("JAX_PLATFORMS") != "cpu"
    multihost = config.learner.multihost
    alone = multihost.coordinator is None and multihost.num_processes in (None, 1)
    async with (
        open_ray(rollout.ray_address, bundles=1 + rollout.num_engines),
        reserve(
            rollout.num_engines,
            gpus_per_engine=rollout.gpus_per_engine,
            learner_gpus=(
                mesh.devices
                if on_gpus and alone and (learner or rollout.placement == "hybrid")
                else 0
            ),
        ) as places,
    ):
        yield places


def place_engines(
    config: Config, places: Sequence[Mapping[str, Any]], colocated: Mapping[str, BackendFactory]
) -> dict[str, BackendFactory]:
    """Return the factories of all engines of ``rollout.placement``, by name.

    Args:
        config: the resolved configuration.
        places: see :func:`open_places`.
        colocated: factory of this process's engine, by its name.
    """
    match config.rollout.placement:
        case "colocated":
            return dict(colocated)
        case "separate":
            return _in_actors(config, places)
        case "hybrid":
            stored: dict[str, BackendFactory] = {
                name: lambda make=make: from_object_store(make())
                for name, make in colocated.items()
            }
            return stored | _in_actors(config, places)


@asynccontextmanager
async def open_engine(config: Config, url: str | None) -> AsyncIterator[tuple[str, BackendFactory]]:
    """Reserve what one more engine of a running run needs; yield its name and factory.

    Args:
        config: the resolved configuration.
        url: of a rollout server; None: an engine in a Ray actor, on any node with room.

    Raises:
        ConfigError: the run's weights reach no such engine, or Ray has no room for it.
    """
    rollout = config.rollout
    if url is not None:
        if rollout.backend != "remote":
            raise ConfigError(
                f"{url}: with rollout.backend={rollout.backend} and"
                f" rollout.placement={rollout.placement} weights do not reach rollout servers;"
                " start the run with rollout.backend=remote"
            )
        yield connect(config, url)
        return
    if rollout.placement == "colocated":
        raise ConfigError(
            f"with rollout.backend={rollout.backend} and rollout.placement=colocated the run cannot"
            " start engines elsewhere: name a rollout server's URL (rollout.backend=remote), or"
            " start the run with rollout.placement=separate"
        )
    async with reserve(1, gpus_per_engine=rollout.gpus_per_engine, learner_gpus=None) as places:
        yield next(
            iter(_in_actors(config, places, first=next(_LATER) + rollout.num_engines).items())
        )


_LATER = itertools.count()
"""Numbers of the engines that :func:`open_engine` places."""


def first_version(config: Config) -> int:
    """Return the policy version that engines start with.

    Only an engine in the learner's sole process starts with the learner's weights (version 0).
    Others read the model's files, which are older than a run's first weights.
    """
    alone = config.rollout.placement == "colocated" and not on_every_host(config)
    return 0 if alone and config.rollout.backend != "remote" else UNTRAINED


def _in_actors(
    config: Config, places: Sequence[Mapping[str, Any]], *, first: int = 0
) -> dict[str, BackendFactory]:
    rollout = config.rollout.model_copy(
        update={"placement": "colocated", "sleep_during_update": False}
    )
    model = config.model.model_copy(update={"path": absolute_model_path(config.model.path)})
    # The learner's GPU platform would fail where Ray shows no GPU; vLLM needs none for JAX.
    on_cpu = not rollout.gpus_per_engine or rollout.backend == "vllm"
    variables = {"JAX_PLATFORMS": "cpu"} if on_cpu else {}
    send = (
        functools.partial(send_weights, rollout) if rollout.weight_transport == BROADCAST else None
    )
    factories: dict[str, BackendFactory] = {}
    for number, place in enumerate(places, first):
        name = f"ray-{number}"
        own = {
            "rollout": rollout,
            "model": model,
            "seed": config.seed + number,
            "run_dir": f"{config.run_dir}/{name}",
        }
        options = {**place, "runtime_env": {"env_vars": variables}}
        make = functools.partial(make_engine, config.model_copy(update=own), version=UNTRAINED)
        factories[name] = functools.partial(
            RayBackend, make, name=name, options=options, send_weights=send
        )
    return factories


def room_for_learning(
    config: Config, client: LLMServerClient, names: Sequence[str]
) -> Callable[[], AbstractAsyncContextManager]:
    """Return a context for the learner's updates, in which engines on its devices sleep or leave the rotation.

    Args:
        config: the resolved configuration.
        client: the rotation.
        names: servers on the learner's devices.

    Raises:
        ConfigError: they should sleep and one cannot.
    """
    leaves, sleeps = config.rollout.placement == "hybrid", config.rollout.sleep_during_update
    if not (leaves or sleeps):
        return nullcontext
    if sleeps and not all(server.backend.capabilities.sleep for server in _find(client, names)):
        raise ConfigError(
            f"rollout.sleep_during_update: the {config.rollout.backend} engine cannot release its"
            " memory (vllm can on CUDA); set rollout.sleep_during_update=false"
        )
    return functools.partial(_room, client, names, leaves=leaves, sleeps=sleeps)


@asynccontextmanager
async def _room(
    client: LLMServerClient, names: Sequence[str], *, leaves: bool, sleeps: bool
) -> AsyncIterator[None]:
    """Take servers out of the rotation, moving their requests, and let them sleep; undo both in the end.

    They return with their old weights and take the next update like all others. Without other
    servers they stay. An engine that fails to sleep or wake returns, too: its next request or
    update reports and handles the failure.
    """
    servers = _find(client, names)
    if leaves and len(client.servers) == len(servers):
        yield
        return
    if leaves:
        for server in servers:
            client.queue.expect(server.name)  # should all others be lost meanwhile
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
                client.queue.stop_expecting(server.name)


async def _try(change: Callable[[], Any], name: str) -> None:
    try:
        await change()
    except BackendError as error:
        logger.warning("server %s could not %s: %s", name, change.__name__, error)


def _find(client: LLMServerClient, names: Sequence[str]) -> list[AsyncServer]:
    return [server for server in client.servers if server.name in names]
