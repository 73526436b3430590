"""Which GPUs are the learner's and which the rollout servers'.

The rule, for which ``learner.mesh`` and ``rollout.vllm.tensor_parallel_size`` are the knobs:

1. The learner takes the first GPUs of the first host, as many as ``learner.mesh`` has devices.
2. Every other GPU serves: host by host, ``tensor_parallel_size`` of them are one server.
3. If one host has too few for both, they share: servers on all of its GPUs, the learner on the first ones, each with a
   part of the memory.

``--learner-gpus`` and ``--server-gpus`` name the first host's GPUs instead; those in both lists are shared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jax_agent_rl.deploy.launch.hosts import Host
from jax_agent_rl.deploy.launch.settings import Settings
from jax_agent_rl.errors import LaunchError

SHARED_UTILIZATION = 0.45
"""vLLM's part of a GPU that it shares, unless the configuration says otherwise."""
OWN_UTILIZATION = 0.9
"""Its part of a GPU of its own."""
_SPARE = 0.1
"""Of a shared GPU: CUDA contexts of both, and what vLLM does not count."""


@dataclass(frozen=True, kw_only=True)
class Server:
    """One rollout server: an engine over ``len(gpus)`` GPUs of a host; none on CPUs."""

    name: str
    host: Host
    gpus: tuple[int, ...]
    port: int


@dataclass(frozen=True, kw_only=True)
class ServerPlacement:
    """GPUs of the learner and of each server.

    Attributes:
        learner_gpus: indices on the first host; empty on CPUs.
        servers: at least one.
        utilization: ``rollout.vllm.gpu_memory_utilization`` of the servers; None on CPUs.
        learner_memory: share of a GPU's memory that jax may take; None: its default.
    """

    learner_gpus: tuple[int, ...]
    servers: tuple[Server, ...]
    utilization: float | None = None
    learner_memory: float | None = None


def place_on_cpus(hosts: Sequence[Host], *, port: int) -> ServerPlacement:
    """Place one server on each host."""
    servers = [Server(name=f"server-{i}", host=host, gpus=(), port=port) for i, host in enumerate(hosts)]
    return ServerPlacement(learner_gpus=(), servers=tuple(servers))


def place(
    gpus: Mapping[Host, Sequence[int]],
    settings: Settings,
    *,
    port: int,
    learner_gpus: Sequence[int] | None = None,
    server_gpus: Sequence[int] | None = None,
) -> ServerPlacement:
    """Apply the rule.

    Args:
        gpus: usable GPU indices of every host, the first host first.
        settings: of the configuration.
        port: of the first server of each host; the next ones count up.
        learner_gpus: indices on the first host, instead of step 1.
        server_gpus: indices on the first host, instead of steps 2 and 3; may be empty.

    Raises:
        LaunchError: there are too few GPUs, or a GPU that is named is not there.
    """
    first, *others = gpus
    need, group = settings.learner_devices, settings.tensor_parallel_size
    _require_known(first, gpus[first], [*(learner_gpus or ()), *(server_gpus or ())])
    learner = tuple(gpus[first][:need] if learner_gpus is None else learner_gpus)
    if len(learner) != need:
        raise LaunchError(
            f"{first.name}: learner.mesh has {need} device(s) and the learner {len(learner)} GPU(s); set "
            "the axes of learner.mesh so that their product is the number of its GPUs"
        )
    mine = [gpu for gpu in gpus[first] if gpu not in learner] if server_gpus is None else list(server_gpus)
    if server_gpus is None and not others and len(mine) < group:
        mine = list(gpus[first])
    servers = [
        Server(name="", host=host, gpus=members, port=port + i)
        for host, indices in [(first, mine), *((host, gpus[host]) for host in others)]
        for i, members in enumerate(_groups(indices, group))
    ]
    if not servers:
        raise LaunchError(
            f"rollout.vllm.tensor_parallel_size={group}, but no host has {group} GPU(s) to serve with; lower it"
        )
    named = tuple(Server(name=f"server-{i}", host=s.host, gpus=s.gpus, port=s.port) for i, s in enumerate(servers))
    utilization, memory = _memory(settings, shared=bool(set(mine) & set(learner)))
    return ServerPlacement(learner_gpus=learner, servers=named, utilization=utilization, learner_memory=memory)


def _require_known(host: Host, present: Sequence[int], named: Sequence[int]) -> None:
    if unknown := sorted(set(named) - set(present)):
        raise LaunchError(f"{host.name}: there is no usable GPU {unknown}; it has {list(present)}")


def _groups(indices: Sequence[int], size: int) -> list[tuple[int, ...]]:
    return [tuple(indices[i : i + size]) for i in range(0, len(indices) - size + 1, size)]


def _memory(settings: Settings, *, shared: bool) -> tuple[float, float | None]:
    """Return vLLM's utilization and the learner's memory fraction."""
    chosen = settings.gpu_memory_utilization
    if not shared:
        return chosen or OWN_UTILIZATION, None
    utilization = chosen or SHARED_UTILIZATION
    learner = round(1 - utilization - _SPARE, 2)
    if learner <= 0:
        raise LaunchError(
            f"rollout.vllm.gpu_memory_utilization={utilization} leaves nothing for the learner, which shares the GPU; "
            f"lower it to {SHARED_UTILIZATION} or so"
        )
    return utilization, learner
