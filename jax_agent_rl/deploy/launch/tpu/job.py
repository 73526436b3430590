"""The job of a launch: the calls that run it on a host, and the same job for a scheduler.

Schedulers (SkyPilot, GKE, Slurm) queue, search zones and recover from preemptions. Their jobs start
with ``--auto-resume``: they continue from the newest checkpoint in the bucket. Templates:
``launch/templates``.
"""

from __future__ import annotations

import io
import os
import re
import shlex
import subprocess
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from jax_agent_rl.deploy.launch.templates import render_template
from jax_agent_rl.deploy.launch.tpu.gcloud import Call, Topology
from jax_agent_rl.errors import LaunchError

ARCHIVE = "jax_agent_rl.tar.gz"
CODE = "jax_agent_rl"
"""Folder of the project on every host, in the home folder."""
_FILE_LIST = f"{CODE}.files"  # next to that folder: names of the files that were copied there
CONFIG = "tpu_pod.yaml"
"""Name of the user's configuration in that folder."""
GIT_SECONDS = 120.0
QUICKSTART = "configs/quickstart.yaml"
_QUICKSTART_PREPARATION = "jax-agent-rl fetch-model && jax-agent-rl prepare shop --out data/shop"
_VENV = f"${{JAX_AGENT_RL_VENV:-$HOME/{CODE}/.venv-tpu}}"  # expanded by the host's shell
# The conformance suite's reference runs on torch; without an index of CPU builds, Linux gets
# several GB of CUDA.
_CERTIFY_PACKAGES = (
    f'"{_VENV}/bin/python" -m pip install --quiet "pytest>=8.4"',
    (
        f'"{_VENV}/bin/python" -m pip install --quiet --index-url'
        ' https://download.pytorch.org/whl/cpu "torch>=2.11"'
    ),
)
_BUCKET = re.compile(r"gs://[a-z0-9][-a-z0-9._]*(/.*)?")

OWN_KEYS = ("run_dir", "trainer.checkpoint_dir", "learner.multihost.coordinator")
"""Keys that the launcher sets itself."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """What to train, on what, and where it is stored.

    Attributes:
        name: name of the slice and of the run.
        topology: chips of each slice.
        slices: number of slices; only a scheduler makes more than one.
        spot: slices are cheaper, and may be preempted at any time.
        runtime: software version of the VMs.
        config: local YAML file; None: the quickstart, whose model and data every host fetches.
        overrides: ``a.b=c``.
        bucket: ``gs://…`` for checkpoints, small files and logs.
        prepare: shell command for every host before the run, in the project's folder, to fetch
            model and data.
        install: create the environment first.
        certify: measure the hosts with ``jax-agent-rl certify`` instead of training.
        variables: environment of ``prepare`` and the run; None: the value is not known here.
    """

    name: str
    topology: Topology
    slices: int = 1
    spot: bool = False
    runtime: str
    config: Path | None
    overrides: tuple[str, ...]
    bucket: str | None
    prepare: str | None
    install: bool = True
    certify: bool = False
    variables: Mapping[str, str | None] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        if self.bucket is not None and not _BUCKET.fullmatch(self.bucket):
            raise LaunchError(
                f"--bucket {self.bucket!r} is not a bucket: it has the form gs://NAME"
            )

    def __str__(self) -> str:
        count = f"{self.slices} slices" if self.slices > 1 else "one slice"
        tier = "spot" if self.spot else "on demand"
        return f"{count} of {self.topology} ({self.topology.accelerator_type}, {tier})"

    @property
    def hosts(self) -> int:
        """Hosts of all slices."""
        return self.slices * self.topology.hosts

    @property
    def bucket_folder(self) -> str | None:
        """The run's folder in the bucket."""
        if not self.bucket:
            return None
        return f"{self.bucket.rstrip('/')}/{self.name}"

    @property
    def preparation(self) -> str | None:
        """``prepare``, or what the quickstart needs; certifying fetches it by itself."""
        if self.prepare:
            return self.prepare
        if self.config or self.certify:
            return None
        return _QUICKSTART_PREPARATION

    def exports(self) -> str:
        """Return the shell commands that set the variables.

        They go to a host through its connection.
        """
        assignments = []
        for name, value in self.variables.items():
            if value is not None:
                assignments.append(f"{name}={value}")
        if not assignments:
            return ""
        return f"export {shlex.join(assignments)}\n"


