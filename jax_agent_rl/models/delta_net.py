"""Gated delta nets: a layer's memory of its context is one matrix per head, not keys and values.

A token first fades the matrix, then corrects what it answers to the token's key (Yang et al. 2024,
Gated Delta Networks, arXiv 2412.06464)::

    S <- exp(log_decay) S                      fade
    S <- S + k (beta (v - k S))^T              correct
    output = q S                               read

Engines take one step, or the chunks of a prompt; learners have whole rows of token trees
(``models.delta_tree``). All use the functions here, in float32.

Shapes: B rows, T tokens, H value heads, G key heads (each serves H / G adjacent value heads), k and
v the sizes of a head's keys and values, F channels of the convolution, n its kernel.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jax_agent_rl.models.layers import root_mean_square_scaled

CHUNK = 64
"""Tokens whose corrections are solved for at once."""

_NORM_EPS = 1e-6  # of queries and keys


class DeltaTokens(NamedTuple):
    """What tokens bring to the delta rule, all float32; [..] is [B] or [B, T].

    A token whose ``log_decay`` and ``beta`` are 0 leaves the state as it is: padding.

    Attributes:
        q: [.., H, k], normalized and scaled.
        k: [.., H, k], normalized.
        v: [.., H, v].
        log_decay: [.., H], at most 0.
        beta: [.., H], the share of a key's old value that is replaced, 0 to 1.
    """

    q: jax.Array
    k: jax.Array
    v: jax.Array
    log_decay: jax.Array
    beta: jax.Array


def delta_tokens(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    decay_input: jax.Array,
    beta_input: jax.Array,
    *,
    decay_log: jax.Array,
    decay_bias: jax.Array,
) -> DeltaTokens:
    """Return what the projections of tokens bring to the delta rule.

    Args:
        q: [.., G, k], after the convolution, as k and v.
        k: [.., G, k].
        v: [.., H, v].
        decay_input: [.., H].
        beta_input: [.., H].
        decay_log: [H], parameter ``A_log`` of Hugging Face: log of the fastest decay.
        decay_bias: [H], parameter ``dt_bias``.
    """
    heads = v.shape[-2]
    group = heads // q.shape[-2]
    q = l2_normalized(q) * q.shape[-1] ** -0.5
    k = l2_normalized(k)

    speed = jax.nn.softplus(decay_input.astype(jnp.float32) + decay_bias.astype(jnp.float32))
    return DeltaTokens(
        q=jnp.repeat(q, group, axis=-2),
        k=jnp.repeat(k, group, axis=-2),
        v=v.astype(jnp.float32),
        log_decay=-jnp.exp(decay_log.astype(jnp.float32)) * speed,
        beta=jax.nn.sigmoid(beta_input.astype(jnp.float32)),
    )


def l2_normalized(x: jax.Array) -> jax.Array:
    """Return vectors float32 [.., k] of length 1."""
    x = x.astype(jnp.float32)
    square = jnp.sum(x * x, axis=-1, keepdims=True)
    return x * jax.lax.rsqrt(square + _NORM_EPS)


def delta_step(tokens: DeltaTokens, state: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Apply the delta rule for one token of each row.

    A step's time is that of reading and writing states, so key and query read the old state in one
    product. With ``read(x) = exp(log_decay) x S`` of the old state, the new state answers

        q S_new = read(q) + (q k) correction        correction = beta (v - read(k))

    Args:
        tokens: [B, H, ..].
        state: float32 [B, H, k, v].

    Returns:
        Output float32 [B, H, v], and the state after the token.
    """
    decay = jnp.exp(tokens.log_decay)[..., None, None]
    readers = jnp.stack([tokens.k, tokens.q], axis=-2)
    reads = exact_einsum("bhrk,bhkv->bhrv", readers, state) * decay
    answer = reads[..., 0, :]
    correction = (tokens.v - answer) * tokens.beta[..., None]

    overlap = jnp.sum(tokens.q * tokens.k, axis=-1, keepdims=True)
    output = reads[..., 1, :] + overlap * correction
    return output, decay * state + tokens.k[..., :, None] * correction[..., None, :]


class SolvedChunks(NamedTuple):
    """Chunks of c tokens, up to the states they start from; N chunks, [.., c] as in the input.

    Within a chunk, each correction depends on the ones before it. The system is triangular, and
    solved here without the state, which enters linearly: with the state S of a chunk's start,

        corrections = new_values - reads @ S
        outputs = queries @ S + mixing @ corrections

    Attributes:
        reads: float32 [B, N, H, c, k].
        new_values: float32 [B, N, H, c, v].
        queries: float32 [B, N, H, c, k], faded since the start.
        keys: float32 [B, N, H, c, k].
        mixing: float32 [B, N, H, c, c], from corrections to outputs.
        faded: float32 [B, N, H, c], sum of ``log_decay`` since the start, the token itself
            included.
    """

    reads: jax.Array
    new_values: jax.Array
    queries: jax.Array
    keys: jax.Array
    mixing: jax.Array
    faded: jax.Array


