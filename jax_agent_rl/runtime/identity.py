"""What a run is of: its configuration, and fingerprints of models, rows and code that it names.

::

    configuration ─┬─► values of every key ────────────────┐
                   └─► models, rows, code ─► fingerprints ─┴─► RunIdentity ─► checkpoints, exports
                                                                    │
    --resume, exports: the checkpoint's RunIdentity ────────────────┴─► the same, or an error
                                                                        that names the keys

``config.resume`` says which keys define what is trained, and which may change.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from jax_agent_rl.config import TeacherConfig
from jax_agent_rl.config.base import Section
from jax_agent_rl.config.resume import BY_CONTENT, Difference
from jax_agent_rl.errors import ConfigError
from jax_agent_rl.models.identity import model_fingerprints
from jax_agent_rl.utils.fingerprints import code_fingerprint
from jax_agent_rl.utils.plugins import read_entries, split_class

POLICY_JUDGE = "policy"
_ROWS = "data.train"


@dataclass(frozen=True, kw_only=True)
class RunIdentity:
    """What a run is of.

    Attributes:
        config: its configuration, as JSON.
        content: fingerprints of what the keys of ``config.resume.BY_CONTENT`` name, by key; without
            those that name nothing.
    """

    config: Mapping[str, Any]
    content: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, saved: Mapping[str, Any]) -> RunIdentity:
        """Invert :meth:`to_json`."""
        return cls(config=saved["config"], content=saved["content"])


def run_identity(config: Section, rows: Sequence[str]) -> RunIdentity:
    """Return the identity of a run; all models it names are read.

    Args:
        config: the configuration of ``train``, ``sft`` or ``dpo``.
        rows: the fingerprint of each source of rows.

    Raises:
        ModelError: files of a model are missing or damaged.
    """
    content = {_ROWS: list(rows), **named_content(config, BY_CONTENT - {_ROWS})}
    return RunIdentity(config=config.model_dump(mode="json"), content=content)


def named_content(config: Section, keys: Collection[str]) -> dict[str, Any]:
    """Return the fingerprints of what some keys of ``BY_CONTENT`` name.

    A key that names nothing is left out.

    Raises:
        ModelError: files of a model are missing or damaged.
    """
    content: dict[str, Any] = {}
    for key in sorted(keys):
        value = _value_of(config, key)
        if value:
            read_fingerprint = _READERS.get(key, code_fingerprint)
            content[key] = read_fingerprint(value)
    return content


def _value_of(config: Section, key: str) -> Any:
    """Return the value of a key; None if the configuration has no such key."""
    value: Any = config
    for name in key.split("."):
        if value is None or name not in type(value).model_fields:
            return None
        value = getattr(value, name)
    return value


def _read_judge(path: str) -> Any:
    if path == POLICY_JUDGE:
        return path
    return model_fingerprints(path)


def _read_role_models(paths: Mapping[str, str]) -> dict[str, Any]:
    return {role: model_fingerprints(path) for role, path in paths.items()}


def _read_teachers(teachers: Sequence[TeacherConfig]) -> list[Any]:
    """Return what each teacher is, and which rows it teaches."""
    fingerprints = []
    for teacher in teachers:
        is_served = teacher.url is not None
        fingerprints.append(
            {
                "data_sources": list(teacher.data_sources),
                "served as": (teacher.model or teacher.path) if is_served else None,
                # Of a served teacher, only the tokenizer is on this machine.
                **model_fingerprints(teacher.path, weights=not is_served),
            }
        )
    return fingerprints


_LIBRARIES = ("jax_agent_rl", "verl")
"""Packages whose classes are not the user's: their names say what they are."""


def _read_entries(path: str, *, key: str, name: str) -> dict[str, str]:
    """Return the fingerprints of a YAML file of entries and of the classes that they name.

    Each entry has a ``class_name``.
    """
    fingerprints = {"file": code_fingerprint(path)}
    try:
        entries = read_entries(Path(path).expanduser(), key=key, name=name)
    except ConfigError:  # raised again, with its key, where the entries are opened
        return fingerprints
    for entry in entries:
        class_name = entry.get("class_name") if isinstance(entry, Mapping) else None
        if not isinstance(class_name, str):
            continue
        module, _ = split_class(class_name)
        if module and module.partition(".")[0] not in _LIBRARIES:
            fingerprints[f"code of {module}"] = code_fingerprint(module)
    return fingerprints


_TOOLS = "tools.tool_config_path"
_USERS = "interactions.interaction_config_path"

_READERS: Mapping[str, Callable[[Any], Any]] = {
    "model.path": model_fingerprints,
    "critic.path": model_fingerprints,
    "reward.judge.model": _read_judge,
    "agent.role_models": _read_role_models,
    "distill.teachers": _read_teachers,
    _TOOLS: functools.partial(_read_entries, key=_TOOLS, name="tools"),
    _USERS: functools.partial(_read_entries, key=_USERS, name="interaction"),
}
"""How the fingerprint of a key is read, unless the key names a file or Python code."""


def content_differences(old: RunIdentity, new: RunIdentity) -> list[Difference]:
    """Compare what two configurations name.

    An old identity without any content is of an earlier version, which recorded none: it is not
    compared.
    """
    if not old.content:
        return []

    differences = []
    for key in sorted(BY_CONTENT):
        old_content = old.content.get(key)
        new_content = new.content.get(key)
        if old_content != new_content:
            difference = Difference(
                key=key,
                what=_describe_difference(key, old_content, new_content),
                old=_tree_value(old.config, key),
                new=_tree_value(new.config, key),
            )
            differences.append(difference)
    return differences


def _describe_difference(key: str, old: Any, new: Any) -> str:
    if key == _ROWS:
        return "other rows"
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        names = sorted(old.keys() | new.keys())
        differing = [name for name in names if old.get(name) != new.get(name)]
        return f"other {', '.join(differing)}"
    return "another content"


def _tree_value(tree: Mapping[str, Any], path: str) -> Any:
    """Return the value at a dotted path of a configuration as JSON; None if it has none."""
    value: Any = tree
    for name in path.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return value
