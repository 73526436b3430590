"""The run of a launch as a job of a scheduler: SkyPilot, GKE (a JobSet) or Slurm. Templates: ``launch/templates``.

They queue, search zones and recover from preemptions. Every job starts with ``--auto-resume``: it continues from the
newest checkpoint in the bucket.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jax_agent_rl.deploy.launch.tpu import job
from jax_agent_rl.deploy.launch.tpu.job import Job
from jax_agent_rl.deploy.launch.tpu.topology import Topology
from jax_agent_rl.errors import LaunchError

KINDS = {"sky": "sky.yaml.j2", "gke": "gke.yaml.j2", "slurm": "slurm.sh.j2"}
REFUSED = 2
"""Exit status of a run that a user has to correct."""
TOKEN = "JAX_AGENT_RL_TOKEN"
"""Environment variable with the secret between the learner and rollout servers."""
SERVER_KEYS = tuple(f"rollout.{name}" for name in ("backend", "urls", "token_env", "weight_transport", "weight_dir"))
"""Keys that the job sets itself if there are rollout servers."""
_CONFIG = "/config/run.yaml"  # where a job sees the user's configuration
_URLS = "@urls@"  # stands for what a shell will know
_BUCKET = "/bucket"  # where jobs see the bucket


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
    context = {"sky": _sky, "gke": _gke, "slurm": _slurm}[kind](task, options, root)
    try:
        import jinja2
    except ImportError:
        raise LaunchError(
            "--render needs jinja2: pip install jinja2, or PYTHON=.venv/bin/python of an environment that has it"
        ) from None
    loader = jinja2.FileSystemLoader(root / "launch" / "templates")
    environment = jinja2.Environment(loader=loader, undefined=jinja2.StrictUndefined, keep_trailing_newline=True)
    environment.filters |= {"quoted": shlex.quote, "json": json.dumps}
    common = {
        "request": str(task),
        "name": task.name,
        "spot": task.spot,
        "port": options.port,
        "token": TOKEN,
        "servers": options.rollout_hosts,
        "given": {name: value for name, value in task.variables.items() if value is not None},
        "inherited": [name for name, value in task.variables.items() if value is None],
    }
    return environment.get_template(KINDS[kind]).render({**context, **common})


def _require(kind: str, task: Job, options: SchedulerOptions) -> None:
    asked = options.rollout_topology
    if asked and not options.rollout_hosts:
        raise LaunchError(f"--rollout-topology {asked.name} needs --rollout-hosts: give their number")
    if kind == "sky" and (task.slices > 1 or options.rollout_hosts):
        raise LaunchError("--render sky: its job is one slice; --slices and --rollout-hosts need --render gke or slurm")
    if asked and kind == "slurm":
        raise LaunchError(f"--rollout-topology {asked.name}: all nodes of a Slurm job are of one kind; leave it out")
    if asked and asked.hosts > 1:
        raise LaunchError(
            f"--rollout-topology {asked.name} has {asked.hosts} hosts, and an engine runs on one: choose a smaller "
            "one, and more of them with --rollout-hosts"
        )
    if options.rollout_hosts:
        job.require_overrides(task.overrides, job.OWN_KEYS + SERVER_KEYS)
    if kind == "gke" and options.image is None:
        raise LaunchError("--render gke: --image is missing: one with the project in /app, see docs/tpu.md")
    if task.bucket is None and (kind != "slurm" or options.rollout_hosts):
        why = "new weights go to --rollout-hosts through it" if kind == "slurm" else "hosts keep nothing"
        raise LaunchError(f"--render {kind}: --bucket gs://NAME is missing: {why}")


def _sky(task: Job, options: SchedulerOptions, root: Path) -> Mapping[str, Any]:
    bucket, run_dir = _mounted(task)
    config = _CONFIG if task.config else job.QUICKSTART
    return {
        # us-west4/us-west4-a; a region without a zone stays as it is.
        "places": [re.sub(r"^(.+)-[a-z]$", r"\1/\g<0>", zone) for zone in options.zones],
        "accelerator": f"tpu-{task.topology.accelerator_type}",
        "runtime": task.runtime,
        "bucket_name": bucket,
        "config": str(task.config) if task.config else None,
        "config_target": _CONFIG,
        "install": task.install,
        "prepare": task.preparation,
        "several": task.hosts > 1,
        "command": shlex.join(_train(config, task, [f"run_dir={run_dir}"])),
    }


def _gke(task: Job, options: SchedulerOptions, root: Path) -> Mapping[str, Any]:
    bucket, run_dir = _mounted(task)
    own = [f"run_dir={run_dir}"]
    # JobSet names pods by their job, and its service by itself.
    urls = [f"http://{task.name}-rollout-{i}-0.{task.name}:{options.port}" for i in range(options.rollout_hosts)]
    own += _client_settings(task, urls) if urls else []
    own += ["learner.multihost.coordinator=auto"] if task.hosts > 1 else []
    return {
        "config": (task.config or root / job.QUICKSTART).read_text().rstrip("\n"),
        "refused": REFUSED,
        "slices": task.slices,
        "learner": _pods(task.topology, task, _train(_CONFIG, task, own)),
        "server": _pods(options.rollout_topology or task.topology.one_host, task, _serve(_CONFIG, task, options)),
        "image": options.image,
        "bucket_name": bucket,
    }


def _pods(topology: Topology, task: Job, program: list[str]) -> Mapping[str, Any]:
    command = f"exec {shlex.join(program)}"
    return {
        "hosts": topology.hosts,
        "accelerator": topology.kind.gke,
        "shape": topology.shape,
        "chips": topology.chips // topology.hosts,
        "command": f"({task.preparation}) && {command}" if task.preparation else command,
    }


def _slurm(task: Job, options: SchedulerOptions, root: Path) -> Mapping[str, Any]:
    own = [f"run_dir=runs/{task.name}"]
    own += _client_settings(task, [_URLS]) if options.rollout_hosts else []
    own += ["learner.multihost.coordinator=auto"] if task.hosts > 1 else []
    config = str(task.config) if task.config else job.QUICKSTART
    return {
        "nodes": task.hosts,
        "prepare": task.preparation,
        # The hosts' names are known when the job runs.
        "command": shlex.join(_train(config, task, own)).replace(_URLS, "'\"$urls\"'"),
        "serve": shlex.join(_serve(config, task, options)),
    }


def _mounted(task: Job) -> tuple[str, str]:
    """Return the bucket's name, and the run folder where a job sees the bucket as a folder."""
    bucket, _, folder = (task.bucket or "").removeprefix("gs://").rstrip("/").partition("/")
    return bucket, "/".join(part for part in (_BUCKET, folder, task.name, "run") if part)


def _train(config: str, task: Job, own: Sequence[str]) -> list[str]:
    return ["jax-agent-rl", *job.train(config, task, own, "--auto-resume")]


def _serve(config: str, task: Job, options: SchedulerOptions) -> list[str]:
    own = [f"rollout.token_env={TOKEN}", *([f"rollout.weight_dir={task.kept}/weights"] if task.kept else [])]
    listening = ["--host=0.0.0.0", f"--port={options.port}"]
    return ["jax-agent-rl", "rollout-server", "--config", config, *listening, *task.overrides, *own]


def _client_settings(task: Job, urls: Sequence[str]) -> list[str]:
    own = ["rollout.backend=remote", f"rollout.urls=[{','.join(urls)}]", f"rollout.token_env={TOKEN}"]
    return [*own, "rollout.weight_transport=tensorstore", f"rollout.weight_dir={task.kept}/weights"]
