r"""Every trainer on rollouts with slow tools: samples per second, and how long each part waits.

    python benchmarks/async_rollout.py [--modes sync one_step_off fully_async] [--turns 3] \
        [--steps 4] [--staleness 4]

Trainers, agent loop (``server_tool_agent``), client and JAX engine are as in a run; the tool server
is a process of its own. A turn has 40 ids in the median and at most 400, a tool takes 0.63 s in the
median and 0.2 to 2 s, a decode step 25 ms (about 30B parameters on one accelerator); see
``benchmarks/paced.py``. The same row has the same draws in every trainer. ``engine_pace_kept``
below about 0.95 says that this machine could not keep that pace.

The learner is paced as well: its time is proportional to the ids of its batch, and it gives back
weights that differ a little and that are published as in any run. A forward and backward pass on
the engine's two cores would slow the engine down; on an accelerator of their own they take none of
its time. At 2000 ids a second (one accelerator for the same model) a step of 64 trajectories takes
it about 10 s. The engine, with all of its 64 slots used all the time, would need 7.

``ideal`` is the schedule in which neither ever waits: the slower of (ids / learner's pace) and
(sampled ids * step / slots). It knows no publication of weights, no prefill, no HTTP. What is
measured are steps in the middle of a run, its pipeline full.

The last line is one JSON object: per mode ``samples_per_second``, ``share_of_ideal``, the shares of
the time in which the engine did not decode and the learner had nothing to do, and the age of its
tokens; ``ratio_vs_sync`` and ``share_of_ideal`` of fully asynchronous training at the top.
``simulated_seconds_per_step`` is what ``jax-agent-rl simulate`` says of the same workload, over
more steps: what is measured checks the simulator.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import json
import tempfile
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from common import running
from paced import (
    OBSERVATION,
    PROMPT,
    Draws,
    LetterCodec,
    PacedBackend,
    TurnLengths,
    agent_settings,
    max_context_len,
    paced_parser,
    serve,
    small_model,
    tool_server,
)
from rich.console import Console

from jax_agent_rl import config
from jax_agent_rl.agents import AgentContext
from jax_agent_rl.collect.collector import RolloutCollector
from jax_agent_rl.data.cursor import DataCursor
from jax_agent_rl.learner.cancellation import StepCancellation
from jax_agent_rl.learner.checkpoint import Checkpointer
from jax_agent_rl.learner.comparison import UNCHECKED, AgreementCheck
from jax_agent_rl.learner.learner import UpdateResult
from jax_agent_rl.observe.progress import Progress
from jax_agent_rl.observe.run_dir import RunDir, read_records
from jax_agent_rl.rollout.server import AsyncServer
from jax_agent_rl.rollout.transport import WeightSource
from jax_agent_rl.runtime.compilation_cache import use_compilation_cache
from jax_agent_rl.runtime.train import TRAINERS
from jax_agent_rl.runtime.transports import ArrayTransport
from jax_agent_rl.testing.simulate.run import simulate
from jax_agent_rl.testing.simulate.workload import load_assumptions
from jax_agent_rl.trainer.base import Trainer
from jax_agent_rl.trainer.components import RunComponents
from jax_agent_rl.trainer.record import RunRecord
from jax_agent_rl.types import Group, Trajectory

LENGTHS = Draws(median=40, least=1, most=400)
LATENCIES = Draws(median=0.63, least=0.2, most=2.0)
WARM_UP = {"sync": 0, "one_step_off": 1, "fully_async": 2}
"""Steps until the pipeline is full."""
TOTAL_STEPS = 1000
"""Configured steps, never reached: the last ones of a run let the pipeline run dry."""


def draw_name(trajectory_id: str) -> str:
    """Return the row of the run and the member of its group, the same for all trainers."""
    label, step_text, index, member = trajectory_id.split("-")
    step = int(step_text)
    if label == "train":
        step -= 1  # synchronous steps are counted from 1
    return f"{step}-{index}-{member}"


class PacedLearner:
    """Takes the time that a batch takes at ``tokens_per_second``, then has new parameters."""

    programs_compiled = 0

    def __init__(self, params: dict, tokens_per_second: float):
        self.params = self.state = params
        self.batches: list[list[Trajectory]] = []
        self._pace = tokens_per_second

    def averaged(self) -> WeightSource:
        return self

    def seconds(self, batch: Sequence[Trajectory]) -> float:
        """Return the seconds an update with this batch takes."""
        num_ids = sum(len(t.prompt_ids) + len(t.response_ids) for t in batch)
        return num_ids / self._pace

    def update(
        self,
        groups: Sequence[Group],
        *,
        masked: Collection[str] = (),
        tick: Callable[[int, int], None] = lambda finished, total: None,
        cancellation: StepCancellation | None = None,
        check: AgreementCheck = UNCHECKED,
    ) -> UpdateResult:
        batch: list[Trajectory] = []
        for group in groups:
            batch += group.trajectories
        self.batches.append(batch)
        with (cancellation or StepCancellation()).update():
            time.sleep(self.seconds(batch))
            self.params = self.state = jax.tree.map(lambda x: x * (1 + 1e-6), self.params)
        return UpdateResult(metrics={}, skipped=False)


async def score(trajectory: Trajectory) -> Trajectory:
    """Reward every second member of a group."""
    is_even = trajectory.trajectory_id[-1] in "02468"
    return replace(trajectory, reward=float(is_even))


def overlap(mode: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the keys of ``trainer`` that select this mode."""
    if mode == "fully_async":
        return {"mode": mode, "max_staleness": arguments.staleness}
    return {"mode": mode}


