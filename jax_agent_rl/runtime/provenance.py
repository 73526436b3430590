"""``provenance.jsonl``: what decided a run beside its configuration, a line for each process.

::

    installed packages, Python, system   ─┐
    devices, processor                    ├─► one line whenever the run starts or resumes
    variables that steer the computation  │
    fingerprints of models, rows and code ┘

``jax-agent-rl same`` compares the lines of two runs.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from jax_agent_rl.observe.run_dir import append_records
from jax_agent_rl.utils.processor import processor

PROVENANCE = "provenance.jsonl"
"""The file's name in a run folder."""

_VARIABLES = ("JAX_", "XLA_", "LIBTPU_", "TPU_", "CUDA_", "NCCL_", "VLLM_", "OMP_", "MKL_")
"""Beginnings of the names of variables that change what is computed."""

_SECRETS = ("KEY", "TOKEN", "SECRET", "PASSWORD", "CREDENTIAL")
"""A variable with one of these in its name is never recorded."""


def append_provenance(run: Path, content: Mapping[str, Any], *, step: int) -> None:
    """Append a line on this process to a run's file.

    Args:
        run: the run folder.
        content: fingerprints of what the configuration names, see ``runtime.identity``.
        step: the last finished step.

    Raises:
        StorageError: the disk is full.
    """
    append_records(run / PROVENANCE, [_provenance(content, step=step)])


def _provenance(content: Mapping[str, Any], *, step: int) -> dict[str, Any]:
    """Return what decides the steps that this process computes."""
    devices = Counter(f"{device.platform} {device.device_kind}" for device in jax.devices())
    return {
        "step": step,
        "python": platform.python_version(),
        "system": platform.platform(),
        "processor": processor(),
        "cores": os.cpu_count(),
        "devices": dict(devices),
        "processes": jax.process_count(),
        "packages": installed_packages(),
        "environment": steering_variables(os.environ),
        "content": dict(content),
    }


def installed_packages() -> dict[str, str]:
    """Return the version of each installed distribution by its name, in alphabetical order."""
    versions = {}
    for distribution in importlib.metadata.distributions():
        name = distribution.metadata["Name"]
        if name:
            # The first on the path is the one that is imported.
            versions.setdefault(name.lower(), distribution.version)
    return dict(sorted(versions.items()))


def steering_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of an environment that change what is computed, without secrets."""
    variables = {}
    for name in sorted(environment):
        is_secret = any(part in name.upper() for part in _SECRETS)
        if name.startswith(_VARIABLES) and not is_secret:
            variables[name] = environment[name]
    return variables
