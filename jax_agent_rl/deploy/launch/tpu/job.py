"""Commands on the hosts, as data: the dry run prints them, the controller runs them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from jax_agent_rl.deploy.launch.hosts import Command
from jax_agent_rl.deploy.launch.tpu import gcloud
from jax_agent_rl.deploy.launch.tpu.gcloud import Gcloud, SliceRequest
from jax_agent_rl.deploy.launch.tpu.slices import Addresses
from jax_agent_rl.deploy.launch.tpu.topology import Topology
from jax_agent_rl.errors import LaunchError

ARCHIVE = "jax_agent_rl.tar.gz"
CODE = "jax_agent_rl"
"""Folder of the project on every host, in the home folder."""
_COPIED = f"{CODE}.files"
"""Beside it: the names of the files that were copied there."""
CONFIG = "tpu_pod.yaml"
"""Name of the user's configuration in there."""
QUICKSTART = "configs/quickstart.yaml"
QUICKSTART_PREPARATION = "jax-agent-rl fetch-model && jax-agent-rl prepare shop --out data/shop"

REFUSED = 2
"""Exit status of a run that a user has to correct."""

TOKEN = "JAX_AGENT_RL_TOKEN"
"""Environment variable with the secret between the learner and rollout servers."""

OWN_KEYS = ("run_dir", "trainer.checkpoint_dir", "learner.multihost.coordinator")
"""Keys that the launcher sets itself."""
SPLIT_KEYS = tuple(f"rollout.{name}" for name in ("backend", "urls", "token_env", "weight_transport", "weight_dir"))
"""And with ``--rollout-hosts`` these."""


_BUCKET = re.compile(r"gs://[a-z0-9][-a-z0-9._]*(/.*)?")


@dataclass(frozen=True, kw_only=True)
class Job:
    """What to train, and where it is kept.

    Attributes:
        name: of the run, in the bucket and on the hosts.
        config: the YAML file here; None: the quickstart, whose model and data are made on every host.
        overrides: ``a.b=c``.
        bucket: ``gs://…``, where checkpoints, small files and logs go.
        prepare: shell command for every host before the run, in the project's folder: what brings model and data.
        install: make the environment first.
        port: of rollout servers.
        variables: environment variables of the preparation and the run; None is a value that is not known here.
    """

    name: str
    config: Path | None
    overrides: tuple[str, ...]
    bucket: str | None
    prepare: str | None
    install: bool
    port: int = 8100
    variables: Mapping[str, str | None] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        if self.bucket is not None and not _BUCKET.fullmatch(self.bucket):
            raise LaunchError(f"--bucket {self.bucket!r} is no bucket: it has the form gs://NAME")

    @property
    def kept(self) -> str | None:
        """The run's place in the bucket."""
        return f"{self.bucket.rstrip('/')}/{self.name}" if self.bucket else None

    @property
    def run_folder(self) -> str:
        """The run folder on host 0, below the project's folder."""
        return f"runs/{self.name}"

    def secrets(self, token: str | None = None) -> Mapping[str, str] | None:
        """Return what goes to a host through the connection; None if nothing does.

        Args:
            token: between learner and rollout servers.
        """
        known = {name: value for name, value in self.variables.items() if value is not None}
        return {**known, **({TOKEN: token} if token else {})} or None

    @property
    def preparation(self) -> str | None:
        """``prepare``, or what the quickstart needs."""
        return self.prepare or (None if self.config else QUICKSTART_PREPARATION)


@dataclass(frozen=True, kw_only=True)
class HostWorker:
    """A host of a slice.

    Attributes:
        node: gcloud's name of the slice.
        index: gcloud's number of the host in it.
        number: among those that learn, where 0 leads, or among those that only sample.
        alone: no other one learns.
        address: in the zone's network.
        serves: it only samples.
    """

    node: str
    index: int
    number: int
    alone: bool
    address: str
    serves: bool = False

    @property
    def name(self) -> str:
        """The prefix of its output lines."""
        return f"{'rollout' if self.serves else 'host'}-{self.number}"


