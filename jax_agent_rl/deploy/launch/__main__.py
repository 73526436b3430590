"""The command line of ``./launch/gpu.sh``."""

from __future__ import annotations

import argparse
import asyncio
import os
import secrets
import sys
from collections.abc import Sequence
from pathlib import Path

from jax_agent_rl.deploy.launch import plan, settings
from jax_agent_rl.deploy.launch.hosts import Host, inspect, make_hosts, require_free_port
from jax_agent_rl.deploy.launch.runner import Interrupted, Runner, TimedPrinter
from jax_agent_rl.deploy.launch.settings import port, positive
from jax_agent_rl.errors import LaunchError
from jax_agent_rl.utils.interrupt import EXIT_CODE

ROOT = Path(__file__).parents[3]
_ASSUMED_GPUS = 8


def parser() -> argparse.ArgumentParser:
    """Return the parser; ``--help`` documents all options."""
    result = argparse.ArgumentParser(
        prog="gpu.sh",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Train with vLLM rollout servers and a JAX learner, on one CUDA host or several.",
        epilog=_EPILOG,
    )
    add = result.add_argument
    add("overrides", nargs="*", metavar="a.b=c", help="configuration keys, for servers and learner")
    add("--config", type=Path, metavar="FILE", help="YAML configuration; default the quickstart, with model and data")
    add("--resume", action="store_true", help="continue from the newest checkpoint of run_dir")
    add("--dry-run", action="store_true", help="print the commands of every host in order, and run none")
    add(
        "--hosts",
        type=_comma_separated,
        default=[],
        metavar="H1,H2,…",
        help="[user@]hosts of a Ray cluster, this machine first, by the addresses they reach each other at; the others "
        "need ssh without a password, and this folder, the configuration and the model at the same paths. "
        "Default: this machine alone, without Ray",
    )
    add("--device", choices=["cuda", "cpu"], default="cuda", help="cpu: vLLM's CPU build and the learner on CPUs")
    add(
        "--gpus-per-host",
        type=positive,
        metavar="N",
        help=f"use the first N GPUs of every host; default all (a dry run queries no host and assumes {_ASSUMED_GPUS})",
    )
    add("--learner-gpus", type=_indices, metavar="0,1", help="GPUs of the first host for the learner")
    add("--server-gpus", type=_indices, metavar="2,3", help="GPUs of the first host for servers")
    add(
        "--port",
        type=port,
        default=8100,
        metavar="P",
        help="port of each host's first server; the next count up (8100)",
    )
    add("--ray-port", type=port, default=6379, metavar="P", help="port of Ray's head, on several hosts (6379)")
    add("--start-timeout", type=positive, default=1800, metavar="S", help="seconds until servers are healthy (1800)")
    add("--no-install", action="store_true", help="the environment exists already, on every host")
    return result


_EPILOG = f"""\
The knobs of placement are learner.mesh and rollout.vllm.tensor_parallel_size:

{plan.PLACEMENT_RULE}

Environment: JAX_AGENT_RL_VENV (default .venv-gpu, on CPUs .venv-vllm), PYTHON (of the launcher itself),
CUDA_VISIBLE_DEVICES (restricts the GPUs of this machine).

Exit status: the learner's; 1 if a host, a server or Ray failed; 2 for a wrong command line; 130 after Ctrl-C.

examples:
  ./launch/gpu.sh trainer.steps=20                       the quickstart on this machine's GPUs
  ./launch/gpu.sh --config my.yaml learner.mesh.fsdp=4 rollout.vllm.tensor_parallel_size=2
  ./launch/gpu.sh --hosts 10.0.0.1,10.0.0.2 --config my.yaml --dry-run
"""


def main(argv: Sequence[str]) -> int:
    """Run a launch; return its exit status."""
    arguments = parser().parse_intermixed_args(argv)
    try:
        settings.refuse_own_keys(arguments.overrides)
        options = _options(arguments)
        hosts = make_hosts(arguments.hosts, resolve=not arguments.dry_run)
        if arguments.dry_run:
            _print_dry_run(hosts, options, arguments)
            return 0
        return asyncio.run(_launch(hosts, options, arguments))
    except LaunchError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except Interrupted:
        return EXIT_CODE


