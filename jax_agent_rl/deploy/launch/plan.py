"""The commands of a launch, as data: the dry run prints them, the runner runs them."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from jax_agent_rl.deploy.launch.hosts import Command, Host, check_command
from jax_agent_rl.deploy.launch.placement import Server, ServerPlacement
from jax_agent_rl.deploy.launch.settings import Settings

TOKEN = "JAX_AGENT_RL_TOKEN"
"""Variable with the secret of the rollout servers, made anew for each launch."""
RAY_TOKEN = "RAY_AUTH_TOKEN"
"""Ray's own; without it everybody in the network could run programs on the cluster."""

SERVER_GRACE = 30.0
"""Seconds to stop in: a rollout server has an engine to close, which takes a busy machine ten or twenty."""
LONGEST_GRACE = 40.0
"""Of what has to wait for servers (Ray's driver), or for its own children (a Ray node)."""
_LEARNER_GRACE = 20.0

_RAY_ENV = {"RAY_AUTH_MODE": "token"}
_OBJECT_STORE_BYTES = 128 << 20  # nothing goes through it; weights need the shared memory that Ray would reserve
# The server's own jax only reads weight files: on a GPU it would reserve memory that is vLLM's.
_SERVER_ENV = {"JAX_PLATFORMS": "cpu"}


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of the command line.

    Attributes:
        device: what everything runs on.
        root: folder of the project, the same on every host.
        venv: folder of the environment, the same on every host.
        config: the YAML file; None: the quickstart, whose model and data are made, too.
        overrides: ``a.b=c``, for servers and learner.
        resume: go on from the newest checkpoint.
        ray_port: of Ray's head, on several hosts.
        install: make the environment first.
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
    """Commands that run to their end before anything stays running.

    Attributes:
        checks: one command per host; all at the same time.
        environment: one command per host; all at the same time.
        data: one after the other.
    """

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
    """Return the commands that check, make environments, and fetch the quickstart's model and data."""
    script = str(options.root / "launch" / "gpu_environment.sh")
    setup = (script, options.device)
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
    """Plan servers and learner; on several hosts a Ray cluster runs the servers."""
    urls = {server.name: f"http://{server.host.address}:{server.port}" for server in placement.servers}
    if len(hosts) == 1:
        servers = tuple(_server(server, placement, settings, options) for server in placement.servers)
    else:
        servers = (_ray_servers(hosts[0], placement, settings, options),)
    return LaunchPlan(
        cluster=_cluster(hosts, placement, options) if len(hosts) > 1 else (),
        servers=servers,
        urls=urls,
        learner=_learner(hosts[0], placement, urls, options),
    )


def _tethered(
    name: str, host: Host, options: Options, grace: float, argv: Sequence[str], env: Mapping[str, str]
) -> Command:
    tether = (options.program("python"), "-m", "jax_agent_rl.deploy.launch.watchdog", f"{grace:g}")
    return Command(name=name, host=host, argv=(*tether, *argv), env={"PYTHONUNBUFFERED": "1", **env})


# --- rollout servers ------------------------------------------------------------------------------------------


def _server(server: Server, placement: ServerPlacement, settings: Settings, options: Options) -> Command:
    argv = _server_argv(server.name, server.host.address, str(server.port), placement, settings, options)
    env = _SERVER_ENV | _visible(server.gpus, options)
    return _tethered(server.name, server.host, options, SERVER_GRACE, argv, env)


def _server_argv(
    name: str, address: str, port: str, placement: ServerPlacement, settings: Settings, options: Options
) -> list[str]:
    own = ["rollout.backend=vllm", "rollout.urls=[]", f"rollout.token_env={TOKEN}"]
    if placement.utilization is not None:
        own.append(f"rollout.vllm.gpu_memory_utilization={placement.utilization}")
    own.append(f"run_dir={settings.run_dir}.servers/{name}")  # vLLM's log; run_dir itself is the learner's
    command = [options.program("jax-agent-rl"), "rollout-server", "--config", str(options.config_file)]
    return [*command, "--host", address, "--port", port, *options.overrides, *own]


