"""Configuration trees from YAML files, their bases and ``a.b=c`` overrides.

Errors name the path of the key, its value and the fix.
"""

from __future__ import annotations

import copy
import functools
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from jax_agent_rl.checks import brief_repr
from jax_agent_rl.config.recipes import find_config, recipe_files
from jax_agent_rl.config.reference import KeyInfo, list_keys
from jax_agent_rl.config.roots import command_of, meant_command
from jax_agent_rl.errors import ConfigError
from jax_agent_rl.utils.files import read_regular_file
from jax_agent_rl.utils.near_names import did_you_mean, nearest_keys
from jax_agent_rl.utils.wrong_values import OUR_CHECKS, describe_value, place_of
from jax_agent_rl.utils.yaml_text import MAX_CHARACTERS, load_yaml

Tree = TypeVar("Tree", bound=BaseModel)
_keys = functools.cache(list_keys)


def read_tree(path: Path, *, _readers: tuple[Path, ...] = ()) -> dict[str, Any]:
    """Read the nested mapping in a YAML file, merged over the file that its key ``base`` names.

    Args:
        path: a file or the name of a recipe, see :func:`~jax_agent_rl.config.recipes.find_config`.
            A ``base`` is a recipe as well, or a path from the folder of the file that names it.

    Raises:
        ConfigError: the file is missing or no mapping, or ``base`` leads in a circle.
    """
    path = _find_file(path)
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
            f"{path}: base={brief_repr(base)} must be text: a file, or the name of a recipe"
        )
    try:
        base_file = (path.parent / base).resolve()
        if not base_file.is_file():
            base_file = find_config(Path(base))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: base={brief_repr(base)} cannot be read: {error}") from None
    return _merge(read_tree(base_file, _readers=(*_readers, path)), tree)


MAX_CONFIG_BYTES = 4 * MAX_CHARACTERS
"""Limit of a configuration's file: a character takes up to four bytes."""


def _find_file(path: Path) -> Path:
    """Return the file that a path or a recipe's name stands for.

    Raises:
        ConfigError: there is no such file.
    """
    try:
        file = find_config(path)
        if file.is_file():
            return file
        is_folder = file.is_dir()
    except (OSError, ValueError) as error:
        # The name is too long or has a NUL character, or its folder may not be read.
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
        tree: the nested mapping; not changed.
        overrides: ``key.path=value``, values in YAML. Here and in files, null stands for the
            default of a key that can't be null.
        file: where the tree was read, for messages.

    Raises:
        ConfigError: with all problems at once.
    """
    merged = copy.deepcopy(dict(tree))
    problems = []
    for override in overrides:
        problem = _apply_override(merged, override)
        if problem is not None:
            problems.append(problem)
    _drop_nulls(merged, model)

    try:
        config = model.model_validate(merged)
    except ValidationError as error:
        _require_its_command(tree, model, file)
        raise ConfigError(problems + _explain_all(error, model, merged)) from None
    if problems:
        raise ConfigError(problems)
    return config


def load_tree(
    model: type[Tree], path: str | os.PathLike[str] | None, overrides: Sequence[str] = ()
) -> Tree:
    """Read a YAML file, if any, apply overrides and validate.

    Raises:
        ConfigError: with all problems at once.
    """
    if path is None:
        return build_tree(model, {}, overrides)
    return build_tree(model, read_tree(Path(path)), overrides, file=Path(path))


def _require_its_command(
    tree: Mapping[str, Any], model: type[BaseModel], file: Path | None
) -> None:
    """Raise ConfigError if a tree that is not valid is the configuration of another command."""
    command = meant_command(tree, model)
    if command is None:
        return
    if command == "train" and tree.get("distill"):
        command = "distill"
    name = "this" if file is None else str(file)
    argument = "FILE" if file is None else str(file)
    expected_command = command_of(model)
    raise ConfigError(
        f"{name} is a configuration of `{command}`, not of `{expected_command}`: run jax-agent-rl"
        f" {command} {argument}, or give a configuration of `{expected_command}` (jax-agent-rl"
        " config reference lists its keys)"
    )


def valid_keys(model: type[BaseModel]) -> dict[str, str]:
    """Return every path that takes a value, with its description.

    A section that may be null is one of them.
    """
    descriptions = {}
    for key in _keys(model).values():
        if not key.is_section or key.default is not None:
            descriptions[key.path] = key.description
    return descriptions


def _merge(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Merge two trees section by section; ``changes`` wins."""
    merged = dict(base)
    for key, value in changes.items():
        base_value = merged.get(key)
        if isinstance(base_value, Mapping) and isinstance(value, Mapping):
            merged[key] = _merge(base_value, value)
        else:
            merged[key] = value
    return merged


