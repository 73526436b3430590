"""The command line of ``./launch/tpu_pod.sh``."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from jax_agent_rl.deploy.launch.arguments import (
    ROOT,
    comma_separated,
    port,
    positive,
    script_parser,
    seconds,
    variable,
)
from jax_agent_rl.deploy.launch.printer import TimedPrinter
from jax_agent_rl.deploy.launch.tpu import job
from jax_agent_rl.deploy.launch.tpu.gcloud import DryRun, Gcloud, parse_topology
from jax_agent_rl.deploy.launch.tpu.job import Job
from jax_agent_rl.deploy.launch.tpu.launch import SliceLaunch
from jax_agent_rl.errors import ConfigError, LaunchError
from jax_agent_rl.utils.config_words import split_config
from jax_agent_rl.utils.shutdown import EXIT_CODE
from jax_agent_rl.utils.text import printable

_NAME = re.compile(r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?")


def parser() -> argparse.ArgumentParser:
    """Return the parser; ``--help`` documents all options."""
    result = script_parser("tpu_pod.sh")
    add = result.add_argument
    add(
        "overrides",
        nargs="*",
        metavar="[CONFIG] KEY=VALUE",
        help="YAML configuration, and keys that override it",
    )
    add("--name", required=True, help="name of the slice and of the run")
    add(
        "--zone",
        type=comma_separated,
        required=True,
        metavar="Z",
        help="us-west4-a; SkyPilot takes several",
    )
    add(
        "--topology",
        type=parse_topology,
        required=True,
        metavar="T",
        help="of the slice: v5e:4x4, v5p:2x2x2, v6e:8x8",
    )
    add("--project", help="Google Cloud project; default gcloud's own")
    add(
        "--runtime-version",
        metavar="V",
        help="software of the VMs; default the one for jax on that generation",
    )
    add("--spot", action="store_true", help="cheaper, may be preempted at any time")
    add(
        "--config",
        type=Path,
        metavar="FILE",
        help="CONFIG as an option; default the quickstart, with model and data",
    )
    add("--bucket", metavar="gs://B", help="checkpoints, small files and logs go to gs://B/NAME")
    add(
        "--prepare",
        metavar="COMMAND",
        help="run on every host before the start, to fetch model and data",
    )
    add(
        "--env",
        action="append",
        type=variable,
        default=[],
        metavar="NAME[=V]",
        help="for --prepare and the run",
    )
    add("--no-install", action="store_true", help="the environment exists already, on every host")
    add("--resume", action="store_true", help="continue from the newest checkpoint in the bucket")
    add("--keep", action="store_true", help="leave the slice when the run has ended")
    add(
        "--poll",
        type=seconds,
        default=15.0,
        metavar="S",
        help="seconds between polls of the slice's state (15)",
    )
    add("--logs-dir", type=Path, metavar="DIR", help="folder of a log per host (runs/NAME.logs)")
    add(
        "--certify",
        action="store_true",
        help="measure the slice with jax-agent-rl certify instead of training",
    )
    what = result.add_mutually_exclusive_group()
    what.add_argument(
        "--dry-run", action="store_true", help="print the commands in order, and run none"
    )
    what.add_argument(
        "--render", choices=job.KINDS, help="print a job of SkyPilot, GKE or Slurm for the same run"
    )
    what.add_argument(
        "--logs", action="store_true", help="show the run's output, from its beginning"
    )
    what.add_argument(
        "--delete", action="store_true", help="delete the slice of that name, running or not"
    )
    rendered = result.add_argument_group("with --render gke or slurm").add_argument
    rendered("--slices", type=positive, default=1, metavar="M", help="slices of that topology (1)")
    rendered(
        "--rollout-hosts",
        type=positive,
        default=0,
        metavar="N",
        help="N more hosts sample; the others learn",
    )
    rendered(
        "--rollout-topology",
        type=parse_topology,
        metavar="T",
        help="of each, on gke (4 chips of that generation)",
    )
    rendered(
        "--rollout-port",
        type=port,
        default=8100,
        metavar="P",
        help="their port in the zone's network (8100)",
    )
    rendered("--image", help="with gke: the container, with the project in /app")
    return result


def main(argv: Sequence[str]) -> int:
    """Run a launch; return its exit status."""
    for number in (signal.SIGTERM, signal.SIGHUP):  # SIGHUP: the terminal is gone
        signal.signal(number, signal.default_int_handler)
    try:
        arguments = parser().parse_intermixed_args(argv)
        task = _job(arguments)
        if arguments.render:
            options = job.SchedulerOptions(
                zones=tuple(arguments.zone),
                image=arguments.image,
                rollout_hosts=arguments.rollout_hosts,
                rollout_topology=arguments.rollout_topology,
                port=arguments.rollout_port,
            )
            print(job.render(arguments.render, task, options, root=ROOT), end="")
            return 0
        return _act(task, arguments)
    except LaunchError as error:
        print(f"error: {printable(str(error))}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(
            "interrupted; the slice may exist and cost: --logs shows its run, --delete deletes it",
            flush=True,
        )
        return EXIT_CODE


def _job(arguments: argparse.Namespace) -> Job:
    """Return the job of a command line; raise LaunchError if it is wrong."""
    if not _NAME.fullmatch(arguments.name):
        raise LaunchError(
            f"--name {arguments.name!r}: up to 40 small letters, digits and hyphens, with a letter"
            " first and no hyphen last"
        )
    try:
        arguments.config, arguments.overrides = split_config(arguments.overrides, arguments.config)
    except ConfigError as error:
        raise LaunchError(str(error)) from None

    if arguments.config and not arguments.config.is_file():
        raise LaunchError(f"--config {str(arguments.config)!r} does not exist")
    job.require_overrides(arguments.overrides)
    if arguments.certify and (arguments.resume or arguments.render):
        raise LaunchError(
            "--certify measures a slice from the beginning: leave out --resume and --render"
        )

    variables = dict(arguments.env)
    if job.TOKEN in variables:
        raise LaunchError(f"--env {job.TOKEN}: the rendered job sets it itself; leave it out")
    starts_run = not (arguments.render or arguments.dry_run or arguments.logs or arguments.delete)
    if starts_run:
        for name, value in variables.items():
            if value is not None:
                continue
            if name not in os.environ:
                raise LaunchError(
                    f"--env {name} is not set here: export it, or give --env {name}=VALUE"
                )
            variables[name] = os.environ[name]

    return Job(
        name=arguments.name,
        topology=arguments.topology,
        slices=arguments.slices,
        spot=arguments.spot,
        runtime=arguments.runtime_version or arguments.topology.kind.runtime,
        config=arguments.config,
        overrides=tuple(arguments.overrides),
        bucket=arguments.bucket,
        prepare=arguments.prepare,
        install=not arguments.no_install,
        certify=arguments.certify,
        variables=variables,
    )


def _act(task: Job, arguments: argparse.Namespace) -> int:
    """Run the job on a slice, show its logs, or delete the slice; return the exit status."""
    scheduler_option = None
    if task.slices > 1:
        scheduler_option = "--slices"
    elif arguments.rollout_hosts or arguments.rollout_topology:
        scheduler_option = "--rollout-hosts"
    elif arguments.image:
        scheduler_option = "--image"
    if scheduler_option is not None:
        raise LaunchError(
            f"{scheduler_option} is for --render gke or slurm: tpu_pod.sh itself makes one slice,"
            " which learns"
        )
    if len(arguments.zone) != 1:
        raise LaunchError(
            f"--zone {','.join(arguments.zone)}: give one, or --render sky, whose job searches"
            " several"
        )

    zone = arguments.zone[0]
    if arguments.dry_run:
        cloud = DryRun(project=arguments.project, zone=zone)
        print_line = _print_comment
    else:
        cloud = Gcloud(project=arguments.project, zone=zone)
        print_line = TimedPrinter()
    launch = SliceLaunch(
        cloud=cloud,
        task=task,
        poll=arguments.poll,
        logs=arguments.logs_dir or ROOT / "runs" / f"{task.name}.logs",
        print_line=print_line,
    )
    if arguments.dry_run and not task.certify:
        print_line(f"whether the run fits the slice: jax-agent-rl {shlex.join(job.plan(task))}")

    if arguments.delete:
        if launch.delete():
            print_line(f"deleted {task.name}")
        else:
            print_line(f"there is no {task.name}")
        return 0
    if arguments.logs:
        state = launch.query()
        if state != "READY":
            raise LaunchError(f"{task.name} is {state}: there is nothing to show")
        return launch.follow()
    return launch.run(ROOT, resume=arguments.resume, keep=arguments.keep)


def _print_comment(line: str) -> None:
    """Print a line of a dry run, whose output is shell commands and comments."""
    print(f"# {line}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
