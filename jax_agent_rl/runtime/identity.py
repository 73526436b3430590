"""What a run is of: its configuration, and fingerprints of the models, rows and code that its keys name.

::

    configuration ─┬─► values of every key ────────────────┐
                   └─► models, rows, code ─► fingerprints ─┴─► RunIdentity ─► checkpoints, exports
                                                                    │
    --resume, exports: the checkpoint's RunIdentity ────────────────┴─► the same, or an error that names the keys

``config.resume`` says which keys define what is trained, and which may change.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from jax_agent_rl.config import TeacherConfig
from jax_agent_rl.config.base import Section
from jax_agent_rl.config.resume import (
    BY_CONTENT,
    Difference,
    is_named,
    require_known_keys,
    value_differences,
)
from jax_agent_rl.errors import CheckpointError, ConfigError
from jax_agent_rl.learner.checkpoint import read_notes
from jax_agent_rl.models.identity import model_fingerprints
from jax_agent_rl.observe.run_dir import RunDir, append_records
from jax_agent_rl.utils.bounded_json import read_json_object
from jax_agent_rl.utils.fingerprints import code_fingerprint
from jax_agent_rl.utils.plugins import read_entries, split_class

logger = logging.getLogger(__name__)

POLICY_JUDGE = "policy"
CHANGES = "config_changes.jsonl"
"""File of a run folder: what was changed when the run was resumed."""
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
        config: of ``train``, ``sft`` or ``dpo``.
        rows: the fingerprints of its sources of rows.

    Raises:
        ModelError: files of a model are missing or damaged.
    """
    content = {_ROWS: list(rows), **named_content(config, BY_CONTENT - {_ROWS})}
    return RunIdentity(config=config.model_dump(mode="json"), content=content)


def named_content(config: Section, keys: Collection[str]) -> dict[str, Any]:
    """Return the fingerprints of what some keys of ``BY_CONTENT`` name, without those that name nothing.

    Raises:
        ModelError: files of a model are missing or damaged.
    """
    content: dict[str, Any] = {}
    for key in sorted(keys):
        value = _value(config, key)
        if value:
            content[key] = _READERS.get(key, code_fingerprint)(value)
    return content


def _value(config: Section, key: str) -> Any:
    """Return the value of a key; None if the tree has no such key."""
    model: Any = config
    for name in key.split("."):
        if model is None or name not in type(model).model_fields:
            return None
        model = getattr(model, name)
    return model


def _judge(path: str) -> Any:
    return path if path == POLICY_JUDGE else model_fingerprints(path)


def _roles(paths: Mapping[str, str]) -> dict[str, Any]:
    return {role: model_fingerprints(path) for role, path in paths.items()}


def _teachers(teachers: Sequence[TeacherConfig]) -> list[Any]:
    """Return what each teacher is, and which rows it teaches. Of one that is served, only the tokenizer is here."""
    return [
        {
            "data_sources": list(teacher.data_sources),
            "served as": None if teacher.url is None else teacher.model or teacher.path,
            **model_fingerprints(teacher.path, weights=teacher.url is None),
        }
        for teacher in teachers
    ]


_NOT_A_USERS = ("jax_agent_rl", "verl")
"""Packages whose classes are known by their names."""


def _entries(path: str, *, key: str, name: str) -> dict[str, str]:
    """Return the fingerprints of a YAML file of entries with a ``class_name``, and of the code of those classes."""
    found = {"file": code_fingerprint(path)}
    try:
        entries = read_entries(Path(path).expanduser(), key=key, name=name)
    except ConfigError:  # raised again, with its key, where the entries are opened
        return found
    for entry in entries:
        named = entry.get("class_name") if isinstance(entry, Mapping) else None
        module = split_class(named)[0] if isinstance(named, str) else ""
        if module and module.partition(".")[0] not in _NOT_A_USERS:
            found[f"code of {module}"] = code_fingerprint(module)
    return found


_TOOLS = "tools.tool_config_path"
_USERS = "interactions.interaction_config_path"

_READERS: Mapping[str, Callable[[Any], Any]] = {
    "model.path": model_fingerprints,
    "critic.path": model_fingerprints,
    "reward.judge.model": _judge,
    "agent.role_models": _roles,
    "distill.teachers": _teachers,
    _TOOLS: functools.partial(_entries, key=_TOOLS, name="tools"),
    _USERS: functools.partial(_entries, key=_USERS, name="interaction"),
}
"""How the content of a key is read, where it is no Python code and no other file."""


