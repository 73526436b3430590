"""The GPU kernels of log-probs, interpreted, against a plain log-softmax in float64 numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_agent_rl.learner import linear_logprobs as blocks
from jax_agent_rl.learner import logprob_kernel_cuda
from jax_agent_rl.learner.logprob_kernel_cuda import Scoring, TokenGradients
from tests.simulated import run_on_devices

TOKENS = 150  # more than a tile
VALID = 100
HIDDEN = 48
TEMPERATURE = 0.7
SOFTCAP = 3.0  # of the order of the logits, so that some are flattened


def reference(hidden, head, ids, d_logprob, d_entropy, softcap):
    """Log-probs, entropies and gradients of valid tokens, in float64."""
    products = hidden @ head.T
    slope = 1.0
    if softcap is not None:
        slope = 1 - np.tanh(products / softcap) ** 2
        products = softcap * np.tanh(products / softcap)
    scores = products / TEMPERATURE
    logs = scores - scores.max(axis=1, keepdims=True)
    logs -= np.log(np.exp(logs).sum(axis=1, keepdims=True))
    probabilities = np.exp(logs)
    entropy = -(probabilities * logs).sum(axis=1)

    is_id = np.arange(len(head)) == ids[:, None]
    d_scores = d_logprob[:, None] * (is_id - probabilities)
    d_scores -= d_entropy[:, None] * probabilities * (logs + entropy[:, None])
    d_products = d_scores / TEMPERATURE * slope
    return logs[is_id], entropy, d_products @ head, d_products.T @ hidden


@pytest.mark.parametrize("softcap", [None, SOFTCAP], ids=["plain", "softcapped"])
@pytest.mark.parametrize(
    ("vocabulary", "block_numbers"),
    [(101, 1 << 25), (2500, 256 * 1024)],
    ids=["a part of a tile", "two spans, and blocks of which the last is smaller"],
)
def test_values_and_gradients_equal_those_of_a_float64_log_softmax(
    monkeypatch: pytest.MonkeyPatch, vocabulary: int, block_numbers: int, softcap: float | None
):
    monkeypatch.setattr(logprob_kernel_cuda, "BLOCK_NUMBERS", block_numbers)
    draw = np.random.default_rng(vocabulary)
    hidden = draw.normal(size=(TOKENS, HIDDEN))
    head = draw.normal(size=(vocabulary, HIDDEN)) / 3
    ids = draw.integers(0, vocabulary, TOKENS)
    d_logprob = draw.normal(size=TOKENS)
    d_entropy = draw.normal(size=TOKENS)
    scoring = Scoring(TEMPERATURE, softcap)
    valid = jnp.arange(TOKENS)[None] < VALID

    @jax.jit
    def run(hidden, head, ids, d_logprob, d_entropy):
        logprob, entropy, normalizer = logprob_kernel_cuda.forward(
            hidden, head, ids, valid, scoring=scoring, interpret=True
        )
        tokens = TokenGradients(ids, valid, d_logprob, d_entropy, entropy, normalizer)
        gradients = logprob_kernel_cuda.backward(
            hidden, head, tokens, scoring=scoring, interpret=True
        )
        return logprob, entropy, *gradients

    arrays = [jnp.asarray(array[None], jnp.float32) for array in (d_logprob, d_entropy)]
    logprob, entropy, d_hidden, d_head = run(
        jnp.asarray(hidden[None], jnp.float32),
        jnp.asarray(head, jnp.float32),
        jnp.asarray(ids[None], jnp.int32),
        *arrays,
    )
    of_valid = [x[:VALID] for x in (hidden, ids, d_logprob, d_entropy)]
    expected = reference(of_valid[0], head, *of_valid[1:], softcap)
    np.testing.assert_allclose(logprob[0, :VALID], expected[0], atol=2e-5)
    np.testing.assert_allclose(entropy[0, :VALID], expected[1], atol=2e-5)
    np.testing.assert_allclose(d_hidden[0, :VALID], expected[2], atol=5e-5)
    np.testing.assert_allclose(d_head, expected[3], atol=5e-5)
    assert not logprob[0, VALID:].any() and not d_hidden[0, VALID:].any()


def run_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take the GPU's branch of programs for CPUs."""

    def run_kernel(*args, default, cuda=None):
        assert cuda is not None
        return cuda(*args)

    def interpreted(function):
        return lambda *args, **options: function(*args, **options, interpret=True)

    monkeypatch.setattr(blocks, "by_platform", run_kernel)
    for name in ("forward", "backward"):
        function = getattr(logprob_kernel_cuda, name)
        monkeypatch.setattr(logprob_kernel_cuda, name, interpreted(function))


