"""Real engines with one fault each, and what a diagnosis makes of their rollouts."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
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
from jax_agent_rl.types import (
    FinishReason,
    Group,
    SamplingParams,
    TokenOutput,
    Trajectory,
    Turn,
    digest_ids,
)
from tests.tiny import TINY, tiny_params

PROMPTS = (21, 34, 17, 29)
"""Ids of the prompts."""
SHAPES = EngineShapes(
    max_model_len=64,
    max_concurrent_decodes=2,
    kv_cache_tokens=256,
    decode_steps=4,
    prefill_buckets=(32,),
)
LLAMA = replace(TINY, num_layers=3, max_position_embeddings=256)


def with_experts(base: DecoderConfig, intermediate_size: int, **fields: Any) -> DecoderConfig:
    """A Qwen3 mixture of experts of a dense model's sizes."""
    experts = Experts(count=4, per_token=2, intermediate_size=intermediate_size, normalize=True)
    return replace(base, family="qwen3_moe", qk_norm=True, experts=experts, **fields)


def as_gemma(
    base: DecoderConfig, windowed_layers: tuple[bool, ...], **fields: Any
) -> DecoderConfig:
    """A Gemma 3, with windowed layers, of another model's sizes."""
    return replace(
        base,
        family="gemma3_text",
        qk_norm=True,
        norm_offset=1.0,
        norms="around",
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
    between: Between = Between(),
    temperature: float = 1.0,
    max_tokens: int = 20,
    lengths: Sequence[int] = PROMPTS,
) -> list[Group]:
    """One trajectory of one turn for each prompt."""
    trajectories = []
    for i, prompt in enumerate(prompts(model, lengths)):
        sampling = SamplingParams(
            max_tokens=max_tokens, temperature=temperature, ignore_eos=True, seed=i
        )
        request = GenerateRequest(request_id=f"r{i}", prompt_ids=prompt, sampling=sampling)
        output = between.answer(request, await backend.generate(between.ask(request)))
        trajectories.append(
            Trajectory.from_turns(
                prompt_ids=prompt,
                turns=[Turn(output=output)],
                trajectory_id=f"t{i}",
                group_id="g",
                agent_name="single_turn_agent",
                finish_reason=FinishReason.ANSWER,
            )
        )
    return [Group(group_id="g", trajectories=tuple(trajectories))]


BeforeTurn = Callable[[int], Awaitable[None]]


async def nothing(turn: int) -> None:
    """Do nothing before a turn."""


async def conversations(
    backend: RolloutBackend,
    model: DecoderConfig,
    *,
    between: Between = Between(),
    before_turn: BeforeTurn = nothing,
    turns: int = 3,
    temperature: float = 1.0,
    max_tokens: int = 8,
    inserted: int = 5,
    lengths: Sequence[int] = (21, 24, 17, 26),
) -> list[Group]:
    """One trajectory of several turns for each prompt; random ids are inserted after each turn but
    the last.

    All of them make their first turn, then their second one, and so on.
    """
    rng = np.random.default_rng(6)
    contexts = [list(prompt) for prompt in prompts(model, lengths)]
    turns_of: list[list[Turn]] = [[] for _ in lengths]
    for turn in range(turns):
        await before_turn(turn)
        for i, context in enumerate(contexts):
            sampling = SamplingParams(
                max_tokens=max_tokens, temperature=temperature, ignore_eos=True, seed=10 * turn + i
            )
            request = GenerateRequest(
                request_id=f"r{turn}-{i}", prompt_ids=tuple(context), sampling=sampling
            )
            output = between.answer(request, await backend.generate(between.ask(request)))
            last = turn == turns - 1
            appended = () if last else tuple(rng.integers(3, model.vocab_size, inserted).tolist())
            turns_of[i].append(Turn(output=output, appended_ids=appended))
            context += [*output.token_ids, *appended]
    trajectories = [
        Trajectory.from_turns(
            prompt_ids=prompt,
            turns=turns_of[i],
            trajectory_id=f"t{i}",
            group_id="g",
            agent_name="tool_agent",
            finish_reason=FinishReason.ANSWER,
        )
        for i, prompt in enumerate(prompts(model, lengths))
    ]
    return [Group(group_id="g", trajectories=tuple(trajectories))]


async def look_into(backend: JetStreamBackend) -> EngineView:
    """Look into the engine as the trainer does, from a thread beside the loop."""
    loop = asyncio.get_running_loop()
    tensors = await backend.tensor_samples()

    def layers(ids):
        return asyncio.run_coroutine_threadsafe(backend.layer_outputs(ids), loop).result(timeout=60)

    return EngineView(precision=backend.capabilities.precision, tensors=tensors, layers=layers)


async def diagnosed_engine(
    model: DecoderConfig,
    served: DecoderConfig | None = None,
    *,
    params: Params | None = None,
    served_params: Params | None = None,
    between: Between = Between(),
    inspected: bool = False,
    older: Mapping[str, Params] | None = None,
    talks: bool = False,
    lengths: Sequence[int] | None = None,
    tolerance: Tolerance = JAX_ENGINE["float32"],
    adapters: bool = False,
    **options: Any,
) -> Diagnosis:
    """What is said about an engine that runs ``served`` with ``served_params`` where the learner
    has others.
    """
    params = tiny_params(1, model) if params is None else params
    backend = jax_engine(
        served or model, params if served_params is None else served_params, **options
    )
    await backend.start()
    try:
        roll_out: Any = conversations if talks else rollouts
        with_lengths = {} if lengths is None else {"lengths": lengths}
        groups = await roll_out(backend, model, between=between, **with_lengths)
        view = await look_into(backend) if inspected else None
        arguments: dict[str, Any] = {"older": older, "tolerance": tolerance, "adapters": adapters}
        return await asyncio.to_thread(diagnosis, groups, model, params, engine=view, **arguments)
    finally:
        await backend.close()


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
    adapters: bool = False,
) -> Diagnosis:
    """What is said about rollouts that a learner with these parameters is to train on; it takes as
    long as it likes.
    """
    subject = DiagnosisSubject(
        model=model,
        params=params,
        dtype="float32",
        temperature=temperature,
        contexts=collect_contexts(groups, since),
        older={
            name: lambda version_params=version_params: version_params
            for name, version_params in (older or {}).items()
        },
        adapters=adapters,
    )
    return diagnose(subject, tolerance=tolerance, engine=engine, clock=lambda: 0.0)
