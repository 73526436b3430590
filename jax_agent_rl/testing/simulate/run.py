"""``jax-agent-rl simulate``: a recipe in virtual time, and a comparison of ways to run it.

It compares trainers, ways to manage KV caches, rules for busy servers, or environments that are
started when they are needed with those that are started before.
"""

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
from jax_agent_rl.environments import EnvironmentPools
from jax_agent_rl.errors import ConfigError
from jax_agent_rl.observe.progress import Progress, duration
from jax_agent_rl.observe.run_dir import RunDir, TokenValues
from jax_agent_rl.rollout.client import LLMServerClient
from jax_agent_rl.rollout.fleet_metrics import FleetMetrics
from jax_agent_rl.rollout.request_queue import MoveRule
from jax_agent_rl.rollout.server import AsyncServer
from jax_agent_rl.runtime.train import TRAINERS
from jax_agent_rl.testing.fakes import NoCheckpoints
from jax_agent_rl.testing.simulate.engine import SimulatedEngine
from jax_agent_rl.testing.simulate.workload import (
    AGENT,
    Assumptions,
    KVCacheSize,
    SimulatedCodec,
    SimulatedLearner,
    SimulatedTransport,
    VirtualLoop,
    load_assumptions,
)
from jax_agent_rl.trainer.components import RunComponents
from jax_agent_rl.trainer.record import RunRecord
from jax_agent_rl.types import Group, Trajectory
from jax_agent_rl.utils.text import counted

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
_TRAINER = "trainer"
_KV_CACHE = "KV cache"
_BUSY = "busy server"
_ENVIRONMENTS = "environment start"
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
    _ENVIRONMENTS: (
        "cold: each is started when its trajectory begins; warm: so many are started before"
        " (environments.warm_instances)"
    ),
    "traj/s": "trajectories trained on in a second",
    "×": "that, over the first line's",
    "ideal": "that, over the rate of engines or learner, whoever is slower, if they never waited",
    "cached": "share of all prompt ids found in the KV cache",
    "hits": "share of the trajectories whose environment was started before they began",
    "engines": "share of the time in which an engine decodes",
    "slots": "share of what the engines could sample with all slots full",
    "learner": "share of the time in which the learner computes",
    "step": "time from one optimizer step to the next",
    "stale": "how many versions old the tokens are, on average/at most",
    "lost": "trajectories given up, of all that ended",
}
_NOT_IN = {
    _TRAINER: (_KV_CACHE, _BUSY, _ENVIRONMENTS, "cached", "hits"),
    _KV_CACHE: (_TRAINER, _BUSY, _ENVIRONMENTS, "ideal", "hits"),
    _BUSY: (_TRAINER, _KV_CACHE, _ENVIRONMENTS, "ideal", "hits"),
    _ENVIRONMENTS: (_TRAINER, _KV_CACHE, _BUSY, "ideal", "cached"),
}
"""Columns that a comparison leaves out."""


