"""Order of training rows: shuffled each epoch or as in the files, mixed by weight, resumable.

Every draw has a number, and all of the order is computed from the number and the seed::

    draw n ──► source and its k-th draw (Mixture) ──► epoch and position ──► row (_EpochOrder)

A source whose rows are read in groups (row groups of Parquet) is shuffled so that few groups are
needed at a time: its groups are permuted, and so are the rows of each *window*, of so many
consecutive groups as may be held::

    groups 0 1 2 3 4, two held      window [3 0]     window [4 1]     window [2]
    rows of the epoch               3 0 0 3 3 0 …    1 4 1 1 4 …      2 2 2 …

A position means something only in the order that it belongs to, so it is saved with the
fingerprints of the rows and with all that the order depends on.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

import numpy as np

from jax_agent_rl.config.task import CurriculumConfig
from jax_agent_rl.data.curriculum import DifficultyPools, RowKeys
from jax_agent_rl.errors import CheckpointError
from jax_agent_rl.utils.fingerprints import fingerprint

T = TypeVar("T")
_BLOCK = 1024
"""Number of draws of a mixture that are shuffled together."""
_MAX_POSITIONS = 2**16
"""Number of last draws that can be repeated with a curriculum: more than may be in flight."""


@runtime_checkable
class GroupedRows(Protocol):
    """Rows that are read in groups.

    Attributes:
        row_groups: sizes of the groups, in the order of the rows.
        max_groups: number of groups that may be in memory at a time.
    """

    row_groups: Sequence[int]
    max_groups: int


@runtime_checkable
class FingerprintedRows(Protocol):
    """Rows that know their fingerprint, which depends on their order."""

    fingerprint: str


@dataclass(frozen=True)
class Mixture(Generic[T]):
    """Sources that are drawn from by weight.

    Each is shuffled by itself, and begins again when it is exhausted. Of 1024 consecutive draws
    (from a multiple of 1024 on), each source gets its share, rounded up or down at random so that
    the share is exact on average. Their order is random.

    Attributes:
        parts: rows of each source.
        weights: positive; shares are relative to their sum.
    """

    parts: Sequence[Sequence[T]]
    weights: Sequence[float]


class DataCursor(Generic[T]):
    """Endless shuffled passes over rows.

    >>> cursor = DataCursor(["a", "b", "c"], seed=0)
    >>> first = cursor.next_rows(4)                  # three of epoch 0, one of epoch 1
    >>> state = cursor.state()
    >>> sorted(first[:3])
    ['a', 'b', 'c']
    >>> {key: state[key] for key in ("drawn", "rows", "weights", "seed", "shuffle", "again")}
    {'drawn': 4, 'rows': [3], 'weights': [1.0], 'seed': 0, 'shuffle': True, 'again': []}

    Every draw has a number, by which it can be repeated after a restart.

    >>> resumed = DataCursor(["a", "b", "c"], seed=0)
    >>> resumed.restore(cursor.state(again=[2]))
    >>> [number for number, row in (resumed.draw(), resumed.draw())]
    [2, 4]

    Args:
        rows: the rows, or a mixture of several sources' rows.
        seed: of the order.
        shuffle: False draws each source's rows in their order.
        curriculum: decides whether a row whose turn it is is drawn; None draws every row. The
            number of a draw counts rows that are drawn, its position also those passed over.

    Attributes:
        pools: of the curriculum; None without one.
    """

    def __init__(
        self,
        rows: Sequence[T] | Mixture[T],
        *,
        seed: int,
        shuffle: bool = True,
        curriculum: CurriculumConfig | None = None,
    ) -> None:
        mixture = rows if isinstance(rows, Mixture) else Mixture((rows,), (1.0,))
        self._parts = mixture.parts
        self._weights = mixture.weights
        self._seed = seed
        self._blocks = _Blocks(self._weights, seed)
        self._orders = []
        for number, part in enumerate(self._parts):
            key = (number,) if len(self._parts) > 1 else ()
            self._orders.append(_EpochOrder(part, seed, key))
        self._shuffle = shuffle
        self._num_drawn = 0
        self._repeats: list[int] = []
        self.pools: DifficultyPools | None = None
        if curriculum is not None and curriculum.enabled:
            num_rows = sum(len(part) for part in self._parts)
            self.pools = DifficultyPools(curriculum, seed=seed, num_rows=num_rows)
        # With a curriculum: of rows whose turn it was, by source and index. Rows may be read from
        # disk, and those that are passed over are needed for nothing else.
        self._row_keys: dict[tuple[int, int], RowKeys] = {}
        self._num_passed_over = 0
        self._positions: dict[int, int] = {}  # of the last draws, with a curriculum

    @functools.cached_property
    def fingerprints(self) -> list[str]:
        """The fingerprint of each source's rows."""
        return [
            part.fingerprint if isinstance(part, FingerprintedRows) else fingerprint(list(part))
            for part in self._parts
        ]

    def next_rows(self, count: int) -> list[T]:
        """Return the next ``count`` rows, across the end of an epoch if need be."""
        return [self.draw()[1] for _ in range(count)]

    def draw(self) -> tuple[int, T]:
        """Return the number of the next draw and its row."""
        if self._repeats:
            number = self._repeats.pop(0)
            position = self._positions.get(number, number + self._num_passed_over)
            # It may have been drawn without a curriculum, and have to be repeated with one again.
            self._positions[number] = position
            return number, self._row(position)

        number = self._num_drawn
        self._num_drawn += 1
        position = number + self._num_passed_over
        if self.pools is None:
            return number, self._row(position)

        while not self.pools.admits(position, self._keys(self.pools, position)):
            self._num_passed_over += 1
            position += 1
        self._positions[number] = position
        if len(self._positions) > _MAX_POSITIONS:
            del self._positions[next(iter(self._positions))]
        return number, self._row(position)

    def _row(self, position: int) -> T:
        """Return the row whose turn is at a position of the order."""
        source, index = self._locate(position)
        return self._parts[source][index]

    def _keys(self, pools: DifficultyPools, position: int) -> RowKeys:
        """Return the keys of that row; it is read once."""
        place = self._locate(position)
        if place not in self._row_keys:
            self._row_keys[place] = pools.keys_of(self._row(position))
        return self._row_keys[place]

    def _locate(self, position: int) -> tuple[int, int]:
        """Return the source and the index of that row."""
        if len(self._parts) > 1:
            source, turn = self._blocks.locate(position)
        else:
            source = 0
            turn = position
        if self._shuffle:
            index = self._orders[source].index(turn)
        else:
            index = turn % len(self._parts[source])
        return source, index

    def state(self, *, again: Iterable[int] = ()) -> dict[str, Any]:
        """Return the state for :meth:`restore`, as JSON.

        Args:
            again: numbers of draws to repeat first.
        """
        repeats = sorted({*self._repeats, *again})
        curriculum: dict[str, Any] = {}
        if self.pools is not None or self._num_passed_over:
            positions = {str(n): self._positions[n] for n in repeats if n in self._positions}
            curriculum = {"passed_over": self._num_passed_over, "positions": positions}
        if self.pools is not None:
            curriculum["pools"] = self.pools.state()
        return {
            "drawn": self._num_drawn,
            "rows": [len(part) for part in self._parts],
            "fingerprints": self.fingerprints,
            "weights": list(self._weights),
            "seed": self._seed,
            "shuffle": self._shuffle,
            "windows": [order.windows for order in self._orders] if self._shuffle else [],
            "again": repeats,
            "curriculum": curriculum,
        }

    def restore(self, state: dict[str, Any], *, accepted: Collection[str] = ()) -> None:
        """Continue where a cursor over the same rows in the same order stood.

        Args:
            state: from :meth:`state`.
            accepted: keys of the configuration that may differ.

        Raises:
            CheckpointError: the rows of a source, its weight, the seed or the kind of order is
                another now.
        """
        current = self.state()
        for name, key, what in _ORDER_KEYS:
            if name not in state:  # of an earlier version
                continue
            if key in accepted or state[name] == current[name]:
                continue
            raise CheckpointError(
                f"the checkpoint was made with {what} = {state[name]}, now {current[name]}; restore"
                " the old value or start a new run (or accept another order of rows:"
                f" --accept-change {key})"
            )
        self._num_drawn = state["drawn"]
        self._repeats = list(state["again"])

        curriculum = state.get("curriculum") or {}  # earlier versions had none
        self._num_passed_over = curriculum.get("passed_over", 0)
        self._positions = {int(n): p for n, p in curriculum.get("positions", {}).items()}
        if self.pools is not None and "pools" in curriculum:
            self.pools.restore(curriculum["pools"])


