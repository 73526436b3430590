"""Weight updates during generation: what each mode costs, and how exact its log-probs are.

    python benchmarks/in_flight_update.py [--requests 24] [--updates 4] [--step 1e-5]

SmolLM2-135M in float32 on the JAX engine, 8 slots; prompts of 160 random ids, responses of drawn
lengths (median 60, at most 240), the same for all. New weights are published after every n-th
sampled id, where n gives the number of updates; each moves every weight by ``--step`` up or down,
which is what a step of Adam at that learning rate does.

``keep``: generations continue with the KV of the old weights. ``recompute``: they are interrupted
and resumed, their whole context computed again. ``wait``: they finish first, and no other starts
until the update (``trainer.in_flight_update``).

``seconds_per_update`` is the time on top of the same work without updates; ``recomputed_ids`` are
prompt ids computed on top. ``logprob_gap`` is the mean distance, over the ids sampled after a
change within their own response, between the engine's log-prob and that of a full forward pass of
the weights that sampled the id: what stale KV costs in exactness. The last line is one JSON object.
"""

from __future__ import annotations

import asyncio
import functools
import json
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from common import argument_parser, load_quickstart, random_ids, running

from jax_agent_rl.jetstream.backend import JetStreamBackend
from jax_agent_rl.jetstream.engine import EngineShapes
from jax_agent_rl.models.decoder import Decoder
from jax_agent_rl.rollout.client import LLMServerClient
from jax_agent_rl.rollout.protocol import WeightUpdate
from jax_agent_rl.rollout.server import AsyncServer
from jax_agent_rl.testing.simulate.workload import Draws
from jax_agent_rl.types import PauseMode, SamplingParams, TokenOutput

PROMPT = 160  # ids
SLOTS = 8
MAX_NEW = 240
LENGTHS = Draws(median=60, least=1, most=MAX_NEW)
MODES = {"none": None, "keep": PauseMode.KEEP, "recompute": PauseMode.ABORT, "wait": PauseMode.WAIT}


class Publications:
    """Publishes the next version after every ``every`` sampled ids."""

    def __init__(
        self, client: LLMServerClient, weights: Sequence[dict], mode: PauseMode | None, every: float
    ) -> None:
        self._client = client
        self._weights = weights
        self._mode = mode
        self._every = every
        self._sampled = 0
        self._event = asyncio.Event()

    def count(self, ids: Sequence[int]) -> None:
        """Count sampled ids, of any request."""
        self._sampled += len(ids)
        self._event.set()

    async def run(self) -> None:
        """Run until the last version is published."""
        for version in range(1, len(self._weights)):
            while self._sampled < version * self._every:
                self._event.clear()
                await self._event.wait()
            update = WeightUpdate(version=version, kind="arrays", payload=self._weights[version])
            await self._client.pool.update_weights(update, mode=self._mode)


async def measure(
    backend: JetStreamBackend,
    prompts: np.ndarray,
    lengths: Sequence[int],
    weights: Sequence[dict],
    name: str,
) -> tuple[list[TokenOutput], dict[str, float]]:
    """Run all requests at once, on an engine of their own; return outputs and figures."""
    async with running(backend):
        client = LLMServerClient([AsyncServer(backend)])
        publications = Publications(client, weights, MODES[name], sum(lengths) / len(weights))
        requests = []
        for i, (prompt, length) in enumerate(zip(prompts, lengths, strict=True)):
            request = client.generate(
                f"r{i}",
                prompt_ids=prompt.tolist(),
                sampling_params=SamplingParams(max_tokens=length, ignore_eos=True, seed=i),
                on_ids=publications.count,
            )
            requests.append(request)

        start = time.perf_counter()
        publishing = None
        if name != "none":
            publishing = asyncio.create_task(publications.run())
        outputs = await asyncio.gather(*requests)
        seconds = time.perf_counter() - start

        if publishing is not None:
            await publishing
        metrics = await backend.metrics()
        assert metrics.recompilations == 0
        return outputs, {"seconds": seconds, "prefilled": metrics.prefill_tokens}


