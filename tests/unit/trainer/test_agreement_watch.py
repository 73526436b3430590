"""What a trainer does when engine and learner disagree, on a learner that says so."""

import json
from pathlib import Path

from jax_agent_rl.errors import DisagreementError
from jax_agent_rl.learner.comparison import Comparison
from jax_agent_rl.learner.metrics import UpdateResult
from tests.fake_training import IdleLearner, finish, make_trainer, steps_of
from tests.messages import raises

CLOSE = Comparison(tokens=8, mean=1e-6, largest=1e-5)
FAR = Comparison(tokens=8, mean=0.2, largest=1.5)


class Compares(IdleLearner):
    """Finds what it is told to, step by step; it learns in every step but those named."""

    def __init__(self, *comparisons: Comparison, idle: tuple[int, ...] = ()):
        super().__init__()
        self.found = comparisons
        self.idle = idle
        self.since = []
        self.finished = 0

    def update(self, groups, *, masked, tick, cancellation, check):
        self.since.append(check.since)
        check.inspect(self.found[len(self.since) - 1])
        self.finished += 1
        metrics = {} if len(self.since) in self.idle else {"loss": 0.0}
        return UpdateResult(metrics=metrics, skipped=False)


def evidence(folder: Path) -> dict:
    return json.loads((folder / "disagreement.json").read_text())


async def test_a_breach_stops_the_run_and_leaves_its_evidence(
    tmp_path: Path,
):
    learner = Compares(CLOSE, FAR)
    training = make_trainer(tmp_path, steps=3, learner=learner)
    with raises(DisagreementError, key="version 1", value=("8 tokens", "2.0e-01 nats")) as caught:
        await finish(training)
    assert "trainer.on_disagreement=warn" in str(caught.value)
    assert "disagreement.json" in str(caught.value)
    assert learner.finished == 1
    assert [step["step"] for step in steps_of(tmp_path)] == [1]
    report = evidence(tmp_path)
    assert report["step"] == 2
    assert report["version"] == 1
    assert report["diagnosis"] is None
    assert report["contexts"] and report["contexts"][0]["rollout"]


async def test_with_warn_the_run_goes_on_and_every_step_says_what_was_compared(tmp_path: Path):
    training = make_trainer(
        tmp_path, steps=3, learner=Compares(FAR, FAR, CLOSE), trainer={"on_disagreement": "warn"}
    )
    await finish(training)
    steps = steps_of(tmp_path)
    assert [step["compared_gap_max"] for step in steps] == [1.5, 1.5, 1e-5]
    assert [step["compared_tokens"] for step in steps] == [8.0] * 3
    assert evidence(tmp_path)["step"] == 1, "the second breach is of the same cause"


async def test_a_breach_after_a_step_without_one_is_diagnosed_again(tmp_path: Path):
    learner = Compares(FAR, CLOSE, FAR)
    await finish(
        make_trainer(tmp_path, steps=3, learner=learner, trainer={"on_disagreement": "warn"})
    )
    assert evidence(tmp_path)["step"] == 3


async def test_versions_that_nothing_was_learnt_in_are_of_the_same_weights(tmp_path: Path):
    learner = Compares(CLOSE, CLOSE, CLOSE, CLOSE, idle=(1, 3))
    await finish(make_trainer(tmp_path, steps=4, learner=learner))
    assert learner.since == [0, 0, 2, 2]


async def test_a_tolerance_of_ones_own_holds(tmp_path: Path):
    settings = {"agreement_tolerance": [2.0, 0.5]}
    await finish(make_trainer(tmp_path, steps=1, learner=Compares(FAR), trainer=settings))
    assert not (tmp_path / "disagreement.json").exists()