def solve_chunks(tokens: DeltaTokens, is_ancestor: jax.Array) -> SolvedChunks:
    """Solve all chunks up to their first states.

    Args:
        tokens: [B, N, c, H, ..], chunks of c tokens.
        is_ancestor: bool [B, N, c, c] or broadcast to it: [i, j] whether j is an ancestor of i, or
            i itself. All of the lower triangle in a chain.
    """
    q = jnp.moveaxis(tokens.q, 3, 2)
    k = jnp.moveaxis(tokens.k, 3, 2)
    v = jnp.moveaxis(tokens.v, 3, 2)
    log_decay = jnp.moveaxis(tokens.log_decay, 3, 2)
    beta = jnp.moveaxis(tokens.beta, 3, 2)[..., None]
    mask = is_ancestor[:, :, None]

    # A token fades what all its ancestors left, so sums run along paths.
    faded = exact_einsum("bnhij,bnhj->bnhi", mask.astype(jnp.float32), log_decay)
    difference = faded[..., :, None] - faded[..., None, :]
    # Masked before exp: the difference to a token that is not an ancestor may overflow.
    decay = jnp.where(mask, jnp.exp(jnp.where(mask, difference, 0.0)), 0.0)

    size = q.shape[-2]
    is_self = jnp.eye(size, dtype=bool)
    overlap = exact_einsum("bnhik,bnhjk->bnhij", k, k) * decay * beta
    inverse = unit_lower_inverse(jnp.where(is_self, 0.0, overlap))
    since_start = jnp.exp(faded)[..., None]
    sides = jnp.concatenate([k * since_start * beta, v * beta], axis=-1)
    solved = _product(inverse, sides)
    return SolvedChunks(
        reads=solved[..., : k.shape[-1]],
        new_values=solved[..., k.shape[-1] :],
        queries=q * since_start,
        keys=k,
        mixing=exact_einsum("bnhik,bnhjk->bnhij", q, k) * decay,
        faded=faded,
    )


@jax.custom_vjp
def unit_lower_inverse(lower: jax.Array) -> jax.Array:
    """Return the inverse of the identity plus a strictly lower triangular matrix.

    Built from the inverses of the diagonal's blocks, of twice the size in each pass. Every block is
    a block of the result, so numbers stay as small as there; a series of the matrix's powers would
    have large terms that cancel. Matrix products need no library call per matrix, as a triangular
    solve does on CPUs.

    Args:
        lower: float32 [.., c, c], zeros on the diagonal and above.
    """
    shape = lower.shape[-2:]
    difference = jax.lax.broadcasted_iota(jnp.int32, shape, 0)
    difference ^= jax.lax.broadcasted_iota(jnp.int32, shape, 1)
    # Blocks of size 2.
    inverse = jnp.where(difference == 0, 1.0, jnp.where(difference == 1, -lower, 0.0))
    for bit in range(1, (shape[0] - 1).bit_length()):
        # [[P, 0], [L, Q]] has the inverse [[P', 0], [-Q' L P', Q']]. Numbers of the same pair of
        # blocks differ in this bit, and in no higher one.
        joins = jnp.right_shift(difference, bit) == 1
        between = jnp.where(joins, lower, 0.0)
        inverse -= _product(inverse, _product(between, inverse))
    return inverse


def _save_inverse(lower: jax.Array) -> tuple[jax.Array, jax.Array]:
    inverse = unit_lower_inverse(lower)
    return inverse, inverse


def _inverse_gradient(inverse: jax.Array, d_inverse: jax.Array) -> tuple[jax.Array]:
    transposed = jnp.matrix_transpose(inverse)
    d_lower = -_product(transposed, _product(d_inverse, transposed))
    return (jnp.tril(d_lower, -1),)


unit_lower_inverse.defvjp(_save_inverse, _inverse_gradient)


