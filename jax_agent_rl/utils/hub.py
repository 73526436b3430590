"""Where a model's files lie: a folder of this machine, or a repository of the Hugging Face Hub, brought here once.

``model.path: Qwen/Qwen3-8B`` names a repository, ``Qwen/Qwen3-8B@REVISION`` a branch, tag or commit of it, as long as
no folder here has that name. The Hub's own cache (``HF_HOME``) keeps what was brought; ``HF_TOKEN`` opens what is gated
and ``HF_HUB_OFFLINE=1`` asks nobody.
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
    """The folder of a model; what is named on the Hub is downloaded, unless it is here.

    Args:
        path: a folder (``~`` is known), or ``owner/name[@revision]`` on the Hub.
        weights: the safetensors files are needed, too.

    Returns:
        the folder; whoever reads it says what is missing in it.

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
        described = _brought(repository, revision, _DESCRIBING)
        # Of the same commit, should the branch have moved on meanwhile: a snapshot's folder has its name.
        return _brought(repository, described.name, _WEIGHTS) if weights else described
    except GatedRepoError:
        problem = f"{repository} is gated: accept its licence on the Hub and set HF_TOKEN"
    except RepositoryNotFoundError:
        problem = f"the Hub has no model {repository!r} for you; correct model.path, or set HF_TOKEN if it is private"
    except RevisionNotFoundError:
        problem = f"{repository} has no revision {revision!r}; leave @{revision} out of model.path, or correct it"
    except (HfHubHTTPError, OSError) as error:  # OSError: no connection, and a full disk
        said = [*filter(None, [_silence()]), *str(error).strip().splitlines(), type(error).__name__]
        problem = f"{repository!r} could not be brought from the Hub ({said[0]}); set model.path to a folder"
    raise ModelError(neither + problem)


@functools.cache
def _brought(repository: str, revision: str | None, patterns: tuple[str, ...]) -> Path:
    """Asks the Hub once in a process; where that does not answer, only its cache here."""
    from huggingface_hub import snapshot_download

    return Path(
        snapshot_download(
            repository, revision=revision, allow_patterns=list(patterns), local_files_only=_silence() is not None
        )
    )


@functools.cache
def _silence() -> str | None:
    """Say that the Hub does not answer; None if it does, or nobody is to be asked.

    Without this, its client would repeat every request for most of a minute.
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
    """Repository and revision; None if ``path`` is a folder here, or nothing the Hub could have.

    >>> hub_name("Qwen/Qwen3-8B@main"), hub_name("./Qwen/Qwen3-8B"), hub_name("/models/qwen")
    (('Qwen/Qwen3-8B', 'main'), None, None)
    """
    found = _REPOSITORY.fullmatch(os.fspath(path))
    if found is None or Path(path).exists():
        return None
    return found["id"], found["revision"]


def placeless(path: str) -> str:
    """``path`` as a process in another working directory has to be told it."""
    return path if hub_name(path) else str(Path(path).expanduser().absolute())
