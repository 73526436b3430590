"""How long a diagnosis takes, and whether it names what is wrong: faults in engines of the
quickstart's model.

    python benchmarks/diagnosis.py [--faults eps temperature …] [--blind]

SmolLM2-135M in float32; eight conversations of three turns about the quickstart's questions, of 150
to 260 prompt ids, 16 sampled ids a turn and a tool's result after each turn but the last. A line
for each fault: the seconds, the cause that was named, and what was not tried in time. Every program
is compiled anew. ``--blind`` diagnoses by log-probs alone, as of an engine that cannot be looked
into; then single tensors of the embeddings' and the head's kind cannot be named. The last line is
one JSON object, by fault: ``seconds``, ``processor_seconds`` of all threads, ``cause``, ``named``.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
from common import argument_parser, cpu, load_quickstart, running
from jax.experimental.compilation_cache import compilation_cache

from jax_agent_rl.agreement.diagnosis import EngineView, diagnose
from jax_agent_rl.agreement.report import JAX_ENGINE, Cause, Diagnosis
from jax_agent_rl.agreement.search import SECONDS
from jax_agent_rl.agreement.subject import DiagnosisSubject, collect_contexts
from jax_agent_rl.chat.codec import ChatCodec
from jax_agent_rl.chat.messages import Message
from jax_agent_rl.data.tasks import prepare_shop
from jax_agent_rl.deploy.quickstart.model import fetch_quickstart_model
from jax_agent_rl.jetstream import forward
from jax_agent_rl.jetstream.backend import JetStreamBackend
from jax_agent_rl.jetstream.engine import EngineShapes
from jax_agent_rl.models.config import DecoderConfig, Params
from jax_agent_rl.models.layers import Quantized, quantized
from jax_agent_rl.models.tensors import LayerOutput
from jax_agent_rl.rollout.protocol import GenerateRequest, WeightUpdate
from jax_agent_rl.types import FinishReason, Group, SamplingParams, Trajectory, Turn, digest_ids

CONVERSATIONS = 8
SHORTER = (0, 6, 10, 0)
"""Messages of the worked examples that prompts leave out, in turn, so that lengths differ."""
TURNS = 3
SAMPLED = 16
SHAPES = EngineShapes(
    max_model_len=352,
    max_concurrent_decodes=8,
    kv_cache_tokens=4096,
    decode_steps=8,
    prefill_buckets=(64, 256),
)


Patch = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What is wrong with an engine; without changes nothing is.

    Attributes:
        causes: any of which the diagnosis may say.
        learner: what the learner has; the quickstart's model.
        model: what the engine makes of its config.
        params: what the engine makes of its weights.
        options: of the engine.
        sampling: what the engine makes of a request's parameters.
        later_prompt: what the engine makes of a later turn's context, whose first sampled id has
            the index given.
        before_update: weights that the engine has in the first turn; the learner's follow. None: it
            has those at once.
        patch: what else is changed while it runs.
        patch_update: what is changed while its weights are.
    """

    causes: tuple[Cause, ...]
    learner: Callable[[DecoderConfig, Params], tuple[DecoderConfig, Params]] = (
        lambda model, params: (model, params)
    )
    model: Callable[[DecoderConfig], DecoderConfig] = lambda model: model
    params: Callable[[Params], Params] = lambda params: params
    options: dict[str, Any] = field(default_factory=dict)
    sampling: dict[str, Any] = field(default_factory=dict)
    later_prompt: Callable[[tuple[int, ...], int], tuple[int, ...]] = lambda ids, prompt: ids
    before_update: Callable[[Params], Params] | None = None
    patch: Patch = nullcontext
    patch_update: Callable[[JetStreamBackend], AbstractContextManager[Any]] = lambda backend: (
        nullcontext()
    )


def with_layers(params: Params, **changed: jax.Array) -> Params:
    return params | {"layers": params["layers"] | changed}


