"""The job of a launch: the calls that run it on a host, and the same job for a scheduler (SkyPilot, GKE, Slurm).

Schedulers queue, search zones and recover from preemptions. Their jobs start with
``--auto-resume``: they continue from the newest checkpoint in the bucket. Templates:
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

from jax_agent_rl.deploy.launch import render_template
from jax_agent_rl.deploy.launch.tpu.gcloud import Call, Topology
from jax_agent_rl.errors import LaunchError

ARCHIVE = "jax_agent_rl.tar.gz"
CODE = "jax_agent_rl"
"""Folder of the project on every host, in the home folder."""
_COPIED = f"{CODE}.files"  # beside it: names of the files that were copied there
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
    """What to train, on what, and where it is stored."""

    name: str  # of the slice and of the run
    topology: Topology  # of each slice
    slices: int = 1  # a scheduler makes more
    spot: bool = False  # cheaper, and may be preempted at any time
    runtime: str  # software version of the VMs
    config: (
        Path | None
    )  # local YAML file; None: the quickstart, whose model and data every host fetches
    overrides: tuple[str, ...]  # a.b=c
    bucket: str | None  # gs://… for checkpoints, small files and logs
    prepare: (
        str | None
    )  # shell command for every host before the run, in the project's folder: model and data
    install: bool = True  # create the environment first
    certify: bool = False  # measure the hosts with ``jax-agent-rl certify`` instead of training
    variables: Mapping[str, str | None] = field(
        default_factory=dict, repr=False
    )  # None: the value is not known here

    def __post_init__(self) -> None:
        if self.bucket is not None and not _BUCKET.fullmatch(self.bucket):
            raise LaunchError(f"--bucket {self.bucket!r} is no bucket: it has the form gs://NAME")

    def __str__(self) -> str:
        count = f"{self.slices} slices" if self.slices > 1 else "one slice"
        tier = "spot" if self.spot else "on demand"
        return f"{count} of {self.topology} ({self.topology.accelerator_type}, {tier})"

    @property
    def hosts(self) -> int:
        """Hosts of all slices."""
        return self.slices * self.topology.hosts

    @property
    def kept(self) -> str | None:
        """The run's place in the bucket."""
        return f"{self.bucket.rstrip('/')}/{self.name}" if self.bucket else None

    @property
    def preparation(self) -> str | None:
        """``prepare``, or what the quickstart needs; certifying fetches it by itself."""
        return self.prepare or (None if self.config or self.certify else _QUICKSTART_PREPARATION)

    def exports(self) -> str:
        """Return the shell commands that set the variables; they go to a host through its connection."""
        known = [f"{name}={value}" for name, value in self.variables.items() if value is not None]
        return f"export {shlex.join(known)}\n" if known else ""


def require_keepable(job: Job) -> None:
    """Raise :class:`LaunchError` if a run of several hosts, or a preemptible one, has no bucket."""
    if job.bucket is None and (job.hosts > 1 or job.spot):
        why = "several hosts share no disk" if job.hosts > 1 else "a preempted slice loses its disk"
        raise LaunchError(
            f"--bucket is missing: {why}; give --bucket gs://NAME, in the region of the zone"
        )


def require_overrides(overrides: Sequence[str], own: Sequence[str] = OWN_KEYS) -> None:
    """Raise :class:`LaunchError` for a malformed override, or one of a key in ``own``: it would have no effect."""
    for item in overrides:
        if "=" not in item:
            raise LaunchError(f"override {item!r}: write key.path=value")
        if item.partition("=")[0].strip() in own:
            raise LaunchError(f"{item}: tpu_pod.sh sets {', '.join(own)} itself; leave it out")


