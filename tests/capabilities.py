"""Marks for what a machine may lack. A skipped test names the capability."""

from __future__ import annotations

import os
import shutil
import subprocess
from functools import cache

import pytest

from jax_agent_rl.tool_server.sandbox.isolation import find_bwrap

needs_bwrap = pytest.mark.skipif(find_bwrap() is None, reason="bubblewrap (bwrap)")

CONTAINER_IMAGE = os.environ.get("CONTAINER_TEST_IMAGE", "python:3.12-slim")
"""An image with python3, present or within reach, for tests of containers."""


@cache
def find_container_runtime() -> str | None:
    """Return the command of a container runtime that can run :data:`CONTAINER_IMAGE`; None if there
    is none.
    """
    for command in ("docker", "podman"):
        if shutil.which(command) is None:
            continue
        trial = [command, "run", "--rm", "--network", "none", CONTAINER_IMAGE, "python3", "-c", ""]
        if subprocess.run(trial, capture_output=True, timeout=300, check=False).returncode == 0:
            return command
    return None
