"""Machines that a task runs on: a sandbox, or containers of Docker or Podman.

In the sandbox, the program and the tests have one each; the tests start on the working folder that the program left.
Containers are made of images from the tasks' own Dockerfiles::

    environment/Dockerfile ──build──► image ──► container: program ──commit──► container: tests ──► reward

They have no network: the program reaches the endpoint by a Unix socket, as in the sandbox. The tests start on the file
system that the program left, when none of its processes is there any more. Images need ``python3``.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import hashlib
import io
import json
import secrets
import shutil
import tarfile
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

from pydantic import BaseModel, ValidationError

from jax_agent_rl.agents.command.task import CommandTask
from jax_agent_rl.config.agent import CommandConfig
from jax_agent_rl.errors import ConfigError, ToolError, TrajectoryError
from jax_agent_rl.tool_server.sandbox import Link, Sandbox

RUNNER = Path(__file__).with_name("runner.py")
GRACE_SECONDS = 10.0  # for the runner to unpack, to pack the working folder and to end
OUTPUT_BYTES = 16 << 20  # of the runner, whose result holds the working folder
PORT = 8080  # of the endpoint, on the loopback of the program
REWARD_FILE = "logs/verifier/reward.txt"


class JobResult(BaseModel):
    """What the runner printed; a program beside it could have forged it, so its shape is checked."""

    exit_code: int | None = None
    stopped: str | None = None
    stdout: str = ""
    stderr: str = ""
    workspace: str | None = None
    read_back: str | None = None

    @classmethod
    def parse(cls, printed: str | bytes, *, stopped: str, stderr: str) -> JobResult:
        """Return what the runner printed; if that is no result, one that says what ``stopped`` it."""
        try:
            return cls.model_validate_json(printed)
        except ValidationError:
            return cls(stopped=stopped, stderr=stderr[-4000:])


class TaskMachine(ABC):
    """Where the program of one task runs, and afterwards the task's tests on the files it left."""

    @abstractmethod
    async def run_program(
        self, argv: Sequence[str], env: Mapping[str, str], files: Mapping[str, bytes], endpoint: Path, *, seconds: float
    ) -> JobResult:
        """Run the agent's program to its end.

        Args:
            argv: the command line.
            env: variables besides the task's own.
            files: its files, by path below ``/tmp``.
            endpoint: Unix socket of the endpoint, which the program reaches at ``127.0.0.1:PORT``.
            seconds: its time limit.

        Raises:
            TrajectoryError: the machine itself failed.
        """

    @abstractmethod
    async def run_tests(self, seconds: float) -> JobResult:
        """Run the task's tests on the files the program left; ``read_back`` is the reward file's text.

        Raises:
            TrajectoryError: the machine itself failed.
        """

    async def aclose(self) -> None:
        """Remove what is left of the machine. The default has nothing to remove."""
        return None


def _below(folder: str, files: Mapping[str, bytes]) -> dict[str, bytes]:
    return {f"{folder}/{name}": data for name, data in files.items()}


def archive(files: Mapping[str, bytes], *, folders: Sequence[str], workspace: bytes | None = None) -> bytes:
    """Return a tar archive.

    Args:
        files: contents by path.
        folders: folders that exist even if they are empty.
        workspace: another tar archive, whose files and folders go below ``folders[0]``.

    Raises:
        tarfile.TarError: ``workspace`` is not a tar archive.
    """
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as packed:
        for folder in folders:
            entry = tarfile.TarInfo(folder)
            entry.type, entry.mode = tarfile.DIRTYPE, 0o755
            packed.addfile(entry)
        for name, data in files.items():
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(data), 0o755
            packed.addfile(entry, io.BytesIO(data))
        if workspace is not None:
            _add_workspace(packed, workspace, folders[0])
    return buffer.getvalue()


def _add_workspace(packed: tarfile.TarFile, workspace: bytes, folder: str) -> None:
    with tarfile.open(fileobj=io.BytesIO(workspace), mode="r:") as left:
        for member in left:
            name = PurePosixPath(member.name)
            if not (member.isfile() or member.isdir()) or name.is_absolute() or ".." in name.parts:
                continue  # links could lead the tests elsewhere
            member.name = str(PurePosixPath(folder) / name)
            packed.addfile(member, left.extractfile(member) if member.isfile() else None)


_FOLDERS = ("app", "logs", "logs/verifier", "tests")


