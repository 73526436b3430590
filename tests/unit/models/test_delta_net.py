"""The gated delta rule against its recurrence in float64 numpy."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_agent_rl.models.delta_net import (
    DeltaTokens,
    causal_conv,
    causal_conv_step,
    chunked_delta_rule,
    delta_step,
    delta_tokens,
    gated_rms_norm,
    unit_lower_inverse,
)
from jax_agent_rl.models.delta_tree import delta_rule_by_chunks
from jax_agent_rl.models.token_forest import plan_forest

ROWS = 2
HEADS = 4
KEY_HEADS = 2
KEY_SIZE = 8
VALUE_SIZE = 6


def random_tokens(seed: int, count: int, *, decay_scale: float = 1.0) -> DeltaTokens:
    rng = np.random.default_rng(seed)

    def draw(*shape: int) -> np.ndarray:
        return rng.standard_normal((ROWS, count, *shape)).astype(np.float32)

    return delta_tokens(
        draw(KEY_HEADS, KEY_SIZE),
        draw(KEY_HEADS, KEY_SIZE),
        draw(HEADS, VALUE_SIZE),
        decay_scale * draw(HEADS),
        2 * draw(HEADS),
        decay_log=jnp.log(jnp.linspace(0.02, 4.0, HEADS)),
        decay_bias=jnp.linspace(-1.0, 1.0, HEADS),
    )


def random_state(seed: int) -> jax.Array:
    rng = np.random.default_rng(seed)
    shape = (ROWS, HEADS, KEY_SIZE, VALUE_SIZE)
    return jnp.asarray(rng.standard_normal(shape), jnp.float32)


def recurrence(tokens: DeltaTokens, state: jax.Array) -> tuple[np.ndarray, np.ndarray]:
    """Outputs [B, T, H, v] and the states before and after each token, [T + 1, B, H, k, v]."""
    q, k, v, log_decay, beta = (np.asarray(x, np.float64) for x in tokens)
    memory = np.asarray(state, np.float64)
    outputs = []
    states = [memory]
    for t in range(q.shape[1]):
        memory = memory * np.exp(log_decay[:, t])[..., None, None]
        answer = np.einsum("bhk,bhkv->bhv", k[:, t], memory)
        correction = beta[:, t, :, None] * (v[:, t] - answer)
        memory = memory + np.einsum("bhk,bhv->bhkv", k[:, t], correction)
        outputs.append(np.einsum("bhk,bhkv->bhv", q[:, t], memory))
        states.append(memory)
    return np.stack(outputs, axis=1), np.stack(states)


@pytest.mark.parametrize("size", [1, 5, 64])
@pytest.mark.parametrize("keys", ["random", "equal"])
def test_a_triangular_inverse_and_its_gradient_are_accurate_for_any_keys(size: int, keys: str):
    rng = np.random.default_rng(size)
    lower = rng.random((ROWS, size, size)) if keys == "random" else np.ones((ROWS, size, size))
    lower = np.tril(lower, -1).astype(np.float32)
    weights = rng.standard_normal(lower.shape).astype(np.float32)
    inverse, pull = jax.vjp(unit_lower_inverse, jnp.asarray(lower))
    (gradient,) = pull(weights)

    expected = np.linalg.inv(np.eye(size) + lower.astype(np.float64))
    transposed = expected.swapaxes(-1, -2)
    expected_gradient = np.tril(-transposed @ weights @ transposed, -1)
    np.testing.assert_allclose(inverse, expected, atol=2e-5)
    scale = max(1.0, np.abs(expected_gradient).max())
    np.testing.assert_allclose(gradient / scale, expected_gradient / scale, atol=1e-5)


def test_steps_equal_the_recurrence():
    tokens = random_tokens(0, 12)
    state = random_state(1)
    outputs, states = recurrence(tokens, state)
    for t in range(12):
        token = jax.tree.map(lambda x, t=t: x[:, t], tokens)
        output, state = delta_step(token, state)
        np.testing.assert_allclose(output, outputs[:, t], atol=1e-5)
        np.testing.assert_allclose(state, states[t + 1], atol=1e-5)


def chunks_and_gradient(tokens: DeltaTokens, state: jax.Array) -> tuple:
    results, pull = jax.vjp(lambda *inputs: chunked_delta_rule(*inputs, chunk=16), tokens, state)
    return results, pull(results)


def forest_and_gradient(tokens: DeltaTokens, state: jax.Array) -> tuple:
    forest = plan_forest(jnp.full((ROWS, 40), 40), chunk=16)
    outputs, pull = jax.vjp(lambda tokens: delta_rule_by_chunks(tokens, forest), tokens)
    return outputs, pull(outputs)


def first_step(tokens: DeltaTokens, state: jax.Array) -> tuple:
    return delta_step(jax.tree.map(lambda x: x[:, 0], tokens), state)


@pytest.mark.parametrize("function", [first_step, chunks_and_gradient, forest_and_gradient])
def test_tpus_and_gpus_are_told_to_round_no_product(function: Callable[..., tuple]):
    """What states, their decays and gradients are made of stays float32."""
    traced = jax.jit(function).trace(random_tokens(0, 40), random_state(1))
    program = traced.lower(lowering_platforms=("tpu",)).as_text()
    products = [line for line in program.splitlines() if "dot_general" in line]
    assert products
    for product in products:
        assert "precision = [HIGHEST, HIGHEST]" in product


@pytest.mark.parametrize("count", [1, 16, 75])
def test_chunks_equal_the_recurrence_at_every_boundary(count: int):
    tokens = random_tokens(count, count)
    state = random_state(2)
    outputs, states = recurrence(tokens, state)
    chunk_outputs, boundaries = chunked_delta_rule(tokens, state, chunk=16)

    np.testing.assert_allclose(chunk_outputs, outputs, atol=2e-5)
    ends = [*range(0, count, 16), count]
    np.testing.assert_allclose(boundaries, states[ends], atol=2e-5)


def test_a_fast_decay_neither_overflows_nor_leaves_anything_behind():
    tokens = random_tokens(3, 40)._replace(log_decay=jnp.full((ROWS, 40, HEADS), -90.0))

    def loss(tokens: DeltaTokens) -> jax.Array:
        return jnp.sum(chunked_delta_rule(tokens, random_state(3), chunk=16)[0] ** 2)

    outputs, _ = recurrence(tokens, random_state(3))
    chunk_outputs, _ = chunked_delta_rule(tokens, random_state(3), chunk=16)
    np.testing.assert_allclose(chunk_outputs, outputs, atol=1e-5)
    for gradient in jax.grad(loss)(tokens):
        assert np.isfinite(gradient).all()


def test_gradients_of_chunks_equal_those_of_steps():
    def by_steps(tokens: DeltaTokens, state: jax.Array) -> jax.Array:
        def body(state: jax.Array, token: DeltaTokens) -> tuple[jax.Array, jax.Array]:
            output, state = delta_step(token, state)
            return state, output

        by_token = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), tokens)
        final, outputs = jax.lax.scan(body, state, by_token)
        return jnp.sum(jnp.sin(outputs)) + jnp.sum(jnp.sin(final))

    def by_chunks(tokens: DeltaTokens, state: jax.Array) -> jax.Array:
        outputs, boundaries = chunked_delta_rule(tokens, state, chunk=16)
        return jnp.sum(jnp.sin(outputs)) + jnp.sum(jnp.sin(boundaries[-1]))

    tokens = random_tokens(4, 45)
    expected = jax.grad(by_steps, argnums=(0, 1))(tokens, random_state(4))
    actual = jax.grad(by_chunks, argnums=(0, 1))(tokens, random_state(4))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), actual, expected)


def test_padding_leaves_the_state():
    tokens = random_tokens(5, 20)
    is_padding = jnp.arange(20)[:, None] >= 9
    padded = tokens._replace(
        log_decay=jnp.where(is_padding, 0.0, tokens.log_decay),
        beta=jnp.where(is_padding, 0.0, tokens.beta),
    )
    _, boundaries = chunked_delta_rule(padded, random_state(5), chunk=8)
    _, states = recurrence(tokens, random_state(5))
    np.testing.assert_allclose(boundaries[-1], states[9], atol=1e-5)


def test_a_convolution_goes_on_from_any_state():
    rng = np.random.default_rng(6)
    x = rng.standard_normal((ROWS, 11, 5)).astype(np.float32)
    weight = rng.standard_normal((5, 4)).astype(np.float32)
    zeros = jnp.zeros((ROWS, 3, 5))

    padded = np.concatenate([np.zeros((ROWS, 3, 5)), x.astype(np.float64)], axis=1)
    total = np.stack([np.sum(padded[:, t : t + 4] * weight.T, axis=1) for t in range(11)], axis=1)
    expected = total / (1 + np.exp(-total))

    y, inputs = causal_conv(x, weight, zeros)
    np.testing.assert_allclose(y, expected, atol=1e-6)

    first, inputs = causal_conv(x[:, :2], weight, zeros)
    state = inputs[:, 2:5]
    outputs = [first]
    for t in range(2, 11):
        y, state = causal_conv_step(x[:, t], weight, state)
        outputs.append(y[:, None])
    np.testing.assert_allclose(np.concatenate(outputs, axis=1), expected, atol=1e-6)


def test_the_gated_norm_equals_its_formula():
    rng = np.random.default_rng(7)
    x, gate = rng.standard_normal((2, 3, 5, 8))
    weight = rng.standard_normal(8)
    expected = x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + 1e-6) * weight
    expected *= gate / (1 + np.exp(-gate))
    actual = gated_rms_norm(
        jnp.float32(x), jnp.float32(gate), jnp.asarray(weight, jnp.float32), eps=1e-6
    )
    np.testing.assert_allclose(actual, expected, atol=1e-5)
