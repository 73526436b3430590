"""Export of a finished journal as one table, written atomically.

::

    FILE.parquet   one table                         FILE.parquet.summary.json
    FILE.jsonl     the same columns, a line a row    FILE.jsonl.summary.json
    FOLDER         data/train-00000-of-00002.parquet, …, README.md with the dataset's configuration, summary.json:
                   datasets.load_dataset("FOLDER") reads it

The table has one row per sequence to train on, exact to the token. Most trajectories are one sequence; those sampled in
several contexts (an edited history, a history window) are several, numbered by ``sequence``, which repeat the reward
and everything else about the trajectory. Values of varying shape are JSON text: ``ground_truth``, ``extra_info``,
``reward_parts``, ``arguments``, ``media``.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from jax_agent_rl.errors import ConfigError
from jax_agent_rl.evaluate.journal import Journal
from jax_agent_rl.types import Group, Trajectory
from jax_agent_rl.utils.files import write_atomically, writing

if TYPE_CHECKING:
    import pyarrow

SHARD_BYTES = 256 << 20  # journal bytes per file of a dataset folder, and in memory at a time
CALL_FIELDS = ("name", "arguments", "observation", "error", "reward", "seconds")
_CARD = """---
configs:
- config_name: default
  data_files:
  - split: train
    path: data/train-*.parquet
---

