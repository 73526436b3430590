"""Runs the trainers of a recipe in virtual time, side by side, and compares them."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from rich.console import Console

from jax_agent_rl.agents import AgentContext
from jax_agent_rl.collect.collector import RolloutCollector
from jax_agent_rl.config import Config, build
from jax_agent_rl.data.cursor import DataCursor
from jax_agent_rl.learner.checkpoint import Checkpointer
from jax_agent_rl.observe.metrics import Learnt, RunFolder
from jax_agent_rl.observe.progress import Progress
from jax_agent_rl.rollout.client import LLMServerClient
from jax_agent_rl.rollout.server import AsyncServer
from jax_agent_rl.runtime.placement import FleetMetrics
from jax_agent_rl.runtime.train import TRAINERS
from jax_agent_rl.testing.simulate.clock import VirtualLoop
from jax_agent_rl.testing.simulate.engine import SimulatedEngine
from jax_agent_rl.testing.simulate.workload import (
    AGENT,
    Assumptions,
    SimulatedCodec,
    SimulatedLearner,
    SimulatedPublisher,
)
from jax_agent_rl.trainer.components import RunComponents
from jax_agent_rl.trainer.record import RunRecord
from jax_agent_rl.types import Trajectory


@dataclass(frozen=True, kw_only=True)
class SimulatedPolicy:
    """A way to overlap rollout and learner: keys of ``trainer``."""

    name: str
    trainer: Mapping[str, Any]


POLICIES = (
    SimulatedPolicy(name="sync", trainer={"mode": "sync"}),
    SimulatedPolicy(name="one_step_off", trainer={"mode": "one_step_off"}),
    SimulatedPolicy(name="fully_async 1", trainer={"mode": "fully_async", "max_staleness": 1}),
    SimulatedPolicy(name="fully_async 2", trainer={"mode": "fully_async", "max_staleness": 2}),
    SimulatedPolicy(name="fully_async 4", trainer={"mode": "fully_async", "max_staleness": 4}),
    SimulatedPolicy(
        name="fully_async 1 drop",
        trainer={"mode": "fully_async", "max_staleness": 1, "stragglers": "drop"},
    ),
)


@dataclass(frozen=True, kw_only=True)
class SimulationResult:
    """What one policy came to, once its pipeline was full and before it ran dry.

    Attributes:
        policy: its name.
        samples_per_second: trajectories that were trained on.
        step_seconds: virtual seconds from one learner step to the next.
        engines_busy: mean share of the time in which an engine decoded.
        slots_used: mean share of the ids that the engines could have sampled with all slots full all the time.
        learner_busy: share of the time in which the learner computed.
        staleness_mean, staleness_max: versions, of sampled tokens when they were trained on.
        dropped: trajectories lost, as a share of those that were trained on or lost.
        share_of_ideal: of the rate that engines or learner, whoever is slower, would reach if they never waited.
    """

    policy: str
    samples_per_second: float
    step_seconds: float
    engines_busy: float
    slots_used: float
    learner_busy: float
    staleness_mean: float
    staleness_max: int
    dropped: float
    share_of_ideal: float


@dataclass(frozen=True, kw_only=True)
class _Reading:
    """How far things were when a step was recorded."""

    time: float
    busy_seconds: float
    generated_tokens: int
    learner_seconds: float
    record: Mapping[str, Any]


class _Readings(RunFolder):
    """Takes a reading where a run writes a line of metrics; writes nothing."""

    def __init__(self, engines: Sequence[SimulatedEngine], learner: SimulatedLearner) -> None:
        self._engines, self._learner = engines, learner
        self.taken: list[_Reading] = []

    def add_metrics(self, record: Mapping[str, Any]) -> None:
        engines = [engine.read() for engine in self._engines]
        self.taken.append(
            _Reading(
                time=asyncio.get_running_loop().time(),
                busy_seconds=sum(engine.busy_seconds for engine in engines),
                generated_tokens=sum(engine.generated_tokens for engine in engines),
                learner_seconds=self._learner.busy_seconds,
                record=record,
            )
        )

    def add_trajectories(
        self, step: int, split: str, trajectories: Sequence[Trajectory], *, learnt: Learnt | None = None
    ) -> None:
        """They hold nothing to look at."""


class _NoCheckpoints:
    """Stands in for a :class:`Checkpointer`: there is nothing to save."""

    def save(self, step: int, state: Any, record: Mapping[str, Any]) -> None: ...

    def check(self) -> None: ...

    def wait(self) -> None: ...

    def written(self) -> str:
        return ""


def simulate(recipe: Config, assumptions: Assumptions, policy: SimulatedPolicy) -> SimulationResult:
    """Runs a recipe under a policy.

    Args:
        recipe: its ``rollout`` sizes count; everything a model would be needed for does not.
    """
    with closing(VirtualLoop()) as loop:
        return loop.run_until_complete(_simulate(_settings(recipe, assumptions, policy), assumptions, policy.name))


def _settings(recipe: Config, assumptions: Assumptions, policy: SimulatedPolicy) -> Config:
    """The recipe's batch under the policy, with nothing that needs a real model, data or rewards."""
    rollout, agent = recipe.rollout, assumptions.agent
    return build(
        {
            "seed": assumptions.seed,
            "run_dir": recipe.run_dir,
            "model": {"path": recipe.model.path},
            "data": {"train": recipe.data.train},
            "rollout": {
                "prompts_per_step": rollout.prompts_per_step,
                "group_size": rollout.group_size,
                "max_in_flight": rollout.max_in_flight,
                "max_model_len": agent.longest,
            },
            "agent": {
                "max_prompt_length": agent.prompt_tokens,
                "max_response_length": agent.longest - agent.prompt_tokens,
            },
            "algorithm": {"adv_estimator": "reinforce_plus_plus"},  # takes groups of any size, whatever the recipe's
            "learner": {"pack_length": agent.longest},
            "trainer": {**policy.trainer, "steps": assumptions.steps, "checkpoint_every": 0},
        }
    )