def _options(arguments: argparse.Namespace) -> plan.Options:
    folder = ".venv-gpu" if arguments.device == "cuda" else ".venv-vllm"
    return plan.Options(
        device=arguments.device,
        root=ROOT,
        venv=Path(os.environ.get("JAX_AGENT_RL_VENV", ROOT / folder)).absolute(),
        config=arguments.config.absolute() if arguments.config else None,
        overrides=tuple(arguments.overrides),
        resume=arguments.resume,
        ray_port=arguments.ray_port,
        install=not arguments.no_install,
    )


def _print_dry_run(hosts: Sequence[Host], options: plan.Options, arguments: argparse.Namespace) -> None:
    python = Path(options.program("python"))
    if python.is_file():
        chosen = settings.read(python, options.config_file, options.overrides, root=options.root)
    else:
        chosen = settings.assume(options.config_file, options.overrides)
    count = arguments.gpus_per_host or _ASSUMED_GPUS
    if options.device == "cuda":
        print(f"# {count} GPU(s) on every host (--gpus-per-host): a dry run queries no host")
    gpus = {host: list(range(count)) if options.device == "cuda" else [] for host in hosts}
    spread = _place(hosts, gpus, chosen, arguments)
    for line in plan.report_idle(gpus, spread, chosen):
        print(f"# {line}")
    preparation, made = plan.prepare(hosts, options), plan.make_plan(hosts, spread, chosen, options)
    print("\n".join(plan.format_dry_run(preparation, made, options.root)))


async def _launch(hosts: Sequence[Host], options: plan.Options, arguments: argparse.Namespace) -> int:
    print_line = TimedPrinter()
    tokens = {name: secrets.token_hex(32) for name in (plan.TOKEN, plan.RAY_TOKEN)}
    runner = Runner(root=options.root, print_line=print_line, secrets=tokens)
    async with runner.until_interrupted():
        gpus = await asyncio.to_thread(inspect, hosts, options.device, options.root)
        for host, found in gpus.items():
            print_line(
                f"{host.name}: " + (f"{len(found)} x {found[0].name}, driver {found[0].driver}" if found else "CPUs")
            )
        await runner.prepare(plan.prepare(hosts, options))
        python = Path(options.program("python"))
        chosen = settings.read(python, options.config_file, options.overrides, root=options.root)
        count, indices = arguments.gpus_per_host, {}
        for host, found in gpus.items():
            if found and count and len(found) < count:
                raise LaunchError(f"{host.name} has {len(found)} usable GPU(s), --gpus-per-host wants {count}")
            indices[host] = [gpu.index for gpu in found][:count]
        spread = _place(hosts, indices, chosen, arguments)
        for server in spread.servers:
            print_line(f"{server.name}: {server.host.name}, port {server.port}, {_format_gpus(server.gpus)}")
            if server.host.local:  # Ray actors on other hosts check their own ports
                require_free_port(server.host.name, server.host.address, server.port, option="--port")
        print_line(f"learner: this machine, {_format_gpus(spread.learner_gpus)}")
        for line in plan.report_idle(indices, spread, chosen):
            print_line(line)
        if len(hosts) > 1:
            require_free_port(hosts[0].name, hosts[0].address, options.ray_port, option="--ray-port")
        return await runner.run(plan.make_plan(hosts, spread, chosen, options), start_seconds=arguments.start_timeout)


def _place(
    hosts: Sequence[Host], gpus: dict[Host, list[int]], chosen: settings.Settings, arguments: argparse.Namespace
) -> plan.ServerPlacement:
    if arguments.device == "cpu":
        return plan.place_on_cpus(hosts, port=arguments.port)
    named = {"learner_gpus": arguments.learner_gpus, "server_gpus": arguments.server_gpus}
    return plan.place(gpus, chosen, port=arguments.port, **named)


def _format_gpus(gpus: Sequence[int]) -> str:
    return f"GPU {', '.join(map(str, gpus))}" if gpus else "CPUs"


def _comma_separated(text: str) -> list[str]:
    return [part for part in text.split(",") if part]


def _indices(text: str) -> list[int]:
    return [int(part) for part in _comma_separated(text)]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
