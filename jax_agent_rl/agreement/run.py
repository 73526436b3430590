"""What a diagnosis of a run needs of it: its learner as a subject, and the tolerance of its precisions."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax

from jax_agent_rl.agreement.contexts import Context
from jax_agent_rl.agreement.subject import DiagnosisSubject
from jax_agent_rl.agreement.tolerances import Tolerance, tolerance
from jax_agent_rl.config import Config
from jax_agent_rl.learner.learner import Learner
from jax_agent_rl.models.config import Params
from jax_agent_rl.models.hf import load_hf

MOST_CONTEXTS = 64
"""That are kept of a breach, or compared of a run folder."""


def make_subject(learner: Learner, config: Config, contexts: Sequence[Context], *, version: int) -> DiagnosisSubject:
    """Contexts and a learner whose parameters are of ``version``, with those of versions before it."""
    params = learner.params
    older: dict[str, Callable[[], Params]] = {}
    if (before := learner.params_before()) is not None:
        older["the version before (the last optimizer update undone)"] = lambda: before
    if version:
        older["version 0 (the model's files)"] = lambda: _of_files(config, params)
    return DiagnosisSubject(
        model=learner.model,
        params=params,
        dtype=config.learner.compute_dtype,
        temperature=config.rollout.temperature,
        contexts=contexts,
        older=older,
    )


def run_tolerance(config: Config, precisions: Sequence[str]) -> Tolerance:
    """What a run allows.

    Args:
        precisions: of its engines.
    """
    if (own := config.trainer.agreement_tolerance) is not None:
        return Tolerance(token=own[0], mean=own[1])
    jax_engine = config.rollout.backend == "jetstream" and config.rollout.jetstream.engine_factory is None
    both = [*precisions, config.learner.compute_dtype]
    return tolerance(both, jax_engine=jax_engine, platform=jax.default_backend())


def _of_files(config: Config, like: Params) -> Params:
    """The model's files, laid out like other parameters."""
    return load_hf(config.model.path, shardings=jax.tree.map(lambda x: x.sharding, like))[1]
