"""Engine and learner compared in every step, before anything is learned; a disagreement is diagnosed.

::

    learner scores the step ─► Comparison ─► within the tolerance: go on
                                        └──► a breach: diagnosis, disagreement.json ─► stop, or warn and go on

The comparison is of numbers that the step computes anyway; where all tokens are of older versions, of a few that are
scored again. Nothing of a diagnosis is compiled before there is something to diagnose, and its programs count as none
of the run's.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from jax_agent_rl.agreement.diagnosis import EngineView, diagnose
from jax_agent_rl.agreement.report import Diagnosis, Evidence, Tolerance, breach_line, run_tolerance
from jax_agent_rl.agreement.subject import MAX_CONTEXTS, Context, collect_contexts, make_subject
from jax_agent_rl.errors import BackendError, DisagreementError
from jax_agent_rl.learner.learner import Learner
from jax_agent_rl.learner.metrics import AgreementCheck, Comparison, comparable, compare
from jax_agent_rl.models.tensors import Inspectable
from jax_agent_rl.observe.run_dir import RunDir
from jax_agent_rl.trainer import RunComponents
from jax_agent_rl.types import Group, Trajectory

T = TypeVar("T")
logger = logging.getLogger(__name__)
NOTHING = Comparison(tokens=0, mean=0.0, largest=0.0)
MAX_OLDER = 4
"""Trajectories of the version before that are compared in a step without newer tokens."""
INSPECTION_SECONDS = 120.0  # an engine that does not answer in time is not inspected


@dataclass(frozen=True, kw_only=True)
class ComparedVersions:
    """The policy versions whose tokens are compared, all of the same parameters.

    Attributes:
        since: the first of them.
        before: the first version of later parameters; None: these are the learner's own.
    """

    since: int
    before: int | None = None


class AgreementWatch:
    """Compares engine and learner in every step, and diagnoses a breach.

    Tokens of older versions say nothing about the learner's parameters. Where a step has no others, some of the version
    before are compared with the parameters before the last update, if that was a single one and can be undone.

    Args:
        runtime: engines and learner.
        folder: where a breach is recorded.
        version: of the learner's parameters.
        print_line: prints a line for people.
    """

    def __init__(
        self, runtime: RunComponents, folder: RunDir, *, version: int, print_line: Callable[[str], None]
    ) -> None:
        self._runtime, self._folder, self._print_line = runtime, folder, print_line
        self._versions = ComparedVersions(since=version)
        self._versions_before: ComparedVersions | None = None
        self._agreed = True
        self._latest = NOTHING
        self._latest_age = 0
        self.programs = 0
        """Compiled for diagnoses, and to score older tokens; they are none of the run's."""

    def learned(self, version: int, *, updates: int = 1) -> None:
        """Record that the parameters have changed: from now on only tokens of this version are comparable.

        Args:
            version: of the new parameters.
            updates: by how many updates of the optimizer they have changed; 0: not at all, the step was skipped.
        """
        if not updates:
            return
        undone = ComparedVersions(since=self._versions.since, before=version)
        self._versions_before = undone if updates == 1 else None
        self._versions = ComparedVersions(since=version)

    def check(self, groups: Sequence[Group], step: int) -> AgreementCheck:
        """Return the check for the learner's update of a step; call it on the engines' event loop."""
        loop = asyncio.get_running_loop()
        return AgreementCheck(
            since=self._versions.since, inspect=lambda comparison: self._inspect(comparison, groups, step, loop)
        )

    def take_metrics(self) -> dict[str, float]:
        """Return and reset the metrics of the latest comparison."""
        latest, self._latest = self._latest, NOTHING
        age, self._latest_age = self._latest_age, 0
        return {
            "compared_tokens": float(latest.tokens),
            "compared_age": float(age),
            "compared_gap_mean": latest.mean,
            "compared_gap_max": latest.largest,
        }

    @property
    def tolerance(self) -> Tolerance:
        """The tolerance between this run's engines and learner."""
        engines = [server.backend for server in self._runtime.client.servers]
        return run_tolerance(self._runtime.config, [engine.capabilities.precision for engine in engines])

    # --- in the learner's thread ------------------------------------------------------------------------------

    def _inspect(
        self, comparison: Comparison, groups: Sequence[Group], step: int, loop: asyncio.AbstractEventLoop
    ) -> None:
        """Raise DisagreementError at a breach, if ``trainer.on_disagreement`` says so."""
        versions = self._versions
        if not comparison.tokens and self._versions_before is not None:
            versions = self._versions_before
            comparison = self._compare_before(groups, versions)
            self._latest_age = 1 if comparison.tokens else 0
        allowed, self._latest = self.tolerance, comparison
        agreed, self._agreed = self._agreed, allowed.holds(comparison)
        if self._agreed:
            return
        stops = self._runtime.config.trainer.on_disagreement == "stop"
        breach = breach_line(comparison, allowed, versions.since)
        self._print_line(f"  step {step}: {breach}")
        line = "the diagnosis is that of the step before"
        if agreed or stops:
            found = self._diagnosed(groups, versions, step, allowed, loop)
            line = f"run `jax-agent-rl diagnose {self._folder.path}`" if found is None else found.line
            for text in found.lines() if found is not None else [f"=> {line}"]:
                self._print_line(f"  {text}")
        if stops:
            raise DisagreementError(
                f"{breach}\n=> {line}\n"
                f"Nothing was learned from this step; {self._folder.disagreement} has the evidence. "
                "Go on with --resume once it is corrected, or with trainer.on_disagreement=warn as it is"
            )

    def _compare_before(self, groups: Sequence[Group], versions: ComparedVersions) -> Comparison:
        """Compare a few trajectories of the version before with the parameters before the last update."""
        learner = self._runtime.learner
        if not isinstance(learner, Learner):
            return NOTHING
        some = trajectories_with(groups, versions)[:MAX_OLDER]
        trained = learner.trained_before() if some else None
        if trained is None:
            return NOTHING
        compiled = learner.programs_compiled
        try:
            logprobs = learner.logprobs([Group(group_id=t.group_id, trajectories=(t,)) for t in some], trained=trained)
        except Exception as error:  # e.g. out of memory: the step goes on, and is counted as not compared
            logger.exception("tokens of the version before could not be scored")
            self._print_line(f"  tokens of the version before are not compared: {type(error).__name__}: {error}")
            self._versions_before = None
            return NOTHING
        finally:
            self.programs += learner.programs_compiled - compiled
        rollout = []
        for trajectory in some:
            parts = [
                np.asarray(s.rollout_logprobs, np.float64)[np.flatnonzero(s.loss_mask)] for s in trajectory.sequences
            ]
            rollout.append(np.concatenate(parts))
        return compare(logprobs, rollout, [comparable(t, versions.since, versions.before) for t in some])

    def _diagnosed(
        self,
        groups: Sequence[Group],
        versions: ComparedVersions,
        step: int,
        allowed: Tolerance,
        loop: asyncio.AbstractEventLoop,
    ) -> Diagnosis | None:
        """Diagnose and record a breach; return None where the learner's parameters span processes."""
        learner = self._runtime.learner
        found = None
        engine = self._view(loop)
        contexts = collect_contexts(groups, versions.since, before=versions.before)
        if isinstance(learner, Learner) and contexts:
            is_before = versions.before is not None

            def packed() -> Sequence[Context]:
                compiled = learner.programs_compiled
                logprobs = learner.logprobs(groups, trained=learner.trained_before() if is_before else None)
                self.programs += learner.programs_compiled - compiled
                return collect_contexts(groups, versions.since, logprobs, before=versions.before)

            try:
                subject = make_subject(
                    learner,
                    self._runtime.config,
                    contexts,
                    version=versions.since,
                    packed=packed,
                    is_before=is_before,
                )
                found = diagnose(subject, tolerance=allowed, engine=engine)
                contexts = list(found.contexts)
            except Exception as error:  # e.g. out of memory: the breach is handled all the same
                logger.exception("the diagnosis failed")
                self._print_line(f"  the diagnosis failed: {type(error).__name__}: {error}")
        evidence = Evidence(
            version=versions.since,
            step=step,
            contexts=contexts[:MAX_CONTEXTS],
            tolerance=allowed,
            precision=engine.precision,
            tensors=engine.tensors,
            replicas=engine.replicas,
            diagnosis=None if found is None else found.to_json(),
        )
        self._folder.write_json(self._folder.disagreement, evidence.to_json())
        return found

    def _view(self, loop: asyncio.AbstractEventLoop) -> EngineView:
        """Inspect the engines that allow it: the tensors of all, the layers of the first."""
        config = self._runtime.config
        engines = [server.backend for server in self._runtime.client.servers]
        precision = engines[0].capabilities.precision if engines else "float32"
        # Weights of a vLLM engine that sleeps are nowhere that could be read.
        hidden = config.rollout.backend == "vllm" and config.rollout.sleep_during_update
        inspectable = [engine for engine in engines if isinstance(engine, Inspectable) and not hidden]
        if not inspectable:
            return EngineView(precision=precision)

        def wait(answer: Coroutine[Any, Any, T]) -> T:
            return asyncio.run_coroutine_threadsafe(answer, loop).result(INSPECTION_SECONDS)

        try:
            samples = []
            for engine in inspectable:
                samples += [wait(engine.tensor_samples()), *wait(engine.replica_samples())]
        except (BackendError, TimeoutError) as error:
            self._print_line(f"  the engine cannot be looked into: {error}")
            return EngineView(precision=precision)
        first, *others = samples
        return EngineView(
            precision=precision,
            tensors=first,
            replicas=[sample for sample in others if sample],
            layers=lambda ids: wait(inspectable[0].layer_outputs(ids)),
        )


def trajectories_with(groups: Sequence[Group], versions: ComparedVersions) -> list[Trajectory]:
    """Return the trajectories with tokens to compare, one of each group first."""
    found: list[list[Trajectory]] = []
    for group in groups:
        members = [t for t in group.trajectories if comparable(t, versions.since, versions.before).any()]
        found.append(members)
    turns = itertools.zip_longest(*found)
    return [trajectory for turn in turns for trajectory in turn if trajectory is not None]
