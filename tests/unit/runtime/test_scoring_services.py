"""The config's reward section: what is registered, what is started, what is asked."""

import json
import os
from contextlib import nullcontext
from dataclasses import replace

import pytest

from jax_agent_rl import config, rewards
from jax_agent_rl.config import AlgorithmConfig
from jax_agent_rl.config.loading import valid_keys
from jax_agent_rl.errors import ConfigError, RewardError
from jax_agent_rl.observe.run_dir import restore_trajectory, trajectory_record
from jax_agent_rl.rewards import registry
from jax_agent_rl.rollout.client import LLMServerClient
from jax_agent_rl.rollout.server import AsyncServer
from jax_agent_rl.runtime.scoring import needed_services, open_scorer, reward_server
from tests.fakes import FakeCodec, ScriptedBackend
from tests.messages import raises
from tests.trajectories import trajectory
from tests.unit.chat.test_template_families import codec_of


@pytest.fixture(autouse=True)
def own_registry(monkeypatch):
    monkeypatch.setattr(registry, "REWARDS", dict(registry.REWARDS))


def settings(**reward):
    return config.build(
        {"run_dir": "r", "model": {"path": "m"}, "data": {"train": "t"}, "reward": reward},
    )


def scored_row(data_source, **fields):
    message = {"role": "assistant", "content": "```python\nprint(1)\n```"}
    row = {"data_source": data_source, **fields}
    return replace(
        trajectory([1], [2]), row=row, messages=({"role": "user", "content": "?"}, message)
    )


def engine(script):
    codec = FakeCodec()
    backend = ScriptedBackend(codec, script)
    return {"client": LLMServerClient([AsyncServer(backend)]), "codec": codec}, backend


async def test_the_policy_may_be_the_judge():
    conf = settings(judge={"model": "policy", "max_tokens": 20, "temperature": 0.5})
    assert needed_services(conf, [{"data_source": "model_judge"}]) == {"judge"}
    parts, backend = engine(["[[9]]"])
    async with open_scorer(conf, {"judge"}, **parts) as score:
        assert (await score(scored_row("model_judge"))).reward == 0.9
    sampling = backend.requests[0].sampling
    assert (sampling.max_tokens, sampling.temperature) == (20, 0.5)


def test_a_judge_is_started_if_asked_for_and_named_if_missing():
    assert (
        needed_services(settings(judge={"model": "policy"}), [{"data_source": "calculator"}])
        == set()
    )
    with raises(ConfigError, key="judge", fix="set reward.judge.model"):
        needed_services(settings(), [{"data_source": "model_judge"}])


@pytest.mark.parametrize(("count", "elsewhere"), [(1, True), (0, False)])
async def test_synchronous_reward_functions_run_in_the_configured_workers(
    tmp_path, count, elsewhere
):
    path = tmp_path / "mine.py"
    path.write_text(
        "import os\n"
        "from jax_agent_rl.rewards import register_reward\n"
        "@register_reward('mine')\n"
        "def mine(solution_str):\n"
        "    return os.getpid()\n"
    )
    conf = settings(path=str(path), workers=count)
    parts, _ = engine(["x"])
    async with reward_server(conf), open_scorer(conf, set(), **parts) as score:
        process = (await score(scored_row("mine"))).reward
    assert (process != os.getpid()) is elsewhere
    with pytest.raises(ProcessLookupError) if elsewhere else nullcontext():
        os.kill(int(process), 0)


@pytest.mark.parametrize("workers", [0, 1])
async def test_feedback_becomes_a_message_of_the_prompt_in_which_the_policy_teaches(
    tmp_path, workers: int
):
    path = tmp_path / "mine.py"
    path.write_text(
        "from jax_agent_rl.rewards import register_reward\n"
        "@register_reward('mine')\n"
        "def mine(solution_str):\n"
        "    return {'score': 0.0, 'feedback': 'The unit is missing.'}\n"
    )
    codec = codec_of("qwen2.5")
    prompt_ids = codec.encode_prompt([{"role": "user", "content": "How heavy?"}])
    row = {"data_source": "mine"}
    sampled = replace(
        trajectory(prompt_ids, [2]), row=row, messages=({"role": "assistant", "content": "3"},)
    )
    conf = settings(path=str(path), workers=workers)
    kl = {"where": "advantage", "estimator": "k1", "coef": 1.0, "reference": "feedback"}
    taught = conf.model_copy(update={"algorithm": AlgorithmConfig.model_validate({"kl": kl})})
    for run_config, is_taught in ((conf, False), (taught, True)):
        async with reward_server(conf), open_scorer(run_config, set(), codec=codec) as score:
            scored = await score(sampled)
        assert scored.feedback == "The unit is missing."
        text = codec.decode(scored.teacher_prompt_ids)
        assert ("The unit is missing." in text) is is_taught
        record = trajectory_record(scored, step=1, split="train")
        restored = restore_trajectory(json.loads(json.dumps(record)))
        assert restored.teacher_prompt_ids == scored.teacher_prompt_ids
        assert restored.feedback == scored.feedback


async def test_programs_are_scored_in_the_sandbox():
    row = {
        "data_source": "code",
        "reward_model": {"ground_truth": {"inputs": ["\n"], "outputs": ["1"]}},
    }
    conf = settings()
    assert needed_services(conf, [row]) == {"sandbox"}
    parts, _ = engine(["x"])
    async with open_scorer(conf, {"sandbox"}, **parts) as score:
        assert (await score(scored_row(**row))).reward == 1.0


async def test_the_reward_server_takes_the_data_sources_it_is_named_for():
    conf = settings(
        remote={
            "url": "http://127.0.0.1:9/score",
            "data_sources": ["gsm8k", "mine*"],
            "max_retries": 0,
        }
    )
    parts, _ = engine(["x"])
    async with reward_server(conf):
        rewards.require_rewards([{"data_source": "mine_too"}])
        async with open_scorer(conf, set(), **parts) as score:
            for data_source in ("gsm8k", "mine_too"):
                with raises(RewardError, key="http://127.0.0.1:9/score"):
                    await score(scored_row(data_source))


def test_keys_of_optional_sections_are_known_and_misspelt_ones_are_guessed():
    keys = valid_keys(config.Config)
    assert {"reward.judge", "reward.judge.model", "reward.remote.url", "environments.scope"} <= set(
        keys
    )
    with raises(ConfigError, fix="reward.judge.model"):
        settings(judge={"modle": "policy"})
