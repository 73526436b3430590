"""``jax-agent-rl diagnose``: engine against learner, in the contexts that a run has recorded."""

from __future__ import annotations

from collections.abc import Collection, Container, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from jax_agent_rl.agreement.diagnosis import EngineView, explain
from jax_agent_rl.agreement.report import Diagnosis, Evidence, Tolerance, run_tolerance
from jax_agent_rl.agreement.search import SECONDS, TimeLimit, examine
from jax_agent_rl.agreement.subject import MAX_CONTEXTS, Context, make_subject, sequence_context
from jax_agent_rl.config import Config
from jax_agent_rl.config.learner import MeshConfig
from jax_agent_rl.errors import CheckpointError, ConfigError
from jax_agent_rl.learner.checkpoint import Checkpointer, read_notes
from jax_agent_rl.learner.checkpoint_steps import complete_steps
from jax_agent_rl.learner.comparison import Comparison
from jax_agent_rl.learner.learner import Learner
from jax_agent_rl.models.hf import load_config
from jax_agent_rl.observe.run_dir import (
    Record,
    has_media,
    read_trajectories,
    restore_trajectory,
)
from jax_agent_rl.runtime.build import make_learner
from jax_agent_rl.runtime.policy import saved_run
from jax_agent_rl.runtime.policy_choice import run_config
from jax_agent_rl.trainer.record import RunRecord


@dataclass(frozen=True, kw_only=True)
class RunDiagnosis:
    """The result of ``jax-agent-rl diagnose``.

    Attributes:
        source: origin of the contexts.
        version: version of the weights.
        contexts: number of compared contexts.
        comparison: engine against learner in them.
        allowed: tolerance by the precision of both.
        diagnosis: None if they agree.
        then: the diagnosis during the run, as JSON; None if the run found no breach.
    """

    source: str
    version: int
    contexts: int
    comparison: Comparison
    allowed: Tolerance
    diagnosis: Diagnosis | None
    then: Mapping[str, Any] | None = None


def diagnose_run(
    run: Path, *, version: int | None = None, seconds: float = SECONDS
) -> RunDiagnosis:
    """Repeat the diagnosis of a recorded breach, or compare a run's recorded trajectories.

    Args:
        version: version of the weights whose trajectories are compared; None: that of the breach,
            or the newest with a checkpoint.
        seconds: after which no other hypothesis is tried.

    Raises:
        CheckpointError: not a run folder, or no version has both trajectories and parameters.
        ConfigError: the run trained several adapters.
    """
    config = run_config(run)
    adapters = sorted(set(config.agent.role_adapters.values()))
    if adapters:
        raise ConfigError(
            f"{run} trained the adapters {adapters}; diagnose compares runs of one policy"
        )

    steps = saved_versions(run)
    evidence = Evidence.read(run) if version is None else None
    if evidence is not None:
        source = "the breach that the run recorded"
        contexts = list(evidence.contexts)
        version = evidence.version
        if version not in steps:
            raise CheckpointError(
                f"{run} has no checkpoint of version {version}, which the breach is about"
            )
    else:
        version, contexts = _recorded_contexts(run, config, steps.keys(), version)
        source = f"its trajectories of version {version}"

    step = steps[version]
    if step:
        saved = saved_run(run, step)
        saved.require_base()
        config = saved.config
    learner = _learner_at(config, config.trainer.checkpoint_dir or run / "checkpoints", step)
    subject = make_subject(learner, config, contexts, version=version)

    engine = None
    if evidence is None:
        allowed = run_tolerance(config, [_precision(config)])
    else:
        allowed = evidence.tolerance
        engine = EngineView(
            precision=evidence.precision, tensors=evidence.tensors, replicas=evidence.replicas
        )
    limit = TimeLimit(seconds)
    examined = examine(subject, allowed, limit)

    # What the run itself computed counts; without it, what was computed just now.
    differences = []
    for context in contexts:
        if context.learner is not None:
            differences.append(context.learner - context.rollout)
    comparison = examined.gap_of_all
    if differences:
        comparison = Comparison.of(np.concatenate(differences))

    agrees = evidence is None and allowed.holds(comparison) and allowed.holds(examined.gap_of_all)
    diagnosis = None
    if not agrees:
        diagnosis = explain(subject, examined, tolerance=allowed, engine=engine, limit=limit)

    return RunDiagnosis(
        source=source,
        version=version,
        contexts=len(contexts),
        comparison=comparison,
        allowed=allowed,
        diagnosis=diagnosis,
        then=None if evidence is None else evidence.diagnosis,
    )


