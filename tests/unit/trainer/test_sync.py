"""The synchronous trainer on a scripted engine and a learner that learns nothing."""

import io
from dataclasses import replace
from pathlib import Path

import pytest

from jax_agent_rl.errors import EngineDiedError, StorageError
from jax_agent_rl.observe.run_dir import read_records
from jax_agent_rl.trainer.base import Trainer
from jax_agent_rl.trainer.record import RunRecord
from jax_agent_rl.types import DropReason, FinishReason
from tests.fake_training import IdleLearner, Notes, make_trainer, parity
from tests.messages import raises
from tests.trajectories import trajectories_of


async def test_every_step_records_the_seconds_of_its_own_weight_update(tmp_path: Path):
    training = make_trainer(tmp_path, steps=3)
    await training.run()
    steps = [r for r in read_records(tmp_path / "metrics.jsonl") if r["kind"] == "step"]
    assert [round(r["weight_update_seconds"], 3) for r in steps] == [1.0, 2.0, 3.0]
    training.runtime.collector.accounting.check()


async def test_a_run_without_an_engine_stops_and_says_why(tmp_path: Path):
    training = make_trainer(tmp_path, steps=3)
    (server,) = training.runtime.client.pool.servers
    await training.train_step()
    server.backend.die()
    with raises(EngineDiedError, key=("no rollout engine", "server-0")):
        await training.run()
    assert training.record.step == 1
    for collector in (training.runtime.collector, training.runtime.evaluator):
        collector.accounting.check()
    assert training.runtime.evaluator.accounting.dropped == {DropReason.BACKEND_ERROR: 1}


async def test_engines_are_paused_before_weights_are_made_in_their_memory(tmp_path: Path):
    training = make_trainer(tmp_path, steps=2)
    (server,) = training.runtime.client.pool.servers
    transport = training.runtime.transport
    transport.takes_engines_memory = True
    offer = transport.offer
    paused = []

    def offer_and_note(learner, version):
        paused.append(server.updating)
        return offer(learner, version)

    transport.offer = offer_and_note
    await training.run()
    assert paused == [True, True]
    assert not server.updating
    assert server.backend.policy_version == 2


class Averaging(IdleLearner):
    """Its parameters say what they are."""

    params = "current"

    def averaged(self):
        averaged = IdleLearner()
        averaged.params = "average"
        return averaged


async def test_evaluations_sample_from_the_average_and_training_does_not(
    tmp_path: Path,
):
    """Before training nothing was averaged yet. Every set of weights has a version of its own,
    higher than before.
    """
    training = make_trainer(
        tmp_path,
        steps=3,
        learner=Averaging(),
        ema_decay=0.9,
        trainer={"eval_every": 2},
        checkpointer=Notes(),
    )
    (server,) = training.runtime.client.pool.servers
    served = {0: "initial"}
    take = server.backend.update_weights

    async def update_weights(update):
        served[update.version] = update.payload
        await take(update)

    server.backend.update_weights = update_weights
    await training.run()
    evaluated = ["average", "current"]
    assert list(served.values()) == [
        "initial",
        "current",
        "current",
        *evaluated,
        "current",
        *evaluated,
    ]
    assert list(served) == sorted(served)
    assert server.backend.policy_version == max(served)
    by = {}
    for record in read_records(tmp_path / "trajectories.jsonl"):
        (version,) = {v for v in record["policy_versions"] if v >= 0}
        by.setdefault((record["split"], record["step"]), set()).add(served[version])
    assert by == {
        ("heldout", 0): {"initial"},
        ("train", 1): {"initial"},
        ("train", 2): {"current"},
        ("heldout", 2): {"average"},
        ("train", 3): {"current"},
        ("heldout", 3): {"average"},
    }
    assert training.record.extra_versions == 4
    assert RunRecord.from_json(training.record.to_json()).extra_versions == 4


@pytest.mark.parametrize(
    ("every", "evaluated_steps"),
    [(0, [0, 4]), (1, [0, 1, 2, 3, 4]), (2, [0, 2, 4]), (3, [0, 3, 4])],
)
async def test_each_step_is_evaluated_once_and_the_last_one_always(
    tmp_path: Path, every: int, evaluated_steps: list[int]
):
    await make_trainer(tmp_path, steps=4, trainer={"eval_every": every}).run()
    records = read_records(tmp_path / "metrics.jsonl")
    assert [r["step"] for r in records if r["kind"] == "evaluation"] == evaluated_steps


def dropped(training: Trainer) -> dict[str, int]:
    accounting = training.runtime.collector.accounting
    accounting.check()
    assert not accounting.in_flight
    return {str(reason): count for reason, count in accounting.dropped.items()}


async def test_groups_that_are_left_out_are_refilled_from_new_prompts(tmp_path: Path):
    """The first prompts give equal rewards, those of the first refill differ."""

    async def equal_at_first(t):
        return replace(t, reward=1.0) if t.trajectory_id.startswith("train-") else await parity(t)

    training = make_trainer(
        tmp_path,
        steps=1,
        algorithm={"max_resample_rounds": 5},
        score=equal_at_first,
        prompts_per_step=3,
        group_size=2,
    )
    await training.run()
    assert [g.group_id for g in training.runtime.learner.groups] == [
        "refill1-1-0",
        "refill1-1-1",
        "refill1-1-2",
    ]
    assert dropped(training) == {"zero_variance": 6}
    assert training.runtime.collector.accounting.trained == 6


async def test_refilling_ends_after_its_rounds(tmp_path: Path):
    async def equal(t):
        return replace(t, reward=1.0)

    training = make_trainer(tmp_path, steps=1, algorithm={"max_resample_rounds": 2}, score=equal)
    await training.run()
    assert not training.runtime.learner.groups
    assert dropped(training) == {"zero_variance": 3 * 2}