def require_keepable(job: Job) -> None:
    """Raise :class:`LaunchError` if a run of several hosts, or a preemptible one, has no bucket."""
    if job.bucket is not None:
        return
    if job.hosts > 1:
        reason = "several hosts share no disk"
    elif job.spot:
        reason = "a preempted slice loses its disk"
    else:
        return
    raise LaunchError(
        f"--bucket is missing: {reason}; give --bucket gs://NAME, in the region of the zone"
    )


def require_overrides(overrides: Sequence[str], reserved: Sequence[str] = OWN_KEYS) -> None:
    """Raise :class:`LaunchError` for an override that is malformed or would have no effect.

    Args:
        reserved: keys that the launcher sets itself.
    """
    for item in overrides:
        key, separator, _ = item.partition("=")
        if not separator:
            raise LaunchError(f"override {item!r}: write key.path=value")
        if key.strip() in reserved:
            raise LaunchError(f"{item}: tpu_pod.sh sets {', '.join(reserved)} itself; leave it out")


def pack(root: Path, target: Path, *, extra: Mapping[str, bytes]) -> None:
    """Write the working tree, without the files that git ignores, to a ``.tar.gz``.

    Args:
        root: a git checkout.
        target: the file to write.
        extra: contents of further files, by name.

    Raises:
        LaunchError: ``root`` is not a git checkout.
    """
    list_files = ["git", "-C", str(root), "ls-files", "-z"]
    list_files += ["--cached", "--others", "--exclude-standard"]
    try:
        result = subprocess.run(list_files, capture_output=True, text=True, timeout=GIT_SECONDS)
    except subprocess.TimeoutExpired:
        raise LaunchError(
            f"`git ls-files` in {root} took longer than {GIT_SECONDS:g} seconds; is its disk gone?"
        ) from None
    if result.returncode:
        raise LaunchError(
            f"{root} is not a git checkout, so the files that go to the hosts are unknown: git init"
            f" there, and let .gitignore name what stays here ({result.stderr.strip()})"
        )

    with tarfile.open(target, "w:gz", compresslevel=3) as archive:
        for name in sorted(filter(None, result.stdout.split("\0"))):
            if os.path.lexists(root / name):  # a deleted file may still be tracked
                archive.add(root / name, arcname=name, recursive=False)
        for name, content in extra.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))


def set_up(job: Job, host: int) -> Call:
    """Return the call that sets up code, environment, model and data, in one connection.

    Files of the previous copy are removed first, so that a file deleted here is deleted there;
    other files in the folder stay.
    """
    steps = [
        f"mkdir -p {CODE}",
        f"cd {CODE}",
        f"touch ../{_FILE_LIST}",
        f"xargs -d '\\n' rm -f -- < ../{_FILE_LIST}",
        f"tar -xzvf ../{ARCHIVE} --quoting-style=literal > ../{_FILE_LIST}",
    ]
    if job.install:
        steps.append("./launch/tpu_environment.sh")
        if job.certify:
            steps += _CERTIFY_PACKAGES
    if job.preparation:
        steps.append(f'export PATH="{_VENV}/bin:$PATH"')
        steps.append(f"({job.preparation})")
    return _ssh(job, host, *_read_variables(job), *steps)


def start(job: Job, host: int, *, resume: bool) -> Call:
    """Return the call that starts the run on a host.

    All hosts run the same command and find each other.
    """
    # A host whose chips cannot be opened fails instead of training on its processor.
    environment = ["PYTHONUNBUFFERED=1", 'JAX_PLATFORMS="${JAX_PLATFORMS:-tpu,cpu}"']
    if job.bucket_folder:
        environment += [f"RUN_BUCKET={job.bucket_folder}", f"RUN_HOST=host-{host}"]
        if host == 0:  # it writes the small files
            environment.append(f"RUN_FOLDER=runs/{job.name}")
            if resume:
                environment.append("RUN_RESTORE=1")

    overrides = []
    if job.hosts > 1:
        overrides.append("learner.multihost.coordinator=auto")
    if job.certify:
        program = certify(job, overrides)
    else:
        config = CONFIG if job.config else QUICKSTART
        program = train(config, job, [f"run_dir=runs/{job.name}", *overrides])
        if resume:
            program.append("--resume")

    run = f'"{_VENV}/bin/python" -m jax_agent_rl.cli {shlex.join(program)}'
    before = [*_read_variables(job), f"export {' '.join(environment)}"]
    return on_host(job, host, "start", run, before=before)