class SandboxedTask(TaskMachine):
    """Runs one task in ``sandbox``. The program never shares a sandbox with the tests."""

    def __init__(self, sandbox: Sandbox, task: CommandTask) -> None:
        self._sandbox = sandbox
        self._task = task
        self._workspace: str | None = None

    async def run_program(
        self, argv: Sequence[str], env: Mapping[str, str], files: Mapping[str, bytes], endpoint: Path, *, seconds: float
    ) -> JobResult:
        job = {"argv": list(argv), "env": {**self._task.env, **env}, "port": PORT, "read_back": None}
        packed = archive({**_below("app", self._task.files), **files}, folders=_FOLDERS)
        done = await self._run(job, {"job.tar": packed, "endpoint.sock": endpoint}, seconds)
        self._workspace = done.workspace
        return done

    async def run_tests(self, seconds: float) -> JobResult:
        if self._workspace is None:
            return JobResult(stopped="the program left no working folder, or one that is too large")
        tests = _below("tests", self._task.tests)
        try:
            packed = archive(tests, folders=_FOLDERS, workspace=base64.b64decode(self._workspace))
        except (OSError, tarfile.TarError, binascii.Error, EOFError) as error:
            return JobResult(stopped=f"the program left no readable working folder: {error}")
        job = {"argv": self._task.verifier, "env": dict(self._task.env), "port": None, "read_back": REWARD_FILE}
        return await self._run(job, {"job.tar": packed}, seconds)

    async def _run(self, job: dict[str, Any], files: dict[str, Any], seconds: float) -> JobResult:
        links = {self._task.workdir: Link("app"), "/tests": Link("tests"), "/logs": Link("logs")}
        job |= {"seconds": seconds, "root": ".", "workdir": "app"}
        try:
            result = await self._sandbox.run(
                [self._sandbox.python, "runner.py"],
                stdin=json.dumps(job).encode(),
                files={"runner.py": RUNNER.read_bytes(), **links, **files},
                limits=replace(self._sandbox.limits, wall_seconds=seconds + GRACE_SECONDS),
            )
        except ToolError as error:
            raise TrajectoryError(f"agent 'command': {error}") from error
        stopped = str(result.stopped or f"exit status {result.exit_code} of the sandbox")
        return JobResult.parse(result.stdout, stopped=stopped, stderr=result.stderr)


# --- containers -------------------------------------------------------------------------------------------------

_LABEL = "jax_agent_rl"
# What package managers and servers need of root's rights; the rest is dropped.
_CAPABILITIES = ("CHOWN", "DAC_OVERRIDE", "FOWNER", "SETGID", "SETUID", "KILL")
_PULL_SECONDS = 600.0


@dataclass(frozen=True, slots=True)
class _Finished:
    exit_code: int
    stdout: bytes
    stderr: str


class ContainerRuntime:
    """Docker or Podman, by its command line.

    Args:
        settings: ``agent.command``; ``container`` is the command.
    """

    def __init__(self, settings: CommandConfig) -> None:
        assert settings.container is not None
        self.settings = settings
        self._cli: str = settings.container
        self._slots = asyncio.Semaphore(settings.max_running)
        self._building: dict[str, asyncio.Lock] = {}

    async def check(self) -> None:
        """Check that containers can be started here.

        Raises:
            ConfigError: the command is missing, or its service does not answer.
        """
        if shutil.which(self._cli) is None:
            raise ConfigError(f"agent.command.container={self._cli}: there is no such command; install it, or set null")
        answer = await self.call("info", seconds=60.0)
        if answer.exit_code:
            raise ConfigError(
                f"agent.command.container={self._cli}: `{self._cli} info` failed: {answer.stderr.strip()[-500:]}"
            )

    async def image(self, task: CommandTask) -> str:
        """Return the image of a task, which is built or pulled on first use.

        Raises:
            TrajectoryError: it cannot be.
        """
        context = task.build_context
        name = f"jax-agent-rl-task:{await asyncio.to_thread(_digest, context)}" if context else task.image
        name = name or self.settings.image
        if name is None:
            raise TrajectoryError("the task has no Dockerfile; set agent.command.image to the image of such tasks")
        async with self._building.setdefault(name, asyncio.Lock()):
            if (await self.call("image", "inspect", name, seconds=60.0)).exit_code == 0:
                return name
            command = (
                ("build", "--quiet", "--label", _LABEL, "--tag", name, str(context)) if context else ("pull", name)
            )
            answer = await self.call(*command, seconds=task.build_seconds or _PULL_SECONDS)
        if answer.exit_code:
            raise TrajectoryError(f"`{self._cli} {command[0]}` of {context or name}: {answer.stderr.strip()[-2000:]}")
        return name

    async def run(
        self, image: str, name: str, files: Mapping[str, bytes], sockets: Mapping[Path, str], *, job: dict[str, Any]
    ) -> JobResult:
        """Run a job in a new container, which stays until it is removed.

        Args:
            image: of the container.
            name: of the container.
            files: contents by path below ``/``.
            sockets: Unix sockets of this machine, and their places in the container.
            job: for the runner, see there.
        """
        settings = self.settings
        folders = [job["workdir"].strip("/"), "logs", "logs/verifier", "tests"]
        with tempfile.TemporaryDirectory(prefix="jax-agent-rl-") as folder:
            place = Path(folder)
            (place / "job.tar").write_bytes(archive(files, folders=[f for f in folders if f]))
            shutil.copy(RUNNER, place / "runner.py")
            options = ["--interactive", "--name", name, "--label", _LABEL, "--network", "none", "--user", "0:0"]
            options += ["--memory", f"{settings.memory_mb}m", "--pids-limit", str(settings.processes)]
            options += ["--workdir", "/tmp", "--entrypoint", "python3"]
            options += ["--cap-drop", "ALL", *(f"--cap-add={capability}" for capability in _CAPABILITIES)]
            options += ["--security-opt", "no-new-privileges", "--security-opt", "label=disable"]
            mounts = {place: "/mnt/job:ro", **sockets}
            options += [f"--volume={source}:{target}" for source, target in mounts.items()]
            job = {**job, "root": "/", "archive": "/mnt/job/job.tar", "socket": "/mnt/endpoint.sock"}
            job["cpu_seconds"] = settings.cpu_seconds
            async with self._slots:
                answer = await self.call(
                    "run",
                    *options,
                    image,
                    "/mnt/job/runner.py",
                    stdin=json.dumps(job).encode(),
                    seconds=job["seconds"] + GRACE_SECONDS,
                )
        if answer.exit_code in (125, 126, 127) and not answer.stdout:
            raise TrajectoryError(f"container of {image} (it needs python3): {answer.stderr.strip()[-2000:]}")
        return JobResult.parse(
            answer.stdout, stopped=f"exit status {answer.exit_code} of the container", stderr=answer.stderr
        )

    async def call(self, *arguments: str, stdin: bytes = b"", seconds: float) -> _Finished:
        """Run the command line; exit status 124 after ``seconds``, as of ``timeout``.

        Raises:
            TrajectoryError: it printed more than ``OUTPUT_BYTES``.
        """
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(self._cli, *arguments, stdin=pipe, stdout=pipe, stderr=pipe)
        assert process.stdin and process.stdout and process.stderr
        try:
            async with asyncio.timeout(seconds):
                with contextlib.suppress(ConnectionError):
                    process.stdin.write(stdin)
                    await process.stdin.drain()
                process.stdin.close()
                stdout, stderr = await asyncio.gather(_read(process.stdout), _read(process.stderr))
                return _Finished(await process.wait(), stdout, stderr.decode(errors="replace"))
        except TimeoutError:
            return _Finished(124, b"", f"`{self._cli} {arguments[0]}` ran past {seconds:g} seconds")
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()


