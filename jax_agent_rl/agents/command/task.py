"""What a row asks of a program: instruction, files, and the tests that decide the reward.

A row's ``extra_info`` names a task folder (``task``) in Harbor's format::

    task.toml          [agent] timeout_sec, [verifier] timeout_sec
    instruction.md     what the agent is asked to do
    environment/       files of the working folder; in the sandbox, a Dockerfile may only copy them
    tests/test.sh      decides: writes /logs/verifier/reward.txt; otherwise its exit status counts

or holds the parts itself: ``files`` and ``tests`` (name -> text), ``verifier`` (command line of the
tests).
"""

from __future__ import annotations

import math
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
_NEEDS_NO_BUILD = frozenset(
    {"ARG", "CMD", "COPY", "ENTRYPOINT", "ENV", "FROM", "LABEL", "SHELL", "USER", "WORKDIR"}
)
_HARBOR_VERIFIER = ("bash", "/tests/test.sh")
MAX_FILE_BYTES = 8 << 20
MAX_FOLDER_BYTES = 256 << 20
"""Of all files of a folder, which are in memory together."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CommandTask:
    """A task for a program.

    Attributes:
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
                raise DataError(
                    f"{kind} of a task: {error}; names are paths below the folder, without .."
                ) from None


def read_task(row: Mapping[str, Any], *, containers: bool = False) -> CommandTask:
    """Return a row's task.

    With ``containers``, a container runs it, so that its Dockerfile may build something.

    Raises:
        DataError: the task folder is incomplete or needs a container, or a part has the wrong type.
    """
    extra_info = row.get("extra_info") or {}
    user_texts = []
    for message in row["prompt"]:
        if message["role"] != "user":
            continue
        message = text_message(message)
        if message.get("media"):
            raise DataError(
                "the prompt shows images or videos, but a command reads text;"
                " put their files into the task"
            )
        user_texts.append(str(message["content"]))

    if extra_info.get("task"):
        folder = task_folder(row)
        if folder is None:
            raise DataError(
                f"extra_info.task must be the path of a folder, got {extra_info['task']!r}"
            )
        return read_harbor_task(folder, containers=containers)

    try:
        return CommandTask(
            instruction="\n\n".join(user_texts),
            files=_encoded(extra_info.get("files") or {}),
            tests=_encoded(extra_info.get("tests") or {}),
            verifier=tuple(shlex.split(extra_info.get("verifier") or "")),
        )
    except (AttributeError, TypeError, ValueError) as error:
        raise DataError(
            "extra_info of a row for agent 'command': files and tests are name -> text, verifier"
            f" is a command: {error}"
        ) from None