def train(config: str, job: Job, overrides: Sequence[str]) -> list[str]:
    """Return the arguments of ``jax-agent-rl`` that train, on hosts and under every scheduler.

    Args:
        config: configuration file, as a host sees it.
        overrides: what depends on how the job is started.
    """
    arguments = ["train", config, *job.overrides, *overrides]
    if job.bucket_folder:
        arguments.append(f"trainer.checkpoint_dir={job.bucket_folder}/checkpoints")
    return arguments


def certify(job: Job, overrides: Sequence[str]) -> list[str]:
    """Return the arguments of ``jax-agent-rl`` that certify.

    Args:
        overrides: what depends on how the job is started.
    """
    arguments = ["certify"]
    if job.config:
        arguments += ["--config", CONFIG]
    arguments += [f"--out=runs/{job.name}", *job.overrides, *overrides]
    if job.hosts > 1:
        arguments.append(f"trainer.checkpoint_dir={job.bucket_folder}/checkpoints")
    return arguments


def plan(job: Job) -> list[str]:
    """Return the arguments of ``jax-agent-rl`` that check meshes and memory without a TPU."""
    return [
        "plan",
        f"--config={job.config or QUICKSTART}",
        f"--topology={job.topology}",
        *job.overrides,
    ]


def on_host(job: Job, host: int, action: str, *words: str, before: Sequence[str] = ()) -> Call:
    """Return the call of ``launch/tpu_host.sh`` for the run on a host.

    Args:
        host: the host's number.
        action: ``start``, ``follow``, ``running`` or ``signal``; the script describes them.
        words: what follows on the command line.
        before: shell commands that come before it.
    """
    call = " ".join(["./launch/tpu_host.sh", action, f"../{CODE}-runs/{job.name}", *words])
    return _ssh(job, host, f"cd {CODE}", *before, call)


def _ssh(job: Job, host: int, *steps: str) -> Call:
    """Return the call that runs shell commands on one host.

    ``--worker=all`` would mix lines, and needs ssh-agent.
    """
    return ("ssh", job.name, f"--worker={host}", f"--command={' && '.join(steps)}")


def _read_variables(job: Job) -> list[str]:
    """Return the shell commands that read :meth:`Job.exports` from standard input."""
    if not job.variables:
        return []
    # They are empty if the connection broke, and gcloud runs the command again.
    return ['variables="$(cat)"', '[ -n "$variables" ]', 'eval "$variables"']


# --- schedulers -----------------------------------------------------------------------------------

KINDS = {"sky": "sky.yaml.j2", "gke": "gke.yaml.j2", "slurm": "slurm.sh.j2"}
TOKEN = "JAX_AGENT_RL_TOKEN"
"""Environment variable with the secret between the learner and rollout servers."""
SERVER_KEYS = tuple(
    f"rollout.{name}" for name in ("backend", "urls", "token_env", "weight_transport", "weight_dir")
)
"""Keys that the job sets itself if there are rollout servers."""
_MOUNTED_CONFIG = "/config/run.yaml"  # where a job sees the user's configuration


@dataclass(frozen=True, kw_only=True)
class SchedulerOptions:
    """What a scheduler is told besides the job.

    Attributes:
        zones: where SkyPilot looks for capacity: ``us-west4-a``, or a whole region.
        image: container with the project in /app and its programs on PATH, for GKE.
        rollout_hosts: hosts that only sample, each with an engine of its own.
        rollout_topology: slice of each of them; None: 4 chips of the learner's generation.
        port: where rollout hosts listen.
    """

    zones: tuple[str, ...] = ()
    image: str | None = None
    rollout_hosts: int = 0
    rollout_topology: Topology | None = None
    port: int = 8100


