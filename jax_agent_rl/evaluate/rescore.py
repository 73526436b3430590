"""``jax-agent-rl rescore``: recorded trajectories, scored again by other reward functions.

::

    a run's trajectories.jsonl ──┐                 ┌─► Rescoring: what changed, by step
                                 ├─► prompt by ────┤
    a table of rollout ──────────┘   prompt, score └─► a table with the new rewards

Scoring is as in training (:func:`~jax_agent_rl.runtime.scoring.open_scorer`): the same functions,
workers, time limits and services. What an environment gave for its turns is read as it was
recorded, or played again (:mod:`~jax_agent_rl.evaluate.replay`). A trajectory that cannot be scored
is counted, and left out of the new table.
"""

from __future__ import annotations

import heapq
import itertools
import json
from collections import Counter
from collections.abc import AsyncIterator, Collection, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from jax_agent_rl.agents import load_agents
from jax_agent_rl.collect.collector import Score
from jax_agent_rl.config import Config
from jax_agent_rl.config.loading import build_tree, read_tree
from jax_agent_rl.data.reader import Row
from jax_agent_rl.environments import EnvironmentPools, load_environments
from jax_agent_rl.errors import ConfigError, DataError, DropReason, RewardError, TrajectoryError
from jax_agent_rl.evaluate.atif import is_atif
from jax_agent_rl.evaluate.export import (
    CALL_FIELDS,
    TableRecords,
    Target,
    is_table,
    read_recorded,
    records,
    schema,
    table_step,
    write,
)
from jax_agent_rl.evaluate.journal import Journal
from jax_agent_rl.evaluate.replay import EnvironmentReplay
from jax_agent_rl.observe.progress import Progress
from jax_agent_rl.observe.report.command import RunData, config_value
from jax_agent_rl.observe.run_dir import restore_trajectory
from jax_agent_rl.observe.selection import group_of
from jax_agent_rl.runtime.policy_choice import bare_tree, run_config
from jax_agent_rl.runtime.rollouts import open_codec
from jax_agent_rl.runtime.scoring import needed_services, open_scorer, reward_server
from jax_agent_rl.types import Group, Trajectory
from jax_agent_rl.utils.failures import FailureLog
from jax_agent_rl.utils.files import make_folder, make_temp_folder, remove_temp_folder
from jax_agent_rl.utils.tasks import gather_or_cancel
from jax_agent_rl.utils.text import counted


@dataclass(frozen=True, kw_only=True)
class RescoringRequest:
    """The options of ``rescore``.

    Attributes:
        source: a run folder, a table of ``rollout``, or ATIF documents.
        config: YAML file of another configuration; None: the run's. Tables and documents have none:
            the default.
        overrides: ``key=value``.
        out: the table to write; None writes none.
        biggest: number of trajectories to name, those whose scores changed most.
        replay: play trajectories of environments again, for scores of their turns.
    """

    source: Path
    config: Path | None = None
    overrides: Sequence[str] = ()
    out: Path | None = None
    biggest: int = 10
    replay: bool = False

    def load_config(self, data: RunData) -> Config:
        """Return the configuration whose ``reward`` section scores.

        Raises:
            ConfigError, CheckpointError: it is missing or wrong.
        """
        if self.config is not None:
            tree = read_tree(self.config)
        elif is_table(self.source):
            tree = bare_tree(Path(data.summary.get("model") or "."))
        elif is_atif(self.source):
            tree = bare_tree(Path(config_value(data.config, "model", "path") or "."))
        else:
            tree = run_config(self.source).model_dump(mode="json")
        return build_tree(Config, tree, self.overrides, file=self.config)


