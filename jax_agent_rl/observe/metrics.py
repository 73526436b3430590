"""The run folder: JSON Lines files that only grow, and are cut back to a step when a run resumes there."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from jax_agent_rl.observe.records import Records, has_step
from jax_agent_rl.observe.sample import sample
from jax_agent_rl.types import Trajectory
from jax_agent_rl.utils.files import write_atomically, writing

Numbers = Sequence[float] | np.ndarray
Learnt = Mapping[str, Mapping[str, Numbers]]
"""By trajectory id named numbers per token with loss."""
DISAGREEMENT = "disagreement.json"
_NOTHING: Mapping[str, Any] = MappingProxyType({})


class RunFolder:
    """Names and writes the files of one run.

    ``config.json, metrics.jsonl, trajectories.jsonl, traces.jsonl, summary.json, reward.png, checkpoints/``, and
    ``disagreement.json`` if engine and learner disagreed.

    Args:
        path: is made.
        keep_trajectories: most that are written of a step and split, see :mod:`jax_agent_rl.observe.sample`.
    """

    def __init__(self, path: Path, *, keep_trajectories: int | None = None) -> None:
        self.path = path
        self.keep_trajectories = keep_trajectories
        self.path.mkdir(parents=True, exist_ok=True)
        self.config = path / "config.json"
        self.metrics = path / "metrics.jsonl"
        self.trajectories = path / "trajectories.jsonl"
        self.traces = path / "traces.jsonl"
        self.summary = path / "summary.json"
        self.disagreement = path / DISAGREEMENT
        self.plot = path / "reward.png"
        self.checkpoints = path / "checkpoints"

    # What writes raises StorageError if there is no room. The next resume removes the part of a line that was written.

    def add_metrics(self, record: Mapping[str, Any]) -> None:
        """Appends one record of ``metrics.jsonl``."""
        append_records(self.metrics, [record])

    def add_trajectories(
        self, step: int, split: str, trajectories: Sequence[Trajectory], *, learnt: Learnt = _NOTHING
    ) -> None:
        """Appends trajectories, or a sample of them.

        Args:
            step: they were trained on, or evaluated after.
            split: ``train`` or ``heldout``.
            trajectories: of that step.
            learnt: ``UpdateResult.tokens``.
        """
        kept = sample(
            trajectories, self.keep_trajectories, reward=lambda t: t.reward, group=lambda t: t.group_id, seed=step
        )
        append_records(
            self.trajectories,
            (trajectory_record(t, step=step, split=split, learnt=learnt.get(t.trajectory_id, {})) for t in kept),
        )

    def cut_back(self, step: int, *, evaluated: int) -> None:
        """Removes what was recorded after ``step``, and evaluations after step ``evaluated``: both are run again.

        So is the summary, for the run has not come to its end, and what was found wrong before it was resumed.
        """

        def stays(record: Mapping[str, Any]) -> bool:
            held_out = record.get("kind") == "evaluation" or record.get("split") == "heldout" or record.get("validate")
            return record["step"] <= (evaluated if held_out else step)

        self.summary.unlink(missing_ok=True)
        self.disagreement.unlink(missing_ok=True)
        for file in (self.metrics, self.trajectories, self.traces):
            if file.exists():
                write_atomically(
                    file, "".join(json.dumps(record) + "\n" for record in read_records(file) if stays(record))
                )

    def write_json(self, file: Path, content: Mapping[str, Any]) -> None:
        """Writes a JSON file whole or not at all."""
        write_atomically(file, json.dumps(content, indent=2) + "\n")


def trajectory_record(
    trajectory: Trajectory, *, step: int, split: str, learnt: Mapping[str, Numbers] = _NOTHING
) -> dict[str, Any]:
    """A trajectory as JSON: ids, mask, log-probs, versions, reward, messages. Derived arrays are left out of turns.

    Of images and videos only their number is kept.

    Args:
        learnt: ``advantages`` and ``old_logprobs`` of its tokens with loss; they are laid out along ``response_ids``,
            0 where there is no loss, null where nobody knows.
    """
    record = {"step": step, "split": split, **asdict(replace(trajectory, turns=(), segments=(), prompt_media={}))}
    record["prompt_media"] = {kind: len(items) for kind, items in trajectory.prompt_media.items()}
    at, record["segments"] = 0, []
    for segment in trajectory.segments:
        end = at + sum(segment.loss_mask)
        part = {name: values[at:end] for name, values in learnt.items()}
        record["segments"].append(trajectory_record(segment, step=step, split=split, learnt=part))
        at = end
    record |= {name: _laid_out(values[at:], trajectory.loss_mask) for name, values in learnt.items()}
    record["turns"] = [
        {
            "sampled": len(turn.output.token_ids),
            "appended": len(turn.appended_ids),
            "learn_appended": turn.learn_appended,
            "stop_reason": turn.output.stop_reason,
            "cached_tokens": turn.output.cached_tokens,
            "score": turn.score,
            "tool_calls": [
                asdict(replace(call, media={})) | {"media": {kind: len(items) for kind, items in call.media.items()}}
                for call in turn.tool_calls
            ],
        }
        for turn in trajectory.turns
    ]
    record["row"] = {key: value for key, value in trajectory.row.items() if key != "prompt"}  # it is in messages
    record["rollout_logprobs"] = [round(x, 6) for x in trajectory.rollout_logprobs]
    return record


def _laid_out(values: Numbers, mask: Sequence[int]) -> list[float | None]:
    """One number per id of a response, from one per id with loss."""
    rest = iter(values)
    placed = (float(next(rest)) if mine else 0.0 for mine in mask)
    return [round(value, 6) if math.isfinite(value) else None for value in placed]


def read_records(file: Path) -> list[dict[str, Any]]:
    """All records of a step in a JSON Lines file; a line that is none, such as one cut off by a crash, is left out."""
    return list(Records(file=file, is_whole=has_step))


def append_records(file: Path, records: Iterable[Mapping[str, Any]]) -> None:
    """Appends lines of JSON; StorageError if there is no room."""
    with writing(file), file.open("a") as stream:
        for record in records:
            stream.write(json.dumps(record) + "\n")
