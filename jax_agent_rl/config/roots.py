"""The kinds of configuration there are, by the command that takes one, and which of them a file is."""

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
"""The root section of each kind of configuration. ``train`` is a run's, which most commands take.
"""


RECORDED_COMMAND = "command"
"""The key under which the run folders of ``sft`` and ``dpo`` keep their command beside its
configuration."""


def root_model(command: str) -> type[BaseModel]:
    """Return the root section of a kind of configuration."""
    return pkgutil.resolve_name(ROOTS[command])


def command_of(model: type[BaseModel]) -> str | None:
    """Return the kind of configuration with this root; None for another tree."""
    return next((name for name in ROOTS if root_model(name) is model), None)


def meant_command(tree: Mapping[str, Any], model: type[BaseModel]) -> str | None:
    """Return the kind of configuration that a tree is, if it is clearly another than the one of ``model``.

    A tree is of the kind that knows most of its keys. What any kind could be is of none: a key may
    be misspelt.
    """
    given = command_of(model)
    if given is None:
        return None
    recorded = tree.get(RECORDED_COMMAND)  # as a run folder keeps it
    if recorded in ROOTS:
        return None if recorded == given else recorded
    unknown = {name: _unknown(tree, root_model(name)) for name in ROOTS}
    best = min(ROOTS, key=lambda name: unknown[name])
    if 2 * unknown[best] >= unknown[given]:
        return None
    is_variant = issubclass(model, root_model(best)) or issubclass(root_model(best), model)
    if (
        is_variant and tree.keys() <= model.model_fields.keys()
    ):  # dpo of sft: a key too many in a section of both
        return None
    return best


@functools.cache
def _known_keys(model: type[BaseModel]) -> frozenset[str]:
    return frozenset(list_keys(model))


def _unknown(tree: Mapping[str, Any], model: type[BaseModel]) -> int:
    """Return how many keys of a tree a root does not know."""
    known = _known_keys(model)
    sections = {path.rpartition(".")[0] for path in known}
    count = 0
    pending = [("", tree)]
    while pending:
        prefix, section = pending.pop()
        for name, value in section.items():
            path = f"{prefix}{name}"
            if path not in known:
                count += _size(value)
            elif isinstance(value, Mapping) and path in sections:
                pending.append((f"{path}.", value))
    return count


def _size(value: Any) -> int:
    """Return the number of keys in a value; 1 for one that is no section."""
    if not isinstance(value, Mapping) or not value:
        return 1
    return sum(map(_size, value.values()))
