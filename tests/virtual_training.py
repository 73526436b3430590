"""Trainers in virtual time, on simulated engines, with an agent whose length is drawn anew wherever
it samples.
"""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import Callable
from contextlib import closing
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, cast

from rich.console import Console

from jax_agent_rl import config
from jax_agent_rl.agents import AgentContext, AgentLoop, derive_seed, register_agent
from jax_agent_rl.agents.turn_loop import Responder, run_turns
from jax_agent_rl.collect.collector import RolloutCollector
from jax_agent_rl.collect.groups import NO_LIMITS, TimeLimits
from jax_agent_rl.data.cursor import DataCursor
from jax_agent_rl.observe.progress import Progress
from jax_agent_rl.observe.run_dir import RunDir
from jax_agent_rl.rollout.client import LLMServerClient
from jax_agent_rl.rollout.fleet_metrics import FleetMetrics
from jax_agent_rl.rollout.server import AsyncServer
from jax_agent_rl.runtime.train import TRAINERS
from jax_agent_rl.testing.fakes import FakeLearner, NoCheckpoints
from jax_agent_rl.testing.simulate.engine import SimulatedEngine
from jax_agent_rl.testing.simulate.workload import (
    ID,
    EngineSpeed,
    LearnerAssumptions,
    SimulatedCodec,
    SimulatedTransport,
    VirtualLoop,
)
from jax_agent_rl.trainer.base import Trainer
from jax_agent_rl.trainer.components import RunComponents
from jax_agent_rl.trainer.record import RunRecord
from jax_agent_rl.types import FinishReason, Group

SPEED = EngineSpeed(slots=64, step_seconds=0.25, load_seconds=0.1)
TURN = 4
"""Ids of every turn, so sampled in a second."""


class Coin:
    """Decides after every turn whether the trajectory goes on, as an engine with the trajectory's
    seed would.

    The same turn of the same weights ends alike; of other weights, it is drawn anew.
    """

    def __init__(self, seed: int = 0, *, goes_on: float = 0.9) -> None:
        self._seed = seed
        self._goes_on = goes_on

    def __call__(self, turn: str) -> bool:
        return derive_seed(self._seed, turn) < self._goes_on * 2**31


class _Responder(Responder):
    goes_on: Callable[[str], bool]
    hangs: Callable[[str], bool]
    trajectory_id: str

    def turn_limit(self, turns: int) -> FinishReason | None:
        return None

    def generate_options(self, *, last: bool) -> dict[str, Any]:
        return {"max_tokens": TURN}

    async def respond(self, episode, output, limit):
        if self.hangs(self.trajectory_id):
            await asyncio.get_running_loop().create_future()
        if not self.goes_on(
            f"{self.trajectory_id}/{len(episode.turns)}/{output.policy_versions[-1]}"
        ):
            return FinishReason.ANSWER
        # Before the wait: ids decide whether a real trajectory goes on, so the coin is tossed once.
        went_on = episode.append_ids([ID], [{"role": "tool", "content": ""}])
        await asyncio.sleep(0.5)
        return None if went_on else FinishReason.RESPONSE_LENGTH

    async def replay_turn(self, prefix, turn) -> int:
        return 0


@dataclass(frozen=True)
class Behaviour:
    """How the trajectories of a training behave."""

    goes_on: Callable[[str], bool]
    hangs: Callable[[str], bool]


_BEHAVIOUR: ContextVar[Behaviour] = ContextVar("behaviour")
"""Of the training that the current task made, and so of all tasks of that training. Rows hold
nothing but data."""


@register_agent("virtual_for_test")
class VirtualAgent(AgentLoop):
    continues_prefix = True

    async def play(self, request):
        episode = self.start(request)
        behaviour = _BEHAVIOUR.get()
        responder = _Responder(self.context)
        responder.goes_on = behaviour.goes_on
        responder.hangs = behaviour.hangs
        responder.trajectory_id = request.trajectory_id
        return episode.finish(await run_turns(episode, responder))


class Steps(FakeLearner):
    """Takes a second for a step, and keeps its groups."""

    def __init__(self) -> None:
        self.steps: list[list[Group]] = []

    def learn(self, groups) -> dict[str, float]:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        loop.spend(1.0)
        self.steps.append(list(groups))
        return {}


