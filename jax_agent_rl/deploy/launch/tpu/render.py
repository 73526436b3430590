"""A launch as text: its dry run, and the same run for other schedulers, as a GKE JobSet or a Slurm job."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jax_agent_rl.deploy.launch.hosts import Command
from jax_agent_rl.deploy.launch.tpu import gcloud, job
from jax_agent_rl.deploy.launch.tpu.gcloud import Gcloud, SliceRequest, Topology
from jax_agent_rl.deploy.launch.tpu.job import REFUSED, Job
from jax_agent_rl.errors import LaunchError

_CONFIG = "/config/run.yaml"  # where pods see the user's configuration
_URLS = "@urls@"  # stands for addresses that a shell will know
KINDS = {"gke": "gke.yaml.j2", "slurm": "slurm.sh.j2"}


def format_dry_run(
    request: SliceRequest, task: Job, cloud: Gcloud, *, resume: bool, keep: bool, servers: Sequence[SliceRequest] = ()
) -> list[str]:
    """Return every command of an undisturbed launch, in order: ``#`` explains, ``+`` begins a command.

    Hosts and slices of a stage work concurrently.

    Args:
        request: the learner's slices.
        task: what to run.
        cloud: makes the commands.
        resume: with ``--resume``.
        keep: with ``--keep``.
        servers: slices of one host each that only sample.
    """
    addresses = [("",) * request.topology.hosts] * request.slices + [(f"ADDRESS-OF-{s.name}",) for s in servers]
    hosts = job.workers(request, tuple(addresses), servers)
    learners, serving = hosts[: len(hosts) - len(servers)], hosts[len(hosts) - len(servers) :]
    urls, requests = job.server_urls(hosts, task), [request, *servers]
    code = Path("/tmp") / job.ARCHIVE

    def called(title: str, *arguments: Sequence[str]) -> list[str]:
        return [f"# {title}", *(f"+ {shlex.join(cloud.argv(a))}" for a in arguments)]

    def stage(title: str, commands: Sequence[Command]) -> list[str]:
        return [f"# {title}", *(f"+ {shlex.join(command.argv)}" for command in commands)]

    how = "--resume" if resume else None
    result = [f"# {request}: {len(learners)} host(s), {request.topology.chips_per_host} chips each"]
    result += [f"# {server.name}, to sample: {server}: 1 host, {server.topology.chips} chips" for server in servers]
    polls = [call for each in requests for call in gcloud.poll(each)]
    made = [call for each in requests for call in (gcloud.LIST_ACCELERATOR_TYPES, gcloud.create(each))]
    result += called("check the login", *cloud.login())
    result += called("does it exist already?", *polls)
    result += called("if not: check that the zone has such chips, and create it", *made)
    result += called("until it is ready", *polls)
    result += called("if it existed: only follow a run that is under way", job.running(learners[0], task))
    if task.variables:
        result.append(f"# {', '.join(task.variables)}: through the connection, to what prepares and what runs")
    result += stage("copy the code", [job.copy(cloud, worker, code) for worker in hosts])
    result += stage("unpack it, create the environment, prepare", [job.set_up(cloud, worker, task) for worker in hosts])
    if servers:
        title = "end processes of an earlier start"
        result += stage(title, [job.send(cloud, worker, task, "KILL") for worker in hosts])
        title = "start the rollout servers; a secret of this launch goes through the connection"
        result += stage(title, [job.start(cloud, worker, task, resume=None, urls=urls) for worker in serving])
        result += stage("until they serve", [job.until_listening(cloud, worker, task) for worker in serving])
    result += stage("start", [job.start(cloud, worker, task, resume=how, urls=urls) for worker in learners])
    result += stage("show their output", [job.follow(cloud, worker, task) for worker in hosts])
    result += called("meanwhile, repeatedly: was it preempted?", *polls)
    result.append("# on Ctrl-C, the run saves and ends")
    result.append(f"+ {shlex.join(job.send(cloud, hosts[0], task, 'INT').argv)}")
    if servers:
        title = "when the learner has ended, end the rollout servers"
        result += stage(title, [job.send(cloud, worker, task, "INT") for worker in serving])
    if task.kept:
        title = "if it is preempted: delete it, start again with --auto-resume"
        result += called(title, *map(gcloud.delete, requests))
    ending = "when the run has ended" if task.kept and not keep else "only when you give --delete"
    return result + called(ending, *map(gcloud.delete, requests))


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
        image: container with the project in ``/app`` and its programs on PATH, for GKE.
        restarts: limit of restarts of all hosts after one is lost.
        root: the project's folder.

    Raises:
        LaunchError: an option that the scheduler needs is missing.
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
        "inherited": [name for name, value in task.variables.items() if value is None],
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
        own += job.client_settings(task, urls)
    config = (task.config or root / job.QUICKSTART).read_text()
    return {
        "config": config.rstrip("\n"),
        "restarts": restarts,
        "refused": REFUSED,
        "slices": request.slices,
        "learner": _pods(topology, task, _train(_CONFIG, request, task, own)),
        "server": _pods(servers[0].topology, task, _serve(_CONFIG, task)) if servers else None,
        "spot": request.spot,
        "image": image,
        "bucket_name": bucket,
    }


def _pods(topology: Topology, task: Job, program: list[str]) -> Mapping[str, Any]:
    """Return the template's description of a slice's pods."""
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
    train = shlex.join(_train(config, request, task, own + (job.client_settings(task, [_URLS]) if servers else [])))
    return {
        "nodes": request.slices * request.topology.hosts,
        "prepare": task.preparation,
        "command": train.replace(_URLS, "'\"$urls\"'"),  # the hosts' names are known when the job runs
        "serve": shlex.join(_serve(config, task)),
    }


def _serve(config: str, task: Job) -> list[str]:
    return ["jax-agent-rl", *job.server_arguments(config, task)]


def _train(config: str, request: SliceRequest, task: Job, own: list[str]) -> list[str]:
    several = request.slices * request.topology.hosts > 1
    meet = ["learner.multihost.coordinator=auto"] if several else []
    return ["jax-agent-rl", "train", config, *task.overrides, *own, *meet, "--auto-resume"]
