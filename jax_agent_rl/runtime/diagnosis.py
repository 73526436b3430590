"""``jax-agent-rl diagnose``: engine and learner compared in the contexts that a run has recorded."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
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
from jax_agent_rl.learner.learner import Learner
from jax_agent_rl.learner.metrics import Comparison
from jax_agent_rl.models.hf import load_config
from jax_agent_rl.observe.run_dir import Record, read_trajectories, restore_trajectory
from jax_agent_rl.runtime.build import make_learner
from jax_agent_rl.runtime.choice import run_config
from jax_agent_rl.runtime.policy import saved_run
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
        run: the run folder.
        version: version of the weights whose trajectories are compared; None: that of the breach,
            or the newest with a checkpoint.
        seconds: after which no other hypothesis is tried.

    Raises:
        CheckpointError: not a run folder, or no version has both trajectories and parameters.
        ConfigError: the run trained several adapters.
    """
    config = run_config(run)
    if names := sorted(set(config.agent.role_adapters.values())):
        raise ConfigError(
            f"{run} trained the adapters {names}; diagnose compares runs of one policy"
        )
    steps = saved_versions(run)
    evidence = Evidence.read(run) if version is None else None
    if evidence is not None:
        source, contexts, version = (
            "the breach that the run recorded",
            list(evidence.contexts),
            evidence.version,
        )
        if version not in steps:
            raise CheckpointError(
                f"{run} has no checkpoint of version {version}, which the breach is about"
            )
    else:
        kept = _folder_contexts(run, versions=steps.keys(), frozen=config.agent.role_models.keys())
        known = [one for one in sorted(steps) if kept.get(one)]
        if version is None and known:
            version = known[-1]
        if version is None or version not in known:
            raise CheckpointError(
                f"{run} has trajectories of versions {sorted(kept)} and parameters of versions"
                f" {sorted(steps)}: there is nothing to compare; set trainer.checkpoint_every=1 and"
                " run again"
            )
        source, contexts = f"its trajectories of version {version}", kept[version]
    step = steps[version]
    if step:
        saved = saved_run(run, step)
        saved.require_base()
        config = saved.config
    learner = _learner_at(config, config.trainer.checkpoint_dir or run / "checkpoints", step)
    subject = make_subject(learner, config, contexts, version=version)
    allowed = (
        run_tolerance(config, [_precision(config)]) if evidence is None else evidence.tolerance
    )
    engine = None
    if evidence is not None:
        engine = EngineView(
            precision=evidence.precision, tensors=evidence.tensors, replicas=evidence.replicas
        )
    limit = TimeLimit(seconds)
    examined = examine(subject, allowed, limit)
    measured = [c.learner - c.rollout for c in contexts if c.learner is not None]
    comparison = Comparison.of(np.concatenate(measured)) if measured else examined.gap_of_all
    broken = (
        evidence is not None
        or not allowed.holds(comparison)
        or not allowed.holds(examined.gap_of_all)
    )
    return RunDiagnosis(
        source=source,
        version=version,
        contexts=len(contexts),
        comparison=comparison,
        allowed=allowed,
        diagnosis=(
            explain(subject, examined, tolerance=allowed, engine=engine, limit=limit)
            if broken
            else None
        ),
        then=None if evidence is None else evidence.diagnosis,
    )


def saved_versions(run: Path) -> dict[int, int]:
    """Return the step of each policy version whose parameters are there: 0, and those of checkpoints.

    Evaluations of an average take versions, too, so a version may be larger than the step it is of.
    """
    config = run_config(run)
    place = config.trainer.checkpoint_dir or run / "checkpoints"
    steps = {0: 0}
    for step in complete_steps(place):
        record = RunRecord.from_json(read_notes(place, step).progress)
        steps |= dict.fromkeys(record.policy_versions(config), step)
    return steps


def _learner_at(config: Config, place: Path | str, step: int) -> Learner:
    """Return the run's learner on one device, with the parameters and optimizer after a step."""
    alone = config.learner.model_copy(update={"mesh": MeshConfig.model_validate({})})
    config = config.model_copy(update={"learner": alone, "distill": None})  # teachers are not asked
    learner = make_learner(config, load_config(config.model.path, weights=True))
    assert isinstance(learner, Learner)
    if step:
        checkpointer = Checkpointer(place, keep=config.trainer.keep_checkpoints)
        try:
            _, learner.state, _ = checkpointer.restore(learner.state, step=step)
        finally:
            checkpointer.close()
    return learner


def _precision(config: Config) -> str:
    """Return the engine's precision according to the configuration."""
    engine = config.rollout.jetstream
    if config.rollout.backend != "jetstream":
        return config.rollout.vllm.dtype
    eight_bits = [
        dtype for dtype in (engine.quantize, engine.kv_dtype) if dtype not in ("none", "auto")
    ]
    return eight_bits[0] if eight_bits else engine.dtype


def _folder_contexts(
    run: Path, *, versions: Container[int], frozen: Container[str] = ()
) -> dict[int, list[Context]]:
    """Return the first :data:`MAX_CONTEXTS` contexts without media in ``trajectories.jsonl``, by version.

    Log-probs have six digits there. Those of ``frozen`` roles were sampled by other models.

    Args:
        run: the run folder.
        versions: of the other versions no context is returned, only that there are some.
        frozen: names of roles.
    """
    found: dict[int, list[Context]] = {}
    for record in read_trajectories(run / "trajectories.jsonl"):
        if (
            record["split"] == "train"
            and record["history_window"] is None
            and record["role"] not in frozen
        ):
            for part in (record, *record["segments"]):
                for version, context in record_contexts(part):
                    contexts = found.setdefault(version, [])
                    if version in versions and len(contexts) < MAX_CONTEXTS:
                        contexts.append(context)
    return found


def record_contexts(record: Record) -> Iterator[tuple[int, Context]]:
    """Yield a context for each version that sampled tokens of a record."""
    media = sum(record["prompt_media"].values()) + sum(
        count
        for turn in record["turns"]
        for call in turn["tool_calls"]
        for count in call.get("media", {}).values()
    )
    if media:
        return
    sequence = replace(restore_trajectory(record), segments=())
    known = record.get("old_logprobs")
    learner = (
        None if known is None else np.asarray(known, np.float64)[np.flatnonzero(sequence.loss_mask)]
    )
    for version in sorted(
        {version for turn in sequence.turns for version in turn.output.policy_versions}
    ):
        context = sequence_context(sequence, since=version, before=version + 1, learner=learner)
        if context is not None:
            yield version, context