def read_harbor_task(folder: Path, *, containers: bool = False) -> CommandTask:
    """Read a task folder in Harbor's format; for the arguments see :func:`read_task`.

    Raises:
        DataError: a file is missing or malformed, or, without a container, the Dockerfile does more
            than copy files.
    """
    for name in ("task.toml", "instruction.md"):
        _check_inside(folder / name, folder)
    try:
        settings = tomllib.loads(read_regular_file(folder / "task.toml", MAX_FILE_BYTES).decode())
        instruction = read_regular_file(folder / "instruction.md", MAX_FILE_BYTES).decode()
    except (OSError, ValueError) as error:
        raise DataError(
            f"task {folder}: {error}; a task has task.toml, instruction.md and tests/test.sh"
        ) from None
    for name in ("agent", "environment", "verifier"):
        if not isinstance(settings.get(name, {}), dict):
            raise DataError(f"task {folder}: {name}={settings[name]!r} must be a table: [{name}]")
    if not (folder / "tests" / "test.sh").is_file():
        raise DataError(f"task {folder}: tests/test.sh is missing; it decides the reward")

    environment = folder / "environment"
    image = settings.get("environment", {}).get("docker_image")
    working_folder = WorkingFolder()
    build_context = None
    if not containers:
        working_folder = read_environment(environment, image=image)
        image = None
    else:
        _refuse_several_containers(environment)
        if not image:
            if (environment / "Dockerfile").is_file():
                build_context = environment
            else:
                working_folder = WorkingFolder(files=read_files(environment))

    return CommandTask(
        instruction=instruction,
        files=working_folder.files,
        workdir=working_folder.path,
        env=working_folder.env,
        tests=read_files(folder / "tests"),
        verifier=_HARBOR_VERIFIER,
        agent_seconds=_seconds(settings, "agent", folder),
        verifier_seconds=_seconds(settings, "verifier", folder),
        build_context=build_context,
        image=image or None,
        build_seconds=_seconds(settings, "environment", folder, "build_timeout_sec"),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkingFolder:
    """What a program finds: files by their paths in the folder, its absolute path, variables."""

    files: Mapping[str, bytes] = field(default_factory=dict)
    path: str = WORKDIR
    env: Mapping[str, str] = field(default_factory=dict)


def read_environment(
    environment: Path, *, image: str | None, key: str = "agent.command.container"
) -> WorkingFolder:
    """Read a task's folder ``environment`` for a sandbox, which has no images.

    It follows a Dockerfile that only copies files.

    Args:
        image: the task's ``docker_image``.
        key: setting that gives the task a container, for messages.

    Raises:
        DataError: the task needs a container.
    """
    _refuse_several_containers(environment)
    dockerfile = environment / "Dockerfile"
    if dockerfile.is_file():
        return read_dockerfile(dockerfile, key=key)
    if image:
        raise DataError(
            f"task {environment.parent}: docker_image={image!r} needs a container; set {key}"
        )
    return WorkingFolder(files=read_files(environment))


def _refuse_several_containers(environment: Path) -> None:
    compose_files = list(environment.glob("docker-compose*"))
    if compose_files:
        raise DataError(
            f"task {environment.parent}: environment/{compose_files[0].name} starts several"
            " containers, which is not supported"
        )


def read_dockerfile(path: Path, *, key: str = "agent.command.container") -> WorkingFolder:
    """Read a Dockerfile that builds nothing.

    Args:
        key: setting that gives the task a container, for messages.

    Raises:
        DataError: an instruction needs a container, copies something from or to elsewhere, or
            cannot be read.
    """
    workdir = WORKDIR
    env: dict[str, str] = {}
    files: dict[str, bytes] = {}
    for number, line in _instructions(path):
        instruction, _, arguments = line.partition(" ")
        instruction = instruction.upper()
        arguments = arguments.strip()
        where = f"{path}, line {number}: {line[:80]!r}"

        problem = _build_problem(instruction, arguments, has_files=bool(files))
        if problem:
            raise DataError(f"{where} {problem}; set {key}, or choose tasks that only COPY")

        try:
            if instruction == "WORKDIR":
                workdir = str(PurePosixPath(workdir) / arguments)
            elif instruction == "ENV":
                env |= _variables(arguments)
            elif instruction == "COPY":
                files |= _copied(path.parent, arguments, workdir, where)
        except ValueError as error:  # unbalanced quotes
            raise DataError(f"{where} cannot be read: {error}") from None
    return WorkingFolder(files=files, path=workdir, env=env)


def _build_problem(instruction: str, arguments: str, *, has_files: bool) -> str | None:
    """Return why an instruction cannot be followed without building an image; None if it can."""
    if instruction not in _NEEDS_NO_BUILD:
        return "builds something, which takes a container"
    if instruction == "COPY" and "--from=" in arguments:
        return "builds something, which takes a container"
    if instruction in ("COPY", "ENV", "WORKDIR") and "$" in arguments:
        return "uses a variable, which takes a container"
    if instruction == "WORKDIR" and has_files:
        return "changes the working folder after files were copied, which takes a container"
    return None


def _variables(arguments: str) -> dict[str, str]:
    """Read ``KEY=value …``, or the older ``KEY value``."""
    first, _, value = arguments.partition(" ")
    if "=" not in first:
        return {first: value.strip()}
    variables = {}
    for assignment in shlex.split(arguments):
        name, _, value = assignment.partition("=")
        variables[name] = value
    return variables


def _instructions(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the first line's number and the text of each instruction, with its continued lines.

    Raises:
        DataError: the file is not text.
    """
    try:
        text = _read(path, path.parent).decode()
    except UnicodeDecodeError as error:
        raise DataError(f"{path} of a task cannot be read: {error}") from None

    joined = ""
    first_line = 0
    for number, line in enumerate(text.splitlines(), start=1):
        is_blank = not line.strip() and not joined
        if is_blank or line.lstrip().startswith("#"):
            continue
        if not joined:
            first_line = number
        joined += line.strip().removesuffix("\\")
        if not line.rstrip().endswith("\\"):
            yield first_line, joined.strip()
            joined = ""


def _copied(folder: Path, arguments: str, workdir: str, where: str) -> dict[str, bytes]:
    """Return the files that a COPY copies, by their paths in the working folder.

    As in Docker, paths of sources begin at the Dockerfile's folder, and do not leave it.
    """
    words = [word for word in shlex.split(arguments) if not word.startswith("--")]
    if len(words) < 2:
        raise DataError(f"{where} has no source and target")
    *sources, target = words
    target_path = PurePosixPath(workdir) / target
    if not target_path.is_relative_to(workdir):
        raise DataError(f"{where} copies to {target_path}, outside the working folder {workdir}")
    target_path = target_path.relative_to(workdir)
    into_folder = target.endswith(("/", ".")) or len(sources) > 1

    files: dict[str, bytes] = {}
    for source in sources:
        if ".." in PurePosixPath(source).parts:
            raise DataError(f"{where} copies from outside of {folder}")
        source = source.lstrip("/")
        if source in ("", ".", "./"):
            source_paths = [folder]
        else:
            source_paths = sorted(folder.glob(source))
        if not source_paths:
            raise DataError(f"{where}: there is no {source!r} in {folder}")

        for path in source_paths:
            if path.is_dir():
                _check_inside(path, folder)
                for name, data in read_files(path).items():
                    files[str(target_path / name)] = data
            elif into_folder:
                files[str(target_path / path.name)] = _read(path, folder)
            else:
                files[str(target_path)] = _read(path, folder)
    return files


def read_files(
    folder: Path, *, everything: bool = False, links_may_leave: bool = False
) -> dict[str, bytes]:
    """Return the contents of the files below a folder by their paths.

    Args:
        everything: also its Dockerfile and hidden files, which are left out otherwise.
        links_may_leave: whether files may be links to files elsewhere on this machine. A task
            comes from others, whose links could show a program what it must not see.

    Raises:
        DataError: a file is too large, or all of them together; a link leads out of the folder, or
            to a folder, which would be left out.
    """
    files = {}
    bytes_left = MAX_FOLDER_BYTES
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder)
        is_hidden = any(part.startswith(".") or part == "__pycache__" for part in name.parts)
        is_left_out = is_hidden or name == Path("Dockerfile")
        if is_left_out and not everything:
            continue

        if path.is_file():
            data = _read(path, None if links_may_leave else folder)
            bytes_left -= len(data)
            if bytes_left < 0:
                raise DataError(
                    f"the files in {folder} have more than {MAX_FOLDER_BYTES} bytes together"
                )
            files[str(name)] = data
        elif path.is_symlink() and path.is_dir() and not links_may_leave:
            raise DataError(f"{path} of a task is a link to a folder; copy the folder there")
    return files


def _check_inside(path: Path, folder: Path) -> None:
    """Check that a path of a task leads nowhere else.

    Raises:
        DataError: it is a link, or below one, that leads out of the folder.
    """
    real_path = path.resolve()
    if not real_path.is_relative_to(folder.resolve()):
        raise DataError(f"{path} of a task leads out of its folder, to {real_path}")


def _read(path: Path, folder: Path | None) -> bytes:
    """Return the contents of a file, which no link may lead out of ``folder``; None: it may."""
    if folder is not None:
        _check_inside(path, folder)
    try:
        return read_regular_file(path, MAX_FILE_BYTES)
    except (OSError, ValueError) as error:
        raise DataError(f"{path} of a task cannot be read: {error}") from None


def _encoded(files: Mapping[str, str]) -> dict[str, bytes]:
    return {name: text.encode() for name, text in files.items()}


def _seconds(
    settings: Mapping[str, Any], section: str, folder: Path, key: str = "timeout_sec"
) -> float | None:
    """Return a time limit of a task's settings; None if it has none."""
    value = settings.get(section, {}).get(key)
    if value is None:
        return None
    if not isinstance(value, int | float) or not 0 < value < math.inf:  # TOML knows nan and inf
        raise DataError(f"task {folder}: [{section}] {key}={value!r} must be a number above 0")
    return value
