"""Containers of Docker or Podman, of images from the tasks' own Dockerfiles.

::

    environment/Dockerfile ──build──► image ──► container: program
                                                     │ commit
                                                container: tests ──► reward

They have no network: the program reaches the endpoint by a Unix socket, as in the sandbox. The
tests start on the file system that the program left, once all of its processes have ended. Images
need ``python3``.

In its container the program is root, so it could replace what its tests run on: the interpreter, a
library, pytest. Tests therefore run only if the program did not touch the image's own
(:class:`ProtectedPaths`). What it adds elsewhere is what the tests are about.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
import secrets
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from jax_agent_rl.agents.command.machines import (
    GRACE_SECONDS,
    ISOLATED,
    LOGS,
    PORT,
    RUNNER,
    TEST_SETTINGS,
    TESTS,
    RunnerJob,
    TaskMachine,
    with_settings,
)
from jax_agent_rl.agents.command.task import CommandTask
from jax_agent_rl.agents.command.workspace import (
    MAX_HEADER_BYTES,
    Entry,
    JobResult,
    WorkspaceLimits,
    file_entries,
    pack_tree,
    read_result,
)
from jax_agent_rl.config.command_agent import CommandConfig
from jax_agent_rl.errors import ConfigError, EnvironmentFailedError
from jax_agent_rl.utils.text import counted

logger = logging.getLogger(__name__)
OUTPUT_BYTES = 2 * MAX_HEADER_BYTES  # of a command of the runtime
_LABEL = "jax_agent_rl"
# What package managers and servers need of root's rights; the rest is dropped.
_CAPABILITIES = ("CHOWN", "DAC_OVERRIDE", "FOWNER", "SETGID", "SETUID", "KILL")
_PULL_SECONDS = 600.0
_LIST_PATHS_SECONDS = 120.0
_COMMIT_SECONDS = 300.0
_CALL_SECONDS = 60.0
_BYTECODE = f"{LOGS}/bytecode"
_SAFE_PATH = (3, 11)  # knows PYTHONSAFEPATH
_NO_WORKSPACE = WorkspaceLimits(max_bytes=0, max_entries=0)


# --- what tests run on ----------------------------------------------------------------------------

# Folders that hold libraries of the system.
LIBRARIES = (
    "/lib",
    "/lib32",
    "/lib64",
    "/libx32",
    "/usr/lib",
    "/usr/lib32",
    "/usr/lib64",
    "/usr/libexec",
    "/usr/local/lib",
    "/usr/local/lib64",
    "/etc/perl",
    "/usr/share/perl",
    "/usr/share/perl5",
)
_LOADER_FILES = (
    "/etc/ld.so.cache",
    "/etc/ld.so.conf",
    "/etc/ld.so.conf.d",
    "/etc/ld.so.preload",
    "/etc/ssl/openssl.cnf",  # names modules that every process with OpenSSL loads
)
_COMPILED = "__pycache__"

# Prints the protected paths of the image that it runs in.
LIST_PATHS = """
import json, os, sys

def search_path(name):
    return [path for path in os.environ.get(name, "").split(":") if os.path.isabs(path)]

def with_real_paths(paths):
    both = set()
    for path in paths:
        both.add(os.path.normpath(path))
        both.add(os.path.realpath(path))
    return sorted(both)

commands = with_real_paths(search_path("PATH"))
libraries = json.loads(sys.argv[1])
for name in ("PYTHONPATH", "LD_LIBRARY_PATH", "NODE_PATH", "PERL5LIB", "RUBYLIB"):
    libraries += search_path(name)
libraries = with_real_paths(libraries + [path for path in sys.path if path])
names = []
folders = list(libraries)
targets = []

def add_targets(path):
    for _ in range(40):
        if not os.path.islink(path):
            return
        parent = os.path.realpath(os.path.dirname(path))
        path = os.path.normpath(os.path.join(parent, os.readlink(path)))
        if not any(path.startswith(folder + "/") for folder in libraries + commands):
            targets.append(path)

