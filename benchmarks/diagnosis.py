"""How long a diagnosis takes, and whether it names what is wrong with an engine.

    python benchmarks/diagnosis.py [--faults eps temperature …] [--blind]

Engines of SmolLM2-135M in float32 have one fault each. They hold eight conversations of three turns
about the quickstart's questions, of 150 to 260 prompt ids, 16 sampled ids a turn and a tool's
result after each turn but the last. A line for each fault says the seconds, the cause that was
named, and what was not tried in time. Every program is compiled anew. ``--blind`` diagnoses by
log-probs alone, as of an engine that cannot be looked into; then single tensors of the embeddings'
and the head's kind cannot be named. The last line is one JSON object, by fault: ``seconds``,
``processor_seconds`` of all threads, ``cause``, ``named``.
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
        causes: the diagnosis may name any of these.
        learner: returns the learner's model and weights from the quickstart's.
        model: returns the engine's model from the learner's.
        params: returns the engine's weights from the learner's.
        options: of the engine.
        sampling: parameters with which the engine replaces those of a request.
        later_prompt: returns what the engine computes in place of a later turn's context. The
            second argument is the index of the first sampled id.
        before_update: returns the weights that the engine has in the first turn; the learner's
            follow. None: it has those at once.
        patch: further changes while the engine runs.
        patch_update: further changes while its weights are updated.
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
    """Return weights in which these parameters of the layers are replaced."""
    return params | {"layers": params["layers"] | changed}


def with_head(model: DecoderConfig, params: Params) -> tuple[DecoderConfig, Params]:
    """Return the model with a head that is not its embeddings."""
    noise = jax.random.normal(jax.random.key(1), params["embed"].shape) * jnp.std(params["embed"])
    head = params["embed"] + 0.5 * noise
    return replace(model, tie_word_embeddings=False), params | {"lm_head": head}


def without_head(params: Params) -> Params:
    return {name: x for name, x in params.items() if name != "lm_head"}


def exchanged(params: Params) -> Params:
    """Exchange one matrix of two neighbouring layers."""
    up = params["layers"]["up"]
    return with_layers(params, up=up.at[7].set(up[8]).at[8].set(up[7]))


def updated(params: Params) -> Params:
    """Return weights of another version."""

    def move(x: jax.Array) -> jax.Array:
        return x + 0.01 * jnp.std(x) * jax.random.normal(jax.random.key(2), x.shape)

    return params | {"layers": jax.tree.map(move, params["layers"])}


def later_positions() -> AbstractContextManager[Any]:
    """Shift positions from 280 on, which are in a later turn, by two."""
    prepare_mixers = forward.prepare_mixers

    def shifted(config: DecoderConfig, positions: jax.Array, images: Any) -> Any:
        changed = jnp.where(positions >= 280, positions + 2, positions)
        return prepare_mixers(config, changed, images)

    return mock.patch.object(forward, "prepare_mixers", shifted)


def permuted_scales() -> AbstractContextManager[Any]:
    """Give each row of an 8-bit tensor the scale of the previous row."""

    def permuted(x: jax.Array, dtype: Any, *, axis: int) -> Quantized:
        correct = quantized(x, dtype, axis=axis)
        return Quantized(correct.numbers, jnp.roll(correct.scale, 1, axis=-2))

    return mock.patch.object(forward, "quantized", permuted)


def stale_cache(backend: JetStreamBackend) -> AbstractContextManager[Any]:
    """Let the prefix cache outlive its weights."""
    return mock.patch.object(backend.core.scheduler.block_manager, "reset", return_value=None)


def without_an_id(ids: tuple[int, ...], prompt: int) -> tuple[int, ...]:
    """Leave out the first id that was inserted."""
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
        causes=(Cause.STALE_PREFIX,), before_update=updated, patch_update=stale_cache
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
            system, *messages = json.loads(line)["prompt"]
            num_left_out = SHORTER[number % len(SHORTER)]
            prompts.append([system, *messages[num_left_out:]])
    return prompts


async def conversations(backend: JetStreamBackend, fault: Fault, params: Params) -> list[Group]:
    """Hold eight conversations with an engine.

    Args:
        params: to which the engine's weights are updated after the first turn, if the fault has
            others before.
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
            prompt_ids = context
            if number > 0:
                prompt_ids = fault.later_prompt(context, len(prompts[i]))
            sampling = {"max_tokens": SAMPLED, "ignore_eos": True, "seed": 100 * number + i}
            request = GenerateRequest(
                request_id=f"{number}-{i}",
                prompt_ids=prompt_ids,
                sampling=SamplingParams(**sampling | fault.sampling),
            )
            requests.append(request)
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

    members = []
    for i, prompt_ids in enumerate(prompts):
        trajectory = Trajectory.from_turns(
            prompt_ids=prompt_ids,
            turns=turns[i],
            trajectory_id=f"t{i}",
            group_id="g",
            agent_name="tool_agent",
            finish_reason=FinishReason.ANSWER,
        )
        members.append(trajectory)
    return [Group(group_id="g", trajectories=tuple(members))]


async def view(backend: JetStreamBackend, *, blind: bool) -> EngineView:
    """Return what a diagnosis may look at in an engine; nothing inside it if ``blind``."""
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
    previous_params = updated(params)
    if fault.before_update is None:
        engine_params = fault.params(params)
    else:
        engine_params = fault.before_update(params)
    options: dict[str, Any] = {"shapes": SHAPES, "seed": 3} | fault.options
    backend = JetStreamBackend(fault.model(model), engine_params, **options)

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
            older={"the version before": lambda: previous_params},
        )
        tolerance = JAX_ENGINE[backend.capabilities.precision]
        forget_programs(disk=True)

        start = time.perf_counter()
        processor_start = time.process_time()
        engine = await view(backend, blind=blind)
        diagnosis = await asyncio.to_thread(
            diagnose, subject, tolerance=tolerance, engine=engine, seconds=limit
        )
        seconds = time.perf_counter() - start
        processor_seconds = time.process_time() - processor_start
        return diagnosis, seconds, processor_seconds


def forget_programs(*, disk: bool) -> None:
    """Let programs be compiled anew: what is patched is not what was compiled before.

    Args:
        disk: whether programs in the compilation cache are forgotten as well; a run's first
            diagnosis finds none there.
    """
    jax.config.update("jax_enable_compilation_cache", not disk)
    compilation_cache.reset_cache()
    jax.clear_caches()


def each_in_a_process(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure every fault in a process of its own.

    Programs that were compiled for one must not serve the next.
    """
    options = ["--seconds", str(arguments.seconds)]
    if arguments.blind:
        options.append("--blind")
    if arguments.verbose:
        options.append("--verbose")
    results = {}
    for name in arguments.faults:
        command = [sys.executable, __file__, "--faults", name, *options]
        process = subprocess.run(
            command, stdout=subprocess.PIPE, text=True, check=True, timeout=1800
        )
        *lines, result = process.stdout.splitlines()
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
            diagnosis, seconds, processor_seconds = asyncio.run(
                measure(fault, blind=arguments.blind, limit=arguments.seconds)
            )

        is_named = diagnosis.cause in fault.causes
        results[name] = {
            "seconds": round(seconds, 1),
            "processor_seconds": round(processor_seconds, 1),
            "cause": str(diagnosis.cause),
            "named": is_named,
        }
        verdict = "named" if is_named else "not named"
        print(
            f"{name}: {seconds:.1f} s ({processor_seconds:.1f} s of all threads), {verdict}:"
            f" {diagnosis.line}",
            flush=True,
        )
        if arguments.verbose:
            print("\n".join(diagnosis.lines()), flush=True)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
