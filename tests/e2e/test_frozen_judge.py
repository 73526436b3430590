"""``reward.judge.model`` names a folder: a model of its own is loaded, asked, and shut down again.

The small random model never ends a reply, so what it said is read from the error that says it was
cut off.
"""

from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
import pytest

from jax_agent_rl import config
from jax_agent_rl.chat.codec import ChatCodec
from jax_agent_rl.errors import RewardError
from jax_agent_rl.models.decoder import Decoder
from jax_agent_rl.models.hf import load_hf
from jax_agent_rl.rewards import register_reward
from jax_agent_rl.rollout.client import LLMServerClient
from jax_agent_rl.rollout.server import AsyncServer
from jax_agent_rl.runtime.scoring import open_scorer
from jax_agent_rl.testing.leaks import Footprint
from tests.fakes import FakeCodec, ScriptedBackend
from tests.trajectories import trajectory

QUESTION = [{"role": "user", "content": "Is 4 right?"}]
ERRORS: list[str] = []


@register_reward("frozen_judge_test")
async def compute_score(judge):
    with pytest.raises(RewardError) as cut:
        await judge.reply(QUESTION)
    ERRORS.append(str(cut.value))
    return 0.5


def greedy_reply(folder: Path, count: int) -> str:
    """Decode greedily by whole forward passes of the model, without an engine."""
    codec = ChatCodec.from_pretrained(str(folder), tool_format="hermes", tool_prompt="none")
    model = Decoder.from_params(*load_hf(str(folder)))
    ids = list(codec.encode_prompt(QUESTION))
    begin = len(ids)
    for _ in range(count):
        ids.append(int(jnp.argmax(model.logits(model(jnp.asarray([ids]))[0])[0, -1])))
    return codec.decode(ids[begin:])


async def test_a_frozen_judge_answers_with_its_own_weights_and_is_gone_afterwards(
    small_model: Path,
):
    judge = {"model": str(small_model), "max_tokens": 4, "max_model_len": 256, "max_in_flight": 2}
    tree = {
        "run_dir": "r",
        "model": {"path": "m"},
        "data": {"train": "t"},
        "reward": {"judge": judge},
    }
    codec = FakeCodec()
    policy = ScriptedBackend(codec, ["never asked"])
    scored = replace(trajectory([1], [2]), row={"data_source": "frozen_judge_test"})
    initial_footprint = Footprint.now()
    client = LLMServerClient([AsyncServer(policy)])
    async with open_scorer(config.build(tree), {"judge"}, client=client, codec=codec) as score:
        assert (await score(scored)).reward == 0.5
    (error,) = ERRORS
    assert repr(greedy_reply(small_model, 4))[1:-1] in error
    assert "reward.judge.max_tokens" in error
    assert policy.requests == []
    assert initial_footprint.added() == []