# --- what was recorded ----------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class RecordedPrompt:
    """The recorded trajectories of one prompt, in one step.

    Attributes:
        number: number of the prompt in the source.
        rows: rows of the table that it was read from; None: it is of a run folder.
        windowed: ids of trajectories of which only windows were recorded.
    """

    number: int
    split: str
    step: int
    trajectories: Sequence[Trajectory]
    rows: Sequence[Row] | None = None
    windowed: Collection[str] = ()

    def records(self, scored: Sequence[Trajectory]) -> list[dict[str, Any]]:
        """Return the rows of a table with the new rewards.

        Args:
            scored: its trajectories with a new reward.
        """
        if self.rows is None:
            if not scored:
                return []
            return records(
                Group(group_id=scored[0].group_id, trajectories=tuple(scored)), self.number
            )

        by_id = {trajectory.trajectory_id: trajectory for trajectory in scored}
        new_rows = []
        for row in self.rows:
            trajectory = by_id.get(row["trajectory_id"])
            if trajectory is not None:
                new_rows.append(_with_reward(row, trajectory))
        return new_rows


def _with_reward(row: Row, trajectory: Trajectory) -> dict[str, Any]:
    """Return the row of a table with a new reward, and with the nulls that its reader left out."""
    new_row = {name: row.get(name) for name in schema().names}
    new_row["tool_calls"] = [
        {name: call.get(name) for name in CALL_FIELDS} for call in row["tool_calls"]
    ]
    if len(trajectory.turns) == len(row["turn_scores"]):  # else it is a segment's row
        new_row["turn_scores"] = [turn.score for turn in trajectory.turns]
    new_row["reward"] = trajectory.reward
    new_row["reward_parts"] = json.dumps(trajectory.reward_parts, ensure_ascii=False)
    return new_row


def recorded_prompts(data: RunData) -> Iterator[RecordedPrompt]:
    """Yield everything that a run or a table recorded, prompt by prompt.

    Raises:
        DataError: a table is damaged, or of a version that did not record enough.
    """
    if isinstance(data.trajectories, TableRecords):
        yield from _prompts_of_table(data.trajectories)
        return

    by_group = itertools.groupby(data.trajectories, key=group_of)
    for number, ((split, step, _), members) in enumerate(by_group):
        yield RecordedPrompt(
            number=number,
            split=split,
            step=step,
            trajectories=[
                restore_trajectory(record, attachments=data.attachments) for record in members
            ],
        )


def _prompts_of_table(table: TableRecords) -> Iterator[RecordedPrompt]:
    for rows, trajectories in table.prompts():
        if "turn_scores" not in rows[0]:
            raise DataError(
                "the table was written by an earlier version, which did not record turn_scores,"
                " tool_scores, role and row_fields, so its rewards cannot be computed again;"
                " collect it again"
            )
        windowed = set()
        for row in rows:
            if row.get("history_window") is not None and row["sequence"] > 0:
                windowed.add(row["trajectory_id"])
        yield RecordedPrompt(
            number=rows[0]["row"],
            split="train",
            step=max(table_step(trajectory) for trajectory in trajectories),
            trajectories=trajectories,
            rows=rows,
            windowed=windowed,
        )


# --- what changed ---------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Change:
    """The old and the new score of a trajectory."""

    trajectory_id: str
    split: str
    step: int
    data_source: str
    old: float
    new: float


@dataclass(kw_only=True)
class StepChange:
    """What changed in one step.

    Attributes:
        trajectories: number of trajectories that were scored again.
        old_sum, new_sum: sums of their scores.
        raised, lowered: numbers of those whose score changed.
        failed: numbers of trajectories that could not be scored, by reason.
    """

    trajectories: int = 0
    old_sum: float = 0.0
    new_sum: float = 0.0
    raised: int = 0
    lowered: int = 0
    failed: Counter[str] = field(default_factory=Counter)

    def add(self, change: Change) -> None:
        """Count a trajectory that was scored again."""
        self.trajectories += 1
        self.old_sum += change.old
        self.new_sum += change.new
        if change.new > change.old:
            self.raised += 1
        elif change.new < change.old:
            self.lowered += 1

    def summary(self) -> dict[str, Any]:
        """Return counts and means as JSON; means over nothing are null."""
        old_mean = None
        new_mean = None
        if self.trajectories:
            old_mean = self.old_sum / self.trajectories
            new_mean = self.new_sum / self.trajectories
        return {
            "trajectories": self.trajectories,
            "old_mean": old_mean,
            "new_mean": new_mean,
            "changed": self.raised + self.lowered,
            "raised": self.raised,
            "lowered": self.lowered,
            "failed": dict(self.failed),
        }


