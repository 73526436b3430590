"""Files of models and data sets: in a local folder, or of a repository of the Hugging Face Hub, downloaded once.

``model.path: Qwen/Qwen3-8B`` names a repository, ``Qwen/Qwen3-8B@REVISION`` its branch, tag or
commit, unless a local folder has that name. Downloads are kept in the Hub's cache (``HF_HOME``);
``HF_TOKEN`` opens gated repositories, and ``HF_HUB_OFFLINE=1`` uses the cache alone.
"""

from __future__ import annotations

import fnmatch
import functools
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from jax_agent_rl.errors import DataError, ModelError
from jax_agent_rl.utils.files import expand_path

_REPOSITORY = re.compile(r"(?P<id>[A-Za-z0-9][\w.-]*/[\w.-]+)(?:@(?P<revision>[\w./-]+))?")
_CARD_HEAD = re.compile(r"\ufeff?\s*---[ \t]*\r?\n(.*?)\r?\n---[ \t]*(?:\r?\n|$)", re.S)
_DESCRIBING = ("*.json", "*.jinja", "*.txt", "tokenizer.model")
_WEIGHTS = ("*.safetensors",)
_HUB_SECONDS = 5
_OF_KIND = {
    "model": ("model.path", "a folder", ModelError),
    "dataset": ("data.train / data.eval", "files here", DataError),
}
"""Key of the configuration that names one, what to set it to instead, and the error."""


def model_folder(path: str | os.PathLike[str], *, weights: bool = False) -> Path:
    """Return the folder of a model, downloaded from the Hub if need be; its files are not checked.

    Args:
        path: a folder (``~`` is expanded), or ``owner/name[@revision]`` on the Hub.
        weights: whether the safetensors files are needed, too.

    Raises:
        ModelError: there is no such repository or revision, it is closed to this user, or it cannot
            be reached.
    """
    folder = expand_path(path)
    named = hub_name(path)
    if named is None:
        return folder
    repository, revision = named
    with _explained("model", repository, revision):
        described = _download("model", repository, revision, _DESCRIBING)
        # A snapshot's folder is named by its commit: take the same one even if the branch has moved
        # on.
        return _download("model", repository, described.name, _WEIGHTS) if weights else described


_MODEL_PARTS = {"config.json": "model", "tokenizer.json": "tokenizer"}


def require_model_file(folder: Path, name: str) -> Path:
    """Return ``config.json`` or ``tokenizer.json`` of a model's folder.

    Raises:
        ModelError: it is missing.
    """
    file = folder / name
    if not file.is_file():
        raise ModelError(
            f"no {_MODEL_PARTS[name]} at {str(folder)!r} ({name} is missing); set model.path to a"
            " Hugging Face folder, or run `jax-agent-rl fetch-model` for the quickstart's"
        )
    return file


def dataset_files(
    repository: str,
    revision: str | None,
    *,
    pattern: str | None = None,
    name: str | None = None,
    split: str = "train",
    suffixes: Sequence[str],
) -> list[Path]:
    """Return the files of a Hub dataset, downloaded if need be.

    Args:
        repository: ``owner/name``.
        revision: branch, tag or commit.
        pattern: a glob of the files; None: they are found by name and split, like
            ``datasets.load_dataset`` does, from the dataset card's ``configs``, else by their names
            (``data/train-00000-of-00001.parquet``).
        name: the configuration (subset); None: the only or default one.
        split: the split.
        suffixes: of files that can be used.

    Raises:
        DataError: there is no such repository, revision, configuration or file, or the Hub cannot
            be reached.
    """
    with _explained("dataset", repository, revision):
        folder = _download("dataset", repository, revision, ("README.md",))
        patterns = (
            (pattern,)
            if pattern
            else _split_patterns(folder / "README.md", repository, name, split)
        )
        complete = [glob for glob in patterns if glob.endswith(tuple(suffixes))]
        begun = [glob.removesuffix(".*") for glob in patterns if glob not in complete]
        wanted = (*complete, *(glob + suffix for glob in begun for suffix in suffixes))
        folder = _download("dataset", repository, folder.name, wanted)
    names = (str(file.relative_to(folder)) for file in sorted(folder.rglob("*")) if file.is_file())
    found = [folder / name for name in names if any(fnmatch.fnmatch(name, glob) for glob in wanted)]
    if not found:
        raise DataError(
            f"dataset {repository} has no files ({', '.join(suffixes)}) that match"
            f" {', '.join(patterns)}; name them, like hf://datasets/{repository}/data/*.parquet. Of"
            " most public datasets the Hub keeps Parquet files in"
            f" hf://datasets/{repository}@refs/convert/parquet/NAME/SPLIT/*.parquet"
        )
    return found


