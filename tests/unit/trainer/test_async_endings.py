"""How runs of the asynchronous trainers end: by an error, an interruption, and what a resumed run
makes of it.
"""

import asyncio
import threading
from itertools import chain
from pathlib import Path

import pytest

from jax_agent_rl.errors import EngineDiedError
from jax_agent_rl.learner.metrics import UpdateResult
from jax_agent_rl.trainer.record import RunRecord
from tests.fake_training import (
    IdleLearner,
    Notes,
    Versions,
    books,
    engine_of,
    finish,
    make_trainer,
    steps_of,
    tasks,
)

LONG = (
    "one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen"
    " sixteen"
)


@pytest.mark.parametrize("mode", ["one_step_off", "fully_async"])
async def test_a_run_without_an_engine_stops_and_leaves_no_task(tmp_path: Path, mode: str):
    training = make_trainer(tmp_path, steps=50, trainer={"mode": mode}, script=[LONG])
    earlier_tasks = tasks()
    await training.train_step()
    training.runtime.client.pool.servers[0].backend.die()
    with pytest.raises(EngineDiedError, match="no rollout engine"):
        await finish(training)
    assert tasks() == earlier_tasks and training.record.step == 1
    books(training)


@pytest.mark.parametrize("mode", ["one_step_off", "fully_async"])
async def test_an_error_of_the_learner_ends_the_run_and_leaves_no_task(tmp_path: Path, mode: str):
    class Fails(IdleLearner):
        def update(self, groups, *, masked, tick, cancellation, check):
            raise RuntimeError("out of memory")

    training = make_trainer(
        tmp_path, steps=5, trainer={"mode": mode}, learner=Fails(), script=[LONG]
    )
    earlier_tasks = tasks()
    with pytest.raises(RuntimeError, match="out of memory"):
        await finish(training)
    assert tasks() == earlier_tasks


async def test_an_error_of_a_group_ends_the_run_and_leaves_no_task(tmp_path: Path):
    training = make_trainer(
        tmp_path, steps=5, trainer={"mode": "fully_async", "max_staleness": 3}, prompts_per_step=2
    )
    earlier_tasks = tasks()
    draw = training.runtime.collector.collect_one

    async def fails(row, *, step, **fields):
        if step == 2:
            raise KeyError("a bug")
        return await draw(row, step=step, **fields)

    training.runtime.collector.collect_one = fails
    with pytest.raises(KeyError, match="a bug"):
        await finish(training)
    assert tasks() == earlier_tasks
    books(training)


@pytest.mark.parametrize("mode", ["one_step_off", "fully_async"])
async def test_an_interruption_in_the_only_update_finishes_the_step(tmp_path: Path, mode: str):
    """Everything but the first batch never ends. The engine does not get what was learnt: the run
    is over.
    """
    updating = asyncio.Event()
    interrupted = threading.Event()
    loop = asyncio.get_running_loop()

    class Slow(Versions):
        def update(self, groups, *, masked, tick, cancellation, check):
            with cancellation.update():
                loop.call_soon_threadsafe(updating.set)
            assert interrupted.wait(timeout=30)
            return UpdateResult(metrics={}, skipped=False)

    notes = Notes()
    trainer = {"mode": mode}
    training = make_trainer(tmp_path, steps=5, trainer=trainer, learner=Slow(), checkpointer=notes)
    engine_of(training).hold = lambda r, sampled: (
        r.request_id.startswith("async-") and "async-0-0" not in r.request_id
    )
    earlier_tasks = tasks()
    task = asyncio.create_task(training.run())
    async with asyncio.timeout(60):
        await updating.wait()
        task.cancel()
        await asyncio.sleep(0)
        interrupted.set()
        await asyncio.gather(task, return_exceptions=True)
    assert task.cancelled() and tasks() == earlier_tasks
    assert list(notes.saved) == [1]
    assert engine_of(training).policy_version == 0
    assert (notes.saved[1]["accounting"]["trained"], books(training).trained) == (2, 2)
    assert notes.saved[1]["buffer"]["open"] == notes.saved[1]["cursor"]["again"] == [1]


@pytest.mark.parametrize("mode", ["sync", "one_step_off", "fully_async"])
async def test_an_interruption_between_updates_undoes_the_step_without_a_compiler(
    tmp_path: Path, mode: str
):
    """The second step's first update has passed; the learner's thread never gets to its second."""
    updating = asyncio.Event()
    forever = threading.Event()
    loop = asyncio.get_running_loop()

    class Stuck(Versions):
        def update(self, groups, *, masked, tick, cancellation, check):
            with cancellation.revocable():
                result = super().update(
                    groups, masked=masked, tick=tick, cancellation=cancellation, check=check
                )
                if len(self.steps) == 2:
                    loop.call_soon_threadsafe(updating.set)
                    forever.wait()
            return result

    notes = Notes()
    training = make_trainer(
        tmp_path, steps=5, trainer={"mode": mode}, learner=Stuck(), checkpointer=notes
    )
    task = asyncio.create_task(training.run())
    async with asyncio.timeout(60):
        await updating.wait()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    forever.set()
    assert task.cancelled()
    assert list(notes.saved) == [1] == [line["step"] for line in steps_of(tmp_path)]
    assert notes.saved[1]["accounting"]["trained"] == books(training).trained == 2


def trained_numbers(learner: Versions, upto: int, batch: int) -> list[int]:
    numbers = []
    for group in chain.from_iterable(learner.steps[:upto]):
        _, step, place = group.group_id.split("-")
        numbers.append(int(step) * batch + int(place))
    return numbers


@pytest.mark.parametrize("mode", ["one_step_off", "fully_async"])
@pytest.mark.parametrize("turns", [0, 3, 40, 41, 42, 60, 97, 150])
async def test_an_interrupted_run_goes_on_and_trains_on_every_row_once(
    tmp_path: Path, mode: str, turns: int
):
    """Cancelled after so many turns of the event loop; 8 steps of 2 groups in the end, whatever was
    going on.
    """

    def make(name: str, **fields):
        return make_trainer(
            tmp_path / name,
            steps=8,
            trainer={"mode": mode},
            learner=Versions(),
            checkpointer=Notes(),
            script=[LONG],
            prompts_per_step=2,
            rows=7,
            **fields,
        )

    first = make("first")
    earlier_tasks = tasks()
    task = asyncio.create_task(first.run())
    for _ in range(turns):
        await asyncio.sleep(0)
    task.cancel()
    async with asyncio.timeout(60):
        await asyncio.gather(task, return_exceptions=True)
    assert tasks() == earlier_tasks
    books(first)
    step = first.record.step
    saved = first.checkpointer.saved.get(step)
    record = RunRecord.from_json(saved) if saved else RunRecord()

    # A run that resumes publishes the weights of its step first.
    second = make("second", record=record, version=step)
    assert second.buffer.room == second.buffer.capacity
    assert second.buffer.version == step
    await finish(second)
    row_numbers = trained_numbers(first.runtime.learner, step, 2) + trained_numbers(
        second.runtime.learner, 8 - step, 2
    )
    assert sorted(row_numbers) == list(range(16))
    accounting = books(second)
    assert accounting.trained == 32
    assert accounting.started == 32 + accounting.dropped.total()