def _drop_nulls(tree: dict[str, Any], model: type[BaseModel], prefix: str = "") -> None:
    """Remove keys that are null and can't be, in place."""
    for name, value in list(tree.items()):
        if isinstance(value, dict):
            _drop_nulls(value, model, f"{prefix}{name}.")
        elif value is None:
            key = _keys(model).get(f"{prefix}{name}")
            if key is not None and not key.nullable:
                del tree[name]


def _apply_override(tree: dict[str, Any], override: str) -> str | None:
    """Set one ``a.b=c`` in place; return the problem, if any."""
    path, equals, text = override.partition("=")
    *sections, name = path.strip().split(".")
    if not equals or not all(sections) or not name:
        return f"override {override!r}: write key.path=value"
    try:
        value = load_yaml(text)
    except yaml.YAMLError as error:
        return f"override {override!r}: the value is not valid YAML ({error})"

    parent = tree
    for section in sections:
        child = parent.setdefault(section, {})
        if not isinstance(child, dict):
            return f"override {override!r}: {section!r} is a value, not a section"
        parent = child
    parent[name] = value
    return None


def _explain_all(
    error: ValidationError, model: type[BaseModel], tree: Mapping[str, Any]
) -> list[str]:
    """Return a line for each wrong key: its path, its value, and what to write."""
    # Pydantic reports an error for every type of a union, which are all explained by one line.
    lines: dict[str, None] = {}
    for problem in error.errors(include_url=False):
        for line in _explain(problem, model, tree):
            lines[line] = None
    return list(lines)


def _explain(
    problem: Mapping[str, Any], model: type[BaseModel], tree: Mapping[str, Any]
) -> list[str]:
    """Translate one error; a check between keys may have found several things."""
    path = place_of(problem)
    message = describe_value(problem)
    key = _key_at(problem["loc"], model)

    if problem["type"] == "extra_forbidden":
        guess = _nearest(path, model)
        suggestion = f"; did you mean {guess}?" if guess else ""
        return [f"{path}: {message}{suggestion}"]
    if not path:  # the checks of the whole tree, one line each
        return message.split("\n")
    if problem["type"] == "missing":
        fix = ""
        if key is not None and key.path == path:
            fix = f"; {_what_to_write(key)}"
        return [f"{path}: {message}{fix}"]

    is_our_check = problem["type"] in OUR_CHECKS
    if is_our_check and isinstance(problem["input"], Mapping):
        return [f"{path}: {message}"]  # a check of a section, whose message names the keys
    if is_our_check or key is None:
        return [f"{path}={brief_repr(problem['input'])}: {message}"]
    return [f"{key.path}={brief_repr(_value_in(tree, key.path, problem))}: {_what_to_write(key)}"]


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
    """Return the key in which a problem is; None if it is in none.

    Further parts of the location are items of a list, or the types of a union that were tried.
    """
    keys = _keys(model)
    for end in range(len(location), 0, -1):
        path = ".".join(map(str, location[:end]))
        if path in keys:
            return keys[path]
    return None


def _value_in(tree: Mapping[str, Any], path: str, problem: Mapping[str, Any]) -> Any:
    """Return the value that the tree has for a key.

    A key that a model filled in is not in the tree; its value is the one that was checked.
    """
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
