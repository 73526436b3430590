"""The ids that restricted draws were made from, so that the learner can replay them.

Top-p, top-k, min-p and a grammar leave a part of the vocabulary, the *support* of a draw. The
learner scores the same one, so that both normalize over the same ids (sampling replay).

A support has one bit per id, and is text, as it travels in JSON: at most about V / 6 characters, in
one of two forms::

    "i" + base64(ids)          uint32, little-endian, ascending        few ids: a nucleus
    "m" + base64(zlib(mask))   uint32 [ceil(V / 32)], little-endian    nearly all: a grammar's mask
"""

from __future__ import annotations

import base64
import functools
import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np


Support = str
"""The ids that one restricted draw was made from, encoded as above."""
_IDS = "i"
_MASK = "m"
_CACHE_SIZE = 512  # a grammar leaves the same ids again and again


def mask_words(vocab_size: int) -> int:
    """Return the number of 32-bit words of a mask of the vocabulary."""
    return -(-vocab_size // 32)


def encode_supports(masks: np.ndarray) -> list[Support]:
    """Encode masks, uint32 [S, ceil(V / 32)]."""
    return [_encode(mask.tobytes()) for mask in masks]


@functools.lru_cache(_CACHE_SIZE)
def _encode(mask: bytes) -> Support:
    import numpy as np

    words = np.frombuffer(mask, "<u4")
    nonzero_words = np.flatnonzero(words)
    if len(nonzero_words) < len(words) / 4:
        nonzero_bytes = words[nonzero_words].view(np.uint8)
        bits = np.unpackbits(nonzero_bytes, bitorder="little").reshape(-1, 32)
        row, bit = np.nonzero(bits)
        if len(row) < len(words) / 2:
            ids = nonzero_words[row] * 32 + bit
            return _IDS + base64.b64encode(ids.astype("<u4").tobytes()).decode()
    return _MASK + base64.b64encode(zlib.compress(mask, 1)).decode()


def decode_supports(supports: Sequence[Support | None], vocab_size: int) -> np.ndarray:
    """Decode supports to masks, uint32 [S, ceil(V / 32)]; None has all bits set.

    Raises:
        ValueError: a support is not one of this vocabulary.
    """
    import numpy as np

    num_words = mask_words(vocab_size)
    masks = np.full((len(supports), num_words), 0xFFFFFFFF, np.uint32)
    for mask, support in zip(masks, supports, strict=True):
        if support is None:
            continue
        try:
            kind = support[:1]
            data = base64.b64decode(support[1:], validate=True)
            if kind == _MASK:
                # Read exactly this size, however much a damaged or hostile one claims to hold.
                unpacked = zlib.decompressobj().decompress(data, 4 * num_words)
                mask[:] = np.frombuffer(unpacked, "<u4", num_words)
            elif kind == _IDS and data:
                ids = np.frombuffer(data, "<u4")
                mask[:] = 0
                np.bitwise_or.at(mask, ids >> 5, np.uint32(1) << (ids & 31))
            else:
                raise ValueError("it is of no known form")
        except (ValueError, IndexError, zlib.error) as error:
            raise ValueError(
                f"not a support of a vocabulary of {vocab_size} ids: {support[:16]!r} ({error})"
            ) from None
    return masks
