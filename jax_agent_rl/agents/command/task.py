"""What a row asks of a program: instruction, files, and the tests that decide the reward.

A row's ``extra_info`` names a task folder (``task``) in Harbor's format::

    task.toml          [agent] timeout_sec, [verifier] timeout_sec
    instruction.md     what the agent is asked to do
    environment/       files of the working folder; in the sandbox, a Dockerfile that only copies them
    tests/test.sh      decides: writes /logs/verifier/reward.txt, else its exit status

or holds the parts itself: ``files`` and ``tests`` (name -> text), ``verifier`` (command line of the tests).
"""

from __future__ import annotations

import shlex
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from jax_agent_rl.agents.command.workspace import file_entries
from jax_agent_rl.data.task_folder import task_folder
from jax_agent_rl.errors import DataError
from jax_agent_rl.utils.files import read_regular_file
from jax_agent_rl.utils.media import text_message

WORKDIR = "/app"
_NEEDS_NO_BUILD = frozenset({"ARG", "CMD", "COPY", "ENTRYPOINT", "ENV", "FROM", "LABEL", "SHELL", "USER", "WORKDIR"})
_HARBOR_VERIFIER = ("bash", "/tests/test.sh")
MAX_FILE_BYTES = 8 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class CommandTask:
    """A task for a program.

    Attributes:
        instruction: what the program is asked to do.
        files: contents by path in the working folder when the program starts.
        workdir: the absolute path under which program and tests see the working folder.
        env: further variables of the program's environment.
        tests: contents by path below ``/tests``, shown to the verifier alone.
        verifier: its command line; empty: there is none, the reward is another function's.
        agent_seconds, verifier_seconds: time limits; None: the configuration's.
        build_context: folder from whose Dockerfile the task's image is built; None: there is none.
        image: the task's own image, if it is not built; None: the configuration's.
        build_seconds: time limit of the build; None: a default.
    """

    instruction: str
    files: Mapping[str, bytes] = field(default_factory=dict)
    workdir: str = WORKDIR
    env: Mapping[str, str] = field(default_factory=dict)
    tests: Mapping[str, bytes] = field(default_factory=dict)
    verifier: tuple[str, ...] = ()
    agent_seconds: float | None = None
    verifier_seconds: float | None = None
    build_context: Path | None = None
    image: str | None = None
    build_seconds: float | None = None

    def __post_init__(self) -> None:
        for kind, files in (("files", self.files), ("tests", self.tests)):
            try:
                file_entries(files)
            except ValueError as error:
                raise DataError(f"{kind} of a task: {error}; names are paths below the folder, without ..") from None


def read_task(row: Mapping[str, Any], *, containers: bool = False) -> CommandTask:
    """Return a row's task; ``containers``: whether a container runs it, so that its Dockerfile may build something.

    Raises:
        DataError: the task folder is incomplete or needs a container, or a part has the wrong type.
    """
    extra = row.get("extra_info") or {}
    asked = [text_message(message) for message in row["prompt"] if message["role"] == "user"]
    if any(message.get("media") for message in asked):
        raise DataError("the prompt shows images or videos, but a command reads text; put their files into the task")
    instruction = "\n\n".join(str(message["content"]) for message in asked)
    if extra.get("task"):
        folder = task_folder(row)
        if folder is None:
            raise DataError(f"extra_info.task must be the path of a folder, got {extra['task']!r}")
        return read_harbor_task(folder, containers=containers)
    try:
        return CommandTask(
            instruction=instruction,
            files=_encoded(extra.get("files") or {}),
            tests=_encoded(extra.get("tests") or {}),
            verifier=tuple(shlex.split(extra.get("verifier") or "")),
        )
    except (AttributeError, TypeError, ValueError) as error:
        raise DataError(
            f"extra_info of a row for agent 'command': files and tests are name -> text, verifier is a command: {error}"
        ) from None


def read_harbor_task(folder: Path, *, containers: bool = False) -> CommandTask:
    """Read a task folder in Harbor's format; for the arguments see :func:`read_task`.

    Raises:
        DataError: a file is missing or malformed, or, without a container, the Dockerfile does more than copy files.
    """
    try:
        settings = tomllib.loads(read_regular_file(folder / "task.toml", MAX_FILE_BYTES).decode())
        instruction = read_regular_file(folder / "instruction.md", MAX_FILE_BYTES).decode()
    except (OSError, ValueError) as error:
        raise DataError(f"task {folder}: {error}; a task has task.toml, instruction.md and tests/test.sh") from None
    if not (folder / "tests" / "test.sh").is_file():
        raise DataError(f"task {folder}: tests/test.sh is missing; it decides the reward")
    environment = folder / "environment"
    if compose := next(environment.glob("docker-compose*"), None):
        raise DataError(f"task {folder}: environment/{compose.name} starts several containers, which is not supported")
    dockerfile = environment / "Dockerfile"
    image = settings.get("environment", {}).get("docker_image")
    if image and not containers and not dockerfile.is_file():
        raise DataError(f"task {folder}: docker_image={image!r} needs a container; set agent.command.container")
    image = image if containers else None
    is_built = dockerfile.is_file() and not image
    files, workdir, env = {}, WORKDIR, {}
    if is_built and not containers:
        files, workdir, env = read_dockerfile(dockerfile)
    elif not is_built and not image:
        files = read_files(environment)
    return CommandTask(
        instruction=instruction,
        files=files,
        workdir=workdir,
        env=env,
        tests=read_files(folder / "tests"),
        verifier=_HARBOR_VERIFIER,
        agent_seconds=_seconds(settings, "agent", folder),
        verifier_seconds=_seconds(settings, "verifier", folder),
        build_context=environment if is_built and containers else None,
        image=image,
        build_seconds=_seconds(settings, "environment", folder, "build_timeout_sec"),
    )


