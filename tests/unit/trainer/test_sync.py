"""The synchronous trainer on a scripted engine and a learner that learns nothing."""

import io
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from jax_agent_rl import config
from jax_agent_rl.agents import AgentContext
from jax_agent_rl.data.cursor import DataCursor
from jax_agent_rl.learner.step import UpdateResult
from jax_agent_rl.observe.metrics import RunFolder, read_records
from jax_agent_rl.observe.progress import Progress
from jax_agent_rl.rollout.client import LLMServerClient
from jax_agent_rl.rollout.collect import RolloutCollector
from jax_agent_rl.rollout.server import AsyncServer
from jax_agent_rl.runtime.in_process import Runtime
from jax_agent_rl.trainer.record import RunRecord
from jax_agent_rl.trainer.sync import SyncTrainer
from jax_agent_rl.types import DropReason
from tests.fakes import FakeCodec, ScriptedBackend

ROW = {"prompt": [{"role": "user", "content": "go"}], "agent_name": "single_turn_agent"}


class SlowToUpdate(ScriptedBackend):
    """Version n takes n seconds to load."""

    update_seconds = 0.0

    async def update_weights(self, update):
        await super().update_weights(update)
        self.update_seconds += update.version

    async def metrics(self):
        return replace(await super().metrics(), weight_update_seconds=self.update_seconds)


class IdleLearner:
    params = None
    state = None
    programs_compiled = 1

    def update(self, groups, *, tick):
        return UpdateResult(metrics={}, skipped=False)


class NoCheckpoints:
    def save(self, step, state, record):
        pass

    def wait(self):
        pass


async def parity(trajectory):
    return replace(trajectory, reward=float(int(trajectory.trajectory_id[-1]) % 2))


def trainer(tmp_path: Path, *, steps: int, score=parity) -> SyncTrainer:
    settings = config.build(
        {
            "run_dir": str(tmp_path),
            "model": {"path": "none"},
            "data": {"train": "none"},
            "rollout": {"prompts_per_step": 1, "group_size": 2},
            "trainer": {"steps": steps, "checkpoint_every": 0},
        }
    )
    codec = FakeCodec()
    backend = SlowToUpdate(codec, ["hello there"])
    client = LLMServerClient([AsyncServer(backend)])
    context = AgentContext(client=client, codec=codec, limits=settings.agent, max_model_len=1000)
    collectors = [RolloutCollector(context, score=score, max_in_flight=4, seed=0) for _ in range(2)]
    runtime = Runtime(
        config=settings,
        codec=codec,
        backend=backend,
        client=client,
        collector=collectors[0],
        evaluator=collectors[1],
        learner=IdleLearner(),
        cursor=DataCursor([ROW], seed=0),
        heldout=[ROW],
    )
    progress = Progress(Console(file=io.StringIO()), total_steps=steps)
    return SyncTrainer(
        runtime=runtime,
        folder=RunFolder(tmp_path),
        checkpointer=NoCheckpoints(),
        record=RunRecord(),
        progress=progress,
    )


async def test_every_step_records_the_seconds_of_its_own_weight_update(tmp_path: Path):
    training = trainer(tmp_path, steps=3)
    await training.run()
    steps = [r for r in read_records(tmp_path / "metrics.jsonl") if r["kind"] == "step"]
    assert [r["weight_update_seconds"] for r in steps] == [1.0, 2.0, 3.0]
    training.runtime.collector.accounting.check()


async def test_trajectories_without_loss_are_counted_under_their_reason(tmp_path: Path):
    """Step 1 loses one of two trajectories of its group, step 2 both: then there is nothing to learn from."""

    async def score(trajectory):
        _, step, _, sample = trajectory.trajectory_id.split("-")
        lost = sample == "0" or step == "2"
        return replace(await parity(trajectory), no_loss=DropReason.VOID if lost else None)

    training = trainer(tmp_path, steps=2, score=score)
    await training.run()
    books = training.runtime.collector.accounting
    books.check()
    assert (books.started, books.trained, dict(books.dropped)) == (4, 1, {DropReason.VOID: 3})
    assert training.runtime.client.servers[0].backend.policy_version == 1, "the second step published nothing"