def pack(root: Path, target: Path, *, extra: Mapping[str, bytes]) -> None:
    """Write the working tree, without the files that git ignores, to a ``.tar.gz``.

    Args:
        root: a git checkout.
        target: the file to write.
        extra: more files, by name.

    Raises:
        LaunchError: ``root`` is no git checkout.
    """
    listing = [
        "git",
        "-C",
        str(root),
        "ls-files",
        "-z",
        "--cached",
        "--others",
        "--exclude-standard",
    ]
    try:
        result = subprocess.run(listing, capture_output=True, text=True, timeout=GIT_SECONDS)
    except subprocess.TimeoutExpired:
        raise LaunchError(
            f"`git ls-files` in {root} took longer than {GIT_SECONDS:g} seconds; is its disk gone?"
        ) from None
    if result.returncode:
        raise LaunchError(
            f"{root} is no git checkout, so the files that go to the hosts are unknown: git init"
            f" there, and let .gitignore name what stays here ({result.stderr.strip()})"
        )
    with tarfile.open(target, "w:gz", compresslevel=3) as archive:
        for name in sorted(filter(None, result.stdout.split("\0"))):
            if os.path.lexists(root / name):  # not a deleted file that is still tracked
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
        f"touch ../{_COPIED}",
        f"xargs -d '\\n' rm -f -- < ../{_COPIED}",
    ]
    steps += [f"tar -xzvf ../{ARCHIVE} --quoting-style=literal > ../{_COPIED}"]
    if job.install:
        steps += ["./launch/tpu_environment.sh", *(_CERTIFY_PACKAGES if job.certify else ())]
    steps += [f'export PATH="{_VENV}/bin:$PATH"', f"({job.preparation})"] if job.preparation else []
    return _ssh(job, host, *_read_variables(job), *steps)


def start(job: Job, host: int, *, resume: bool) -> Call:
    """Return the call that starts the run on a host; all run the same command and find each other."""
    # A host whose chips cannot be opened fails instead of training on its processor.
    environment = ["PYTHONUNBUFFERED=1", 'JAX_PLATFORMS="${JAX_PLATFORMS:-tpu,cpu}"']
    if job.kept:
        environment += [f"RUN_BUCKET={job.kept}", f"RUN_HOST=host-{host}"]
        if host == 0:  # which writes the small files
            environment += [f"RUN_FOLDER=runs/{job.name}", *(["RUN_RESTORE=1"] if resume else [])]
    together = ["learner.multihost.coordinator=auto"] if job.hosts > 1 else []
    if job.certify:
        program = certify(job, together)
    else:
        own = [f"run_dir=runs/{job.name}", *together]
        program = train(
            CONFIG if job.config else QUICKSTART, job, own, *(["--resume"] if resume else [])
        )
    run = f'"{_VENV}/bin/python" -m jax_agent_rl.cli {shlex.join(program)}'
    return on_host(
        job, host, "start", run, before=[*_read_variables(job), f"export {' '.join(environment)}"]
    )


def train(config: str, job: Job, own: Sequence[str], *options: str) -> list[str]:
    """Return the arguments of ``jax-agent-rl`` that train, on the launcher's hosts and under every scheduler.

    Args:
        config: configuration file, as a host sees it.
        job: the job.
        own: settings that depend on how it is started.
        options: further ones.
    """
    kept = [f"trainer.checkpoint_dir={job.kept}/checkpoints"] if job.kept else []
    return ["train", config, *job.overrides, *own, *kept, *options]