def render(kind: str, task: Job, options: SchedulerOptions, *, root: Path) -> str:
    """Render a template of ``launch/templates``.

    Args:
        kind: a key of :data:`KINDS`.
        root: the project's folder.

    Raises:
        LaunchError: an option that the scheduler needs is missing, or cannot be met.
    """
    _require_options(kind, task, options)
    bucket, _, folder = (task.bucket or "").removeprefix("gs://").rstrip("/").partition("/")
    config = str(task.config or QUICKSTART)
    if kind == "gke" or (kind == "sky" and task.config):
        config = _MOUNTED_CONFIG

    if kind == "slurm":
        overrides = [f"run_dir=runs/{task.name}"]
    else:
        mounted = "/".join(part for part in ("/bucket", folder, task.name, "run") if part)
        overrides = [f"run_dir={mounted}"]

    serve: list[str] = []
    if options.rollout_hosts:
        urls = _rollout_urls(kind, task, options)
        token = f"rollout.token_env={TOKEN}"
        weights = f"rollout.weight_dir={task.bucket_folder}/weights"
        overrides += ["rollout.backend=remote", f"rollout.urls=[{urls}]", token]
        overrides += ["rollout.weight_transport=tensorstore", weights]
        serve = ["jax-agent-rl", "rollout-server", "--config", config, "--host=0.0.0.0"]
        serve += [f"--port={options.port}", *task.overrides, token, weights]
    if task.hosts > 1 and kind != "sky":  # SkyPilot's job names the coordinator itself
        overrides.append("learner.multihost.coordinator=auto")

    given = {}
    inherited = []  # variables whose values are not known here
    for name, value in task.variables.items():
        if value is None:
            inherited.append(name)
        else:
            given[name] = value
    config_text = None
    if kind == "gke":
        config_text = (task.config or root / QUICKSTART).read_text().rstrip("\n")
    return render_template(
        KINDS[kind],
        task=task,
        options=options,
        token=TOKEN,
        given=given,
        inherited=inherited,
        bucket=bucket,
        # us-west4/us-west4-a; a region without a zone stays as it is.
        places=[re.sub(r"^(.+)-[a-z]$", r"\1/\g<0>", zone) for zone in options.zones],
        config_text=config_text,
        config_target=_MOUNTED_CONFIG,
        train=shlex.join(["jax-agent-rl", *train(config, task, overrides), "--auto-resume"]),
        serve=shlex.join(serve),
    )


def _rollout_urls(kind: str, task: Job, options: SchedulerOptions) -> str:
    """Return the addresses of the rollout hosts, with commas between them."""
    if kind == "slurm":  # its names are known when the job runs
        return "@urls@"
    urls = []
    for number in range(options.rollout_hosts):
        # JobSet names pods by their job, and its service by itself.
        urls.append(f"http://{task.name}-rollout-{number}-0.{task.name}:{options.port}")
    return ",".join(urls)


def _require_options(kind: str, task: Job, options: SchedulerOptions) -> None:
    """Raise LaunchError if an option is missing, or asks for what the scheduler cannot do."""
    topology = options.rollout_topology
    if topology and not options.rollout_hosts:
        raise LaunchError(f"--rollout-topology {topology} needs --rollout-hosts: give their number")
    if kind == "sky" and (task.slices > 1 or options.rollout_hosts):
        raise LaunchError(
            "--render sky: its job is one slice; --slices and --rollout-hosts need --render gke or"
            " slurm"
        )
    if topology and kind == "slurm":
        raise LaunchError(
            f"--rollout-topology {topology}: all nodes of a Slurm job are of one kind; leave it out"
        )
    if topology and topology.hosts > 1:
        raise LaunchError(
            f"--rollout-topology {topology} has {topology.hosts} hosts, and an engine runs on one:"
            " choose a smaller one, and more of them with --rollout-hosts"
        )
    if options.rollout_hosts:
        require_overrides(task.overrides, OWN_KEYS + SERVER_KEYS)
    if kind == "gke" and options.image is None:
        raise LaunchError(
            "--render gke: --image is missing: one with the project in /app, see docs/tpu.md"
        )
    if task.bucket is None and (kind != "slurm" or options.rollout_hosts):
        reason = "hosts keep nothing"
        if kind == "slurm":
            reason = "new weights go to --rollout-hosts through it"
        raise LaunchError(f"--render {kind}: --bucket gs://NAME is missing: {reason}")
