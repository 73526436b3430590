"""Which LoRA adapter a trajectory is sampled with, and where adapters are refused."""

import json
from dataclasses import replace

import pytest

from jax_agent_rl.agents import AgentContext, SingleTurnAgent
from jax_agent_rl.agents.recorder import ChatRecorder
from jax_agent_rl.config import AgentConfig, build
from jax_agent_rl.errors import ConfigError, DataError
from jax_agent_rl.rollout.client import LLMServerClient
from jax_agent_rl.rollout.server import AsyncServer
from jax_agent_rl.runtime.build import refuse_adapters
from jax_agent_rl.types import SamplingParams
from tests.agent_testbed import episode_request
from tests.dataset_rows import load_rows
from tests.fakes import FakeCodec, ScriptedBackend
from tests.messages import raises

ROW = {"data_source": "test", "prompt": [{"role": "user", "content": "hi"}]}
SAMPLING = SamplingParams(max_tokens=9)
CONFIG = {"run_dir": "r", "data": {"train": "x"}, "model": {"path": "m"}}


def scripted(**limits) -> tuple[AgentContext, ScriptedBackend]:
    codec = FakeCodec()
    backend = ScriptedBackend(codec, ["hello there"])
    backend.capabilities = replace(backend.capabilities, lora=True)
    client = LLMServerClient([AsyncServer(backend)])
    return AgentContext(
        client=client, codec=codec, limits=AgentConfig(**limits), max_model_len=1000
    ), backend


@pytest.mark.parametrize(
    ("limits", "row", "expected"),
    [
        ({}, {}, None),
        ({"adapter": "math"}, {}, "math"),
        ({"adapter": "math"}, {"adapter": "prose"}, "prose"),
    ],
)
async def test_a_row_or_the_configuration_names_the_adapter_of_every_request(limits, row, expected):
    context, backend = scripted(**limits)
    await SingleTurnAgent(context).play(episode_request({**ROW, **row}, SAMPLING))
    recorder = ChatRecorder(context, session_id="s", adapter=row.get("adapter"))
    await recorder.complete([5, 6], sampling=SAMPLING)
    assert [request.lora for request in backend.requests] == [expected, expected]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        (
            {"agent": {"adapter": "math"}},
            {"key": ("agent.adapter", "rollout.adapters"), "value": ("'math'", "[]")},
        ),
        (
            {
                "rollout": {
                    "adapters": {"a": "x"},
                    "backend": "remote",
                    "urls": ["http://127.0.0.1:1"],
                }
            },
            {
                "key": "rollout.adapters",
                "value": "{'a': 'x'}",
                "fix": "without rollout.backend=remote",
            },
        ),
        (
            {"rollout": {"adapters": {"a": "x"}, "deterministic": True}},
            {"key": ("rollout.adapters", "rollout.deterministic")},
        ),
    ],
)
def test_adapters_that_nothing_serves_are_refused(changes, named):
    with raises(ConfigError, **named):
        build(CONFIG | changes)


def test_a_row_with_an_unknown_adapter_is_refused(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps(ROW | {"adapter": "maths"}))
    assert load_rows(file, adapters=["maths"])[0]["adapter"] == "maths"
    with raises(DataError, key="line 1", value="'maths'", fix="'math'"):
        load_rows(file, adapters=["math"])


def test_training_refuses_what_another_policy_samples():
    refuse_adapters(build(CONFIG), [ROW])
    with raises(ConfigError, fix="without them"):
        refuse_adapters(build(CONFIG | {"rollout": {"adapters": {"math": "x"}}}), [ROW])
    with raises(ConfigError, key="rows with adapter", value="['math']"):
        refuse_adapters(build(CONFIG), [ROW, ROW | {"adapter": "math"}])
