"""How long a diagnosis takes, and whether it names what is wrong: faults in engines of the quickstart's model.

    python benchmarks/diagnosis.py [--faults eps position …] [--blind]

SmolLM2-135M in float32; eight conversations of three turns, of 150 to 230 prompt ids, 16 sampled ids a turn and 12
inserted ones between turns. A line for each fault: the seconds, the cause that was named, and what was not tried in
time. ``--blind`` diagnoses by log-probs alone, as of an engine that cannot be looked into. The last line is one JSON
object, by fault: ``seconds``, ``processor_seconds`` of all threads, ``cause``, ``named``.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
from common import argument_parser, cpu, load_quickstart, random_ids, running

from jax_agent_rl.agreement.diagnosis import EngineView, diagnose
from jax_agent_rl.agreement.report import JAX_ENGINE, Cause, Diagnosis
from jax_agent_rl.agreement.search import SECONDS
from jax_agent_rl.agreement.subject import DiagnosisSubject, collect_contexts
from jax_agent_rl.jetstream import forward
from jax_agent_rl.jetstream.backend import JetStreamBackend
from jax_agent_rl.jetstream.engine import EngineShapes
from jax_agent_rl.models.config import DecoderConfig, Params
from jax_agent_rl.rollout.protocol import GenerateRequest
from jax_agent_rl.types import FinishReason, Group, SamplingParams, Trajectory, Turn

LENGTHS = (150, 170, 200, 230) * 2
TURNS, SAMPLED, INSERTED = 3, 16, 12
SHAPES = EngineShapes(
    max_model_len=352, max_concurrent_decodes=8, kv_cache_tokens=4096, decode_steps=8, prefill_buckets=(64, 256)
)


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What is wrong with an engine.

    Attributes:
        cause: what the diagnosis should say.
        model: what the engine makes of the model.
        params: what it makes of the weights.
        patch: what else is changed while it runs.
    """

    cause: Cause
    model: Callable[[DecoderConfig], DecoderConfig] = lambda model: model
    params: Callable[[Params], Params] = lambda params: params
    patch: Callable[[], Any] | None = None


@contextmanager
def later_positions() -> Iterator[None]:
    """Positions are two further from 240 on."""
    tables = forward._rope
    further = lambda config, at: tables(config, jnp.where(at >= 240, at + 2, at))  # noqa: E731
    with mock.patch.object(forward, "_rope", further):
        yield


def with_layers(params: Params, **changed: jax.Array) -> Params:
    return params | {"layers": params["layers"] | changed}


def exchanged(params: Params) -> Params:
    up = params["layers"]["up"]
    return with_layers(params, up=up.at[7].set(up[8]).at[8].set(up[7]))


FAULTS: dict[str, Fault] = {
    "eps": Fault(cause=Cause.SETTING, model=lambda model: replace(model, rms_norm_eps=1e-3)),
    "small eps": Fault(cause=Cause.SETTING, model=lambda model: replace(model, rms_norm_eps=1e-6)),
    "theta": Fault(cause=Cause.ROTARY, model=lambda model: replace(model, rope=replace(model.rope, theta=1e4))),
    "scale": Fault(cause=Cause.SETTING, model=lambda model: replace(model, attention_scale=1 / model.head_dim)),
    "position": Fault(cause=Cause.POSITION, patch=later_positions),
    "exchanged": Fault(cause=Cause.MISNAMED_TENSOR, params=exchanged),
    "norm": Fault(cause=Cause.MISSING_TENSOR, params=lambda p: p | {"final_norm": jnp.ones_like(p["final_norm"])}),
    "keys": Fault(cause=Cause.WRONG_TENSOR, params=lambda p: with_layers(p, k=p["layers"]["k"].at[3].multiply(1.5))),
    "none": Fault(cause=Cause.ROUNDING),
}


async def conversations(backend: JetStreamBackend) -> list[Group]:
    contexts = [random_ids(length, seed=i).tolist() for i, length in enumerate(LENGTHS)]
    prompts = [tuple(context) for context in contexts]
    turns: list[list[Turn]] = [[] for _ in contexts]
    for number in range(TURNS):
        requests = []
        for i, context in enumerate(contexts):
            sampling = SamplingParams(max_tokens=SAMPLED, ignore_eos=True, seed=100 * number + i)
            requests.append(GenerateRequest(request_id=f"{number}-{i}", prompt_ids=tuple(context), sampling=sampling))
        outputs = await asyncio.gather(*(backend.generate(request) for request in requests))
        for i, output in enumerate(outputs):
            inserted = random_ids(INSERTED, seed=1000 * number + i).tolist() if number < TURNS - 1 else []
            turns[i].append(Turn(output=output, appended_ids=tuple(inserted)))
            contexts[i] += [*output.token_ids, *inserted]
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
    if blind:
        return EngineView()
    loop = asyncio.get_running_loop()
    layers = lambda ids: asyncio.run_coroutine_threadsafe(backend.layer_outputs(ids), loop).result()  # noqa: E731
    return EngineView(tensors=await backend.tensor_samples(), layers=layers)


async def measure(fault: Fault, *, blind: bool, limit: float) -> tuple[Diagnosis, float, float]:
    model, params = load_quickstart()
    backend = JetStreamBackend(fault.model(model), fault.params(params), SHAPES, seed=3)
    async with running(backend):
        groups = await conversations(backend)
        began, used = time.perf_counter(), time.process_time()
        looked = await view(backend, blind=blind)
        contexts = collect_contexts(groups, 0)
        subject = DiagnosisSubject(
            model=model, params=params, dtype="float32", temperature=1.0, contexts=contexts, backend="jetstream"
        )
        found = await asyncio.to_thread(
            diagnose, subject, tolerance=JAX_ENGINE["float32"], engine=looked, seconds=limit
        )
        return found, time.perf_counter() - began, time.process_time() - used


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--faults", nargs="*", choices=FAULTS, default=list(FAULTS))
    parser.add_argument("--blind", action="store_true")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="after which no other hypothesis is tried")
    parser.add_argument("--verbose", action="store_true", help="print every finding")
    arguments = parser.parse_args()
    print(cpu())
    results = {}
    for name in arguments.faults:
        fault = FAULTS[name]
        jax.clear_caches()  # a run's first diagnosis compiles everything
        with fault.patch() if fault.patch is not None else mock.patch.dict({}):
            found, seconds, used = asyncio.run(measure(fault, blind=arguments.blind, limit=arguments.seconds))
        named = found.cause is fault.cause
        times = {"seconds": round(seconds, 1), "processor_seconds": round(used, 1)}
        results[name] = {**times, "cause": str(found.cause), "named": named}
        print(f"{name}: {seconds:.1f} s, {'named' if named else 'not named'}: {found.line}", flush=True)
        if arguments.verbose:
            print("\n".join(found.lines()))
    print(json.dumps(results))


if __name__ == "__main__":
    main()
