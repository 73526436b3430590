"""The plan of a launch, as data that the dry run prints and the runner runs: GPUs of each process, and the commands.

GPUs are placed by a rule, for which ``learner.mesh`` and ``rollout.vllm.tensor_parallel_size`` are the knobs.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from jax_agent_rl.deploy.launch.hosts import Command, Host, check_command
from jax_agent_rl.deploy.launch.settings import Settings
from jax_agent_rl.errors import LaunchError

PLACEMENT_RULE = """\
1. The learner takes the first GPUs of the first host, as many as learner.mesh has devices.
2. Every other GPU serves: host by host, tensor_parallel_size of them are one server.
3. If one host has too few for both, they share: servers on all of its GPUs, the learner on the first ones, each with a
   part of the memory.

--learner-gpus and --server-gpus name the first host's GPUs instead; those in both lists are shared."""

SHARED_UTILIZATION = 0.45
"""vLLM's part of a GPU that it shares, unless the configuration says otherwise."""
OWN_UTILIZATION = 0.9
"""Its part of a GPU of its own."""
_SPARE = 0.1  # of a shared GPU: CUDA contexts of both, and what vLLM does not count

TOKEN = "JAX_AGENT_RL_TOKEN"
"""Variable with the secret of the rollout servers, new for each launch."""
RAY_TOKEN = "RAY_AUTH_TOKEN"
"""Ray's own; without it everybody in the network could run programs on the cluster."""

SERVER_GRACE = 30.0
"""Seconds to stop in: a rollout server has an engine to close, which takes a busy machine ten or twenty."""
MAX_GRACE = 40.0
"""Seconds for what waits for servers (Ray's driver), or for its own children (a Ray node)."""
_LEARNER_GRACE = 20.0

_RAY_ENV = {"RAY_AUTH_MODE": "token"}
_OBJECT_STORE_BYTES = 128 << 20  # nothing goes through it; weights need the shared memory that Ray would reserve
# The server's own jax only reads weight files: on a GPU it would reserve memory that is vLLM's.
_SERVER_ENV = {"JAX_PLATFORMS": "cpu"}


# --- placement ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Server:
    """One rollout server: an engine over ``len(gpus)`` GPUs of a host; none on CPUs."""

    name: str
    host: Host
    gpus: tuple[int, ...]
    port: int

    @property
    def url(self) -> str:
        return f"http://{self.host.address}:{self.port}"


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
    """Apply :data:`PLACEMENT_RULE`.

    Args:
        gpus: usable GPU indices of every host, the first host first.
        settings: settings of the configuration.
        port: port of each host's first server; the next ones count up.
        learner_gpus: indices on the first host, instead of step 1.
        server_gpus: indices on the first host, instead of steps 2 and 3; may be empty.

    Raises:
        LaunchError: there are too few GPUs, or a named GPU is missing.
    """
    first, *others = gpus
    need, group = settings.learner_devices, settings.tensor_parallel_size
    if unknown := sorted({*(learner_gpus or ()), *(server_gpus or ())} - set(gpus[first])):
        raise LaunchError(f"{first.name}: there is no usable GPU {unknown}; it has {list(gpus[first])}")
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
        Server(name="", host=host, gpus=tuple(indices[at : at + group]), port=port + number)
        for host, indices in [(first, mine), *((host, gpus[host]) for host in others)]
        for number, at in enumerate(range(0, len(indices) - group + 1, group))
    ]
    if not servers:
        raise LaunchError(
            f"rollout.vllm.tensor_parallel_size={group}, but no host has {group} GPU(s) to serve with; lower it"
        )
    shared = bool(set(mine) & set(learner))
    utilization = settings.gpu_memory_utilization or (SHARED_UTILIZATION if shared else OWN_UTILIZATION)
    memory = round(1 - utilization - _SPARE, 2) if shared else None
    if memory is not None and memory <= 0:
        raise LaunchError(
            f"rollout.vllm.gpu_memory_utilization={utilization} leaves nothing for the learner, which shares the GPU; "
            f"lower it to {SHARED_UTILIZATION} or so"
        )
    named = tuple(replace(server, name=f"server-{number}") for number, server in enumerate(servers))
    return ServerPlacement(learner_gpus=learner, servers=named, utilization=utilization, learner_memory=memory)