def with_head(model: DecoderConfig, params: Params) -> tuple[DecoderConfig, Params]:
    """The model with a head of its own."""
    noise = jax.random.normal(jax.random.key(1), params["embed"].shape) * jnp.std(params["embed"])
    return replace(model, tie_word_embeddings=False), params | {
        "lm_head": params["embed"] + 0.5 * noise
    }


def without_head(params: Params) -> Params:
    return {name: x for name, x in params.items() if name != "lm_head"}


def exchanged(params: Params) -> Params:
    up = params["layers"]["up"]
    return with_layers(params, up=up.at[7].set(up[8]).at[8].set(up[7]))


def updated(params: Params) -> Params:
    """Weights of another version."""

    def move(x: jax.Array) -> jax.Array:
        return x + 0.01 * jnp.std(x) * jax.random.normal(jax.random.key(2), x.shape)

    return params | {"layers": jax.tree.map(move, params["layers"])}


def later_positions() -> AbstractContextManager[Any]:
    """Positions are two further from 280 on, in a later turn."""
    tables = forward._rope

    def further(config: DecoderConfig, positions: jax.Array) -> Any:
        return tables(config, jnp.where(positions >= 280, positions + 2, positions))

    return mock.patch.object(forward, "_rope", further)


def permuted_scales() -> AbstractContextManager[Any]:
    """Each scale of an 8-bit tensor is that of the row before."""

    def permuted(x: jax.Array, dtype: Any, *, axis: int) -> Quantized:
        right = quantized(x, dtype, axis=axis)
        return Quantized(right.numbers, jnp.roll(right.scale, 1, axis=-2))

    return mock.patch.object(forward, "quantized", permuted)


def kept_cache(backend: JetStreamBackend) -> AbstractContextManager[Any]:
    """The prefix cache outlives its weights."""
    return mock.patch.object(backend._core.scheduler.block_manager, "reset", return_value=None)


def without_an_id(ids: tuple[int, ...], prompt: int) -> tuple[int, ...]:
    """The first id that was inserted is missing."""
    index = prompt + SAMPLED
    return ids[:index] + ids[index + 1 :]


FAULTS: dict[str, Fault] = {
    # of outside reports
    "rotary base": Fault(
        causes=(Cause.ROTARY,),
        model=lambda model: replace(model, rope=replace(model.rope, theta=1e4)),
    ),
    "swapped tensors": Fault(causes=(Cause.MISNAMED_TENSOR,), params=exchanged),
    "wrong head": Fault(
        causes=(Cause.WRONG_TENSOR, Cause.MISNAMED_TENSOR),
        learner=with_head,
        params=lambda p: p | {"lm_head": jnp.roll(p["lm_head"], 1, axis=0)},
    ),
    "temperature": Fault(causes=(Cause.TEMPERATURE,), sampling={"temperature": 0.7}),
    "stale prefix": Fault(
        causes=(Cause.STALE_PREFIX,), before_update=updated, patch_update=kept_cache
    ),
    "int8 scales": Fault(
        causes=(Cause.WRONG_TENSOR,), options={"quantize": "int8"}, patch=permuted_scales
    ),
    "head of embeddings": Fault(
        causes=(Cause.MISSING_TENSOR, Cause.MISNAMED_TENSOR),
        learner=with_head,
        model=lambda model: replace(model, tie_word_embeddings=True),
        params=without_head,
    ),
    "later positions": Fault(causes=(Cause.POSITION,), patch=later_positions),
    "eps": Fault(causes=(Cause.SETTING,), model=lambda model: replace(model, rms_norm_eps=1e-3)),
    # of the same kinds
    "small eps": Fault(
        causes=(Cause.SETTING,), model=lambda model: replace(model, rms_norm_eps=1e-6)
    ),
    "attention scale": Fault(
        causes=(Cause.SETTING,),
        model=lambda model: replace(model, attention_scale=1 / model.head_dim),
    ),
    "window": Fault(
        causes=(Cause.WINDOW,),
        model=lambda model: replace(
            model, sliding_window=128, windowed_layers=(True,) * model.num_layers
        ),
    ),
    "final norm": Fault(
        causes=(Cause.MISSING_TENSOR,),
        params=lambda p: p | {"final_norm": jnp.ones_like(p["final_norm"])},
    ),
    "scaled keys": Fault(
        causes=(Cause.WRONG_TENSOR,),
        params=lambda p: with_layers(p, k=p["layers"]["k"].at[3].multiply(1.5)),
    ),
    "missing id": Fault(causes=(Cause.TOKEN_DRIFT,), later_prompt=without_an_id),
    "min_p": Fault(causes=(Cause.TRUNCATED_SUPPORT,), sampling={"min_p": 0.1}),
    # nothing is wrong
    "healthy": Fault(causes=(Cause.ROUNDING,)),
    "healthy, untied": Fault(causes=(Cause.ROUNDING,), learner=with_head),
    "healthy, bfloat16": Fault(causes=(Cause.ROUNDING,), options={"dtype": "bfloat16"}),
    "healthy, int8": Fault(causes=(Cause.ROUNDING,), options={"quantize": "int8"}),
    "healthy, int8 cache": Fault(causes=(Cause.ROUNDING,), options={"kv_dtype": "int8"}),
    "healthy, fp8 cache": Fault(causes=(Cause.ROUNDING,), options={"kv_dtype": "fp8"}),
    "healthy, updated": Fault(causes=(Cause.ROUNDING,), before_update=updated),
    "healthy, speculating": Fault(
        causes=(Cause.ROUNDING,), options={"shapes": replace(SHAPES, num_speculative_tokens=3)}
    ),
}


