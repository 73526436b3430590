"""Settings of a configuration that decide where things run, and types of the launchers' command-line options.

A configuration is YAML, checked by pydantic, and the launcher has neither: ``read`` asks the environment's Python, for
which this module is a program that prints the answer as JSON.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar

from jax_agent_rl.errors import ConfigError, LaunchError

OWN_KEYS = ("rollout.backend", "rollout.urls", "rollout.token_env")
"""Keys that the launcher sets itself, for servers and learner each."""

T = TypeVar("T")
_PLACING = ("mesh", "tensor_parallel_size", "gpu_memory_utilization", "run_dir")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Values that placement needs; ``gpu_memory_utilization`` is None if the user did not choose it."""

    run_dir: str
    learner_devices: int
    tensor_parallel_size: int
    gpu_memory_utilization: float | None


def read(python: Path, config: Path, overrides: Sequence[str], *, root: Path) -> Settings:
    """Read the settings of a configuration, which is validated as a whole.

    Args:
        python: the environment's interpreter.
        config: configuration file.
        overrides: ``key.path=value``, later ones win.
        root: the project's folder.

    Raises:
        LaunchError: the configuration is wrong; the message lists every problem.
    """
    command = [str(python), "-m", __name__, str(config), *overrides]
    result = subprocess.run(command, capture_output=True, text=True, cwd=root)
    if result.returncode:
        raise LaunchError(result.stderr.strip())
    return Settings(**json.loads(result.stdout))


def assume(config: Path, overrides: Sequence[str]) -> Settings:
    """Return the settings of a configuration that leaves placement at the defaults: for a dry run before installing.

    Raises:
        LaunchError: the configuration decides placement, or cannot be read.
    """
    if not config.is_file():
        raise LaunchError(f"config file {str(config)!r} does not exist")
    keys = [line for line in config.read_text().splitlines() if re.match(rf"\s*({'|'.join(_PLACING[:3])}):", line)]
    chosen = keys + [item for item in overrides if any(name in item for name in _PLACING)]
    if chosen:
        raise LaunchError(
            f"{chosen[0].strip()!r} decides where things run, and the environment that reads configurations is not "
            "there yet: make it with ./launch/gpu_environment.sh cuda (or cpu), then repeat the dry run"
        )
    run_dir = re.search(r"^run_dir:\s*(\S+)", config.read_text(), re.MULTILINE)
    return Settings(
        run_dir=run_dir[1] if run_dir else "runs",
        learner_devices=1,
        tensor_parallel_size=1,
        gpu_memory_utilization=None,
    )


def refuse_own_keys(overrides: Sequence[str]) -> None:
    """Raise :class:`LaunchError` for an override that would have no effect."""
    for item in overrides:
        if item.partition("=")[0].strip() in OWN_KEYS:
            raise LaunchError(f"{item}: gpu.sh sets {', '.join(OWN_KEYS)} itself; leave it out")


def _load(path: str, overrides: Sequence[str]) -> Settings:
    from jax_agent_rl.config import load

    load(path, [*overrides, "rollout.backend=vllm", "rollout.urls=[]"])  # as the servers will see it
    # As the learner will see it: the addresses are not known yet, any will do.
    config = load(path, [*overrides, "rollout.backend=remote", "rollout.urls=[http://127.0.0.1:1]"])
    vllm = config.rollout.vllm
    chosen = "gpu_memory_utilization" in vllm.model_fields_set
    return Settings(
        run_dir=config.run_dir,
        learner_devices=config.learner.mesh.devices,
        tensor_parallel_size=vllm.tensor_parallel_size,
        gpu_memory_utilization=vllm.gpu_memory_utilization if chosen else None,
    )


# --- option types: a wrong value is refused with the required form ---------------------------------------------------


def positive(text: str) -> int:
    """Parse a positive whole number."""
    return _checked(text, int, lambda value: value >= 1, "a whole number, 1 or more")


def count(text: str) -> int:
    """Parse a whole number, 0 or more."""
    return _checked(text, int, lambda value: value >= 0, "a whole number, 0 or more")


def port(text: str) -> int:
    """Parse a TCP port."""
    return _checked(text, int, lambda value: 0 < value < 65536, "a port, 1 to 65535")


def seconds(text: str) -> float:
    """Parse a positive duration."""
    return _checked(text, float, lambda value: 0 < value < math.inf, "seconds, more than 0")


def duration(text: str) -> str:
    """Parse a duration in gcloud's notation."""
    return _checked(text, str, re.compile(r"(\d+[dhms])+").fullmatch, "a time such as 6h, 30m or 1d12h")


def variable(text: str) -> tuple[str, str | None]:
    """Parse an environment variable: ``NAME=VALUE``, or ``NAME`` for its value here (None)."""
    name, given, value = text.partition("=")
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
        raise argparse.ArgumentTypeError(f"{text!r} is no environment variable: write NAME, or NAME=VALUE")
    return name, value if given else None


def _checked(text: str, kind: Callable[[str], T], holds: Callable[[T], object], wanted: str) -> T:
    try:
        value = kind(text)
    except ValueError:
        value = None
    if value is None or not holds(value):
        raise argparse.ArgumentTypeError(f"{text!r} is not {wanted}")
    return value


if __name__ == "__main__":
    try:
        print(json.dumps(asdict(_load(sys.argv[1], sys.argv[2:]))))
    except ConfigError as error:
        sys.exit(str(error))
