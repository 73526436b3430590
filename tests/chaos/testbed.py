"""The system under test: all parts are real except the engines' model and the learner's optimizer.

::

    FullyAsyncTrainer ─► GroupStream ─► RolloutCollector ─► ServerToolAgent ─► LLMServerClient
           │                                                      │                   │
           ▼                                                      ▼                   ▼
    ProvingLearner,                                           FaultProxy        RemoteBackend
    weights as files                                              │                   │
                                                                  ▼                   ▼
                                                             tool server          FaultProxy
                                                             (a process)              │
                                                                                      ▼
                                                                              rollout server
                                                                              (three processes)
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import io
import sys
import time
import zlib
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

from rich.console import Console

from jax_agent_rl import config
from jax_agent_rl.agents import AgentContext
from jax_agent_rl.chat.codec import ChatCodec
from jax_agent_rl.collect.collector import RolloutCollector
from jax_agent_rl.collect.filters import Selection
from jax_agent_rl.data.cursor import DataCursor
from jax_agent_rl.observe.progress import Progress
from jax_agent_rl.observe.run_dir import RunDir
from jax_agent_rl.rollout.fleet_metrics import FleetMetrics
from jax_agent_rl.rollout.http.client import RemoteBackend
from jax_agent_rl.rollout.protocol import WeightUpdate
from jax_agent_rl.rollout.transport import WeightTransport
from jax_agent_rl.testing.fakes import FakeLearner, NoCheckpoints
from jax_agent_rl.trainer.asynchronous import FullyAsyncTrainer
from jax_agent_rl.trainer.components import RunComponents
from jax_agent_rl.trainer.record import RunRecord
from jax_agent_rl.trainer.step import all_trajectories
from jax_agent_rl.types import Group, PauseMode, Trajectory
from jax_agent_rl.utils.startup import own_environment
from tests.chaos import tool
from tests.chaos.engine import hash_policy
from tests.chaos.faults import Child
from tests.chaos.invariants import Ledger, WatchedAccounting, WatchedClient
from tests.chaos.leaks import MARK
from tests.chaos.proxy import FaultProxy
from tests.ports import free_port

ENGINES = 3
SILENCE_SECONDS = 2.0
STALL_SECONDS = 2.0
TOOL_RETRIES = 3
RECOVERY_SECONDS = 120.0
LEARNER_SECONDS = 0.3
_MAX_STEPS = 10**9
_ROWS = [
    {"prompt": [{"role": "user", "content": f"row {i}"}], "agent_name": "server_tool_agent"}
    for i in range(32)
]

_TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m.role }}:{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant:{% endif %}"
)


class ProvingLearner(FakeLearner):
    """Verifies every trajectory instead of training on it.

    Args:
        ledger: records the trajectories.
        seconds: duration of an update.
    """

    def __init__(self, ledger: Ledger, *, seconds: float) -> None:
        self._ledger = ledger
        self._seconds = seconds

    def learn(self, groups: Sequence[Group]) -> dict[str, float]:
        start = time.monotonic()
        self._ledger.learn(all_trajectories(groups))
        time.sleep(max(0.0, start + self._seconds - time.monotonic()))
        return {}


class PolicyTransport(WeightTransport):
    """Writes each version's weights as a file, after removing the file of the previous version.

    Args:
        folder: an empty folder.
        seed: the run's seed.
    """

    def __init__(self, folder: Path, seed: int) -> None:
        self._folder = folder
        self._seed = seed

    def offer(self, learner: Any, version: int) -> WeightUpdate:
        self.release()
        file = self._folder / f"version-{version}.safetensors"
        hash_policy(self._seed, version).save(file)
        return WeightUpdate(version=version, kind="safetensors", payload=[str(file)], lasting=True)

    def release(self) -> None:
        for file in self._folder.glob("*.safetensors"):
            with contextlib.suppress(FileNotFoundError):
                file.unlink()


@dataclass(kw_only=True)
class WatchedTrainer(FullyAsyncTrainer):
    """Trainer that checks the accounting after every step.

    It alternates between two ways of updating weights: one update freezes running generations, the
    next aborts and resumes them.
    """

    ledger: Ledger

    async def publish(self, version: int, selection: Selection) -> float:
        self._pause = PauseMode.KEEP if version % 2 else PauseMode.ABORT
        return await super().publish(version, selection)

    async def train_step(self) -> None:
        await super().train_step()
        self.ledger.finish_step(self.runtime.collector.accounting)


@dataclass(frozen=True, kw_only=True)
class Testbed:
    """The parts of a run.

    Attributes:
        trainer: not running yet; the engines have its first weights.
        ledger: findings of the run.
        engines, tools: the servers.
        engine_proxies, tool_proxy: the proxies that the client and the agents connect to.
        temporary: folder for the servers' temporary files.
    """

    trainer: WatchedTrainer
    ledger: Ledger
    engines: Sequence[Child]
    tools: Child
    engine_proxies: Sequence[FaultProxy]
    tool_proxy: FaultProxy
    temporary: Path

    @property
    def proxies(self) -> list[FaultProxy]:
        return [*self.engine_proxies, self.tool_proxy]

    @property
    def ports(self) -> list[int]:
        """All ports that are bound."""
        return [server.port for server in (*self.engines, self.tools, *self.proxies)]


def _build_config(tool_server: str, folder: Path, seed: int) -> config.Config:
    """Build the configuration of the parts."""
    return config.build(
        {
            "run_dir": str(folder),
            "seed": seed,
            "model": {"path": "none"},
            "data": {"train": "none"},
            "agent": {
                "tool_server_url": tool_server,
                "tool_call_timeout": 2.0,
                "tool_call_max_retries": TOOL_RETRIES,
                "max_turns": 3,
                "enable_mtrl": True,
                "max_prompt_length": 64,
                "max_response_length": 256,
                "max_action_length": 48,
            },
            "rollout": {
                "backend": "remote",
                "urls": ["http://none"],
                "prompts_per_step": 4,
                "group_size": 4,
                "max_in_flight": 32,
                "max_model_len": 512,
            },
            "algorithm": {"filter_zero_variance": False},
            "trainer": {
                "mode": "fully_async",
                "max_staleness": 2,
                "steps": _MAX_STEPS,
                "checkpoint_every": 0,
            },
        }
    )


@asynccontextmanager
async def open_testbed(scratch: Path, *, seed: int, mark: str) -> AsyncIterator[Testbed]:
    """Start the system, and close it at the end.

    Args:
        scratch: an empty folder; its subfolder ``tmp`` is for the servers' temporary files.
        seed: seeds rows, sampling and weights.
        mark: value of :data:`MARK` in the environment of every process.

    Raises:
        LaunchError: a server does not start.
    """
    temporary = scratch / "tmp"
    temporary.mkdir()
    weights = scratch / "weights"
    weights.mkdir()
    env = {**own_environment(), MARK: mark, "TMPDIR": str(temporary)}
    ledger = Ledger(seed)
    async with AsyncExitStack() as stack:
        engines = [_engine(number, seed, env, scratch) for number in range(ENGINES)]
        tools = _tool_server(env, scratch)
        servers = [*engines, tools]
        for server in servers:
            stack.push_async_callback(server.stop)
        await asyncio.gather(*(server.start() for server in servers))

        proxies = []
        for server in servers:
            proxy = FaultProxy(server.port, rng=Random(f"{seed}/{server.name}"))
            await proxy.start()
            stack.push_async_callback(proxy.close)
            proxies.append(proxy)
        *engine_proxies, tool_proxy = proxies

        settings = _build_config(tool_proxy.url, scratch / "run", seed)
        urls = [proxy.url for proxy in engine_proxies]
        trainer = await _trainer(settings, urls, weights, ledger, stack)
        await trainer.push_weights(0)
        yield Testbed(
            trainer=trainer,
            ledger=ledger,
            engines=engines,
            tools=tools,
            engine_proxies=engine_proxies,
            tool_proxy=tool_proxy,
            temporary=temporary,
        )


def codec() -> ChatCodec:
    """Build a byte tokenizer with a chat template, without a model's files.

    Ids 0 to 2 are special, and 2 ends a turn.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["<|pad|>", "<|start|>", "<|end|>"]
    vocab = {piece: i for i, piece in enumerate(special + _byte_characters())}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(special)
    return ChatCodec(
        PreTrainedTokenizerFast(
            tokenizer_object=tokenizer,
            eos_token="<|end|>",
            pad_token="<|pad|>",
            chat_template=_TEMPLATE,
        )
    )


