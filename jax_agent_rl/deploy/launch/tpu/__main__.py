"""The command line of ``./launch/tpu_pod.sh``."""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from jax_agent_rl.deploy.launch.runner import Interrupted, TimedPrinter
from jax_agent_rl.deploy.launch.settings import count, duration, port, positive, seconds, variable
from jax_agent_rl.deploy.launch.tpu import job, render
from jax_agent_rl.deploy.launch.tpu.controller import RecoveryPolicy, RunController
from jax_agent_rl.deploy.launch.tpu.gcloud import Gcloud, SliceRequest, parse_topology
from jax_agent_rl.deploy.launch.tpu.job import Job
from jax_agent_rl.deploy.launch.tpu.remote import Logs
from jax_agent_rl.deploy.launch.tpu.slices import Fleet, Slices, State, delete_by_name
from jax_agent_rl.errors import LaunchError
from jax_agent_rl.utils.interrupt import EXIT_CODE

ROOT = Path(__file__).parents[4]
_NAME = re.compile(r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?")
_SERVERS_NAME = re.compile(r".*-rollout-\d+")


def parser() -> argparse.ArgumentParser:
    """Return the parser; ``--help`` documents all options."""
    result = argparse.ArgumentParser(
        prog="tpu_pod.sh",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Train on Cloud TPU slices: create them, train, store the run in a bucket, delete them.",
        epilog=_EPILOG,
    )
    add = result.add_argument
    add("overrides", nargs="*", metavar="a.b=c", help="configuration keys")
    add("--name", required=True, help="name of the slice and of the run")
    add("--zone", required=True, help="e.g. us-west4-a")
    add("--topology", required=True, metavar="T", help="topology of a slice: v5e:4x4, v5p:2x2x2, v6e:8x8, v4:2x2x4")
    add(
        "--slices",
        type=positive,
        default=1,
        metavar="M",
        help="slices of that topology; several come as one request (1)",
    )
    add("--rollout-hosts", type=positive, metavar="N", help="N more slices, of one host each, sample; the others learn")
    add("--rollout-topology", metavar="T", help="topology of each of those; default 4 chips of the same generation")
    add("--rollout-port", type=port, default=8100, metavar="P", help="their port in the zone's network (8100)")
    add("--project", help="Google Cloud project; default gcloud's own")
    add("--runtime-version", metavar="V", help="software of the VMs; default the one for jax on that generation")
    add("--spot", action="store_true", help="cheaper, may be preempted at any time; works with --queued, too")
    add("--queued", action="store_true", help="wait in the queue until there is capacity")
    add("--valid-until", type=duration, metavar="6h", help="with --queued: how long to wait there; default no limit")
    add("--config", type=Path, metavar="FILE", help="YAML configuration; default the quickstart, with model and data")
    add("--bucket", metavar="gs://B", help="checkpoints, small files and logs go to gs://B/NAME")
    add("--prepare", metavar="COMMAND", help="run on every host before the start, to fetch model and data")
    add("--env", action="append", type=variable, default=[], metavar="NAME[=V]", help="for --prepare and the run")
    add("--no-install", action="store_true", help="the environment exists already, on every host")
    add("--resume", action="store_true", help="continue from the newest checkpoint in the bucket")
    add("--keep", action="store_true", help="leave the slice when the run has ended")
    add("--max-preemptions", type=count, default=20, metavar="N", help="then the run is abandoned (20)")
    add("--poll", type=seconds, default=15.0, metavar="S", help="seconds between two polls of the slice's state (15)")
    add("--image", help="with --render gke: the container, with the project in /app")
    add("--logs-dir", type=Path, metavar="DIR", help="folder of a log per host (runs/NAME.logs)")
    what = result.add_mutually_exclusive_group()
    what.add_argument("--dry-run", action="store_true", help="print the commands in order, and run none")
    what.add_argument("--render", choices=[*render.KINDS], help="print a JobSet for GKE, or a Slurm job")
    what.add_argument("--logs", action="store_true", help="show the run's output, from its beginning")
    what.add_argument("--delete", action="store_true", help="delete all slices of that name, running or not")
    return result


_EPILOG = """\
All hosts write checkpoints to the bucket; host 0 copies metrics and trajectories there within 15 seconds, as every host
does with its log. The run goes on when this launcher is killed: the same command, or --logs, finds it again. Slices are
deleted when the run has ended, unless --keep is given or --bucket is missing.

--env WANDB_API_KEY takes the value from here; it goes to the hosts through the connection, and is in no command line.

Exit status: the run's; 1 if a slice cannot be created or a host cannot be set up; 2 for a wrong command line; 130 after
Ctrl-C.

examples:
  ./launch/tpu_pod.sh --name try --zone us-west4-a --topology v5e:2x2
  ./launch/tpu_pod.sh --name big --zone us-east5-a --topology v5p:4x4x4 --queued --spot --bucket gs://b --config my.yaml
"""


def main(argv: Sequence[str]) -> int:
    """Run a launch; return its exit status."""
    arguments = parser().parse_intermixed_args(argv)
    try:
        request, task = _request(arguments), _job(arguments)
        servers = _servers(request, arguments)
        cloud = Gcloud(project=arguments.project, zone=arguments.zone)
        if arguments.render:
            how = {"servers": servers, "image": arguments.image, "restarts": arguments.max_preemptions, "root": ROOT}
            print(render.render(arguments.render, request, task, **how), end="")
            return 0
        if arguments.dry_run:
            job.require_keepable(request, task)
            how = {"resume": arguments.resume, "keep": arguments.keep, "servers": servers}
            print("\n".join(render.format_dry_run(request, task, cloud, **how)))
            return 0
        return asyncio.run(_act(request, servers, task, cloud, arguments))
    except LaunchError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except Interrupted:
        return EXIT_CODE


def _request(arguments: argparse.Namespace) -> SliceRequest:
    if not _NAME.fullmatch(arguments.name):
        raise LaunchError(
            f"--name {arguments.name!r}: up to 40 small letters, digits and hyphens, with a letter first and no hyphen "
            "last"
        )
    if _SERVERS_NAME.fullmatch(arguments.name):
        raise LaunchError(f"--name {arguments.name!r} is reserved for slices that sample: leave out -rollout-…")
    if arguments.valid_until and not (arguments.queued or arguments.slices > 1):
        raise LaunchError(f"--valid-until {arguments.valid_until} needs --queued: without it, there is no queue")
    chosen = parse_topology(arguments.topology)
    return SliceRequest(
        name=arguments.name,
        topology=chosen,
        slices=arguments.slices,
        spot=arguments.spot,
        queued=arguments.queued,
        valid_until=arguments.valid_until,
        runtime=arguments.runtime_version or chosen.kind.runtime,
    )


def _servers(request: SliceRequest, arguments: argparse.Namespace) -> list[SliceRequest]:
    asked = arguments.rollout_topology
    if arguments.rollout_hosts is None:
        if asked:
            raise LaunchError(f"--rollout-topology {asked} needs --rollout-hosts: give their number")
        return []
    if asked and arguments.render == "slurm":
        raise LaunchError(f"--rollout-topology {asked}: all nodes of a Slurm job are of one kind; leave it out")
    chosen = parse_topology(asked or f"{request.topology.generation}:{request.topology.kind.one_host}")
    return job.make_server_requests(request, arguments.rollout_hosts, chosen)


def _job(arguments: argparse.Namespace) -> Job:
    job.require_overrides(arguments.overrides, split=arguments.rollout_hosts is not None)
    if arguments.config and not arguments.config.is_file():
        raise LaunchError(f"--config {str(arguments.config)!r} does not exist")
    return Job(
        name=arguments.name,
        config=arguments.config,
        overrides=tuple(arguments.overrides),
        bucket=arguments.bucket,
        prepare=arguments.prepare,
        install=not arguments.no_install,
        variables=_variables(arguments),
        port=arguments.rollout_port,
    )


def _variables(arguments: argparse.Namespace) -> dict[str, str | None]:
    """Return the variables of ``--env``; values may stay None where nothing is launched."""
    result = dict(arguments.env)
    if job.TOKEN in result:
        raise LaunchError(f"--env {job.TOKEN}: tpu_pod.sh sets it itself; leave it out")
    if arguments.render or arguments.dry_run or arguments.logs or arguments.delete:
        return result
    if missing := [name for name, value in result.items() if value is None and name not in os.environ]:
        raise LaunchError(f"--env {missing[0]} is not set here: export it, or give --env {missing[0]}=VALUE")
    return {name: os.environ[name] if value is None else value for name, value in result.items()}


async def _act(
    request: SliceRequest, servers: Sequence[SliceRequest], task: Job, cloud: Gcloud, arguments: argparse.Namespace
) -> int:
    print_line = TimedPrinter()
    await cloud.require_login()
    if arguments.delete:
        deleted = await delete_by_name(request.name, cloud, print_line=print_line)
        print_line(f"deleted {', '.join(deleted)}" if deleted else f"there is no {request.name}")
        return 0
    groups = [Slices(each, cloud, print_line=print_line, poll=arguments.poll) for each in (request, *servers)]
    slices = Fleet(groups)
    logs = Logs(arguments.logs_dir or ROOT / "runs" / f"{request.name}.logs", print_line=print_line)
    policy = RecoveryPolicy(keep=arguments.keep, max_preemptions=arguments.max_preemptions, poll=arguments.poll)
    controller = RunController(task, slices, cloud, policy, root=ROOT, logs=logs, print_line=print_line)
    async with controller.until_interrupted():
        if arguments.logs:
            seen = await slices.query()
            if seen.state is not State.READY:
                raise LaunchError(f"{request.name} is {seen.word} ({seen.state.value}): there is nothing to show")
            return await controller.follow(job.workers(request, seen.hosts, servers))
        job.require_keepable(request, task)
        return await controller.run(lambda hosts: job.workers(request, hosts, servers), resume=arguments.resume)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
