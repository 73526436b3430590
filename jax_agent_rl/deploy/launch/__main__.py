"""The command line of ``./launch/gpu.sh``."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from jax_agent_rl.config import Config
from jax_agent_rl.config.tool_server import load_settings
from jax_agent_rl.deploy.launch import ray_job, ray_render
from jax_agent_rl.deploy.launch.command_line import TimedPrinter, count, positive
from jax_agent_rl.deploy.launch.ray_driver import add_run_options, load_run
from jax_agent_rl.errors import JaxAgentRLError, LaunchError

ROOT = Path(__file__).parents[3]
QUICKSTART = ROOT / "configs" / "quickstart.yaml"


def parser() -> argparse.ArgumentParser:
    """Return the parser; ``--help`` documents all options."""
    result = argparse.ArgumentParser(
        prog="gpu.sh",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Train with vLLM engines and a JAX learner, on one CUDA host or on a Ray cluster.",
        epilog=_EPILOG,
    )
    add = result.add_argument
    add("--config", type=Path, metavar="FILE", help="YAML configuration; default the quickstart, with model and data")
    add_run_options(add)
    add("--dry-run", action="store_true", help="check the configuration, print the job, and run nothing")
    add("--no-install", action="store_true", help="the environment exists already")
    add("--render", choices=["ray", "kuberay"], help="print a cluster file for ray up, or a RayJob, and run nothing")
    add("--hosts", type=_comma_separated, default=[], metavar="H1,H2,…", help="--render ray: [user@]hosts, head first")
    add("--image", default="jax_agent_rl:gpu", help="--render kuberay: of docker/gpu.Dockerfile (jax_agent_rl:gpu)")
    add("--nodes", type=positive, default=1, metavar="N", help="--render kuberay: pods with GPUs (1)")
    add("--gpus-per-node", type=count, default=8, metavar="N", help="--render kuberay: GPUs of each pod (8)")
    add("--claim", default="jax-agent-rl", help="--render kuberay: volume claim for /runs (jax-agent-rl)")
    return result


_EPILOG = """\
The learner takes learner.multihost.num_processes nodes (one by default) and learner.mesh's devices, the same number on
each. Every other GPU serves, rollout.vllm.tensor_parallel_size per engine; if too few are left, the engine shares the
learner's. A configuration that sets rollout.placement decides for itself.

Environment: RAY_ADDRESS (an existing cluster, e.g. http://10.0.0.1:8265; this folder, the configuration, the model and
run_dir at the same paths on its nodes), JAX_AGENT_RL_VENV (default .venv-gpu, on CPUs .venv-vllm), PYTHON,
CUDA_VISIBLE_DEVICES (restricts the GPUs of this machine).

Exit status: the learner's; 1 if the launch failed; 2 for a wrong command line; 130 after Ctrl-C.

examples:
  ./launch/gpu.sh trainer.steps=20                       the quickstart on this machine's GPUs
  ./launch/gpu.sh --config my.yaml learner.mesh.fsdp=4 rollout.vllm.tensor_parallel_size=2
  RAY_ADDRESS=http://10.0.0.1:8265 ./launch/gpu.sh --config my.yaml learner.multihost.num_processes=2
  ./launch/gpu.sh --render ray --hosts me@10.0.0.1,me@10.0.0.2 >cluster.yaml
  ./launch/gpu.sh --render kuberay --nodes 2 --config my.yaml run_dir=/runs/my >run.yaml
"""


def main(argv: Sequence[str]) -> int:
    """Run a launch; return its exit status."""
    arguments = parser().parse_intermixed_args(argv)
    try:
        if arguments.render == "ray":
            venv = os.environ.get("JAX_AGENT_RL_VENV", str(ROOT / ".venv-gpu"))
            print(ray_render.cluster_file(arguments.hosts, root=ROOT, venv=venv, device=arguments.device), end="")
            return 0
        if arguments.config is None and (arguments.render or os.environ.get("RAY_ADDRESS")):
            raise LaunchError("give --config: the quickstart, whose model and data are fetched, is for this machine")
        file = (arguments.config or QUICKSTART).absolute()
        config = load_run(str(file), arguments.overrides)
        if arguments.tool_server:
            load_settings(Path(arguments.tool_server), [])
        passed = _driver_arguments(arguments)
        if arguments.render == "kuberay":
            print(ray_render.ray_job_manifest(arguments, config, passed, root=ROOT), end="")
            return 0
        passed = [f"--config={file}", *passed]
        if arguments.dry_run:
            print(f"cluster: {os.environ.get('RAY_ADDRESS') or 'a new one on this machine'}")
            print(f"job: {ray_job.entrypoint(str(ROOT), sys.executable, 'JOB', passed)}")
            return 0
        with ray_job.connected(cpus=_places(config)) as client:
            return asyncio.run(ray_job.RayJob(client, str(ROOT), passed, TimedPrinter()).follow())
    except JaxAgentRLError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def _driver_arguments(arguments: argparse.Namespace) -> list[str]:
    """Return the command line of the driver, but for the configuration."""
    options = [f"--{name}={getattr(arguments, name.replace('-', '_'))}" for name in _PASSED]
    options += [f"--tool-server={Path(arguments.tool_server).absolute()}"] if arguments.tool_server else []
    options += ["--resume"] if arguments.resume else []
    return [*options, *arguments.overrides]


def _comma_separated(text: str) -> list[str]:
    return [part for part in text.split(",") if part]


_PASSED = ("device", "start-timeout", "max-restarts")


def _places(config: Config) -> int:
    """Return the CPUs that a cluster of this machine needs: for the learner's actor, the learner, and each engine.

    Raises:
        LaunchError: the learner needs several nodes.
    """
    if not os.environ.get("RAY_ADDRESS") and (count := config.learner.multihost.num_processes or 1) > 1:
        raise LaunchError(
            f"learner.multihost.num_processes={count} needs {count} nodes of a Ray cluster: name one by RAY_ADDRESS, "
            "or leave the key out to train on this machine"
        )
    return 2 + config.rollout.num_engines


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
