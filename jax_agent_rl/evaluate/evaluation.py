"""One evaluation: n trajectories per held-out row, sampled as in training, and their scores.

::

    rows ──► the evaluator's agents (tools, rewards, val_ limits) ──► trajectories.jsonl, as they end
                                                                  └─► pass@k, rewards, intervals ──► summary.json
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from jax_agent_rl.collect.accounting import LostBatchGuard
from jax_agent_rl.config import Config, DataSource
from jax_agent_rl.data.dataset import RowOutlines
from jax_agent_rl.errors import ConfigError
from jax_agent_rl.evaluate.scores import scores
from jax_agent_rl.observe.progress import Progress
from jax_agent_rl.observe.run_dir import RunDir
from jax_agent_rl.runtime.policy import ServedPolicy
from jax_agent_rl.runtime.sampling import Rollouts, Source, open_rollouts
from jax_agent_rl.trainer.groups import all_trajectories, evaluation_sampling, gather, recorded
from jax_agent_rl.trainer.record import evaluation_record
from jax_agent_rl.types import Group, SamplingParams


@dataclass(frozen=True, kw_only=True)
class EvaluationRequest:
    """The options of an evaluation.

    Attributes:
        samples: trajectories per row.
        ks: values of k for pass@k, ascending.
        pass_reward: minimum reward of a trajectory that passes.
        temperature: None: chosen by :func:`sampling`.
        top_p, top_k, min_p: see :class:`~jax_agent_rl.types.SamplingParams`.
        data: file, glob or Hub dataset of rows; replaces ``data.eval``.
        limit: use only the first rows.
    """

    samples: int = 8
    ks: tuple[int, ...] = (1, 4, 8)
    pass_reward: float = 1.0
    temperature: float | None = None
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    data: str | None = None
    limit: int | None = None

    def __post_init__(self) -> None:
        if self.samples < 1:
            raise ConfigError(f"-n {self.samples}: at least one sample per prompt is needed")
        if not self.ks or min(self.ks) < 1 or max(self.ks) > self.samples:
            raise ConfigError(f"-k {','.join(map(str, self.ks))}: pass@k needs 1 <= k <= {self.samples} samples (-n)")


def sampling(config: Config, request: EvaluationRequest) -> SamplingParams:
    """Return the sampling parameters of a run's held-out evaluations, unless the request overrides them.

    With several samples and ``rollout.eval_temperature`` 0, the training temperature applies: greedy samples of a
    prompt are all equal.

    Raises:
        ConfigError: a value is out of range.
    """
    wanted = request.temperature
    if wanted is None:
        greedy_twice = config.rollout.eval_temperature == 0 and request.samples > 1
        wanted = config.rollout.temperature if greedy_twice else config.rollout.eval_temperature
    try:
        cut = {"top_p": request.top_p, "top_k": request.top_k, "min_p": request.min_p}
        return replace(evaluation_sampling(config), temperature=wanted, **cut)
    except ValueError as error:
        raise ConfigError(f"--temperature, --top-p, --top-k, --min-p: {error}") from None


def select_rows(config: Config, request: EvaluationRequest) -> Source:
    """Return the rows to evaluate; raises ConfigError if none are named."""
    limits = [limit for limit in (request.limit, None if request.data else config.data.eval_limit) if limit]
    files = (DataSource(path=request.data),) if request.data else config.data.eval
    if files is None:
        raise ConfigError("no rows to evaluate: data.eval is not set; give --data FILE (.jsonl or .parquet)")
    return files, min(limits, default=None)


async def evaluate(subject: ServedPolicy, request: EvaluationRequest, *, out: Path, console: Console) -> dict[str, Any]:
    """Sample and score; return the summary, which is also ``summary.json`` in ``out``.

    Args:
        subject: the policy.
        request: the options.
        out: folder to write, with the layout of a run folder, so that ``view`` shows its trajectories.
        console: shows progress.

    Raises:
        ConfigError, DataError, ModelError, ToolDefinitionError: the user has to fix something.
        EngineDiedError, NothingToTrainError: no server is left, or every trajectory was lost.
    """
    config = subject.config.model_copy(update={"run_dir": str(out)})
    chosen, source = sampling(config, request), select_rows(config, request)
    begin = time.monotonic()
    with Progress(console, total_steps=0) as progress:
        async with open_rollouts(config, source, version=subject.step, print_line=progress.phase) as rollouts:
            run_dir = RunDir(out)
            recorded = subject.recorded.model_copy(update={"run_dir": str(out)})
            run_dir.write_json(run_dir.config, recorded.model_dump(mode="json"))
            groups = await _sample(rollouts, subject, request, chosen, run_dir, progress)
            weights = sorted({v for t in all_trajectories(groups) for v in t.policy_versions if v >= 0})
    seconds = time.monotonic() - begin
    run_dir.add_metrics(evaluation_record(subject.step, groups, seconds=seconds))
    summary = {
        "policy": subject.name,
        "policy_versions": weights,
        "data": ", ".join(map(str, source[0])),
        "samples_per_prompt": request.samples,
        "temperature": chosen.temperature,
        "top_p": chosen.top_p,
        "top_k": chosen.top_k,
        "min_p": chosen.min_p,
        "pass_reward": request.pass_reward,
        "seed": config.seed,
        "seconds": round(seconds, 1),
        "scores": scores(
            groups,
            [str(row["data_source"]) for row in RowOutlines(rollouts.rows)],
            samples=request.samples,
            ks=request.ks,
            pass_reward=request.pass_reward,
            seed=config.seed,
        ),
    }
    run_dir.write_json(run_dir.summary, summary)
    return summary


async def _sample(
    rollouts: Rollouts,
    subject: ServedPolicy,
    request: EvaluationRequest,
    chosen: SamplingParams,
    run_dir: RunDir,
    progress: Progress,
) -> Sequence[Group]:
    """Sample for every row, with the seeds of the held-out evaluation after this step, whose samples come first."""
    evaluator, done, rewards = rollouts.agents.evaluator, 0, 0.0

    def arrived(group: Group) -> None:
        nonlocal done, rewards
        done += request.samples
        rewards += sum(group.rewards)
        run_dir.add_trajectories(subject.step, "heldout", recorded([group]))

    total = len(rollouts.rows) * request.samples
    progress.phase("sampling", lambda: f"{done}/{total} trajectories, mean reward {rewards / max(1, done):.3f}")
    groups = await gather(
        evaluator,
        rollouts.client,
        rollouts.rows,
        group_size=request.samples,
        sampling=chosen,
        step=subject.step,
        label="heldout",
        arrived=arrived,
    )
    evaluator.accounting.train(t.trajectory_id for t in all_trajectories(groups))
    LostBatchGuard(1).check(groups, evaluator.latest_losses)
    return groups
