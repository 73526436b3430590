"""Blockwise log-probs and entropies against a plain log-softmax: values in float64 numpy, gradients
by jax.grad.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import ClosedJaxpr, Jaxpr

from jax_agent_rl.learner import linear_logprobs as module
from jax_agent_rl.learner.linear_logprobs import linear_logprobs, linear_top_k

CHUNKS = 2
TOKENS = 5
HIDDEN = 8
TEMPERATURE = 0.7
# Vocabularies of one block, of whole blocks, and that fill neither blocks nor shards.
LAYOUTS = [(11, 1), (64, 1), (64, 2), (67, 1), (67, 2), (101, 4)]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BLOCK", 16)


def inputs(vocab: int) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    rng = np.random.default_rng(vocab)
    hidden = jnp.asarray(rng.normal(size=(CHUNKS, TOKENS, HIDDEN)), jnp.float32)
    head = jnp.asarray(rng.normal(size=(vocab, HIDDEN)), jnp.float32)
    ids = jnp.asarray(rng.integers(0, vocab, (CHUNKS, TOKENS)), jnp.int32)
    return hidden, head, ids, jnp.ones((CHUNKS, TOKENS), bool)


def plain(hidden: jax.Array, head: jax.Array, ids: jax.Array) -> tuple[jax.Array, jax.Array]:
    logs = jax.nn.log_softmax(hidden @ head.T / TEMPERATURE, axis=-1)
    return jnp.take_along_axis(logs, ids[..., None], axis=-1)[..., 0], -jnp.sum(
        jnp.exp(logs) * logs, axis=-1
    )


@pytest.mark.parametrize(("vocab", "shards"), LAYOUTS)
def test_values_are_those_of_a_float64_log_softmax(vocab: int, shards: int) -> None:
    hidden, head, ids, valid = inputs(vocab)
    logprob, entropy = linear_logprobs(hidden, head, ids, valid, TEMPERATURE, shards)
    scores = np.asarray(hidden, np.float64) @ np.asarray(head, np.float64).T / TEMPERATURE
    logs = scores - np.log(np.exp(scores).sum(-1, keepdims=True))
    np.testing.assert_allclose(
        logprob, np.take_along_axis(logs, np.asarray(ids)[..., None], -1)[..., 0], atol=2e-5
    )
    np.testing.assert_allclose(entropy, -(np.exp(logs) * logs).sum(-1), atol=2e-5)


@pytest.mark.parametrize(("vocab", "shards"), LAYOUTS)
def test_gradients_of_both_outputs_are_those_of_the_plain_form(vocab: int, shards: int) -> None:
    hidden, head, ids, valid = inputs(vocab)
    weights = np.random.default_rng(1).normal(size=(2, CHUNKS, TOKENS)).astype(np.float32)

    def weighted(outputs: tuple[jax.Array, jax.Array]) -> jax.Array:
        return jnp.sum(weights[0] * outputs[0]) + jnp.sum(weights[1] * outputs[1])

    ours = jax.grad(
        lambda h, w: weighted(linear_logprobs(h, w, ids, valid, TEMPERATURE, shards)), (0, 1)
    )(hidden, head)
    expected = jax.grad(lambda h, w: weighted(plain(h, w, ids)), (0, 1))(hidden, head)
    for gradient, wanted in zip(ours, expected, strict=True):
        np.testing.assert_allclose(gradient, wanted, atol=5e-5)


@pytest.mark.parametrize("kept_logits", [1, 2])
def test_kept_logits_change_nothing_and_save_their_products(kept_logits: int) -> None:
    hidden, head, ids, valid = inputs(67)

    def loss(hidden: jax.Array, head: jax.Array, kept_logits: int) -> jax.Array:
        logprob, entropy = linear_logprobs(hidden, head, ids, valid, TEMPERATURE, 1, kept_logits)
        return jnp.sum(logprob**2) + jnp.sum(entropy**2)

    recomputed = jax.value_and_grad(loss, (0, 1))(hidden, head, 0)
    actual = jax.value_and_grad(loss, (0, 1))(hidden, head, kept_logits)
    jax.tree.map(np.testing.assert_array_equal, actual, recomputed)
    without = jax.make_jaxpr(lambda h, w: jax.grad(loss, (0, 1))(h, w, 2))(hidden, head)
    again = jax.make_jaxpr(lambda h, w: jax.grad(loss, (0, 1))(h, w, 0))(hidden, head)
    assert str(without).count("dot_general") == str(again).count("dot_general") - 1


@pytest.mark.parametrize("kept_logits", [0, 2])
def test_a_chunk_without_valid_tokens_gives_zeros_and_no_gradient(kept_logits: int) -> None:
    hidden, head, ids, valid = inputs(67)
    valid = valid.at[1].set(False)
    logprob, entropy = linear_logprobs(hidden, head, ids, valid, TEMPERATURE, 1, kept_logits)
    assert not logprob[1].any()
    assert not entropy[1].any()
    assert logprob[0].all()

    def loss(hidden: jax.Array, head: jax.Array) -> jax.Array:
        return linear_logprobs(hidden, head, ids, valid, TEMPERATURE, 1, kept_logits)[0].sum()

    d_hidden, d_head = jax.grad(loss, (0, 1))(hidden, head)
    first = jax.grad(lambda h, w: plain(h, w, ids[:1])[0].sum(), (0, 1))(hidden[:1], head)
    assert not d_hidden[1].any()
    np.testing.assert_allclose(d_hidden[:1], first[0], atol=5e-5)
    np.testing.assert_allclose(d_head, first[1], atol=5e-5)


K = 5


def candidates(vocab: int) -> jax.Array:
    rng = np.random.default_rng(vocab + 1)
    drawn = np.zeros((CHUNKS, TOKENS, K), int)
    for chunk, token in np.ndindex(CHUNKS, TOKENS):
        drawn[chunk, token] = rng.choice(vocab, K, replace=False)
    return jnp.asarray(drawn, jnp.int32)


@pytest.mark.parametrize(("vocab", "shards"), LAYOUTS)
@pytest.mark.parametrize("kept_logits", [0, 1])
def test_candidates_have_the_log_probs_and_gradients_of_the_plain_form(
    vocab: int, shards: int, kept_logits: int
) -> None:
    hidden, head, ids, valid = inputs(vocab)
    chosen = candidates(vocab)
    weights = np.random.default_rng(2).normal(size=(CHUNKS, TOKENS, K + 2)).astype(np.float32)

    def ours(hidden: jax.Array, head: jax.Array) -> jax.Array:
        logprob, entropy, candidate_logprobs = linear_logprobs(
            hidden, head, ids, valid, TEMPERATURE, shards, kept_logits, candidates=chosen
        )
        return jnp.concatenate(
            [logprob[..., None], entropy[..., None], candidate_logprobs], axis=-1
        )

    def wanted(hidden: jax.Array, head: jax.Array) -> jax.Array:
        logs = jax.nn.log_softmax(hidden @ head.T / TEMPERATURE, axis=-1)
        logprob, entropy = plain(hidden, head, ids)
        candidate_logprobs = jnp.take_along_axis(logs, chosen, axis=-1)
        return jnp.concatenate(
            [logprob[..., None], entropy[..., None], candidate_logprobs], axis=-1
        )

    np.testing.assert_allclose(ours(hidden, head), wanted(hidden, head), atol=2e-5)
    gradients = (
        jax.grad(lambda h, w, f=f: jnp.sum(weights * f(h, w)), (0, 1))(hidden, head)
        for f in (ours, wanted)
    )
    for gradient, expected in zip(*gradients, strict=True):
        np.testing.assert_allclose(gradient, expected, atol=5e-5)


@pytest.mark.parametrize(("vocab", "shards"), [(67, 1), (67, 2)])
@pytest.mark.parametrize("kept_logits", [0, 1])
def test_softcapped_logits_have_the_values_and_gradients_of_the_plain_form(
    vocab: int, shards: int, kept_logits: int
) -> None:
    hidden, head, ids, valid = inputs(vocab)
    chosen = candidates(vocab)
    cap = 2.5  # of the order of the logits, so that some are flattened
    weights = np.random.default_rng(3).normal(size=(CHUNKS, TOKENS, K + 2)).astype(np.float32)

    def ours(hidden: jax.Array, head: jax.Array) -> jax.Array:
        logprob, entropy, candidate_logprobs = linear_logprobs(
            hidden, head, ids, valid, TEMPERATURE, shards, kept_logits, cap, candidates=chosen
        )
        return jnp.concatenate(
            [logprob[..., None], entropy[..., None], candidate_logprobs], axis=-1
        )

    def wanted(hidden: jax.Array, head: jax.Array) -> jax.Array:
        logits = cap * jnp.tanh(hidden @ head.T / cap)
        logs = jax.nn.log_softmax(logits / TEMPERATURE, axis=-1)
        logprob = jnp.take_along_axis(logs, ids[..., None], axis=-1)
        entropy = -jnp.sum(jnp.exp(logs) * logs, axis=-1, keepdims=True)
        candidate_logprobs = jnp.take_along_axis(logs, chosen, axis=-1)
        return jnp.concatenate([logprob, entropy, candidate_logprobs], axis=-1)

    np.testing.assert_allclose(ours(hidden, head), wanted(hidden, head), atol=2e-5)
    gradients = (
        jax.grad(lambda h, w, f=f: jnp.sum(weights * f(h, w)), (0, 1))(hidden, head)
        for f in (ours, wanted)
    )
    for gradient, expected in zip(*gradients, strict=True):
        np.testing.assert_allclose(gradient, expected, atol=5e-5)


def test_softcapped_logits_of_a_support_leave_no_gradient_to_excluded_ids() -> None:
    hidden, head, ids, valid = inputs(67)
    cap = 2.5
    support_ids = np.arange(0, 67, 2)
    ids = ids // 2 * 2
    mask = np.zeros(3, np.uint32)
    for id_ in support_ids:
        mask[id_ // 32] |= np.uint32(1 << id_ % 32)
    support = jnp.broadcast_to(jnp.asarray(mask), (CHUNKS, TOKENS, 3))

    def ours(hidden: jax.Array, head: jax.Array) -> jax.Array:
        return linear_logprobs(hidden, head, ids, valid, TEMPERATURE, softcap=cap, support=support)[
            0
        ].sum()

    def wanted(hidden: jax.Array, head: jax.Array) -> jax.Array:
        logits = cap * jnp.tanh(hidden @ head[support_ids].T / cap)
        logs = jax.nn.log_softmax(logits / TEMPERATURE, axis=-1)
        return jnp.take_along_axis(logs, ids[..., None] // 2, axis=-1).sum()

    np.testing.assert_allclose(ours(hidden, head), wanted(hidden, head), atol=2e-5)
    gradients = [jax.grad(f, (0, 1))(hidden, head) for f in (ours, wanted)]
    for gradient, expected in zip(*gradients, strict=True):
        np.testing.assert_allclose(gradient, expected, atol=5e-5)


@pytest.mark.parametrize(("vocab", "shards"), LAYOUTS)
def test_the_likeliest_ids_are_those_of_a_float64_sort(vocab: int, shards: int) -> None:
    hidden, head, _, valid = inputs(vocab)
    ids, logprobs = linear_top_k(
        hidden, head, valid, TEMPERATURE, K, vocab_size=vocab - 3, vocab_shards=shards
    )
    scores = np.asarray(hidden, np.float64) @ np.asarray(head, np.float64).T / TEMPERATURE
    logs = (scores - np.log(np.exp(scores).sum(-1, keepdims=True)))[..., : vocab - 3]
    order = np.argsort(-logs, axis=-1)[..., :K]
    np.testing.assert_array_equal(ids, order)
    np.testing.assert_allclose(logprobs, np.take_along_axis(logs, order, -1), atol=2e-5)


def test_the_likeliest_ids_of_softcapped_logits_have_their_log_probs() -> None:
    hidden, head, _, valid = inputs(67)
    ids, logprobs = linear_top_k(hidden, head, valid, TEMPERATURE, K, vocab_size=67, softcap=2.5)
    logits = np.asarray(hidden, np.float64) @ np.asarray(head, np.float64).T
    scores = 2.5 * np.tanh(logits / 2.5) / TEMPERATURE
    logs = scores - np.log(np.exp(scores).sum(-1, keepdims=True))
    np.testing.assert_allclose(logprobs, -np.sort(-logs, axis=-1)[..., :K], atol=2e-5)
    np.testing.assert_allclose(np.take_along_axis(logs, np.asarray(ids), -1), logprobs, atol=2e-5)


def test_the_likeliest_ids_of_a_support_are_among_its_ids() -> None:
    hidden, head, _, valid = inputs(67)
    support_ids = [3, 33, 40, 64]
    mask = np.zeros(3, np.uint32)
    for id_ in support_ids:
        mask[id_ // 32] |= np.uint32(1 << id_ % 32)
    support = jnp.broadcast_to(jnp.asarray(mask), (CHUNKS, TOKENS, 3))
    ids, logprobs = linear_top_k(
        hidden, head, valid, TEMPERATURE, 5, vocab_size=67, support=support
    )
    scores = (np.asarray(hidden, np.float64) @ np.asarray(head, np.float64).T / TEMPERATURE)[
        ..., support_ids
    ]
    logs = scores - np.log(np.exp(scores).sum(-1, keepdims=True))
    np.testing.assert_array_equal(
        np.sort(ids[..., :4], axis=-1), np.broadcast_to(support_ids, (CHUNKS, TOKENS, 4))
    )
    np.testing.assert_allclose(logprobs[..., :4], -np.sort(-logs, axis=-1), atol=2e-5)
    assert (np.asarray(logprobs[..., 4]) <= module.NEGATIVE / 2).all()


def test_no_array_of_tokens_by_vocabulary_exists_forward_or_backward() -> None:
    hidden, head, ids, valid = inputs(101)

    def loss(hidden: jax.Array, head: jax.Array) -> jax.Array:
        outputs = linear_logprobs(hidden, head, ids, valid, TEMPERATURE, candidates=candidates(101))
        return sum(x.sum() for x in outputs)

    largest = max(_sizes(jax.make_jaxpr(jax.grad(loss, (0, 1)))(hidden, head).jaxpr))
    padded = 7 * 16 * HIDDEN  # 101 ids in seven blocks
    assert largest <= padded < CHUNKS * TOKENS * 101


def _sizes(jaxpr: Jaxpr) -> list[int]:
    """Sizes of all arrays a program makes, inner programs included."""
    sizes = []
    for equation in jaxpr.eqns:
        sizes += [v.aval.size for v in equation.outvars if hasattr(v.aval, "size")]
    inner = []
    for equation in jaxpr.eqns:
        inner += jax.tree.leaves(list(equation.params.values()))
    for value in inner:
        if isinstance(value, Jaxpr | ClosedJaxpr):
            sizes += _sizes(value.jaxpr if isinstance(value, ClosedJaxpr) else value)
    return sizes
