"""``jax-agent-rl replay``: a recorded training step once more, from the run folder alone.

::

    the checkpoint before it ─► learner ───────────────┐
    trajectories.jsonl ─► groups, scored again ─► select ─► update ─► equal to the record, or not

    another configuration ─► scored, shaped ─► select ─► update ─► what it would have changed

Nothing is sampled, and no tool or teacher is asked: token ids, log-probs, experts, greedy baselines
and tools' answers are the recorded ones. Steps between the checkpoint and the step are repeated as
well. The same machine and mesh compute the same bits each time; others differ by rounding.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console

from jax_agent_rl.agents import load_agents
from jax_agent_rl.config import Config
from jax_agent_rl.config.kl import first_teacher
from jax_agent_rl.config.loading import build_tree, read_tree
from jax_agent_rl.config.resume import Difference, value_differences
from jax_agent_rl.errors import ConfigError, DataError, TrajectoryError
from jax_agent_rl.evaluate.recorded_steps import RecordedStep, later_changes, read_steps
from jax_agent_rl.evaluate.step_comparison import (
    StepComparison,
    compare_metrics,
    compare_rewards,
    compare_token_values,
    compare_weights,
    depends_on_time,
    first_difference,
    is_equal,
)
from jax_agent_rl.learner.checkpoint import Checkpointer
from jax_agent_rl.learner.checkpoint_steps import complete_steps
from jax_agent_rl.learner.learner import Learner
from jax_agent_rl.learner.metrics import UpdateResult
from jax_agent_rl.learner.multi_adapter import MultiAdapterLearner
from jax_agent_rl.models.config import DecoderConfig
from jax_agent_rl.models.hf import load_config
from jax_agent_rl.observe.progress import Progress
from jax_agent_rl.runtime.build import make_learner
from jax_agent_rl.runtime.engines import one_program
from jax_agent_rl.runtime.policy_choice import checkpoint_folder, recorded_tree, run_config
from jax_agent_rl.runtime.rollouts import open_codec
from jax_agent_rl.runtime.scoring import needed_services, open_scorer, reward_server
from jax_agent_rl.trainer.record import RunRecord
from jax_agent_rl.trainer.step import role_baselines_after, select_step, shaped
from jax_agent_rl.types import Group, Trajectory
from jax_agent_rl.utils.text import counted

CHANGEABLE_SECTIONS = ("algorithm", "critic", "learner", "reward")
"""Sections whose keys act on a step that has been sampled."""

_REWARD_KEYS = ("reward.", "algorithm.shaping.", "algorithm.turn_reward")
"""Beginnings of keys that decide what a rollout is worth."""

AnyLearner = Learner | MultiAdapterLearner


@dataclass(frozen=True, kw_only=True)
class StepReplayRequest:
    """The options of ``replay``.

    Attributes:
        run: a run folder of ``train``.
        step: the step to repeat, from 1.
        config: YAML file of another configuration; None: the run's.
        overrides: ``key=value``.
    """

    run: Path
    step: int
    config: Path | None = None
    overrides: Sequence[str] = ()

    def load_config(self, recorded: Config) -> Config:
        """Return the configuration with the changes that are asked for.

        Raises:
            ConfigError: it is wrong.
        """
        if self.config is not None:
            tree = read_tree(self.config)
        else:
            tree = recorded.model_dump(mode="json")
        return build_tree(Config, tree, self.overrides, file=self.config)


@dataclass(frozen=True, kw_only=True)
class ChangedStep:
    """What another configuration makes of a recorded step; pairs are (recorded, changed).

    Attributes:
        changes: the keys that differ, with both values.
        reward_mean: mean reward of the trajectories.
        trained: number of trajectories with a token to train on.
        turned_advantages: number of trajectories whose mean advantage has another sign.
        metrics: the learner's metrics that differ.
        update_norm: Euclidean norm of what the step changes in the parameters.
        update_cosine: cosine of the angle between both changes; None if one of them is zero.
    """

    changes: Sequence[str]
    reward_mean: tuple[float, float]
    trained: tuple[int, int]
    turned_advantages: int
    metrics: Mapping[str, tuple[float | None, float | None]]
    update_norm: tuple[float, float]
    update_cosine: float | None


@dataclass(kw_only=True)
class StepReplay:
    """The result of ``replay``.

    Attributes:
        step: the step.
        from_step: step of the checkpoint it began from; 0: the untrained model.
        comparisons: in the order in which a step computes their numbers.
        notes: what could not be compared, and why.
        change: what another configuration makes of the step; None: none was asked for.
    """

    step: int
    from_step: int
    comparisons: list[StepComparison] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    change: ChangedStep | None = None

    @property
    def verdict(self) -> str:
        """``equal`` (to the bit), ``rounding`` or ``different``."""
        if first_difference(self.comparisons) is None:
            return "equal"
        if all(comparison.is_rounding for comparison in self.comparisons):
            return "rounding"
        return "different"

    def summary(self) -> dict[str, Any]:
        """Return it as JSON."""
        return {
            "step": self.step,
            "from_step": self.from_step,
            "verdict": self.verdict,
            "first_difference": first_difference(self.comparisons),
            "comparisons": [comparison.summary() for comparison in self.comparisons],
            "notes": self.notes,
            "change": None if self.change is None else asdict(self.change),
        }


# --- the learner ----------------------------------------------------------------------------------


def _open_learner(config: Config, model: DecoderConfig) -> AnyLearner:
    """Return the untrained learner of a configuration."""
    shared_program = one_program(config, model)
    score_by = None if shared_program is None else shared_program[1]
    learner = make_learner(config, model, score_by=score_by)
    assert isinstance(learner, AnyLearner)
    return learner


@dataclass(frozen=True, kw_only=True)
class _Position:
    """Where a run stands before a step.

    Attributes:
        state: of the learner.
        role_baselines: running means of rewards (RAE).
    """

    state: Any
    role_baselines: dict[str, float]


def _trained_arrays(state: Any) -> list[np.ndarray]:
    """Return the parameters in training, of the policy or of every adapter, on the host.

    Args:
        state: of a learner.
    """
    states = state.values() if isinstance(state, Mapping) else [state]
    arrays = jax.tree.leaves([of_policy.policy.params for of_policy in states])
    return [np.array(array, np.float32) for array in arrays]


class _Repeater:
    """Repeats the steps of a run.

    Args:
        config: decides what is learned.
        start: where the run stands before the first of them; None: at its beginning.
    """

    def __init__(self, config: Config, start: _Position | None = None) -> None:
        self.config = config
        self.model = load_config(config.model.path, weights=True)
        self.learner = _open_learner(config, self.model)
        self.role_baselines: dict[str, float] = {}
        if start is not None:
            _require_same_arrays(self.learner.state, start.state)
            self.learner.state = start.state
            self.role_baselines = start.role_baselines

    def restore(self, checkpointer: Checkpointer, step: int) -> None:
        """Go to a checkpoint."""
        _, self.learner.state, saved = checkpointer.restore(self.learner.state, step=step)
        self.role_baselines = RunRecord.from_json(saved).role_baselines

    def position(self) -> _Position:
        """Return a copy of where the run stands: an update reuses the memory of its arrays."""
        state = jax.tree.map(jnp.copy, self.learner.state)
        return _Position(state=state, role_baselines=dict(self.role_baselines))

    def update(self, groups: Sequence[Group]) -> UpdateResult:
        """Learn from the groups of a step, as a trainer does."""
        algorithm = self.config.algorithm
        selection = select_step(groups, algorithm, self.role_baselines)
        self.role_baselines = role_baselines_after(self.role_baselines, groups, algorithm)
        if not selection.groups:
            return UpdateResult(metrics={}, skipped=False)
        for group in selection.groups:
            for trajectory in group.trajectories:
                _require_experts(trajectory, self.model)
                _require_taught(trajectory, self.config, self.model)
        return self.learner.update(selection.groups, masked=selection.masked)


def _require_experts(trajectory: Trajectory, model: DecoderConfig) -> None:
    """Refuse recorded experts that the policy does not have."""
    experts = model.experts
    expected = None
    if experts is not None:
        expected = (len(model.expert_layers), experts.per_token)
    for sequence in (*trajectory.segments, trajectory):
        for turn in sequence.turns:
            routed = turn.output.routed_experts
            if routed is None:
                continue
            if routed.shape[1:] != expected:
                raise DataError(
                    f"{trajectory.trajectory_id} has experts of {routed.shape[1]} layers,"
                    f" {routed.shape[2]} for a token, on record; the policy's are {expected}"
                )
            largest = int(np.max(np.asarray(routed.numbers), initial=0))
            if experts is not None and largest >= experts.count:
                raise DataError(
                    f"{trajectory.trajectory_id} has expert {largest} on record, and the policy has"
                    f" {experts.count}"
                )


def _require_taught(trajectory: Trajectory, config: Config, model: DecoderConfig) -> None:
    """Refuse a trajectory without the scores of its teacher, if that is served elsewhere."""
    teachers = [] if config.distill is None else config.distill.teachers
    number = first_teacher((teacher.data_sources for teacher in teachers), trajectory.row)
    if number is None or teachers[number].url is None:
        return
    url = teachers[number].url
    scores = trajectory.teacher_scores
    if scores is None:
        raise DataError(
            f"{trajectory.trajectory_id} has no log-probs of the teacher at {url} on record: an"
            " earlier version recorded none, and what a step leaves out is not sent to teachers"
        )

    top_k = len(scores.top_ids[0]) if scores.top_ids else 0
    if scores.log_probs and top_k != config.algorithm.kl.top_k:
        raise DataError(
            f"{trajectory.trajectory_id} has the {counted(top_k, 'likeliest id')} of the teacher at"
            f" {url} on record, and algorithm.kl.top_k={config.algorithm.kl.top_k}; set it to"
            f" {top_k}"
        )
    largest = max(itertools.chain.from_iterable(scores.top_ids), default=0)
    if largest >= model.vocab_size:
        raise DataError(
            f"{trajectory.trajectory_id} has token id {largest} of the teacher at {url} on record,"
            f" and the policy has {model.vocab_size}"
        )


def _require_same_arrays(new: Any, old: Any) -> None:
    """Refuse a configuration that trains other arrays than the run did."""
    if jax.tree.structure(new) == jax.tree.structure(old):
        shapes = zip(jax.tree.leaves(new), jax.tree.leaves(old), strict=True)
        if all(a.shape == b.shape and a.dtype == b.dtype for a, b in shapes):
            return
    raise ConfigError(
        "the changed configuration trains other arrays than the run did (another optimizer, LoRA or"
        " critic), so it cannot go on from the run's checkpoint; change other keys"
    )


# --- rewards --------------------------------------------------------------------------------------


async def _score_again(config: Config, step: RecordedStep, notes: list[str]) -> list[Group]:
    """Return a step's groups with the rewards that a configuration gives their trajectories.

    Args:
        notes: gets a line about each trajectory that could not be scored; it is left out.

    Raises:
        ConfigError, DataError: the rewards cannot be computed here.
    """
    rows = [t.row for group in step.groups for t in group.trajectories]
    codec = None
    if config.algorithm.kl.reads_feedback:
        codec = open_codec(config)
    groups = []
    async with reward_server(config):
        needed = needed_services(config, rows)
        async with open_scorer(config, needed, codec=codec) as score:
            for group in step.groups:
                members: list[Trajectory] = []
                for trajectory in group.trajectories:
                    try:
                        # Penalties of algorithm.shaping are not part of a score.
                        members.append(await score(replace(trajectory, raw_score=None)))
                    except TrajectoryError as error:
                        notes.append(f"{trajectory.trajectory_id} was not scored: {error}")
                groups.append(shaped(replace(group, trajectories=tuple(members)), config))
    return groups


# --- another configuration ------------------------------------------------------------------------


def _changes(recorded: Config, config: Config, overrides: Sequence[str]) -> list[Difference]:
    """Return the keys that make the step another one.

    Raises:
        ConfigError: one of them says how trajectories are sampled, which is over.
    """
    old = recorded.model_dump(mode="json")
    new = config.model_dump(mode="json")
    changes = value_differences(Config, old, new, may_change=False)
    for change in changes:
        if change.key.partition(".")[0] not in CHANGEABLE_SECTIONS:
            raise ConfigError(
                f"{change}: the step has been sampled, so this key can no longer act on it; change"
                f" keys of {', '.join(CHANGEABLE_SECTIONS)}"
            )

    # The same file may have been edited since.
    is_reward_named = any(override.startswith("reward.path=") for override in overrides)
    if is_reward_named or recorded.reward.path != config.reward.path:
        changes.append(
            Difference(key="reward.path", old=recorded.reward.path, new=config.reward.path)
        )
    if config.algorithm.adv_estimator == "remax":
        _require_same_baselines(recorded, changes)
    return changes


def _require_same_baselines(recorded: Config, changes: Sequence[Difference]) -> None:
    """Refuse changes that greedy baselines (ReMax) would have to follow."""
    if recorded.algorithm.adv_estimator != "remax":
        raise ConfigError(
            "algorithm.adv_estimator=remax compares with greedy rollouts, and the run sampled none;"
            " choose another estimator"
        )
    for change in changes:
        if change.key.startswith(_REWARD_KEYS):
            raise ConfigError(
                f"{change}: of greedy rollouts (algorithm.adv_estimator=remax) only the rewards are"
                " on record, which cannot be computed again; change algorithm.adv_estimator as well"
            )


def _as_recorded(config: Config, changes: Sequence[Difference]) -> Config:
    """Return a configuration without its changes: the run's, where this process computes it."""
    tree = config.model_dump(mode="json")
    for change in changes:
        *section_names, name = change.key.split(".")
        section = tree
        for section_name in section_names:
            section = section[section_name]
        section[name] = change.old
    return build_tree(Config, tree)


