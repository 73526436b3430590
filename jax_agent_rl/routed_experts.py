"""Which experts a mixture's routers chose, as compact bytes that travel from engines to the learner.

Router replay (Ma et al. 2025, "Stabilizing MoE Reinforcement Learning by Aligning Training and Inference Routers",
arXiv 2510.11370): engine and learner round differently, so that close router scores may choose other experts. The
learner therefore takes the engine's choices, and computes their weights from its own scores.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class RoutedExperts:
    """The chosen experts of n consecutive positions of a context.

    A position takes L x k bytes, or twice as many with more than 256 experts.

    Attributes:
        start: the first position.
        shape: n positions, L layers, k experts per token.
        data: their numbers in C order: uint8, or little-endian uint16 if ``wide``.
        wide: two bytes each.
    """

    start: int
    shape: tuple[int, int, int]
    data: bytes
    wide: bool = False

    def __post_init__(self) -> None:
        size = math.prod(self.shape) * (1 + self.wide)
        if self.start < 0 or len(self.shape) != 3 or len(self.data) != size:
            raise ValueError(
                f"routed experts {self.shape} from {self.start} on take {size} bytes, not {len(self.data)}"
            )

    @classmethod
    def of(cls, start: int, chosen: Any) -> RoutedExperts:
        """Encode a numpy array of choices [n, L, k], unsigned integers of one byte or two."""
        n, layers, per_token = chosen.shape
        wide = chosen.dtype.itemsize > 1
        data = chosen.astype("<u2" if wide else "u1").tobytes()
        return cls(start=start, shape=(n, layers, per_token), data=data, wide=wide)

    @property
    def numbers(self) -> memoryview:
        """The choices, flat; ``np.reshape`` them to ``shape``."""
        return memoryview(self.data).cast("H" if self.wide else "B")

    @property
    def end(self) -> int:
        """One past the last position."""
        return self.start + self.shape[0]

    def until(self, end: int) -> RoutedExperts:
        """Return the positions below ``end``."""
        count = min(max(end - self.start, 0), self.shape[0])
        bytes_each = len(self.data) // self.shape[0] if self.shape[0] else 0
        return replace(self, shape=(count, *self.shape[1:]), data=self.data[: count * bytes_each])


def to_json(fields: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return the fields of a :class:`RoutedExperts` with its bytes in base64."""
    return None if fields is None else {**fields, "data": base64.b64encode(fields["data"]).decode()}


def from_json(data: Mapping[str, Any] | None) -> RoutedExperts | None:
    """Invert :func:`to_json`."""
    if data is None:
        return None
    chosen = base64.b64decode(data["data"], validate=True)
    return RoutedExperts(**{**data, "shape": tuple(data["shape"]), "data": chosen})


def join_routed(first: RoutedExperts | None, rest: RoutedExperts | None) -> RoutedExperts | None:
    """Join choices of one context; where both have a position, ``first`` counts, as its ids were sampled with it.

    What lies beyond a gap, or is of another model, is left out.

    >>> a = RoutedExperts(start=0, shape=(2, 1, 1), data=bytes([5, 6]))
    >>> b = RoutedExperts(start=1, shape=(2, 1, 1), data=bytes([7, 8]))
    >>> joined = join_routed(a, b)
    >>> joined.start, joined.shape, list(joined.data)
    (0, (3, 1, 1), [5, 6, 8])
    """
    if first is None or rest is None:
        return first or rest
    same = first.shape[1:] == rest.shape[1:] and first.wide == rest.wide
    if not same or not rest.start <= first.end < rest.end:
        return first
    skipped = (first.end - rest.start) * (len(rest.data) // rest.shape[0])
    count = first.shape[0] + rest.end - first.end
    return replace(first, shape=(count, *first.shape[1:]), data=first.data + rest.data[skipped:])
