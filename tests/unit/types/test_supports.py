"""Encoded supports give back the mask they were made of, stay small, and are refused where they are
damaged.
"""

import base64
import json
import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jax_agent_rl.types.supports import decode_supports, encode_supports, mask_words
from tests.messages import raises


def masks_of(support: np.ndarray) -> np.ndarray:
    """Bits of bool [S, V]."""
    padded = np.pad(support, ((0, 0), (0, -support.shape[1] % 32)))
    return np.packbits(padded, axis=1, bitorder="little").view(np.uint32)


@given(vocab_size=st.integers(1, 3000), share=st.floats(0, 1), seed=st.integers(0, 2**32 - 1))
def test_a_support_survives_encoding_and_json(vocab_size: int, share: float, seed: int):
    rng = np.random.default_rng(seed)
    support = rng.random((3, vocab_size)) < share
    support[np.arange(3), rng.integers(vocab_size, size=3)] = True  # nothing is drawn from nothing
    masks = masks_of(support)
    supports = json.loads(json.dumps(encode_supports(masks)))
    np.testing.assert_array_equal(decode_supports(supports, vocab_size), masks)


def test_a_draw_from_all_ids_has_all_bits_set():
    assert (decode_supports([None], 70) == 0xFFFFFFFF).all()


@pytest.mark.parametrize("share", [0.001, 0.5, 0.999])
def test_a_support_takes_no_more_than_a_sixth_of_a_character_an_id(share: float):
    support = np.random.default_rng(0).random((8, 50_000)) < share
    assert max(map(len, encode_supports(masks_of(support)))) <= 50_000 / 6 + 32


def test_a_nucleus_of_ten_ids_takes_a_few_characters():
    support = np.zeros((1, 150_000), bool)
    support[0, np.random.default_rng(0).integers(150_000, size=10)] = True
    assert len(encode_supports(masks_of(support))[0]) <= 60


@pytest.mark.parametrize(
    "damaged",
    [
        "",
        "i!!!!",
        "iAAA=",
        "i" + base64.b64encode(np.uint32(10**6).tobytes()).decode(),
        "m" + base64.b64encode(b"not zlib").decode(),
        "m" + base64.b64encode(zlib.compress(b"\0" * 4)).decode(),
    ],
)
def test_damaged_supports_are_refused(damaged: str):
    with raises(ValueError, key="support", value="100 ids"):
        decode_supports([damaged], 100)


def test_a_mask_that_claims_gigabytes_inflates_to_a_masks_size():
    bomb = "m" + base64.b64encode(zlib.compress(b"\xff" * 50_000_000)).decode()
    assert decode_supports([bomb], 100).shape == (1, mask_words(100))
