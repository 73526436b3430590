"""One collection: from rows to groups, the journal and the file.

::

    unfinished rows ──► max_in_flight slots, a group each ──► journal, group by group ──► file
                                                                │                         summary
                                                                └─ if interrupted, the next call
                                                                   continues from the journal
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from jax_agent_rl.collect.accounting import LostBatchGuard
from jax_agent_rl.config import Config, DataSource
from jax_agent_rl.config.resume import BY_CONTENT, defining_values
from jax_agent_rl.data.dataset import collection_sources, open_dataset
from jax_agent_rl.errors import ConfigError
from jax_agent_rl.evaluate.export import Target, records, write
from jax_agent_rl.evaluate.journal import Journal, require_same
from jax_agent_rl.observe.progress import Progress, duration, print_line
from jax_agent_rl.runtime.identity import named_content
from jax_agent_rl.runtime.policy import ServedPolicy
from jax_agent_rl.runtime.rollouts import Rollouts, open_rollouts
from jax_agent_rl.trainer.step import training_sampling
from jax_agent_rl.types import DropReason, Group, SamplingParams
from jax_agent_rl.utils.bounded_json import read_json_object
from jax_agent_rl.utils.tasks import gather_or_cancel
from jax_agent_rl.utils.text import counted

_DEFINING = (
    "seed",
    "model",
    "agent",
    "tools",
    "tool_config",
    "search",
    "interactions",
    "reward",
    "environments",
    "rollout.max_model_len",
    "rollout.min_group_size",
    "rollout.group_timeout",
    "rollout.strategy",
    "rollout.jetstream",
    "rollout.sglang",
    "rollout.vllm",
)
"""Keys and sections on which trajectories depend, besides the policy, its sampling and the rows.

