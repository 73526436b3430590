"""Parquet files made for verl are read as they are."""

import json
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jax_agent_rl.environments import require_environment
from jax_agent_rl.rewards import require_rewards
from jax_agent_rl.tools import ToolRegistry, ToolSession
from tests.dataset_rows import load_rows
from tests.fakes import FakeCodec

ROOT = Path(__file__).parents[3]


def verl_row(index: int, truth: str) -> dict:
    """What verl's gsm8k_multiturn_w_tool preprocessing writes."""
    return {
        "data_source": "openai/gsm8k",
        "agent_name": "tool_agent",
        "prompt": [
            {"role": "system", "content": "You are a math expert."},
            {"role": "user", "content": f"Q{index}?"},
        ],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": truth},
        "extra_info": {
            "split": "train",
            "index": index,
            "answer": f"... #### {truth}",
            "question": f"Q{index}?",
            "need_tools_kwargs": True,
            "tools_kwargs": {"calc_gsm8k_reward": {"create_kwargs": {"ground_truth": truth}}},
            "interaction_kwargs": {"query": f"Q{index}?", "ground_truth": truth},
        },
    }


@pytest.fixture
def parquet(tmp_path):
    file = tmp_path / "train.parquet"
    pq.write_table(pa.Table.from_pylist([verl_row(0, "72"), verl_row(1, "5")]), file)
    return file


def test_every_field_comes_back(parquet):
    rows = load_rows(parquet, agents=["tool_agent"], tools=["calc_gsm8k_reward"])
    assert rows == [verl_row(0, "72"), verl_row(1, "5")]
    require_rewards(rows)


async def test_the_examples_tool_takes_the_rows_arguments(parquet):
    registry = ToolRegistry.from_path(str(ROOT / "examples/gsm8k_tool/tools.py"))
    assert sorted(registry) == ["calc_gsm8k_reward", "calculator"]
    kwargs = load_rows(parquet)[0]["extra_info"]["tools_kwargs"]
    async with ToolSession(
        registry.select(),
        "t",
        kwargs=kwargs,
        timeout=5.0,
        shorten=lambda text: FakeCodec().truncate(text, 50, "right"),
    ) as session:
        answers = [
            await session.call("calc_gsm8k_reward", {"answer": text})
            for text in ("71", "it is 72", "72")
        ]
    assert [(a.observation, a.reward, a.error) for a in answers] == [
        ("wrong", -0.05, None),
        ("right", 0.0, None),
        ("right", -0.05, None),
    ]


def test_nulls_that_parquet_adds_to_differing_rows_are_accepted(tmp_path):
    plain = {**verl_row(1, "5"), "agent_name": None, "extra_info": {"index": 1}}
    game = {
        "data_source": "environment",
        "agent_name": "environment_agent",
        "prompt": [],
        "reward_model": None,
        "extra_info": {"environment_kwargs": {"name": "textworld", "game": "x.z8"}},
    }
    question = {
        **game,
        "extra_info": {"environment_kwargs": {"name": "reasoning_gym", "dataset": "a", "index": 1}},
    }
    file = tmp_path / "mixed.parquet"
    pq.write_table(pa.Table.from_pylist([verl_row(0, "72"), plain, game, question]), file)
    rows = load_rows(file, agents=["tool_agent", "environment_agent"], tools=["calc_gsm8k_reward"])
    del plain["agent_name"], game["reward_model"], question["reward_model"]
    assert rows == [verl_row(0, "72"), plain, game, question]
    require_rewards(rows)
    for row in rows[2:]:
        require_environment(row)


@pytest.mark.parametrize("as_parquet", [True, False])
def test_gsm8k_as_published_becomes_rows(tmp_path, as_parquet):
    problems = [
        {"question": f"Q{i}?", "answer": f"<<1+{i}={1 + i}>>{1 + i}\n#### 1,00{i}"}
        for i in range(3)
    ]
    source = tmp_path / ("gsm8k.parquet" if as_parquet else "gsm8k.jsonl")
    if as_parquet:
        pq.write_table(pa.Table.from_pylist(problems), source)
    else:
        source.write_text("".join(json.dumps(problem) + "\n" for problem in problems))
    command = [
        sys.executable,
        "examples/gsm8k_tool/prepare.py",
        "--source",
        source,
        "--out",
        tmp_path,
        "--heldout",
        "1",
    ]
    subprocess.run(
        command,
        cwd=ROOT,
        check=True,
        capture_output=True,
        env={"PYTHONPATH": str(ROOT), "PATH": "/bin"},
    )
    train, heldout = (load_rows(tmp_path / f"{name}.jsonl") for name in ("train", "heldout"))
    assert [row["reward_model"]["ground_truth"] for row in train + heldout] == [
        "1000",
        "1001",
        "1002",
    ]
    assert train[0]["extra_info"]["tools_kwargs"] == {
        "calc_gsm8k_reward": {"create_kwargs": {"ground_truth": "1000"}}
    }
    require_rewards(train)