@dataclass(frozen=True, kw_only=True)
class SimulationResult:
    """The result of one policy, measured while its pipeline was full.

    Attributes:
        policy: the policy's name.
        samples_per_second: trajectories trained on per second.
        step_seconds: virtual seconds between learner steps.
        cached: prompt ids found in the KV cache, as a share of all prompt ids.
        environment_start_seconds: mean time that a trajectory waited for its environment's start.
        environment_hit_rate: trajectories whose environment was started before they began, as a
            share of all.
        engines_busy: mean share of the time in which an engine decoded.
        slots_used: ids sampled, as a share of what full slots would have sampled all the time.
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
    environment_start_seconds: float
    environment_hit_rate: float
    engines_busy: float
    slots_used: float
    learner_busy: float
    staleness_mean: float
    staleness_max: int
    dropped: float
    share_of_ideal: float


@dataclass(frozen=True, kw_only=True)
class _Totals:
    """Totals up to the end of a step.

    Attributes:
        seconds: virtual time.
        engine_seconds: seconds in which engines decoded.
        sampled: ids sampled.
        learner_seconds: seconds in which the learner computed.
        computed: prompt ids that engines computed.
        cached: prompt ids that engines found in their caches.
        trained: trajectories trained on.
        dropped: trajectories dropped.
    """

    seconds: float
    engine_seconds: float
    sampled: int
    learner_seconds: float
    computed: int
    cached: int
    trained: int
    dropped: int


class _StepTotals(RunDir):
    """A run folder that writes nothing, and collects totals and the record of every step."""

    def __init__(self, engines: Sequence[SimulatedEngine], learner: SimulatedLearner) -> None:
        self._engines = engines
        self._learner = learner
        self.steps: list[tuple[_Totals, Mapping[str, Any]]] = []

    def add_metrics(self, record: Mapping[str, Any]) -> None:
        engines = [engine.read() for engine in self._engines]
        counts = record["accounting"]
        totals = _Totals(
            seconds=asyncio.get_running_loop().time(),
            engine_seconds=sum(metrics.busy_seconds for metrics in engines),
            sampled=sum(metrics.generated_tokens for metrics in engines),
            learner_seconds=self._learner.busy_seconds,
            computed=sum(metrics.prefill_tokens for metrics in engines),
            cached=sum(metrics.cached_tokens for metrics in engines),
            trained=counts["trained"],
            dropped=counts["started"] - counts["trained"] - counts["in_flight"],
        )
        self.steps.append((totals, record))

    def add_trajectories(
        self,
        step: int,
        split: str,
        trajectories: Sequence[Trajectory],
        *,
        token_values: TokenValues | None = None,
        groups: Sequence[Group] = (),
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
    warm_instances: int = 0,
) -> SimulationResult:
    """Simulate a recipe under a policy.

    Args:
        recipe: configuration of a run, of which only the sizes in ``rollout`` matter.
        policy: the policy's name.
        trainer: keys of ``trainer``: how rollout and learning overlap.
        kv_cache: the engines' KV cache; None has no limit.
        moves: rule for sessions whose server is full, see
            :data:`~jax_agent_rl.rollout.request_queue.MoveRule`.
        warm_instances: environments that are started ahead.
    """
    config = _build_config(recipe, assumptions, trainer, warm_instances)
    with closing(VirtualLoop()) as loop:
        return loop.run_until_complete(_simulate(config, assumptions, policy, kv_cache, moves))


def _build_config(
    recipe: Config, assumptions: Assumptions, trainer: Mapping[str, Any], warm_instances: int
) -> Config:
    """Build a configuration with the recipe's batch sizes that needs no model, data or rewards."""
    rollout = recipe.rollout
    agent = assumptions.agent
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
            "environments": {
                "max_instances": recipe.environments.max_instances,
                "warm_instances": warm_instances,
                # Later than any start.
                "start_timeout": 1.0 + agent.environment_start_seconds,
            },
            # Takes groups of any size, whatever the recipe's estimator does.
            "algorithm": {"adv_estimator": "reinforce_plus_plus"},
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
    trainer_config = config.trainer.model_copy(update={"steps": steps})
    config = config.model_copy(update={"trainer": trainer_config})

    engines = []
    for _ in range(assumptions.engines.count):
        engine = SimulatedEngine(
            assumptions.engines.speed, max_model_len=config.rollout.max_model_len, kv_cache=kv_cache
        )
        engines.append(engine)
    learner = SimulatedLearner(assumptions.learner)
    folder = _StepTotals(engines, learner)
    environments = EnvironmentPools(**config.environments.model_dump(exclude={"path"}))
    runtime = _runtime(config, assumptions, engines, learner, environments)
    runtime.client.pool.queue.moves = moves
    trainer = TRAINERS[config.trainer.mode](
        runtime=runtime,
        folder=folder,
        checkpointer=NoCheckpoints(),
        record=RunRecord(),
        progress=Progress(Console(file=io.StringIO()), total_steps=steps),
        clock=asyncio.get_running_loop().time,
    )
    await trainer.run()
    await environments.close()
    return _summarize(name, config, assumptions, folder.steps[margin - 1 : -margin])