def workers(request: SliceRequest, addresses: Addresses, servers: Sequence[SliceRequest] = ()) -> list[HostWorker]:
    """Return the learners' hosts, slice by slice (the order of jax's processes), then the sampling ones.

    Args:
        request: the learner's slices.
        addresses: of the hosts of each slice, the servers' last.
        servers: a slice of one host each.
    """
    learning, serving = addresses[: request.slices], addresses[request.slices :]
    places = [(node, *at) for node, hosts in zip(request.nodes, learning, strict=True) for at in enumerate(hosts)]
    learners = [
        HostWorker(node=node, index=index, number=number, alone=len(places) == 1, address=address)
        for number, (node, index, address) in enumerate(places)
    ]
    return learners + [
        HostWorker(node=server.name, index=0, number=number, alone=False, address=address, serves=True)
        for number, (server, (address,)) in enumerate(zip(servers, serving, strict=True))
    ]


def servers_of(request: SliceRequest, count: int, topology: Topology) -> list[SliceRequest]:
    """Return a slice of one host for each rollout server.

    Raises:
        LaunchError: the topology has more than one host.
    """
    if topology.hosts > 1:
        raise LaunchError(
            f"--rollout-topology {topology.name} has {topology.hosts} hosts, and an engine runs on one: choose a "
            "smaller one, and more of them with --rollout-hosts"
        )
    return [
        replace(request, name=f"{request.name}-rollout-{i}", topology=topology, slices=1, runtime=topology.kind.runtime)
        for i in range(count)
    ]


def require_keepable(request: SliceRequest, job: Job) -> None:
    """Raise :class:`LaunchError` if a run of several hosts, or a preemptible one, has no bucket."""
    several = request.slices * request.topology.hosts > 1
    if job.bucket is None and (several or request.spot or request.queued):
        why = "several hosts share no disk" if several else "what is taken back takes its disk along"
        raise LaunchError(f"--bucket is missing: {why}; give --bucket gs://NAME, in the region of the zone")


def require_overrides(overrides: Sequence[str], *, split: bool = False) -> None:
    """Raise :class:`LaunchError` for a malformed override, or one that would have no effect.

    Args:
        overrides: of the command line.
        split: with ``--rollout-hosts``.
    """
    own = OWN_KEYS + SPLIT_KEYS * split
    for item in overrides:
        if "=" not in item:
            raise LaunchError(f"override {item!r}: write key.path=value")
        if item.partition("=")[0].strip() in own:
            raise LaunchError(f"{item}: tpu_pod.sh sets {', '.join(own)} itself; leave it out")


# --- stages before the run -----------------------------------------------------------------------------------------


def copy(cloud: Gcloud, worker: HostWorker, archive: Path) -> Command:
    """Return the command that copies the archive to a host's home folder."""
    return cloud.command(worker.name, gcloud.scp(worker.node, worker.index, str(archive), ARCHIVE))


def set_up(cloud: Gcloud, worker: HostWorker, job: Job) -> Command:
    """Return the command that sets up code, environment, model and data, in one connection.

    What the copy before had brought is removed first, so that a file that is gone here is gone there; what has been
    made in the folder since stays. With variables it reads them from its input.
    """
    steps = ["IFS= read -r variables", "exec </dev/null"] if job.variables else []
    steps += [f"mkdir -p {CODE}", f"cd {CODE}", f"touch ../{_COPIED}", f"xargs -d '\\n' rm -f -- < ../{_COPIED}"]
    steps += [f"tar -xzvf ../{ARCHIVE} --quoting-style=literal > ../{_COPIED}"]
    steps += ["./launch/tpu_environment.sh"] if job.install else []
    if job.preparation:
        prepare = f"({job.preparation})"
        if job.variables:
            given = _remote(["with", ".", "--secrets", "--", "bash", "-c", job.preparation])
            prepare = f'printf "%s\\n" "$variables" | {given}'
        steps += [f'export PATH="{_venv()}/bin:$PATH"', prepare]
    return _on(cloud, worker, " && ".join(steps))


# --- the run -------------------------------------------------------------------------------------------------------