def _product(x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.matmul(x, y, precision="highest")


def exact_einsum(subscripts: str, *operands: jax.Array) -> jax.Array:
    """Multiply in float32 on every platform.

    By default TPUs round the inputs of products to bfloat16, and GPUs to TF32. A state would carry
    that along its whole context.
    """
    return jnp.einsum(subscripts, *operands, precision="highest")


def cut_into_chunks(tokens: DeltaTokens, chunk: int) -> DeltaTokens:
    """Cut rows [B, T, H, ..] into chunks [B, N, c, H, ..], the last one padded."""
    rows, count = tokens.beta.shape[:2]
    num_chunks = -(-count // chunk)

    def cut(x: jax.Array) -> jax.Array:
        widths = [(0, 0), (0, num_chunks * chunk - count)] + [(0, 0)] * (x.ndim - 2)
        return jnp.pad(x, widths).reshape(rows, num_chunks, chunk, *x.shape[2:])

    return jax.tree.map(cut, tokens)


def chunked_delta_rule(
    tokens: DeltaTokens, state: jax.Array, *, chunk: int = CHUNK
) -> tuple[jax.Array, jax.Array]:
    """Apply the delta rule along rows, chunk by chunk.

    Args:
        tokens: [B, T, H, ..], padded to whole chunks here.
        state: float32 [B, H, k, v], before the first token.
        chunk: tokens of a chunk.

    Returns:
        Outputs float32 [B, T, H, v], and the states at the chunks' boundaries, [N + 1, B, H, k, v]:
        before the first token, after each chunk. The last one is the final state.
    """
    rows, count = tokens.beta.shape[:2]
    chain = jnp.tril(jnp.ones((1, 1, chunk, chunk), bool))
    solved = solve_chunks(cut_into_chunks(tokens, chunk), chain)

    def body(state: jax.Array, solved: SolvedChunks) -> tuple[jax.Array, tuple]:
        read = exact_einsum("bhck,bhkv->bhcv", solved.reads, state)
        corrections = solved.new_values - read
        outputs = exact_einsum("bhck,bhkv->bhcv", solved.queries, state)
        outputs += exact_einsum("bhij,bhjv->bhiv", solved.mixing, corrections)

        total = solved.faded[..., -1:]
        left = jnp.exp(total - solved.faded)[..., None]
        state = state * jnp.exp(total)[..., None]
        state += exact_einsum("bhck,bhcv->bhkv", solved.keys * left, corrections)
        return state, (outputs, state)

    by_chunk = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), solved)
    _, (outputs, states) = jax.lax.scan(body, state, by_chunk)

    # [N, B, H, c, v] -> [B, T, H, v]
    outputs = outputs.transpose(1, 0, 3, 2, 4)
    outputs = outputs.reshape(rows, -1, *outputs.shape[3:])[:, :count]
    return outputs, jnp.concatenate([state[None], states])


def causal_conv(x: jax.Array, weight: jax.Array, state: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Convolve each channel along rows, then apply SiLU.

    Args:
        x: [B, T, F].
        weight: [F, n]; the last column is for the token itself.
        state: [B, n - 1, F], the inputs before the first token; zeros at the start of a context.

    Returns:
        [B, T, F], and the inputs with the ones before, [B, n - 1 + T, F]: the state after the first
        t tokens are ``inputs[:, t : t + n - 1]``.
    """
    kernel = weight.shape[-1]
    inputs = jnp.concatenate([state.astype(x.dtype), x], axis=1)
    shifted = [inputs[:, i : i + x.shape[1]] for i in range(kernel)]
    return convolved(jnp.stack(shifted, axis=-1), weight), inputs


def causal_conv_step(
    x: jax.Array, weight: jax.Array, state: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Convolve one token of each row; see :func:`causal_conv`.

    Args:
        x: [B, F].
        weight: [F, n].
        state: [B, n - 1, F].

    Returns:
        [B, F], and the state after the token.
    """
    y, inputs = causal_conv(x[:, None], weight, state)
    return y[:, 0], inputs[:, 1:]


def convolved(inputs: jax.Array, weight: jax.Array) -> jax.Array:
    """Return SiLU of weighted sums.

    Args:
        inputs: [.., F, n], of a token and the ones before it, the token's own last.
        weight: [F, n].
    """
    total = jnp.sum(inputs.astype(jnp.float32) * weight.astype(jnp.float32), axis=-1)
    return jax.nn.silu(total).astype(inputs.dtype)


def gated_rms_norm(x: jax.Array, gate: jax.Array, weight: jax.Array, *, eps: float) -> jax.Array:
    """Normalize, then multiply with SiLU of a gate, rounded where Hugging Face's models round.

    Args:
        x: [.., v], outputs of a head.
        gate: [.., v]; its dtype is the result's.
        weight: [v].
    """
    scaled = root_mean_square_scaled(x, eps=eps).astype(gate.dtype)
    gated = (weight * scaled) * jax.nn.silu(gate.astype(jnp.float32))
    return gated.astype(gate.dtype)
