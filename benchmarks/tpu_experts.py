"""Predicted time and memory of a mixture of experts on TPUs, forward and backward.

    python benchmarks/tpu_experts.py [--slices v5p:2x2x1 v6e:2x4] [--expert 2 8] [--rows 1 4] \
        [--parts 20]

No TPU is needed (extra: plan). A loop over layers computes the mixtures of Qwen3-30B-A3B alone,
each added to its input, over packed rows of 4,096 tokens, and the gradients of inputs and weights,
in bfloat16. The backward pass recomputes what it does with ``learner.remat=dots``. The axis
``expert`` has so many chips, ``fsdp`` the others. Times are of one layer, predicted as in
``jax-agent-rl plan``; at the peak, its products alone take ideal. Compiling takes minutes. The
table is in Markdown; ``--parts`` adds the longest parts of each line.
"""

from __future__ import annotations

import os

os.environ["JAX_PLATFORMS"] = "cpu"  # before JAX is loaded: the chips are described

import json
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from common import argument_parser
from jax.sharding import NamedSharding, PartitionSpec

from jax_agent_rl.config import MeshConfig
from jax_agent_rl.deploy.plan.architectures import ARCHITECTURES
from jax_agent_rl.deploy.plan.hlo import parse
from jax_agent_rl.deploy.plan.prediction import Prediction, kernel_grids, predict
from jax_agent_rl.deploy.plan.topology import Slice
from jax_agent_rl.models import moe
from jax_agent_rl.models.config import DecoderConfig, Params
from jax_agent_rl.models.hf import load_config
from jax_agent_rl.models.layers import ACTIVATIONS, REMAT_POLICIES
from jax_agent_rl.models.sharding import ROWS, make_mesh

MODEL = "qwen3-30b-a3b"
LAYERS = 4  # of the loop
LENGTH = 4096  # tokens of a row


def read_model() -> DecoderConfig:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(ARCHITECTURES[MODEL]))
        return load_config(folder)


def predicted(model: DecoderConfig, slice: Slice, expert: int, rows: int) -> tuple[Prediction, int]:
    """Return the prediction for all layers, and the program's bytes beside its arguments.

    Args:
        expert: chips that the experts are split over.
        rows: rows of each chip.
    """
    mesh = make_mesh(MeshConfig(fsdp=slice.chips // expert, expert=expert), slice.devices)
    experts = model.experts
    assert experts is not None

    def describe(spec: PartitionSpec, *shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec))

    layers = {}
    for name, shape in model.parameter_shapes()["layers"].items():
        if name in moe.WEIGHTS:
            spec = PartitionSpec(None, *moe.WEIGHTS[name])
            layers[name] = describe(spec, LAYERS, *shape[1:])
    x = describe(PartitionSpec(ROWS), rows * slice.chips, LENGTH, model.hidden_size)

    def add_mixture(x: jax.Array, layer: Params) -> tuple[jax.Array, None]:
        activation = ACTIVATIONS[model.activation]
        mixed = moe.sharded_mixture_of_experts(experts, layer, x, activation, mesh)
        return x + mixed, None

    def outputs_and_gradients(
        x: jax.Array, layers: Params, d_outputs: jax.Array
    ) -> tuple[jax.Array, tuple[jax.Array, Params]]:
        layer = jax.checkpoint(add_mixture, policy=REMAT_POLICIES["dots"])

        def run(x: jax.Array, layers: Params) -> jax.Array:
            return jax.lax.scan(layer, x, layers)[0]

        outputs, pull = jax.vjp(run, x, layers)
        return outputs, pull(d_outputs)

    traced = jax.jit(outputs_and_gradients).trace(x, layers, x)
    program = traced.lower().compile()
    text = program.as_text()
    memory = program.memory_analysis()
    assert text is not None and memory is not None  # XLA's compilers give both
    prediction = predict(parse(text), slice.chip, mesh, grids=kernel_grids(traced.jaxpr))
    return prediction, memory.temp_size_in_bytes


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--slices", nargs="+", default=["v5p:2x2x1", "v6e:2x4"])
    parser.add_argument("--expert", nargs="+", type=int, default=[2], help="chips of the axis")
    parser.add_argument("--rows", nargs="+", type=int, default=[1], help="of a chip")
    parser.add_argument("--parts", type=int, default=0, help="longest parts that are shown")
    args = parser.parse_args()

    model = read_model()
    assert model.experts is not None
    expert_size = 3 * model.hidden_size * model.experts.intermediate_size
    print("| slice | expert | rows | a layer | ideal | share | memory |")
    print("|---|---|---|---|---|---|---|", flush=True)
    for name in args.slices:
        slice = Slice.parse(name)
        for expert in args.expert:
            for rows in args.rows:
                prediction, size = predicted(model, slice, expert, rows)
                flops = 6 * rows * LENGTH * model.experts.per_token * expert_size
                ideal = flops / slice.chip.flops
                seconds = prediction.seconds / LAYERS
                print(
                    f"| {name} | {expert} | {rows} | {seconds * 1e3:.2f} ms | {ideal * 1e3:.2f} ms"
                    f" | {ideal / seconds:.0%} | {size / 2**20:.0f} MiB |",
                    flush=True,
                )
                for part in prediction.parts[: args.parts]:
                    print(
                        f"    {part.seconds / LAYERS * 1e3:.3f} ms, {part.what} {part.operation}:"
                        f" {' < '.join(part.source[:2])}"
                    )


if __name__ == "__main__":
    main()
