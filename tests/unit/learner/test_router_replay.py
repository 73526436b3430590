"""The learner takes the engine's experts: ratios of 1 where rounding would choose others, and
router gradients.
"""

from __future__ import annotations

import asyncio
import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_agent_rl.config import AlgorithmConfig, LearnerConfig
from jax_agent_rl.jetstream.backend import JetStreamBackend
from jax_agent_rl.jetstream.engine import EngineShapes
from jax_agent_rl.learner.learner import Learner
from jax_agent_rl.learner.packing import pack
from jax_agent_rl.models.config import DecoderConfig, Params
from jax_agent_rl.models.moe import route
from jax_agent_rl.rollout.protocol import GenerateRequest
from jax_agent_rl.types import (
    FinishReason,
    Group,
    RoutedExperts,
    SamplingParams,
    TokenOutput,
    Trajectory,
    Turn,
)
from tests.gradients import policy_gradient
from tests.tiny import EXPERTS, GEMMA4_EXPERTS, QWEN3_5_MOE, tiny_params
from tests.trajectories import random_groups, trajectory, with_routed_experts

SHAPES = EngineShapes(
    max_model_len=64,
    max_concurrent_decodes=4,
    kv_cache_tokens=384,
    decode_steps=4,
    prefill_buckets=(4, 16),
)
SEED = 2  # in bfloat16 many of its tokens choose other experts than in float32


def weights(seed: int, model: DecoderConfig = EXPERTS) -> Params:
    """Weights that bfloat16 holds exactly: engine and learner differ in their arithmetic alone."""
    return jax.tree.map(
        lambda x: x.astype(jnp.bfloat16).astype(jnp.float32), tiny_params(seed, model)
    )


def make_learner(params: Params, model: DecoderConfig = EXPERTS, **changes) -> Learner:
    config = LearnerConfig(**{"pack_length": 64, "remat": "none"} | changes)
    return Learner(model, params, algorithm=AlgorithmConfig(), config=config, temperature=1.0)


@functools.cache
def sampled(
    dtype: str, model: DecoderConfig = EXPERTS
) -> tuple[tuple[list[int], TokenOutput], ...]:
    """Prompts and outputs of an engine."""

    async def run() -> tuple[tuple[list[int], TokenOutput], ...]:
        backend = JetStreamBackend(model, weights(SEED, model), SHAPES, dtype=dtype)
        await backend.start()
        rng = np.random.default_rng(SEED)
        prompts = [rng.integers(3, model.vocab_size, 9).tolist() for _ in range(4)]
        requests = (
            GenerateRequest(
                request_id=str(i),
                prompt_ids=tuple(prompt),
                sampling=SamplingParams(max_tokens=30, temperature=1.0, seed=i, ignore_eos=True),
            )
            for i, prompt in enumerate(prompts)
        )
        try:
            return tuple(
                zip(prompts, await asyncio.gather(*map(backend.generate, requests)), strict=True)
            )
        finally:
            await backend.close()

    return asyncio.run(run())


def group(
    dtype: str, model: DecoderConfig = EXPERTS, *, replay: bool, shifted_by: int = 0
) -> Group:
    """A group of the engine's outputs.

    Args:
        replay: with the experts that it reports.
        shifted_by: added to their numbers.
    """

    def experts_of(output: TokenOutput) -> RoutedExperts | None:
        if not replay or output.routed_experts is None:
            return None
        routed = output.routed_experts
        numbers = np.reshape(routed.numbers, routed.shape)
        return RoutedExperts.of(routed.start, (numbers + shifted_by) % 8)

    trajectories = (
        Trajectory.from_turns(
            prompt_ids=prompt,
            turns=[Turn(output=replace(output, routed_experts=experts_of(output)))],
            trajectory_id=f"g-{i}",
            group_id="g",
            agent_name="a",
            finish_reason=FinishReason.ANSWER,
            reward=float(i % 2),
        )
        for i, (prompt, output) in enumerate(sampled(dtype, model))
    )
    return Group(group_id="g", trajectories=tuple(trajectories))


