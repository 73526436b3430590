"""Files of models and data sets, from a local folder or downloaded once from the Hugging Face Hub.

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
_MODEL_FILES = ("*.json", "*.jinja", "*.txt", "tokenizer.model")
_WEIGHTS = ("*.safetensors",)
_HUB_SECONDS = 5
_KINDS = {
    "model": ("model.path", "a folder", ModelError),
    "dataset": ("data.train / data.eval", "files here", DataError),
}
"""By kind of repository: the configuration key that names it, what to set it to instead, the error.
"""


def model_folder(path: str | os.PathLike[str], *, weights: bool = False) -> Path:
    """Return the folder of a model, downloaded from the Hub if need be; its files are not checked.

    Args:
        path: a folder (``~`` is expanded), or ``owner/name[@revision]`` on the Hub.
        weights: whether the safetensors files are needed as well.

    Raises:
        ModelError: there is no such repository or revision, it is closed to this user, or it cannot
            be reached.
    """
    repository_and_revision = hub_name(path)
    if repository_and_revision is None:
        return expand_path(path)

    repository, revision = repository_and_revision
    with _explain_failure("model", repository, revision):
        snapshot = download_snapshot("model", repository, revision, _MODEL_FILES)
        if not weights:
            return snapshot
        # A snapshot's folder is named by its commit: take the same one even if the branch has moved
        # on.
        return download_snapshot("model", repository, snapshot.name, _WEIGHTS)


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
        pattern: a glob of the files. None finds them by name and split, as
            ``datasets.load_dataset`` does: from the dataset card's ``configs``, else by their names
            (``data/train-00000-of-00001.parquet``).
        name: the configuration (subset); None is the only or the default one.
        split: such as ``train``.
        suffixes: of files that can be used.

    Raises:
        DataError: there is no such repository, revision, configuration or file, or the Hub cannot
            be reached.
    """
    with _explain_failure("dataset", repository, revision):
        card_folder = download_snapshot("dataset", repository, revision, ("README.md",))
        if pattern:
            patterns: tuple[str, ...] = (pattern,)
        else:
            patterns = _split_patterns(card_folder / "README.md", repository, name, split)
        file_patterns = _with_suffixes(patterns, suffixes)
        # A snapshot's folder is named by its commit: the files are to be of the card's commit.
        folder = download_snapshot("dataset", repository, card_folder.name, file_patterns)

    files = []
    for file in sorted(folder.rglob("*")):
        file_name = str(file.relative_to(folder))
        is_match = any(fnmatch.fnmatch(file_name, glob) for glob in file_patterns)
        if is_match and file.is_file():
            files.append(file)
    if not files:
        raise DataError(
            f"dataset {repository} has no files ({', '.join(suffixes)}) that match"
            f" {', '.join(patterns)}; name them, like hf://datasets/{repository}/data/*.parquet. Of"
            " most public datasets the Hub keeps Parquet files in"
            f" hf://datasets/{repository}@refs/convert/parquet/NAME/SPLIT/*.parquet"
        )
    return files


def _with_suffixes(patterns: Sequence[str], suffixes: Sequence[str]) -> tuple[str, ...]:
    """Return globs that match files with these suffixes alone.

    A glob that has one of the suffixes already stays as it is; the others follow, one per suffix.
    """
    complete = [glob for glob in patterns if glob.endswith(tuple(suffixes))]
    completed = []
    for glob in patterns:
        if glob in complete:
            continue
        stem = glob.removesuffix(".*")
        for suffix in suffixes:
            completed.append(stem + suffix)
    return (*complete, *completed)


