"""Where the engines run (``rollout.placement``).

::

    colocated   learner ─── engine              this process; with rollout.sleep_during_update the
                                                engine sleeps while the learner updates; a learner
                                                of several processes: an engine in each
                                                (``runtime.multihost_engines``)
    separate    learner ─┬─ Ray actor: engine   a bundle of a placement group each
                         └─ Ray actor: engine
    hybrid      learner ─┬─ engine              in the rotation while the learner waits:
                         │                      [ sample ][ learn ][ sample ]
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

from jax_agent_rl.config import Config, RolloutConfig
from jax_agent_rl.errors import BackendError, ConfigError
from jax_agent_rl.rollout.client import LLMServerClient
from jax_agent_rl.rollout.pool import BackendFactory
from jax_agent_rl.rollout.protocol import BROADCAST, OBJECT_STORE, RolloutBackend
from jax_agent_rl.rollout.ray_backend import RayBackend
from jax_agent_rl.rollout.server import AsyncServer
from jax_agent_rl.rollout.transport import fetching, from_object_store
from jax_agent_rl.runtime.engines import UNTRAINED, connect, make_engine, send_weights
from jax_agent_rl.runtime.multihost_engines import on_every_host
from jax_agent_rl.runtime.ray_cluster import open_ray, reserve
from jax_agent_rl.utils.hub import absolute_model_path

logger = logging.getLogger(__name__)


@asynccontextmanager
async def reserve_actors(
    config: Config, *, learner: bool = True
) -> AsyncIterator[list[dict[str, Any]]]:
    """Reserve a bundle in Ray for each of ``rollout.num_engines``; none if all is colocated.

    Open it before anything computes: processes that Ray starts should not be forked from one with
    threads, and only the reservation decides which GPUs the learner sees.

    Args:
        learner: whether this process has a learner, which needs the GPUs of its mesh.

    Yields:
        Ray's actor options of each engine.

    Raises:
        ConfigError: Ray, its cluster or enough resources are missing.
    """
    rollout = config.rollout
    if rollout.placement == "colocated":
        yield []
        return

    learner_gpus = 0
    on_gpus = rollout.gpus_per_engine and os.environ.get("JAX_PLATFORMS") != "cpu"
    # A learner of several processes, or one that gpu.sh started, gets its devices from the
    # launcher.
    is_one_process = config.learner.multihost.is_one_process
    if on_gpus and is_one_process and (learner or rollout.placement == "hybrid"):
        learner_gpus = config.learner.mesh.devices

    async with (
        open_ray(rollout.ray_address, bundles=1 + rollout.num_engines),
        reserve(
            rollout.num_engines,
            gpus_per_engine=rollout.gpus_per_engine,
            learner_gpus=learner_gpus,
        ) as actor_options,
    ):
        yield actor_options


def place_engines(
    config: Config,
    actor_options: Sequence[Mapping[str, Any]],
    local_engines: Mapping[str, BackendFactory],
) -> dict[str, BackendFactory]:
    """Return the factories of all engines of ``rollout.placement``, by name.

    Args:
        actor_options: from :func:`reserve_actors`.
        local_engines: factories of this process's engines, by name.
    """
    match config.rollout.placement:
        case "colocated":
            return dict(local_engines)
        case "separate":
            return _actor_engines(config, actor_options)
        case "hybrid":
            # At equal load, requests go to the engine that is named first.
            engines: dict[str, BackendFactory] = {}
            for name, factory in local_engines.items():
                # All engines get the same updates, whose weights are in the object store.
                engines[name] = functools.partial(_fetching, factory)
            return engines | _actor_engines(config, actor_options)


def _fetching(factory: BackendFactory) -> RolloutBackend:
    """Return an engine that fetches its weights from Ray's object store."""
    return from_object_store(factory())


@asynccontextmanager
async def open_engine(config: Config, url: str | None) -> AsyncIterator[tuple[str, BackendFactory]]:
    """Reserve what one more engine of a running run needs; yield its name and factory.

    Args:
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
    async with reserve(
        1, gpus_per_engine=rollout.gpus_per_engine, learner_gpus=None
    ) as actor_options:
        number = rollout.num_engines + next(_LATER_NUMBERS)
        engines = _actor_engines(config, actor_options, first_number=number)
        ((name, factory),) = engines.items()
        yield name, factory


_LATER_NUMBERS = itertools.count()
"""Numbers of the engines that :func:`open_engine` places; the run's start took lower ones."""