def test_kernels_stand_for_the_blocks(monkeypatch: pytest.MonkeyPatch):
    draw = np.random.default_rng(0)
    hidden = jnp.asarray(draw.normal(size=(2, 8, 16)), jnp.float32)
    head = jnp.asarray(draw.normal(size=(68, 16)), jnp.float32)
    ids = jnp.asarray(draw.integers(0, 68, (2, 8)), jnp.int32)
    valid = jnp.arange(16).reshape(2, 8) < 13

    def scored():
        """Log-probs, entropies, and the gradients of a function of them."""

        def loss(hidden, head):
            logprob, entropy = blocks.linear_logprobs(
                hidden, head, ids, valid, TEMPERATURE, softcap=SOFTCAP
            )
            values = jnp.where(valid, logprob**2 + entropy, 0)
            return jnp.sum(values), (logprob[valid], entropy[valid])

        return jax.grad(loss, (0, 1), has_aux=True)(hidden, head)

    expected = scored()
    run_kernels(monkeypatch)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=5e-5), scored(), expected)


ON_A_MESH = """
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import AxisType
from jax_agent_rl.learner import logprob_kernel_cuda
from jax_agent_rl.learner.logprob_kernel_cuda import Scoring, TokenGradients

draw = np.random.default_rng(0)
hidden = jnp.asarray(draw.normal(size=(2, 8, 16)), jnp.float32)
head = jnp.asarray(draw.normal(size=(68, 16)), jnp.float32)
ids = jnp.asarray(draw.integers(0, 68, (2, 8)), jnp.int32)
valid = jnp.arange(16).reshape(2, 8) < 13
d_logprob, d_entropy = jnp.asarray(draw.normal(size=(2, 2, 8)), jnp.float32)

def scored(mesh):
    options = {"scoring": Scoring(0.7, None), "mesh": mesh, "interpret": True}

    @jax.jit
    def run(hidden, head):
        results = logprob_kernel_cuda.forward(hidden, head, ids, valid, **options)
        logprob, entropy, normalizer = results
        tokens = TokenGradients(ids, valid, d_logprob, d_entropy, entropy, normalizer)
        return *results, *logprob_kernel_cuda.backward(hidden, head, tokens, **options)

    return run(hidden, head)

axes = ("data", "fsdp", "expert", "context", "tensor")
mesh = jax.make_mesh((1, 2, 1, 2, 2), axes, axis_types=(AxisType.Auto,) * 5)
for result, expected in zip(scored(mesh), scored(None), strict=True):
    print(float(jnp.abs(result - expected).max()), float(jnp.abs(expected).max()))
"""


def test_devices_that_split_tokens_and_vocabulary_compute_what_one_does():
    for line in run_on_devices(ON_A_MESH):
        difference, largest = map(float, line.split())
        assert difference <= 1e-5 * largest, line


def test_restricted_draws_candidates_and_odd_sizes_have_no_kernel(monkeypatch):
    head = jnp.zeros((8, 16))
    assert logprob_kernel_cuda.supports(jnp.zeros((1, 2, 16)), head)
    assert not logprob_kernel_cuda.supports(jnp.zeros((1, 2, 8)), jnp.zeros((8, 8)))
    assert not logprob_kernel_cuda.supports(jnp.zeros((1, 2, 16), jnp.bfloat16), head)

    kernels = []

    def run_blocks(*args, default, cuda=None):
        kernels.append(cuda)
        return default(*args)

    monkeypatch.setattr(blocks, "by_platform", run_blocks)
    ids = jnp.zeros((1, 2), jnp.int32)
    hidden = jnp.ones((1, 2, 16))
    support = jnp.ones((1, 2, 1), jnp.uint32)
    for options in ({"support": support}, {"candidates": ids[..., None]}, {"kept_chunks": 1}):
        blocks.linear_logprobs(hidden, head, ids, ids == 0, 1.0, **options)
    assert kernels == [None, None, None]