for folder in commands:
    if os.path.isdir(folder):
        for name in os.listdir(folder):
            names.append(name)
            add_targets(os.path.join(folder, name))
for library in libraries:
    for folder, subfolders, files in os.walk(library):
        folders += [os.path.join(folder, name) for name in subfolders]
        for name in subfolders + files:
            add_targets(os.path.join(folder, name))

print(json.dumps({
    "python": sys.executable,
    "version": sys.version_info[:2],
    "commands": commands,
    "names": names,
    "libraries": libraries,
    "folders": folders,
    "targets": targets,
}))
"""


class ProtectedPaths(BaseModel):
    """Paths of an image that decide what its commands and interpreters do.

    Attributes:
        python: path of ``python3``.
        version: major and minor version of that Python.
        commands: folders of ``PATH``.
        names: names of the commands in these folders.
        libraries: folders of libraries and of Python's modules.
        folders: all folders in ``libraries``.
        targets: where links among the commands and libraries lead, if that is elsewhere.
    """

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")

    python: str
    version: tuple[int, int]
    commands: frozenset[str]
    names: frozenset[str]
    libraries: frozenset[str]
    folders: frozenset[str]
    targets: frozenset[str]

    def forbidden(self, changes: str, workdir: str) -> list[str]:
        """Return the changes after which tests would prove nothing.

        In the folders of libraries nothing may change, except for compiled Python modules, which
        tests do not load. In the folders of commands, the program may add a command, unless it
        hides another one.

        Args:
            changes: lines of ``docker diff``: A (added), C (changed) or D (deleted), and a path.
            workdir: working folder of the task, where the program may change anything.
        """
        workdir_prefix = f"{workdir.rstrip('/')}/"
        is_root = workdir == "/"
        library_prefixes = tuple(f"{library}/" for library in self.libraries)
        target_prefixes = tuple(f"{target}/" for target in self.targets)
        forbidden = []
        for line in changes.splitlines():
            kind, _, path = line.partition(" ")
            folder, _, name = path.rpartition("/")
            if kind == "C" and path in self.folders:
                continue  # something in it changed, and has a line
            if not is_root and path.startswith(workdir_prefix):
                continue

            if path in self.libraries or path.startswith(library_prefixes):
                is_forbidden = _COMPILED not in path.split("/")
            elif folder in self.commands:
                is_forbidden = kind != "A" or name in self.names or name == "pyvenv.cfg"
            elif path in self.targets or path.startswith((*_LOADER_FILES, *target_prefixes)):
                is_forbidden = True
            elif name == "pyvenv.cfg":
                # Next to the folder of an interpreter, it tells it where modules are.
                is_forbidden = any(command.startswith(f"{folder}/") for command in self.commands)
            else:
                # pytest reads settings of all folders above the tests.
                is_forbidden = not folder and not is_root and name in TEST_SETTINGS

            if is_forbidden:
                forbidden.append(line)
        return forbidden


# --- the runtime ----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class _Finished:
    exit_code: int
    stdout: bytes = b""
    stderr: str = ""
    printed_too_much: bool = False


class _TooMuchOutput(Exception):
    """A command of the runtime printed more than ``OUTPUT_BYTES``."""


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
        self._protected_paths: dict[str, ProtectedPaths] = {}

    async def check(self) -> None:
        """Check that containers can be started here.

        Raises:
            ConfigError: the command is missing, or its service does not answer.
        """
        if shutil.which(self._cli) is None:
            raise ConfigError(
                f"agent.command.container={self._cli}: there is no such command;"
                " install it, or set null"
            )
        answer = await self.call("info", seconds=_CALL_SECONDS)
        if answer.exit_code:
            raise ConfigError(
                f"agent.command.container={self._cli}: `{self._cli} info` failed:"
                f" {answer.stderr.strip()[-500:]}"
            )

    async def image(self, task: CommandTask) -> str:
        """Return the image of a task, which is built or pulled on first use.

        Raises:
            EnvironmentFailedError: it cannot be.
        """
        context = task.build_context
        if context is not None:
            name = f"jax-agent-rl-task:{await asyncio.to_thread(_digest, context)}"
        else:
            name = task.image or self.settings.image
        if name is None:
            raise EnvironmentFailedError(
                "the task has no Dockerfile; set agent.command.image to the image of such tasks"
            )

        async with self._building.setdefault(name, asyncio.Lock()):
            inspected = await self.call("image", "inspect", name, seconds=_CALL_SECONDS)
            if inspected.exit_code == 0:
                return name  # it is here already
            if context is not None:
                command = ("build", "--quiet", "--label", _LABEL, "--tag", name, str(context))
            else:
                command = ("pull", name)
            answer = await self.call(*command, seconds=task.build_seconds or _PULL_SECONDS)
        if answer.exit_code:
            raise EnvironmentFailedError(
                f"`{self._cli} {command[0]}` of {context or name}: {answer.stderr.strip()[-2000:]}"
            )
        return name

    async def protected_paths(self, image: str) -> ProtectedPaths:
        """Return the paths of an image that decide what its commands do, listed on first use.

        Raises:
            EnvironmentFailedError: the image has no ``python3``, or cannot be run.
        """
        async with self._building.setdefault(image, asyncio.Lock()):
            if image not in self._protected_paths:
                self._protected_paths[image] = await self._list_protected_paths(image)
            return self._protected_paths[image]

    async def _list_protected_paths(self, image: str) -> ProtectedPaths:
        options = ["--rm", "--label", _LABEL, "--network", "none", "--entrypoint", "python3"]
        arguments = ["-I", "-c", LIST_PATHS, json.dumps(LIBRARIES)]
        answer = await self.call("run", *options, image, *arguments, seconds=_LIST_PATHS_SECONDS)
        try:
            paths = ProtectedPaths.model_validate_json(answer.stdout)
        except ValidationError:
            message = f"container of {image} (it needs python3): {answer.stderr.strip()[-2000:]}"
            raise EnvironmentFailedError(message) from None
        if paths.version < _SAFE_PATH:
            logger.warning(
                "python3 of %s is %d.%d: what a verifier runs by `python3 -m` imports modules of"
                " the working folder; use an image with %d.%d or newer",
                image,
                *paths.version,
                *_SAFE_PATH,
            )
        return paths

    async def run(
        self,
        image: str,
        name: str,
        job: RunnerJob,
        trees: Sequence[tuple[str, Sequence[Entry]]],
        *,
        workdir: str,
        python: str = "python3",
        sockets: Mapping[Path, str] | None = None,
        remove: Sequence[str] = (),
    ) -> JobResult:
        """Run a job in a new container, which stays until it is removed.

        Args:
            trees: folders of the container, and what to write to each of them first.
            python: interpreter of the runner.
            sockets: Unix sockets of this machine, and their paths in the container.
            remove: paths to remove first.
        """
        settings = self.settings
        token = secrets.token_hex(32)
        tree_folders = []
        for number, (folder, _) in enumerate(trees):
            tree_folders.append((f"/mnt/job/{number}.tree", folder))
        job_json = job.as_json(
            token=token,
            trees=tree_folders,
            root="/",
            workdir=workdir,
            path_inside=workdir,
            remove=list(remove),
            socket="/mnt/endpoint.sock",
            cpu_seconds=settings.cpu_seconds,
            bytecode=_BYTECODE,
        )
        options = [
            "--interactive",
            "--name",
            name,
            "--label",
            _LABEL,
            "--network",
            "none",
            "--user",
            "0:0",
        ]
        options += ["--memory", f"{settings.memory_mb}m", "--pids-limit", str(settings.processes)]
        options += ["--workdir", "/tmp", "--entrypoint", python]
        options += ["--cap-drop", "ALL"]
        options += [f"--cap-add={capability}" for capability in _CAPABILITIES]
        options += ["--security-opt", "no-new-privileges", "--security-opt", "label=disable"]
        options += [f"--volume={source}:{target}" for source, target in (sockets or {}).items()]
        # Python would load modules that the program compiled into the standard library's folders.
        runner = [*ISOLATED, "-X", "pycache_prefix=/mnt/job", "/mnt/job/runner.py"]

        with tempfile.TemporaryDirectory(prefix="jax-agent-rl-") as job_folder:
            await asyncio.to_thread(_write_trees, Path(job_folder), trees)
            options.append(f"--volume={job_folder}:/mnt/job:ro")
            async with self._slots:
                answer = await self.call(
                    "run",
                    *options,
                    image,
                    *runner,
                    stdin=json.dumps(job_json).encode() + b"\n",
                    seconds=job.seconds + GRACE_SECONDS,
                )

        did_not_start = answer.exit_code in (125, 126, 127)  # exit statuses of the runtime itself
        if did_not_start and not answer.stdout:
            raise EnvironmentFailedError(
                f"container of {image} (it needs python3): {answer.stderr.strip()[-2000:]}"
            )
        return await asyncio.to_thread(
            read_result,
            answer.stdout.decode("utf-8", "replace"),
            token,
            stopped=f"exit status {answer.exit_code} of the container",
            stderr=answer.stderr,
            limits=_NO_WORKSPACE,
            path_inside=workdir,
        )

    async def call(self, *arguments: str, stdin: bytes = b"", seconds: float) -> _Finished:
        """Run a command of the runtime.

        After ``seconds`` it is ended with exit status 124, as by ``timeout``; one that prints more
        than ``OUTPUT_BYTES`` with exit status 1.
        """
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            self._cli, *arguments, stdin=pipe, stdout=pipe, stderr=pipe
        )
        assert process.stdin and process.stdout and process.stderr
        try:
            async with asyncio.timeout(seconds):
                with contextlib.suppress(ConnectionError):
                    process.stdin.write(stdin)
                    await process.stdin.drain()
                process.stdin.close()
                stdout, stderr = await asyncio.gather(_read(process.stdout), _read(process.stderr))
                exit_code = await process.wait()
            return _Finished(
                exit_code=exit_code, stdout=stdout, stderr=stderr.decode(errors="replace")
            )
        except TimeoutError:
            return _Finished(
                exit_code=124, stderr=f"`{self._cli} {arguments[0]}` ran past {seconds:g} seconds"
            )
        except _TooMuchOutput:
            message = f"`{self._cli} {arguments[0]}` printed more than {OUTPUT_BYTES >> 20} MiB"
            return _Finished(exit_code=1, stderr=message, printed_too_much=True)
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()


def _write_trees(job_folder: Path, trees: Sequence[tuple[str, Sequence[Entry]]]) -> None:
    for number, (_, entries) in enumerate(trees):
        (job_folder / f"{number}.tree").write_bytes(pack_tree(entries))
    shutil.copy(RUNNER, job_folder / "runner.py")


async def _read(stream: asyncio.StreamReader) -> bytes:
    try:
        await stream.readexactly(OUTPUT_BYTES + 1)
    except asyncio.IncompleteReadError as error:
        return error.partial
    raise _TooMuchOutput


def _digest(folder: Path) -> str:
    """Return a digest of a folder's files, hidden ones too: the Dockerfile and what it copies."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if not path.is_file():
            continue
        status = path.stat()
        digest.update(f"{path.relative_to(folder)}\0{status.st_size}\0{status.st_mode}\0".encode())
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()[:24]


