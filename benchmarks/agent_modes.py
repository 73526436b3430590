"""Asynchronous over synchronous trajectory rollout, with tools that take their time.

    python benchmarks/agent_modes.py [--model quickstart] [--trajectories 64] [--turns 1 3] [--repeats 3]

``server_tool_agent`` in both of its ``rollout_mode`` values, on the JAX engine, against a tool server in a process of
its own. Both modes run the same trajectories: turn lengths and tool latencies are log-normal (most are short, a few
are long, as those of reasoning models and sandboxes), and depend on the trajectory and the step alone. Every turn but
the last is sent to the tool server.

What there is to gain depends on the engine: where it computes all the time anyway, overlapping cannot make it faster.
The default model is a small random one, all trajectories have a decode lane, and few steps go into a dispatch, so that
a step takes about as long for one lane as for all of them, as it does for a large model on an accelerator. With
``--model quickstart`` two CPU cores compute most of the time in either mode.

The modes take turns, and each is as fast as its fastest repeat. The last line is one JSON object: per number of turns
``async_seconds``, ``sync_seconds``, ``speedup``, ``published`` (verl-tool's, on four H100) and the share of the time in
which the engine computed.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import json
import math
import random
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence

import jax
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route

from jax_agent_rl.agents import AgentContext, ServerToolAgent, derive_seed
from jax_agent_rl.chat.codec import ChatCodec
from jax_agent_rl.config import AgentConfig
from jax_agent_rl.jetstream.backend import JetStreamBackend
from jax_agent_rl.jetstream.engine import EngineShapes
from jax_agent_rl.models.config import DecoderConfig
from jax_agent_rl.models.fetch import fetch_quickstart_model
from jax_agent_rl.models.hf import load_hf
from jax_agent_rl.rollout.client import LLMServerClient
from jax_agent_rl.rollout.server import AsyncServer
from jax_agent_rl.runtime.compilation_cache import use_compilation_cache
from jax_agent_rl.types import SamplingParams

PUBLISHED = {1: 1.69, 3: 2.06}
LETTERS = 125  # a random model ends its turn with probability 1/128 per id
LONGEST_TURN = 640
DECODE_STEPS = 2
OBSERVATION = " ok."
PROMPT = [{"role": "user", "content": "What is 12 times 34?"}]


def log_normal(median: float, sigma: float, most: float, *key: int | str) -> float:
    """A draw that depends on ``key`` alone."""
    return min(most, random.Random(derive_seed(*key)).lognormvariate(math.log(median), sigma))


# --- the tool server --------------------------------------------------------------------------------------------


def serve(median: float) -> None:
    """Answers each action after its latency; those of a batch side by side. Prints its port."""
    import socket

    import uvicorn

    async def run(trajectory_id: str, step: int) -> None:
        await asyncio.sleep(log_normal(median, 1.0, 10 * median, "latency", trajectory_id, step))

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


def load_model(name: str):
    """Config, parameters and codec of the quickstart's model, or of a small random one."""
    if name == "quickstart":
        folder = fetch_quickstart_model()
        return *load_hf(folder), ChatCodec.from_pretrained(folder)
    config = DecoderConfig(
        vocab_size=3 + LETTERS,
        hidden_size=64,
        intermediate_size=128,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        tie_word_embeddings=True,
        eos_token_ids=(2,),
    )
    shapes, tree = jax.tree.flatten(config.parameter_shapes(), is_leaf=lambda x: isinstance(x, tuple))
    keys = jax.random.split(jax.random.key(0), len(shapes))
    params = jax.tree.unflatten(tree, [0.05 * jax.random.normal(k, s) for k, s in zip(keys, shapes, strict=True)])
    return config, params, LetterCodec()


async def rollout(context: AgentContext, trajectories: int) -> float:
    """Seconds for all trajectories."""
    agent = ServerToolAgent(context)
    row = {"prompt": PROMPT}

    async def one(number: int) -> None:
        name = str(number)
        sampling = SamplingParams(max_tokens=LONGEST_TURN, seed=derive_seed("trajectory", number))
        trajectory = await agent.run(row, trajectory_id=name, group_id="g", sampling=sampling)
        assert trajectory.num_turns == context.limits.max_turns + 1, trajectory.finish_reason

    begin = time.perf_counter()
    await asyncio.gather(*map(one, range(trajectories)))
    seconds = time.perf_counter() - begin
    await agent.close()
    return seconds


async def compare(backend, codec, url: str, *, turns: int, trajectories: int, repeats: int) -> dict[str, float]:
    """Both modes, in turns, after one unmeasured run."""
    client = LLMServerClient([AsyncServer(backend)])
    length = (turns + 1) * (LONGEST_TURN + 16)
    seconds = {"async": math.inf, "sync": math.inf}
    busy = dict.fromkeys(seconds, 0.0)
    for _ in range(repeats):
        for mode in seconds:
            limits = AgentConfig.model_validate(
                {
                    "tool_server_url": url,
                    "rollout_mode": mode,
                    "max_turns": turns,
                    "min_turns": turns,
                    "max_response_length": length,
                    "tool_prompt": "none",
                }
            )
            context = AgentContext(
                client=client, codec=codec, limits=limits, max_model_len=backend.capabilities.max_model_len
            )
            before = await backend.metrics()
            taken = await rollout(context, trajectories)
            after = await backend.metrics()
            print(f"{turns} turn(s), {mode}: {taken:.1f} s", flush=True)
            if taken < seconds[mode]:
                seconds[mode], busy[mode] = taken, (after.busy_seconds - before.busy_seconds) / taken
    return {
        "async_seconds": round(seconds["async"], 2),
        "sync_seconds": round(seconds["sync"], 2),
        "speedup": round(seconds["sync"] / seconds["async"], 2),
        "published": PUBLISHED.get(turns),
        "engine_busy_async": round(busy["async"], 2),
        "engine_busy_sync": round(busy["sync"], 2),
    }


async def measure(arguments: argparse.Namespace, url: str) -> dict:
    config, params, codec = load_model(arguments.model)
    shapes = EngineShapes(
        max_model_len=64 + (max(arguments.turns) + 1) * (LONGEST_TURN + 16),
        max_concurrent_decodes=arguments.trajectories,
        cache_rows=arguments.trajectories,
        decode_steps=DECODE_STEPS,
        prefill_buckets=(32, 64),
    )
    decode = functools.partial(codec.decode, skip_special_tokens=False)
    backend = JetStreamBackend(config, params, shapes, decode_text=decode)
    await backend.start()
    result = {}
    try:
        for turns in arguments.turns:
            result[f"turns_{turns}"] = await compare(
                backend, codec, url, turns=turns, trajectories=arguments.trajectories, repeats=arguments.repeats
            )
    finally:
        await backend.close()
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=["small", "quickstart"], default="small")
    parser.add_argument("--trajectories", type=int, default=64)
    parser.add_argument("--turns", type=int, nargs="+", default=[1, 3])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--latency", type=float, default=0.5, help="median seconds of a tool call")
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
    print(json.dumps({"trajectories": arguments.trajectories, "tool_latency_median_s": arguments.latency, **result}))


if __name__ == "__main__":
    main()