Trajectories of `{policy}` on `{data}`, collected by `jax-agent-rl rollout`: {kept} of {started} that were started.
`summary.json` has the settings.
"""


@dataclass(frozen=True)
class Target:
    """The output of a collection.

    Attributes:
        path: as given by the user.
        kind: from its suffix; without one, a folder.
    """

    path: Path
    kind: Literal["parquet", "jsonl", "dir"]

    @classmethod
    def from_path(cls, path: Path) -> Target:
        """Return the target of a path; raises ConfigError for an unknown suffix."""
        match path.suffix:
            case ".parquet":
                return cls(path, "parquet")
            case ".jsonl":
                return cls(path, "jsonl")
            case "":
                return cls(path, "dir")
        raise ConfigError(f"--out {path}: write FILE.parquet, FILE.jsonl, or a FOLDER (a name without an ending)")

    @property
    def journal(self) -> Path:
        """The journal of an unfinished collection."""
        return self._beside(".partial.jsonl")

    @property
    def summary(self) -> Path:
        """The summary of a finished collection."""
        return self._beside("summary.json")

    @property
    def is_taken(self) -> bool:
        """Whether something exists at the path."""
        if self.kind == "dir":
            return self.path.exists() and (not self.path.is_dir() or any(self.path.iterdir()))
        return self.path.exists()

    def _beside(self, name: str) -> Path:
        return self.path / name if self.kind == "dir" else Path(f"{self.path}.{name.lstrip('.')}")


def write(target: Target, journal: Journal, summary: Mapping[str, Any]) -> None:
    """Write all prompts in their order, then the summary; remove the journal last.

    Raises:
        StorageError: the disk is full; nothing was replaced, and the journal remains.
    """
    numbers = sorted(journal.sizes)
    if target.kind == "dir":
        _write_dir(target.path, journal, numbers, summary)
    else:
        temporary = target.path.with_name(target.path.name + ".tmp")
        with writing(target.path):
            (_write_parquet if target.kind == "parquet" else _write_lines)(temporary, journal, numbers)
            os.replace(temporary, target.path)
    write_atomically(target.summary, json.dumps(summary, indent=2) + "\n")
    target.journal.unlink()


def _write_dir(path: Path, journal: Journal, numbers: Sequence[int], summary: Mapping[str, Any]) -> None:
    shards = list(_portions(numbers, journal.sizes)) or [[]]
    temporary, final = path / ".data", path / "data"
    with writing(path):
        shutil.rmtree(temporary, ignore_errors=True)  # from a process that was killed here
        temporary.mkdir()
        for index, shard in enumerate(shards):
            _write_parquet(temporary / f"train-{index:05}-of-{len(shards):05}.parquet", journal, shard)
        temporary.rename(final)
    write_atomically(path / "README.md", _CARD.format_map(summary))


def _write_parquet(file: Path, journal: Journal, numbers: Sequence[int]) -> None:
    import pyarrow
    import pyarrow.parquet

    with pyarrow.parquet.ParquetWriter(file, schema()) as writer:
        for portion in _portions(numbers, journal.sizes):
            rows = [record for records in journal.lines(portion) for record in records]
            writer.write_table(pyarrow.Table.from_pylist(rows, schema=schema()))


def _write_lines(file: Path, journal: Journal, numbers: Sequence[int]) -> None:
    names = schema().names
    with file.open("w", encoding="utf-8") as stream:
        for records in journal.lines(numbers):
            for record in records:
                stream.write(json.dumps({name: record[name] for name in names}, ensure_ascii=False) + "\n")


def _portions(numbers: Sequence[int], sizes: Mapping[int, int]) -> Iterator[list[int]]:
    """Split prompts into portions of about :data:`SHARD_BYTES`."""
    portion: list[int] = []
    size = 0
    for number in numbers:
        portion.append(number)
        size += sizes[number]
        if size >= SHARD_BYTES:
            yield portion
            portion, size = [], 0
    if portion:
        yield portion


def schema() -> pyarrow.Schema:
    """Return names and types of the columns."""
    import pyarrow as pa

    ids, bits = pa.list_(pa.int32()), pa.list_(pa.int8())
    message = pa.struct([("role", pa.string()), ("content", pa.string())])
    call = pa.struct([(name, pa.float64() if name in ("reward", "seconds") else pa.string()) for name in CALL_FIELDS])
    return pa.schema(
        [
            ("row", pa.int64()),  # number of the prompt in its file, from 0
            ("data_source", pa.string()),
            ("agent_name", pa.string()),
            ("group_id", pa.string()),
            ("trajectory_id", pa.string()),
            ("sequence", pa.int32()),
            ("prompt_ids", ids),
            ("response_ids", ids),
            ("response_mask", bits),  # 1: sampled by the policy
            ("loss_mask", bits),  # 1: carries loss; differs with agent.mask_observations=false
            ("rollout_logprobs", pa.list_(pa.float32())),  # 0 where not sampled
            ("policy_versions", ids),  # -1 where not sampled
            ("num_turns", pa.int32()),
            ("stop_reasons", pa.list_(pa.string())),  # of each turn's generation
            ("finish_reason", pa.string()),
            ("no_loss", pa.string()),  # why none of it carries loss, or null
            ("reward", pa.float64()),
            ("reward_parts", pa.string()),
            ("ground_truth", pa.string()),
            ("extra_info", pa.string()),
            ("messages", pa.list_(message)),
            ("tool_calls", pa.list_(call)),
            ("media", pa.string()),  # numbers of images and videos in the prompt, by kind
            ("fork_parent", pa.string()),  # branches of trees: parent, and what they inherited
            ("fork_turns", pa.int32()),
            ("fork_tokens", pa.int32()),
        ]
    )


def records(group: Group, number: int) -> list[dict[str, Any]]:
    """Return the rows of a group; ``number`` is that of the prompt in its file."""
    return [
        {"row": number, "sequence": position, **_trajectory_columns(trajectory), **_sequence_columns(sequence)}
        for trajectory in group.trajectories
        for position, sequence in enumerate(trajectory.sequences)
    ]


def _trajectory_columns(trajectory: Trajectory) -> dict[str, Any]:
    row, fork = trajectory.row, trajectory.fork
    return {
        "data_source": str(row.get("data_source")),
        "agent_name": trajectory.agent_name,
        "group_id": trajectory.group_id,
        "trajectory_id": trajectory.trajectory_id,
        "no_loss": trajectory.no_loss and str(trajectory.no_loss),
        "reward": trajectory.reward,
        "reward_parts": _json(trajectory.reward_parts),
        "ground_truth": _json((row.get("reward_model") or {}).get("ground_truth")),
        "extra_info": _json(row.get("extra_info") or {}),
        "messages": [_message(message) for message in trajectory.messages],
        "tool_calls": [_call(call) for call in trajectory.tool_calls],
        "fork_parent": fork and fork.parent_id,
        "fork_turns": fork and fork.turns,
        "fork_tokens": fork and fork.tokens,
    }


def _sequence_columns(sequence: Trajectory) -> dict[str, Any]:
    return {
        "prompt_ids": list(sequence.prompt_ids),
        "response_ids": list(sequence.response_ids),
        "response_mask": list(sequence.response_mask),
        "loss_mask": list(sequence.loss_mask),
        "rollout_logprobs": list(sequence.rollout_logprobs),
        "policy_versions": list(sequence.policy_versions),
        "num_turns": sequence.num_turns,
        "stop_reasons": [str(turn.output.stop_reason) for turn in sequence.turns],
        "finish_reason": str(sequence.finish_reason),
        "media": _json({kind: len(items) for kind, items in sequence.prompt_media.items()}),
    }


def _message(message: Mapping[str, Any]) -> dict[str, str]:
    return {"role": str(message["role"]), "content": str(message.get("content") or "")}


def _call(call: Any) -> dict[str, Any]:
    return {name: _json(call.arguments) if name == "arguments" else getattr(call, name) for name in CALL_FIELDS}


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)