``config.resume`` says which of their keys define a trajectory, and which may change: timeouts,
addresses, devices.
"""
_NAMED_FILES = BY_CONTENT - {"model.path", "critic.path", "distill.teachers", "data.train"}
"""Keys of these sections that name files and models, whose content may change."""
_LABEL = "rollout"


@dataclass(frozen=True, kw_only=True)
class CollectionRequest:
    """The options of a collection.

    Attributes:
        group_size: trajectories per row; None: ``rollout.group_size``.
        temperature: None: ``rollout.temperature``.
        data: file of rows; replaces ``data.train``.
        limit: use only the first rows.
    """

    group_size: int | None = None
    temperature: float | None = None
    data: str | None = None
    limit: int | None = None

    def sampling(self, config: Config) -> SamplingParams:
        """Return the sampling parameters of training, with this temperature.

        Raises:
            ConfigError: the temperature is invalid.
        """
        sampling = training_sampling(config)
        if self.temperature is None:
            return sampling
        try:
            return replace(sampling, temperature=self.temperature)
        except ValueError as error:
            raise ConfigError(f"--temperature: {error}") from None

    def sources(self, config: Config) -> tuple[DataSource, ...]:
        """Return the sources of rows.

        Raises:
            ConfigError: none is named.
        """
        return collection_sources(config, self.data)


@dataclass(kw_only=True)
class CollectionRun:
    """A collection in progress: the state that its slots share.

    Attributes:
        lost: lost trajectories that are in the journal, by reason.
        batch: the latest groups, as many as a training step has at most.
    """

    rollouts: Rollouts
    journal: Journal
    group_size: int
    sampling: SamplingParams
    step: int
    lost: Counter[DropReason] = field(default_factory=Counter)
    batch: list[Group] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._collector = self.rollouts.agents.collector
        self._guard = LostBatchGuard(self.rollouts.config.trainer.max_failed_batches)

    async def run(self) -> None:
        """Collect all unfinished rows.

        However this ends, the journal holds or counts every trajectory that was started.
        """
        row_count = len(self.rollouts.rows)
        unfinished = (n for n in range(row_count) if n not in self.journal.sizes)
        num_slots = self.rollouts.config.rollout.max_in_flight
        accounting = self._collector.accounting
        try:
            await gather_or_cancel(self._slot(unfinished) for _ in range(num_slots))
        finally:
            accounting.drop(accounting.in_flight, DropReason.CANCELLED)
            self.journal.lose(accounting.dropped - self.lost)

    async def _slot(self, numbers: Iterator[int]) -> None:
        # All slots share the iterator: each takes the next row.
        for number in numbers:
            group = await self._collector.collect_one(
                self.rollouts.rows[number],
                group_size=self.group_size,
                sampling=self.sampling,
                step=self.step,
                index=number,
                label=_LABEL,
            )
            # Without a server everything is lost, and the row would count as finished.
            self.rollouts.client.require_server()
            self.journal.add(number, records(group, number), group.dropped)
            self._collector.accounting.train(
                trajectory.trajectory_id for trajectory in group.trajectories
            )
            self.lost.update(group.dropped)

            self.batch.append(group)
            if len(self.batch) == self.rollouts.config.rollout.prompts_per_step:
                # Stop a collection that loses everything.
                self._guard.check(self.batch, self._collector.latest_losses)
                self.batch.clear()


async def collect(
    subject: ServedPolicy, request: CollectionRequest, *, out: Path, console: Console
) -> dict[str, Any]:
    """Collect what is missing, write the file, and return the summary.

    The summary is also written next to the file.

    Args:
        out: ``FILE.parquet``, ``FILE.jsonl`` or a folder.
        console: shows progress.

    Raises:
        ConfigError, DataError, ModelError, ToolDefinitionError: the user has to fix something, such
        as ``out``. EngineDiedError, NothingToTrainError: no server is left, or everything is lost;
        the journal remains. asyncio.CancelledError: interrupted; the journal remains.
    """
    target = Target.from_path(out)
    config = subject.config
    sampling = request.sampling(config)
    sources = request.sources(config)
    group_size = request.group_size or config.rollout.group_size
    settings = collection_settings(subject, request, sources, group_size, sampling)
    finished_summary = _finished_summary(target, settings)
    if finished_summary:
        print_line(console, f"{out} is complete already: nothing to do")
        return finished_summary

    with Journal(target.journal, settings) as journal, Progress(console, total_steps=0) as progress:
        try:
            async with open_rollouts(
                config,
                (sources, request.limit),
                version=subject.step,
                print_line=progress.phase,
            ) as rollouts:
                rollouts.agents.collector.require_branching(rollouts.rows)
                if config.rollout.backend == "remote":
                    pool = rollouts.client.pool
                    journal.require_served(
                        {"version": pool.policy_version, "weights": pool.weights_fingerprint}
                    )
                _show_progress(progress, journal, len(rollouts.rows))
                collection = CollectionRun(
                    rollouts=rollouts,
                    journal=journal,
                    group_size=group_size,
                    sampling=sampling,
                    step=subject.step,
                )
                await collection.run()
        except BaseException:
            finished_rows = len(journal.sizes)
            if finished_rows:
                progress.print_line(
                    f"{target.journal} has {counted(finished_rows, 'prompt')}; the same command"
                    " continues from there"
                )
            raise

        summary = {
            "policy": subject.name,
            "model": subject.recorded.model.path,
            "data": ", ".join(map(str, sources)),
            "prompts": len(rollouts.rows),
            "prompts_lost": len(rollouts.rows) - len(journal.sizes),
            "started": journal.started,
            "kept": journal.num_trajectories,
            "dropped": dict(journal.dropped),
            "settings": settings,
        }
        write(target, journal, summary)
    return summary


def _show_progress(progress: Progress, journal: Journal, row_count: int) -> None:
    start_count = len(journal.sizes)
    start = time.monotonic()
    if start_count:
        progress.print_line(f"continuing: {start_count} of {counted(row_count, 'prompt')} done")

    def describe() -> str:
        finished = len(journal.sizes)
        trajectories = counted(journal.num_trajectories, "trajectory")
        description = f"{finished}/{counted(row_count, 'prompt')}, {trajectories}"
        if finished > start_count:
            seconds_per_row = (time.monotonic() - start) / (finished - start_count)
            remaining_seconds = seconds_per_row * (row_count - finished)
            description += f", about {duration(remaining_seconds)} left"
        return description

    progress.phase("collecting", describe)


def collection_settings(
    subject: ServedPolicy,
    request: CollectionRequest,
    sources: Sequence[DataSource],
    group_size: int,
    sampling: SamplingParams,
) -> dict[str, Any]:
    """Return everything by which a later process recognizes the collection.

    Args:
        request: names the rows, with ``sources``.
    """
    config = subject.config
    return {
        "policy": subject.fingerprint(),
        "data": open_dataset(sources, limit=request.limit).fingerprint,
        "group_size": group_size,
        "sampling": asdict(sampling),
        "rollout.backend": config.rollout.backend,
        **named_content(config, _NAMED_FILES),
        **defining_values(config, _DEFINING),
    }


def _finished_summary(target: Target, settings: dict[str, Any]) -> dict[str, Any] | None:
    """Return the summary of this collection if it is complete, else None.

    Raises:
        ConfigError: the target holds something else.
    """
    if target.journal.exists() or not target.is_taken:
        return None
    if not target.summary.is_file():
        raise ConfigError(
            f"--out {target.path} exists and was not collected by this command; choose another"
        )
    try:
        summary = read_json_object(target.summary)
        recorded = summary["settings"]
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(
            f"--out {target.path} exists, and its summary {target.summary} cannot be read"
            f" ({error!r}); choose another"
        ) from None
    require_same(settings, recorded, target.path)
    return summary