def report_idle(gpus: Mapping[Host, Sequence[int]], placement: ServerPlacement, settings: Settings) -> list[str]:
    """Return a line for each host with GPUs that neither learn nor serve, with what to change.

    Args:
        gpus: usable GPU indices of every host, the first host first.
        placement: GPUs of each process.
        settings: settings of the configuration.
    """
    lines, group = [], settings.tensor_parallel_size
    for number, (host, indices) in enumerate(gpus.items()):
        learning = placement.learner_gpus if number == 0 else ()
        busy = {*learning, *(gpu for server in placement.servers if server.host == host for gpu in server.gpus)}
        if idle := [gpu for gpu in indices if gpu not in busy]:
            left = f"{'GPU' if len(idle) == 1 else 'GPUs'} {', '.join(map(str, idle))}"
            fix = f"set rollout.vllm.tensor_parallel_size to a divisor of {len(indices) - len(learning)}"
            raised = f", or the product of learner.mesh to {len(learning) + len(idle)}" if learning else ""
            lines.append(f"{host.name}: {left} idle, too few for a server of {group}: {fix}{raised}")
    return lines


# --- commands -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of the command line.

    Attributes:
        device: what everything runs on.
        root: folder of the project, the same on every host.
        venv: folder of the environment, the same on every host.
        config: the YAML file; None: the quickstart, whose model and data are fetched.
        overrides: ``a.b=c``, for servers and learner.
        resume: continue from the newest checkpoint.
        ray_port: port of Ray's head, on several hosts.
        install: create the environment first.
    """

    device: Literal["cuda", "cpu"]
    root: Path
    venv: Path
    config: Path | None = None
    overrides: tuple[str, ...] = ()
    resume: bool = False
    ray_port: int = 6379
    install: bool = True

    @property
    def config_file(self) -> Path:
        return self.config or self.root / "configs" / "quickstart.yaml"

    def program(self, name: str) -> str:
        """Return the path of a program of the environment."""
        return str(self.venv / "bin" / name)


@dataclass(frozen=True, kw_only=True)
class Preparation:
    """Commands that run to their end first: checks and environment on all hosts concurrently, data in turn."""

    checks: tuple[Command, ...]
    environment: tuple[Command, ...]
    data: tuple[Command, ...]


@dataclass(frozen=True, kw_only=True)
class LaunchPlan:
    """Long-running commands, in the order of starting.

    Attributes:
        cluster: Ray: the head first, then a command per further host.
        servers: what starts the rollout servers: a command each, or Ray's driver for all.
        urls: name to address of every rollout server.
        learner: the run; when it ends, everything ends.
    """

    cluster: tuple[Command, ...]
    servers: tuple[Command, ...]
    urls: Mapping[str, str]
    learner: Command


def prepare(hosts: Sequence[Host], options: Options) -> Preparation:
    """Return the commands that check, create environments, and fetch the quickstart's model and data."""
    setup = (str(options.root / "launch" / "gpu_environment.sh"), options.device)
    variables = {"JAX_AGENT_RL_VENV": str(options.venv)}
    program = options.program("jax-agent-rl")
    model = [Command(name=host.name, host=host, argv=(program, "fetch-model")) for host in hosts]
    rows = Command(name=hosts[0].name, host=hosts[0], argv=(program, "prepare", "shop", "--out", "data/shop"))
    return Preparation(
        checks=tuple(check_command(host, options.device) for host in hosts),
        environment=tuple(
            Command(name=host.name, host=host, argv=setup, env=variables) for host in hosts if options.install
        ),
        data=(*model, rows) if options.config is None else (),
    )


def make_plan(hosts: Sequence[Host], placement: ServerPlacement, settings: Settings, options: Options) -> LaunchPlan:
    """Plan servers and learner; on several hosts a Ray cluster runs the servers.

    Args:
        hosts: hosts of the launch, this machine first.
        placement: GPUs of each process.
        settings: settings of the configuration.
        options: options of the command line.
    """
    return _Planner(hosts, placement, settings, options).plan()


