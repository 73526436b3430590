"""Asynchronous over synchronous trajectory rollout, with tools that take their time.

    python benchmarks/agent_modes.py [--trajectories 64] [--turns 1 3] [--repeats 4] [--step-ms 10] [--latency 1.0]

``server_tool_agent`` in both of its ``rollout_mode`` values, on the JAX engine, against a tool server in a process of
its own. Every turn but the last is sent to the tool server. Turn lengths (median 100 ids, at most 1024) and tool
latencies (median ``--latency`` seconds, at most ten times that) are log-normal with sigma 1: most are short, a few are
long, as those of reasoning models and sandboxes. They depend on repeat, trajectory and turn alone, so both modes do the
same work.

The measure belongs to the workload as much as to the modes: what a tool costs is to be seen against what a turn costs.
A large model on an accelerator decodes a batch at the pace at which its weights are read, about 10 ms a step for 7B
parameters in bfloat16 with their cache, whether the batch is full or nearly empty. Two CPU cores have another profile,
so the model here is small and random, and ``--step-ms`` holds each decode step to that pace. Everything else, agent,
client, scheduler, programs and HTTP, is what a run uses, at its own speed.

``ideal`` is what the drawn lengths and latencies alone would take if nothing else cost anything: the slowest member of
each phase, phase after phase, for synchronous; the slowest trajectory for asynchronous.

The last line is one JSON object: per number of turns the seconds of both modes over all repeats, ``speedup``,
``published`` (verl-tool's, 1.5B parameters on four H100, whose synchronous mode calls tools one after the other; ours
side by side), ``ideal_speedup`` and the share of the time in which the engine decoded.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

import jax
import numpy as np
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route

from jax_agent_rl.agents import AgentContext, ServerToolAgent, derive_seed
from jax_agent_rl.config import AgentConfig
from jax_agent_rl.jetstream.backend import JetStreamBackend
from jax_agent_rl.jetstream.engine import EngineShapes, JaxEngine
from jax_agent_rl.models.config import DecoderConfig
from jax_agent_rl.rollout.client import LLMServerClient
from jax_agent_rl.rollout.server import AsyncServer
from jax_agent_rl.runtime.compilation_cache import use_compilation_cache
from jax_agent_rl.types import SamplingParams, TokenOutput

PUBLISHED = {1: 1.69, 3: 2.06}
LETTERS = 125
MEDIAN_TURN, LONGEST_TURN = 100, 1024
DECODE_STEPS = 4
OBSERVATION = " ok."
PROMPT = [{"role": "user", "content": "What is 12 times 34?"}]


def log_normal(median: float, most: float, *key: int | str) -> float:
    """A draw that depends on ``key`` alone."""
    return min(most, random.Random(derive_seed(*key)).lognormvariate(math.log(median), 1.0))


def turn_length(trajectory_id: str, turn: int) -> int:
    return max(1, round(log_normal(MEDIAN_TURN, LONGEST_TURN, "length", trajectory_id, turn)))


def tool_seconds(median: float, trajectory_id: str, turn: int) -> float:
    return log_normal(median, 10 * median, "latency", trajectory_id, turn)


# --- the tool server --------------------------------------------------------------------------------------------


def serve(median: float) -> None:
    """Answers each action after its latency; those of a batch side by side. Prints its port."""
    import socket

    import uvicorn

    async def run(trajectory_id: str, step: int) -> None:
        await asyncio.sleep(tool_seconds(median, trajectory_id, step))

    async def observe(request):
        body = await request.json()
        if not all(body["finish"]):
            steps = [extra["current_step"] for extra in body["extra_fields"]]
            await asyncio.gather(*map(run, body["trajectory_ids"], steps))
        count = len(body["actions"])
        return JSONResponse({"observations": [OBSERVATION] * count, "dones": [False] * count, "valids": [True] * count})

    listening = socket.socket()
    listening.bind(("127.0.0.1", 0))
    print(listening.getsockname()[1], flush=True)
    app = Starlette(routes=[Route("/get_observation", observe, methods=["POST"])])
    uvicorn.Server(uvicorn.Config(app, log_level="critical")).run(sockets=[listening])


# --- the rollout ------------------------------------------------------------------------------------------------


class LetterCodec:
    """Printable characters as ids, after three special ones; as much of ``ChatCodec`` as the loop needs here."""

    eos_token_ids = (2,)

    def encode_text(self, text: str) -> list[int]:
        return [3 + ord(character) % LETTERS for character in text]

    def encode_prompt(self, messages: Sequence[Mapping[str, str]], tools: Sequence[object] = ()) -> list[int]:
        return [1, *self.encode_text("".join(message["content"] for message in messages))]

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return "".join(chr(32 + i) for i in ids if i > 2)


def small_model() -> tuple[DecoderConfig, dict]:
    config = DecoderConfig(
        vocab_size=3 + LETTERS,
        hidden_size=64,
        intermediate_size=128,
        num_layers=1,
        num_heads=4,
        num_kv_heads=1,
        head_dim=16,
        tie_word_embeddings=True,
        eos_token_ids=(2,),
    )
    shapes, tree = jax.tree.flatten(config.parameter_shapes(), is_leaf=lambda x: isinstance(x, tuple))
    keys = jax.random.split(jax.random.key(0), len(shapes))
    return config, jax.tree.unflatten(tree, [0.05 * jax.random.normal(k, s) for k, s in zip(keys, shapes, strict=True)])


class PacedEngine(JaxEngine):
    """Decodes at a large model's pace: a step takes ``step_seconds``, however few lanes it has."""

    step_seconds = 0.0

    def decode(self, *args):
        begin = time.perf_counter()
        cache, ids, log_probs = super().decode(*args)
        steps = int((ids >= 0).any(axis=1).sum())
        time.sleep(max(0.0, begin + steps * self.step_seconds - time.perf_counter()))
        return cache, ids, log_probs


