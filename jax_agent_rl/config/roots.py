"""The kinds of configuration, each by the command that takes it, and which kind a file is."""

from __future__ import annotations

import functools
import pkgutil
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from jax_agent_rl.config.reference import list_keys

ROOTS: Mapping[str, str] = {
    "train": "jax_agent_rl.config.run:Config",
    "sft": "jax_agent_rl.config.commands:SftConfig",
    "dpo": "jax_agent_rl.config.commands:DpoConfig",
    "tool-server": "jax_agent_rl.config.commands:ToolServerSettings",
    "tinker-server": "jax_agent_rl.config.commands:TinkerServerSettings",
}
"""The root section of each kind of configuration, as ``module:class``.

``train`` is the configuration of a run, which most commands take.
"""

RECORDED_COMMAND = "command"
"""The key under which run folders of ``sft`` and ``dpo`` record their command, beside its keys."""


def root_model(command: str) -> type[BaseModel]:
    """Return the root section of a kind of configuration."""
    return pkgutil.resolve_name(ROOTS[command])


def command_of(model: type[BaseModel]) -> str | None:
    """Return the kind of configuration with this root; None for another tree."""
    for command in ROOTS:
        if root_model(command) is model:
            return command
    return None


def meant_command(tree: Mapping[str, Any], model: type[BaseModel]) -> str | None:
    """Return the command that a tree is for, if it is clearly not the command of ``model``.

    A tree belongs to the command that knows most of its keys. None if no other command knows
    clearly more of them than the command of ``model``: a key may just be misspelt.
    """
    expected = command_of(model)
    if expected is None:
        return None

    recorded = tree.get(RECORDED_COMMAND)
    if recorded in ROOTS:  # the file was read from a run folder
        return None if recorded == expected else recorded

    unknown_keys = {name: _count_unknown(tree, root_model(name)) for name in ROOTS}
    best = min(ROOTS, key=lambda name: unknown_keys[name])
    if 2 * unknown_keys[best] >= unknown_keys[expected]:
        return None

    # dpo is a variant of sft: a key too many in a section of both does not tell them apart.
    best_model = root_model(best)
    is_variant = issubclass(model, best_model) or issubclass(best_model, model)
    if is_variant and tree.keys() <= model.model_fields.keys():
        return None
    return best


@functools.cache
def _known_keys(model: type[BaseModel]) -> frozenset[str]:
    return frozenset(list_keys(model))


def _count_unknown(tree: Mapping[str, Any], model: type[BaseModel]) -> int:
    """Return how many keys of a tree a root section does not have."""
    known = _known_keys(model)
    sections = {path.rpartition(".")[0] for path in known}
    count = 0
    pending = [("", tree)]
    while pending:
        prefix, section = pending.pop()
        for name, value in section.items():
            path = f"{prefix}{name}"
            if path not in known:
                count += _count_keys(value)
            elif isinstance(value, Mapping) and path in sections:
                pending.append((f"{path}.", value))
    return count


def _count_keys(value: Any) -> int:
    """Return the number of keys in a value; 1 for a value that is not a section."""
    if not isinstance(value, Mapping) or not value:
        return 1
    return sum(map(_count_keys, value.values()))
