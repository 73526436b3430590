"""The same run for schedulers that have machines of their own: a GKE JobSet, a Slurm job."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jax_agent_rl.deploy.launch.tpu import job
from jax_agent_rl.deploy.launch.tpu.gcloud import SliceRequest
from jax_agent_rl.deploy.launch.tpu.job import REFUSED, Job
from jax_agent_rl.deploy.launch.tpu.topology import Topology
from jax_agent_rl.errors import LaunchError

CONFIG = "/config/run.yaml"
"""Where pods see the user's configuration."""
URLS = "@urls@"
"""Stands for addresses that a shell will know."""
KINDS = {"gke": "gke.yaml.j2", "slurm": "slurm.sh.j2"}


def render(
    kind: str,
    request: SliceRequest,
    task: Job,
    *,
    servers: Sequence[SliceRequest] = (),
    image: str | None,
    restarts: int,
    root: Path,
) -> str:
    """Render a template of ``launch/templates``.

    Args:
        kind: a key of :data:`KINDS`.
        request: the learner's slices.
        task: what to run.
        servers: slices of one host each, alike, that only sample.
        image: with the project in ``/app`` and its programs on PATH, for GKE.
        restarts: how often a lost host may start all of them again.
        root: the project's folder.

    Raises:
        LaunchError: something is missing that the scheduler needs.
    """
    if kind == "gke":
        context = _gke(request, task, servers, image, restarts, root)
    else:
        context = _slurm(request, task, servers)
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
        "request": str(request),
        "name": task.name,
        "port": task.port,
        "token": job.TOKEN,
        "servers": len(servers),
        "given": {name: value for name, value in task.variables.items() if value is not None},
        "brought": [name for name, value in task.variables.items() if value is None],
    }
    return environment.get_template(KINDS[kind]).render({**context, **common})


def _gke(
    request: SliceRequest, task: Job, servers: Sequence[SliceRequest], image: str | None, restarts: int, root: Path
) -> Mapping[str, Any]:
    if image is None:
        raise LaunchError("--render gke: --image is missing: one with the project in /app, see docs/tpu.md")
    if task.bucket is None or task.kept is None:
        raise LaunchError("--render gke: --bucket gs://NAME is missing: pods keep nothing")
    topology = request.topology
    _, _, rest = task.bucket.partition("gs://")
    bucket, _, folder = rest.rstrip("/").partition("/")
    run_dir = "/".join(part for part in ("/bucket", folder, task.name, "run") if part)
    own = [f"run_dir={run_dir}", f"trainer.checkpoint_dir={task.kept}/checkpoints"]
    if servers:  # JobSet names pods by their job, and its service by itself
        urls = [f"http://{task.name}-rollout-{i}-0.{task.name}:{task.port}" for i in range(len(servers))]
        own += job.asking(task, urls)
    config = (task.config or root / job.QUICKSTART).read_text()
    return {
        "config": config.rstrip("\n"),
        "restarts": restarts,
        "refused": REFUSED,
        "slices": request.slices,
        "learner": _pods(topology, task, _train(CONFIG, request, task, own)),
        "server": _pods(servers[0].topology, task, _serve(CONFIG, task)) if servers else None,
        "spot": request.spot,
        "image": image,
        "bucket_name": bucket,
    }


def _pods(topology: Topology, task: Job, program: list[str]) -> Mapping[str, Any]:
    """Return what the pods of a slice are."""
    command = f"exec {shlex.join(program)}"
    return {
        "hosts": topology.hosts,
        "accelerator": topology.kind.gke,
        "shape": topology.shape,
        "chips": topology.chips_per_host,
        "command": f"({task.preparation}) && {command}" if task.preparation else command,
    }


def _slurm(request: SliceRequest, task: Job, servers: Sequence[SliceRequest]) -> Mapping[str, Any]:
    if servers and task.kept is None:
        raise LaunchError("--render slurm: --bucket gs://NAME is missing: new weights go to --rollout-hosts through it")
    own = [f"run_dir={task.run_folder}"]
    own += [f"trainer.checkpoint_dir={task.kept}/checkpoints"] if task.kept else []
    config = str(task.config) if task.config else job.QUICKSTART
    train = shlex.join(_train(config, request, task, own + (job.asking(task, [URLS]) if servers else [])))
    return {
        "nodes": request.slices * request.topology.hosts,
        "prepare": task.preparation,
        "command": train.replace(URLS, "'\"$urls\"'"),  # the hosts' names are known when the job runs
        "serve": shlex.join(_serve(config, task)),
    }


def _serve(config: str, task: Job) -> list[str]:
    return ["jax-agent-rl", *job.serving(config, task)]


def _train(config: str, request: SliceRequest, task: Job, own: list[str]) -> list[str]:
    several = request.slices * request.topology.hosts > 1
    meet = ["learner.multihost.coordinator=auto"] if several else []
    return ["jax-agent-rl", "train", config, *task.overrides, *own, *meet, "--auto-resume"]