def read_dockerfile(path: Path) -> tuple[dict[str, bytes], str, dict[str, str]]:
    """Read a Dockerfile that builds nothing: the working folder's files and path, and variables.

    Raises:
        DataError: an instruction needs a container, or copies something to elsewhere.
    """
    workdir, env, files = WORKDIR, {}, {}
    for number, line in _instructions(path):
        name, _, rest = line.partition(" ")
        name, rest = name.upper(), rest.strip()
        where = f"{path}, line {number}: {line[:80]!r}"
        problem = _build_problem(name, rest, has_files=bool(files))
        if problem:
            raise DataError(f"{where} {problem}; set agent.command.container, or choose tasks that only COPY")
        if name == "WORKDIR":
            workdir = str(PurePosixPath(workdir) / rest)
        elif name == "ENV":
            env |= _variables(rest)
        elif name == "COPY":
            files |= _copied(path.parent, rest, workdir, where)
    return files, workdir, env


def _build_problem(name: str, rest: str, *, has_files: bool) -> str | None:
    """Return why an instruction cannot be followed without building an image; None if it can."""
    if name not in _NEEDS_NO_BUILD or (name == "COPY" and "--from=" in rest):
        return "builds something, which takes a container"
    if name in ("COPY", "ENV", "WORKDIR") and "$" in rest:
        return "uses a variable, which takes a container"
    if name == "WORKDIR" and has_files:
        return "changes the working folder after files were copied, which takes a container"
    return None


def _variables(rest: str) -> dict[str, str]:
    """Read ``KEY=value …``, or the older ``KEY value``."""
    first, _, value = rest.partition(" ")
    if "=" not in first:
        return {first: value.strip()}
    return {name: value for name, _, value in (part.partition("=") for part in shlex.split(rest))}


def _instructions(path: Path) -> Iterator[tuple[int, str]]:
    """Yield line number and text of each instruction, continued lines joined."""
    joined, begun = "", 0
    for number, line in enumerate(_read(path).decode().splitlines(), start=1):
        if line.lstrip().startswith("#") or not (joined or line.strip()):
            continue
        begun = begun if joined else number
        joined += line.strip().removesuffix("\\")
        if not line.rstrip().endswith("\\"):
            yield begun, joined.strip()
            joined = ""


def _copied(folder: Path, rest: str, workdir: str, where: str) -> dict[str, bytes]:
    *sources, target = (part for part in shlex.split(rest) if not part.startswith("--"))
    place = PurePosixPath(workdir) / target
    if not place.is_relative_to(workdir):
        raise DataError(f"{where} copies to {place}, outside the working folder {workdir}")
    files: dict[str, bytes] = {}
    into_folder = target.endswith(("/", ".")) or len(sources) > 1
    for source in sources:
        found = sorted(folder.glob(source)) if source not in (".", "./") else [folder]
        if not found:
            raise DataError(f"{where}: there is no {source!r} in {folder}")
        for one in found:
            if one.is_dir():
                files |= {str(place / name): data for name, data in read_files(one).items()}
            else:
                files[str(place / one.name if into_folder else place)] = _read(one)
    return {str(PurePosixPath(name).relative_to(workdir)): data for name, data in files.items()}


def read_files(folder: Path) -> dict[str, bytes]:
    """Return the contents of the files below a folder by their paths, without its Dockerfile and hidden files.

    Raises:
        DataError: a file is too large.
    """

    def is_wanted(path: Path) -> bool:
        parts = path.relative_to(folder).parts
        return (
            path.is_file()
            and parts != ("Dockerfile",)
            and not any(p.startswith(".") or p == "__pycache__" for p in parts)
        )

    paths = filter(is_wanted, sorted(folder.rglob("*")))
    return {str(path.relative_to(folder)): _read(path) for path in paths}


def _read(path: Path) -> bytes:
    try:
        return read_regular_file(path, MAX_FILE_BYTES)
    except (OSError, ValueError) as error:
        raise DataError(f"{path} of a task cannot be read: {error}") from None


def _encoded(files: Mapping[str, str]) -> dict[str, bytes]:
    return {name: text.encode() for name, text in files.items()}


def _seconds(settings: Mapping[str, Any], section: str, folder: Path, key: str = "timeout_sec") -> float | None:
    value = settings.get(section, {}).get(key)
    if value is not None and not (isinstance(value, int | float) and value > 0):
        raise DataError(f"task {folder}: [{section}] {key}={value!r} must be a number above 0")
    return value
