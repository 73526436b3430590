"""The ``agent.command`` section: programs in sandboxes and containers as agents."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from jax_agent_rl.config.base import Positive, Section, Unless, WhenKey

_WORKSPACE_MB = (
    "Size of the working folder in the end that is handed to the tests, names included; a larger"
    " one gives reward 0."
)
_WORKSPACE_ENTRIES = "Maximum number of files, folders and links that are handed to the tests."
_MOUNT_NAME = re.compile(r"[A-Za-z0-9_-]+")
_TASK_FOLDERS = frozenset(  # of /tmp in the sandbox
    {"agent", "app", "installed-agent", "logs", "solution", "tests"}
)


def _mount_names(mounts: dict[str, str]) -> dict[str, str]:
    for name in mounts:
        if not _MOUNT_NAME.fullmatch(name) or name in _TASK_FOLDERS:
            raise ValueError(
                f"{name!r} cannot be a folder of /tmp there; use letters, digits, _ and -, and"
                f" none of {', '.join(sorted(_TASK_FOLDERS))}"
            )
    return mounts


Mounts = Annotated[dict[str, str], AfterValidator(_mount_names)]
"""Folders of this machine by their names below ``/tmp`` in the sandbox."""


class ProgramLimits(Section):
    """What a program in the sandbox may use, and what its tests may be handed of it."""

    cpu_seconds: Positive = Field(default=120, description="CPU time of each process.")
    memory_mb: Positive = Field(
        default=1024, description="Memory of all processes of a program together."
    )
    processes: Positive = Field(
        default=64, description="Maximum number of processes and threads at the same time."
    )
    disk_mb: Positive = Field(
        default=64, description="Size of the working folder (it is in memory)."
    )
    workspace_mb: Positive = Field(default=8, description=_WORKSPACE_MB)
    workspace_entries: Positive = Field(default=4096, description=_WORKSPACE_ENTRIES)


class CommandConfig(ProgramLimits):
    """The agent `command`: a program that runs once per trajectory, with the endpoint as its model.

    It finds the endpoint in OPENAI_BASE_URL, ANTHROPIC_BASE_URL and GOOGLE_GEMINI_BASE_URL, and the
    task in TASK_INSTRUCTION.
    """

    argv: tuple[str, ...] = Field(
        default=(),
        description=(
            "Program and arguments, run in the task's working folder; `{instruction}` is the task's"
            " text."
        ),
    )
    program_dir: str | None = Field(
        default=None,
        description="Folder with the program, copied into the sandbox or container as /tmp/agent.",
    )
    mounts: Annotated[Mounts, Unless("agent.command.container")] = Field(
        default_factory=dict,
        description=(
            "Folders of this machine that the program sees, read-only, by their names below /tmp:"
            " what is too large to copy, such as `{harness: ~/claude-code}`. The tests do not see"
            " them."
        ),
    )
    container: Literal["docker", "podman"] | None = Field(
        default=None,
        description=(
            "Command of a container runtime. Programs and tests run in containers without network,"
            " whose images are built from the tasks' Dockerfiles and contain python3. The tests"
            " start on all that the program left, as in Harbor. null: the sandbox."
        ),
    )
    image: Annotated[str | None, WhenKey("agent.command.container")] = Field(
        default=None, description="Image of tasks without a Dockerfile or an image of their own."
    )
    verifier_timeout: float = Field(
        default=60.0,
        gt=0,
        description="Seconds the tests of a task may take, unless the task says so.",
    )
    workspace_mb: Annotated[Positive, Unless("agent.command.container")] = Field(
        default=8, description=_WORKSPACE_MB
    )
    workspace_entries: Annotated[Positive, Unless("agent.command.container")] = Field(
        default=4096, description=_WORKSPACE_ENTRIES
    )
    max_running: Positive = Field(
        default=16, description="Maximum number of concurrent programs; further ones wait."
    )