def settings(mode: str, url: str, folder: Path, arguments: argparse.Namespace) -> config.Config:
    """Return the configuration of a run in this mode."""
    return config.build(
        {
            "run_dir": str(folder),
            "model": {"path": "none"},
            "data": {"train": "none"},
            "agent": agent_settings(url, LENGTHS, arguments.turns),
            "rollout": {
                "prompts_per_step": arguments.rows,
                "group_size": arguments.group_size,
                "max_in_flight": arguments.in_flight,
                "max_model_len": max_context_len(LENGTHS, arguments.turns),
            },
            "learner": {"pack_length": max_context_len(LENGTHS, arguments.turns)},
            "trainer": {**overlap(mode, arguments), "steps": TOTAL_STEPS, "checkpoint_every": 0},
        }
    )


def make_trainer(
    mode: str,
    backend: PacedBackend,
    url: str,
    folder: Path,
    learner: PacedLearner,
    checkpointer: Checkpointer,
    arguments: argparse.Namespace,
) -> Trainer:
    """Make the trainer of ``jax-agent-rl train``, around the paced engine and learner."""
    run = settings(mode, url, folder, arguments)
    codec = LetterCodec()
    client = TurnLengths([AsyncServer(backend)], lengths=LENGTHS, work=draw_name)
    context = AgentContext(
        client=client, codec=codec, limits=run.agent, max_model_len=run.rollout.max_model_len
    )

    def make_collector() -> RolloutCollector:
        return RolloutCollector(
            context, score=score, max_in_flight=run.rollout.max_in_flight, seed=run.seed
        )

    runtime = RunComponents(
        config=run,
        codec=codec,
        metrics=backend.metrics,
        client=client,
        collector=make_collector(),
        evaluator=make_collector(),
        learner=learner,
        transport=ArrayTransport(),
        cursor=DataCursor([{"prompt": PROMPT, "agent_name": "server_tool_agent"}], seed=run.seed),
        heldout=[],
    )
    return TRAINERS[mode](
        runtime=runtime,
        folder=RunDir(folder),
        checkpointer=checkpointer,
        record=RunRecord(),
        progress=Progress(Console(file=io.StringIO()), total_steps=run.trainer.steps),
    )


async def train(
    mode: str, backend: PacedBackend, url: str, folder: Path, arguments: argparse.Namespace
) -> dict:
    """Measure some steps of a trainer whose pipeline is full."""
    _, params = small_model()
    learner = PacedLearner(params, arguments.learner_tokens_per_second)
    checkpointer = Checkpointer(folder / "checkpoints", keep=1)
    trainer = make_trainer(mode, backend, url, folder, learner, checkpointer, arguments)
    runtime = trainer.runtime
    warm_up = WARM_UP[mode]
    try:
        for _ in range(warm_up):
            await trainer.train_step()

        start = time.perf_counter()
        start_metrics = await backend.metrics()
        start_pace = backend.pace
        for step in range(arguments.steps):
            await trainer.train_step()
            print(f"{mode}: step {step + 1} of {arguments.steps}", flush=True)
        seconds = time.perf_counter() - start
        engine = (await backend.metrics()).since(start_metrics)
        planned_seconds, decode_seconds = np.subtract(backend.pace, start_pace)
    finally:
        await trainer.stop_rollouts()
        await runtime.collector.close()
        checkpointer.close()

    runtime.collector.accounting.check()
    batches = learner.batches[warm_up:]
    records = read_records(folder / "metrics.jsonl")[warm_up:]
    learning = [learner.seconds(batch) for batch in batches]
    result = summary(
        batches, learning, records, arguments, seconds=seconds, engine_seconds=engine.busy_seconds
    )
    return result | {"engine_pace_kept": round(planned_seconds / decode_seconds, 3)}


