"""The experts that an engine chose, so that the learner can replay them.

Engine and learner round differently, so that close router scores may choose other experts. The
learner therefore takes the engine's choices, and computes their weights from its own scores (router
replay).

References: Ma et al. 2025, Stabilizing MoE Reinforcement Learning by Aligning Training and
    Inference Routers, arXiv 2510.11370.
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

    A position takes M x k bytes, or twice as many with more than 256 experts.

    Attributes:
        start: the first position.
        shape: n positions, M layers with experts, k experts per token.
        data: their numbers in C order: uint8, or little-endian uint16 if ``wide``.
        wide: two bytes each.
    """

    start: int
    shape: tuple[int, int, int]
    data: bytes
    wide: bool = False

    def __post_init__(self) -> None:
        bytes_each = 2 if self.wide else 1
        size = math.prod(self.shape) * bytes_each
        if self.start < 0 or len(self.shape) != 3 or len(self.data) != size:
            raise ValueError(
                f"routed experts {self.shape} from {self.start} on take {size} bytes, not"
                f" {len(self.data)}"
            )

    @classmethod
    def of(cls, start: int, choices: Any) -> RoutedExperts:
        """Encode a numpy array of choices [n, M, k], unsigned integers of one byte or two."""
        n, layers, per_token = choices.shape
        wide = choices.dtype.itemsize > 1
        data = choices.astype("<u2" if wide else "u1").tobytes()
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
        positions, *layers_and_experts = self.shape
        count = min(max(end - self.start, 0), positions)
        bytes_each = len(self.data) // positions if positions else 0
        return replace(
            self,
            shape=(count, *layers_and_experts),
            data=self.data[: count * bytes_each],
        )


def routed_to_json(fields: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return the fields of a :class:`RoutedExperts` with its bytes in base64."""
    if fields is None:
        return None
    return {**fields, "data": base64.b64encode(fields["data"]).decode()}


def routed_from_json(data: Mapping[str, Any] | None) -> RoutedExperts | None:
    """Invert :func:`routed_to_json`."""
    if data is None:
        return None
    fields = dict(data)
    fields["data"] = base64.b64decode(data["data"], validate=True)
    fields["shape"] = tuple(data["shape"])
    return RoutedExperts(**fields)


def join_routed(first: RoutedExperts | None, second: RoutedExperts | None) -> RoutedExperts | None:
    """Join the choices of two consecutive parts of a context.

    Where both have a position, ``first`` counts, as its ids were sampled with it. What is beyond a
    gap, or of another model, is left out.

    >>> a = RoutedExperts(start=0, shape=(2, 1, 1), data=bytes([5, 6]))
    >>> b = RoutedExperts(start=1, shape=(2, 1, 1), data=bytes([7, 8]))
    >>> joined = join_routed(a, b)
    >>> joined.start, joined.shape, list(joined.data)
    (0, (3, 1, 1), [5, 6, 8])
    """
    if first is None or second is None:
        return first or second

    same_model = first.shape[1:] == second.shape[1:] and first.wide == second.wide
    continues = second.start <= first.end < second.end
    if not same_model or not continues:
        return first

    bytes_each = len(second.data) // second.shape[0]
    overlap = (first.end - second.start) * bytes_each
    count = first.shape[0] + second.end - first.end
    return replace(
        first,
        shape=(count, *first.shape[1:]),
        data=first.data + second.data[overlap:],
    )
