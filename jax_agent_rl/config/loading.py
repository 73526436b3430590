"""Configuration trees from YAML files, their bases and ``a.b=c`` overrides; errors name the path and the fix."""

from __future__ import annotations

import copy
import functools
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from jax_agent_rl.config.recipes import find_config, recipe_files
from jax_agent_rl.config.reference import KeyInfo, list_keys
from jax_agent_rl.errors import ConfigError
from jax_agent_rl.utils.files import read_regular_file
from jax_agent_rl.utils.wrong_values import OUR_CHECKS, describe_value, place_of
from jax_agent_rl.utils.yaml_text import MAX_CHARACTERS, load_yaml
from jax_agent_rl.validation import did_you_mean, nearest_keys, shown

Tree = TypeVar("Tree", bound=BaseModel)
_keys = functools.cache(list_keys)


def read_tree(path: Path, *, _readers: tuple[Path, ...] = ()) -> dict[str, Any]:
    """Read the nested mapping in a YAML file, over that of the file its key ``base`` names.

    Args:
        path: a file or the name of a recipe, see :func:`~jax_agent_rl.config.recipes.find_config`.
            A ``base`` is relative to the folder of the file that names it, or a recipe, too.

    Raises:
        ConfigError: the file is missing or no mapping, or ``base`` leads in a circle.
    """
    path = _existing_file(path)
    if path in _readers:
        raise ConfigError(
            f"{path}: base leads back to the file itself, by {', '.join(map(str, _readers))}"
        )
    try:
        tree = load_yaml(read_regular_file(path, MAX_CONFIG_BYTES).decode())
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{path} is not valid YAML: {error}; a configuration is text in UTF-8"
        ) from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"config file {str(path)!r} cannot be read: {error}") from None
    if tree is None:  # an empty file
        tree = {}
    if not isinstance(tree, dict):
        raise ConfigError(f"{path} must hold a mapping of sections, got {type(tree).__name__}")
    base = tree.pop("base", None)
    if base is None:
        return tree
    if not isinstance(base, str):
        raise ConfigError(
            f"{path}: base={shown(base)} must be text: a file, or the name of a recipe"
        )
    try:
        base_file = (path.parent / base).resolve()
        if not base_file.is_file():
            base_file = find_config(Path(base))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: base={shown(base)} cannot be read: {error}") from None
    return _merge(read_tree(base_file, _readers=(*_readers, path)), tree)


MAX_CONFIG_BYTES = 4 * MAX_CHARACTERS
"""Limit of a configuration's file: a character takes up to four bytes."""


def _existing_file(path: Path) -> Path:
    """Return the file that a path or a recipe's name stands for; raise ConfigError if there is none."""
    try:
        found = find_config(path)
        if found.is_file():
            return found
        is_folder = found.is_dir()
    except (
        OSError,
        ValueError,
    ) as error:  # too long a name, one with a NUL, a folder that must not be read
        raise ConfigError(f"config file {str(path)!r} cannot be read: {error}") from None
    if is_folder:
        raise ConfigError(
            f"{str(path)!r} is a folder, not a configuration; name a YAML file, e.g."
            f" {path}/config.yaml"
        )
    recipes = recipe_files()
    guess = did_you_mean(str(path).removesuffix(".yaml"), recipes)
    names = ", ".join(recipes)
    raise ConfigError(
        f"config file {str(path)!r} does not exist; {guess}the recipes found by name are {names}"
    )


def build_tree(
    model: type[Tree],
    tree: Mapping[str, Any],
    overrides: Sequence[str] = (),
    *,
    file: Path | None = None,
) -> Tree:
    """Validate a nested mapping plus overrides.

    Args:
        model: the root section.
        tree: the nested mapping; not changed.
        overrides: ``key.path=value``, values in YAML. Here and in files, null stands for the
            default of a key that can't be null.
        file: where the tree was read, for messages.

    Raises:
        ConfigError: with all problems at once.
    """
    given = tree
    tree = copy.deepcopy(dict(tree))
    problems = [problem for item in overrides if (problem := _apply_override(tree, item))]
    _drop_nulls(tree, model)
    try:
        made = model.model_validate(tree)
    except ValidationError as error:
        _require_its_command(given, model, file)
        raise ConfigError(problems + _explain_all(error, model, tree)) from None
    if problems:
        raise ConfigError(problems)
    return made


def load_tree(
    model: type[Tree], path: str | os.PathLike[str] | None, overrides: Sequence[str] = ()
) -> Tree:
    """Read a YAML file, if any, apply overrides and validate; raise :class:`ConfigError` with all problems at once."""
    if path is None:
        return build_tree(model, {}, overrides)
    return build_tree(model, read_tree(Path(path)), overrides, file=Path(path))


