"""Predicted time and memory of the delta rule on TPUs: its kernels against XLA's operations.

    python benchmarks/tpu_delta_rule.py [--slices v5p:2x2x1 v6e:2x2] [--length 4096] [--heads 32]

No TPU is needed (extra: plan). One chip computes the rule over a packed row, and the gradients of
all that it is given; heads have 128 keys and values, as Qwen3.5's. Times are predicted as in
``jax-agent-rl plan``; memory is what the program has beside its arguments and results. Compiling
takes minutes. The table is in Markdown.
"""

from __future__ import annotations

import os

os.environ["JAX_PLATFORMS"] = "cpu"  # before JAX is loaded: the chips are described

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from common import argument_parser
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jax_agent_rl.deploy.plan.hlo import parse
from jax_agent_rl.deploy.plan.prediction import kernel_grids, predict
from jax_agent_rl.deploy.plan.topology import Slice
from jax_agent_rl.models import delta_kernel
from jax_agent_rl.models.delta_net import CHUNK, DeltaTokens
from jax_agent_rl.models.delta_tree import delta_rule_by_chunks, tree_delta_rule
from jax_agent_rl.models.sharding import MESH_AXES
from jax_agent_rl.models.token_forest import TokenForest, plan_forest

SIZE = 128  # of keys and of values
Rule = Callable[[DeltaTokens, TokenForest], jax.Array]
PATHS: dict[str, tuple[Rule, int]] = {  # with the tokens of a chunk
    "XLA's operations": (delta_rule_by_chunks, CHUNK),
    "kernels": (tree_delta_rule, delta_kernel.CHUNK),
}


def predicted(slice: Slice, rule: Rule, chunk: int, length: int, heads: int) -> tuple[float, int]:
    """Return the seconds of outputs and gradients, and the program's bytes."""
    shape = (1,) * len(MESH_AXES)
    mesh = Mesh(np.array(slice.devices[:1]).reshape(shape), MESH_AXES)
    sharding = NamedSharding(mesh, PartitionSpec())

    def describe(*shape: int, dtype: Any = jnp.float32) -> Any:
        return jax.ShapeDtypeStruct((1, length, *shape), dtype, sharding=sharding)

    def outputs_and_gradients(
        tokens: DeltaTokens, ends: jax.Array, d_outputs: jax.Array
    ) -> tuple[jax.Array, DeltaTokens]:
        forest = plan_forest(ends, chunk=chunk)
        outputs, pull = jax.vjp(lambda tokens: rule(tokens, forest), tokens)
        return outputs, pull(d_outputs)[0]

    vectors = describe(heads, SIZE)
    numbers = describe(heads)
    ends = describe(dtype=jnp.int32)
    tokens = DeltaTokens(vectors, vectors, vectors, numbers, numbers)
    traced = jax.jit(outputs_and_gradients).trace(tokens, ends, vectors)
    program = traced.lower().compile()

    text = program.as_text()
    memory = program.memory_analysis()
    assert text is not None and memory is not None  # XLA's compilers give both
    prediction = predict(parse(text), slice.chip, mesh, grids=kernel_grids(traced.jaxpr))
    return prediction.seconds, memory.temp_size_in_bytes


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--slices", nargs="+", default=["v5p:2x2x1", "v6e:2x2"])
    parser.add_argument("--length", type=int, default=4096, help="of the row")
    parser.add_argument("--heads", type=int, default=32)
    args = parser.parse_args()

    print("| chip | path | forward and gradient | memory |")
    print("|---|---|---|---|", flush=True)
    for name in args.slices:
        slice = Slice.parse(name)
        for path, (rule, chunk) in PATHS.items():
            seconds, size = predicted(slice, rule, chunk, args.length, args.heads)
            generation, _, _ = name.partition(":")
            print(
                f"| {generation} | {path} | {seconds * 1e3:.2f} ms | {size / 2**20:.0f} MiB |",
                flush=True,
            )


if __name__ == "__main__":
    main()
