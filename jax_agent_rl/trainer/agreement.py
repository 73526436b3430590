"""Compare the engine with the learner in every step, before anything is learned; diagnose a breach.

::

    learner scores the step ─► Comparison ─► within the tolerance: go on
                                        └──► a breach: diagnosis ─► disagreement.json
                                                                 ─► stop, or warn and go on

The comparison costs nothing: it uses log-probs that the step computes anyway. Only where every
token is of an older policy version are a few trajectories scored again.

Programs for a diagnosis are compiled when there is something to diagnose. They are not counted as
recompilations of the run.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Collection, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import numpy as np

from jax_agent_rl.agreement.diagnosis import EngineView, diagnose
from jax_agent_rl.agreement.report import Diagnosis, Evidence, Tolerance, breach_line, run_tolerance
from jax_agent_rl.agreement.subject import MAX_CONTEXTS, Context, collect_contexts, make_subject
from jax_agent_rl.errors import BackendError, DisagreementError
from jax_agent_rl.learner.cancellation import StepCancellation
from jax_agent_rl.learner.comparison import AgreementCheck, Comparison, comparable, compare
from jax_agent_rl.learner.learner import Learner
from jax_agent_rl.learner.metrics import UpdateResult
from jax_agent_rl.models.tensors import Inspectable
from jax_agent_rl.observe.run_dir import RunDir
from jax_agent_rl.trainer.components import RunComponents
from jax_agent_rl.types import Group, Trajectory

T = TypeVar("T")
logger = logging.getLogger(__name__)

NOTHING_COMPARED = Comparison(tokens=0, mean=0.0, largest=0.0)

MAX_OLDER_TRAJECTORIES = 4
"""Trajectories of the previous version that are compared in a step without newer tokens."""

INSPECTION_SECONDS = 120.0
"""An engine that does not answer within this time is not inspected."""


@dataclass(frozen=True, kw_only=True)
class ComparedVersions:
    """The policy versions whose tokens are compared, all of the same parameters.

    Attributes:
        since: the first of them.
        before: the first version of later parameters. None: they are the learner's current ones.
    """

    since: int
    before: int | None = None


class AgreementWatch:
    """Compares engine and learner in every step, and diagnoses a breach.

    Tokens of older versions say nothing about the learner's parameters. If a step has no others, a
    few tokens of the previous version are compared with the parameters before the last update,
    provided that this was a single update and can be undone.

    Args:
        runtime: engines and learner.
        folder: where the evidence of a breach is written.
        version: policy version of the learner's parameters.
        print_line: prints a line for people.

    Attributes:
        programs: compiled for diagnoses and to score older tokens; not counted as the run's.
    """

    def __init__(
        self,
        runtime: RunComponents,
        folder: RunDir,
        *,
        version: int,
        print_line: Callable[[str], None],
    ) -> None:
        self._runtime = runtime
        self._folder = folder
        self._print_line = print_line

        self._versions = ComparedVersions(since=version)
        self._previous_versions: ComparedVersions | None = None

        self._agreed = True  # in the latest step
        self._latest = NOTHING_COMPARED
        self._latest_age = 0
        self.programs = 0

    def update(
        self,
        groups: Sequence[Group],
        *,
        masked: Collection[str],
        tick: Callable[[int, int], None],
        cancellation: StepCancellation,
        step: int,
        version: int,
        loop: asyncio.AbstractEventLoop,
    ) -> UpdateResult:
        """Run the learner's update, which compares engine and learner before it changes anything.

        Call it in the learner's thread. For the other arguments see :meth:`Learner.update`.

        Args:
            version: policy version of the parameters after it.
            loop: on which the engines run.

        Raises:
            DisagreementError: a breach, if ``trainer.on_disagreement`` says so.
        """

        def inspect(comparison: Comparison) -> None:
            self._inspect(comparison, groups, step, loop)

        result = self._runtime.learner.update(
            groups,
            masked=masked,
            tick=tick,
            cancellation=cancellation,
            check=AgreementCheck(since=self._versions.since, inspect=inspect),
        )
        is_policy_trained = "loss" in result.metrics  # not while only a critic learns
        if is_policy_trained and not result.skipped:
            self._advance(version)
        return result

    def _advance(self, version: int) -> None:
        """Record that the parameters have changed: now only tokens of this version are comparable.

        Args:
            version: policy version of the new parameters.
        """
        learner = self._runtime.config.learner
        self._previous_versions = None
        if learner.ppo_epochs * learner.num_minibatches == 1:  # only a single update can be undone
            self._previous_versions = ComparedVersions(since=self._versions.since, before=version)
        self._versions = ComparedVersions(since=version)

    def take_metrics(self) -> dict[str, float]:
        """Return and reset the metrics of the latest comparison."""
        metrics = {
            "compared_tokens": float(self._latest.tokens),
            "compared_age": float(self._latest_age),
            "compared_gap_mean": self._latest.mean,
            "compared_gap_max": self._latest.largest,
        }
        self._latest = NOTHING_COMPARED
        self._latest_age = 0
        return metrics

    @property
    def tolerance(self) -> Tolerance:
        """The tolerance between this run's engines and learner."""
        engines = [server.backend for server in self._runtime.client.pool.servers]
        precisions = [engine.capabilities.precision for engine in engines]
        return run_tolerance(self._runtime.config, precisions)

    def _inspect(
        self,
        comparison: Comparison,
        groups: Sequence[Group],
        step: int,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        """Raise DisagreementError at a breach, if ``trainer.on_disagreement`` says so."""
        versions = self._versions
        if not comparison.tokens and self._previous_versions is not None:
            versions = self._previous_versions
            comparison = self._compare_previous(groups, versions)
            self._latest_age = 1 if comparison.tokens else 0

        tolerance = self.tolerance
        agreed_last_step = self._agreed
        self._latest = comparison
        self._agreed = tolerance.holds(comparison)
        if self._agreed:
            return

        breach = breach_line(comparison, tolerance, versions.since)
        self._print_line(f"  step {step}: {breach}")

        stops = self._runtime.config.trainer.on_disagreement == "stop"
        conclusion = "the diagnosis is from the step before"
        # With "warn", breaches in a row have the same cause: only the first of them is diagnosed.
        if agreed_last_step or stops:
            diagnosis = self._diagnose(groups, versions, step, tolerance, loop)
            if diagnosis is None:
                conclusion = f"run `jax-agent-rl diagnose {self._folder.path}`"
                lines = [f"=> {conclusion}"]
            else:
                conclusion = diagnosis.line
                lines = diagnosis.lines()
            for line in lines:
                self._print_line(f"  {line}")

        if stops:
            raise DisagreementError(
                f"{breach}\n"
                f"=> {conclusion}\n"
                f"Nothing was learned from this step; {self._folder.disagreement} has the evidence."
                " Go on with --resume once it is corrected,"
                " or with trainer.on_disagreement=warn as it is"
            )

    def _compare_previous(self, groups: Sequence[Group], versions: ComparedVersions) -> Comparison:
        """Compare a few trajectories of the previous version with the parameters of that time."""
        learner = self._runtime.learner
        if not isinstance(learner, Learner):
            return NOTHING_COMPARED
        trajectories = trajectories_with(groups, versions)[:MAX_OLDER_TRAJECTORIES]
        if not trajectories:
            return NOTHING_COMPARED
        previous_params = learner.previous_trained()
        if previous_params is None:
            return NOTHING_COMPARED

        programs_before = learner.programs_compiled
        single_groups = [Group(group_id=t.group_id, trajectories=(t,)) for t in trajectories]
        try:
            logprobs = learner.logprobs(single_groups, trained=previous_params)
        except Exception as error:
            # For example out of memory: the step goes on, and is counted as not compared.
            logger.exception("tokens of the previous version could not be scored")
            reason = f"{type(error).__name__}: {error}"
            self._print_line(f"  tokens of the previous version are not compared: {reason}")
            self._previous_versions = None
            return NOTHING_COMPARED
        finally:
            self.programs += learner.programs_compiled - programs_before

        rollout_logprobs = [_trained_rollout_logprobs(t) for t in trajectories]
        is_compared = [comparable(t, versions.since, versions.before) for t in trajectories]
        return compare(logprobs, rollout_logprobs, is_compared)

    def _diagnose(
        self,
        groups: Sequence[Group],
        versions: ComparedVersions,
        step: int,
        tolerance: Tolerance,
        loop: asyncio.AbstractEventLoop,
    ) -> Diagnosis | None:
        """Diagnose a breach and write its evidence; return None if the diagnosis fails.

        The same holds for a learner whose parameters span processes: it cannot be diagnosed here.
        """
        learner = self._runtime.learner
        diagnosis = None
        engine = self._view_engines(loop)
        contexts = collect_contexts(groups, versions.since, before=versions.before)

        if isinstance(learner, Learner) and contexts:
            uses_previous_params = versions.before is not None

            def packed() -> Sequence[Context]:
                """Score the whole step again, packed as it is trained on."""
                programs_before = learner.programs_compiled
                params = learner.previous_trained() if uses_previous_params else None
                logprobs = learner.logprobs(groups, trained=params)
                self.programs += learner.programs_compiled - programs_before
                return collect_contexts(groups, versions.since, logprobs, before=versions.before)

            try:
                subject = make_subject(
                    learner,
                    self._runtime.config,
                    contexts,
                    version=versions.since,
                    packed=packed,
                    is_before=uses_previous_params,
                )
                diagnosis = diagnose(subject, tolerance=tolerance, engine=engine)
                contexts = list(diagnosis.contexts)
            except Exception as error:
                # For example out of memory: the breach is handled all the same.
                logger.exception("the diagnosis failed")
                self._print_line(f"  the diagnosis failed: {type(error).__name__}: {error}")

        evidence = Evidence(
            version=versions.since,
            step=step,
            contexts=contexts[:MAX_CONTEXTS],
            tolerance=tolerance,
            precision=engine.precision,
            tensors=engine.tensors,
            replicas=engine.replicas,
            diagnosis=None if diagnosis is None else diagnosis.to_json(),
        )
        self._folder.write_json(self._folder.disagreement, evidence.to_json())
        return diagnosis

    def _view_engines(self, loop: asyncio.AbstractEventLoop) -> EngineView:
        """Inspect the engines that allow it: the tensors of all, the layers of the first."""
        engines = [server.backend for server in self._runtime.client.pool.servers]
        precision = engines[0].capabilities.precision if engines else "float32"

        # The weights of a vLLM engine that sleeps are nowhere that could be read.
        config = self._runtime.config.rollout
        is_asleep = config.backend == "vllm" and config.sleep_during_update
        inspectable: list[Inspectable] = []
        for engine in engines:
            # Not isinstance: from Python 3.12 on it does not look through a FetchingBackend.
            if hasattr(engine, "tensor_samples"):
                inspectable.append(cast(Inspectable, engine))
        if is_asleep or not inspectable:
            return EngineView(precision=precision)

        def wait(answer: Coroutine[Any, Any, T]) -> T:
            return asyncio.run_coroutine_threadsafe(answer, loop).result(INSPECTION_SECONDS)

        try:
            samples = []
            for engine in inspectable:
                samples.append(wait(engine.tensor_samples()))
                samples += wait(engine.replica_samples())
        except (BackendError, TimeoutError) as error:
            self._print_line(f"  the engine cannot be inspected: {error}")
            return EngineView(precision=precision)

        return EngineView(
            precision=precision,
            tensors=samples[0],
            replicas=[sample for sample in samples[1:] if sample],
            layers=lambda ids: wait(inspectable[0].layer_outputs(ids)),
        )


def trajectories_with(groups: Sequence[Group], versions: ComparedVersions) -> list[Trajectory]:
    """Return the trajectories with tokens to compare, one of each group first."""
    comparable_members = []
    for group in groups:
        members = []
        for trajectory in group.trajectories:
            if comparable(trajectory, versions.since, versions.before).any():
                members.append(trajectory)
        comparable_members.append(members)

    trajectories = []
    for nth_members in itertools.zip_longest(*comparable_members):
        trajectories += [trajectory for trajectory in nth_members if trajectory is not None]
    return trajectories


def _trained_rollout_logprobs(trajectory: Trajectory) -> np.ndarray:
    """Return the engine's log-probs of a trajectory's tokens with loss, float64 [S]."""
    parts = []
    for sequence in trajectory.sequences:
        has_loss = np.asarray(sequence.loss_mask, bool)
        parts.append(np.asarray(sequence.rollout_logprobs, np.float64)[has_loss])
    return np.concatenate(parts)
