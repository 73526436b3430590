"""Images cannot be built here; what they copy and run is there, and installs pinned versions."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from itertools import chain
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
DOCKERFILES = sorted((ROOT / "docker").glob("*.Dockerfile"))


def instructions(file: Path) -> list[tuple[str, str]]:
    """(instruction, its text), continued lines joined."""
    lines = [line for line in file.read_text().splitlines() if not line.startswith("#")]
    joined = re.sub(r"\\\n", " ", "\n".join(lines))
    named_lines = []
    for line in joined.splitlines():
        if line:
            name, _, text = line.partition(" ")
            named_lines.append((name, text.strip()))
    return named_lines


def environment_script(file: Path) -> list[str]:
    """The command that installs."""
    (text,) = [
        text for name, text in instructions(file) if name == "RUN" and "_environment.sh" in text
    ]
    return shlex.split(text)


@pytest.mark.parametrize("file", DOCKERFILES, ids=lambda file: file.stem)
def test_what_an_image_copies_exists_and_is_not_ignored(file: Path):
    ignored = {line.removeprefix("**/") for line in (ROOT / ".dockerignore").read_text().split()}
    copied = [text.split()[:-1] for name, text in instructions(file) if name == "COPY"]
    sources = list(chain.from_iterable(copied))
    assert {source for source in sources if not (ROOT / source).exists()} == set()
    assert not ignored & {part for source in sources for part in Path(source).parts}


@pytest.mark.parametrize("file", DOCKERFILES, ids=lambda file: file.stem)
def test_its_commands_are_valid_shell_and_its_programs_on_the_path(file: Path):
    for name, text in instructions(file):
        assert name in {"FROM", "RUN", "WORKDIR", "ENV", "COPY", "CMD"}
        if name == "RUN":
            subprocess.run(["bash", "-n", "-c", text], check=True)
    environment = {}
    for name, text in instructions(file):
        if name == "ENV":
            environment.update(word.split("=", 1) for word in shlex.split(text))
    assert environment["PATH"].split(":")[0] == environment["JAX_AGENT_RL_VENV"] + "/bin"
    assert ("WORKDIR", "/app") in instructions(file)  # where launch/templates look for it


@pytest.mark.parametrize("file", DOCKERFILES, ids=lambda file: file.stem)
def test_its_python_gets_the_pinned_versions(file: Path, tmp_path: Path):
    (image,) = [text for name, text in instructions(file) if name == "FROM"]
    version = re.match(r"python:(3\.\d+)-", image)[1]
    script, *arguments = environment_script(file)
    assert os.access(ROOT / script, os.X_OK)
    python = tmp_path / f"python{version}"  # answers what the scripts ask of it
    python.write_text(f'#!/bin/sh\ncase "$2" in *print*) echo {version} ;; esac\n')
    python.chmod(0o755)
    environment = os.environ | {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "JAX_AGENT_RL_VENV": str(tmp_path / "venv"),
    }
    environment.pop("PYTHON", None)  # it would be taken instead of the image's
    result = subprocess.run(
        [ROOT / script, "--dry-run", *arguments],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    (lock,) = set(re.findall(r" --constraints (\S+)", result.stdout))
    assert Path(lock).name == f"{file.stem}.txt"
    assert Path(lock).is_file()


def test_there_is_one_for_every_kind_of_accelerator():
    assert [file.stem for file in DOCKERFILES] == ["gpu", "tpu"]