@dataclass(kw_only=True)
class Rescoring:
    """Prompts that are being scored again: the state that its slots share.

    Attributes:
        score: scores one trajectory, as in training.
        failures: reports what could not be scored.
        journal: takes the rows of the new table; None: there is none.
        steps: what changed, by split and step.
        biggest: number of changes to keep, the biggest ones.
        replay: plays environments again; None: scores of turns stay as recorded.
    """

    score: Score
    failures: FailureLog
    biggest: int
    journal: Journal | None = None
    replay: EnvironmentReplay | None = None
    steps: dict[tuple[str, int], StepChange] = field(default_factory=dict)
    prompts: int = 0

    def __post_init__(self) -> None:
        # A heap with the smallest of the biggest changes on top. The count decides between equals.
        self._biggest: list[tuple[float, int, Change]] = []
        self._count = itertools.count()

    async def run(self, prompts: Iterator[RecordedPrompt], *, slots: int) -> None:
        """Score all prompts, ``slots`` at a time; one that fails does not end the others."""
        await gather_or_cancel(self._slot(prompts) for _ in range(slots))

    async def _slot(self, prompts: Iterator[RecordedPrompt]) -> None:
        # All slots share the iterator: each takes the next prompt.
        for prompt in prompts:
            scored: list[Trajectory] = []
            lost: Counter[DropReason] = Counter()
            for trajectory in prompt.trajectories:
                try:
                    scored.append(await self._score_again(trajectory, prompt))
                except TrajectoryError as error:
                    lost[error.drop_reason] += 1
                    self._report(trajectory, prompt, error)
            self.prompts += 1
            if self.journal is not None:
                self.journal.add(prompt.number, prompt.records(scored), lost)

    async def _score_again(self, trajectory: Trajectory, prompt: RecordedPrompt) -> Trajectory:
        if trajectory.trajectory_id in prompt.windowed:
            raise RewardError(
                "its sequences are windows of one conversation (agent.history_window), of which a"
                " table does not hold the whole; a run folder does"
            )
        # Penalties of algorithm.shaping are not part of a score.
        recorded = replace(trajectory, raw_score=None)
        if self.replay is not None:
            recorded = await self.replay.play(recorded)
        new = await self.score(recorded)
        self._add(
            Change(
                trajectory_id=trajectory.trajectory_id,
                split=prompt.split,
                step=prompt.step,
                data_source=str(trajectory.row.get("data_source")),
                old=trajectory.score,
                new=new.reward,
            )
        )
        return new

    def _add(self, change: Change) -> None:
        self._step(change.split, change.step).add(change)
        size = abs(change.new - change.old)
        if not size:
            return
        heapq.heappush(self._biggest, (size, -next(self._count), change))
        if len(self._biggest) > self.biggest:
            heapq.heappop(self._biggest)

    def _report(
        self, trajectory: Trajectory, prompt: RecordedPrompt, error: TrajectoryError
    ) -> None:
        reason = str(error.drop_reason)
        self._step(prompt.split, prompt.step).failed[reason] += 1
        kind = f"not scored ({reason})"
        if error.failed_at:
            kind += f" at {error.failed_at}"
        self.failures.report(
            kind,
            f"{trajectory.trajectory_id} not scored ({reason}): {error}",
            error=error.__cause__,
        )

    def _step(self, split: str, step: int) -> StepChange:
        return self.steps.setdefault((split, step), StepChange())

    def summary(self) -> dict[str, Any]:
        """Return what changed as JSON: in all, by split and step, and the biggest changes."""
        total = StepChange()
        steps = []
        for (split, step), change in sorted(self.steps.items()):
            steps.append({"split": split, "step": step, **change.summary()})
            total.trajectories += change.trajectories
            total.old_sum += change.old_sum
            total.new_sum += change.new_sum
            total.raised += change.raised
            total.lowered += change.lowered
            total.failed += change.failed
        biggest = sorted(self._biggest, reverse=True)
        return {
            **total.summary(),
            "steps": steps,
            "biggest": [asdict(change) for _, _, change in biggest],
        }


