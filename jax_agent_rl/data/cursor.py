"""Order of training rows: reshuffled each epoch, or that of the files; mixed by weight, exactly resumable.

Every draw has a number, and all of the order is computed from the number and the seed::

    draw n ──► source and its k-th draw (Mixture) ──► epoch and position ──► row (_EpochOrder)

A source whose rows are read in groups (row groups of Parquet) is shuffled so that few groups are
needed at a time: its groups are permuted, and so are the rows of each *window*, of so many
consecutive groups as may be held::

    groups 0 1 2 3 4, two held      window [3 0]     window [4 1]     window [2]
    rows of the epoch               3 0 0 3 3 0 …    1 4 1 1 4 …      2 2 2 …

A position means something only in the order that it was taken in, so it is kept with the
fingerprints of the rows and with all that the order depends on.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

import numpy as np

from jax_agent_rl.errors import CheckpointError
from jax_agent_rl.utils.fingerprints import fingerprint

T = TypeVar("T")
_BLOCK = 1024
"""Draws of a mixture that are shuffled together."""


@runtime_checkable
class GroupedRows(Protocol):
    """Rows that are read in groups.

    Attributes:
        row_groups: sizes of the groups, in the order of the rows.
        held: number of groups that may be in memory at a time.
    """

    row_groups: Sequence[int]
    held: int


@runtime_checkable
class FingerprintedRows(Protocol):
    """Rows that know their own fingerprint.

    Attributes:
        fingerprint: of the rows, in order.
    """

    fingerprint: str


@dataclass(frozen=True)
class Mixture(Generic[T]):
    """Sources that are drawn from by weight, each shuffled by itself and begun again when it is exhausted.

    Of 1024 consecutive draws (from a multiple of 1024 on), each source gets its share, rounded up
    or down at random so that the share is exact on average. Their order is random.

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
    >>> sorted(first[:3]), {key: state[key] for key in ("drawn", "rows", "weights", "seed", "shuffle", "again")}
    (['a', 'b', 'c'], {'drawn': 4, 'rows': [3], 'weights': [1.0], 'seed': 0, 'shuffle': True,
    'again': []})

    Every draw has a number, by which it can be repeated after a restart.

    >>> resumed = DataCursor(["a", "b", "c"], seed=0)
    >>> resumed.restore(cursor.state(again=[2]))
    >>> [number for number, row in (resumed.draw(), resumed.draw())]
    [2, 4]

    Args:
        rows: the rows, or a mixture of several sources' rows.
        seed: of the order.
        shuffle: False draws each source's rows in their order.
    """

    def __init__(self, rows: Sequence[T] | Mixture[T], *, seed: int, shuffle: bool = True) -> None:
        mixture = rows if isinstance(rows, Mixture) else Mixture((rows,), (1.0,))
        self._parts, self._weights = mixture.parts, mixture.weights
        self._blocks = _Blocks(self._weights, seed)
        self._seed = seed
        alone = len(self._parts) == 1
        self._orders = [
            _EpochOrder(part, seed, () if alone else (number,))
            for number, part in enumerate(self._parts)
        ]
        self._shuffle = shuffle
        self._drawn = 0
        self._again: list[int] = []

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
        if self._again:
            number = self._again.pop(0)
        else:
            number = self._drawn
            self._drawn += 1
        source, turn = self._blocks.locate(number) if len(self._parts) > 1 else (0, number)
        rows = self._parts[source]
        return number, rows[self._orders[source].index(turn) if self._shuffle else turn % len(rows)]

    def state(self, *, again: Iterable[int] = ()) -> dict[str, Any]:
        """Return the state for :meth:`restore`, as JSON; ``again`` are numbers of draws to repeat first."""
        return {
            "drawn": self._drawn,
            "rows": [len(part) for part in self._parts],
            "fingerprints": self.fingerprints,
            "weights": list(self._weights),
            "seed": self._seed,
            "shuffle": self._shuffle,
            "windows": [order.windows for order in self._orders] if self._shuffle else [],
            "again": sorted({*self._again, *again}),
        }

    def restore(self, state: dict[str, Any], *, accepted: Collection[str] = ()) -> None:
        """Continue where a cursor over the same rows in the same order stood.

        Args:
            state: see :meth:`state`.
            accepted: keys of the configuration that may differ.

        Raises:
            CheckpointError: the rows of a source, its weight, the seed or the kind of order is
                another now.
        """
        now = self.state()
        for name, key, what in _ORDER:
            if (
                key in accepted or state.get(name, now[name]) == now[name]
            ):  # older checkpoints lack some
                continue
            raise CheckpointError(
                f"the checkpoint was made with {what} = {state[name]}, now {now[name]}; restore the"
                " old value or start a new run (or accept another order of rows: --accept-change"
                f" {key})"
            )
        self._drawn, self._again = state["drawn"], list(state["again"])


_ORDER = (
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
"""What the order depends on: name in the state, key of the configuration, and words."""


class _EpochOrder:
    """The row of every draw from one source.

    Args:
        rows: the source.
        seed: of the run.
        key: distinguishes the source from others of a mixture.
    """

    def __init__(self, rows: Sequence[Any], seed: int, key: tuple[int, ...]) -> None:
        groups, held = (
            (rows.row_groups, rows.held) if isinstance(rows, GroupedRows) else ((len(rows),), 1)
        )
        self._rows, self._seed, self._key = len(rows), seed, key
        self._sizes, self._held = np.asarray(groups), held
        self._begins = np.cumsum([0, *groups[:-1]])
        self.windows = fingerprint([list(map(int, groups)), held]) if len(groups) > held else None
        """Fingerprint of the groups that are shuffled together; None if the rows are shuffled as a
        whole."""
        self._epoch = -1
        self._windows: list[np.ndarray] = []  # groups of each, in this epoch
        self._ends = np.empty(0, np.int64)  # positions, in this epoch
        self._shuffled: tuple[int, np.ndarray] = (-1, np.empty(0, np.int64))

    def index(self, turn: int) -> int:
        """Return the row of a draw."""
        epoch, position = divmod(turn, self._rows)
        if epoch != self._epoch:
            self._begin(epoch)
        window = int(np.searchsorted(self._ends, position, side="right"))
        if self._shuffled[0] != window:
            chosen = self._windows[window]
            rows = np.concatenate(
                [self._begins[g] + np.arange(int(self._sizes[g])) for g in chosen]
            )
            key = (*self._key, window) if len(self._windows) > 1 else self._key
            self._shuffled = window, rows[self._generator(epoch, *key).permutation(len(rows))]
        return int(self._shuffled[1][position - (self._ends[window - 1] if window else 0)])

    def _begin(self, epoch: int) -> None:
        groups = np.arange(len(self._sizes))
        if len(groups) > self._held:
            groups = self._generator(epoch, *self._key).permutation(len(groups))
        self._windows = [groups[at : at + self._held] for at in range(0, len(groups), self._held)]
        self._ends = np.cumsum([self._sizes[window].sum() for window in self._windows])
        self._epoch, self._shuffled = epoch, (-1, self._shuffled[1])

    def _generator(self, epoch: int, *key: int) -> np.random.Generator:
        return np.random.default_rng(np.random.SeedSequence([self._seed, epoch], spawn_key=key))


class _Blocks:
    """The source of every draw from a mixture, :data:`_BLOCK` draws at a time."""

    def __init__(self, weights: Sequence[float], seed: int) -> None:
        self._ends = np.cumsum(weights) / sum(weights)
        self._ends[-1] = 1.0  # whatever it was rounded to
        self._seed = seed
        self._before = [
            np.zeros(len(weights), np.int64)
        ]  # draws from each source before each block
        self._block: tuple[int, np.ndarray] = (-1, np.empty(0, np.int64))

    def locate(self, number: int) -> tuple[int, int]:
        """Return the source of a draw, and how many draws from it came before."""
        block, place = divmod(number, _BLOCK)
        while len(self._before) <= block:
            drawn = np.bincount(self._sources(len(self._before) - 1), minlength=len(self._ends))
            self._before.append(self._before[-1] + drawn)
        sources = self._sources(block)
        source = int(sources[place])
        return source, int(
            self._before[block][source] + np.count_nonzero(sources[:place] == source)
        )

    def _sources(self, block: int) -> np.ndarray:
        """Return the source of each draw of a block: systematic sampling, then shuffled."""
        if self._block[0] != block:
            random = np.random.default_rng([self._seed, block])
            points = (np.arange(_BLOCK) + random.random()) / _BLOCK
            self._block = (
                block,
                random.permutation(np.searchsorted(self._ends, points, side="right")),
            )
        return self._block[1]