# --- the machine ----------------------------------------------------------------------------------


class ContainerTask(TaskMachine):
    """Runs one task in containers of ``runtime``."""

    def __init__(self, runtime: ContainerRuntime, task: CommandTask) -> None:
        self._runtime = runtime
        self._task = task
        self._name = f"jax-agent-rl-{secrets.token_hex(8)}"
        self._workdir = task.workdir
        self._image: str | None = None

    async def run_program(
        self,
        argv: Sequence[str],
        env: Mapping[str, str],
        files: Mapping[str, bytes],
        endpoint: Path,
        *,
        seconds: float,
    ) -> JobResult:
        image = await self._runtime.image(self._task)
        self._image = image
        if self._task.build_context or self._task.image:
            # The task's own image decides where the program works.
            inspected = await self._runtime.call(
                "image",
                "inspect",
                "--format={{.Config.WorkingDir}}",
                image,
                seconds=_CALL_SECONDS,
            )
            self._workdir = inspected.stdout.decode().strip() or "/"

        trees = [
            ("/", file_entries({}, folders=_FOLDERS)),
            ("/tmp", file_entries(files)),
            (self._workdir, file_entries(self._task.files)),
        ]
        job = RunnerJob(argv=argv, env={**self._task.env, **env}, seconds=seconds, port=PORT)
        sockets = {endpoint: "/mnt/endpoint.sock"}
        return await self._runtime.run(
            image, self._name, job, trees, workdir=self._workdir, sockets=sockets
        )

    async def run_tests(self, seconds: float) -> JobResult:
        assert self._image is not None, "the program runs first"
        # The container may outlive its client, whose time was up. If it has ended, this call fails.
        await self._runtime.call("kill", self._name, seconds=_CALL_SECONDS)

        paths = await self._runtime.protected_paths(self._image)
        problem = await self._forbidden_change(paths)
        if problem is not None:
            return JobResult(stopped=problem)

        tests_image = f"{self._name}:left"
        answer = await self._runtime.call(
            "commit", "--quiet", self._name, tests_image, seconds=_COMMIT_SECONDS
        )
        if answer.exit_code:
            raise EnvironmentFailedError(
                f"the program's container cannot be saved: {answer.stderr.strip()[-500:]}"
            )

        job = RunnerJob(
            argv=self._task.verifier, env=self._task.env, seconds=seconds, verifies=True
        )
        trees = [
            ("/", file_entries({}, folders=_FOLDERS)),
            (TESTS, file_entries(with_settings(self._task.tests))),
        ]
        return await self._runtime.run(
            tests_image,
            f"{self._name}-tests",
            job,
            trees,
            workdir=self._workdir,
            python=paths.python,
            remove=[TESTS, LOGS],  # what the program put there
        )

    async def _forbidden_change(self, paths: ProtectedPaths) -> str | None:
        """Return why no tests can run on what the program left; None if they can."""
        changes = await self._runtime.call("diff", self._name, seconds=_COMMIT_SECONDS)
        if changes.printed_too_much:
            return "the program changed more files than can be listed"
        if changes.exit_code:
            raise EnvironmentFailedError(
                f"the program's changes cannot be listed: {changes.stderr.strip()[-500:]}"
            )

        text = changes.stdout.decode("utf-8", "replace")
        forbidden = await asyncio.to_thread(paths.forbidden, text, self._workdir)
        if not forbidden:
            return None
        first_changes = "; ".join(forbidden[:5])
        return (
            f"the program changed what its tests run on ({counted(len(forbidden), 'path')}):"
            f" {first_changes!a:.500}"
        )

    async def aclose(self) -> None:
        """Remove the containers and the image of what the program left."""
        # One by one: Podman removes none of several if one of them was never made.
        commands = [
            ("rm", self._name),
            ("rm", f"{self._name}-tests"),
            ("rmi", f"{self._name}:left"),
        ]
        for command, name in commands:
            await self._runtime.call(command, "--force", name, seconds=_CALL_SECONDS)


_FOLDERS = ("logs/verifier", "tests")
