"""The run of a launch as a job of a scheduler: SkyPilot, GKE (a JobSet) or Slurm. Templates: ``launch/templates``.

They queue, search zones and recover from preemptions. Every job starts with ``--auto-resume``: it continues from the
newest checkpoint in the bucket.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from jax_agent_rl.deploy.launch.command_line import render_template
from jax_agent_rl.deploy.launch.tpu import job
from jax_agent_rl.deploy.launch.tpu.job import Job
from jax_agent_rl.deploy.launch.tpu.topology import Topology
from jax_agent_rl.errors import LaunchError

KINDS = {"sky": "sky.yaml.j2", "gke": "gke.yaml.j2", "slurm": "slurm.sh.j2"}
TOKEN = "JAX_AGENT_RL_TOKEN"
"""Environment variable with the secret between the learner and rollout servers."""
SERVER_KEYS = tuple(f"rollout.{name}" for name in ("backend", "urls", "token_env", "weight_transport", "weight_dir"))
"""Keys that the job sets itself if there are rollout servers."""
_CONFIG = "/config/run.yaml"  # where a job sees the user's configuration


@dataclass(frozen=True, kw_only=True)
class SchedulerOptions:
    """What a scheduler is told besides the job."""

    zones: tuple[str, ...] = ()  # where SkyPilot looks for capacity: us-west4-a, or a whole region
    image: str | None = None  # container with the project in /app and its programs on PATH, for GKE
    rollout_hosts: int = 0  # hosts that only sample, each with an engine of its own
    rollout_topology: Topology | None = None  # slice of each of them; None: 4 chips of the learner's generation
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
    _require(kind, task, options)
    bucket, _, folder = (task.bucket or "").removeprefix("gs://").rstrip("/").partition("/")
    mounted = "/".join(part for part in ("/bucket", folder, task.name, "run") if part)
    config = str(task.config or job.QUICKSTART)
    if kind == "gke" or (kind == "sky" and task.config):
        config = _CONFIG
    own = [f"run_dir=runs/{task.name}" if kind == "slurm" else f"run_dir={mounted}"]
    serve: list[str] = []
    if options.rollout_hosts:
        # JobSet names pods by their job, and its service by itself; Slurm's names are known when the job runs.
        pods = [f"http://{task.name}-rollout-{i}-0.{task.name}:{options.port}" for i in range(options.rollout_hosts)]
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
        config_text=(task.config or root / job.QUICKSTART).read_text().rstrip("\n") if kind == "gke" else None,
        config_target=_CONFIG,
        train=shlex.join(["jax-agent-rl", *job.train(config, task, own, "--auto-resume")]),
        serve=shlex.join(serve),
    )


def _require(kind: str, task: Job, options: SchedulerOptions) -> None:
    asked = options.rollout_topology
    if asked and not options.rollout_hosts:
        raise LaunchError(f"--rollout-topology {asked} needs --rollout-hosts: give their number")
    if kind == "sky" and (task.slices > 1 or options.rollout_hosts):
        raise LaunchError("--render sky: its job is one slice; --slices and --rollout-hosts need --render gke or slurm")
    if asked and kind == "slurm":
        raise LaunchError(f"--rollout-topology {asked}: all nodes of a Slurm job are of one kind; leave it out")
    if asked and asked.hosts > 1:
        raise LaunchError(
            f"--rollout-topology {asked} has {asked.hosts} hosts, and an engine runs on one: choose a smaller one, and "
            "more of them with --rollout-hosts"
        )
    if options.rollout_hosts:
        job.require_overrides(task.overrides, job.OWN_KEYS + SERVER_KEYS)
    if kind == "gke" and options.image is None:
        raise LaunchError("--render gke: --image is missing: one with the project in /app, see docs/tpu.md")
    if task.bucket is None and (kind != "slurm" or options.rollout_hosts):
        why = "new weights go to --rollout-hosts through it" if kind == "slurm" else "hosts keep nothing"
        raise LaunchError(f"--render {kind}: --bucket gs://NAME is missing: {why}")
