"""What a launch would do, as text: ``#`` explains, ``+`` begins a command."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from jax_agent_rl.deploy.launch.hosts import Command
from jax_agent_rl.deploy.launch.tpu import gcloud, job
from jax_agent_rl.deploy.launch.tpu.gcloud import Gcloud, SliceRequest
from jax_agent_rl.deploy.launch.tpu.job import Job


def lines(
    request: SliceRequest, task: Job, cloud: Gcloud, *, resume: bool, keep: bool, servers: Sequence[SliceRequest] = ()
) -> list[str]:
    """Return every command of an undisturbed launch, in order; hosts or slices of a stage work concurrently.

    Args:
        request: the learner's slices.
        task: what to run.
        cloud: makes the commands.
        resume: with ``--resume``.
        keep: with ``--keep``.
        servers: slices that only sample.
    """
    addresses = [("",) * request.topology.hosts] * request.slices + [(f"ADDRESS-OF-{s.name}",) for s in servers]
    hosts = job.workers(request, tuple(addresses), servers)
    learners, serving = hosts[: len(hosts) - len(servers)], hosts[len(hosts) - len(servers) :]
    urls, requests = job.urls_of(hosts, task), [request, *servers]
    code = Path("/tmp") / job.ARCHIVE

    def called(title: str, *arguments: Sequence[str]) -> list[str]:
        return [f"# {title}", *(f"+ {shlex.join(cloud.argv(a))}" for a in arguments)]

    def stage(title: str, commands: Sequence[Command]) -> list[str]:
        return [f"# {title}", *(f"+ {shlex.join(command.argv)}" for command in commands)]

    how = "--resume" if resume else None
    result = [f"# {request}: {len(learners)} host(s), {request.topology.chips_per_host} chips each"]
    result += [f"# {server.name}, to sample: {server}: 1 host, {server.topology.chips} chips" for server in servers]
    looks = [question for each in requests for question in gcloud.look(each)]
    made = [call for each in requests for call in (gcloud.accelerator_types(), gcloud.create(each))]
    result += called("is somebody logged in?", *cloud.login())
    result += called("is it there already?", *looks)
    result += called("if not: does the zone have such chips? Then it is made", *made)
    result += called("until it is ready", *looks)
    result += called("if it was there: a run that is under way is only followed", job.running(learners[0], task))
    if task.variables:
        result.append(f"# {', '.join(task.variables)}: through the connection, to what prepares and what runs")
    result += stage("copy the code", [job.copy(cloud, worker, code) for worker in hosts])
    result += stage("unpack it, make the environment, prepare", [job.set_up(cloud, worker, task) for worker in hosts])
    if servers:
        title = "end what an earlier start has left"
        result += stage(title, [job.send(cloud, worker, task, "KILL") for worker in hosts])
        title = "start the rollout servers; a secret of this launch goes through the connection"
        result += stage(title, [job.start(cloud, worker, task, resume=None, urls=urls) for worker in serving])
        result += stage("until they serve", [job.until_listening(cloud, worker, task) for worker in serving])
    result += stage("start", [job.start(cloud, worker, task, resume=how, urls=urls) for worker in learners])
    result += stage("show what they say", [job.follow(cloud, worker, task) for worker in hosts])
    result += called("meanwhile, again and again: was it taken back?", *looks)
    result.append("# on Ctrl-C, the run saves and ends")
    result.append(f"+ {shlex.join(job.send(cloud, hosts[0], task, 'INT').argv)}")
    result += (
        stage(
            "when the learner has ended, so do the rollout servers",
            [job.send(cloud, worker, task, "INT") for worker in serving],
        )
        if servers
        else []
    )
    if task.kept:
        title = "if it is taken back: delete it, begin again with --auto-resume"
        result += called(title, *map(gcloud.delete, requests))
    ending = "when the run has ended" if task.kept and not keep else "only when you give --delete"
    return result + called(ending, *map(gcloud.delete, requests))
