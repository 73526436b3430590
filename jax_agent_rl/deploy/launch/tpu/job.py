"""The job of a launch and its commands on the hosts, as data that the dry run prints and the controller runs."""

from __future__ import annotations

import io
import re
import shlex
import subprocess
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from jax_agent_rl.deploy.launch.hosts import Command
from jax_agent_rl.deploy.launch.tpu import gcloud
from jax_agent_rl.deploy.launch.tpu.gcloud import Call, Gcloud, SliceRequest, Topology
from jax_agent_rl.deploy.launch.tpu.slices import Addresses
from jax_agent_rl.errors import LaunchError

ARCHIVE = "jax_agent_rl.tar.gz"
CODE = "jax_agent_rl"
"""Folder of the project on every host, in the home folder."""
_COPIED = f"{CODE}.files"  # beside it: names of the files that were copied there
CONFIG = "tpu_pod.yaml"
"""Name of the user's configuration in that folder."""
QUICKSTART = "configs/quickstart.yaml"
_QUICKSTART_PREPARATION = "jax-agent-rl fetch-model && jax-agent-rl prepare shop --out data/shop"
_MAX_CODE_BYTES = 50_000_000  # larger files are hardly code
_BUCKET = re.compile(r"gs://[a-z0-9][-a-z0-9._]*(/.*)?")
_VENV = f"${{JAX_AGENT_RL_VENV:-$HOME/{CODE}/.venv-tpu}}"  # expanded by the host's shell

REFUSED = 2
"""Exit status of a run that a user has to correct."""
TOKEN = "JAX_AGENT_RL_TOKEN"
"""Environment variable with the secret between the learner and rollout servers."""
OWN_KEYS = ("run_dir", "trainer.checkpoint_dir", "learner.multihost.coordinator")
"""Keys that the launcher sets itself."""
SPLIT_KEYS = tuple(f"rollout.{name}" for name in ("backend", "urls", "token_env", "weight_transport", "weight_dir"))
"""Further ones with ``--rollout-hosts``."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """What to train, and where it is stored.

    Attributes:
        name: name of the run, in the bucket and on the hosts.
        config: local YAML file; None: the quickstart, whose model and data every host fetches.
        overrides: ``a.b=c``.
        bucket: ``gs://…`` for checkpoints, small files and logs.
        prepare: shell command for every host before the run, in the project's folder, that fetches model and data.
        install: create the environment first.
        port: port of rollout servers.
        variables: environment variables of the preparation and the run; None: the value is not known here.
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
        """Return the variables, and the rollout servers' token, that go to a host through the connection, if any."""
        known = {name: value for name, value in self.variables.items() if value is not None}
        return {**known, **({TOKEN: token} if token else {})} or None

    @property
    def preparation(self) -> str | None:
        """``prepare``, or what the quickstart needs."""
        return self.prepare or (None if self.config else _QUICKSTART_PREPARATION)


@dataclass(frozen=True, kw_only=True)
class HostWorker:
    """A host of a slice.

    Attributes:
        node: gcloud's name of the slice.
        index: gcloud's number of the host in it.
        number: number among the learner's hosts, of which 0 leads, or among the rollout servers.
        alone: it is the learner's only host.
        address: address in the zone's network.
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
        addresses: addresses of the hosts of each slice, the servers' last.
        servers: slices of one host each that only sample.
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


def make_server_requests(request: SliceRequest, count: int, topology: Topology) -> list[SliceRequest]:
    """Return a slice of one host for each rollout server.

    Args:
        request: the learner's slices.
        count: rollout servers.
        topology: topology of each.

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
        why = "several hosts share no disk" if several else "a preempted slice loses its disk"
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


