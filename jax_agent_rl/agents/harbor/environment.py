"""Harbor's environment ``local``: this project's sandbox, without images and without Docker.

::

    harness ──exec, upload, download──► sandbox: /app, /logs, /solution …
                                           │ working folder, checked entry by entry
    verifier ───────────────────────► sandbox: /app, /tests, /logs ──► reward

Before Harbor's verifier begins, the harness's sandbox is ended: the tests start in a second one, on
the working folder that it left, as for the agent ``command`` (``command.machines``). So
nothing else that a program left decides what its tests do.

There is no network but the endpoint, no other user, and nothing can be installed. The sandbox
follows a Dockerfile that only copies files; a task that needs more is refused.
"""

# pyright: reportMissingImports=false
# Harbor is in an environment of its own (launch/harbor_environment.sh).

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from harbor.environments.base import BaseEnvironment, ExecResult
from harbor.environments.capabilities import EnvironmentCapabilities
from harbor.models.task.config import NetworkPolicy

from jax_agent_rl.agents.command.machines import (
    FOLDERS,
    TESTS,
    RunnerJob,
    check_first_files,
    left_out_note,
    with_settings,
)
from jax_agent_rl.agents.command.session import SandboxSession
from jax_agent_rl.agents.command.task import WorkingFolder, read_environment, read_files
from jax_agent_rl.agents.command.workspace import Entry, WorkspaceLimits, file_entries
from jax_agent_rl.config.harbor_agent import LOCAL
from jax_agent_rl.errors import DataError, ToolError
from jax_agent_rl.tool_server.sandbox import Link, Sandbox

