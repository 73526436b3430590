"""``jax-agent-rl simulate``: a recipe in virtual time with each trainer, kind of KV cache, or rule for busy servers."""

from __future__ import annotations

import asyncio
import io
import json
import operator
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
from rich.console import Console
from rich.table import Table

from jax_agent_rl.agents import AgentContext
from jax_agent_rl.collect.collector import RolloutCollector
from jax_agent_rl.config import Config, build, load
from jax_agent_rl.data.cursor import DataCursor
from jax_agent_rl.errors import ConfigError
from jax_agent_rl.observe.progress import Progress, duration
from jax_agent_rl.observe.run_dir import RunDir, TokenValues
from jax_agent_rl.rollout.client import LLMServerClient
from jax_agent_rl.rollout.request_queue import MoveRule
from jax_agent_rl.rollout.server import AsyncServer, FleetMetrics
from jax_agent_rl.runtime.train import TRAINERS
from jax_agent_rl.testing.fakes import NoCheckpoints
from jax_agent_rl.testing.simulate.engine import SimulatedEngine
from jax_agent_rl.testing.simulate.workload import (
    AGENT,
    Assumptions,
    KVCacheSize,
    SimulatedCodec,
    SimulatedLearner,
    SimulatedPublisher,
    VirtualLoop,
    load_assumptions,
)
from jax_agent_rl.trainer import RunComponents
from jax_agent_rl.trainer.record import RunRecord
from jax_agent_rl.types import Trajectory

POLICIES: dict[str, dict[str, Any]] = {
    "sync": {"mode": "sync"},
    "one_step_off": {"mode": "one_step_off"},
    "fully_async 1": {"mode": "fully_async", "max_staleness": 1},
    "fully_async 2": {"mode": "fully_async", "max_staleness": 2},
    "fully_async 4": {"mode": "fully_async", "max_staleness": 4},
    "fully_async 1 drop": {"mode": "fully_async", "max_staleness": 1, "stragglers": "drop"},
}
"""Ways to overlap rollout and learning, as keys of ``trainer``, by name."""
BUSY_RULES: dict[str, MoveRule] = {
    "migrate": lambda prefill, wait: True,
    "wait": lambda prefill, wait: False,
    "by cost": operator.le,
}
"""Rules for sessions whose server is full, by name."""
_ASSUME = "assume."
_TRAINER, _KV_CACHE, _BUSY = "trainer", "KV cache", "busy server"
_COLUMNS = {
    _TRAINER: "trainer.mode, trainer.max_staleness, trainer.stragglers",
    _KV_CACHE: (
        "lru: the least recently used goes first; expected return: what waiting agents need last;"
        " offloading: what does not fit is kept in host memory"
        " (rollout.jetstream.kv_offloading_size)"
    ),
    _BUSY: (
        "migrate: the session moves to a server with room, which computes its context again; wait:"
        " it waits for its server; by cost: whichever takes less time (what runs do)"
    ),
    "traj/s": "trajectories trained on in a second",
    "×": "that, over the first line's",
    "ideal": "that, over the rate of engines or learner, whoever is slower, if they never waited",
    "cached": "share of all prompt ids found in the KV cache",
    "engines": "share of the time in which an engine decodes",
    "slots": "share of what the engines could sample with all slots full",
    "learner": "share of the time in which the learner computes",
    "step": "time from one optimizer step to the next",
    "stale": "how many versions old the tokens are, on average/at most",
    "lost": "trajectories given up, of all that ended",
}
_NOT_IN = {
    _TRAINER: (_KV_CACHE, _BUSY, "cached"),
    _KV_CACHE: (_TRAINER, _BUSY, "ideal"),
    _BUSY: (_TRAINER, _KV_CACHE, "ideal"),
}
"""Columns that a comparison leaves out."""


