"""The gradient of sessions of mini-swe-agent equals the one of their single calls.

The expected gradient is transformers' in float64: one full pass for each call.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest

torch = pytest.importorskip("torch")

from jax_agent_rl.config import AlgorithmConfig, LearnerConfig  # noqa: E402
from jax_agent_rl.learner.learner import Learner  # noqa: E402
from jax_agent_rl.models.hf import save_hf  # noqa: E402
from jax_agent_rl.types import Group  # noqa: E402
from tests.capabilities import needs_bwrap  # noqa: E402
from tests.gradients import policy_gradient  # noqa: E402
from tests.harnesses.running import (  # noqa: E402
    INSTALLED,
    MINI_SWE_AGENT_REPLIES,
    TASK_MARK,
    WITH_PYTHON,
    codec,
    run,
)
from tests.tiny import TINY, tiny_params  # noqa: E402
from tests.unit.learner.test_session_gradient import by_hand, gradient_of  # noqa: E402

pytestmark = [pytest.mark.harnesses, pytest.mark.timeout(900), needs_bwrap, INSTALLED, WITH_PYTHON]


async def test_two_sessions_have_the_gradient_of_their_single_calls(tmp_path: Path):
    """One mends the file, the other gives up: rewards 1 and 0 of the task's own tests."""
    from transformers import AutoModelForCausalLM

    trajectories = []
    calls = []
    for number, replies in enumerate((MINI_SWE_AGENT_REPLIES[-1:], MINI_SWE_AGENT_REPLIES)):
        session = await run("sh /tmp/agent/mini_swe_agent.sh", {TASK_MARK: replies})
        session.assert_all_on_record()
        trajectories.append(
            replace(
                session.trajectory, trajectory_id=f"t-{number}", reward=session.output["reward"]
            )
        )
        calls.append(session.calls)
    assert [trajectory.reward for trajectory in trajectories] == [0.0, 1.0]

    eos = codec().eos_token_ids
    config = replace(TINY, vocab_size=codec().vocab_size, eos_token_ids=eos)
    params = tiny_params(5, config)
    save_hf(tmp_path, config, params)
    peer = AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float64, attn_implementation="eager"
    )
    sums = [by_hand(peer, of_session) for of_session in calls]
    lengths = []
    for of_session in calls:
        lengths.append(sum(len(sampled) for _, sampled in of_session))

    learner = Learner(
        config,
        params,
        algorithm=AlgorithmConfig(adv_estimator="rloo", loss_agg_mode="seq-mean-token-mean"),
        config=LearnerConfig(pack_length=4096, remat="none"),
        temperature=1.0,
    )
    group = Group(group_id="g", trajectories=tuple(trajectories))
    gradients, _ = policy_gradient(learner, [group])
    for name, got in gradient_of(jax.device_get(gradients)).items():
        # of two sessions with rewards 0 and 1: advantages -1 and 1, however many calls they made
        expected = sums[0][name] / (2 * lengths[0]) - sums[1][name] / (2 * lengths[1])
        np.testing.assert_allclose(got, expected, atol=2e-5 * np.abs(expected).max(), err_msg=name)
