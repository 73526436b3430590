"""A trainer on a scripted engine and a learner that learns nothing."""

import asyncio
import io
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from jax_agent_rl import config
from jax_agent_rl.agents import AgentContext
from jax_agent_rl.collect.buffer import versions
from jax_agent_rl.collect.collector import RolloutCollector
from jax_agent_rl.collect.strategies import make_strategy
from jax_agent_rl.data.cursor import DataCursor
from jax_agent_rl.observe.progress import Progress
from jax_agent_rl.observe.run_dir import RunDir, read_records
from jax_agent_rl.rollout.client import LLMServerClient
from jax_agent_rl.rollout.protocol import Capabilities
from jax_agent_rl.rollout.server import AsyncServer
from jax_agent_rl.runtime.train import TRAINERS
from jax_agent_rl.runtime.transports import ArrayTransport
from jax_agent_rl.testing.fakes import FakeLearner, NoCheckpoints
from jax_agent_rl.tracing import Tracer
from jax_agent_rl.trainer.base import Trainer
from jax_agent_rl.trainer.components import RunComponents
from jax_agent_rl.trainer.record import RunRecord
from jax_agent_rl.types import Group
from tests.fakes import FakeCodec, ScriptedBackend
from tests.trajectories import trajectories_of

ROW = {"prompt": [{"role": "user", "content": "go"}], "agent_name": "single_turn_agent"}


class Clock:
    """Stands still unless it is moved on."""

    now = 0.0

    def __call__(self) -> float:
        self.now += 1e-6  # rates are per second of it
        return self.now


class SlowToUpdate(ScriptedBackend):
    """Version n takes n seconds to load."""

    def __init__(self, clock: Clock, *args, **options):
        super().__init__(*args, **options)
        self.clock = clock

    async def update_weights(self, update):
        await super().update_weights(update)
        self.clock.now += update.version


class IdleLearner(FakeLearner):
    programs_compiled = 1

    rejected: frozenset[str] = frozenset()

    def __init__(self):
        self.groups: list[Group] = []

    def learn(self, groups):
        self.groups += groups
        return {}

    def update(self, groups, **options):
        return replace(super().update(groups, **options), rejected=self.rejected)


async def parity(trajectory):
    return replace(trajectory, reward=float(int(trajectory.trajectory_id[-1]) % 2))


def make_trainer(
    tmp_path: Path,
    *,
    steps: int,
    algorithm: dict | None = None,
    score=parity,
    trainer: dict | None = None,
    script=("hello there",),
    learner: IdleLearner | None = None,
    checkpointer: NoCheckpoints | None = None,
    record: RunRecord | None = None,
    rows: int | Sequence[dict] = 1,
    curriculum: dict | None = None,
    capabilities: Capabilities | None = None,
    ema_decay: float = 0.0,
    tracer: Tracer | None = None,
    agent: dict | None = None,
    screen: io.StringIO | None = None,
    version: int = 0,
    **rollout,
) -> Trainer:
    clock = Clock()
    settings = config.build(
        {
            "run_dir": str(tmp_path),
            "model": {"path": "none"},
            "data": {"train": "none", "eval": "none", "curriculum": curriculum or {}},
            "rollout": {"prompts_per_step": 1, "group_size": 2} | rollout,
            "algorithm": algorithm or {},
            "agent": agent or {},
            "learner": {"ema_decay": ema_decay},
            "trainer": {"steps": steps, "checkpoint_every": 0} | (trainer or {}),
        }
    )
    codec = FakeCodec()
    backend = SlowToUpdate(clock, codec, script, capabilities=capabilities, version=version)
    client = LLMServerClient([AsyncServer(backend)])
    context = AgentContext(client=client, codec=codec, limits=settings.agent, max_model_len=1000)
    strategies = [make_strategy(settings.rollout.strategy), None]  # evaluations are chains
    collectors = [
        RolloutCollector(
            context,
            score=score,
            max_in_flight=4,
            seed=0,
            strategy=strategy,
            tracer=tracer,
            validate=strategy is None,
        )
        for strategy in strategies
    ]
    runtime = RunComponents(
        config=settings,
        codec=codec,
        metrics=backend.metrics,
        transport=ArrayTransport(),
        client=client,
        collector=collectors[0],
        evaluator=collectors[1],
        learner=learner or IdleLearner(),
        cursor=DataCursor(
            [ROW] * rows if isinstance(rows, int) else rows,
            seed=0,
            curriculum=settings.data.curriculum,
        ),
        heldout=[ROW],
    )
    record = record or RunRecord()
    if record.cursor:
        runtime.cursor.restore(record.cursor)
        runtime.collector.accounting.restore(record.accounting)
    progress = Progress(Console(file=screen or io.StringIO()), total_steps=steps)
    return TRAINERS[settings.trainer.mode](
        runtime=runtime,
        folder=RunDir(tmp_path),
        checkpointer=checkpointer or NoCheckpoints(),
        record=record,
        progress=progress,
        clock=clock,
    )


class Notes(NoCheckpoints):
    """Keeps what a checkpoint would."""

    def __init__(self):
        self.saved: dict[int, dict[str, Any]] = {}

    def save(self, step, state, progress):
        self.saved.setdefault(step, progress)


class Versions(IdleLearner):
    """Notes, for every step, the versions of the tokens in it."""

    def __init__(self):
        super().__init__()
        self.steps: list[list[Group]] = []

    def learn(self, groups):
        self.steps.append(list(groups))
        return super().learn(groups)

    @property
    def ages(self) -> list[set[int]]:
        ages = []
        for step, groups in enumerate(self.steps):
            ages.append({step - version for version in versions(trajectories_of(groups))})
        return ages


async def finish(training) -> None:
    async with asyncio.timeout(60):
        await training.run()


def books(training):
    accounting = training.runtime.collector.accounting
    accounting.check()
    assert not accounting.in_flight
    return accounting


def steps_of(tmp_path: Path) -> list[dict]:
    return [r for r in read_records(tmp_path / "metrics.jsonl") if r["kind"] == "step"]


def tasks() -> int:
    return len(asyncio.all_tasks())


def engine_of(training):
    (server,) = training.runtime.client.pool.servers
    return server.backend
