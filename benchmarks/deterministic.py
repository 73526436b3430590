"""Cost of ``rollout.deterministic``, rollout and old log-probs by one program.

    python benchmarks/deterministic.py [--batch 8] [--meshes]

SmolLM2-135M in float32; every request has 96 prompt ids of its own and samples 48. The
deterministic engine is compared with the fast one. Each engine's wall time is from the first
request to the last log-prob; the deterministic one scores the contexts once more, as its learner
does before an update, while the fast one's learner needs no such pass (the log-probs of a single
update are its own). A line is one JSON object: ``rollout_ratio`` (deterministic over fast),
``ratio`` (with scoring), and how far each engine's log-probs are from the scorer's:
``deterministic_gap`` must be 0.

With ``--meshes`` there is a line for each mesh of a learner, the engines on the same devices:
``fsdp`` splits the slots over engines of one device, ``tensor`` each engine. The model is a random
one of eight layers as SmolLM2-135M's, with 4 key/value heads, which two devices can share. Devices
are simulated: they share this machine's cores, so that seconds compare the work of deterministic
and fast engines on one mesh, and not meshes with each other. On one device the fast engine has
kernels for CPUs. ``one_device_gap``, which must be 0, is the distance of the scorer's log-probs
from those of one device.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from common import argument_parser, load_quickstart, random_ids, rollout, running
from flax import nnx

from jax_agent_rl.config import MeshConfig
from jax_agent_rl.config.engines import EngineMeshConfig
from jax_agent_rl.jetstream.data_parallel import make_backend
from jax_agent_rl.jetstream.deterministic_scorer import DeterministicScorer
from jax_agent_rl.jetstream.engine import EngineShapes
from jax_agent_rl.jetstream.programs import ProgramTable
from jax_agent_rl.jetstream.sharding import make_engine_mesh
from jax_agent_rl.models.config import DecoderConfig, Params
from jax_agent_rl.models.decoder import Decoder
from jax_agent_rl.models.sharding import make_mesh, parameter_shardings, place

DEVICES = 4
MESHES: dict[str, tuple[dict[str, int], dict[str, int]]] = {
    "one device": ({}, {}),
    "fsdp=2": ({"fsdp": 2}, {"data": 2}),
    "tensor=2": ({"tensor": 2}, {"tensor": 2}),
    "fsdp=2 x tensor=2": ({"fsdp": 2, "tensor": 2}, {"data": 2, "tensor": 2}),
}
"""Axes of the learner's mesh and of the engines'."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What is sampled: ``batch`` requests of so many ids each."""

    model: DecoderConfig
    params: Params
    batch: int
    prompt: int
    new: int

    def shapes(self, engines: int) -> EngineShapes:
        """Return the shapes of each of so many engines."""
        length = self.prompt + self.new + 16
        slots = self.batch // engines
        return EngineShapes(
            max_model_len=length,
            max_concurrent_decodes=slots,
            kv_cache_tokens=slots * length,
            decode_steps=16,
            prefill_buckets=(32, 128),
        )


async def measure(
    work: Workload, engine_axes: Mapping[str, int], learner_axes: Mapping[str, int]
) -> dict[str, Any]:
    """Measure both engines on a mesh."""
    model = work.model
    mesh = make_engine_mesh(EngineMeshConfig(**engine_axes))
    shapes = work.shapes(mesh.shape["data"])
    shardings = parameter_shardings(make_mesh(MeshConfig(**learner_axes)), model.parameter_shapes())
    params = jax.tree.map(place, work.params, shardings)
    program_table = ProgramTable()
    score = DeterministicScorer(
        model, shapes, dtype="float32", program_table=program_table, temperature=1.0, mesh=mesh
    )
    prompts = random_ids(work.batch, work.prompt)
    other_prompts = random_ids(work.batch, work.prompt, seed=1)
    score(params, other_prompts.tolist())  # compiles
    seconds: dict[str, float] = {}
    gaps: dict[str, float] = {}
    scoring_seconds: dict[str, float] = {}
    contexts: list[list[int]] = []
    scores: list[np.ndarray] = []
    for name, engine_table in (("fast", None), ("deterministic", program_table)):
        engine = make_backend(model, params, shapes, mesh=mesh, deterministic=engine_table)
        async with running(engine) as backend:
            await rollout(backend, other_prompts, work.new)  # compiles
            outputs, seconds[name] = await rollout(backend, prompts, work.new)

        contexts = []
        for prompt_ids, output in zip(prompts.tolist(), outputs, strict=True):
            contexts.append([*prompt_ids, *output.token_ids])
        start = time.perf_counter()
        scores = score(params, contexts)
        scoring_seconds[name] = time.perf_counter() - start

        output_gaps = []
        for output, context_scores in zip(outputs, scores, strict=True):
            log_probs = np.asarray(output.log_probs, np.float32)
            output_gaps.append(np.abs(log_probs - context_scores[work.prompt - 1 :]).max())
        gaps[name] = float(np.max(output_gaps))

    alone = DeterministicScorer(
        model, shapes, dtype="float32", program_table=ProgramTable(), temperature=1.0
    )
    one_device_gaps = []
    for of_mesh, of_one_device in zip(scores, alone(params, contexts), strict=True):
        one_device_gaps.append(np.abs(of_mesh - of_one_device).max())

    scoring = scoring_seconds["deterministic"]
    return {
        "batch": work.batch,
        "fast_seconds": seconds["fast"],
        "deterministic_seconds": seconds["deterministic"],
        "scoring_seconds": scoring,
        "rollout_ratio": seconds["deterministic"] / seconds["fast"],
        "ratio": (seconds["deterministic"] + scoring) / seconds["fast"],
        "fast_gap": gaps["fast"],
        "deterministic_gap": gaps["deterministic"],
        "one_device_gap": float(np.max(one_device_gaps)),
    }


def random_workload(batch: int) -> Workload:
    """Return the work of ``--meshes``."""
    model = DecoderConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_layers=8,
        num_heads=8,
        num_kv_heads=4,
        head_dim=64,
        tie_word_embeddings=True,
    )
    params = nnx.to_pure_dict(nnx.state(Decoder(model, rngs=nnx.Rngs(0))))
    return Workload(model=model, params=params, batch=batch, prompt=48, new=32)


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--batch", type=int, default=8, help="Requests, and slots of the engine.")
    parser.add_argument(
        "--meshes", action="store_true", help="Measure a random model on simulated devices."
    )
    options = parser.parse_args()
    if not options.meshes:
        model, params = load_quickstart()
        work = Workload(model=model, params=params, batch=options.batch, prompt=96, new=48)
        print(json.dumps({"mesh": "one device", **asyncio.run(measure(work, {}, {}))}))
        return

    jax.config.update("jax_num_cpu_devices", DEVICES)
    work = random_workload(options.batch)
    for name, (learner_axes, engine_axes) in MESHES.items():
        record = asyncio.run(measure(work, engine_axes, learner_axes))
        print(json.dumps({"mesh": name, **record}), flush=True)


if __name__ == "__main__":
    main()
