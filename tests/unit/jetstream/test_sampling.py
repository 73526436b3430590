"""On-device sampling against float64 numpy and against the distribution itself."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_agent_rl.jetstream.sampling import Truncation, sample

VOCABULARY = 300


def draw_restricted(
    logits: np.ndarray,
    *,
    temperature=1.0,
    top_p=None,
    top_k=0,
    min_p=0.0,
    seeds=None,
    position=0,
    allowed=None,
):
    """``allowed`` bool [slots, VOCABULARY]; returns ids, log-probs, and bool [slots, VOCABULARY] of
    what was left.
    """
    slots = logits.shape[1]
    if allowed is not None:
        padded = np.pad(allowed, ((0, 0), (0, -VOCABULARY % 32)))
        allowed = np.packbits(padded, axis=1, bitorder="little").view(np.uint32)
    seeds = np.arange(slots) if seeds is None else seeds
    truncation = None
    if top_p or top_k or min_p:
        truncation = Truncation(
            *(
                jnp.full(slots, x, t)
                for x, t in ((top_p or 1, jnp.float32), (top_k, jnp.int32), (min_p, jnp.float32))
            )
        )
    ids, logprobs, support = jax.jit(sample)(
        jnp.asarray(logits, jnp.float32),
        temperature=jnp.full(slots, temperature, jnp.float32),
        truncation=truncation,
        seed=jnp.asarray(seeds, jnp.uint32),
        position=jnp.full(slots, position, jnp.int32),
        allowed=allowed,
    )
    if support is not None:
        bits = np.unpackbits(np.asarray(support).view(np.uint8), axis=1, bitorder="little").astype(
            bool
        )
        assert not bits[:, VOCABULARY:].any()
        support = bits[:, :VOCABULARY]
    return np.asarray(ids), np.asarray(logprobs), support


def draw(logits: np.ndarray, **settings):
    ids, logprobs, support = draw_restricted(logits, **settings)
    assert (support is None) == settings.keys().isdisjoint({"top_p", "top_k", "min_p"})
    return ids, logprobs


def distribution(
    logits: np.ndarray, *, temperature=1.0, top_p=1.0, top_k=0, min_p=0.0
) -> np.ndarray:
    """The textbook way, by sorting, in float64."""
    scaled = logits.astype(np.float64) / temperature
    order = np.argsort(-scaled)
    order = order[np.exp(scaled[order] - scaled.max()) >= min_p]
    support = order[: top_k or None]
    probs = np.exp(scaled[support] - scaled.max())
    probs /= probs.sum()
    if top_p < 1:
        count = np.searchsorted(np.cumsum(probs), top_p) + 1
        support = support[:count]
        probs = probs[:count] / probs[:count].sum()
    full = np.zeros(len(logits))
    full[support] = probs
    return full


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"temperature": 0.6},
        {"top_k": 5},
        {"top_p": 0.8},
        {"min_p": 0.1},
        {"top_p": 0.5, "top_k": 20, "temperature": 1.7},
        {"top_p": 0.9, "top_k": 9, "min_p": 0.3, "temperature": 1.7},
    ],
    ids=str,
)
def test_draws_follow_the_distribution_and_logprobs_are_of_it(settings: dict):
    logits = np.random.default_rng(1).standard_normal(VOCABULARY).astype(np.float32) * 2
    slots = 10_000
    ids, logprobs = draw(np.repeat(logits[:, None], slots, axis=1), **settings)
    expected = distribution(logits, **settings)
    frequencies = np.bincount(ids, minlength=VOCABULARY) / slots
    assert set(np.flatnonzero(frequencies)) <= set(np.flatnonzero(expected))
    # Bernstein's bound of a binomial proportion: 5 standard errors, and a few draws of an id that
    # is hardly ever drawn.
    standard_errors = np.sqrt(expected * (1 - expected) / slots)
    assert np.all(np.abs(frequencies - expected) <= 5 * standard_errors + 25 / 3 / slots)
    np.testing.assert_allclose(logprobs, np.log(expected[ids]), atol=2e-5)


def test_temperature_zero_takes_the_most_likely_id_and_reports_temperature_one():
    logits = np.random.default_rng(2).standard_normal((VOCABULARY, 7)).astype(np.float32)
    ids, logprobs = draw(logits, temperature=0.0)
    np.testing.assert_array_equal(ids, logits.argmax(axis=0))
    expected = [np.log(distribution(logits[:, b])[ids[b]]) for b in range(7)]
    np.testing.assert_allclose(logprobs, expected, atol=1e-5)


def test_a_seed_and_position_fix_the_draw_whatever_else_is_in_the_batch():
    logits = np.random.default_rng(3).standard_normal((VOCABULARY, 4)).astype(np.float32)
    alone, _ = draw(logits[:, 2:3], seeds=[99], position=17)
    together, _ = draw(logits, seeds=[5, 6, 99, 7], position=17)
    assert together[2] == alone[0]


def test_different_positions_draw_differently():
    flat = np.zeros((VOCABULARY, 1), np.float32)
    assert len({int(draw(flat, seeds=[1], position=p)[0][0]) for p in range(20)}) > 10


def test_an_id_with_no_weight_is_never_drawn():
    logits = np.full((VOCABULARY, 2000), -np.inf, np.float32)
    logits[[3, 250]] = 0.0
    ids, _ = draw(logits)
    assert set(ids.tolist()) == {3, 250}


@pytest.mark.parametrize(
    "settings", [{}, {"temperature": 0.6}, {"top_p": 0.5, "top_k": 9, "temperature": 1.7}], ids=str
)
def test_only_allowed_ids_are_drawn_with_logprobs_of_what_is_left(settings: dict):
    rng = np.random.default_rng(4)
    logits = (rng.standard_normal(VOCABULARY) * 2).astype(np.float32)
    allowed = rng.random(VOCABULARY) < 0.1
    slots = 20_000
    ids, logprobs, support = draw_restricted(
        np.repeat(logits[:, None], slots, axis=1), allowed=np.tile(allowed, (slots, 1)), **settings
    )
    expected = distribution(np.where(allowed, logits, -np.inf), **settings)  # float64 numpy
    frequencies = np.bincount(ids, minlength=VOCABULARY) / slots
    assert np.all(
        np.abs(frequencies - expected) <= 5 * np.sqrt(expected * (1 - expected) / slots) + 1e-9
    )
    np.testing.assert_allclose(logprobs, np.log(expected[ids]), atol=2e-5)
    assert (support == (expected > 0)).all()


@pytest.mark.parametrize(
    "settings", [{"top_k": 7}, {"top_p": 0.7}, {"min_p": 0.2, "temperature": 1.4}], ids=str
)
def test_what_was_left_to_a_draw_is_reported_bit_by_bit(settings: dict):
    logits = (np.random.default_rng(8).standard_normal((VOCABULARY, 50)) * 2).astype(np.float32)
    ids, _, support = draw_restricted(logits, **settings)
    expected = np.stack(
        [distribution(logits[:, slot], **settings) > 0 for slot in range(50)]
    )  # float64 numpy
    np.testing.assert_array_equal(support, expected)
    assert support[np.arange(50), ids].all()


def test_the_most_likely_allowed_id_is_taken_at_temperature_zero():
    logits = np.random.default_rng(5).standard_normal((VOCABULARY, 2)).astype(np.float32)
    allowed = np.ones((2, VOCABULARY), bool)
    allowed[0, logits[:, 0].argmax()] = False
    ids, _, support = draw_restricted(logits, temperature=0.0, top_p=0.5, allowed=allowed)
    assert ids.tolist() == [np.argsort(logits[:, 0])[-2], logits[:, 1].argmax()]
    np.testing.assert_array_equal(support, allowed)  # a greedy draw knows no top-p


def test_a_full_mask_changes_no_draw_bit_by_bit():
    logits = np.random.default_rng(6).standard_normal((VOCABULARY, 6)).astype(np.float32) * 3
    allowed = np.ones((6, VOCABULARY), bool)
    allowed[::2] = np.random.default_rng(7).random((3, VOCABULARY)) < 0.5
    ids, logprobs, _ = draw_restricted(logits, allowed=allowed)
    free_ids, free_logprobs = draw(logits)
    np.testing.assert_array_equal(ids[1::2], free_ids[1::2])
    np.testing.assert_array_equal(logprobs[1::2], free_logprobs[1::2])