def certify(job: Job, own: Sequence[str]) -> list[str]:
    """Return the arguments of ``jax-agent-rl`` that certify, with settings that depend on how it is started."""
    config = ["--config", CONFIG] if job.config else []
    shared = [f"trainer.checkpoint_dir={job.kept}/checkpoints"] if job.hosts > 1 else []
    return ["certify", *config, f"--out=runs/{job.name}", *job.overrides, *own, *shared]


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
        job: the job.
        host: the host's number.
        action: ``start``, ``follow``, ``running`` or ``signal``; the script describes them.
        words: what follows on the command line.
        before: shell commands that come before it.
    """
    call = " ".join(["./launch/tpu_host.sh", action, f"../{CODE}-runs/{job.name}", *words])
    return _ssh(job, host, f"cd {CODE}", *before, call)


def _ssh(job: Job, host: int, *steps: str) -> Call:
    """Return the call that runs shell commands on one host (``--worker=all`` mixes lines and needs ssh-agent)."""
    return ("ssh", job.name, f"--worker={host}", f"--command={' && '.join(steps)}")


def _read_variables(job: Job) -> list[str]:
    # Empty if the connection broke, and gcloud runs the command again.
    return (
        ['variables="$(cat)"', '[ -n "$variables" ]', 'eval "$variables"'] if job.variables else []
    )


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
    """What a scheduler is told besides the job."""

    zones: tuple[str, ...] = ()  # where SkyPilot looks for capacity: us-west4-a, or a whole region
    image: str | None = None  # container with the project in /app and its programs on PATH, for GKE
    rollout_hosts: int = 0  # hosts that only sample, each with an engine of its own
    rollout_topology: Topology | None = (
        None  # slice of each of them; None: 4 chips of the learner's generation
    )
    port: int = 8100  # where they listen


def render(kind: str, task: Job, options: SchedulerOptions, *, root: Path) -> str:
    """Render a template of ``launch/templates``.

    Args:
        kind: a key of :data:`KINDS`.
        task: what to run.
        options: for the scheduler.
        root: the project's folder.

    Raises:
        LaunchError: an option that the scheduler needs is missing, or cannot be met.
    """
    _require_options(kind, task, options)
    bucket, _, folder = (task.bucket or "").removeprefix("gs://").rstrip("/").partition("/")
    mounted = "/".join(part for part in ("/bucket", folder, task.name, "run") if part)
    config = str(task.config or QUICKSTART)
    if kind == "gke" or (kind == "sky" and task.config):
        config = _MOUNTED_CONFIG
    own = [f"run_dir=runs/{task.name}" if kind == "slurm" else f"run_dir={mounted}"]
    serve: list[str] = []
    if options.rollout_hosts:
        # JobSet names pods by their job, and its service by itself; Slurm's names are known when
        # the job runs.
        pods = [
            f"http://{task.name}-rollout-{i}-0.{task.name}:{options.port}"
            for i in range(options.rollout_hosts)
        ]
        urls = "@urls@" if kind == "slurm" else ",".join(pods)
        token, weights = f"rollout.token_env={TOKEN}", f"rollout.weight_dir={task.kept}/weights"
        own += ["rollout.backend=remote", f"rollout.urls=[{urls}]", token]
        own += ["rollout.weight_transport=tensorstore", weights]
        listening = ["--config", config, "--host=0.0.0.0", f"--port={options.port}"]
        serve = ["jax-agent-rl", "rollout-server", *listening, *task.overrides, token, weights]
    if task.hosts > 1 and kind != "sky":  # whose job names the coordinator
        own += ["learner.multihost.coordinator=auto"]
    return render_template(
        KINDS[kind],
        task=task,
        options=options,
        token=TOKEN,
        given={name: value for name, value in task.variables.items() if value is not None},
        inherited=[name for name, value in task.variables.items() if value is None],
        bucket=bucket,
        # us-west4/us-west4-a; a region without a zone stays as it is.
        places=[re.sub(r"^(.+)-[a-z]$", r"\1/\g<0>", zone) for zone in options.zones],
        config_text=(
            (task.config or root / QUICKSTART).read_text().rstrip("\n") if kind == "gke" else None
        ),
        config_target=_MOUNTED_CONFIG,
        train=shlex.join(["jax-agent-rl", *train(config, task, own, "--auto-resume")]),
        serve=shlex.join(serve),
    )


def _require_options(kind: str, task: Job, options: SchedulerOptions) -> None:
    asked = options.rollout_topology
    if asked and not options.rollout_hosts:
        raise LaunchError(f"--rollout-topology {asked} needs --rollout-hosts: give their number")
    if kind == "sky" and (task.slices > 1 or options.rollout_hosts):
        raise LaunchError(
            "--render sky: its job is one slice; --slices and --rollout-hosts need --render gke or"
            " slurm"
        )
    if asked and kind == "slurm":
        raise LaunchError(
            f"--rollout-topology {asked}: all nodes of a Slurm job are of one kind; leave it out"
        )
    if asked and asked.hosts > 1:
        raise LaunchError(
            f"--rollout-topology {asked} has {asked.hosts} hosts, and an engine runs on one: choose"
            " a smaller one, and more of them with --rollout-hosts"
        )
    if options.rollout_hosts:
        require_overrides(task.overrides, OWN_KEYS + SERVER_KEYS)
    if kind == "gke" and options.image is None:
        raise LaunchError(
            "--render gke: --image is missing: one with the project in /app, see docs/tpu.md"
        )
    if task.bucket is None and (kind != "slurm" or options.rollout_hosts):
        why = (
            "new weights go to --rollout-hosts through it"
            if kind == "slurm"
            else "hosts keep nothing"
        )
        raise LaunchError(f"--render {kind}: --bucket gs://NAME is missing: {why}")
