"""How far engine and learner are apart in each precision, for every kind of layer.

    python benchmarks/precision.py [--models attention latent …]

Random models have eight layers of width 64, with matrices that keep the size of what they multiply
and logits as far apart as a trained model's. SmolLM2-135M continues paragraphs of this project's
pages, and reads them. In each pair of precisions an engine samples 8 x 48 ids at temperature 1, and
a learner scores them, mixtures of experts with the experts that the engine took. Both have the same
float32 weights, which either rounds. Prints a row of the table in ``docs/agreement.md`` for each
model: the mean gap in nats, and the largest. The last line is one JSON object with the same
numbers.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from common import argument_parser, load_quickstart, running

from jax_agent_rl.chat.codec import ChatCodec
from jax_agent_rl.config import AlgorithmConfig, LearnerConfig
from jax_agent_rl.deploy.quickstart.model import fetch_quickstart_model
from jax_agent_rl.jetstream.backend import JetStreamBackend
from jax_agent_rl.jetstream.shapes import EngineShapes
from jax_agent_rl.learner.comparison import Comparison
from jax_agent_rl.learner.learner import Learner
from jax_agent_rl.models.config import (
    DecoderConfig,
    DeltaNet,
    Experts,
    LatentAttention,
    Params,
    Rope,
)
from jax_agent_rl.models.parameters import Kind, parameter_at
from jax_agent_rl.rollout.protocol import GenerateRequest
from jax_agent_rl.types import FinishReason, Group, SamplingParams, Trajectory, Turn

Dtype = Literal["float32", "bfloat16"]
PAIRS: tuple[tuple[Dtype, Dtype], ...] = (
    ("float32", "float32"),
    ("bfloat16", "float32"),
    ("bfloat16", "bfloat16"),
)
"""Precisions of engine and learner."""
CONTEXTS = 8
PROMPT = 40
SAMPLED = 48
LAYERS = 8
LOGIT_SIZE = 2.5
"""Standard deviation of a random model's logits."""
PAGES = Path(__file__).parents[1] / "docs"
SHAPES = EngineShapes(
    max_model_len=96,
    max_concurrent_decodes=CONTEXTS,
    kv_cache_tokens=1024,
    decode_steps=8,
    prefill_buckets=(64,),
)