def scored(group: Group, model: DecoderConfig = EXPERTS, **changes) -> np.ndarray:
    """The learner's log-probs of all sampled ids."""
    learner = make_learner(weights(SEED, model), model, **changes)
    (mini,) = learner.packer.mini_batches([group])
    return np.concatenate(learner.scorer.logprobs(learner.policy.weights, mini.batch))


def reported(group: Group) -> np.ndarray:
    """The engine's log-probs of all sampled ids."""
    return np.concatenate([trajectory.rollout_logprobs for trajectory in group.trajectories])


def gaps(group: Group, model: DecoderConfig = EXPERTS) -> np.ndarray:
    """Differences between the learner's log-probs and the engine's."""
    return np.abs(scored(group, model) - reported(group))


def test_in_bfloat16_the_ratio_is_1_to_rounding_only_with_replay():
    replayed = gaps(group("bfloat16", replay=True))
    free = gaps(group("bfloat16", replay=False))
    assert replayed.max() < 0.2 and replayed.mean() < 0.03  # nats: what bfloat16 rounds
    assert free.max() > 2 and (free > 0.2).sum() > 5  # other experts


assert EXPERTS.experts is not None
CORRECTED = replace(
    EXPERTS,
    num_layers=3,
    experts=replace(
        EXPERTS.experts,
        first_dense_layers=1,
        scoring="sigmoid",
        correction=True,
        groups=4,
        groups_per_token=2,
        scale=2.0,
        shared_size=16,
    ),
)


def test_corrected_choices_in_groups_are_replayed_beside_a_shared_expert():
    replayed = gaps(group("bfloat16", CORRECTED, replay=True), CORRECTED)
    assert replayed.max() < 0.3 and replayed.mean() < 0.03
    others = gaps(group("bfloat16", CORRECTED, replay=True, shifted_by=1), CORRECTED)
    assert others.max() > 2 and others.mean() > 0.3


def test_choices_of_experts_beside_dense_networks_are_replayed():
    replayed = gaps(group("float32", GEMMA4_EXPERTS, replay=True), GEMMA4_EXPERTS)
    assert replayed.max() < 1e-4
    others = gaps(group("float32", GEMMA4_EXPERTS, replay=True, shifted_by=1), GEMMA4_EXPERTS)
    assert others.max() > 0.1


def test_in_float32_both_choose_alike_and_replay_changes_nothing():
    replayed = gaps(group("float32", replay=True))
    free = gaps(group("float32", replay=False))
    assert replayed.max() < 1e-4
    assert np.abs(replayed - free).max() < 1e-5


def test_in_bfloat16_what_delta_nets_round_is_alike_on_both_sides():
    """A learner in float32 does not round as the engine does. That gap is larger, and no fault."""
    sampled_group = group("bfloat16", QWEN3_5_MOE, replay=True)
    exact = scored(sampled_group, QWEN3_5_MOE)
    learner = scored(sampled_group, QWEN3_5_MOE, compute_dtype="bfloat16")
    engine = reported(sampled_group)
    engine_error = np.abs(engine - exact).mean()
    learner_error = np.abs(learner - exact).mean()
    assert 2 / 3 < engine_error / learner_error < 3 / 2
    assert np.abs(engine - learner).mean() < 0.5 * engine_error
    assert np.abs(engine - learner).max() < 0.2


def test_the_first_update_reports_a_ratio_of_1():
    metrics = make_learner(weights(SEED)).update([group("bfloat16", replay=True)]).metrics
    free = make_learner(weights(SEED)).update([group("bfloat16", replay=False)]).metrics
    assert metrics["logprob_gap_max"] < 0.2 < 2 < free["logprob_gap_max"]
    fed = 4 * (9 + 30 - 1)  # of each trajectory all but the last id
    assert metrics["router_replay_share"] == pytest.approx(fed / (fed + 4))
    assert free["router_replay_share"] == 0


def test_given_experts_are_weighted_by_the_own_scores_in_float64_numpy():
    rng = np.random.default_rng(0)
    x = rng.standard_normal((5, 32))
    router = rng.standard_normal((8, 32))
    experts = rng.random((5, 8)).argsort(axis=1)[:, :2].astype(np.int16)
    experts[3] = -1
    assert EXPERTS.experts is not None
    got, chosen = route(
        EXPERTS.experts, {"router": jnp.asarray(router)}, jnp.asarray(x), jnp.asarray(experts)
    )
    scores = x @ router.T
    wanted = np.where(experts < 0, np.argsort(-scores, axis=1)[:, :2], experts)
    np.testing.assert_array_equal(chosen, wanted)
    gates = np.exp(np.take_along_axis(scores, wanted, axis=1))
    np.testing.assert_allclose(got, gates / gates.sum(axis=1, keepdims=True), rtol=1e-5)