def gap(
    model: Any, prompts: np.ndarray, outputs: Sequence[TokenOutput], weights: Sequence[dict]
) -> float | None:
    """Return the mean |log-prob of the engine - of a full pass|.

    It is over ids that were sampled after a change in their response; None if there are none.
    """

    @functools.partial(jax.jit, static_argnums=0)
    def logprobs(model: Any, params: dict, ids_T: jax.Array) -> jax.Array:
        decoder = Decoder.from_params(model, params)
        scores = jax.nn.log_softmax(decoder.logits(decoder(ids_T[None])[0][0, :-1]))
        return jnp.take_along_axis(scores, ids_T[1:, None], axis=1)[:, 0]

    distances: list[np.ndarray] = []
    for prompt, output in zip(prompts, outputs, strict=True):
        versions = np.asarray(output.policy_versions)
        ids = np.zeros(PROMPT + MAX_NEW, np.int32)  # padded, for one program
        ids[: PROMPT + len(versions)] = np.concatenate([prompt, output.token_ids])
        for version in sorted(set(versions[versions > versions[0]].tolist())):
            context_logprobs = np.asarray(logprobs(model, weights[version], jnp.asarray(ids)))
            exact = context_logprobs[PROMPT - 1 :][: len(versions)]
            is_of_version = versions == version
            sampled = np.asarray(output.log_probs)[is_of_version]
            distances.append(np.abs(sampled - exact[is_of_version]))
    if not distances:
        return None
    return float(np.concatenate(distances).mean())


def perturb(params: dict, size: float, key: jax.Array) -> dict:
    """Move every weight by ``size`` in a random direction."""
    leaves, tree = jax.tree.flatten(params)
    keys = jax.random.split(key, len(leaves))
    moved_leaves = []
    for leaf, leaf_key in zip(leaves, keys, strict=True):
        direction = jax.random.rademacher(leaf_key, leaf.shape, leaf.dtype)
        moved_leaves.append(leaf + size * direction)
    return jax.tree.unflatten(tree, moved_leaves)


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--requests", type=int, default=24)
    parser.add_argument("--updates", type=int, default=4)
    parser.add_argument("--step", type=float, default=1e-5)
    arguments = parser.parse_args()
    model, params = load_quickstart()
    weights = [params]
    for number in range(arguments.updates):
        weights.append(perturb(weights[-1], arguments.step, jax.random.key(number)))
    prompts = random_ids(arguments.requests, PROMPT)
    lengths = [round(LENGTHS.at("length", str(i), 0)) for i in range(arguments.requests)]
    shapes = EngineShapes(
        max_model_len=PROMPT + MAX_NEW,
        max_concurrent_decodes=SLOTS,
        kv_cache_tokens=arguments.requests * (PROMPT + MAX_NEW + 32),
        decode_steps=4,
        prefill_buckets=(128, 256),
    )
    results: dict[str, dict[str, float | None]] = {}
    baseline: dict[str, float] = {}
    for name in MODES:
        backend = JetStreamBackend(model, params, shapes, compile_ahead=True)
        outputs, figures = asyncio.run(measure(backend, prompts, lengths, weights, name))
        if name == "none":  # the first mode
            baseline = figures
        added_seconds = figures["seconds"] - baseline["seconds"]
        results[name] = {
            "seconds": round(figures["seconds"], 2),
            "ratio_vs_none": round(figures["seconds"] / baseline["seconds"], 3),
            "seconds_per_update": round(added_seconds / arguments.updates, 2),
            "recomputed_ids": figures["prefilled"] - baseline["prefilled"],
            "logprob_gap": gap(model, prompts, outputs, weights),
            "prefilled": figures["prefilled"],
        }
        print(f"{name:10}", results[name], flush=True)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