@dataclass(frozen=True, kw_only=True)
class SimulationResult:
    """The result of one policy, measured while its pipeline was full.

    Attributes:
        policy: the policy's name.
        samples_per_second: trajectories trained on per second.
        step_seconds: virtual seconds between learner steps.
        cached: prompt ids found in the KV cache, as a share of all.
        engines_busy: mean share of the time in which an engine decoded.
        slots_used: ids sampled, as a share of those possible with all slots full all the time.
        learner_busy: share of the time in which the learner computed.
        staleness_mean: mean age of trained tokens, in versions.
        staleness_max: maximum age of trained tokens, in versions.
        dropped: dropped trajectories, as a share of those trained on or dropped.
        share_of_ideal: rate, as a share of what the slower of engines and learner would reach
            without waiting.
    """

    policy: str
    samples_per_second: float
    step_seconds: float
    cached: float
    engines_busy: float
    slots_used: float
    learner_busy: float
    staleness_mean: float
    staleness_max: int
    dropped: float
    share_of_ideal: float


class _Readings(RunDir):
    """A run folder that writes nothing and keeps totals and the record of every step.

    Totals: virtual time, seconds in which engines decoded, ids sampled, seconds in which the
    learner computed, prompt ids that engines computed, prompt ids found in their caches.
    """

    def __init__(self, engines: Sequence[SimulatedEngine], learner: SimulatedLearner) -> None:
        self._engines, self._learner = engines, learner
        self.taken: list[tuple[np.ndarray, Mapping[str, Any]]] = []

    def add_metrics(self, record: Mapping[str, Any]) -> None:
        engines = [engine.read() for engine in self._engines]
        busy, sampled = (
            sum(e.busy_seconds for e in engines),
            sum(e.generated_tokens for e in engines),
        )
        computed, cached = (
            sum(e.prefill_tokens for e in engines),
            sum(e.cached_tokens for e in engines),
        )
        now = asyncio.get_running_loop().time()
        totals = np.array([now, busy, sampled, self._learner.busy_seconds, computed, cached])
        self.taken.append((totals, record))

    def add_trajectories(
        self,
        step: int,
        split: str,
        trajectories: Sequence[Trajectory],
        *,
        token_values: TokenValues | None = None,
    ) -> None:
        """Ignore them: their content is simulated."""

    def finish_step(self, step: int) -> None:
        """Remove nothing: no file was written."""


def simulate(
    recipe: Config,
    assumptions: Assumptions,
    policy: str,
    trainer: Mapping[str, Any],
    kv_cache: KVCacheSize | None = None,
    moves: MoveRule = operator.le,
) -> SimulationResult:
    """Simulate a recipe under a policy.

    Args:
        recipe: configuration of a run, of which only the sizes in ``rollout`` matter.
        assumptions: workload and speeds.
        policy: the policy's name.
        trainer: keys of ``trainer``: how rollout and learning overlap.
        kv_cache: the engines' KV cache; None has no limit.
        moves: rule for sessions whose server is full, see
            :data:`~jax_agent_rl.rollout.request_queue.MoveRule`.
    """
    config = _build_config(recipe, assumptions, trainer)
    with closing(VirtualLoop()) as loop:
        return loop.run_until_complete(_simulate(config, assumptions, policy, kv_cache, moves))


def _build_config(recipe: Config, assumptions: Assumptions, trainer: Mapping[str, Any]) -> Config:
    """Build a configuration with the recipe's batch sizes that needs no model, data or rewards."""
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
                "max_in_flight_per_server": rollout.max_in_flight_per_server,
                "max_model_len": agent.longest,
            },
            "agent": {
                "max_prompt_length": agent.prompt_tokens,
                "max_response_length": agent.longest - agent.prompt_tokens,
            },
            "algorithm": {
                "adv_estimator": "reinforce_plus_plus"
            },  # takes groups of any size, whatever the recipe's
            "learner": {"pack_length": agent.longest},
            "trainer": {**trainer, "steps": assumptions.steps, "checkpoint_every": 0},
        }
    )


async def _simulate(
    config: Config,
    assumptions: Assumptions,
    name: str,
    kv_cache: KVCacheSize | None,
    moves: MoveRule,
) -> SimulationResult:
    margin = config.trainer.staleness_bound + 1  # steps to fill and to drain the pipeline
    steps = margin + assumptions.steps + margin
    config = config.model_copy(
        update={"trainer": config.trainer.model_copy(update={"steps": steps})}
    )
    engines = [
        SimulatedEngine(
            assumptions.engines.speed, max_model_len=config.rollout.max_model_len, kv_cache=kv_cache
        )
        for _ in range(assumptions.engines.count)
    ]
    learner = SimulatedLearner(assumptions.learner)
    readings = _Readings(engines, learner)
    runtime = _runtime(config, assumptions, engines, learner)
    runtime.client.queue.moves = moves
    training = TRAINERS[config.trainer.mode](
        runtime=runtime,
        folder=readings,
        checkpointer=NoCheckpoints(),
        record=RunRecord(),
        progress=Progress(Console(file=io.StringIO()), total_steps=steps),
        clock=asyncio.get_running_loop().time,
    )
    await training.run()
    return _summarize(name, config, assumptions, readings.taken[margin - 1 : -margin])