async def _changed_step(
    config: Config,
    changes: Sequence[Difference],
    step: RecordedStep,
    before: _Position,
    recorded_arrays: Sequence[np.ndarray],
    recorded: UpdateResult,
    notes: list[str],
) -> ChangedStep:
    """Return what another configuration makes of a step.

    Args:
        before: where the run stood before the step.
        recorded_arrays: the parameters after the step as it was recorded.
        recorded: the update as it was recorded.
        notes: gets what could not be scored.
    """
    groups = await _score_again(config, step, notes)
    start_arrays = _trained_arrays(before.state)
    recorded_change = _subtract(recorded_arrays, start_arrays)

    repeater = _Repeater(config, before)
    update = repeater.update(groups)
    new_change = _subtract(_trained_arrays(repeater.learner.state), start_arrays)

    recorded_norm = _dot(recorded_change, recorded_change) ** 0.5
    new_norm = _dot(new_change, new_change) ** 0.5
    cosine = None
    if recorded_norm and new_norm:
        cosine = _dot(recorded_change, new_change) / recorded_norm / new_norm
    return ChangedStep(
        changes=[str(change) for change in changes],
        reward_mean=(_mean_reward(step.groups), _mean_reward(groups)),
        trained=(len(recorded.tokens), len(update.tokens)),
        turned_advantages=_turned_advantages(recorded, update),
        metrics=_changed_metrics(recorded, update),
        update_norm=(recorded_norm, new_norm),
        update_cosine=cosine,
    )


