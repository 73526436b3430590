"""What an engine reports of its draws so that the learner can replay them, as compact bytes and text.

Router replay (Ma et al. 2025, "Stabilizing MoE Reinforcement Learning by Aligning Training and Inference Routers",
arXiv 2510.11370): engine and learner round differently, so that close router scores may choose other experts. The
learner therefore takes the engine's choices, and computes their weights from its own scores.

Sampling replay: top-p, top-k, min-p and a grammar leave a part of the vocabulary, the *support* of a draw. The learner
scores the same one, so that both normalize over the same ids. A support has one bit per id, and is text, as it travels
in JSON: at most about V / 6 characters, in one of two forms::

    "i" + base64(ids)          uint32, little-endian, ascending        a nucleus: few ids
    "m" + base64(zlib(mask))   uint32 [ceil(V / 32)], little-endian    a grammar's mask: nearly all ids
"""

from __future__ import annotations

import base64
import functools
import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np


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


Support = str
"""The ids that one restricted draw was made from, encoded as above."""
_IDS, _MASK = "i", "m"
_CACHED = 512  # a grammar leaves the same ids again and again


def mask_words(vocab_size: int) -> int:
    """Return the number of 32-bit words of a mask of the vocabulary."""
    return -(-vocab_size // 32)


def encode_supports(masks: np.ndarray) -> list[Support]:
    """Encode masks, uint32 [S, ceil(V / 32)]."""
    return [_encode(mask.tobytes()) for mask in masks]


@functools.lru_cache(_CACHED)
def _encode(mask: bytes) -> Support:
    import numpy as np

    words = np.frombuffer(mask, "<u4")
    used = np.flatnonzero(words)
    if len(used) < len(words) / 4:
        bits = np.unpackbits(words[used].view(np.uint8), bitorder="little").reshape(-1, 32)
        which, bit = np.nonzero(bits)
        if len(which) < len(words) / 2:
            return _IDS + base64.b64encode((used[which] * 32 + bit).astype("<u4").tobytes()).decode()
    return _MASK + base64.b64encode(zlib.compress(mask, 1)).decode()


def decode_supports(supports: Sequence[Support | None], vocab_size: int) -> np.ndarray:
    """Decode supports to masks, uint32 [S, ceil(V / 32)]; None has all bits set.

    Raises:
        ValueError: a support is not one of this vocabulary.
    """
    import numpy as np

    words = mask_words(vocab_size)
    masks = np.full((len(supports), words), 0xFFFFFFFF, np.uint32)
    for mask, support in zip(masks, supports, strict=True):
        if support is None:
            continue
        try:
            kind, data = support[:1], base64.b64decode(support[1:], validate=True)
            if kind == _MASK:  # of exactly this size, however much a damaged or hostile one claims to hold
                mask[:] = np.frombuffer(zlib.decompressobj().decompress(data, 4 * words), "<u4", words)
            elif kind == _IDS and data:
                ids = np.frombuffer(data, "<u4")
                mask[:] = 0
                np.bitwise_or.at(mask, ids >> 5, np.uint32(1) << (ids & 31))
            else:
                raise ValueError("it is of no known form")
        except (ValueError, IndexError, zlib.error) as error:
            raise ValueError(f"not a support of a vocabulary of {vocab_size} ids: {support[:16]!r} ({error})") from None
    return masks