async def test_remax_compares_with_a_greedy_rollout_that_is_never_trained_on(tmp_path: Path):
    async def greedy_earns_less(t):
        return replace(t, reward=0.25 if t.trajectory_id.startswith("greedy") else 1.0)

    training = make_trainer(
        tmp_path,
        steps=1,
        algorithm={"adv_estimator": "remax"},
        score=greedy_earns_less,
        group_size=1,
    )
    await training.run()
    assert [g.greedy_reward for g in training.runtime.learner.groups] == [0.25]
    assert dropped(training) == {"greedy": 1}
    assert training.runtime.collector.accounting.trained == 1


async def test_rejected_trajectories_are_not_counted_as_trained(tmp_path: Path):
    training = make_trainer(tmp_path, steps=1)
    training.runtime.learner.rejected = frozenset({"train-1-0-1"})
    await training.run()
    assert dropped(training) == {"rejected": 1}
    assert training.runtime.collector.accounting.trained == 1


async def test_masked_trajectories_are_counted_by_the_filter_that_masked_them(tmp_path: Path):
    async def second_is_cut_off(t):
        cut = t.trajectory_id.endswith("-1")
        return replace(
            await parity(t),
            finish_reason=FinishReason.RESPONSE_LENGTH if cut else FinishReason.ANSWER,
        )

    training = make_trainer(
        tmp_path, steps=1, algorithm={"filters": {"overlong": "mask"}}, score=second_is_cut_off
    )
    await training.run()
    assert [g.rewards for g in training.runtime.learner.groups] == [(0.0, 1.0)]
    assert dropped(training) == {"overlong": 1}
    assert training.runtime.collector.accounting.trained == 1


@pytest.mark.parametrize(("mode", "times"), [("token-mean", 0), ("seq-mean-token-sum", 1)])
async def test_the_first_batch_says_what_its_lengths_weigh_where_they_matter(
    tmp_path: Path, mode: str, times: int
):
    screen = io.StringIO()
    training = make_trainer(tmp_path, steps=2, algorithm={"loss_agg_mode": mode}, screen=screen)
    await training.run()
    assert screen.getvalue().count("over this batch's 2 trajectories") == times


async def test_penalties_are_taken_off_before_groups_are_compared(tmp_path: Path):
    async def equal(t):
        return replace(t, reward=1.0)

    shaping = {"overlong_buffer": 512, "overlong_factor": 512.0}  # one for every token
    training = make_trainer(
        tmp_path,
        steps=1,
        algorithm={"shaping": shaping, "filter_zero_variance": False},
        score=equal,
    )
    await training.run()
    (group,) = training.runtime.learner.groups
    assert group.rewards == tuple(1.0 - len(t.response_ids) for t in group.trajectories)


async def test_trajectories_without_loss_are_counted_under_their_reason(tmp_path: Path):
    """Step 1 loses one of two trajectories of its group, step 2 both: then there is nothing to
    learn from.
    """

    async def score(trajectory):
        _, step, _, sample = trajectory.trajectory_id.split("-")
        lost = sample == "0" or step == "2"
        return replace(
            await parity(trajectory), no_loss=DropReason.VOID_TRAJECTORY if lost else None
        )

    training = make_trainer(tmp_path, steps=2, score=score)
    await training.run()
    books = training.runtime.collector.accounting
    books.check()
    assert (books.started, books.trained, dict(books.dropped)) == (
        4,
        1,
        {DropReason.VOID_TRAJECTORY: 3},
    )
    assert training.runtime.client.pool.servers[0].backend.policy_version == 1, (
        "the second step published nothing"
    )


async def test_a_step_of_trees_balances_its_books_and_counts_shared_ids_once(tmp_path: Path):
    """Two ids of each chain are forked, so at least one branch inherits ids; each samples 3."""
    strategy = {"name": "treerl", "treerl": {"m": 2, "n": 2, "l": 1, "t": 1}}
    training = make_trainer(
        tmp_path,
        steps=1,
        algorithm={"adv_estimator": "treerl"},
        group_size=6,
        prompts_per_step=2,
        strategy=strategy,
    )
    await training.run()
    books = training.runtime.collector.accounting
    books.check()
    assert (books.started, books.trained) == (12, 12)
    group, _ = training.runtime.learner.groups
    shared = sum(t.num_inherited for t in trajectories_of(training.runtime.learner.groups))
    (line,) = [r for r in read_records(tmp_path / "metrics.jsonl") if r["kind"] == "step"]
    assert (line["tree/branches"], line["tree/trees"], line["tree/topped_up"]) == (8, 4, 0)
    assert line["tree/inherited_tokens"] == shared > 0
    (server,) = training.runtime.client.pool.servers
    evaluated = 2 * len(group.trajectories[0].response_ids)  # before and after, one held-out row
    total = line["rollout_tokens_per_second"] * line["rollout_seconds"]
    assert round(total) == server.backend.sampled - evaluated == 12 * 3


async def test_a_step_of_chains_says_nothing_of_trees(tmp_path: Path):
    training = make_trainer(tmp_path, steps=1)
    await training.run()
    (line,) = [r for r in read_records(tmp_path / "metrics.jsonl") if r["kind"] == "step"]
    assert not [key for key in line if key.startswith("tree/")]


async def test_a_step_that_cannot_be_written_is_not_finished(tmp_path: Path):
    training = make_trainer(tmp_path, steps=2)
    await training.train_step()

    def full(line):
        raise StorageError("no space left")

    training.folder.add_metrics = full
    printed = []
    training.progress.step = lambda line, *, seconds_left: printed.append(line)
    with pytest.raises(StorageError):
        await training.train_step()
    assert training.record.step == 1 and not printed, "a resumed run makes this step again"
