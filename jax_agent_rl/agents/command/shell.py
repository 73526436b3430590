"""The environment ``shell``: a working folder in which the policy runs commands; tests score it.

::

    prepare  ─► the task's files ─► sandbox: setup ─► working folder
    step     ─► the reply's last ```bash block ─► sandbox: command ─► working folder, and output,
                none: the episode is over                             which the policy sees
    conclude ─► sandbox: tests, on the working folder ─► score

Each command has a sandbox of its own, and starts on the files that the one before left. No process
and no variable outlives it. So the working folder is the whole state: a snapshot is the folder, and
a branch begins with it instead of running its parent's commands again.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

from jax_agent_rl.agents.command.agent import read_verdict
from jax_agent_rl.agents.command.machines import (
    SandboxedTask,
    check_first_files,
    left_out_names,
    sandbox_limits,
    workspace_limits,
)
from jax_agent_rl.agents.command.task import CommandTask, read_task
from jax_agent_rl.agents.command.workspace import (
    Entry,
    JobResult,
    file_entries,
    pack_tree,
    read_tree,
)
from jax_agent_rl.config.command_agent import CommandConfig
from jax_agent_rl.environments import Environment, Observation, register_environment
from jax_agent_rl.errors import EnvironmentFailedError
from jax_agent_rl.tool_server.sandbox import Sandbox, open_sandbox
from jax_agent_rl.types import FinishReason
from jax_agent_rl.utils.fences import fenced_blocks

if TYPE_CHECKING:
    from jax_agent_rl.chat.reply import Reply

_SETTINGS = CommandConfig()
"""The limits of commands are the defaults of ``agent.command``."""
_LIMITS = workspace_limits(_SETTINGS)
_SETUP_SECONDS = 3600.0  # environments.start_timeout is less
_LANGUAGES = ("bash", "sh", "shell")

_openings: WeakValueDictionary[asyncio.AbstractEventLoop, asyncio.Task[Sandbox]] = (
    WeakValueDictionary()
)
"""The sandbox of each event loop, as long as an environment holds it: to open one, programs are
started that test it."""


def _open() -> asyncio.Task[Sandbox]:
    """Return the opening of the event loop's sandbox.

    How many commands run at the same time is bounded by the number of environments alone.
    """
    loop = asyncio.get_running_loop()
    opening = _openings.get(loop)
    if opening is None:
        opening = loop.create_task(
            open_sandbox(
                limits=sandbox_limits(_SETTINGS),
                max_running=sys.maxsize,
                otherwise="or play another environment",
            )
        )
        _openings[loop] = opening
    return opening


@register_environment("shell")
class ShellEnvironment(Environment):
    """A task in a working folder: files to begin with, commands, and tests that score what is left.

    The score is the tests' reward, as for agent ``command``; without a verifier it is 0.
    """

    prepared_by = ("task", "files", "setup")
    takes_snapshots = True

    def __init__(self) -> None:
        self._first_workspace: tuple[Entry, ...] = ()
        self._workspace: tuple[Entry, ...] = ()
        self._task = CommandTask(instruction="")
        self._machine: SandboxedTask | None = None
        self._opening: asyncio.Task[Sandbox] | None = None
        self._command_seconds = 0.0

    async def prepare(
        self, *, task: str | None, files: Mapping[str, str] | None, setup: str | None
    ) -> None:
        """Run the setup on the task's files.

        Raises:
            DataError: the task's files are more than a working folder may hold.
            EnvironmentFailedError: the setup failed, or left more than that.
        """
        command_task = await _read_task(task=task, files=files)
        self._first_workspace = tuple(file_entries(command_task.files))
        check_first_files(self._first_workspace, _LIMITS)
        if not setup:
            return

        machine = SandboxedTask(await self._sandbox(), command_task, _LIMITS)
        argv = ["bash", "-c", setup]
        result = await machine.run_command(argv, self._first_workspace, seconds=_SETUP_SECONDS)
        if result.workspace is None or result.exit_code != 0:
            raise EnvironmentFailedError(f"the setup of a shell failed: {_describe(result)[-500:]}")
        self._first_workspace = result.workspace

    async def reset(
        self,
        *,
        task: str | None = None,
        files: Mapping[str, str] | None = None,
        setup: str | None = None,
        tests: Mapping[str, str] | None = None,
        verifier: str | None = None,
        command_seconds: float = 20.0,
    ) -> Observation:
        """Begin a task.

        Args:
            task: a task folder in Harbor's format, whose instruction is the first message.
            files: texts by path in the working folder, instead of a task folder.
            setup: bash script that completes the working folder before anybody uses it.
            tests: texts by path below ``/tests``, shown to the verifier alone.
            verifier: command line of the tests.
            command_seconds: time limit of each command.
        """
        self._task = await _read_task(task=task, files=files, tests=tests, verifier=verifier)
        self._machine = SandboxedTask(await self._sandbox(), self._task, _LIMITS)
        self._workspace = self._first_workspace
        self._command_seconds = command_seconds
        if not self._task.instruction:
            return Observation()
        return Observation.say(self._task.instruction)

    async def _sandbox(self) -> Sandbox:
        """Return the sandbox.

        Raises:
            ConfigError: there is none on this machine.
        """
        if self._opening is None:
            self._opening = _open()
        return await asyncio.shield(self._opening)

    async def step(self, reply: Reply) -> Observation:
        """Run the reply's command, and show what it printed."""
        command = None
        for block in fenced_blocks(reply.content):
            if block.language in _LANGUAGES:
                command = block.content
        if command is None:
            return Observation(done=True)

        assert self._machine is not None, "it is reset first"
        argv = ["bash", "-c", command]
        result = await self._machine.run_command(
            argv, self._workspace, seconds=self._command_seconds
        )
        if result.workspace is not None:
            self._workspace = result.workspace
        failed = float(result.exit_code != 0)
        metrics = {"shell/commands": 1.0, "shell/failed_commands": failed}
        return Observation.say(_describe(result), metrics=metrics)

    async def snapshot(self) -> bytes:
        """Return the working folder."""
        return await asyncio.to_thread(pack_tree, self._workspace)

    async def restore(self, snapshot: bytes) -> None:
        """Replace the working folder."""
        path_inside = self._task.workdir
        self._workspace = await asyncio.to_thread(read_tree, snapshot, _LIMITS, path_inside)

    async def conclude(
        self, messages: Sequence[Mapping[str, Any]], reason: FinishReason
    ) -> Mapping[str, float]:
        """Run the tests on the working folder."""
        if not self._task.verifier:
            return {}
        assert self._machine is not None, "it is reset first"
        seconds = self._task.verifier_seconds or _SETTINGS.verifier_timeout
        result = await self._machine.run_tests_on(self._workspace, seconds)
        reward, _ = read_verdict(result)
        return {"score": reward}


async def _read_task(**extra_info: Any) -> CommandTask:
    """Return the task of a row's arguments; see :func:`read_task`."""
    row = {"prompt": [], "extra_info": extra_info}
    return await asyncio.to_thread(read_task, row)


def _describe(result: JobResult) -> str:
    """Return what a command printed, and how it ended if something was wrong."""
    text = result.stdout + result.stderr
    notes = []
    problem = None
    if result.stopped is not None:
        problem = f"the sandbox was stopped ({result.stopped}); no file was changed"
    elif result.workspace is None:
        problem = f"no file was changed: {result.pack_problem}"
    elif result.exit_code is None:
        problem = "the command was stopped: it took too long"
    elif result.exit_code != 0:
        problem = f"exit status {result.exit_code}"
    if problem is not None:
        notes.append(problem)

    names = left_out_names(result)
    if names:
        notes.append(f"not kept, being devices, sockets, or links that lead elsewhere: {names}")
    if not notes:
        return text or "(no output)"
    if text and not text.endswith("\n"):
        text += "\n"
    return f"{text}({'; '.join(notes)})"
