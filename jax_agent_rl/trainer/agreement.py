"""Engine and learner compared in every step, before anything is learned; a disagreement is diagnosed.

::

    learner scores the step ─► Comparison ─► within the tolerance: go on
                                        └──► a breach: diagnosis, disagreement.json ─► stop, or warn and go on

The comparison is of numbers that the step computes anyway. Nothing of a diagnosis is compiled before there is
something to diagnose, and its programs count as none of the run's.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

from jax_agent_rl.agreement.diagnosis import EngineView, diagnose
from jax_agent_rl.agreement.report import Diagnosis, Evidence, Tolerance, breach_line, run_tolerance
from jax_agent_rl.agreement.subject import MAX_CONTEXTS, collect_contexts, make_subject
from jax_agent_rl.errors import BackendError, DisagreementError
from jax_agent_rl.learner.learner import Learner
from jax_agent_rl.learner.metrics import AgreementCheck, Comparison
from jax_agent_rl.models.tensors import Inspectable
from jax_agent_rl.observe.run_dir import RunDir
from jax_agent_rl.trainer import RunComponents
from jax_agent_rl.types import Group

T = TypeVar("T")
logger = logging.getLogger(__name__)
NOTHING = Comparison(tokens=0, mean=0.0, largest=0.0)
INSPECTION_SECONDS = 120.0  # an engine that does not answer in time is not inspected


class AgreementWatch:
    """Compares engine and learner in every step, and diagnoses a breach.

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
        self._since = version
        self._agreed = True
        self._latest = NOTHING
        self.programs = 0
        """Compiled for diagnoses; they are none of the run's."""

    def learned(self, version: int) -> None:
        """Record that the parameters have changed: from now on only tokens of this version are comparable."""
        self._since = version

    def check(self, groups: Sequence[Group], step: int) -> AgreementCheck:
        """Return the check for the learner's update of a step; call it on the engines' event loop."""
        loop = asyncio.get_running_loop()
        return AgreementCheck(
            since=self._since, inspect=lambda comparison: self._inspect(comparison, groups, step, loop)
        )

    def take_metrics(self) -> dict[str, float]:
        """Return and reset the metrics of the latest comparison."""
        latest, self._latest = self._latest, NOTHING
        return {
            "compared_tokens": float(latest.tokens),
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
        allowed, self._latest = self.tolerance, comparison
        agreed, self._agreed = self._agreed, allowed.holds(comparison)
        if self._agreed:
            return
        stops = self._runtime.config.trainer.on_disagreement == "stop"
        breach = breach_line(comparison, allowed, self._since)
        self._print_line(f"  step {step}: {breach}")
        line = "the diagnosis is that of the step before"
        if agreed or stops:
            found = self._diagnosed(groups, step, allowed, loop)
            line = f"run `jax-agent-rl diagnose {self._folder.path}`" if found is None else found.line
            for text in found.lines() if found is not None else [f"=> {line}"]:
                self._print_line(f"  {text}")
        if stops:
            raise DisagreementError(
                f"{breach}\n=> {line}\n"
                f"Nothing was learned from this step; {self._folder.disagreement} has the evidence. "
                "Go on with --resume once it is corrected, or with trainer.on_disagreement=warn as it is"
            )

    def _diagnosed(
        self, groups: Sequence[Group], step: int, allowed: Tolerance, loop: asyncio.AbstractEventLoop
    ) -> Diagnosis | None:
        """Diagnose and record a breach; return None where the learner's parameters span processes."""
        learner, found = self._runtime.learner, None
        engine = self._view(loop)
        contexts = collect_contexts(groups, self._since)
        if isinstance(learner, Learner) and contexts:
            compiled = learner.programs_compiled
            contexts = collect_contexts(groups, self._since, learner.logprobs(groups))
            self.programs += learner.programs_compiled - compiled
            subject = make_subject(learner, self._runtime.config, contexts, version=self._since)
            try:
                found = diagnose(subject, tolerance=allowed, engine=engine)
                contexts = found.contexts
            except Exception as error:  # e.g. out of memory: the breach is handled all the same
                logger.exception("the diagnosis failed")
                self._print_line(f"  the diagnosis failed: {type(error).__name__}: {error}")
        evidence = Evidence(
            version=self._since,
            step=step,
            contexts=contexts[:MAX_CONTEXTS],
            tolerance=allowed,
            precision=engine.precision,
            tensors=engine.tensors,
            diagnosis=None if found is None else found.to_json(),
        )
        self._folder.write_json(self._folder.disagreement, evidence.to_json())
        return found

    def _view(self, loop: asyncio.AbstractEventLoop) -> EngineView:
        """Inspect the first engine that allows it."""
        config = self._runtime.config
        engines = [server.backend for server in self._runtime.client.servers]
        precision = engines[0].capabilities.precision if engines else "float32"
        # Weights of a vLLM engine that sleeps are nowhere that could be read.
        hidden = config.rollout.backend == "vllm" and config.rollout.sleep_during_update
        looked = next((engine for engine in engines if isinstance(engine, Inspectable) and not hidden), None)
        if looked is None:
            return EngineView(precision=precision)

        def wait(answer: Coroutine[Any, Any, T]) -> T:
            return asyncio.run_coroutine_threadsafe(answer, loop).result(INSPECTION_SECONDS)

        try:
            tensors = wait(looked.tensor_samples())
        except (BackendError, TimeoutError) as error:
            self._print_line(f"  the engine cannot be looked into: {error}")
            return EngineView(precision=precision)
        return EngineView(precision=precision, tensors=tensors, layers=lambda ids: wait(looked.layer_outputs(ids)))
