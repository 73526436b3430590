"""Slots and the journal: nothing is doubled or forgotten when a collection is stopped, fails, and
goes on.
"""

import asyncio
import json
from contextlib import asynccontextmanager
from dataclasses import replace
from types import SimpleNamespace

import pytest

from jax_agent_rl.agents import AgentContext
from jax_agent_rl.collect.collector import RolloutCollector
from jax_agent_rl.config import AgentConfig, build
from jax_agent_rl.errors import ConfigError, EngineDiedError, NothingToTrainError, RewardError
from jax_agent_rl.evaluate.collection import CollectionRequest, CollectionRun, collection_settings
from jax_agent_rl.evaluate.journal import Journal, require_same
from jax_agent_rl.rollout.client import LLMServerClient
from jax_agent_rl.rollout.server import AsyncServer
from jax_agent_rl.runtime.policy import ServedPolicy
from jax_agent_rl.runtime.rollouts import Rollouts
from jax_agent_rl.types import SamplingParams
from tests.fakes import FakeCodec, ScriptedBackend
from tests.messages import raises

ROWS = [{"prompt": [{"role": "user", "content": f"row {i}"}], "data_source": "x"} for i in range(6)]


class Stage:
    """Rollouts over a scripted engine, and their journal."""

    def __init__(self, tmp_path, *, score=None):
        self.codec = FakeCodec()
        for row in ROWS:  # ids are given out as words are first seen
            self.codec.encode_prompt(row["prompt"])
        self.backend = ScriptedBackend(self.codec, ["hello there"])
        client = LLMServerClient([AsyncServer(self.backend)])
        context = AgentContext(
            client=client, codec=self.codec, limits=AgentConfig(), max_model_len=1000
        )
        self.collector = RolloutCollector(
            context, score=score or self.one_point, max_in_flight=4, seed=0
        )
        tree = {"run_dir": "r", "model": {"path": "m"}, "data": {"train": "t"}}
        config = build(
            tree,
            [
                "rollout.max_in_flight=4",
                "rollout.prompts_per_step=2",
                "trainer.max_failed_batches=1",
            ],
        )
        agents = SimpleNamespace(collector=self.collector)
        self.rollouts = Rollouts(
            config=config, client=client, agents=agents, codec=self.codec, rows=ROWS
        )
        self.file = tmp_path / "journal"

    @staticmethod
    async def one_point(trajectory):
        return replace(trajectory, reward=1.0)

    @asynccontextmanager
    async def open(self):
        with Journal(self.file, {"seed": 0}) as journal:
            yield (
                journal,
                CollectionRun(
                    rollouts=self.rollouts,
                    journal=journal,
                    group_size=2,
                    sampling=SamplingParams(max_tokens=20),
                    step=0,
                ),
            )


def balanced(stage: Stage, journal: Journal) -> bool:
    accounting = stage.collector.accounting
    return (
        not accounting.in_flight
        and accounting.started == accounting.trained + accounting.dropped.total()
    )


async def test_every_row_is_collected_once(tmp_path):
    stage = Stage(tmp_path)
    async with stage.open() as (journal, collection):
        await collection.run()
        assert sorted(journal.sizes) == list(range(6))
        assert journal.num_trajectories == journal.started == 12
        assert balanced(stage, journal)


async def test_interrupted_it_counts_what_ran_and_the_next_call_does_the_rest_alike(tmp_path):
    uninterrupted = Stage(tmp_path / "whole")
    async with uninterrupted.open() as (journal, collection):
        await collection.run()
        expected = list(journal.lines(range(6)))

    two_done = asyncio.Event()

    async def score(trajectory):
        if len(first.journal.sizes) >= 2:
            two_done.set()
            await asyncio.Event().wait()  # the rest never ends
        return replace(trajectory, reward=1.0)

    first = Stage(tmp_path / "parts", score=score)
    async with first.open() as (journal, collection):
        first.journal = journal
        running = asyncio.create_task(collection.run())
        await two_done.wait()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        collected_rows = sorted(journal.sizes)
        assert len(collected_rows) >= 2
        assert journal.dropped["cancelled"] > 0
        assert balanced(first, journal)
        assert journal.started == first.collector.accounting.started
    second = Stage(tmp_path / "parts")
    async with second.open() as (journal, collection):
        assert sorted(journal.sizes) == collected_rows
        await collection.run()
        assert journal.num_trajectories == 12
        assert second.collector.accounting.started == 2 * (6 - len(collected_rows))
        assert [_ids(line) for line in journal.lines(range(6))] == [_ids(line) for line in expected]


async def test_a_dead_engine_ends_it_and_its_prompts_are_not_done(tmp_path):
    stage = Stage(tmp_path)
    stage.backend.die()
    async with stage.open() as (journal, collection):
        with raises(EngineDiedError, value="no rollout engine"):
            await collection.run()
        assert not journal.sizes
        assert balanced(stage, journal)
        assert journal.started == stage.collector.accounting.started > 0


async def test_a_reward_that_always_fails_ends_it(tmp_path):
    async def fails(trajectory):
        raise RewardError("no such field")

    stage = Stage(tmp_path, score=fails)
    async with stage.open() as (journal, collection):
        with pytest.raises(NothingToTrainError, match="no such field"):
            await collection.run()
        assert not journal.sizes
        assert journal.dropped["reward_error"] >= 4


def _ids(records):
    return [(r["trajectory_id"], r["prompt_ids"], r["response_ids"]) for r in records]


@pytest.mark.parametrize(
    ("override", "continues"),
    [
        ("agent.tool_timeout=77", True),
        ("rollout.jetstream.max_concurrent_decodes=3", True),
        ("trainer.steps=9", True),
        ("rollout.jetstream.quantize=int8", False),
        ("rollout.jetstream.kv_dtype=int8", False),
        ("rollout.max_model_len=999", False),
        ("agent.max_assistant_turns=3", False),
        ("seed=5", False),
    ],
)
def test_a_collection_goes_on_with_what_defines_its_trajectories(
    tmp_path, override: str, continues: bool
):
    """It goes on as a resumed run does: one list says which keys may change."""
    (tmp_path / "rows.jsonl").write_text(json.dumps(ROWS[0]) + "\n")
    tree = {"run_dir": "r", "model": {"path": "m"}, "data": {"train": str(tmp_path / "rows.jsonl")}}

    def settings(*overrides: str) -> dict:
        config = build(tree, list(overrides))
        subject = ServedPolicy(config=config, recorded=config, name="p", step=1, checkpoint="c")
        request = CollectionRequest()
        sources = request.sources(config)
        return collection_settings(subject, request, sources, 2, SamplingParams(max_tokens=20))

    recorded_settings = json.loads(json.dumps(settings()))
    if continues:
        require_same(settings(override), recorded_settings, tmp_path)
    else:
        with raises(ConfigError, key=override.partition("=")[0]):
            require_same(settings(override), recorded_settings, tmp_path)