ATTENTION = DecoderConfig(
    vocab_size=512,
    hidden_size=64,
    intermediate_size=160,
    num_layers=LAYERS,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    tie_word_embeddings=False,
    eos_token_ids=(2,),
    qk_norm=True,
)
EXPERTS = Experts(count=16, per_token=4, intermediate_size=48, normalize=True)
DELTA_NETS = replace(
    ATTENTION,
    rope=Rope(partial_rotary=0.25),
    attention_gate=True,
    delta_net=DeltaNet(
        layers=(True, True, True, False) * (LAYERS // 4),
        key_heads=2,
        value_heads=4,
        key_dim=16,
        value_dim=16,
    ),
)
MODELS = {
    "attention": ATTENTION,
    "windowed": replace(
        ATTENTION,
        sliding_window=16,
        windowed_layers=(True, True, True, False) * (LAYERS // 4),
    ),
    "latent": replace(
        ATTENTION,
        qk_norm=False,
        num_kv_heads=4,
        head_dim=24,
        rope=Rope(interleaved=True),
        latent=LatentAttention(q_rank=32, kv_rank=32, nope_dim=16, rope_dim=8, value_dim=16),
    ),
    "delta nets": DELTA_NETS,
    "attention, experts": replace(ATTENTION, experts=EXPERTS),
    "delta nets, experts": replace(
        DELTA_NETS, experts=replace(EXPERTS, shared_size=48, shared_gated=True)
    ),
}
SMOLLM2 = "SmolLM2-135M"


def random_params(model: DecoderConfig) -> Params:
    """Draw weights that keep the size of what goes through them."""
    rng = np.random.default_rng(0)

    def draw(path: Any, shape: tuple[int, ...]) -> jax.Array:
        name = path[-1].key
        numbers = rng.standard_normal(shape).astype(np.float32)
        kind = parameter_at(path).kind
        if kind in (Kind.NORM, Kind.PLAIN_NORM):
            return jnp.asarray(1 + 0.2 * numbers)
        if name == "delta_decay_log":  # as such layers are published before training
            return jnp.asarray(np.log(rng.uniform(1, 16, shape)), jnp.float32)
        if name == "delta_decay_bias":
            return jnp.ones(shape)
        if kind is Kind.EMBEDDING:
            return jnp.asarray(numbers)
        scale = shape[-1] ** -0.5
        if kind is Kind.HEAD:
            scale *= LOGIT_SIZE
        return jnp.asarray(scale * numbers)

    return jax.tree_util.tree_map_with_path(
        draw, model.parameter_shapes(), is_leaf=lambda x: isinstance(x, tuple)
    )


def random_prompts(model: DecoderConfig) -> list[tuple[int, ...]]:
    ids = np.random.default_rng(1).integers(3, model.vocab_size, (CONTEXTS, PROMPT))
    return [tuple(prompt) for prompt in ids.tolist()]


def paragraphs(count: int) -> list[tuple[int, ...]]:
    """Return the first ids of long paragraphs of this project's pages."""
    codec = ChatCodec.from_pretrained(fetch_quickstart_model(), tool_prompt="none")
    found = []
    for page in sorted(PAGES.glob("*.md")):
        for paragraph in page.read_text().split("\n\n"):
            is_prose = paragraph[:1].isalpha() and len(paragraph) > 400
            if is_prose:
                found.append(tuple(codec.tokenizer.encode(paragraph)[:count]))
                break
        if len(found) == CONTEXTS:
            return found
    raise AssertionError(f"the pages have {len(found)} long paragraphs")


async def sample(backend: JetStreamBackend, prompts: list[tuple[int, ...]]) -> Group:
    """Let an engine continue prompts."""
    requests = []
    for number, prompt in enumerate(prompts):
        sampling = SamplingParams(max_tokens=SAMPLED, temperature=1.0, seed=number, ignore_eos=True)
        request = GenerateRequest(request_id=str(number), prompt_ids=prompt, sampling=sampling)
        requests.append(request)
    outputs = await asyncio.gather(*map(backend.generate, requests))

    trajectories = []
    for number, output in enumerate(outputs):
        trajectory = Trajectory.from_turns(
            prompt_ids=prompts[number],
            turns=[Turn(output=output)],
            trajectory_id=f"g-{number}",
            group_id="g",
            agent_name="benchmark",
            finish_reason=FinishReason.ANSWER,
        )
        trajectories.append(trajectory)
    return Group(group_id="g", trajectories=tuple(trajectories))


def gap(learner: Learner, group: Group) -> Comparison:
    """Compare an engine's log-probs with the learner's."""
    (mini_batch,) = learner.packer.mini_batches([group])
    scored = learner.scorer.logprobs(learner.policy.weights, mini_batch.batch)
    gaps = []
    for trajectory, log_probs in zip(group.trajectories, scored, strict=True):
        gaps.append(np.asarray(trajectory.rollout_logprobs) - log_probs)
    return Comparison.of(np.concatenate(gaps))


async def measure(name: str) -> list[Comparison]:
    """Return the gap of a model in each of the pairs."""
    if name == SMOLLM2:
        model, params = load_quickstart()
        prompts = paragraphs(PROMPT)
    else:
        model = MODELS[name]
        params = random_params(model)
        prompts = random_prompts(model)

    groups = {}
    for dtype in dict.fromkeys(engine_dtype for engine_dtype, _ in PAIRS):
        async with running(JetStreamBackend(model, params, SHAPES, dtype=dtype)) as backend:
            groups[dtype] = await sample(backend, prompts)

    comparisons = []
    for engine_dtype, learner_dtype in PAIRS:
        config = LearnerConfig(pack_length=512, remat="none", compute_dtype=learner_dtype)
        learner = Learner(
            model, params, algorithm=AlgorithmConfig(), config=config, temperature=1.0
        )
        comparisons.append(gap(learner, groups[engine_dtype]))
    return comparisons


def main() -> None:
    names = [*MODELS, SMOLLM2]
    parser = argument_parser(__doc__)
    parser.add_argument("--models", nargs="*", choices=names, default=names)
    arguments = parser.parse_args()

    results = {}
    for name in arguments.models:
        cells = [name]
        results[name] = {}
        for (engine, learner), gaps in zip(PAIRS, asyncio.run(measure(name)), strict=True):
            cells.append(f"{gaps.mean:.2g}, {gaps.largest:.2g}")
            results[name][f"{engine} {learner}"] = [gaps.mean, gaps.largest]
        print(f"| {' | '.join(cells)} |", flush=True)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