# --- the command ----------------------------------------------------------------------------------


async def rescore(request: RescoringRequest, *, console: Console) -> dict[str, Any]:
    """Score a run's or a table's trajectories again; return what changed.

    Args:
        console: shows progress and failures.

    Raises:
        ConfigError, DataError, CheckpointError, ModelError: the user has to fix something.
    """
    data = read_recorded(request.source)
    config = request.load_config(data)
    target = _free_target(request)
    load_agents(config.agent.module)  # it may register reward functions
    with Progress(console, total_steps=0) as progress:
        async with reward_server(config):
            progress.phase("reading")
            services = needed_services(config, _RecordedRows(data))
            for note in data.trajectories.notes:
                progress.print_line(note)
            failures = FailureLog(emit=progress.print_line)
            async with (
                open_scorer(config, services) as score,
                _open_replay(request, config, failures) as replay,
            ):
                rescoring = Rescoring(
                    score=score, failures=failures, biggest=request.biggest, replay=replay
                )
                try:
                    return await _run(request, config, data, target, rescoring, progress)
                finally:
                    failures.flush()


@asynccontextmanager
async def _open_replay(
    request: RescoringRequest, config: Config, failures: FailureLog
) -> AsyncIterator[EnvironmentReplay | None]:
    """Yield what plays environments again, if it is asked for.

    Raises:
        ConfigError, ModelError: environments or the tokenizer cannot be loaded.
    """
    if not request.replay:
        yield None
        return
    load_environments(config.environments.path)
    pools = EnvironmentPools(**config.environments.model_dump(exclude={"path"}), failures=failures)
    try:
        yield EnvironmentReplay(pools, open_codec(config), config.agent)
    finally:
        await pools.close()


async def _run(
    request: RescoringRequest,
    config: Config,
    data: RunData,
    target: Target | None,
    rescoring: Rescoring,
    progress: Progress,
) -> dict[str, Any]:
    """Score everything, and write the table if there is a target."""
    folder: Path | None = None
    journal: Journal | None = None
    if target is not None:
        make_folder(target.path.parent)
        folder = make_temp_folder(".rescoring-", target.path.parent)
        journal = Journal(folder / "journal.jsonl", {"rescored": str(request.source)})
        rescoring.journal = journal

    try:
        progress.phase("scoring", lambda: counted(rescoring.prompts, "prompt"))
        await rescoring.run(recorded_prompts(data), slots=config.rollout.max_in_flight)
        summary = {
            "source": str(request.source),
            "reward": config.reward.model_dump(mode="json"),
            **rescoring.summary(),
        }
        if target is not None and journal is not None:
            write(target, journal, {**_table_summary(data, config, rescoring, journal), **summary})
        return summary
    finally:
        if journal is not None:
            journal.close()
        if folder is not None:
            remove_temp_folder(folder)


def _table_summary(
    data: RunData, config: Config, rescoring: Rescoring, journal: Journal
) -> dict[str, Any]:
    """Return the fields that the summary of every table has."""
    return {
        "policy": data.summary.get("policy", data.name),
        "model": config.model.path,
        "data": data.summary.get("data", data.name),
        "prompts": rescoring.prompts,
        "prompts_lost": rescoring.prompts - len(journal.sizes),
        "started": journal.started,
        "kept": journal.num_trajectories,
        "dropped": dict(journal.dropped),
    }


@dataclass(frozen=True)
class _RecordedRows:
    """The data's rows of all trajectories, which decide what their rewards need."""

    data: RunData

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        for prompt in recorded_prompts(self.data):
            for trajectory in prompt.trajectories:
                yield trajectory.row


def _free_target(request: RescoringRequest) -> Target | None:
    """Return where the new table goes, if it is asked for.

    Raises:
        ConfigError: something is there.
    """
    if request.out is None:
        return None
    target = Target.from_path(request.out)
    if target.is_taken or target.journal.exists():
        raise ConfigError(f"--out {request.out} exists; choose another")
    return target
