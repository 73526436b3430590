"""The command line of ``./launch/gpu.sh``."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from jax_agent_rl.config import Config
from jax_agent_rl.deploy.launch import ray_job
from jax_agent_rl.deploy.launch.ray_driver import add_run_options, load_run
from jax_agent_rl.deploy.launch.runner import TimedPrinter
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
"""


def main(argv: Sequence[str]) -> int:
    """Run a launch; return its exit status."""
    arguments = parser().parse_intermixed_args(argv)
    try:
        config_file = str((arguments.config or QUICKSTART).absolute())
        config = load_run(config_file, arguments.overrides)
        passed = driver_arguments(arguments, config_file)
        if arguments.dry_run:
            print(f"cluster: {os.environ.get('RAY_ADDRESS') or 'a new one on this machine'}")
            print(f"job: {ray_job.entrypoint(str(ROOT), sys.executable, 'JOB', passed)}")
            return 0
        with ray_job.connected(cpus=_places(config)) as client:
            return asyncio.run(ray_job.Job(client, str(ROOT), passed, TimedPrinter()).follow())
    except JaxAgentRLError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def driver_arguments(arguments: argparse.Namespace, config_file: str) -> list[str]:
    """Return the command line of the driver."""
    options = [f"--{name}={getattr(arguments, name.replace('-', '_'))}" for name in _PASSED]
    options += ["--resume"] if arguments.resume else []
    return [f"--config={config_file}", *options, *arguments.overrides]


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