def first_version(config: Config) -> int:
    """Return the policy version that engines start with.

    Only an engine in the learner's sole process starts with the learner's weights (version 0).
    Others read the model's files, which are older than a run's first weights.
    """
    rollout = config.rollout
    is_embedded = (
        rollout.placement == "colocated"
        and rollout.backend != "remote"
        and not on_every_host(config)
    )
    return 0 if is_embedded else UNTRAINED


def _actor_engines(
    config: Config, actor_options: Sequence[Mapping[str, Any]], *, first_number: int = 0
) -> dict[str, BackendFactory]:
    """Return the factory of an engine in a Ray actor for each of the options, by name."""
    # In its actor, an engine is a colocated one without a learner.
    rollout = config.rollout.model_copy(
        update={"placement": "colocated", "sleep_during_update": False}
    )
    model = config.model.model_copy(update={"path": absolute_model_path(config.model.path)})

    # The learner's GPU platform would fail where Ray shows no GPU; other engines need no JAX.
    on_cpu = not rollout.gpus_per_engine or rollout.backend in ("vllm", "sglang")
    env_vars = {"JAX_PLATFORMS": "cpu"} if on_cpu else {}

    factories: dict[str, BackendFactory] = {}
    for number, options in enumerate(actor_options, first_number):
        name = f"ray-{number}"
        engine_config = config.model_copy(
            update={
                "rollout": rollout,
                "model": model,
                "seed": config.seed + number,
                "run_dir": f"{config.run_dir}/{name}",
            }
        )
        make = functools.partial(make_engine, engine_config, version=UNTRAINED)
        factories[name] = functools.partial(
            _actor_engine,
            rollout,
            functools.partial(_fetching, make),
            name=name,
            options={**options, "runtime_env": {"env_vars": env_vars}},
        )
    return factories


def _actor_engine(
    rollout: RolloutConfig,
    make: BackendFactory,
    *,
    name: str,
    options: Mapping[str, Any],
) -> RolloutBackend:
    """Return an engine in an actor, to which this process sends weights if they are broadcast."""
    engine = RayBackend(make, name=name, options=options)
    if rollout.weight_transport != BROADCAST:
        return engine
    send = functools.partial(send_weights, rollout)
    return fetching(engine, BROADCAST, send, passes=OBJECT_STORE)


def room_for_learning(
    config: Config, client: LLMServerClient, names: Sequence[str]
) -> Callable[[], AbstractAsyncContextManager]:
    """Return a context for the learner's updates.

    In it, engines on the learner's devices sleep or leave the rotation.

    Args:
        names: servers on the learner's devices.

    Raises:
        ConfigError: they should sleep and one cannot.
    """
    leaves = config.rollout.placement == "hybrid"
    sleeps = config.rollout.sleep_during_update
    if not (leaves or sleeps):
        return nullcontext

    servers = _find_servers(client, names)
    if sleeps and not all(server.backend.capabilities.sleep for server in servers):
        raise ConfigError(
            f"rollout.sleep_during_update: the {config.rollout.backend} engine cannot release its"
            " memory (vllm and sglang can on CUDA); set rollout.sleep_during_update=false"
        )
    return functools.partial(_make_room, client, names, leaves=leaves, sleeps=sleeps)


@asynccontextmanager
async def _make_room(
    client: LLMServerClient, names: Sequence[str], *, leaves: bool, sleeps: bool
) -> AsyncIterator[None]:
    """Take servers out of the rotation and let them sleep; undo both in the end.

    Their requests move to other servers; without any, they stay. They return with their old
    weights and take the next update like all others. An engine that fails to sleep or wake returns
    as well: its next request or update reports and handles the failure.
    """
    servers = _find_servers(client, names)
    if leaves and len(client.pool.servers) == len(servers):
        yield
        return

    if leaves:
        for server in servers:
            client.pool.queue.expect(server.name)  # should all others be lost meanwhile
            await client.pool.remove_server(server.name)
    try:
        if sleeps:
            await asyncio.gather(
                *(_log_failure(server.backend.sleep, server.name) for server in servers)
            )
        yield
    finally:
        if sleeps:
            await asyncio.gather(
                *(_log_failure(server.backend.wake, server.name) for server in servers)
            )
        if leaves:
            for server in servers:
                client.pool.add_server(server)
                client.pool.queue.stop_expecting(server.name)


async def _log_failure(sleep_or_wake: Callable[[], Any], name: str) -> None:
    try:
        await sleep_or_wake()
    except BackendError as error:
        logger.warning("server %s could not %s: %s", name, sleep_or_wake.__name__, error)


def _find_servers(client: LLMServerClient, names: Sequence[str]) -> list[AsyncServer]:
    return [server for server in client.pool.servers if server.name in names]