def _subtract(after: Sequence[np.ndarray], before: Sequence[np.ndarray]) -> list[np.ndarray]:
    return [new - old for new, old in zip(after, before, strict=True)]


def _dot(first: Sequence[np.ndarray], second: Sequence[np.ndarray]) -> float:
    """Return the inner product of two lists of arrays, summed in float64."""
    total = 0.0
    for a, b in zip(first, second, strict=True):
        total += float(np.sum(a * b, dtype=np.float64))
    return total


def _mean_reward(groups: Sequence[Group]) -> float:
    rewards = [t.reward for group in groups for t in group.trajectories]
    return float(np.mean(rewards)) if rewards else 0.0


def _turned_advantages(recorded: UpdateResult, changed: UpdateResult) -> int:
    """Count the trajectories whose mean advantage has another sign, or none any more."""
    turned = 0
    for trajectory_id in recorded.tokens.keys() | changed.tokens.keys():
        signs = []
        for update in (recorded, changed):
            values = update.tokens.get(trajectory_id)
            signs.append(0.0 if values is None else np.sign(np.mean(values["advantages"])))
        if signs[0] != signs[1]:
            turned += 1
    return turned


def _changed_metrics(
    recorded: UpdateResult, changed: UpdateResult
) -> dict[str, tuple[float | None, float | None]]:
    """Return the metrics of the learner that differ, without those that depend on time."""
    differing = {}
    for name in sorted(recorded.metrics.keys() | changed.metrics.keys()):
        pair = (recorded.metrics.get(name), changed.metrics.get(name))
        if not is_equal(*pair) and not depends_on_time(name):
            differing[name] = pair
    return differing