def _split_patterns(card: Path, repository: str, name: str | None, split: str) -> tuple[str, ...]:
    """Return globs of the files of a split."""
    configs = _card_settings(card, repository).get("configs")
    if not configs:
        if name is not None:
            raise DataError(
                f"the card of dataset {repository} names no configurations; leave out name={name!r}"
            )
        return tuple(start + split + end for start in ("", "*/") for end in (".*", "-*", "/*"))
    by_name = {str(config.get("config_name")): config for config in configs}
    default = next((key for key, config in by_name.items() if config.get("default")), None)
    chosen = name or default or (next(iter(by_name)) if len(by_name) == 1 else "default")
    if chosen not in by_name:
        raise DataError(
            f"dataset {repository} has no configuration {chosen!r}; set name to one of"
            f" {sorted(by_name)}"
        )
    listed = by_name[chosen].get("data_files") or ()
    if isinstance(listed, str) or not all(isinstance(one, Mapping) for one in listed):
        listed = [{"split": "train", "path": listed}]
    paths = {str(one["split"]): one["path"] for one in listed}
    if split not in paths:
        raise DataError(
            f"dataset {repository}, configuration {chosen}: no split {split!r}; there are"
            f" {sorted(paths)}"
        )
    return (paths[split],) if isinstance(paths[split], str) else tuple(paths[split])


def _card_settings(card: Path, repository: str) -> Mapping[str, Any]:
    """Return the YAML at the head of a dataset card; empty without."""
    import yaml

    from jax_agent_rl.utils.yaml_text import load_yaml

    text = card.read_text(encoding="utf-8", errors="replace") if card.is_file() else ""
    head = _CARD_HEAD.match(text)
    if head is None:
        return {}
    try:
        settings = load_yaml(head[1])
    except yaml.YAMLError as error:
        raise DataError(
            f"the card of dataset {repository} is not valid YAML ({error}); name its files, like "
            f"hf://datasets/{repository}/data/*.parquet"
        ) from None
    return settings if isinstance(settings, Mapping) else {}


@contextmanager
def _explained(
    kind: Literal["model", "dataset"], repository: str, revision: str | None
) -> Iterator[None]:
    """Turn failures of a download into one error that says what to do."""
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    key, local, error = _OF_KIND[kind]
    try:
        yield
        return
    except GatedRepoError:
        problem = f"{repository} is gated: accept its licence on the Hub and set HF_TOKEN"
    except RepositoryNotFoundError:
        problem = (
            f"the Hub has no {kind} {repository!r} for you; correct {key}, or set HF_TOKEN if it is"
            " private"
        )
    except RevisionNotFoundError:
        problem = (
            f"{repository} has no revision {revision!r}; leave @{revision} out of {key}, or"
            " correct it"
        )
    except (HfHubHTTPError, OSError) as failure:  # OSError: no connection, and a full disk
        said = [
            *filter(None, [_unreachable()]),
            *str(failure).strip().splitlines(),
            type(failure).__name__,
        ]
        problem = (
            f"{repository!r} could not be downloaded from the Hub ({said[0]}); set {key} to {local}"
        )
    raise error(
        f"there is no {'folder' if kind == 'model' else 'file'} {repository!r} here, and {problem}"
    )


@functools.cache
def _download(kind: str, repository: str, revision: str | None, patterns: tuple[str, ...]) -> Path:
    """Ask the Hub once per process; if it does not answer, use its local cache alone."""
    from huggingface_hub import snapshot_download

    return Path(
        snapshot_download(
            repository,
            repo_type=kind,
            revision=revision,
            allow_patterns=list(patterns),
            local_files_only=_unreachable() is not None,
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


def read_pretrained(kind: Any, folder: Path, **options: Any) -> Any:
    """Read one of transformers' objects from a folder; code that the folder brings is never run, nor asked about.

    Args:
        kind: class with ``from_pretrained``, such as ``AutoTokenizer``.
        folder: of the model.
        options: further arguments of ``from_pretrained``.

    Raises:
        ModelError: it can be read with code of the folder only.
        OSError, ValueError: it cannot be read.
    """
    try:
        return kind.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False, **options
        )
    except ValueError as error:
        if "trust_remote_code" not in str(error):
            raise
        raise ModelError(
            f"{folder} brings code of its own (auto_map in its JSON files), which is never run;"
            " choose a model of a class that transformers has, or remove auto_map if"
            f" {kind.__name__} can do without"
        ) from None


def absolute_model_path(path: str) -> str:
    """Return ``path`` in a form that does not depend on the working directory."""
    return path if hub_name(path) else str(expand_path(path).absolute())
