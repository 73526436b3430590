"""On-device sampling against float64 numpy and against the distribution itself."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_agent_rl.jetstream.sampling import sample

VOCABULARY = 300


def draw(logits: np.ndarray, *, temperature=1.0, top_p=1.0, top_k=0, seeds=None, position=0):
    slots = logits.shape[1]
    seeds = np.arange(slots) if seeds is None else seeds
    ids, logprobs = jax.jit(sample)(
        jnp.asarray(logits, jnp.float32),
        temperature=jnp.full(slots, temperature, jnp.float32),
        top_p=jnp.full(slots, top_p, jnp.float32),
        top_k=jnp.full(slots, top_k, jnp.int32),
        seed=jnp.asarray(seeds, jnp.uint32),
        position=jnp.full(slots, position, jnp.int32),
    )
    return np.asarray(ids), np.asarray(logprobs)


def distribution(logits: np.ndarray, *, temperature=1.0, top_p=1.0, top_k=0) -> np.ndarray:
    """The textbook way, by sorting, in float64."""
    scaled = logits.astype(np.float64) / temperature
    order = np.argsort(-scaled)
    kept = order[: top_k or None]
    probs = np.exp(scaled[kept] - scaled.max())
    probs /= probs.sum()
    if top_p < 1:
        count = np.searchsorted(np.cumsum(probs), top_p) + 1
        kept, probs = kept[:count], probs[:count] / probs[:count].sum()
    full = np.zeros(len(logits))
    full[kept] = probs
    return full


@pytest.mark.parametrize(
    "settings",
    [{}, {"temperature": 0.6}, {"top_k": 5}, {"top_p": 0.8}, {"top_p": 0.5, "top_k": 20, "temperature": 1.7}],
    ids=str,
)
def test_draws_follow_the_distribution_and_logprobs_are_of_it(settings: dict):
    logits = np.random.default_rng(1).standard_normal(VOCABULARY).astype(np.float32) * 2
    slots = 40_000
    ids, logprobs = draw(np.repeat(logits[:, None], slots, axis=1), **settings)
    expected = distribution(logits, **settings)
    frequencies = np.bincount(ids, minlength=VOCABULARY) / slots
    assert set(np.flatnonzero(frequencies)) <= set(np.flatnonzero(expected))
    # 5 standard errors of a binomial proportion
    assert np.all(np.abs(frequencies - expected) <= 5 * np.sqrt(expected * (1 - expected) / slots) + 1e-9)
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
