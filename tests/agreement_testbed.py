"""Real engines with one fault each, and what a diagnosis makes of their rollouts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from jax_agent_rl.agreement.diagnosis import EngineView, diagnose
from jax_agent_rl.agreement.report import JAX_ENGINE, Diagnosis, Tolerance
from jax_agent_rl.agreement.subject import DiagnosisSubject, collect_contexts
from jax_agent_rl.jetstream.backend import JetStreamBackend
from jax_agent_rl.jetstream.engine import EngineShapes
from jax_agent_rl.models.config import DecoderConfig, Experts, Params, Rope
from jax_agent_rl.rollout.protocol import GenerateRequest, RolloutBackend
from jax_agent_rl.types import FinishReason, Group, SamplingParams, TokenOutput, Trajectory, Turn, digest_ids
from tests.tiny import TINY

PROMPTS = (21, 34, 17, 29)
"""Ids of the prompts."""
SHAPES = EngineShapes(
    max_model_len=64, max_concurrent_decodes=2, kv_cache_tokens=256, decode_steps=4, prefill_buckets=(32,)
)
LLAMA = replace(TINY, num_layers=3, max_position_embeddings=256)


def with_experts(base: DecoderConfig, intermediate_size: int, **fields: Any) -> DecoderConfig:
    """A Qwen3 mixture of experts of a dense model's sizes."""
    experts = Experts(count=4, per_token=2, intermediate_size=intermediate_size, normalize=True)
    return replace(base, family="qwen3_moe", qk_norm=True, experts=experts, **fields)


def as_gemma(base: DecoderConfig, windowed_layers: tuple[bool, ...], **fields: Any) -> DecoderConfig:
    """A Gemma 3, with windowed layers, of another model's sizes."""
    return replace(
        base,
        family="gemma3_text",
        qk_norm=True,
        norm_offset=1.0,
        sandwich_norms=True,
        activation="gelu_tanh",
        embed_scale=base.hidden_size**0.5,
        rope=Rope(theta=1e6),
        local_rope=Rope(theta=1e4),
        sliding_window=16,
        windowed_layers=windowed_layers,
        **fields,
    )


MOE = with_experts(LLAMA, 24)
GEMMA = as_gemma(LLAMA, (True, True, False))


def jax_engine(model: DecoderConfig, params: Params, **options: Any) -> JetStreamBackend:
    """An engine of this process, not started."""
    return JetStreamBackend(model, params, SHAPES, seed=3, **options)


def prompts(model: DecoderConfig, lengths: Sequence[int] = PROMPTS) -> list[tuple[int, ...]]:
    rng = np.random.default_rng(5)
    return [tuple(rng.integers(3, model.vocab_size, length).tolist()) for length in lengths]


Ask = Callable[[GenerateRequest], GenerateRequest]
Answer = Callable[[GenerateRequest, TokenOutput], TokenOutput]


@dataclass(frozen=True, kw_only=True)
class Between:
    """What a faulty engine does to requests and answers on its way.

    Attributes:
        ask: what it makes of a request.
        answer: what it makes of an output; the request is the one it was sent.
    """

    ask: Ask = lambda request: request
    answer: Answer = lambda request, output: output


async def rollouts(
    backend: RolloutBackend,
    model: DecoderConfig,
    *,
    between: Between = Between(),  # noqa: B008  (frozen)
    temperature: float = 1.0,
    max_tokens: int = 20,
    lengths: Sequence[int] = PROMPTS,
) -> list[Group]:
    """One trajectory of one turn for each prompt."""
    made = []
    for i, prompt in enumerate(prompts(model, lengths)):
        sampling = SamplingParams(max_tokens=max_tokens, temperature=temperature, ignore_eos=True, seed=i)
        request = GenerateRequest(request_id=f"r{i}", prompt_ids=prompt, sampling=sampling)
        output = between.answer(request, await backend.generate(between.ask(request)))
        made.append(
            Trajectory.from_turns(
                prompt_ids=prompt,
                turns=[Turn(output=output)],
                trajectory_id=f"t{i}",
                group_id="g",
                agent_name="single_turn_agent",
                finish_reason=FinishReason.ANSWER,
            )
        )
    return [Group(group_id="g", trajectories=tuple(made))]


def as_if_asked(request: GenerateRequest, output: TokenOutput) -> TokenOutput:
    """The engine believes that it saw what it was sent."""
    return replace(output, context_digest=digest_ids((*request.prompt_ids, *output.token_ids)))


def diagnosis(
    groups: Sequence[Group],
    model: DecoderConfig,
    params: Params,
    *,
    engine: EngineView | None = None,
    temperature: float = 1.0,
    since: int = 0,
    older: Mapping[str, Params] | None = None,
    tolerance: Tolerance = JAX_ENGINE["float32"],
) -> Diagnosis:
    """What is said about rollouts that a learner with these parameters is to train on."""
    subject = DiagnosisSubject(
        model=model,
        params=params,
        dtype="float32",
        temperature=temperature,
        contexts=collect_contexts(groups, since),
        older={name: (lambda made=made: made) for name, made in (older or {}).items()},
    )
    return diagnose(subject, tolerance=tolerance, engine=engine)