def gradient(groups: list[Group], **changes) -> dict[str, np.ndarray]:
    learner = make_learner(tiny_params(config=EXPERTS), **changes)
    gradients, _ = policy_gradient(learner, groups)
    return {
        jax.tree_util.keystr(path): np.asarray(g)
        for path, g in jax.tree_util.tree_leaves_with_path(gradients)
    }


GROUPS = with_routed_experts(random_groups(0), layers=2, experts=8, per_token=2)


@pytest.mark.parametrize(
    "layout",
    [
        {"pack_length": 300, "share_prefixes": False},
        {"pack_length": 64, "micro_batch_size": 2, "router_aux_loss_coef": 1.0},
        {"pack_length": 40, "micro_batch_size": 3, "remat": "full"},
    ],
    ids=str,
)
def test_the_gradient_does_not_depend_on_the_layout(layout: dict):
    coef = layout.get("router_aux_loss_coef", 0.0)
    # Sequences that share a prefix share its choices, so that all of a group need the same ones.
    alike = [one_prefix(group) for group in GROUPS]
    expected = gradient(alike, pack_length=32, share_prefixes=False, router_aux_loss_coef=coef)
    got = gradient(alike, **layout)
    for name, wanted in expected.items():
        np.testing.assert_allclose(
            got[name], wanted, atol=3e-5 * np.abs(wanted).max(), err_msg=name
        )


def one_prefix(group: Group) -> Group:
    """The group with the same experts at the same ids."""
    drawn = np.random.default_rng(1).random((97, 2, 8)).argsort(axis=-1)[..., :2].astype(np.uint8)

    def by_id(trajectory: Trajectory) -> Trajectory:
        context = [*trajectory.prompt_ids, *trajectory.response_ids]
        at = len(trajectory.prompt_ids)
        turns = []
        for turn in trajectory.turns:
            start = at - 1 if turns else 0
            at = at + len(turn.output.token_ids)
            chosen = RoutedExperts.of(start, drawn[context[start : at - 1]])
            turns.append(replace(turn, output=replace(turn.output, routed_experts=chosen)))
            at += len(turn.appended_ids)
        return replace(trajectory, turns=tuple(turns))

    return replace(group, trajectories=tuple(map(by_id, group.trajectories)))


def test_the_router_learns_from_the_experts_it_was_given():
    replayed = gradient(GROUPS)["['layers']['router']"]
    free = gradient(random_groups(0))["['layers']['router']"]
    assert np.abs(replayed).max() > 1e-4
    assert np.abs(replayed - free).max() > 1e-4


def test_a_shared_node_takes_the_choice_of_the_first_sequence_that_knows_one():
    first = trajectory([5, 6, 7], [8, 9])
    second = trajectory([5, 6, 7], [8, 10], index=1)

    def with_experts(trajectory: Trajectory, start: int, chosen: list[int]) -> Trajectory:
        array = np.array(chosen, np.uint8).reshape(-1, 1, 1)
        (turn,) = trajectory.turns
        output = replace(turn.output, routed_experts=RoutedExperts.of(start, array))
        return replace(trajectory, turns=(replace(turn, output=output),))

    batch = pack(
        [with_experts(first, 1, [1, 2]), with_experts(second, 0, [3, 4, 5, 6])], pack_length=8
    )
    assert batch.token_ids[0].tolist()[:6] == [5, 6, 7, 8, 9, 10]
    assert batch.routed_experts is not None
    assert batch.routed_experts[0, :, 0, 0].tolist() == [3, 1, 2, 6, -1, -1, -1, -1]


def test_batches_without_them_have_no_such_array():
    batch = pack([trajectory([5, 6], [8, 9])], pack_length=8)
    assert batch.routed_experts is None
    assert "routed_experts" not in next(batch.micro_batches(2))