def read_prompts() -> list[list[Message]]:
    """Return the first prompts of the quickstart, some with fewer worked examples."""
    prompts = []
    with tempfile.TemporaryDirectory() as folder:
        train, _, _ = prepare_shop(Path(folder), train=CONVERSATIONS, heldout=1)
        for number, line in enumerate(train.read_text().splitlines()):
            system, *others = json.loads(line)["prompt"]
            prompts.append([system, *others[SHORTER[number % len(SHORTER)] :]])
    return prompts


async def conversations(backend: JetStreamBackend, fault: Fault, params: Params) -> list[Group]:
    """Let eight conversations be had; the engine's weights are updated to ``params`` after the
    first turn, or not.
    """
    codec = ChatCodec.from_pretrained(
        fetch_quickstart_model(), tool_format="pythonic", tool_prompt="none"
    )
    prompts = [tuple(codec.encode_prompt(messages)) for messages in read_prompts()]
    contexts = list(prompts)
    turns: list[list[Turn]] = [[] for _ in prompts]
    for number in range(TURNS):
        if number == 1 and fault.before_update is not None:
            with fault.patch_update(backend):
                await backend.update_weights(WeightUpdate(version=1, kind="arrays", payload=params))
        requests = []
        for i, context in enumerate(contexts):
            asked = {"max_tokens": SAMPLED, "ignore_eos": True, "seed": 100 * number + i}
            prompt = context if number == 0 else fault.later_prompt(context, len(prompts[i]))
            sampling = SamplingParams(**asked | fault.sampling)
            requests.append(
                GenerateRequest(request_id=f"{number}-{i}", prompt_ids=prompt, sampling=sampling)
            )
        outputs = await asyncio.gather(*map(backend.generate, requests))
        for i, output in enumerate(outputs):
            inserted: tuple[int, ...] = ()
            if number < TURNS - 1:
                result: Message = {"role": "tool", "content": str(1000 * number + 37 * i)}
                inserted = tuple(codec.encode_append(output.token_ids, [result]))
            contexts[i] += output.token_ids
            # An engine with a fault believes that it did what it was asked for.
            output = replace(output, context_digest=digest_ids(contexts[i]), supports=())
            turns[i].append(Turn(output=output, appended_ids=inserted))
            contexts[i] += inserted
    members = [
        Trajectory.from_turns(
            prompt_ids=prompt,
            turns=turns[i],
            trajectory_id=f"t{i}",
            group_id="g",
            agent_name="tool_agent",
            finish_reason=FinishReason.ANSWER,
        )
        for i, prompt in enumerate(prompts)
    ]
    return [Group(group_id="g", trajectories=tuple(members))]


