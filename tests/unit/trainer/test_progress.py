"""A step ends while an engine and the learner live, whatever one trajectory waits for, also after a
restart.
"""

import asyncio
import json
from collections import Counter
from collections.abc import Callable
from typing import cast

import pytest

from jax_agent_rl.collect.groups import NO_LIMITS, TimeLimits
from jax_agent_rl.testing.simulate.workload import SimulationStuckError
from jax_agent_rl.types import DropReason
from tests.virtual_training import Coin, JsonNotes, in_virtual_time, make_virtual

DEADLINE = TimeLimits(trajectory_timeout=600.0)
CUT = TimeLimits(trajectory_timeout=600.0, min_group_size=3, group_timeout=60.0)


def last_of(group: int) -> Callable[[str], bool]:
    return lambda trajectory_id: trajectory_id.endswith(f"-{group}-3")


def run(
    *,
    mode: str,
    limits: TimeLimits,
    hangs: Callable[[str], bool],
    saved: str = "",
    until: float | None = None,
):
    """Train 3 steps of 4 groups of 4; return the trainer, its seconds, and its last record."""

    async def main():
        training = make_virtual(
            rows=12,
            steps=3,
            mode=mode,
            goes_on=Coin(goes_on=0.5),
            hangs=hangs,
            limits=limits,
            saved=saved,
        )
        running = asyncio.ensure_future(training.run())
        await asyncio.wait({running}, timeout=until)
        if not running.done():
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
        else:
            running.result()
        return (
            training,
            asyncio.get_running_loop().time(),
            json.loads(cast(JsonNotes, training.checkpointer).saved),
        )

    return in_virtual_time(main)


@pytest.mark.parametrize("mode", ["sync", "one_step_off", "fully_async"])
def test_without_a_limit_one_trajectory_that_never_ends_wedges_the_run(mode: str):
    with pytest.raises(SimulationStuckError):
        run(mode=mode, limits=NO_LIMITS, hangs=last_of(1))


@pytest.mark.parametrize("mode", ["sync", "one_step_off", "fully_async"])
@pytest.mark.parametrize(
    ("limits", "reason", "max_seconds"),
    [(DEADLINE, DropReason.TRAJECTORY_TIMEOUT, 3 * 700.0), (CUT, DropReason.STRAGGLER, 3 * 160.0)],
    ids=["deadline", "min_group_size"],
)
def test_a_trajectory_that_never_ends_is_dropped_by_name_and_every_step_ends(
    mode: str, limits: TimeLimits, reason: DropReason, max_seconds: float
):
    training, seconds, record = run(mode=mode, limits=limits, hangs=last_of(1))
    assert record["step"] == 3 and seconds < max_seconds
    dropped = Counter(record["accounting"]["dropped"])
    assert (dropped, record["accounting"]["trained"]) == ({reason: 3}, 3 * 16 - 3)
    assert str(reason) in training.runtime.collector.latest_losses


def test_a_run_resumed_into_the_batch_that_wedged_it_goes_on():
    """The resumed run draws the same rows, of which one hangs again (NVIDIA-NeMo/RL#3238)."""
    wedged, _, record = run(mode="fully_async", limits=DEADLINE, hangs=last_of(1), until=300.0)
    assert wedged.record.step < 3 and record["in_flight"], "it waits for one trajectory"
    _, _, resumed = run(
        mode="fully_async", limits=DEADLINE, hangs=last_of(1), saved=json.dumps(record)
    )
    assert resumed["step"] == 3
    assert resumed["accounting"]["trained"] == 3 * 16 - 3
    assert resumed["accounting"]["dropped"] == {DropReason.TRAJECTORY_TIMEOUT: 3}


def test_of_2193_trajectories_one_that_hangs_does_not_keep_the_others():
    """2192 end, and the last one never does (NVIDIA-NeMo/Gym#3185)."""

    async def main():
        training = make_virtual(
            rows=731,
            steps=1,
            mode="sync",
            goes_on=lambda trajectory_id: False,
            hangs=lambda trajectory_id: trajectory_id == "train-1-730-2",
            limits=DEADLINE,
            prompts_per_step=731,
            group_size=3,
            max_in_flight=4096,
        )
        await training.run()
        return training, asyncio.get_running_loop().time()

    training, seconds = in_virtual_time(main)
    accounting = training.runtime.collector.accounting
    assert (accounting.started, accounting.trained) == (2193, 2192)
    assert accounting.dropped == {DropReason.TRAJECTORY_TIMEOUT: 1}
    assert 600 < seconds < 700
