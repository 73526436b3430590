"""Ray for a run: a cluster, existing or started on this machine, and a bundle for every engine."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import sys
import threading
import warnings
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from jax_agent_rl.errors import ConfigError
from jax_agent_rl.utils.packages import install_command
from jax_agent_rl.utils.services import START_SECONDS, start_service
from jax_agent_rl.utils.text import counted

logger = logging.getLogger(__name__)

RAY_FIX = (
    "free memory and disk space, end other clusters with `ray stop`, and see its logs in"
    " /tmp/ray/session_latest/logs"
)
"""What to do about a cluster that does not answer."""
_READY_SECONDS = 60.0
_LOOPBACK_SWITCH = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
"""Set to 0, it makes Ray listen on loopback only, as it does by default on Windows and macOS."""


@asynccontextmanager
async def open_ray(address: str | None, *, bundles: int = 1) -> AsyncIterator[None]:
    """Connect to Ray while the context lasts; a cluster not started here keeps running after it.

    Without an address, a cluster is started on this machine: on loopback only, with a new token.
    Its processes inherit the environment variables of this one.

    Args:
        address: a running cluster, whose token is where Ray looks for it (``RAY_AUTH_TOKEN``);
            None: ``RAY_ADDRESS``, if set.
        bundles: bundles of one CPU that a cluster started here has room for, on any number of
            cores.

    Raises:
        ConfigError: Ray is not installed, there is no cluster at the address, or it does not
            answer.
    """
    address = address or os.environ.get("RAY_ADDRESS")
    if not address:
        secure_own_cluster()
    try:
        import ray
        from ray.exceptions import RayError
    except ImportError as error:
        raise ConfigError(
            f"engines in Ray actors need Ray ({error}): {install_command('ray')}"
        ) from None
    if ray.is_initialized():
        yield
        return

    options: dict[str, Any] = {"log_to_driver": False, "configure_logging": False}
    if address:
        cluster = f"the Ray cluster at rollout.ray_address={address}"
    else:
        cluster = "a Ray cluster of this machine"
        options["_node_ip_address"] = "127.0.0.1"
        options["include_dashboard"] = False
        options["num_cpus"] = max(os.cpu_count() or 1, bundles)

    # Ray's processes are other programs from the start, so JAX's warning of deadlocks after a fork
    # is not for them.
    warnings.filterwarnings("ignore", "os.fork", RuntimeWarning)
    ended = threading.Event()
    try:
        # In a thread, where Ray installs no signal handlers.
        await start_service(
            lambda: ray.init(address or "local", **options),
            name=cluster,
            fix=RAY_FIX,
            seconds=START_SECONDS,
            undo=lambda _: ray.shutdown(),
            ended=ended,
        )
    except (ConnectionError, RuntimeError, ValueError, RayError) as error:
        raise ConfigError(f"{cluster}: {error}") from error

    try:
        yield
    finally:
        try:
            await start_service(
                ray.shutdown,
                name=f"the end of {cluster}",
                fix="end it with `ray stop`",
                seconds=START_SECONDS,
            )
        except ConfigError as error:
            logger.warning("%s", error)
        finally:
            ended.set()


def secure_own_cluster() -> None:
    """Set token and loopback for clusters that this process starts.

    Ray reads both when it is first imported. :func:`open_ray` calls this; call it earlier where
    something else, such as vLLM, imports Ray first.

    Raises:
        ConfigError: Ray has been imported before.
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
            "Ray was imported before the run could secure the cluster it starts on this machine:"
            f" import it later, set {', '.join(missing)} before the program starts, or give"
            " rollout.ray_address"
        )
    for name in missing:
        os.environ[name] = variables[name]
    # Learner and engines are the work of this machine; Ray's default is 15.
    os.environ.setdefault("RAY_worker_niceness", "0")


@asynccontextmanager
async def reserve(
    engines: int, *, gpus_per_engine: int, learner_gpus: int | None = 0
) -> AsyncIterator[list[dict[str, Any]]]:
    """Reserve a bundle of a placement group for the learner, on this node, and one per engine.

    Engines with GPUs are packed onto as few nodes as possible, nearest to the learner; engines on
    CPUs are spread, because on one node they would share its cores. This process sees only the GPUs
    of its bundle (``CUDA_VISIBLE_DEVICES``), and must not have initialized any before.

    Args:
        engines: how many.
        gpus_per_engine: 0: engines on CPUs.
        learner_gpus: GPUs of the learner's bundle; None: the learner needs no bundle, as it has one
            when engines join its run.

    Yields:
        Ray's actor options of each engine.

    Raises:
        ConfigError: the cluster lacks the resources, or does not free them within a minute.
    """
    import ray
    from ray.util.placement_group import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    bundles = []
    if learner_gpus is not None:
        # A trace of this node's own resource puts the learner's bundle on it.
        this_node = {f"node:{ray.util.get_node_ip_address()}": 0.001}
        bundles.append(_bundle(learner_gpus) | this_node)
    bundles += [_bundle(gpus_per_engine) for _ in range(engines)]

    _check_room(ray.cluster_resources(), engines, gpus_per_engine, learner_gpus or 0)
    group = placement_group(bundles, strategy="PACK" if gpus_per_engine else "SPREAD")
    try:
        try:
            async with asyncio.timeout(_READY_SECONDS):
                await group.ready()
        except TimeoutError:
            raise ConfigError(
                f"Ray found no place for {counted(engines, 'engine')} within {_READY_SECONDS:g} s;"
                f" free are {_plain(ray.available_resources())}; end what uses the rest, add nodes,"
                " or lower rollout.num_engines"
            ) from None

        strategies = [
            PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)
            for index in range(len(bundles))
        ]
        if learner_gpus:
            # Only a process in the learner's bundle knows which GPUs it got.
            get_gpu_ids = ray.remote(ray.get_gpu_ids).options(
                num_gpus=learner_gpus, scheduling_strategy=strategies[0]
            )
            try:
                async with asyncio.timeout(_READY_SECONDS):
                    gpus = await get_gpu_ids.remote()
            except TimeoutError:
                raise ConfigError(
                    f"Ray did not start a process on this node within {_READY_SECONDS:g} s to ask"
                    f" for the learner's GPUs; {RAY_FIX}"
                ) from None
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(str(gpu) for gpu in gpus)

        yield [
            {"num_cpus": 1, "num_gpus": gpus_per_engine, "scheduling_strategy": strategy}
            for strategy in strategies[-engines:]
        ]
    finally:
        remove_placement_group(group)


def _bundle(gpus: int) -> dict[str, float]:
    return {"CPU": 1, "GPU": gpus} if gpus else {"CPU": 1}


def _check_room(
    total: Mapping[str, float], engines: int, gpus_per_engine: int, learner_gpus: int
) -> None:
    need = {"CPU": 1 + engines, "GPU": engines * gpus_per_engine + learner_gpus}
    for name, count in need.items():
        if total.get(name, 0) < count:
            raise ConfigError(
                f"rollout.num_engines={engines} with rollout.gpus_per_engine={gpus_per_engine} and"
                f" a learner need {count} {name}s, the Ray cluster has {_plain(total)}; lower them,"
                " or add nodes"
            )


def _plain(resources: Mapping[str, float]) -> str:
    return ", ".join(f"{resources.get(name, 0):g} {name}s" for name in ("CPU", "GPU"))