def summary(
    batches: Sequence[Sequence[Trajectory]],
    learning: Sequence[float],
    records: Sequence[dict],
    arguments: argparse.Namespace,
    *,
    seconds: float,
    engine_seconds: float,
) -> dict[str, float]:
    """Return the figures that are compared.

    Args:
        batches: one per step.
        learning: seconds that the learner took for each batch.
        records: the lines of ``metrics.jsonl``.
        seconds: of all steps.
        engine_seconds: time in which the engine decoded.
    """
    num_sampled = 0
    for batch in batches:
        num_sampled += sum(trajectory.num_sampled for trajectory in batch)
    # What decoding takes at least, with all slots used all the time.
    decoding = num_sampled * arguments.step_ms / 1000 / arguments.slots
    ideal = max(sum(learning), decoding)

    weight_update_seconds = [record["weight_update_seconds"] for record in records]
    staleness_means = [record.get("staleness_mean", 0.0) for record in records]
    return {
        "samples_per_second": round(sum(map(len, batches)) / seconds, 3),
        "seconds_per_step": round(seconds / len(batches), 2),
        "ideal_seconds_per_step": round(ideal / len(batches), 2),
        "share_of_ideal": round(ideal / seconds, 3),
        "engine_idle_share": round(1 - engine_seconds / seconds, 3),
        "slots_used": round(decoding / seconds, 3),
        "learner_idle_share": round(1 - sum(learning) / seconds, 3),
        "weight_update_seconds": round(float(np.mean(weight_update_seconds)), 3),
        "staleness_mean": round(float(np.mean(staleness_means)), 2),
        "staleness_max": max(record.get("staleness_max", 0) for record in records),
    }


def simulated(mode: str, url: str, arguments: argparse.Namespace) -> float:
    """Return the seconds of a step by simulation, with other draws of the same kind."""
    assumptions = load_assumptions(
        None,
        [
            "engines.count=1",
            f"engines.slots={arguments.slots}",
            f"engines.step_ms={arguments.step_ms}",
            "engines.load_seconds=0",
            "learner.publish_seconds=0",
            f"learner.tokens_per_second={arguments.learner_tokens_per_second}",
            f"agent.turns={arguments.turns + 1}",
            f"agent.prompt_tokens={len(LetterCodec().encode_prompt(PROMPT))}",
            f"agent.observation_tokens={len(OBSERVATION)}",
            f"agent.turn_tokens={LENGTHS.median}",
            f"agent.turn_tokens_max={LENGTHS.most}",
            f"agent.tool_seconds={LATENCIES.median}",
            f"agent.tool_seconds_min={LATENCIES.least}",
            f"agent.tool_seconds_max={LATENCIES.most}",
            "steps=30",
        ],
    )
    recipe = settings(mode, url, Path("none"), arguments)
    return simulate(recipe, assumptions, mode, overlap(mode, arguments)).step_seconds


async def measure(url: str, arguments: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Measure every mode, each with an engine of its own."""
    results = {}
    for mode in arguments.modes:
        backend = PacedBackend(
            slots=arguments.slots,
            max_model_len=max_context_len(LENGTHS, arguments.turns),
            step_seconds=arguments.step_ms / 1000,
        )
        async with running(backend):
            with tempfile.TemporaryDirectory() as folder:
                results[mode] = await train(mode, backend, url, Path(folder), arguments)
        print(f"{mode}: {json.dumps(results[mode])}", flush=True)
    return results


def main() -> None:
    parser = paced_parser(__doc__)
    parser.add_argument("--modes", nargs="+", choices=list(TRAINERS), default=list(TRAINERS))
    parser.add_argument("--turns", type=int, default=3, help="tool calls of a trajectory")
    parser.add_argument("--steps", type=int, default=4, help="training steps that are measured")
    parser.add_argument("--rows", type=int, default=8, help="groups a step")
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--staleness", type=int, default=4, help="of fully_async")
    parser.add_argument(
        "--in-flight", type=int, default=112, help="most trajectories that run at the same time"
    )
    parser.add_argument("--slots", type=int, default=64, help="most that decode at the same time")
    parser.add_argument(
        "--step-ms", type=float, default=25.0, help="milliseconds of a decode step, at least"
    )
    parser.add_argument("--learner-tokens-per-second", type=float, default=2000.0)
    arguments = parser.parse_args()
    if arguments.serve:
        serve(LATENCIES, draw_name)
        return
    use_compilation_cache()
    with tool_server() as url:
        results: dict[str, Any] = asyncio.run(measure(url, arguments))
    for mode in arguments.modes:
        results[mode]["simulated_seconds_per_step"] = round(simulated(mode, url, arguments), 2)

    fully_async = results.get("fully_async")
    if fully_async is not None:
        results["share_of_ideal"] = fully_async["share_of_ideal"]
        if "sync" in results:
            ratio = fully_async["samples_per_second"] / results["sync"]["samples_per_second"]
            results["ratio_vs_sync"] = round(ratio, 2)

    workload = dict(vars(arguments))
    del workload["modes"], workload["serve"]
    print(json.dumps({**workload, **results}))


if __name__ == "__main__":
    main()
