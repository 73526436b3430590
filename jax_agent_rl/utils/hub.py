"""A model's files: a local folder, or a repository of the Hugging Face Hub, downloaded once.

``model.path: Qwen/Qwen3-8B`` names a repository, ``Qwen/Qwen3-8B@REVISION`` its branch, tag or commit, unless a local
folder has that name. Downloads are kept in the Hub's cache (``HF_HOME``); ``HF_TOKEN`` opens gated repositories, and
``HF_HUB_OFFLINE=1`` uses the cache alone.
"""

from __future__ import annotations

import functools
import os
import re
from pathlib import Path

from jax_agent_rl.errors import ModelError

_REPOSITORY = re.compile(r"(?P<id>[A-Za-z0-9][\w.-]*/[\w.-]+)(?:@(?P<revision>[\w./-]+))?")
_DESCRIBING = ("*.json", "*.jinja", "*.txt", "tokenizer.model")
_WEIGHTS = ("*.safetensors",)
_HUB_SECONDS = 5


def model_folder(path: str | os.PathLike[str], *, weights: bool = False) -> Path:
    """Return the folder of a model, downloaded from the Hub if need be; its files are not checked.

    Args:
        path: a folder (``~`` is expanded), or ``owner/name[@revision]`` on the Hub.
        weights: whether the safetensors files are needed, too.

    Raises:
        ModelError: there is no such repository or revision, it is closed to this user, or it cannot be reached.
    """
    folder = Path(path).expanduser()
    named = hub_name(path)
    if named is None:
        return folder
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError, RevisionNotFoundError

    repository, revision = named
    neither = f"there is no folder {str(folder)!r} here, and "
    try:
        described = _download(repository, revision, _DESCRIBING)
        # A snapshot's folder is named by its commit: take the same one even if the branch has moved on.
        return _download(repository, described.name, _WEIGHTS) if weights else described
    except GatedRepoError:
        problem = f"{repository} is gated: accept its licence on the Hub and set HF_TOKEN"
    except RepositoryNotFoundError:
        problem = f"the Hub has no model {repository!r} for you; correct model.path, or set HF_TOKEN if it is private"
    except RevisionNotFoundError:
        problem = f"{repository} has no revision {revision!r}; leave @{revision} out of model.path, or correct it"
    except (HfHubHTTPError, OSError) as error:  # OSError: no connection, and a full disk
        said = [*filter(None, [_unreachable()]), *str(error).strip().splitlines(), type(error).__name__]
        problem = f"{repository!r} could not be downloaded from the Hub ({said[0]}); set model.path to a folder"
    raise ModelError(neither + problem)


@functools.cache
def _download(repository: str, revision: str | None, patterns: tuple[str, ...]) -> Path:
    """Ask the Hub once per process; if it does not answer, use its local cache alone."""
    from huggingface_hub import snapshot_download

    return Path(
        snapshot_download(
            repository, revision=revision, allow_patterns=list(patterns), local_files_only=_unreachable() is not None
        )
    )


@functools.cache
def _unreachable() -> str | None:
    """Return why the Hub does not answer; None if it does, or is not to be asked.

    Without this, its client would retry every request for most of a minute.
    """
    import httpx
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return None
    try:
        httpx.head(constants.ENDPOINT, timeout=_HUB_SECONDS)
    except httpx.HTTPError as error:
        return f"{constants.ENDPOINT} did not answer: {str(error) or type(error).__name__}"
    return None


def hub_name(path: str | os.PathLike[str]) -> tuple[str, str | None] | None:
    """Return repository and revision; None if ``path`` is a local folder or no Hub name.

    >>> hub_name("Qwen/Qwen3-8B@main"), hub_name("./Qwen/Qwen3-8B"), hub_name("/models/qwen")
    (('Qwen/Qwen3-8B', 'main'), None, None)
    """
    found = _REPOSITORY.fullmatch(os.fspath(path))
    if found is None or Path(path).exists():
        return None
    return found["id"], found["revision"]


def absolute_model_path(path: str) -> str:
    """Return ``path`` in a form that does not depend on the working directory."""
    return path if hub_name(path) else str(Path(path).expanduser().absolute())
