"""Token ids: their bound, and the digest by which two sides compare them."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

ID_BOUND = 2**31
"""Exclusive bound of ids and counts: engines store them as int32."""


def digest_ids(ids: Sequence[int]) -> str:
    """Return a short digest of a list of token ids (BLAKE2b, 64 bits).

    The engine digests the context it conditioned on, the agent loop the ids it will pass to the
    learner: equality proves, per generation, that no token drifted.
    """
    return hashlib.blake2b(array("i", ids).tobytes(), digest_size=8).hexdigest()
