"""The learner scores restricted draws over the very ids that the engine drew them from."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Sequence
from dataclasses import replace

import jax
import numpy as np
import pytest

from jax_agent_rl.chat.grammar import GrammarCompiler
from jax_agent_rl.config import AlgorithmConfig, LearnerConfig
from jax_agent_rl.jetstream.backend import JetStreamBackend
from jax_agent_rl.learner.comparison import AgreementCheck, Comparison
from jax_agent_rl.learner.learner import Learner
from jax_agent_rl.rollout.protocol import GenerateRequest
from jax_agent_rl.types import FinishReason, Group, SamplingParams, TokenOutput, Trajectory, Turn
from jax_agent_rl.types.supports import decode_supports
from tests.messages import raises
from tests.tiny import FOUR_SLOTS, full_logits, tiny_params
from tests.tiny_chat import CONFIG, tokenizer

TEMPERATURE = 1.3
PROMPT = (5, 6, 7, 8)
PARAMS = tiny_params(config=CONFIG)
RESTRICTED = {
    "top_p": {"top_p": 0.7},
    "top_k": {"top_k": 5},
    "min_p": {"min_p": 0.1},
    "all": {"top_p": 0.9, "top_k": 20, "min_p": 0.02},
    "grammar": {"grammar": r"start: /[a-z ]{3,12}/"},
    "grammar and top_k": {"grammar": r"start: /[a-z ]{3,12}/", "top_k": 3},
}


async def sampled(*, count: int = 4, **sampling) -> list[TokenOutput]:
    grammars = GrammarCompiler(
        tokenizer(), eos_ids=CONFIG.eos_token_ids, vocab_size=CONFIG.vocab_size
    )
    backend = JetStreamBackend(CONFIG, PARAMS, FOUR_SLOTS, version=1, grammars=grammars)
    await backend.start()
    try:
        return await asyncio.gather(
            *(
                backend.generate(
                    GenerateRequest(
                        request_id=str(seed),
                        prompt_ids=PROMPT,
                        sampling=SamplingParams(
                            max_tokens=20, temperature=TEMPERATURE, seed=seed, **sampling
                        ),
                    )
                )
                for seed in range(count)
            )
        )
    finally:
        await backend.close()


def group(outputs: Sequence[TokenOutput]) -> Group:
    members = (
        Trajectory.from_turns(
            prompt_ids=PROMPT,
            turns=[Turn(output=output, appended_ids=(9, 10))],
            trajectory_id=f"t{number}",
            group_id="g",
            agent_name="tool_agent",
            finish_reason=FinishReason.ANSWER,
            reward=float(number % 2),
        )
        for number, output in enumerate(outputs)
    )
    return Group(group_id="g", trajectories=tuple(members))


def learner(**changes) -> Learner:
    config = LearnerConfig(
        **{"learning_rate": 1e-2, "pack_length": 160, "remat": "none", "ppo_epochs": 2} | changes
    )
    return Learner(
        CONFIG, PARAMS, algorithm=AlgorithmConfig(), config=config, temperature=TEMPERATURE
    )


def old_logprobs(outputs: Sequence[TokenOutput], **changes) -> list[np.ndarray]:
    return learner(**changes).logprobs([group(outputs)])


@pytest.mark.parametrize("which", RESTRICTED)
async def test_old_logprobs_are_the_rollouts_whatever_restricted_the_draws(which: str):
    outputs = await sampled(**RESTRICTED[which])
    assert all(
        len(output.supports) == len(output.token_ids) and not output.constrained
        for output in outputs
    )
    for output, old in zip(outputs, old_logprobs(outputs), strict=True):
        np.testing.assert_allclose(old, output.log_probs, atol=2e-5)
    without = [replace(output, supports=()) for output in outputs]
    gaps = [
        abs(old - o.log_probs).max() for old, o in zip(old_logprobs(without), outputs, strict=True)
    ]
    assert min(gaps) > 0.05


@pytest.mark.parametrize("which", ["top_k", "grammar"])
async def test_logprobs_are_those_of_float64_numpy_over_the_reported_support(which: str):
    for output in await sampled(**RESTRICTED[which]):
        allowed = np.unpackbits(
            decode_supports(output.supports, CONFIG.vocab_size).view(np.uint8),
            axis=1,
            bitorder="little",
        )[:, : CONFIG.vocab_size].astype(bool)
        logits = full_logits(PARAMS, [*PROMPT, *output.token_ids], CONFIG)[
            len(PROMPT) - 1 : -1
        ].astype(np.float64)
        scaled = np.where(allowed, logits / TEMPERATURE, -np.inf)
        logs = scaled - np.log(np.exp(scaled).sum(-1, keepdims=True))
        at = np.arange(len(output.token_ids))
        np.testing.assert_allclose(output.log_probs, logs[at, list(output.token_ids)], atol=2e-5)
        if which == "top_k":
            assert (allowed.sum(axis=1) == 5).all()


async def test_the_first_update_has_ratio_one_and_no_gap_and_learns():
    outputs = await sampled(top_p=0.7)
    tested = learner(ppo_epochs=1)
    initial_params = jax.tree.map(np.asarray, tested.params)
    comparisons: list[Comparison] = []
    metrics = tested.update(
        [group(outputs)], check=AgreementCheck(since=1, inspect=comparisons.append)
    ).metrics
    assert abs(metrics["ratio_mean"] - 1) < 1e-5
    assert comparisons[0].tokens == sum(len(output.token_ids) for output in outputs)
    assert comparisons[0].largest < 2e-5
    changed = jax.tree.map(
        lambda a, b: not np.array_equal(a, b),
        initial_params,
        jax.tree.map(np.asarray, tested.params),
    )
    assert any(jax.tree.leaves(changed))


async def test_a_support_of_a_single_id_has_no_gradient():
    outputs = await sampled(top_k=1)
    assert all(value == 0 for output in outputs for value in output.log_probs)
    tested = learner(ppo_epochs=1)
    assert tested.update([group(outputs)]).metrics["grad_norm"] < 1e-6


async def test_draws_of_one_token_from_different_supports_are_scored_apart():
    (output,) = await sampled(count=1, top_k=5)
    free = replace(output, supports=())
    together = old_logprobs([output, free])
    apart = [old_logprobs([o])[0] for o in (output, free)]
    np.testing.assert_allclose(together, apart, atol=1e-6)
    assert (together[0] > together[1]).all()


async def test_a_support_of_another_vocabulary_is_refused():
    (output,) = await sampled(count=1, top_k=5)
    wrong = "i" + base64.b64encode(np.uint32(CONFIG.vocab_size + 32).tobytes()).decode()
    with raises(ValueError, key="support", value=CONFIG.vocab_size):
        old_logprobs([replace(output, supports=(wrong, *output.supports[1:]))])