class JsonNotes(NoCheckpoints):
    """Keeps the newest record as a checkpoint would: in JSON."""

    saved = ""

    def save(self, step, state, progress) -> None:
        self.saved = json.dumps(progress)


class _NoFolder(RunDir):
    def __init__(self) -> None:
        self.lines: list[dict] = []

    def add_metrics(self, record) -> None:
        self.lines.append(dict(record))

    def add_trajectories(self, step, split, trajectories, *, token_values=None, groups=()) -> None:
        """Ignore them."""

    def finish_step(self, step) -> None:
        """Do nothing: there are no files."""


async def _score(trajectory):
    """Give the members of a group different rewards, so that no group is useless."""
    return replace(trajectory, reward=float(trajectory.trajectory_id.rpartition("-")[2]))


def make_virtual(
    *,
    rows: int,
    steps: int,
    mode: str = "fully_async",
    goes_on: Callable[[str], bool],
    hangs: Callable[[str], bool] = lambda trajectory_id: False,
    limits: TimeLimits = NO_LIMITS,
    saved: str = "",
    engines: int = 1,
    trainer: dict[str, Any] | None = None,
    **rollout: Any,
) -> Trainer:
    """Return a trainer, resumed from ``saved`` if that is not empty; call it inside a
    :class:`VirtualLoop`.
    """
    settings = config.build(
        {
            "run_dir": "none",
            "model": {"path": "none"},
            "data": {"train": "none"},
            "rollout": {"prompts_per_step": 4, "group_size": 4, "max_model_len": 4000} | rollout,
            "agent": {"max_prompt_length": 8, "max_response_length": 3900},
            "learner": {"pack_length": 4000},
            "trainer": {"mode": mode, "steps": steps, "checkpoint_every": 1} | (trainer or {}),
        }
    )
    record = RunRecord.from_json(json.loads(saved)) if saved else RunRecord()
    backends = []
    for _ in range(engines):
        # A run that resumes publishes the weights of its step first.
        backends.append(SimulatedEngine(SPEED, max_model_len=4000, version=record.step))
    client = LLMServerClient(
        AsyncServer(backend, name=f"engine-{i}") for i, backend in enumerate(backends)
    )
    codec = cast(Any, SimulatedCodec(8))
    context = AgentContext(client=client, codec=codec, limits=settings.agent, max_model_len=4000)
    collector = RolloutCollector(
        context, score=_score, max_in_flight=settings.rollout.max_in_flight, seed=0, limits=limits
    )
    _BEHAVIOUR.set(Behaviour(goes_on, hangs))
    row = {"agent_name": "virtual_for_test"}
    data = [
        row | {"number": n, "prompt": [{"role": "user", "content": n + 1}]} for n in range(rows)
    ]
    cursor = DataCursor(data, seed=0)
    if record.cursor:
        cursor.restore(record.cursor)
        collector.accounting.restore(record.accounting)
    runtime = RunComponents(
        config=settings,
        codec=codec,
        metrics=FleetMetrics(lambda: backends).read,
        client=client,
        collector=collector,
        evaluator=RolloutCollector(context, score=_score, max_in_flight=1, seed=0),
        learner=Steps(),
        transport=SimulatedTransport(LearnerAssumptions(publish_seconds=0.1)),
        cursor=cursor,
        heldout=[],
    )
    return TRAINERS[settings.trainer.mode](
        runtime=runtime,
        folder=_NoFolder(),
        checkpointer=JsonNotes(),
        record=record,
        progress=Progress(Console(file=io.StringIO()), total_steps=steps),
        clock=asyncio.get_running_loop().time,
    )


def in_virtual_time(main: Callable[[], Any]) -> Any:
    """Run a coroutine function in a loop of its own; what it leaves running is dropped, as by kill
    -9.
    """
    with closing(VirtualLoop()) as loop:
        try:
            return loop.run_until_complete(main())
        finally:
            leftover_tasks = asyncio.all_tasks(loop)
            for task in leftover_tasks:
                task.cancel()
            if leftover_tasks:
                loop.run_until_complete(asyncio.wait(leftover_tasks))