def _runtime(
    config: Config,
    assumptions: Assumptions,
    engines: Sequence[SimulatedEngine],
    learner: SimulatedLearner,
) -> RunComponents:
    client = LLMServerClient(
        (AsyncServer(engine, name=f"engine-{i}") for i, engine in enumerate(engines)),
        max_in_flight_per_server=config.rollout.max_in_flight_per_server,
    )
    codec = SimulatedCodec(assumptions.agent.prompt_tokens)
    context = AgentContext(
        client=client,
        codec=cast(Any, codec),
        limits=config.agent,
        max_model_len=config.rollout.max_model_len,
    )
    collectors = [
        RolloutCollector(
            context, score=_score, max_in_flight=config.rollout.max_in_flight, seed=config.seed
        )
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
        learner=learner,
        publisher=SimulatedPublisher(assumptions.learner),
        cursor=DataCursor(rows, seed=config.seed),
        heldout=[],
    )


async def _score(trajectory: Trajectory) -> Trajectory:
    """Leave the trajectory without a reward: rewards do not affect timing."""
    return trajectory


def _summarize(
    name: str,
    config: Config,
    assumptions: Assumptions,
    readings: Sequence[tuple[np.ndarray, Mapping[str, Any]]],
) -> SimulationResult:
    """Compare the last reading with the first."""
    engines = assumptions.engines
    seconds, busy, sampled, learning, computed, cached = readings[-1][0] - readings[0][0]
    trained, dropped = _trained_and_dropped(readings[-1][1]) - _trained_and_dropped(readings[0][1])
    steps = [record for _, record in readings[1:]]
    return SimulationResult(
        policy=name,
        samples_per_second=float(trained / seconds),
        step_seconds=float(seconds / len(steps)),
        cached=float(cached / (computed + cached)),
        engines_busy=float(busy / seconds / engines.count),
        slots_used=float(sampled / seconds / engines.tokens_per_second),
        learner_busy=float(learning / seconds),
        staleness_mean=float(np.mean([step.get("staleness_mean", 0.0) for step in steps])),
        staleness_max=max(step.get("staleness_max", 0) for step in steps),
        dropped=float(dropped / (trained + dropped)),
        share_of_ideal=float(trained / seconds / ideal_samples_per_second(config, assumptions)),
    )


def _trained_and_dropped(record: Mapping[str, Any]) -> np.ndarray:
    """Return the numbers of trajectories trained on and dropped up to a step."""
    counts = record["accounting"]
    return np.array(
        [counts["trained"], counts["started"] - counts["trained"] - counts["in_flight"]]
    )


def ideal_samples_per_second(config: Config, assumptions: Assumptions) -> float:
    """Return the trajectories per second that the slower of engines and learner would reach without waiting."""
    agent, rollout = assumptions.agent, config.rollout
    lengths = [
        sum(
            agent.turn_length(assumptions.seed, number, str(member), turn)
            for turn in range(agent.turns)
        )
        for number in range(assumptions.steps * rollout.prompts_per_step)
        for member in range(rollout.group_size)
    ]
    sampled = float(np.mean(lengths))
    inserted = agent.prompt_tokens + (agent.turns - 1) * agent.observation_tokens
    engines = assumptions.engines.tokens_per_second / sampled
    return min(engines, assumptions.learner.tokens_per_second / (sampled + inserted))