_ORDER_KEYS = (
    ("rows", "data.train", "the numbers of rows in data.train"),
    ("fingerprints", "data.train", "other rows in data.train, with the fingerprints"),
    ("weights", "data.train", "the weights of data.train"),
    ("seed", "seed", "seed"),
    ("shuffle", "data.shuffle", "data.shuffle"),
    (
        "windows",
        "data.shuffle_row_groups",
        "other windows (data.shuffle_row_groups, row groups of files), fingerprints",
    ),
)
"""What the order depends on: name in the state, key of the configuration, words for a message."""


class _EpochOrder:
    """The row of every draw from one source.

    Args:
        key: distinguishes the source from others of a mixture.
    """

    def __init__(self, rows: Sequence[Any], seed: int, key: tuple[int, ...]) -> None:
        groups: Sequence[int] = (len(rows),)
        max_groups = 1
        if isinstance(rows, GroupedRows):
            groups = rows.row_groups
            max_groups = rows.max_groups
        self._row_count = len(rows)
        self._seed = seed
        self._key = key
        self._max_groups = max_groups
        self._group_sizes = np.asarray(groups)
        self._group_begins = np.cumsum([0, *groups[:-1]])
        self.windows: str | None = None
        """Fingerprint of the groups that are shuffled together; None if the rows are shuffled as a
        whole."""
        if len(groups) > max_groups:
            self.windows = fingerprint([[int(size) for size in groups], max_groups])

        self._epoch = -1
        # Of this epoch: the groups of each window, and the position after its last row.
        self._windows: list[np.ndarray] = []
        self._window_ends = np.empty(0, np.int64)
        # The rows of one window, in their order.
        self._window = -1
        self._window_rows = np.empty(0, np.int64)

    def index(self, turn: int) -> int:
        """Return the row of a draw."""
        epoch, position = divmod(turn, self._row_count)
        if epoch != self._epoch:
            self._begin_epoch(epoch)
        window = int(np.searchsorted(self._window_ends, position, side="right"))
        if self._window != window:
            self._begin_window(window)
        window_begin = self._window_ends[window - 1] if window else 0
        return int(self._window_rows[position - window_begin])

    def _begin_epoch(self, epoch: int) -> None:
        groups = np.arange(len(self._group_sizes))
        if len(groups) > self._max_groups:
            groups = self._generator(epoch, *self._key).permutation(len(groups))
        self._windows = []
        for begin in range(0, len(groups), self._max_groups):
            self._windows.append(groups[begin : begin + self._max_groups])
        self._window_ends = np.cumsum([self._group_sizes[window].sum() for window in self._windows])
        self._epoch = epoch
        self._window = -1

    def _begin_window(self, window: int) -> None:
        rows_of_groups = []
        for group in self._windows[window]:
            size = int(self._group_sizes[group])
            rows_of_groups.append(self._group_begins[group] + np.arange(size))
        rows = np.concatenate(rows_of_groups)

        key = (*self._key, window) if len(self._windows) > 1 else self._key
        order = self._generator(self._epoch, *key).permutation(len(rows))
        # The rows first: an interrupt in between must not leave the rows of another window.
        self._window_rows = rows[order]
        self._window = window

    def _generator(self, epoch: int, *key: int) -> np.random.Generator:
        return np.random.default_rng(np.random.SeedSequence([self._seed, epoch], spawn_key=key))