def _split_patterns(card: Path, repository: str, name: str | None, split: str) -> tuple[str, ...]:
    """Return globs of the files of a split."""
    configs = _card_settings(card, repository).get("configs")
    if not configs:
        if name is not None:
            raise DataError(
                f"the card of dataset {repository} names no configurations; leave out name={name!r}"
            )
        return (
            f"{split}.*",
            f"{split}-*",
            f"{split}/*",
            f"*/{split}.*",
            f"*/{split}-*",
            f"*/{split}/*",
        )

    configs_by_name = {str(config.get("config_name")): config for config in configs}
    if not name:
        name = _default_config(configs_by_name)
    if name not in configs_by_name:
        raise DataError(
            f"dataset {repository} has no configuration {name!r}; set name to one of"
            f" {sorted(configs_by_name)}"
        )

    # Either files by split, or the path of one file, or a list of paths.
    data_files = configs_by_name[name].get("data_files") or ()
    if isinstance(data_files, str) or not all(isinstance(item, Mapping) for item in data_files):
        data_files = [{"split": "train", "path": data_files}]
    paths = {str(item["split"]): item["path"] for item in data_files}
    if split not in paths:
        raise DataError(
            f"dataset {repository}, configuration {name}: no split {split!r}; there are"
            f" {sorted(paths)}"
        )
    if isinstance(paths[split], str):
        return (paths[split],)
    return tuple(paths[split])


def _default_config(configs_by_name: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the name of the configuration that is marked as the default, or the only one."""
    for name, config in configs_by_name.items():
        if config.get("default"):
            return name
    if len(configs_by_name) == 1:
        return next(iter(configs_by_name))
    return "default"


def _card_settings(card: Path, repository: str) -> Mapping[str, Any]:
    """Return the YAML at the head of a dataset card; empty without."""
    import yaml

    from jax_agent_rl.utils.yaml_text import load_yaml

    if not card.is_file():
        return {}
    text = card.read_text(encoding="utf-8", errors="replace")
    head = _CARD_HEAD.match(text)
    if head is None:
        return {}

    try:
        settings = load_yaml(head[1])
    except yaml.YAMLError as error:
        raise DataError(
            f"the card of dataset {repository} is not valid YAML ({error}); name its files, like"
            f" hf://datasets/{repository}/data/*.parquet"
        ) from None
    if not isinstance(settings, Mapping):
        return {}
    return settings


@contextmanager
def _explain_failure(
    kind: Literal["model", "dataset"], repository: str, revision: str | None
) -> Iterator[None]:
    """Turn failures of a download into one error that says what to do."""
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    key, local_value, error_type = _KINDS[kind]
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
        reason = _unreachable()
        if reason is None:
            first_lines = str(failure).strip().splitlines()[:1]
            reason = first_lines[0] if first_lines else type(failure).__name__
        problem = (
            f"{repository!r} could not be downloaded from the Hub ({reason}); set {key} to"
            f" {local_value}"
        )
    missing = "folder" if kind == "model" else "file"
    raise error_type(f"there is no {missing} {repository!r} here, and {problem}")


@functools.cache
def download_snapshot(
    kind: str, repository: str, revision: str | None, patterns: tuple[str, ...]
) -> Path:
    """Ask the Hub once per process; if it does not answer, use its local cache alone."""
    from huggingface_hub import snapshot_download

    folder = snapshot_download(
        repository,
        repo_type=kind,
        revision=revision,
        allow_patterns=list(patterns),
        local_files_only=_unreachable() is not None,
    )
    return Path(folder)


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
    match = _REPOSITORY.fullmatch(os.fspath(path))
    if match is None or Path(path).exists():
        return None
    return match["id"], match["revision"]


def read_pretrained(auto_class: Any, folder: Path, **options: Any) -> Any:
    """Read one of transformers' objects from a folder.

    Code that the folder brings is never run, and nobody is asked whether to run it.

    Args:
        auto_class: class with ``from_pretrained``, such as ``AutoTokenizer``.
        options: further arguments of ``from_pretrained``.

    Raises:
        ModelError: it can be read with code of the folder only.
        OSError, ValueError: it cannot be read.
    """
    try:
        return auto_class.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False, **options
        )
    except ValueError as error:
        if "trust_remote_code" not in str(error):
            raise
        raise ModelError(
            f"{folder} brings code of its own (auto_map in its JSON files), which is never run;"
            " choose a model of a class that transformers has, or remove auto_map if"
            f" {auto_class.__name__} can do without"
        ) from None


def absolute_model_path(path: str) -> str:
    """Return ``path`` in a form that does not depend on the working directory."""
    if hub_name(path) is not None:
        return path
    return str(expand_path(path).absolute())
