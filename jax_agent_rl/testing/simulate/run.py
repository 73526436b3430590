"""Runs a recipe under each trainer in virtual time and compares them."""

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
from jax_agent_rl.observe.progress import Progress
from jax_agent_rl.observe.run_dir import RunDir, TokenValues
from jax_agent_rl.rollout.client import LLMServerClient
from jax_agent_rl.rollout.server import AsyncServer
from jax_agent_rl.runtime.placement import FleetMetrics
from jax_agent_rl.runtime.train import TRAINERS
from jax_agent_rl.testing.fake_learner import NoCheckpoints
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
    """A way to overlap rollout and learning, as keys of ``trainer``."""

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
    """The result of one policy, measured while its pipeline was full.

    Attributes:
        policy: the policy's name.
        samples_per_second: trajectories trained on per second.
        step_seconds: virtual seconds between learner steps.
        engines_busy: mean share of the time in which an engine decoded.
        slots_used: ids sampled, as a share of those possible with all slots full all the time.
        learner_busy: share of the time in which the learner computed.
        staleness_mean: mean age of trained tokens, in versions.
        staleness_max: maximum age of trained tokens, in versions.
        dropped: dropped trajectories, as a share of those trained on or dropped.
        share_of_ideal: rate, as a share of what the slower of engines and learner would reach without waiting.
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
    """Totals at the time when a step was recorded."""

    time: float
    busy_seconds: float
    generated_tokens: int
    learner_seconds: float
    record: Mapping[str, Any]


class _Readings(RunDir):
    """A run folder that writes nothing and takes a reading for every record of metrics."""

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
        self, step: int, split: str, trajectories: Sequence[Trajectory], *, token_values: TokenValues | None = None
    ) -> None:
        """Ignore them: their content is simulated."""


def simulate(recipe: Config, assumptions: Assumptions, policy: SimulatedPolicy) -> SimulationResult:
    """Simulate a recipe under a policy.

    Args:
        recipe: configuration of a run, of which only the sizes in ``rollout`` matter.
        assumptions: workload and speeds.
        policy: how rollout and learning overlap.
    """
    with closing(VirtualLoop()) as loop:
        return loop.run_until_complete(_simulate(_settings(recipe, assumptions, policy), assumptions, policy.name))


def _settings(recipe: Config, assumptions: Assumptions, policy: SimulatedPolicy) -> Config:
    """Build a configuration with the recipe's batch and the policy that needs no model, data or rewards."""
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
    margin = config.trainer.staleness_bound + 1  # steps to fill and to drain the pipeline
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
        checkpointer=cast(Checkpointer, NoCheckpoints()),
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
    """Leave the trajectory without a reward: rewards do not affect timing."""
    return trajectory


def _outcome(name: str, config: Config, assumptions: Assumptions, readings: Sequence[_Reading]) -> SimulationResult:
    """Summarize the readings from the first to the last."""
    first, last = readings[0], readings[-1]
    seconds, engines = last.time - first.time, assumptions.engines
    trained, dropped = _totals(last.record) - _totals(first.record)
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
        dropped=dropped / (trained + dropped),
        share_of_ideal=rate / ideal_samples_per_second(config, assumptions),
    )


def _totals(record: Mapping[str, Any]) -> np.ndarray:
    """Return the trajectories trained on and dropped up to this step."""
    counts = record["accounting"]
    return np.array([counts["trained"], counts["started"] - counts["trained"] - counts["in_flight"]])


def ideal_samples_per_second(config: Config, assumptions: Assumptions) -> float:
    """Return the trajectories per second that the slower of engines and learner would reach without waiting."""
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