def _require_its_command(
    tree: Mapping[str, Any], model: type[BaseModel], file: Path | None
) -> None:
    """Raise ConfigError if a tree that is not valid is the configuration of another command."""
    from jax_agent_rl.config.roots import (
        command_of,
        meant_command,
    )  # which name the models that are read here

    command = meant_command(tree, model)
    if command is None:
        return
    if command == "train" and tree.get("distill"):
        command = "distill"
    name = "this" if file is None else str(file)
    raise ConfigError(
        f"{name} is a configuration of `{command}`, not of `{command_of(model)}`: run jax-agent-rl"
        f" {command} {'FILE' if file is None else file}, or give a configuration of"
        f" `{command_of(model)}` (jax-agent-rl config reference lists its keys)"
    )


def valid_keys(model: type[BaseModel]) -> dict[str, str]:
    """Return every path that takes a value, with its description; a section that may be null is one of them."""
    return {
        key.path: key.description
        for key in _keys(model).values()
        if not key.is_section or key.default
    }


def _merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Merge two trees section by section; ``over`` wins."""
    merged = dict(base)
    for key, value in over.items():
        below = merged.get(key)
        merged[key] = (
            _merge(below, value)
            if isinstance(below, Mapping) and isinstance(value, Mapping)
            else value
        )
    return merged


def _drop_nulls(tree: dict[str, Any], model: type[BaseModel], prefix: str = "") -> None:
    """Remove keys that are null and can't be, in place."""
    for name, value in list(tree.items()):
        if isinstance(value, dict):
            _drop_nulls(value, model, f"{prefix}{name}.")
        elif value is None and (key := _keys(model).get(f"{prefix}{name}")) and not key.nullable:
            del tree[name]


def _apply_override(tree: dict[str, Any], item: str) -> str | None:
    """Set one ``a.b=c`` in place; return the problem, if any."""
    key, equals, text = item.partition("=")
    parts = key.strip().split(".")
    if not equals or not all(parts):
        return f"override {item!r}: write key.path=value"
    try:
        value = load_yaml(text)
    except yaml.YAMLError as error:
        return f"override {item!r}: the value is not valid YAML ({error})"
    node = tree
    for part in parts[:-1]:
        child = node.setdefault(part, {})
        if not isinstance(child, dict):
            return f"override {item!r}: {part!r} is a value, not a section"
        node = child
    node[parts[-1]] = value
    return None


def _explain_all(
    error: ValidationError, model: type[BaseModel], tree: Mapping[str, Any]
) -> list[str]:
    """Return a line for each wrong key: its path, its value, and what to write."""
    lines: dict[
        str, None
    ] = {}  # of a choice between types, each has its own error about the same key
    for problem in error.errors(include_url=False):
        for line in _explain(problem, model, tree):
            lines[line] = None
    return list(lines)


def _explain(
    problem: Mapping[str, Any], model: type[BaseModel], tree: Mapping[str, Any]
) -> list[str]:
    """Translate one error; a check between keys may have found several things."""
    path = place_of(problem)
    said = describe_value(problem)
    key = _key_at(problem["loc"], model)
    if problem["type"] == "extra_forbidden":
        guess = _nearest(path, model)
        return [f"{path}: {said}" + (f"; did you mean {guess}?" if guess else "")]
    if not path:
        return said.split("\n")
    if problem["type"] == "missing":
        return [
            f"{path}: {said}"
            + ("" if key is None or key.path != path else f"; {_what_to_write(key)}")
        ]
    if problem["type"] in OUR_CHECKS:
        if isinstance(
            problem["input"], Mapping
        ):  # a check of the whole section, which names its keys
            return [f"{path}: {said}"]
        return [f"{path}={shown(problem['input'])}: {said}"]
    if key is None:
        return [f"{path}={shown(problem['input'])}: {said}"]
    return [f"{key.path}={shown(_value_in(tree, key.path, problem))}: {_what_to_write(key)}"]


def _what_to_write(key: KeyInfo) -> str:
    """Say what a key must be."""
    if not key.is_section:
        return f"must be {key.type}"
    null = ", or null" if key.nullable else ""
    return (
        f"must be a section, a mapping of its keys{null} (jax-agent-rl config explain {key.path}"
        " lists them)"
    )


def _key_at(location: Sequence[int | str], model: type[BaseModel]) -> KeyInfo | None:
    """Return the key in which a problem is: further parts of its place are items, or types that were tried."""
    keys = _keys(model)
    for end in range(len(location), 0, -1):
        path = ".".join(map(str, location[:end]))
        if path in keys:
            return keys[path]
    return None


def _value_in(tree: Mapping[str, Any], path: str, problem: Mapping[str, Any]) -> Any:
    """Return the value that was given for a key; of one that a model filled in, what it was checked with."""
    value: Any = tree
    for name in path.split("."):
        if not isinstance(value, Mapping) or name not in value:
            return problem["input"]
        value = value[name]
    return value


def _nearest(path: str, model: type[BaseModel]) -> str | None:
    """Return the key or section most likely meant; None if none is near."""
    keys = list(valid_keys(model))
    sections = sorted({key.rpartition(".")[0] for key in keys} - {""})
    near = nearest_keys(path, [*keys, *sections])
    return near[0] if near else None
