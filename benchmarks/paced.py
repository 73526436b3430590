"""Rollouts at a large model's pace on a small machine: a paced engine and a tool server.

Turn lengths and tool latencies are drawn, log-normal with sigma 1: most are short, a few are long,
as with reasoning models and sandboxes. They depend only on the trajectory's name and the turn, so
all compared variants do the same work.

On an accelerator, the time of a decode step of a large model is the time to read its weights, about
10 ms for 7B parameters in bfloat16 and their cache, whether the batch is full or nearly empty. Two
CPU cores behave differently, so the model here is small and random, and every decode step is
delayed to that pace. Everything else (agent, client, scheduler, programs, HTTP) is that of a run,
at its own speed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import jax
import uvicorn
from common import argument_parser
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route

from jax_agent_rl.chat.codec import ChatCodec
from jax_agent_rl.jetstream.backend import JetStreamBackend
from jax_agent_rl.jetstream.engine import EngineShapes, JaxEngine
from jax_agent_rl.models.config import DecoderConfig
from jax_agent_rl.rollout.client import LLMServerClient
from jax_agent_rl.rollout.server import AsyncServer
from jax_agent_rl.testing.simulate.workload import Draws
from jax_agent_rl.types import SamplingParams, TokenOutput

OBSERVATION = " ok."
PROMPT = [{"role": "user", "content": "What is 12 times 34?"}]
MAX_PROMPT = 64  # ids
MAX_OBSERVATION = 16
LETTERS = 125
DECODE_STEPS = 4

Work = Callable[[str], str]
"""Trajectory id to the name its draws depend on."""

LENGTHS = Draws(median=100, least=1, most=1024)
"""Ids of a turn."""


def turn_length(lengths: Draws, name: str, turn: int) -> int:
    """Return the ids in this turn of a trajectory."""
    return round(lengths.at("length", name, turn))


def tool_seconds(latencies: Draws, name: str, turn: int) -> float:
    """Return the latency of the call that ends this turn."""
    return latencies.at("latency", name, turn)


# --- the tool server ------------------------------------------------------------------------------


def serve(latencies: Draws, work: Work = str) -> None:
    """Answer each action after its latency, those of a batch concurrently; print the port."""

    async def run_action(trajectory_id: str, step: int) -> None:
        await asyncio.sleep(tool_seconds(latencies, work(trajectory_id), step))

    async def observe(request):
        body = await request.json()
        if not all(body["finish"]):
            steps = [extra["current_step"] for extra in body["extra_fields"]]
            await asyncio.gather(*map(run_action, body["trajectory_ids"], steps))
        count = len(body["actions"])
        answer = {
            "observations": [OBSERVATION] * count,
            "dones": [False] * count,
            "valids": [True] * count,
        }
        return JSONResponse(answer)

    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    _, port = listener.getsockname()
    print(port, flush=True)
    app = Starlette(routes=[Route("/get_observation", observe, methods=["POST"])])
    uvicorn.Server(uvicorn.Config(app, log_level="critical")).run(sockets=[listener])


@contextlib.contextmanager
def tool_server(*arguments: object) -> Iterator[str]:
    """Run this program again with ``--serve`` and these arguments, and yield the server's URL."""
    command = [sys.executable, sys.argv[0], "--serve", *map(str, arguments)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            port = int(server.stdout.readline())
            yield f"http://127.0.0.1:{port}"
        finally:
            server.terminate()


def paced_parser(docstring: str | None) -> argparse.ArgumentParser:
    """Make a parser with the option that :func:`tool_server` passes."""
    parser = argument_parser(docstring)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    return parser


# --- the engine -----------------------------------------------------------------------------------


class LetterCodec(ChatCodec):
    """Printable characters as ids, after three special ones.

    It is as much of a codec as the loop needs here.
    """

    def __init__(self) -> None:
        self.eos_token_ids = (2,)

    def encode_text(self, text: str) -> list[int]:
        return [3 + ord(character) % LETTERS for character in text]

    def encode_prompt(
        self, messages: Sequence[Mapping[str, str]], tools: Sequence[object] = ()
    ) -> list[int]:
        return [1, *self.encode_text("".join(message["content"] for message in messages))]

    def replaces_end(self, sampled_ids: Sequence[int], appended_ids: Sequence[int]) -> bool:
        return False

    def thinking_after(self, context_ids: Sequence[int]) -> str:
        return ""

    def turn_text(self, sampled_ids: Sequence[int], context_ids: Sequence[int]) -> str:
        return self.decode(sampled_ids)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return "".join(chr(32 + i) for i in ids if i > 2)


def small_model() -> tuple[DecoderConfig, dict]:
    """Return one layer of random weights, in float32."""
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
    shapes, tree = jax.tree.flatten(
        config.parameter_shapes(), is_leaf=lambda x: isinstance(x, tuple)
    )
    keys = jax.random.split(jax.random.key(0), len(shapes))
    leaves = []
    for key, shape in zip(keys, shapes, strict=True):
        leaves.append(0.05 * jax.random.normal(key, shape))
    return config, jax.tree.unflatten(tree, leaves)


class PacedEngine(JaxEngine):
    """Decodes at a large model's pace: a step takes ``step_seconds``, however few slots it has.

    Attributes:
        planned_seconds: what all steps should have taken.
        decode_seconds: what they took.
    """

    step_seconds = 0.0
    planned_seconds = 0.0
    decode_seconds = 0.0

    def decode(self, *args):
        start = time.perf_counter()
        cache, sampled = super().decode(*args)
        num_steps = int((sampled.ids >= 0).any(axis=1).sum())
        seconds = num_steps * self.step_seconds
        time.sleep(max(0.0, start + seconds - time.perf_counter()))
        self.planned_seconds += seconds
        self.decode_seconds += time.perf_counter() - start
        return cache, sampled


class PacedBackend(JetStreamBackend):
    """The JAX engine with :class:`PacedEngine`'s pace, and cache for each of ``slots``."""

    def __init__(self, *, slots: int, max_model_len: int, step_seconds: float) -> None:
        config, params = small_model()
        shapes = EngineShapes(
            max_model_len=max_model_len,
            max_concurrent_decodes=slots,
            kv_cache_tokens=slots * (max_model_len + 32),
            decode_steps=DECODE_STEPS,
            prefill_buckets=(32, 64),
        )
        super().__init__(config, params, shapes)
        self._step_seconds = step_seconds

    def _make_engine(self) -> JaxEngine:
        self._engine = PacedEngine(self._config, self._shapes, dtype=self._dtype)
        self._engine.step_seconds = self._step_seconds
        return self._engine

    @property
    def pace(self) -> tuple[float, float]:
        """Seconds that the decode steps so far should have taken, and took.

        They took more if the machine was too slow.
        """
        return self._engine.planned_seconds, self._engine.decode_seconds


class TurnLengths(LLMServerClient):
    """Ends each turn at its drawn length, as a random model does not."""

    def __init__(self, servers: Sequence[AsyncServer], *, lengths: Draws, work: Work = str):
        super().__init__(servers)
        self._lengths = lengths
        self._work = work
        self._turns: dict[str, int] = {}

    async def generate(
        self, request_id: str, *, sampling_params: SamplingParams, **fields
    ) -> TokenOutput:
        session = fields["session_id"]
        turn = self._turns.get(session, 0)
        self._turns[session] = turn + 1
        length = turn_length(self._lengths, self._work(session), turn)
        sampling = replace(sampling_params, max_tokens=length, ignore_eos=True)
        return await super().generate(request_id, sampling_params=sampling, **fields)


def max_response_len(lengths: Draws, turns: int) -> int:
    """Return the most ids after the prompt in a trajectory with so many tool calls."""
    return (turns + 1) * (int(lengths.most) + MAX_OBSERVATION)


def max_context_len(lengths: Draws, turns: int) -> int:
    """Return the most ids of a trajectory with so many tool calls."""
    return MAX_PROMPT + max_response_len(lengths, turns)


def agent_settings(url: str, lengths: Draws, turns: int, **settings: object) -> dict[str, object]:
    """Return ``agent`` of a configuration, for trajectories of exactly so many tool calls.

    Args:
        url: of the server that answers them.
        settings: further keys.
    """
    return {
        "tool_server_url": url,
        "tool_call_timeout": 600,
        "max_turns": turns,
        "min_turns": turns,
        "max_prompt_length": MAX_PROMPT,
        "max_response_length": max_response_len(lengths, turns),
        "tool_prompt": "none",
        **settings,
    }
