"""A curriculum of difficulty pools: rows that teach little are drawn less often.

::

    next row ─► its pool, by its running pass rate ─► admission gate
                new      not measured yet               always admitted
                normal   between the thresholds         always admitted
                easy     at least easy_threshold        admitted easy_fraction of the time
                hard     at most hard_threshold         admitted hard_fraction of the time

A row that is not admitted is passed over until its turn in the next epoch. Within a pool, the order
of the rows stays what it was. The pools are those of prime-rl's buffer. There, each row has its own
pass rate, which is known from the second epoch on. Rows of a data source may share one here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np

from jax_agent_rl.config.task import CurriculumConfig
from jax_agent_rl.utils.fingerprints import fingerprint

Pool = Literal["new", "normal", "easy", "hard"]
POOLS: tuple[Pool, ...] = get_args(Pool)
_MAX_DRAWS = 64
"""Draws of one row that are in flight at a time."""


@dataclass(frozen=True, kw_only=True)
class DrawnRow:
    """How a row was drawn.

    Attributes:
        pool: its pool at that time.
        probability: that its turn admitted it.
    """

    pool: Pool
    probability: float


@dataclass(frozen=True)
class RowKeys:
    """What the pools know about a row.

    Attributes:
        row: fingerprint of the row.
        rated: of what has its pass rate: the same, or the name of its data source.
    """

    row: str
    rated: str


class DifficultyPools:
    """Running pass rates of rows or data sources, and the gate that they make.

    Args:
        seed: of the gate's draws.
        num_rows: rows of the training data. After twice as many in a row that were passed over,
            which hold a whole epoch, rows are admitted whatever their pool is: otherwise a run
            whose rows are all easy would look for others forever. It looks for others again once
            a row is admitted for its pool, or a pass rate moves a row to a pool that is drawn.
    """

    def __init__(self, config: CurriculumConfig, *, seed: int, num_rows: int) -> None:
        self._config = config
        self._seed = seed
        self._num_rows = num_rows
        self._rates: dict[str, list[float]] = {}  # of the last groups, by RowKeys.rated
        # How rows were drawn whose groups have not been recorded yet, by RowKeys.row.
        self._drawn: dict[str, list[DrawnRow]] = {}
        self._passed_over = 0  # since the last draw that was admitted for its pool
        self._passed_over_in_step = 0

    def keys_of(self, row: Any) -> RowKeys:
        """Return the keys of a row."""
        key = fingerprint(row)
        if self._config.pass_rate_of == "data_source":
            return RowKeys(row=key, rated=str(row.get("data_source")))
        return RowKeys(row=key, rated=key)

    def pool_of(self, row: Any) -> Pool:
        """Return the pool of a row."""
        return self._pool(self.keys_of(row).rated)

    def _pool(self, key: str) -> Pool:
        rates = self._rates.get(key)
        if not rates:
            return "new"
        pass_rate = sum(rates) / len(rates)
        if pass_rate >= self._config.easy_threshold:
            return "easy"
        if pass_rate <= self._config.hard_threshold:
            return "hard"
        return "normal"

    def _probability(self, pool: Pool) -> float:
        """Return the share of their turns at which rows of a pool are drawn."""
        if pool == "easy":
            return self._config.easy_fraction
        if pool == "hard":
            return self._config.hard_fraction
        return 1.0

    def _opens(self, position: int, probability: float) -> bool:
        """Return whether the gate is open at a position."""
        if probability in (0.0, 1.0):
            return probability == 1.0  # a search passes many rows: it makes no generator for each
        uniform = np.random.default_rng([self._seed, position]).random()
        return uniform < probability

    def admits(self, position: int, keys: RowKeys) -> bool:
        """Return whether a row is drawn.

        Args:
            position: the row's turn in the order of all; decides together with the seed.
            keys: of the row whose turn it is.
        """
        pool = self._pool(keys.rated)
        probability = self._probability(pool)
        is_admitted = self._opens(position, probability)
        if is_admitted:
            self._passed_over = 0
        elif self._passed_over >= 2 * self._num_rows:
            is_admitted = True
            probability = 1.0

        if is_admitted:
            previous_draws = self._drawn.get(keys.row, [])
            drawn_row = DrawnRow(pool=pool, probability=probability)
            # Groups that are lost are never recorded.
            self._drawn[keys.row] = [*previous_draws, drawn_row][-_MAX_DRAWS:]
        else:
            self._passed_over += 1
            self._passed_over_in_step += 1
        return is_admitted

    def record(self, row: Any, pass_rate: float) -> DrawnRow | None:
        """Add the pass rate of a group to the running one of its row or data source.

        Returns:
            How the row was drawn; None if it was not drawn here.
        """
        keys = self.keys_of(row)
        previous_rates = self._rates.get(keys.rated, [])
        # A new list: a checkpoint may still be writing the previous one.
        self._rates[keys.rated] = [*previous_rates, pass_rate][-self._config.window :]
        if self._probability(self._pool(keys.rated)) > 0:
            self._passed_over = 0  # there is something to look for
        draws = self._drawn.pop(keys.row, [])
        if not draws:
            return None
        if len(draws) > 1:
            self._drawn[keys.row] = draws[1:]
        return draws[0]

    def end_step(self) -> dict[str, float]:
        """Return the sizes of the pools, and how many rows were passed over since the last step.

        A size counts what has a pass rate: rows or data sources.
        """
        sizes = Counter(self._pool(key) for key in self._rates)
        passed_over = self._passed_over_in_step
        self._passed_over_in_step = 0
        metrics = {f"curriculum/{pool}": float(sizes[pool]) for pool in ("normal", "easy", "hard")}
        return {**metrics, "curriculum/passed_over": float(passed_over)}

    def state(self) -> dict[str, Any]:
        """Return the state for :meth:`restore`, as JSON."""
        drawn = {}
        for key, draws in self._drawn.items():
            drawn[key] = [[row.pool, row.probability] for row in draws]
        return {"rates": dict(self._rates), "drawn": drawn, "passed_over": self._passed_over}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a state."""
        self._rates = dict(state["rates"])
        self._drawn = {}
        for key, draws in state["drawn"].items():
            drawn_rows = [DrawnRow(pool=pool, probability=share) for pool, share in draws]
            self._drawn[key] = drawn_rows
        self._passed_over = state["passed_over"]