async def _simulate(config: Config, assumptions: Assumptions, name: str) -> SimulationResult:
    margin = config.trainer.staleness_bound + 1  # steps to fill the pipeline, and to let it run dry
    steps = margin + assumptions.steps + margin
    config = config.model_copy(update={"trainer": config.trainer.model_copy(update={"steps": steps})})
    engines = [
        SimulatedEngine(assumptions.engines.speed, max_model_len=config.rollout.max_model_len)
        for _ in range(assumptions.engines.count)
    ]
    learner = SimulatedLearner(assumptions.learner)
    readings = _Readings(engines, learner)
    training = TRAINERS[config.trainer.mode](
        runtime=_runtime(config, assumptions, engines, learner),
        folder=readings,
        checkpointer=cast(Checkpointer, _NoCheckpoints()),
        record=RunRecord(),
        progress=Progress(Console(file=io.StringIO()), total_steps=steps),
        clock=asyncio.get_running_loop().time,
    )
    await training.run()
    return _outcome(name, config, assumptions, readings.taken[margin - 1 : -margin])


def _runtime(
    config: Config,
    assumptions: Assumptions,
    engines: Sequence[SimulatedEngine],
    learner: SimulatedLearner,
) -> RunComponents:
    client = LLMServerClient(AsyncServer(engine, name=f"engine-{i}") for i, engine in enumerate(engines))
    codec = SimulatedCodec(assumptions.agent.prompt_tokens)
    context = AgentContext(
        client=client, codec=cast(Any, codec), limits=config.agent, max_model_len=config.rollout.max_model_len
    )
    collectors = [
        RolloutCollector(context, score=_score, max_in_flight=config.rollout.max_in_flight, seed=config.seed)
        for _ in range(2)
    ]
    rows = [
        {
            "prompt": [{"role": "user", "content": number}],
            "agent_name": AGENT,
            "agent": assumptions.agent,
            "seed": assumptions.seed,
            "number": number,
        }
        for number in range(config.trainer.steps * config.rollout.prompts_per_step)
    ]
    return RunComponents(
        config=config,
        codec=cast(Any, codec),
        metrics=FleetMetrics(lambda: engines).read,
        client=client,
        collector=collectors[0],
        evaluator=collectors[1],
        learner=cast(Any, learner),
        publisher=SimulatedPublisher(assumptions.learner),
        cursor=DataCursor(rows, seed=config.seed),
        heldout=[],
    )


async def _score(trajectory: Trajectory) -> Trajectory:
    """Rewards make no difference to when things happen."""
    return trajectory


def _outcome(name: str, config: Config, assumptions: Assumptions, readings: Sequence[_Reading]) -> SimulationResult:
    """What happened from the first reading to the last."""
    first, last = readings[0], readings[-1]
    seconds, engines = last.time - first.time, assumptions.engines
    trained, lost = _booked(last.record) - _booked(first.record)
    rate = trained / seconds
    steps = [reading.record for reading in readings[1:]]
    return SimulationResult(
        policy=name,
        samples_per_second=rate,
        step_seconds=seconds / len(steps),
        engines_busy=(last.busy_seconds - first.busy_seconds) / seconds / engines.count,
        slots_used=(last.generated_tokens - first.generated_tokens) / seconds / engines.tokens_per_second,
        learner_busy=(last.learner_seconds - first.learner_seconds) / seconds,
        staleness_mean=float(np.mean([step.get("staleness_mean", 0.0) for step in steps])),
        staleness_max=max(step.get("staleness_max", 0) for step in steps),
        dropped=lost / (trained + lost),
        share_of_ideal=rate / ideal_samples_per_second(config, assumptions),
    )


def _booked(record: Mapping[str, Any]) -> np.ndarray:
    """Trajectories trained on, and lost, up to this step."""
    books = record["accounting"]
    return np.array([books["trained"], books["started"] - books["trained"] - books["in_flight"]])


def ideal_samples_per_second(config: Config, assumptions: Assumptions) -> float:
    """Trajectories a second that the slower of engines and learner would get done if it never waited for anything."""
    agent, rollout = assumptions.agent, config.rollout
    lengths = [
        sum(agent.turn_length(assumptions.seed, number, str(member), turn) for turn in range(agent.turns))
        for number in range(assumptions.steps * rollout.prompts_per_step)
        for member in range(rollout.group_size)
    ]
    sampled = float(np.mean(lengths))
    inserted = agent.prompt_tokens + (agent.turns - 1) * agent.observation_tokens
    engines = assumptions.engines.tokens_per_second / sampled
    return min(engines, assumptions.learner.tokens_per_second / (sampled + inserted))