class PacedBackend(JetStreamBackend):
    def _make_engine(self) -> JaxEngine:
        return PacedEngine(self._config, self._shapes, dtype=self._dtype)


class TurnLengths(LLMServerClient):
    """Ends each turn at its drawn length: a random model has no idea of one."""

    def __init__(self, servers: Sequence[AsyncServer]):
        super().__init__(servers)
        self._turns: dict[str, int] = {}

    async def generate(self, request_id: str, *, sampling_params: SamplingParams, **fields) -> TokenOutput:
        session = fields["session_id"]
        turn = self._turns.get(session, 0)
        self._turns[session] = turn + 1
        sampling = replace(sampling_params, max_tokens=turn_length(session, turn), ignore_eos=True)
        return await super().generate(request_id, sampling_params=sampling, **fields)


async def rollout(context: AgentContext, names: Sequence[str]) -> float:
    """Seconds for the trajectories of these names."""
    agent = ServerToolAgent(context)
    row = {"prompt": PROMPT}

    async def one(name: str) -> None:
        sampling = SamplingParams(max_tokens=LONGEST_TURN, seed=derive_seed("trajectory", name))
        trajectory = await agent.run(row, trajectory_id=name, group_id="g", sampling=sampling)
        assert trajectory.num_turns == context.limits.max_turns + 1, trajectory.finish_reason

    begin = time.perf_counter()
    await asyncio.gather(*map(one, names))
    seconds = time.perf_counter() - begin
    await agent.close()
    return seconds


def ideal_seconds(names: Sequence[str], turns: int, *, step_seconds: float, latency: float) -> dict[str, float]:
    """Seconds of each mode if only the drawn lengths and latencies cost anything."""
    decoding = np.array([[turn_length(name, turn) for turn in range(turns + 1)] for name in names]) * step_seconds
    waiting = np.array([[tool_seconds(latency, name, turn) for turn in range(turns)] for name in names])
    return {
        "sync": float(decoding.max(axis=0).sum() + waiting.max(axis=0).sum()),
        "async": float((decoding.sum(axis=1) + waiting.sum(axis=1)).max()),
    }