@dataclass(frozen=True)
class _Planner:
    hosts: Sequence[Host]
    placement: ServerPlacement
    settings: Settings
    options: Options

    def plan(self) -> LaunchPlan:
        several = len(self.hosts) > 1
        return LaunchPlan(
            cluster=tuple(self._ray_node(host) for host in self.hosts) if several else (),
            servers=(self._ray_servers(),) if several else tuple(map(self._server, self.placement.servers)),
            urls={server.name: server.url for server in self.placement.servers},
            learner=self._learner(),
        )

    def _tether(self, name: str, host: Host, grace: float, argv: Sequence[str], env: Mapping[str, str]) -> Command:
        """Return a command that ends with its standard input, see ``watchdog``."""
        tether = (self.options.program("python"), "-m", "jax_agent_rl.deploy.launch.watchdog", f"{grace:g}")
        return Command(name=name, host=host, argv=(*tether, *argv), env={"PYTHONUNBUFFERED": "1", **env})

    def _visible(self, gpus: Sequence[int]) -> dict[str, str]:
        if self.options.device == "cpu":
            return {}
        # nvidia-smi counts in PCI order, CUDA by speed unless set otherwise.
        return {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus))}

    def _server(self, server: Server) -> Command:
        argv = self._server_argv(server.name, server.host.address, str(server.port))
        return self._tether(server.name, server.host, SERVER_GRACE, argv, _SERVER_ENV | self._visible(server.gpus))

    def _server_argv(self, name: str, address: str, port: str) -> list[str]:
        own = ["rollout.backend=vllm", "rollout.urls=[]", f"rollout.token_env={TOKEN}"]
        if self.placement.utilization is not None:
            own.append(f"rollout.vllm.gpu_memory_utilization={self.placement.utilization}")
        own.append(f"run_dir={self.settings.run_dir}.servers/{name}")  # vLLM's log; run_dir itself is the learner's
        command = [self.options.program("jax-agent-rl"), "rollout-server", "--config", str(self.options.config_file)]
        return [*command, "--host", address, "--port", port, *self.options.overrides, *own]

    @property
    def _ray_address(self) -> str:
        return f"{self.hosts[0].address}:{self.options.ray_port}"

    def _ray_node(self, host: Host) -> Command:
        """Start a Ray node in the foreground (``--block``), so that its end is noticed and the tether ends it.

        Servers inherit the variables of their node.
        """
        mine = [server for server in self.placement.servers if server.host == host]
        gpus = [gpu for server in mine for gpu in server.gpus]
        head = ["--head", f"--port={self.options.ray_port}", "--include-dashboard=false", "--disable-usage-stats"]
        role = head if host is self.hosts[0] else [f"--address={self._ray_address}"]
        argv = [self.options.program("ray"), "start", *role]
        argv += [f"--node-ip-address={host.address}", f"--num-gpus={len(gpus)}"]
        argv += ["--resources=" + json.dumps({server.name: 1 for server in mine})]
        argv += [f"--object-store-memory={_OBJECT_STORE_BYTES}", "--block"]
        return self._tether(f"ray {host.name}", host, MAX_GRACE, argv, _RAY_ENV | _SERVER_ENV | self._visible(gpus))

    def _ray_servers(self) -> Command:
        servers = self.placement.servers
        argv = [self.options.program("python"), "-m", "jax_agent_rl.deploy.launch.ray_servers"]
        argv += [f"--address={self._ray_address}", f"--gpus-per-server={len(servers[0].gpus)}"]
        argv += [f"--server={server.name}={server.host.address}:{server.port}" for server in servers]
        argv += ["--", *self._server_argv("{name}", "{address}", "{port}")]
        return self._tether("servers", self.hosts[0], MAX_GRACE, argv, _RAY_ENV)

    def _learner(self) -> Command:
        options, urls = self.options, ",".join(server.url for server in self.placement.servers)
        own = ["rollout.backend=remote", f"rollout.urls=[{urls}]", f"rollout.token_env={TOKEN}"]
        argv = [options.program("jax-agent-rl"), "train", str(options.config_file), *options.overrides, *own]
        argv += ["--resume"] if options.resume else []
        env = {"JAX_PLATFORMS": options.device} | self._visible(self.placement.learner_gpus)
        if self.placement.learner_memory is not None:
            env["XLA_PYTHON_CLIENT_MEM_FRACTION"] = str(self.placement.learner_memory)
        return self._tether("learner", self.hosts[0], _LEARNER_GRACE, argv, env)


def format_dry_run(preparation: Preparation, plan: LaunchPlan, root: Path) -> list[str]:
    """Return the lines of a dry run: ``#`` explains, ``+`` begins a command.

    Args:
        preparation: commands that run first.
        plan: the other commands.
        root: the project's folder.
    """

    def section(title: str, commands: Sequence[Command]) -> list[str]:
        lines = [f"+ {shlex.join(command.local_argv(root))}" for command in commands]
        return [f"# {title}", *lines] if lines else []

    return [
        *section("check every host", preparation.checks),
        *section("create the environment on every host", preparation.environment),
        *section("fetch model and data", preparation.data),
        f"# {TOKEN} and {RAY_TOKEN}, new secrets, go to each of the following on standard input",
        *section("start a Ray cluster", plan.cluster),
        *section("start the rollout servers", plan.servers),
        "# wait until they are healthy",
        *(f"#   {name} {url}/v1/health" for name, url in plan.urls.items()),
        *section("train", [plan.learner]),
        "# when the learner ends, a process fails, or on Ctrl-C: end all of them, last started first",
    ]
