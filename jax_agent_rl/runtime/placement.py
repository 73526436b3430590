"""Where the engines run: ``rollout.placement``.

::

    colocated   learner ─┬─ engine              this process; with rollout.sleep:  [ sample ][ learn, engine asleep ]
    separate    learner ─┬─ Ray actor: engine   a bundle of a placement group each
                         └─ Ray actor: engine
    hybrid      learner ─┬─ engine              in the rotation while the learner waits:  [ sample ][ learn ][ sample ]
                         └─ Ray actor: engine   always in the rotation
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from pathlib import Path
from typing import Any, cast

from jax_agent_rl.config import Config
from jax_agent_rl.errors import BackendError, ConfigError
from jax_agent_rl.rollout.client import LLMServerClient
from jax_agent_rl.rollout.manager import BackendFactory
from jax_agent_rl.rollout.protocol import RolloutBackend
from jax_agent_rl.rollout.server import AsyncServer
from jax_agent_rl.runtime.engines import UNTRAINED, make_engine
from jax_agent_rl.runtime.ray_cluster import open_ray, reserve

logger = logging.getLogger(__name__)


@asynccontextmanager
async def open_places(config: Config) -> AsyncIterator[list[dict[str, Any]]]:
    """Ray, and a place for each of ``rollout.engines``, while the context lasts; none if all is colocated.

    Open it before anything computes: processes that Ray starts should not be copies of one with threads, and the GPUs
    the learner may see are known only now.

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
        open_ray(rollout.ray_address, bundles=1 + rollout.engines),
        reserve(
            rollout.engines,
            gpus_per_engine=rollout.gpus_per_engine,
            learner_gpus=mesh.devices if on_gpus and alone else 0,
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
    """The policy version engines start with: in other processes they read the model's files, and a run's first weights
    are newer than those."""
    return 0 if config.rollout.placement == "colocated" else UNTRAINED


def _in_actors(config: Config, places: Sequence[Mapping[str, Any]]) -> dict[str, BackendFactory]:
    rollout = config.rollout.model_copy(update={"placement": "colocated", "sleep": False})
    model = config.model.model_copy(update={"path": str(Path(config.model.path).expanduser().absolute())})
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
    from jax_agent_rl.rollout.ray_actor.backend import RayBackend

    return RayBackend(functools.partial(make_engine, config, version=UNTRAINED), name=name, options=options)


def _from_store(make: BackendFactory) -> RolloutBackend:
    from jax_agent_rl.rollout.ray_actor.from_store import FromStore

    return cast(RolloutBackend, FromStore(make()))


def room_for_learning(config: Config, client: LLMServerClient, name: str) -> Callable[[], AbstractAsyncContextManager]:
    """A context for the time in which the learner updates.

    Args:
        name: of the server on the learner's devices.

    Raises:
        ConfigError: it should sleep and cannot.
    """
    leaves, sleeps = config.rollout.placement == "hybrid", config.rollout.sleep
    if not (leaves or sleeps):
        return nullcontext
    server = _find(client, name)
    if sleeps and server is not None and not server.backend.capabilities.sleep:
        raise ConfigError(
            f"rollout.sleep: the {config.rollout.backend} engine cannot give its memory back here (vllm does on CUDA); "
            "set rollout.sleep=false"
        )
    return functools.partial(_room, client, name, leaves=leaves, sleeps=sleeps)


@asynccontextmanager
async def _room(client: LLMServerClient, name: str, *, leaves: bool, sleeps: bool) -> AsyncIterator[None]:
    """The server leaves the rotation, its requests move on, and it sleeps; afterwards it is back with the weights it
    had, so that it takes the next ones like all others. The only server that is left stays.

    An engine that fails at it comes back, too: its next request or update says so, and is dealt with there.
    """
    server = _find(client, name)
    if server is None or (leaves and len(client.servers) == 1):
        yield
        return
    if leaves:
        await client.remove_server(name)
    try:
        if sleeps:
            await _try(server.backend.sleep, name)
        yield
    finally:
        if sleeps:
            await _try(server.backend.wake, name)
        if leaves:
            client.add_server(server)


async def _try(change: Callable[[], Any], name: str) -> None:
    try:
        await change()
    except BackendError as error:
        logger.warning("server %s could not %s: %s", name, change.__name__, error)


def _find(client: LLMServerClient, name: str) -> AsyncServer | None:
    return next((server for server in client.servers if server.name == name), None)
