"""Supports of restricted draws: the ids that top-p, top-k, min-p and a grammar left, one bit per id of the vocabulary.

The engine reports the support of every restricted draw and the learner scores the same one, so that both normalize over
the same ids. A support is text, as it travels in JSON: at most about V / 6 characters, in one of two forms::

    "i" + base64(ids)          uint32, little-endian, ascending        a nucleus: few ids
    "m" + base64(zlib(mask))   uint32 [ceil(V / 32)], little-endian    a grammar's mask: nearly all ids
"""

from __future__ import annotations

import base64
import functools
import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

from jax_agent_rl.types import Support

if TYPE_CHECKING:
    import numpy as np

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
                mask[:] = np.frombuffer(_exactly(zlib.decompressobj().decompress(data, 4 * words), 4 * words), "<u4")
            elif kind == _IDS and data:
                ids = np.frombuffer(data, "<u4")
                mask[:] = 0
                np.bitwise_or.at(mask, ids >> 5, np.uint32(1) << (ids & 31))
            else:
                raise ValueError("it is of no known form")
        except (ValueError, IndexError, zlib.error) as error:
            raise ValueError(f"not a support of a vocabulary of {vocab_size} ids: {support[:16]!r} ({error})") from None
    return masks


def _exactly(data: bytes, size: int) -> bytes:
    if len(data) != size:
        raise ValueError(f"{len(data)} bytes instead of {size}")
    return data