def run_command(
    recipe: Path, overrides: Sequence[str], assume: Path | None, *, as_json: bool, console: Console
) -> list[SimulationResult]:
    """Compare :data:`BUSY_RULES` if the recipe limits servers, KV caches if the assumptions do, else :data:`POLICIES`.

    Args:
        recipe: configuration file of a run.
        overrides: overrides of the configuration and, prefixed with ``assume.``, of the
            assumptions.
        assume: file of assumptions, if any.
        as_json: print one JSON object as the last line.
        console: where the comparison is printed.

    Raises:
        ConfigError: a file or an override is invalid.
    """
    assumed = [item.removeprefix(_ASSUME) for item in overrides if item.startswith(_ASSUME)]
    config = load(recipe, [item for item in overrides if not item.startswith(_ASSUME)])
    assumptions = load_assumptions(assume, assumed)
    rollout = config.rollout
    trainer = next(t for t in POLICIES.values() if t["mode"] == config.trainer.mode)
    cache = assumptions.kv_cache
    variants: dict[str, dict[str, Any]]  # further arguments of simulate()
    if rollout.max_in_flight_per_server is not None:
        what, size = (
            _BUSY,
            cache.size(policy="expected_return", offloading_tokens=cache.offloading_tokens or 0),
        )
        variants = {
            name: {"trainer": trainer, "kv_cache": size, "moves": rule}
            for name, rule in BUSY_RULES.items()
        }
    elif cache.tokens is not None:
        what, caches = _KV_CACHE, _kv_caches(config, assumptions)
        variants = {name: {"trainer": trainer, "kv_cache": size} for name, size in caches.items()}
    else:
        what, variants = (
            _TRAINER,
            {name: {"trainer": trainer} for name, trainer in POLICIES.items()},
        )
    console.print(
        f"{rollout.prompts_per_step} x {rollout.group_size} trajectories a step,"
        f" {assumptions.engines.count} engines of {assumptions.engines.slots} slots;"
        f" {assumptions.steps} steps of each {what}",
        highlight=False,
    )
    outcomes = []
    for policy, variant in variants.items():
        console.print(f"  {policy}", highlight=False)
        outcomes.append(simulate(config, assumptions, policy, **variant))
    columns = [name for name in _COLUMNS if name not in _NOT_IN[what]]
    console.print(_tabulate(what, columns, outcomes))
    for name in columns:
        console.print(f"  [bold]{name}[/bold]: {_COLUMNS[name]}", highlight=False, soft_wrap=True)
    if as_json:
        print(
            json.dumps(
                {"assumptions": assumptions.model_dump(), "outcomes": [asdict(o) for o in outcomes]}
            )
        )
    return outcomes


def _kv_caches(config: Config, assumptions: Assumptions) -> dict[str, KVCacheSize | None]:
    """Return caches of the same size on the device that are managed in different ways, by name.

    Raises:
        ConfigError: they hold no context.
    """
    cache, longest = assumptions.kv_cache, assumptions.agent.longest
    if cache.tokens is not None and cache.tokens < longest:
        raise ConfigError(
            f"assume.kv_cache.tokens={cache.tokens} holds no context of {longest} ids; raise it, or"
            " shorten assume.agent.turns or turn_tokens_max"
        )
    host = cache.offloading_tokens or config.rollout.max_in_flight * longest
    return {
        "lru": cache.size(policy="lru", offloading_tokens=0),
        "expected return": cache.size(policy="expected_return", offloading_tokens=0),
        "with offloading": cache.size(policy="expected_return", offloading_tokens=host),
    }


def _tabulate(what: str, columns: Sequence[str], outcomes: Sequence[SimulationResult]) -> Table:
    """Tabulate each policy's throughput, utilization, staleness and losses."""
    table = Table(box=None, padding=(0, 1, 0, 0))
    for heading in columns:
        table.add_column(heading, justify="left" if heading == what else "right", no_wrap=True)
    for outcome in outcomes:
        table.add_row(
            outcome.policy,
            f"{outcome.samples_per_second:.2f}",
            f"{outcome.samples_per_second / outcomes[0].samples_per_second:.2f}",
            f"{outcome.share_of_ideal if what == _TRAINER else outcome.cached:.0%}",
            f"{outcome.engines_busy:.0%}",
            f"{outcome.slots_used:.0%}",
            f"{outcome.learner_busy:.0%}",
            duration(outcome.step_seconds),
            f"{outcome.staleness_mean:.1f}/{outcome.staleness_max}",
            f"{outcome.dropped:.1%}",
        )
    return table