class ContainerTask(TaskMachine):
    """Runs one task in containers of ``runtime``."""

    def __init__(self, runtime: ContainerRuntime, task: CommandTask) -> None:
        self._runtime = runtime
        self._task = task
        self._name = f"jax-agent-rl-{secrets.token_hex(8)}"
        self._workdir = task.workdir

    async def run_program(
        self, argv: Sequence[str], env: Mapping[str, str], files: Mapping[str, bytes], endpoint: Path, *, seconds: float
    ) -> JobResult:
        image = await self._runtime.image(self._task)
        if self._task.build_context or self._task.image:
            found = await self._runtime.call("image", "inspect", "--format={{.Config.WorkingDir}}", image, seconds=60.0)
            self._workdir = found.stdout.decode().strip() or "/"
        files = {**_below(self._workdir.strip("/"), self._task.files), **_below("tmp", files)}
        job = self._job(argv, {**self._task.env, **env}, seconds) | {"port": PORT}
        return await self._runtime.run(image, self._name, files, {endpoint: "/mnt/endpoint.sock"}, job=job)

    async def run_tests(self, seconds: float) -> JobResult:
        answer = await self._runtime.call("commit", "--quiet", self._name, f"{self._name}:left", seconds=300.0)
        if answer.exit_code:
            raise TrajectoryError(f"the program's container cannot be saved: {answer.stderr.strip()[-500:]}")
        files = _below("tests", self._task.tests)
        job = self._job(self._task.verifier, self._task.env, seconds)
        job |= {"read_back": f"/{REWARD_FILE}", "remove": ["/tests", "/logs"]}  # what the program put there
        return await self._runtime.run(f"{self._name}:left", f"{self._name}-tests", files, {}, job=job)

    async def aclose(self) -> None:
        """Remove the containers and the image of what the program left."""
        for command in (("rm", "--force", self._name, f"{self._name}-tests"), ("rmi", "--force", f"{self._name}:left")):
            await self._runtime.call(*command, seconds=60.0)

    def _job(self, argv: Sequence[str], env: Mapping[str, str], seconds: float) -> dict[str, Any]:
        job = {"argv": list(argv), "env": dict(env), "port": None, "read_back": None, "seconds": seconds}
        return job | {"workdir": self._workdir, "pack": False}


async def _read(stream: asyncio.StreamReader) -> bytes:
    try:
        await stream.readexactly(OUTPUT_BYTES + 1)
    except asyncio.IncompleteReadError as error:
        return error.partial
    raise TrajectoryError(f"the container printed more than {OUTPUT_BYTES >> 20} MiB")


def _digest(folder: Path) -> str:
    """Return a digest of a folder's files, hidden ones too: the Dockerfile and what it copies."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            digest.update(f"{path.relative_to(folder)}\0{path.stat().st_size}\0{path.stat().st_mode}\0".encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()[:24]
