"""One collection: from rows to groups, the journal and the file.

::

    unfinished rows ──► max_in_flight slots, a group each ──► journal, group by group ──► file, summary
                                                       └─ interrupted: the next call continues from the journal
"""

from __future__ import annotations

import asyncio
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
from jax_agent_rl.runtime.sampling import Rollouts, open_rollouts
from jax_agent_rl.trainer.step import training_sampling
from jax_agent_rl.types import DropReason, Group, SamplingParams
from jax_agent_rl.utils.bounded_json import read_json_object

_DEFINING = (
    *(
        "seed",
        "model",
        "agent",
        "tools",
        "tool_config",
        "search",
        "interactions",
        "reward",
        "environments",
    ),
    *(
        "rollout.max_model_len",
        "rollout.min_group_size",
        "rollout.group_timeout",
        "rollout.strategy",
    ),
    *("rollout.jetstream", "rollout.vllm"),
)
"""Keys and sections on which trajectories depend, besides the policy, its sampling and the rows.

Of these, ``config.resume`` says what defines a trajectory, and what may change: timeouts,
addresses, devices.
"""
_CODE = BY_CONTENT - {"model.path", "critic.path", "distill.teachers", "data.train"}
"""Keys of those sections that name files and models, which may change under their names."""
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
        """Return the sampling parameters of training, with this temperature; raises ConfigError if it is invalid."""
        chosen = training_sampling(config)
        try:
            return (
                chosen
                if self.temperature is None
                else replace(chosen, temperature=self.temperature)
            )
        except ValueError as error:
            raise ConfigError(f"--temperature: {error}") from None

    def sources(self, config: Config) -> tuple[DataSource, ...]:
        """Return the sources of rows; raises ConfigError if none is named."""
        return collection_sources(config, self.data)


@dataclass(kw_only=True)
class _Collection:
    """A collection in progress; the state its slots share."""

    rollouts: Rollouts
    journal: Journal
    group_size: int
    sampling: SamplingParams
    step: int
    counted: Counter[DropReason] = field(default_factory=Counter)
    batch: list[Group] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._collector = self.rollouts.agents.collector
        self._guard = LostBatchGuard(self.rollouts.config.trainer.max_failed_batches)

    async def run(self) -> None:
        """Collect all unfinished rows; however this ends, the journal holds or counts everything started."""
        pending = (n for n in range(len(self.rollouts.rows)) if n not in self.journal.sizes)
        slots = [
            asyncio.create_task(self._slot(pending))
            for _ in range(self.rollouts.config.rollout.max_in_flight)
        ]
        accounting = self._collector.accounting
        try:
            await asyncio.gather(*slots)
        finally:
            for slot in slots:
                slot.cancel()
            await asyncio.gather(*slots, return_exceptions=True)
            accounting.drop(accounting.in_flight, DropReason.CANCELLED)
            self.journal.lose(accounting.dropped - self.counted)

    async def _slot(self, numbers: Iterator[int]) -> None:
        for number in numbers:  # shared: each slot takes the next one
            group = await self._collector.collect_one(
                self.rollouts.rows[number],
                group_size=self.group_size,
                sampling=self.sampling,
                step=self.step,
                index=number,
                label=_LABEL,
            )
            self.rollouts.client.require_server()  # or the row would count as finished
            self.journal.add(number, records(group, number), group.dropped)
            self._collector.accounting.train(t.trajectory_id for t in group.trajectories)
            self.counted.update(group.dropped)
            self.batch.append(group)
            if len(self.batch) == self.rollouts.config.rollout.prompts_per_step:
                self._guard.check(
                    self.batch, self._collector.latest_losses
                )  # stops a collection that loses everything
                self.batch.clear()


async def collect(
    subject: ServedPolicy, request: CollectionRequest, *, out: Path, console: Console
) -> dict[str, Any]:
    """Collect what is missing and write the file; return the summary, which is also written next to it.

    Args:
        subject: the policy.
        request: the options.
        out: ``FILE.parquet``, ``FILE.jsonl`` or a folder.
        console: shows progress.

    Raises:
        ConfigError, DataError, ModelError, ToolDefinitionError: the user has to fix something, such
        as ``out``. EngineDiedError, NothingToTrainError: no server is left, or everything is lost;
        the journal remains. asyncio.CancelledError: interrupted; the journal remains.
    """
    target, config = Target.from_path(out), subject.config
    sampling, sources = request.sampling(config), request.sources(config)
    group_size = request.group_size or config.rollout.group_size
    settings = collection_settings(subject, request, sources, group_size, sampling)
    if finished := _finished(target, settings):
        print_line(console, f"{out} is complete already: nothing to do")
        return finished
    with Journal(target.journal, settings) as journal, Progress(console, total_steps=0) as progress:
        source = sources, request.limit
        try:
            async with open_rollouts(
                config, source, version=subject.step, print_line=progress.phase
            ) as rollouts:
                rollouts.agents.collector.require_branching(rollouts.rows)
                if config.rollout.backend == "remote":
                    client = rollouts.client
                    journal.require_served(
                        {"version": client.policy_version, "weights": client.weights_fingerprint}
                    )
                _show(progress, journal, len(rollouts.rows))
                await _Collection(
                    rollouts=rollouts,
                    journal=journal,
                    group_size=group_size,
                    sampling=sampling,
                    step=subject.step,
                ).run()
        except BaseException:
            if done := len(journal.sizes):
                progress.print_line(
                    f"{done} prompts are in {target.journal}; the same command continues from there"
                )
            raise
        summary = {
            "policy": subject.name,
            "model": subject.recorded.model.path,
            "data": ", ".join(map(str, sources)),
            "prompts": len(rollouts.rows),
            "prompts_lost": len(rollouts.rows) - len(journal.sizes),
            "started": journal.started,
            "kept": journal.kept,
            "dropped": dict(journal.dropped),
            "settings": settings,
        }
        write(target, journal, summary)
    return summary


def _show(progress: Progress, journal: Journal, rows: int) -> None:
    before, begin = len(journal.sizes), time.monotonic()
    if before:
        progress.print_line(f"continuing: {before} of {rows} prompts are done")

    def count() -> str:
        done = len(journal.sizes)
        left = (time.monotonic() - begin) * (rows - done) / max(1, done - before)
        about = f", about {duration(left)} left" if done > before else ""
        return f"{done}/{rows} prompts, {journal.kept} trajectories{about}"

    progress.phase("collecting", count)


def collection_settings(
    subject: ServedPolicy,
    request: CollectionRequest,
    sources: Sequence[DataSource],
    group_size: int,
    sampling: SamplingParams,
) -> dict[str, Any]:
    """Return everything by which a later process recognizes the collection."""
    config = subject.config
    return {
        "policy": subject.fingerprint(),
        "data": open_dataset(sources, limit=request.limit).fingerprint,
        "group_size": group_size,
        "sampling": asdict(sampling),
        "rollout.backend": config.rollout.backend,
        **named_content(config, _CODE),
        **defining_values(config, _DEFINING),
    }


def _finished(target: Target, settings: dict[str, Any]) -> dict[str, Any] | None:
    """Return the summary of this collection if it is complete.

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