def _visible(gpus: Sequence[int], options: Options) -> dict[str, str]:
    if options.device == "cpu":
        return {}
    # nvidia-smi counts in PCI order, CUDA by speed unless told otherwise.
    return {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus))}


# --- Ray ------------------------------------------------------------------------------------------------------


def _cluster(hosts: Sequence[Host], placement: ServerPlacement, options: Options) -> tuple[Command, ...]:
    """Start a Ray node per host, in the foreground (``--block``), so that its end is noticed and the tether ends it.

    Servers inherit the variables of their node.
    """
    head = hosts[0]
    where = f"{head.address}:{options.ray_port}"
    commands = []
    for host in hosts:
        mine = [server for server in placement.servers if server.host == host]
        gpus = [gpu for server in mine for gpu in server.gpus]
        role = ["--head", f"--port={options.ray_port}", "--include-dashboard=false", "--disable-usage-stats"]
        argv = [options.program("ray"), "start", *(role if host is head else [f"--address={where}"])]
        argv += [f"--node-ip-address={host.address}", f"--num-gpus={len(gpus)}"]
        argv += ["--resources=" + json.dumps({server.name: 1 for server in mine})]
        argv += [f"--object-store-memory={_OBJECT_STORE_BYTES}", "--block"]
        env = _RAY_ENV | _SERVER_ENV | _visible(gpus, options)
        commands.append(_tethered(f"ray {host.name}", host, options, LONGEST_GRACE, argv, env))
    return tuple(commands)


def _ray_servers(head: Host, placement: ServerPlacement, settings: Settings, options: Options) -> Command:
    server = _server_argv("{name}", "{address}", "{port}", placement, settings, options)
    argv = [options.program("python"), "-m", "jax_agent_rl.deploy.launch.ray_servers"]
    argv += [f"--address={head.address}:{options.ray_port}", f"--gpus-per-server={len(placement.servers[0].gpus)}"]
    argv += [f"--server={s.name}={s.host.address}:{s.port}" for s in placement.servers]
    return _tethered("servers", head, options, LONGEST_GRACE, [*argv, "--", *server], _RAY_ENV)


# --- learner --------------------------------------------------------------------------------------------------


def _learner(head: Host, placement: ServerPlacement, urls: Mapping[str, str], options: Options) -> Command:
    own = ["rollout.backend=remote", f"rollout.urls=[{','.join(urls.values())}]", f"rollout.token_env={TOKEN}"]
    argv = [options.program("jax-agent-rl"), "train", str(options.config_file), *options.overrides, *own]
    argv += ["--resume"] if options.resume else []
    env = {"JAX_PLATFORMS": options.device} | _visible(placement.learner_gpus, options)
    if placement.learner_memory is not None:
        env["XLA_PYTHON_CLIENT_MEM_FRACTION"] = str(placement.learner_memory)
    return _tethered("learner", head, options, _LEARNER_GRACE, argv, env)


# --- a dry run ------------------------------------------------------------------------------------------------


def lines_of_preparation(preparation: Preparation, options: Options) -> list[str]:
    """Render the preparation: ``#`` explains, ``+`` begins a command."""
    lines = _section("check every host", preparation.checks, options)
    lines += _section("make the environment on every host", preparation.environment, options)
    return lines + _section("bring model and data", preparation.data, options)


def lines_of_plan(plan: LaunchPlan, options: Options) -> list[str]:
    """Render the rest."""
    lines = [f"# {TOKEN} and {RAY_TOKEN}, made anew, go to each of the following on standard input"]
    lines += _section("start a Ray cluster", plan.cluster, options)
    lines += _section("start the rollout servers", plan.servers, options)
    lines += ["# wait until they are healthy", *(f"#   {name} {url}/v1/health" for name, url in plan.urls.items())]
    lines += _section("train", [plan.learner], options)
    return [*lines, "# when the learner ends, a process fails, or on Ctrl-C: end all of them, last started first"]


def _section(title: str, commands: Sequence[Command], options: Options) -> list[str]:
    if not commands:
        return []
    return [f"# {title}", *(f"+ {shlex.join(command.local_argv(options.root))}" for command in commands)]
