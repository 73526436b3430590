"""Profile of one learner step: milliseconds per part, for the step that ``learner.py`` measures.

    python benchmarks/learner_profile.py [--remat dots] [--repeats 3]

SmolLM2-135M in float32, 8 sequences of 256 tokens in two micro-batches. Parts are programs of their
own, with the shapes they have in the step:

- ``products``: the matrix products of all layers and of the head, one forward and two backward,
  without anything between them.
- ``attention``: everything between the projections, less the rotation.
- ``logprobs``: log-probs and entropies over the vocabulary, less the products of the head.
- ``elementwise``: norms, rotation, activations, residuals, embedding: a forward and backward pass
  that recomputes nothing, less products and attention.
- ``rematerialisation``: what ``remat`` adds to that pass.
- ``optimizer``: norm, clip and AdamW.
- ``packing``: from trajectories to arrays, and advantages.
- ``other``: the rest of the step: the loss, sums of gradients, dispatch, transfers.

The last line is one JSON object. Figures depend on the CPU's vectors, so it is part of it.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from common import argument_parser, best_seconds, cpu, sgemm_flops
from learner import LENGTH, ROWS, counted_flops, learner_and_group, sequences

from jax_agent_rl.learner.batch import Batch
from jax_agent_rl.learner.learner import Learner
from jax_agent_rl.learner.linear_logprobs import linear_logprobs
from jax_agent_rl.learner.objective import KEPT_LOGITS, TARGETS_PER_CHUNK
from jax_agent_rl.models.attention import tree_attention
from jax_agent_rl.models.decoder import Decoder
from jax_agent_rl.models.tree_kernel import TreeMask
from jax_agent_rl.types import Group

MICRO_BATCHES = 2
TOKENS = ROWS * LENGTH // MICRO_BATCHES
PRODUCTS = {
    "forward": lambda x, weight, _: jnp.einsum("nd,od->no", x, weight),
    "d_input": lambda _, weight, d_out: jnp.einsum("no,od->nd", d_out, weight),
    "d_weight": lambda x, _, d_out: jnp.einsum("no,nd->od", d_out, x),
}


def normal(*shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(len(shape)), shape)


def program_seconds(repeats: int, program: Callable[..., Any], *arguments: Any) -> float:
    """Time a jitted program, for all micro-batches of a step."""
    run = jax.jit(program)
    return MICRO_BATCHES * best_seconds(lambda: run(*arguments), repeats)


def product_seconds(timed: Callable[..., float], shapes: dict) -> dict[str, dict[str, float]]:
    """Time the products of layers and head by direction."""

    def directions(out: int, size: int) -> dict[str, float]:
        arguments = normal(TOKENS, size), normal(out, size), normal(TOKENS, out)
        return {name: timed(product, *arguments) for name, product in PRODUCTS.items()}

    layers = dict.fromkeys(PRODUCTS, 0.0)
    for shape in shapes["layers"].values():
        if len(shape) != 3:  # a norm's
            continue
        num_layers, out, size = shape
        for name, seconds in directions(out, size).items():
            layers[name] += num_layers * seconds
    return {"layers": layers, "head": directions(*shapes["embed"])}


def attention_seconds(timed: Callable[..., float], model: Any) -> dict[str, float]:
    """Time attention in all layers, forward and backward."""
    rows = ROWS // MICRO_BATCHES
    q = normal(rows, model.num_heads, LENGTH, model.head_dim)
    k = v = normal(rows, model.num_kv_heads, LENGTH, model.head_dim)
    tree_mask = TreeMask(jnp.full((rows, LENGTH), LENGTH, jnp.int32))

    def backward(q: jax.Array, k: jax.Array, v: jax.Array) -> Any:
        out, pull = jax.vjp(lambda *x: tree_attention(*x, tree_mask), q, k, v)
        return pull(out)

    forward = timed(lambda *x: tree_attention(*x, tree_mask), q, k, v)
    return {
        "forward": model.num_layers * forward,
        "backward": model.num_layers * (timed(backward, q, k, v) - forward),
    }


def logprob_seconds(timed: Callable[..., float], head: jax.Array) -> dict[str, float]:
    """Time log-probs and entropies, the head's products included, forward and backward."""
    chunk = TARGETS_PER_CHUNK["cpu"] * ROWS // MICRO_BATCHES
    hidden = normal(TOKENS // chunk, chunk, head.shape[1])
    ids = jnp.zeros(hidden.shape[:2], jnp.int32)
    kept_chunks = min(len(ids), KEPT_LOGITS // (4 * chunk * len(head)))

    def score(hidden: jax.Array, head: jax.Array) -> Any:
        return linear_logprobs(hidden, head, ids, ids == 0, 1.0, 1, kept_chunks)

    def backward(hidden: jax.Array, head: jax.Array) -> Any:
        scored, pull = jax.vjp(score, hidden, head)
        return pull(scored)

    forward = timed(score, hidden, head)
    return {"forward": forward, "backward": timed(backward, hidden, head) - forward}


def body_seconds(timed: Callable[..., float], learner: Learner, remat: str) -> dict[str, float]:
    """Time everything but the head, forward and backward."""
    rows = ROWS // MICRO_BATCHES
    ids = jnp.zeros((rows, LENGTH), jnp.int32)

    def forward(params: Any) -> jax.Array:
        return Decoder.from_params(learner.model, params)(ids, remat=remat)[0]

    def backward(params: Any) -> Any:
        out, pull = jax.vjp(forward, params)
        return pull(out)

    forward_seconds = timed(forward, learner.params)
    backward_seconds = timed(backward, learner.params) - forward_seconds
    return {"forward": forward_seconds, "backward": backward_seconds}


def optimizer_seconds(learner: Learner, batch: Batch, repeats: int) -> float:
    """Time norm, clip and AdamW."""
    policy = learner.policy
    gradients, _ = policy.gradients(learner.scorer.micro_batches(batch))
    return best_seconds(lambda: policy.apply(gradients, 0), repeats)


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--remat", default="dots", choices=("none", "dots", "full"))
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    learner, group = learner_and_group(sequences(), remat=arguments.remat)
    print(json.dumps(profile(learner, group, arguments.repeats)))


def profile(learner: Learner, group: Group, repeats: int) -> dict[str, Any]:
    """Time each part of a step, print it, and return the figures."""
    timed = functools.partial(program_seconds, repeats)
    shapes = learner.model.parameter_shapes()
    peak = sgemm_flops()
    print(f"{cpu()}: sgemm {peak / 1e9:.0f} GFLOP/s", flush=True)
    parts: dict[str, float] = {}

    def show(name: str, seconds: float) -> None:
        parts[name] = seconds
        print(f"{name:32s} {1000 * seconds:8.1f} ms", flush=True)

    products = product_seconds(timed, shapes)
    products_total = 0.0
    for kind, by_direction in products.items():
        for direction, seconds in by_direction.items():
            show(f"products/{kind}/{direction}", seconds)
            products_total += seconds

    attention = attention_seconds(timed, learner.model)
    logprobs = logprob_seconds(timed, learner.params["embed"])
    for direction in ("forward", "backward"):
        show(f"attention/{direction}", attention[direction])

    # Parts that hold products or attention are shown without them.
    head = products["head"]
    layers = products["layers"]
    show("logprobs/forward", logprobs["forward"] - head["forward"])
    show("logprobs/backward", logprobs["backward"] - head["d_input"] - head["d_weight"])
    plain = body_seconds(timed, learner, "none")
    rematerialised = body_seconds(timed, learner, learner._objective.remat)
    show("elementwise/forward", plain["forward"] - layers["forward"] - attention["forward"])
    show(
        "elementwise/backward",
        plain["backward"] - layers["d_input"] - layers["d_weight"] - attention["backward"],
    )
    show("rematerialisation", sum(rematerialised.values()) - sum(plain.values()))

    (mini_batch,), experience = learner.prepare([group])
    show("packing", best_seconds(lambda: learner.prepare([group]), repeats))
    _, policy_batch = learner.batches(mini_batch, experience.updates[0])[-1]
    show("optimizer", optimizer_seconds(learner, policy_batch, repeats))

    step = best_seconds(lambda: learner.update([group]), repeats)
    show("other", step - sum(parts.values()))
    milliseconds = {name: round(1000 * seconds, 1) for name, seconds in parts.items()}
    return {
        "step_ms": round(1000 * step, 1),
        "parts_ms": milliseconds,
        "products_share": round(products_total / step, 3),
        "share_of_sgemm": round(counted_flops(shapes) / step / peak, 3),
        "sgemm_gflop_s": round(peak / 1e9, 1),
        "tokens_per_second": round(ROWS * LENGTH / step, 1),
        "cpu": cpu(),
    }


if __name__ == "__main__":
    main()