def start(cloud: Gcloud, worker: HostWorker, job: Job, *, resume: str | None, urls: Sequence[str] = ()) -> Command:
    """Return the command that starts the run on a host; learning hosts run the same one and find each other.

    Args:
        cloud: makes the command.
        worker: the host.
        job: what to run.
        resume: ``--resume``, ``--auto-resume`` or None.
        urls: of the rollout servers, if there are any; then the command reads the secret from its input, as it does
            with variables.
    """
    keeping = ["start", _folder(job), f"--host={worker.name}", *(["--secrets"] if urls or job.variables else [])]
    if job.kept:
        keeping.append(f"--bucket={job.kept}")
        if worker.number == 0 and not worker.serves:
            keeping += [f"--run-folder={job.run_folder}", *(["--restore"] if resume else [])]
    config = CONFIG if job.config else QUICKSTART
    if worker.serves:
        program = serving(config, job)
    else:
        program = ["train", config, *job.overrides, *_own_settings(worker, job, urls), *([resume] if resume else [])]
    python = f'"{_venv()}/bin/python"'
    # A host whose chips cannot be opened says so instead of training on its processor.
    environment = 'export PYTHONUNBUFFERED=1 JAX_PLATFORMS="${JAX_PLATFORMS:-tpu,cpu}"'
    return _on(
        cloud,
        worker,
        f"cd {CODE} && {environment} && {_remote(keeping)} -- {python} -m jax_agent_rl.cli {shlex.join(program)}",
    )


def serving(config: str, job: Job) -> list[str]:
    """Return the arguments of a rollout server."""
    listening = ["--host=0.0.0.0", f"--port={job.port}"]
    own = [f"rollout.token_env={TOKEN}", *([f"rollout.weight_dir={job.kept}/weights"] if job.kept else [])]
    return ["rollout-server", "--config", config, *listening, *job.overrides, *own]


def asking(job: Job, urls: Sequence[str]) -> list[str]:
    """Return settings of the learners for rollout servers at ``urls``."""
    own = ["rollout.backend=remote", f"rollout.urls=[{','.join(urls)}]", f"rollout.token_env={TOKEN}"]
    if job.kept:
        own += ["rollout.weight_transport=tensorstore", f"rollout.weight_dir={job.kept}/weights"]
    return own


def urls_of(workers: Sequence[HostWorker], job: Job) -> list[str]:
    """Return the URLs of the rollout servers among these."""
    return [f"http://{worker.address}:{job.port}" for worker in workers if worker.serves]


def until_listening(cloud: Gcloud, worker: HostWorker, job: Job) -> Command:
    """Return the command that ends when a host's rollout server listens, and fails if it has ended."""
    return _on(cloud, worker, f"cd {CODE} && {_remote(['listening', _folder(job), f'--port={job.port}'])}")


def _own_settings(worker: HostWorker, job: Job, urls: Sequence[str]) -> list[str]:
    own = [f"run_dir={job.run_folder}", *(asking(job, urls) if urls else [])]
    if job.kept:
        own.append(f"trainer.checkpoint_dir={job.kept}/checkpoints")
    return own if worker.alone else [*own, "learner.multihost.coordinator=auto"]


def follow(cloud: Gcloud, worker: HostWorker, job: Job) -> Command:
    """Return the command that prints the run's output on a host; the last line is its exit status."""
    return _on(cloud, worker, f"cd {CODE} && {_remote(['follow', _folder(job)])}")


def running(worker: HostWorker, job: Job) -> tuple[str, ...]:
    """Return the call that prints ``yes`` if a run is under way on a host, else ``no``."""
    asked = f"cd {CODE} && {_remote(['running', _folder(job)])}"
    return gcloud.ssh(worker.node, worker.index, f"if {asked}; then echo yes; else echo no; fi")


def send(cloud: Gcloud, worker: HostWorker, job: Job, name: str) -> Command:
    """Return the command that signals the run on a host."""
    return _on(cloud, worker, f"cd {CODE} && {_remote(['signal', _folder(job), f'--signal={name}'])}")


def _folder(job: Job) -> str:
    return f"../{CODE}-runs/{job.name}"


def _remote(arguments: Sequence[str]) -> str:
    return f'"{_venv()}/bin/python" -m jax_agent_rl.deploy.launch.tpu.remote {shlex.join(arguments)}'


def _venv() -> str:
    """Return the environment's folder, as the host's shell sees it."""
    return f"${{JAX_AGENT_RL_VENV:-$HOME/{CODE}/.venv-tpu}}"


def _on(cloud: Gcloud, worker: HostWorker, command: str) -> Command:
    return cloud.command(worker.name, gcloud.ssh(worker.node, worker.index, command))
