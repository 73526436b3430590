"""Runs that are killed again and again train on every row once, and on as many long trajectories as
others.
"""

import asyncio
import json
import random
from collections import Counter
from typing import Any, cast

import pytest
from scipy.stats import ks_2samp

from jax_agent_rl.data.cursor import DataCursor
from jax_agent_rl.types import DropReason, Group
from tests.trajectories import trajectories_of
from tests.virtual_training import (
    Coin,
    JsonNotes,
    Steps,
    VirtualAgent,
    in_virtual_time,
    make_virtual,
)

ROWS = 160
BATCH = 4
GROUP = 4
KILLS = 50
LIFE_SECONDS = 6  # from one kill to the next on average; a trajectory takes 16
STEPS = ROWS // BATCH


def live(
    saved: str, *, mode: str, seed: int, seconds: float | None, asked: bool
) -> tuple[list[list[Group]], str]:
    """Train until the end, or until killed after so many seconds; ``asked``: by SIGTERM.

    Returns:
        The groups of the steps that the newest checkpoint counts, and that checkpoint.
    """

    async def main() -> tuple[list[list[Group]], str]:
        training = make_virtual(rows=ROWS, steps=STEPS, mode=mode, goes_on=Coin(seed), saved=saved)
        notes = cast(JsonNotes, training.checkpointer)
        first_step = training.record.step
        running = asyncio.ensure_future(training.run())
        await asyncio.wait({running}, timeout=seconds)
        if running.done():
            running.result()
        elif asked:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
        newest = notes.saved or saved
        finished = json.loads(newest)["step"] if newest else 0
        return cast(Steps, training.runtime.learner).steps[: finished - first_step], newest

    return in_virtual_time(main)


def train(
    mode: str, *, kills: int, seed: int, drawn_anew: bool = False
) -> tuple[list[Group], dict]:
    """Return all groups that a run with so many kills has trained on, and its last record.

    Args:
        mode: of the trainer.
        kills: how many.
        seed: of what is sampled and of when it is killed.
        drawn_anew: sample with another seed after every kill.
    """
    luck = random.Random(seed)
    saved = ""
    groups = []
    for life in range(kills + 1):
        last = life == kills
        steps, saved = live(
            saved,
            mode=mode,
            seed=1000 * seed + life if drawn_anew else seed,
            seconds=None if last else luck.expovariate(1 / LIFE_SECONDS),
            asked=luck.random() < 0.5,
        )
        groups += [group for step in steps for group in step]
    return groups, json.loads(saved)


def lengths(groups: list[Group]) -> list[int]:
    return [trajectory.num_sampled for trajectory in trajectories_of(groups)]


def likelihood_of_same_lengths(groups: list[Group], later_groups: list[Group]) -> float:
    """Return the p-value of the Kolmogorov-Smirnov test."""
    return cast(Any, ks_2samp(lengths(groups), lengths(later_groups))).pvalue


def assert_every_row_once(groups: list[Group], record: dict) -> None:
    assert record["step"] == STEPS
    rows = Counter(trajectory.row["number"] for trajectory in trajectories_of(groups))
    assert rows == dict.fromkeys(range(ROWS), GROUP)
    accounting = record["accounting"]
    assert accounting["trained"] == ROWS * GROUP
    assert accounting["started"] == accounting["trained"] + sum(accounting["dropped"].values())


@pytest.mark.parametrize("mode", ["sync", "one_step_off", "fully_async"])
def test_whenever_a_run_is_killed_it_trains_on_every_row_once(mode: str):
    assert_every_row_once(*train(mode, kills=6, seed=1))


@pytest.fixture(scope="module")
def undisturbed() -> list[Group]:
    groups, record = train("fully_async", kills=0, seed=2)
    assert_every_row_once(groups, record)
    return groups


def test_fifty_kills_leave_the_rows_and_the_lengths_of_an_undisturbed_run(undisturbed: list[Group]):
    killed = train("fully_async", kills=KILLS, seed=3)
    assert_every_row_once(*killed)
    assert killed[1]["accounting"]["dropped"].keys() <= {DropReason.CANCELLED}, (
        "before they had sampled anything"
    )
    assert likelihood_of_same_lengths(undisturbed, killed[0]) > 0.01


def test_the_count_of_rows_sees_it_if_groups_in_flight_are_lost(monkeypatch: pytest.MonkeyPatch):
    state = DataCursor.state
    monkeypatch.setattr(DataCursor, "state", lambda cursor, *, again=(): state(cursor))
    with pytest.raises(AssertionError):
        assert_every_row_once(*train("fully_async", kills=10, seed=3))


def test_the_lengths_see_it_if_trajectories_in_flight_are_drawn_anew(
    undisturbed: list[Group], monkeypatch: pytest.MonkeyPatch
):
    """Each life then ends what is short, and what is long starts again."""
    monkeypatch.setattr(VirtualAgent, "continues_prefix", False)
    groups, record = train("fully_async", kills=KILLS, seed=3, drawn_anew=True)
    assert_every_row_once(groups, record)
    assert likelihood_of_same_lengths(undisturbed, groups) < 0.01