def _byte_characters() -> list[str]:
    """Return the character that byte-level tokenizers use for each byte.

    It is the byte's own if that is printable, else the next one from 256 on.
    """
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    substitutes = iter(range(256, 512))
    characters = []
    for byte in range(256):
        code = byte
        if byte not in printable:
            code = next(substitutes)
        characters.append(chr(code))
    return characters


def _engine(number: int, seed: int, env: dict[str, str], scratch: Path) -> Child:
    name = f"engine-{number}"
    port = free_port()
    command = [sys.executable, "-m", "tests.chaos.engine", str(port), str(seed)]
    return Child(name, command, port=port, env=env, log=scratch / f"{name}.log")


def _tool_server(env: dict[str, str], scratch: Path) -> Child:
    port = free_port()
    command = [
        sys.executable,
        "-m",
        "jax_agent_rl.cli",
        "tool-server",
        f"port={port}",
        "tools=[tally]",
        f"tool_path={tool.__file__}",
    ]
    return Child("tool-server", command, port=port, env=env, log=scratch / "tool-server.log")


async def _trainer(
    settings: config.Config, urls: list[str], weights: Path, ledger: Ledger, stack: AsyncExitStack
) -> WatchedTrainer:
    chat_codec = codec()
    client = WatchedClient(
        ledger,
        decode_text=functools.partial(chat_codec.decode, skip_special_tokens=False),
        wait_for_server_seconds=RECOVERY_SECONDS,
        recovery_seconds=RECOVERY_SECONDS,
        stall_seconds=STALL_SECONDS,
        seed=settings.seed,
    )
    stack.push_async_callback(client.pool.close)
    # Weights are sent over HTTP, where faults can corrupt them.
    connect = functools.partial(RemoteBackend, shares_disk=False, silence_seconds=SILENCE_SECONDS)
    backends = {}
    for number, url in enumerate(urls):
        backends[f"engine-{number}"] = functools.partial(connect, url)
    await client.pool.start(backends)

    context = AgentContext(
        client=client, codec=chat_codec, limits=settings.agent, max_model_len=512
    )
    collector = RolloutCollector(
        context,
        score=_score,
        max_in_flight=settings.rollout.max_in_flight,
        seed=settings.seed,
        accounting=WatchedAccounting(ledger),
    )
    stack.push_async_callback(collector.close)
    transport = PolicyTransport(weights, settings.seed)
    stack.callback(transport.release)
    runtime = RunComponents(
        config=settings,
        codec=chat_codec,
        metrics=FleetMetrics(lambda: client.pool.backends).read,
        client=client,
        collector=collector,
        evaluator=collector,
        learner=ProvingLearner(ledger, seconds=LEARNER_SECONDS),
        transport=transport,
        cursor=DataCursor(_ROWS, seed=settings.seed),
        heldout=[],
    )
    return WatchedTrainer(
        runtime=runtime,
        folder=RunDir(Path(settings.run_dir)),
        checkpointer=NoCheckpoints(),
        record=RunRecord(),
        progress=Progress(Console(file=io.StringIO()), total_steps=_MAX_STEPS),
        ledger=ledger,
    )


async def _score(trajectory: Trajectory) -> Trajectory:
    """Give a reward that varies within a group."""
    checksum = zlib.crc32(str(trajectory.response_ids).encode())
    return replace(trajectory, reward=float(checksum % 2))