def _runtime(
    config: Config,
    assumptions: Assumptions,
    engines: Sequence[SimulatedEngine],
    learner: SimulatedLearner,
    environments: EnvironmentPools,
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
        environments=environments,
    )

    def make_collector() -> RolloutCollector:
        return RolloutCollector(
            context, score=_score, max_in_flight=config.rollout.max_in_flight, seed=config.seed
        )

    rows = []
    for number in range(config.trainer.steps * config.rollout.prompts_per_step):
        row = {
            "prompt": [{"role": "user", "content": number}],
            "agent_name": AGENT,
            "agent": assumptions.agent,
            "seed": assumptions.seed,
            "number": number,
        }
        rows.append(row)
    return RunComponents(
        config=config,
        codec=cast(Any, codec),
        metrics=FleetMetrics(lambda: engines).read,
        client=client,
        collector=make_collector(),
        evaluator=make_collector(),
        learner=learner,
        transport=SimulatedTransport(assumptions.learner),
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
    steps: Sequence[tuple[_Totals, Mapping[str, Any]]],
) -> SimulationResult:
    """Compare the totals after the last step with those after the first."""
    first, _ = steps[0]
    last, _ = steps[-1]
    seconds = last.seconds - first.seconds
    engine_seconds = last.engine_seconds - first.engine_seconds
    learner_seconds = last.learner_seconds - first.learner_seconds
    sampled = last.sampled - first.sampled
    computed = last.computed - first.computed
    cached = last.cached - first.cached
    trained = last.trained - first.trained
    dropped = last.dropped - first.dropped

    records = [record for _, record in steps[1:]]

    def mean(name: str) -> float:
        return float(np.mean([record.get(name, 0.0) for record in records]))

    samples_per_second = trained / seconds
    engines = assumptions.engines
    return SimulationResult(
        policy=name,
        samples_per_second=samples_per_second,
        step_seconds=seconds / len(records),
        cached=cached / (computed + cached),
        environment_start_seconds=mean("environment/start_seconds_mean"),
        environment_hit_rate=mean("environment/hit_rate"),
        engines_busy=engine_seconds / seconds / engines.count,
        slots_used=sampled / seconds / engines.tokens_per_second,
        learner_busy=learner_seconds / seconds,
        staleness_mean=mean("staleness_mean"),
        staleness_max=max(record.get("staleness_max", 0) for record in records),
        dropped=dropped / (trained + dropped),
        share_of_ideal=samples_per_second / ideal_samples_per_second(config, assumptions),
    )


def ideal_samples_per_second(config: Config, assumptions: Assumptions) -> float:
    """Return the rate that the slower of engines and learner would reach without waiting.

    It is in trajectories per second.
    """
    agent = assumptions.agent
    rollout = config.rollout
    sampled_ids = 0
    for number in range(assumptions.steps * rollout.prompts_per_step):
        for member in range(rollout.group_size):
            for turn in range(agent.turns):
                sampled_ids += agent.turn_length(assumptions.seed, number, str(member), turn)
    trajectory_count = assumptions.steps * rollout.prompts_per_step * rollout.group_size
    sampled = sampled_ids / trajectory_count
    inserted = agent.prompt_tokens + (agent.turns - 1) * agent.observation_tokens

    engine_rate = assumptions.engines.tokens_per_second / sampled
    learner_rate = assumptions.learner.tokens_per_second / (sampled + inserted)
    return min(engine_rate, learner_rate)


def run_command(
    recipe: Path, overrides: Sequence[str], assume: Path | None, *, as_json: bool, console: Console
) -> list[SimulationResult]:
    """Compare ways to run a recipe, and print the comparison.

    They are environments if the assumptions say how long they take to start, :data:`BUSY_RULES` if
    the recipe limits requests per server, KV caches if the assumptions limit them, else
    :data:`POLICIES`.

    Args:
        recipe: configuration file of a run.
        overrides: overrides of the configuration and, prefixed with ``assume.``, of the
            assumptions.
        assume: file of assumptions, if any.
        as_json: whether to print one JSON object as the last line.
        console: where the comparison is printed.

    Raises:
        ConfigError: a file or an override is invalid.
    """
    recipe_overrides = []
    assumption_overrides = []
    for override in overrides:
        if override.startswith(_ASSUME):
            assumption_overrides.append(override.removeprefix(_ASSUME))
        else:
            recipe_overrides.append(override)
    config = load(recipe, recipe_overrides)
    assumptions = load_assumptions(assume, assumption_overrides)

    rollout = config.rollout
    engines = assumptions.engines
    compared, variants = _variants(config, assumptions)
    console.print(
        f"{rollout.prompts_per_step} x {counted(rollout.group_size, 'trajectory')} a step,"
        f" {counted(engines.count, 'engine')} of {counted(engines.slots, 'slot')};"
        f" {counted(assumptions.steps, 'step')} of each {compared}",
        highlight=False,
    )
    outcomes = []
    for policy, options in variants.items():
        console.print(f"  {policy}", highlight=False)
        outcomes.append(simulate(config, assumptions, policy, **options))

    columns = [name for name in _COLUMNS if name not in _NOT_IN[compared]]
    console.print(_tabulate(compared, columns, outcomes))
    for name in columns:
        console.print(f"  [bold]{name}[/bold]: {_COLUMNS[name]}", highlight=False, soft_wrap=True)
    if as_json:
        report = {
            "assumptions": assumptions.model_dump(),
            "outcomes": [asdict(outcome) for outcome in outcomes],
        }
        print(json.dumps(report))
    return outcomes