def limits(url: str, mode: str, turns: int) -> AgentConfig:
    return AgentConfig.model_validate(
        {
            "tool_server_url": url,
            "tool_call_timeout": 600,
            "rollout_mode": mode,
            "max_turns": turns,
            "min_turns": turns,
            "max_response_length": (turns + 1) * (LONGEST_TURN + 16),
            "tool_prompt": "none",
        }
    )


async def compare(backend: JetStreamBackend, url: str, turns: int, arguments: argparse.Namespace) -> dict[str, float]:
    """Both modes, in turns, on the same draws; new draws for each repeat."""
    seconds, ideal, busy = ({"async": 0.0, "sync": 0.0} for _ in range(3))
    for repeat in range(arguments.repeats):
        names = [f"{repeat}-{number}" for number in range(arguments.trajectories)]
        least = ideal_seconds(names, turns, step_seconds=arguments.step_ms / 1000, latency=arguments.latency)
        for mode in seconds:
            context = AgentContext(
                client=TurnLengths([AsyncServer(backend)]),
                codec=LetterCodec(),
                limits=limits(url, mode, turns),
                max_model_len=backend.capabilities.max_model_len,
            )
            before = await backend.metrics()
            taken = await rollout(context, names)
            after = await backend.metrics()
            print(f"{turns} turn(s), {mode}: {taken:.1f} s (ideal {least[mode]:.1f} s)", flush=True)
            seconds[mode] += taken
            ideal[mode] += least[mode]
            busy[mode] += after.busy_seconds - before.busy_seconds
    return {
        "async_seconds": round(seconds["async"], 1),
        "sync_seconds": round(seconds["sync"], 1),
        "speedup": round(seconds["sync"] / seconds["async"], 2),
        "published": PUBLISHED.get(turns),
        "ideal_speedup": round(ideal["sync"] / ideal["async"], 2),
        "async_over_ideal": round(seconds["async"] / ideal["async"], 3),
        "sync_over_ideal": round(seconds["sync"] / ideal["sync"], 3),
        "engine_busy_async": round(busy["async"] / seconds["async"], 2),
        "engine_busy_sync": round(busy["sync"] / seconds["sync"], 2),
    }


async def measure(arguments: argparse.Namespace, url: str) -> dict:
    config, params = small_model()
    shapes = EngineShapes(
        max_model_len=64 + (max(arguments.turns) + 1) * (LONGEST_TURN + 16),
        max_concurrent_decodes=arguments.trajectories,
        cache_rows=arguments.trajectories,
        decode_steps=DECODE_STEPS,
        prefill_buckets=(32, 64),
    )
    PacedEngine.step_seconds = arguments.step_ms / 1000
    backend = PacedBackend(config, params, shapes)
    await backend.start()
    try:
        return {f"turns_{turns}": await compare(backend, url, turns, arguments) for turns in arguments.turns}
    finally:
        await backend.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trajectories", type=int, default=64)
    parser.add_argument("--turns", type=int, nargs="+", default=[1, 3])
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument("--step-ms", type=float, default=10.0, help="milliseconds of a decode step, at least")
    parser.add_argument("--latency", type=float, default=1.0, help="median seconds of a tool call")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve(arguments.latency)
        return
    use_compilation_cache()
    command = [sys.executable, __file__, "--serve", "--latency", str(arguments.latency)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            url = f"http://127.0.0.1:{int(server.stdout.readline())}"
            result = asyncio.run(measure(arguments, url))
        finally:
            server.terminate()
    workload = {
        "trajectories": arguments.trajectories,
        "tool_latency_median_s": arguments.latency,
        "step_ms": arguments.step_ms,
    }
    print(json.dumps({**workload, **result}))


if __name__ == "__main__":
    main()