class _Blocks:
    """The source of every draw from a mixture, :data:`_BLOCK` draws at a time."""

    def __init__(self, weights: Sequence[float], seed: int) -> None:
        self._ends = np.cumsum(weights) / sum(weights)
        self._ends[-1] = 1.0  # whatever it was rounded to
        self._seed = seed
        # Number of draws from each source in all blocks before a block, by block.
        self._draws_before = [np.zeros(len(weights), np.int64)]
        # The sources of one block's draws.
        self._block = -1
        self._block_sources = np.empty(0, np.int64)

    def locate(self, number: int) -> tuple[int, int]:
        """Return the source of a draw, and how many draws from it came before."""
        block, position = divmod(number, _BLOCK)
        while len(self._draws_before) <= block:
            sources = self._sources(len(self._draws_before) - 1)
            draws = np.bincount(sources, minlength=len(self._ends))
            self._draws_before.append(self._draws_before[-1] + draws)

        sources = self._sources(block)
        source = int(sources[position])
        in_block = np.count_nonzero(sources[:position] == source)
        return source, int(self._draws_before[block][source] + in_block)

    def _sources(self, block: int) -> np.ndarray:
        """Return the source of each draw of a block: systematic sampling, then shuffled."""
        if self._block != block:
            random = np.random.default_rng([self._seed, block])
            points = (np.arange(_BLOCK) + random.random()) / _BLOCK
            sources = np.searchsorted(self._ends, points, side="right")
            self._block_sources = random.permutation(sources)
            self._block = block
        return self._block_sources