def _variants(config: Config, assumptions: Assumptions) -> tuple[str, dict[str, dict[str, Any]]]:
    """Return what is compared, and for each variant the other arguments of :func:`simulate`.

    Raises:
        ConfigError: the assumed KV caches hold no context.
    """
    variants: dict[str, dict[str, Any]] = {}
    trainer = next(keys for keys in POLICIES.values() if keys["mode"] == config.trainer.mode)
    if assumptions.agent.environment_start_seconds:
        warm_instances = config.environments.warm_instances or config.rollout.max_in_flight
        variants["cold"] = {"trainer": trainer}
        variants[f"warm {warm_instances}"] = {"trainer": trainer, "warm_instances": warm_instances}
        return _ENVIRONMENTS, variants

    cache = assumptions.kv_cache
    if config.rollout.max_in_flight_per_server is not None:
        kv_cache = cache.size(
            policy="expected_return", offloading_tokens=cache.offloading_tokens or 0
        )
        for name, rule in BUSY_RULES.items():
            variants[name] = {"trainer": trainer, "kv_cache": kv_cache, "moves": rule}
        return _BUSY, variants

    if cache.tokens is not None:
        for name, kv_cache in _kv_caches(config, assumptions).items():
            variants[name] = {"trainer": trainer, "kv_cache": kv_cache}
        return _KV_CACHE, variants

    for name, keys in POLICIES.items():
        variants[name] = {"trainer": keys}
    return _TRAINER, variants


def _kv_caches(config: Config, assumptions: Assumptions) -> dict[str, KVCacheSize | None]:
    """Return caches of the same size on the device that are managed in different ways, by name.

    Raises:
        ConfigError: they hold no context.
    """
    cache = assumptions.kv_cache
    longest = assumptions.agent.longest
    if cache.tokens is not None and cache.tokens < longest:
        raise ConfigError(
            f"assume.kv_cache.tokens={cache.tokens} holds no context of {longest} ids; raise it, or"
            " shorten assume.agent.turns or turn_tokens_max"
        )
    host_tokens = cache.offloading_tokens or config.rollout.max_in_flight * longest
    return {
        "lru": cache.size(policy="lru", offloading_tokens=0),
        "expected return": cache.size(policy="expected_return", offloading_tokens=0),
        "with offloading": cache.size(policy="expected_return", offloading_tokens=host_tokens),
    }


def _tabulate(compared: str, columns: Sequence[str], outcomes: Sequence[SimulationResult]) -> Table:
    """Tabulate each policy's throughput, utilization, staleness and losses."""
    table = Table(box=None, padding=(0, 1, 0, 0))
    for heading in columns:
        justify = "left" if heading == compared else "right"
        table.add_column(heading, justify=justify, no_wrap=True)

    first_rate = outcomes[0].samples_per_second
    for outcome in outcomes:
        ideal_or_found = outcome.cached
        if compared == _TRAINER:
            ideal_or_found = outcome.share_of_ideal
        elif compared == _ENVIRONMENTS:
            ideal_or_found = outcome.environment_hit_rate

        table.add_row(
            outcome.policy,
            f"{outcome.samples_per_second:.2f}",
            f"{outcome.samples_per_second / first_rate:.2f}",
            f"{ideal_or_found:.0%}",
            f"{outcome.engines_busy:.0%}",
            f"{outcome.slots_used:.0%}",
            f"{outcome.learner_busy:.0%}",
            duration(outcome.step_seconds),
            f"{outcome.staleness_mean:.1f}/{outcome.staleness_max}",
            f"{outcome.dropped:.1%}",
        )
    return table