def content_differences(old: RunIdentity, new: RunIdentity) -> list[Difference]:
    """Compare what two configurations name. What the old identity did not record is not compared."""
    found = []
    for key in sorted(BY_CONTENT):
        before, now = old.content.get(key), new.content.get(key)
        is_recorded = key in old.content or bool(old.content)
        if before != now and is_recorded:
            value = {
                name: _at(identity.config, key) for name, identity in (("old", old), ("new", new))
            }
            found.append(Difference(key=key, what=_what(key, before, now), **value))
    return found


def _what(key: str, before: Any, now: Any) -> str:
    if key == _ROWS:
        return "other rows"
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        parts = sorted(
            name for name in before.keys() | now.keys() if before.get(name) != now.get(name)
        )
        return f"other {', '.join(parts)}"
    return "another content"


def _at(tree: Mapping[str, Any], path: str) -> Any:
    node: Any = tree
    for name in path.split("."):
        node = node.get(name) if isinstance(node, Mapping) else None
    return node


_ADVICE = (
    "set them back to resume it, start a new run (model.path=RUN starts from its weights), or"
    " resume with what is meant: --accept-change {keys}. docs/training.md lists the keys that may"
    " change"
)


def check_resumed(
    model: type[BaseModel],
    old: RunIdentity,
    new: RunIdentity,
    *,
    accepted: Collection[str] = (),
    checkpoint: str,
    advice: str = _ADVICE,
) -> list[Difference]:
    """Return what a resumed run changes, for the record.

    Args:
        model: root section of the configuration.
        old: of the checkpoint.
        new: of the run that resumes.
        accepted: keys, or sections of keys, that may differ although they define what is trained.
        checkpoint: for messages.
        advice: what to do, with ``{keys}`` for those that differ.

    Raises:
        CheckpointError: keys that define what is trained differ; names each with both values.
    """
    defining = content_differences(old, new) + value_differences(
        model, old.config, new.config, may_change=False
    )
    refused = [difference for difference in defining if not is_named(difference.key, accepted)]
    if refused:
        lines = "\n".join(f"  {difference}" for difference in refused)
        keys = ",".join(difference.key for difference in refused)
        raise CheckpointError(
            f"{checkpoint} is of other settings, which define what is"
            f" trained:\n{lines}\n{advice.format(keys=keys)}"
        )
    return defining + value_differences(model, old.config, new.config, may_change=True)


class Resumption:
    """What a run resumes from, and what is changed with it.

    Args:
        model: root section of the configuration.
        folder: of the run.
        place: of its checkpoints.
        step: of the checkpoint; None: the newest.
        accepted: keys that may differ although they define what is trained.

    Raises:
        CheckpointError: there is no such checkpoint.
        ConfigError: there is no key of a name in ``accepted``.
    """

    def __init__(
        self,
        model: type[BaseModel],
        folder: RunDir,
        place: Path | str,
        *,
        step: int | None = None,
        accepted: Collection[str] = (),
    ) -> None:
        require_known_keys(model, accepted)
        self.accepted = accepted
        self.changes: list[Difference] = []
        self._model, self._folder = model, folder
        notes = read_notes(place, step)
        self.step = notes.step
        self._name = f"checkpoint {self.step} in {place}"
        identity = notes.progress.get("identity")
        self._old = RunIdentity.from_json(identity) if identity else _recorded_identity(folder)

    def check(self, identity: RunIdentity) -> None:
        """Compare the run with its checkpoint, before anything is loaded.

        Raises:
            CheckpointError: something that defines what is trained differs.
        """
        if self._old is None:
            logger.warning(
                "%s is of an earlier version, which did not record what it was trained with",
                self._name,
            )
            return
        self.changes = check_resumed(
            self._model, self._old, identity, accepted=self.accepted, checkpoint=self._name
        )

    def record_changes(self) -> None:
        """Append to the run folder what is changed from this step on."""
        at = time.strftime("%Y-%m-%dT%H:%M:%S%z")
        records = []
        for change in self.changes:
            about = {"what": change.what} if change.what else {}
            record = {
                "step": self.step,
                "time": at,
                "key": change.key,
                "old": change.old,
                "new": change.new,
            }
            records.append(record | about)
        if records:
            append_records(self._folder.path / CHANGES, records)


def _recorded_identity(folder: RunDir) -> RunIdentity | None:
    """Return the settings that a run of an earlier version wrote, which knew no fingerprints; None if it is gone."""
    if not folder.config.exists():
        return None
    try:
        return RunIdentity(config=read_json_object(folder.config))
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{folder.config} cannot be read ({error}), so nothing says what the checkpoint was"
            " trained with; put the file back, or start without --resume"
        ) from None