async def view(backend: JetStreamBackend, *, blind: bool) -> EngineView:
    precision = backend.capabilities.precision
    if blind:
        return EngineView(precision=precision)
    loop = asyncio.get_running_loop()

    def layers(ids: Sequence[int]) -> Sequence[LayerOutput]:
        return asyncio.run_coroutine_threadsafe(backend.layer_outputs(ids), loop).result()

    return EngineView(precision=precision, tensors=await backend.tensor_samples(), layers=layers)


async def measure(fault: Fault, *, blind: bool, limit: float) -> tuple[Diagnosis, float, float]:
    """Return a diagnosis, with the seconds and processor seconds that it took."""
    model, params = fault.learner(*load_quickstart())
    older = updated(params)
    served = fault.params(params) if fault.before_update is None else fault.before_update(params)
    options: dict[str, Any] = {"shapes": SHAPES, "seed": 3} | fault.options
    backend = JetStreamBackend(fault.model(model), served, **options)
    async with running(backend):
        groups = await conversations(backend, fault, params)
        contexts = collect_contexts(groups, backend.policy_version)
        subject = DiagnosisSubject(
            model=model,
            params=params,
            dtype="float32",
            temperature=1.0,
            contexts=contexts,
            backend="jetstream",
            older={"the version before": lambda: older},
        )
        tolerance = JAX_ENGINE[backend.capabilities.precision]
        forget_programs(disk=True)
        began = time.perf_counter()
        processor_began = time.process_time()
        engine = await view(backend, blind=blind)
        found = await asyncio.to_thread(
            diagnose, subject, tolerance=tolerance, engine=engine, seconds=limit
        )
        return found, time.perf_counter() - began, time.process_time() - processor_began


def forget_programs(*, disk: bool) -> None:
    """Let programs be compiled anew: what is patched is not what was compiled before.

    Args:
        disk: whether those in the compilation cache are forgotten as well, as a run's first
            diagnosis has none there.
    """
    jax.config.update("jax_enable_compilation_cache", not disk)
    compilation_cache.reset_cache()
    jax.clear_caches()


def each_in_a_process(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure every fault in a process of its own: programs that were compiled for one must not
    serve the next.
    """
    options = ["--seconds", str(arguments.seconds)]
    if arguments.blind:
        options.append("--blind")
    if arguments.verbose:
        options.append("--verbose")
    results = {}
    for name in arguments.faults:
        command = [sys.executable, __file__, "--faults", name, *options]
        output = subprocess.run(
            command, stdout=subprocess.PIPE, text=True, check=True, timeout=1800
        ).stdout
        *lines, result = output.splitlines()
        print("\n".join(lines), flush=True)
        results |= json.loads(result)
    return results


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--faults", nargs="*", choices=FAULTS, default=list(FAULTS))
    parser.add_argument("--blind", action="store_true")
    parser.add_argument(
        "--seconds", type=float, default=SECONDS, help="after which no other hypothesis is tried"
    )
    parser.add_argument("--verbose", action="store_true", help="print every finding")
    arguments = parser.parse_args()
    if len(arguments.faults) > 1:
        print(cpu())
        print(json.dumps(each_in_a_process(arguments)))
        return
    results = {}
    for name in arguments.faults:
        fault = FAULTS[name]
        forget_programs(disk=False)
        with fault.patch():
            found, seconds, used = asyncio.run(
                measure(fault, blind=arguments.blind, limit=arguments.seconds)
            )
        named = found.cause in fault.causes
        times = {"seconds": round(seconds, 1), "processor_seconds": round(used, 1)}
        results[name] = {**times, "cause": str(found.cause), "named": named}
        verdict = "named" if named else "not named"
        print(
            f"{name}: {seconds:.1f} s ({used:.1f} s of all threads), {verdict}: {found.line}",
            flush=True,
        )
        if arguments.verbose:
            print("\n".join(found.lines()), flush=True)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