def saved_versions(run: Path) -> dict[int, int]:
    """Return the step of each policy version whose parameters are saved; version 0 always is.

    Evaluations of an average take versions as well, so a version may be larger than its step.
    """
    config = run_config(run)
    checkpoints = config.trainer.checkpoint_dir or run / "checkpoints"
    steps = {0: 0}
    for step in complete_steps(checkpoints):
        record = RunRecord.from_json(read_notes(checkpoints, step).progress)
        steps |= dict.fromkeys(record.policy_versions(config), step)
    return steps


def _learner_at(config: Config, checkpoints: Path | str, step: int) -> Learner:
    """Return the run's learner on one device, with the parameters and optimizer after a step."""
    on_one_device = config.learner.model_copy(update={"mesh": MeshConfig.model_validate({})})
    # Without teachers, which nothing asks here.
    config = config.model_copy(update={"learner": on_one_device, "distill": None})
    learner = make_learner(config, load_config(config.model.path, weights=True))
    assert isinstance(learner, Learner)
    if step:
        checkpointer = Checkpointer(
            checkpoints, keep=config.trainer.keep_checkpoints, read_only=True
        )
        try:
            _, learner.state, _ = checkpointer.restore(learner.state, step=step)
        finally:
            checkpointer.close()
    return learner


def _precision(config: Config) -> str:
    """Return the engine's precision according to the configuration."""
    if config.rollout.backend == "sglang":
        return config.rollout.sglang.dtype
    if config.rollout.backend != "jetstream":
        return config.rollout.vllm.dtype
    engine = config.rollout.jetstream
    if engine.quantize != "none":
        return engine.quantize
    if engine.kv_dtype != "auto":
        return engine.kv_dtype
    return engine.dtype


def _recorded_contexts(
    run: Path, config: Config, saved: Collection[int], version: int | None
) -> tuple[int, list[Context]]:
    """Return a version and the contexts that the run recorded of it.

    Args:
        saved: versions whose parameters are saved.
        version: None: the newest saved one that has trajectories.

    Raises:
        CheckpointError: no version has both trajectories and parameters, or not this one.
    """
    contexts = _folder_contexts(run, versions=saved, frozen=config.agent.role_models.keys())
    comparable = [number for number in sorted(saved) if contexts.get(number)]
    if version is None and comparable:
        version = comparable[-1]
    if version is None or version not in comparable:
        raise CheckpointError(
            f"{run} has trajectories of versions {sorted(contexts)} and parameters of versions"
            f" {sorted(saved)}: there is nothing to compare; set trainer.checkpoint_every=1 and"
            " run again"
        )
    return version, contexts[version]


def _folder_contexts(
    run: Path, *, versions: Container[int], frozen: Container[str] = ()
) -> dict[int, list[Context]]:
    """Return the first contexts without media in ``trajectories.jsonl``, by version.

    There are at most :data:`MAX_CONTEXTS` of each.

    Args:
        versions: other versions have an entry without contexts if there are trajectories of them.
        frozen: names of roles that other models play; left out.
    """
    contexts: dict[int, list[Context]] = {}
    for record in read_trajectories(run / "trajectories.jsonl"):
        if record["split"] != "train" or record["history_window"] is not None:
            continue
        if record["role"] in frozen:
            continue
        for part in (record, *record["segments"]):
            for version, context in record_contexts(part):
                of_version = contexts.setdefault(version, [])
                if version in versions and len(of_version) < MAX_CONTEXTS:
                    of_version.append(context)
    return contexts


def record_contexts(record: Record) -> Iterator[tuple[int, Context]]:
    """Yield a context for each version that sampled tokens of a record."""
    if has_media(record):
        return

    sequence = replace(restore_trajectory(record), segments=())
    learner = record.get("old_logprobs")
    if learner is not None:
        learner = np.asarray(learner, np.float64)[np.flatnonzero(sequence.loss_mask)]

    versions: set[int] = set()
    for turn in sequence.turns:
        versions.update(turn.output.policy_versions)
    for version in sorted(versions):
        context = sequence_context(sequence, since=version, before=version + 1, learner=learner)
        if context is not None:
            yield version, context
