"""Tasks in containers of Docker or Podman, whose images are built from the tasks' own Dockerfiles.

::

    environment/Dockerfile ──build──► image ──► container: program ──commit──► container: tests ──► reward

Containers have no network: the program reaches the endpoint by a Unix socket, as in the sandbox. The tests start on
the file system that the program left, when none of its processes is there any more. Images need ``python3``.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import secrets
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jax_agent_rl.agents.command.jobs import (
    GRACE_SECONDS,
    OUTPUT_BYTES,
    PORT,
    REWARD_FILE,
    RUNNER,
    AgentProgram,
    JobResult,
    TaskMachine,
    archive,
)
from jax_agent_rl.agents.command.task import CommandTask
from jax_agent_rl.config.agent import CommandConfig
from jax_agent_rl.errors import ConfigError, TrajectoryError

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

    async def run_program(self, program: AgentProgram) -> JobResult:
        image = await self._runtime.image(self._task)
        if self._task.build_context or self._task.image:
            found = await self._runtime.call("image", "inspect", "--format={{.Config.WorkingDir}}", image, seconds=60.0)
            self._workdir = found.stdout.decode().strip() or "/"
        files = {f"{self._workdir.strip('/')}/{name}": data for name, data in self._task.files.items()}
        files |= {f"tmp/{name}": data for name, data in program.files.items()}
        job = self._job(program.argv, {**self._task.env, **program.env}, program.seconds) | {"port": PORT}
        return await self._runtime.run(image, self._name, files, {program.endpoint: "/mnt/endpoint.sock"}, job=job)

    async def run_tests(self, seconds: float) -> JobResult:
        answer = await self._runtime.call("commit", "--quiet", self._name, f"{self._name}:left", seconds=300.0)
        if answer.exit_code:
            raise TrajectoryError(f"the program's container cannot be saved: {answer.stderr.strip()[-500:]}")
        files = {f"tests/{name}": data for name, data in self._task.tests.items()}
        job = self._job(self._task.verifier, self._task.env, seconds)
        job |= {"read_back": f"/{REWARD_FILE}", "remove": ["/tests", "/logs"]}  # what the program put there
        return await self._runtime.run(f"{self._name}:left", f"{self._name}-tests", files, {}, job=job)

    async def close(self) -> None:
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