def pack(root: Path, target: Path, *, extra: dict[str, bytes]) -> list[str]:
    """Write the working tree, without the files that git ignores, to a ``.tar.gz``.

    Args:
        root: a git checkout.
        target: the file to write.
        extra: more files, by name.

    Returns:
        Files of more than 50 MB in it: models and data, perhaps.

    Raises:
        LaunchError: ``root`` is no git checkout.
    """
    listing = ["git", "-C", str(root), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        result = subprocess.run(listing, capture_output=True, text=True)
    except FileNotFoundError:
        raise LaunchError("git is not installed; it lists the files that go to the hosts") from None
    if result.returncode:
        raise LaunchError(
            f"{root} is no git checkout, so the files that go to the hosts are unknown: git init there, and let "
            f".gitignore name what stays here ({result.stderr.strip()})"
        )
    large = []
    with tarfile.open(target, "w:gz", compresslevel=3) as archive:
        for name in sorted(filter(None, result.stdout.split("\0"))):
            file = root / name
            if file.is_file() or file.is_symlink():  # not a deleted file that is still tracked
                archive.add(file, arcname=name, recursive=False)
                large += [name] if file.lstat().st_size > _MAX_CODE_BYTES else []
        for name, content in extra.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    return large


def copy(cloud: Gcloud, worker: HostWorker, archive: Path) -> Command:
    """Return the command that copies the archive to a host's home folder."""
    return cloud.command(worker.name, gcloud.scp(worker.node, worker.index, str(archive), ARCHIVE))


def set_up(cloud: Gcloud, worker: HostWorker, job: Job) -> Command:
    """Return the command that sets up code, environment, model and data, in one connection.

    Files of the previous copy are removed first, so that a file deleted here is deleted there; other files in the
    folder stay. Variables, if any, are read from its input.
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
        steps += [f'export PATH="{_VENV}/bin:$PATH"', prepare]
    return _on(cloud, worker, " && ".join(steps))


# --- the run -------------------------------------------------------------------------------------------------------


def start(cloud: Gcloud, worker: HostWorker, job: Job, *, resume: str | None, urls: Sequence[str] = ()) -> Command:
    """Return the command that starts the run on a host; learning hosts run the same one and find each other.

    Args:
        cloud: makes the command.
        worker: the host.
        job: what to run.
        resume: ``--resume``, ``--auto-resume`` or None.
        urls: addresses of the rollout servers, if any; with them or variables, the command reads secrets from its
            input.
    """
    supervisor = ["start", _folder(job), f"--host={worker.name}", *(["--secrets"] if urls or job.variables else [])]
    if job.kept:
        supervisor.append(f"--bucket={job.kept}")
        if worker.number == 0 and not worker.serves:
            supervisor += [f"--run-folder={job.run_folder}", *(["--restore"] if resume else [])]
    config = CONFIG if job.config else QUICKSTART
    if worker.serves:
        program = server_arguments(config, job)
    else:
        own = [f"run_dir={job.run_folder}", *(client_settings(job, urls) if urls else [])]
        own += [f"trainer.checkpoint_dir={job.kept}/checkpoints"] if job.kept else []
        own += [] if worker.alone else ["learner.multihost.coordinator=auto"]
        program = ["train", config, *job.overrides, *own, *([resume] if resume else [])]
    # A host whose chips cannot be opened fails instead of training on its processor.
    environment = 'export PYTHONUNBUFFERED=1 JAX_PLATFORMS="${JAX_PLATFORMS:-tpu,cpu}"'
    run = f'"{_VENV}/bin/python" -m jax_agent_rl.cli {shlex.join(program)}'
    return _on(cloud, worker, f"cd {CODE} && {environment} && {_remote(supervisor)} -- {run}")


def server_arguments(config: str, job: Job) -> list[str]:
    """Return the arguments of a rollout server."""
    listening = ["--host=0.0.0.0", f"--port={job.port}"]
    own = [f"rollout.token_env={TOKEN}", *([f"rollout.weight_dir={job.kept}/weights"] if job.kept else [])]
    return ["rollout-server", "--config", config, *listening, *job.overrides, *own]


def client_settings(job: Job, urls: Sequence[str]) -> list[str]:
    """Return the learner's settings for rollout servers at ``urls``."""
    own = ["rollout.backend=remote", f"rollout.urls=[{','.join(urls)}]", f"rollout.token_env={TOKEN}"]
    if job.kept:
        own += ["rollout.weight_transport=tensorstore", f"rollout.weight_dir={job.kept}/weights"]
    return own


def server_urls(workers: Sequence[HostWorker], job: Job) -> list[str]:
    """Return the URLs of the rollout servers among these."""
    return [f"http://{worker.address}:{job.port}" for worker in workers if worker.serves]


def until_listening(cloud: Gcloud, worker: HostWorker, job: Job) -> Command:
    """Return the command that ends when a host's rollout server listens, and fails if it has ended."""
    return _on(cloud, worker, f"cd {CODE} && {_remote(['listening', _folder(job), f'--port={job.port}'])}")


def follow(cloud: Gcloud, worker: HostWorker, job: Job) -> Command:
    """Return the command that prints the run's output on a host; the last line is its exit status."""
    return _on(cloud, worker, f"cd {CODE} && {_remote(['follow', _folder(job)])}")


def running(worker: HostWorker, job: Job) -> Call:
    """Return the call that prints ``yes`` if a run is under way on a host, else ``no``."""
    query = f"cd {CODE} && {_remote(['running', _folder(job)])}"
    return gcloud.ssh(worker.node, worker.index, f"if {query}; then echo yes; else echo no; fi")


def send(cloud: Gcloud, worker: HostWorker, job: Job, name: str) -> Command:
    """Return the command that signals the run on a host."""
    return _on(cloud, worker, f"cd {CODE} && {_remote(['signal', _folder(job), f'--signal={name}'])}")


def _folder(job: Job) -> str:
    return f"../{CODE}-runs/{job.name}"


def _remote(arguments: Sequence[str]) -> str:
    return f'"{_VENV}/bin/python" -m jax_agent_rl.deploy.launch.tpu.remote {shlex.join(arguments)}'


def _on(cloud: Gcloud, worker: HostWorker, command: str) -> Command:
    return cloud.command(worker.name, gcloud.ssh(worker.node, worker.index, command))
