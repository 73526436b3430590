"""One process of a multi-host learner, for ``test_multihost``: its job is a JSON object in
``argv[1]``.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np

from jax_agent_rl.config import AlgorithmConfig, LearnerConfig
from jax_agent_rl.learner.cancellation import StepCancellation, StepCancelled
from jax_agent_rl.learner.learner import Learner
from jax_agent_rl.models import stored
from jax_agent_rl.models.config import Experts
from jax_agent_rl.runtime.build import open_checkpointer
from jax_agent_rl.runtime.multihost import LeadingLearner, follow, initialize, leading
from jax_agent_rl.types import Group
from tests.tiny import TINY, tiny_params
from tests.trajectories import random_groups

MODEL = replace(
    TINY,
    vocab_size=96,
    num_layers=2,
    experts=Experts(count=4, per_token=2, intermediate_size=16, normalize=True),
)
ALGORITHM = {"adv_estimator": "gae", "entropy_coeff": 0.01, "kl": {"where": "loss", "coef": 0.1}}


def lead(local_learner: Learner, job: dict) -> None:
    """Restores, trains, saves, and writes down what came out."""
    with leading() as channel:
        learner = local_learner if channel is None else LeadingLearner(local_learner, channel)
        folder = Path(job["checkpoints"])
        checkpointer = open_checkpointer(folder, keep=5, channel=channel)
        begin = 0
        if job["restore"]:
            begin, learner.state, _ = checkpointer.restore(learner.state)
        metrics = {}
        for step in range(begin, job["steps"]):
            if channel is not None and step:
                give_up(learner, random_groups(step, vocabulary=96), midway=False)
                give_up(learner, random_groups(step, vocabulary=96), midway=True)
            result = learner.update(random_groups(step, vocabulary=96), masked={"g0-1"})
            metrics = result.metrics
            checkpointer.save(step + 1, learner.state, {"step": step + 1})
        checkpointer.close()
        Path(job["out"]).with_suffix(".share").write_text(
            str(share_read_back(learner, local_learner, job))
        )
        params = [
            np.asarray(x) for x in jax.tree.leaves((learner.params, learner.averaged().params))
        ]
    np.savez(job["out"], *params)
    names = ("loss", "grad_norm", "entropy", "critic_loss", "trained_tokens")
    print(json.dumps({"begin": begin, **{name: metrics[name] for name in names}}))


def share_read_back(learner: Learner | LeadingLearner, initial: Learner, job: dict) -> float:
    """Return the share of stored parameters that this process reads; check every value."""
    folder = stored.version_folder(job["out"] + ".stored", 1)
    if isinstance(learner, LeadingLearner):
        digest = learner.store(folder, "float32")
    else:
        digest = stored.store(folder, learner.params)
    reader = stored.StoredParams(folder, manifest_digest=digest)
    shardings = jax.tree.map(lambda x: x.sharding, initial.params)
    params = reader.read(MODEL.parameter_shapes(), dtype=np.dtype(np.float32), shardings=shardings)
    for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(initial.params), strict=True):
        for ours, theirs in zip(a.addressable_shards, b.addressable_shards, strict=True):
            np.testing.assert_array_equal(ours.data, theirs.data)
    return reader.bytes_read / sum(x.nbytes for x in jax.tree.leaves(initial.params))


def give_up(learner: Learner | LeadingLearner, groups: list[Group], *, midway: bool) -> None:
    """A step that process 0 cancels before its first update or after it: unless all undo it, what
    follows comes out different or never ends.
    """
    cancellation = StepCancellation()

    def tick(finished: int, total: int) -> None:
        if cancellation.has_begun:
            assert cancellation.cancel(), "the critic's update cannot be undone"

    if not midway:
        cancellation.cancel()
    try:
        learner.update(groups, cancellation=cancellation, tick=tick)
    except StepCancelled:
        assert cancellation.has_begun == midway
        return
    raise SystemExit("a cancelled step went on")


def main() -> None:
    job = json.loads(sys.argv[1])
    sections = {name: job[name] for name in ("mesh", "multihost", "lora")}
    config = LearnerConfig(learning_rate=1e-3, pack_length=32, ema_decay=0.5, **sections)
    number = initialize(config.multihost)
    params = tiny_params(config=MODEL)
    learner = Learner(
        MODEL, params, algorithm=AlgorithmConfig(**ALGORITHM), config=config, temperature=1.0
    )
    if number:
        follow(learner, None)
    else:
        lead(learner, job)


if __name__ == "__main__":
    main()