SESSION_SECONDS = 24 * 3600.0
"""Limit of a sandbox; the trial's own limits end it before."""
_ENDPOINT_HOST = "127.0.0.1"
_SETUP_FOLDERS = ("solution", "installed-agent")
"""Further folders that harnesses write to: Harbor's ``oracle``, and installed ones."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalMachine:
    """What a run gives the environments of its trials.

    Attributes:
        limits: of the working folder that the tests see, and of each folder that is read.
        endpoint: Unix socket of the endpoint.
        port: where the endpoint is found inside, on loopback.
        mounts: folders that the harness sees read-only, by their names below ``/tmp``.
    """

    sandbox: Sandbox
    limits: WorkspaceLimits
    endpoint: Path
    port: int
    mounts: Mapping[str, Path]


class LocalEnvironment(BaseEnvironment):
    """A sandbox as an environment of Harbor; a run connects it with :meth:`connect`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._working_folder = WorkingFolder()
        self._machine: LocalMachine | None = None
        self._session: SandboxSession | None = None
        self.verifies = False
        """Whether the tests' sandbox has been asked for."""
        self.tests_problem: str | None = None
        """Why the tests cannot run on what the program left."""
        self.tests_failure: str | None = None
        """Why the tests' sandbox did not start."""
        self.tests_note = ""
        """What the program left and the tests do not see."""
        super().__init__(*args, **kwargs)

    @staticmethod
    def type() -> str:
        return LOCAL

    @property
    def capabilities(self) -> EnvironmentCapabilities:
        return EnvironmentCapabilities(
            disable_internet=True, network_allowlist=True, network_allowlist_ipv4_addresses=True
        )

    def validate_network_policy_support(self, network_policy: NetworkPolicy | None = None) -> None:
        """Check that a list of allowed hosts names the endpoint alone, the only one in reach.

        Raises:
            ValueError: it names others.
        """
        super().validate_network_policy_support(network_policy)
        policy = network_policy or self.network_policy
        others = set(policy.allowed_hosts) - {_ENDPOINT_HOST}
        if others:
            raise ValueError(
                f"the allowlist names {sorted(others)}, which the sandbox does not reach; set"
                " agent.harbor.environment"
            )

    def _validate_definition(self) -> None:
        """Read the task's folder ``environment``.

        Raises:
            DataError: the task needs a container.
        """
        self._working_folder = read_environment(
            self.environment_dir,
            image=self.task_env_config.docker_image,
            key="agent.harbor.environment",
        )
        workdir = self.task_env_config.workdir
        copied_to = self._working_folder.path
        has_copies = (
            bool(self._working_folder.files) and (self.environment_dir / "Dockerfile").is_file()
        )
        if has_copies and workdir is not None and workdir != copied_to:
            raise DataError(
                f"[environment] workdir={workdir!r} is not the folder {copied_to} that the"
                " Dockerfile copies to, and the sandbox has but one; set agent.harbor.environment"
            )

    def connect(self, machine: LocalMachine) -> None:
        """Give the environment its sandbox, before it starts."""
        self._machine = machine

    # --- start and end ----------------------------------------------------------------------------

    async def start(self, force_build: bool) -> None:
        """Start the harness's sandbox; there is nothing to build.

        Raises:
            DataError: the task's own files are more than the tests can be handed.
        """
        files = await asyncio.to_thread(file_entries, self._working_folder.files)
        if self._machine is not None:
            check_first_files(files, self._machine.limits)
        self._session = await self._open([("app", files)])

    async def begin_tests(self) -> None:
        """End the harness's sandbox, and start the tests' sandbox on the folder it left.

        Raises:
            ToolError: it left none that tests can run on; see :attr:`tests_problem`. Or the sandbox
                did not start; see :attr:`tests_failure`.
        """
        self.verifies = True
        result = await self._running.end()
        if result.workspace is None:
            self.tests_problem = (
                "the program left no working folder that tests can run on:"
                f" {result.pack_problem or result.stopped}"
            )
            raise ToolError(self.tests_problem)
        self.tests_note = left_out_note(result)
        try:
            self._session = await self._open([("app", result.workspace)])
        except ToolError as error:
            self.tests_failure = str(error)
            raise

    async def stop(self, delete: bool) -> None:
        """End the sandbox, and everything that runs in it."""
        if self._session is not None:
            await self._session.aclose()

    @property
    def _running(self) -> SandboxSession:
        if self._session is None:
            raise ToolError("the sandbox has not been started")
        return self._session

    async def _open(self, trees: Sequence[tuple[str, Sequence[Entry]]]) -> SandboxSession:
        machine = self._machine
        if machine is None:
            raise ToolError("the environment 'local' runs in trials of agent 'harbor' alone")

        files: dict[str, Path | Link] = {}
        for name in _SETUP_FOLDERS:
            files[f"/{name}"] = Link(name)
        if not self.verifies:
            files |= machine.mounts
            files["endpoint.sock"] = machine.endpoint

        folders = [*FOLDERS, *_SETUP_FOLDERS, "logs/agent", "logs/artifacts"]
        job = RunnerJob(
            argv=(),
            env=self._working_folder.env,
            seconds=0,
            verifies=self.verifies,
            port=None if self.verifies else machine.port,
        )
        return await SandboxSession.open(
            machine.sandbox,
            job,
            [(".", file_entries({}, folders=folders)), *trees],
            files,
            workdir=self._workdir,
            limits=machine.limits,
            wall_seconds=SESSION_SECONDS,
        )

    @property
    def _workdir(self) -> str:
        return self.task_env_config.workdir or self._working_folder.path

    # --- commands and files -----------------------------------------------------------------------

    async def exec(
        self,
        command: str,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout_sec: int | None = None,
        user: str | int | None = None,
    ) -> ExecResult:
        """Run a command in bash, as the sandbox's only user.

        Raises:
            RuntimeError: it did not end in time.
            ToolError: the sandbox has ended, or what the tests started has not.
        """
        if self._machine is not None and self._machine.mounts and not self.verifies:
            commands = ":".join(f"/tmp/{name}/bin" for name in self._machine.mounts)
            command = f"export PATH={commands}:$PATH\n{command}"
        result = await self._running.run(
            ["bash", "-c", command],
            env=self._merge_env(env) or {},
            cwd=cwd or self._workdir,
            seconds=timeout_sec or SESSION_SECONDS,
        )
        if result.pack_problem is not None:
            raise ToolError(f"the tests cannot be read: {result.pack_problem}")
        if result.exit_code is None:
            raise RuntimeError(f"Command timed out after {timeout_sec} seconds")
        return ExecResult(stdout=result.stdout, stderr=result.stderr, return_code=result.exit_code)

    async def upload_file(self, source_path: Path | str, target_path: str) -> None:
        target = PurePosixPath(self._workdir) / target_path
        data = await asyncio.to_thread(Path(source_path).read_bytes)
        await self._running.write(file_entries({target.name: data}), str(target.parent))

    async def upload_dir(self, source_dir: Path | str, target_dir: str) -> None:
        target = str(PurePosixPath(self._workdir) / target_dir)
        files = await asyncio.to_thread(read_files, Path(source_dir), everything=True)
        if self.verifies and target == TESTS:
            files = with_settings(files)
        await self._running.write(file_entries(files), target)

    async def download_file(self, source_path: str, target_path: Path | str) -> None:
        source = str(PurePosixPath(self._workdir) / source_path)
        entries = await self._running.read(source)
        if len(entries) != 1 or entries[0].name != PurePosixPath(source).name:
            raise ToolError(f"{source} in the sandbox is not a file")
        await asyncio.to_thread(_write_files, {Path(target_path): entries[0]})

    async def download_dir(self, source_dir: str, target_dir: Path | str) -> None:
        """Download regular files and folders; links are left out."""
        source = str(PurePosixPath(self._workdir) / source_dir)
        entries = await self._running.read(source)
        targets = {Path(target_dir) / entry.name: entry for entry in entries}
        await asyncio.to_thread(_write_files, targets)


def _write_files(entries: Mapping[Path, Entry]) -> None:
    """Write folders and files to this machine; links are left out, and none is followed."""
    for path, entry in entries.items():
        if entry.kind == "folder":
            path.mkdir(parents=True, exist_ok=True)
        elif entry.kind == "file":
            path.parent.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(FileNotFoundError):
                path.unlink()
            path.write_bytes(entry.data)