# --- the command ----------------------------------------------------------------------------------


async def replay(request: StepReplayRequest, *, console: Console) -> StepReplay:
    """Repeat a recorded training step, and compare it with its record.

    Args:
        console: shows progress.

    Raises:
        ConfigError, DataError, CheckpointError, ModelError: the user has to fix something.
    """
    run_tree = recorded_tree(request.run)
    recorded = run_config(request.run)
    config = request.load_config(recorded)
    changes = _changes(recorded, config, request.overrides)

    folder = checkpoint_folder(request.run, run_tree)
    earlier = [step for step in complete_steps(folder) if step < request.step]
    start = max(earlier, default=0)
    steps = read_steps(request.run, recorded, start + 1, request.step)
    result = StepReplay(step=request.step, from_step=start)
    result.notes += later_changes(request.run, request.step)

    with (
        Progress(console, total_steps=0) as progress,
        closing(
            Checkpointer(folder, keep=config.trainer.keep_checkpoints, read_only=True)
        ) as checkpointer,
    ):
        progress.phase(f"loading {config.model.path}")
        load_agents(config.agent.module)  # it may register estimators, losses and rewards
        repeater = _Repeater(_as_recorded(config, changes))
        if start:
            repeater.restore(checkpointer, start)
        for step in steps[:-1]:
            progress.phase(f"repeating step {step.number}")
            repeater.update(step.groups)

        step = steps[-1]
        before = repeater.position() if changes else None
        if any(change.key.startswith("reward.") for change in changes):
            result.notes.append("the recorded rewards were not computed again: their code changes")
        else:
            progress.phase(f"scoring step {step.number}")
            scored = await _score_again(repeater.config, step, result.notes)
            result.comparisons.append(compare_rewards(step, scored))

        progress.phase(f"repeating step {step.number}")
        update = repeater.update(step.groups)
        result.comparisons += compare_token_values(step, update)
        result.comparisons.append(compare_metrics(step, update))
        if step.number in complete_steps(folder):
            result.comparisons.append(
                compare_weights(checkpointer, folder, step.number, repeater.learner.state)
            )
        else:
            result.notes.append(
                f"step {step.number} has no checkpoint: the weights after it were not compared"
            )

        if before is not None:
            progress.phase(f"changing step {step.number}")
            recorded_arrays = _trained_arrays(repeater.learner.state)
            del repeater  # its arrays make room for the next learner's
            result.change = await _changed_step(
                config, changes, step, before, recorded_arrays, update, result.notes
            )
    return result
