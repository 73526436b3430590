"""On-policy distillation: what a teacher's scores make of advantages, losses and gradients.

Expected numbers are those of plain full passes without packing (``tests.tiny``), put together in
float64 numpy, and of torch's autograd in float64.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from jax_agent_rl.config import AlgorithmConfig, LearnerConfig
from jax_agent_rl.learner.learner import Learner
from jax_agent_rl.learner.losses.kl import top_k_kl
from jax_agent_rl.learner.teachers import Teacher
from jax_agent_rl.models.config import DecoderConfig
from jax_agent_rl.models.decoder import Decoder
from jax_agent_rl.types import Group, Trajectory
from tests.gradients import policy_gradient
from tests.simulated import run_on_devices
from tests.tiny import TINY, full_logits, tiny_params
from tests.trajectories import random_groups, trajectories_of, trajectory, with_supports

ADVANTAGE = {"where": "advantage", "estimator": "k1", "coef": 1.0}
V = TINY.vocab_size
WIDER = replace(TINY, vocab_size=V + 7, num_layers=2)
"""A teacher of another shape, whose embeddings have rows that the tokenizer does not use."""


def distilling(
    kl: dict,
    *,
    teachers: Sequence[tuple[DecoderConfig, int, str]] = ((TINY, 7, "*"),),
    student=TINY,
    **changes,
) -> Learner:
    """A learner with teachers, each of a shape, a seed of its weights and a data source."""
    algorithm = AlgorithmConfig(
        **{"adv_estimator": "none", "kl": kl} | changes.pop("algorithm", {})
    )
    config = LearnerConfig(**{"learning_rate": 1e-2, "pack_length": 64, "remat": "none"} | changes)
    made_teachers = [
        Teacher(
            model,
            tiny_params(seed, model),
            algorithm=algorithm,
            config=config,
            temperature=1.0,
            vocab_size=student.vocab_size,
            data_sources=(source,),
        )
        for model, seed, source in teachers
    ]
    params = tiny_params(config=student)
    return Learner(
        student, params, algorithm=algorithm, config=config, temperature=1.0, teachers=made_teachers
    )


def gradient(learner: Learner, groups: Sequence[Group]) -> list[np.ndarray]:
    grads, _ = policy_gradient(learner, groups)
    return [np.asarray(g) for g in jax.tree.leaves(grads)]


def distributions(of: Trajectory, seed: int, model: DecoderConfig = TINY) -> np.ndarray:
    """Log-probs float64 [S, V] of a model at every sampled token of a trajectory."""
    logits = full_logits(tiny_params(seed, model), of.prompt_ids + of.response_ids, model).astype(
        np.float64
    )
    at = len(of.prompt_ids) - 1 + np.flatnonzero(of.response_mask)
    return logits[at] - np.log(np.exp(logits[at]).sum(-1, keepdims=True))


def sampled_ids(of: Trajectory) -> np.ndarray:
    return np.asarray(of.response_ids)[np.flatnonzero(of.response_mask)]


def test_a_tokens_advantage_is_the_teachers_logprob_minus_the_policys():
    groups = random_groups(0)
    _, experience = distilling(ADVANTAGE | {"coef": 0.5}).prepare(groups)
    for advantage, t in zip(experience.advantages, trajectories_of(groups), strict=True):
        student = np.take_along_axis(distributions(t, 0), sampled_ids(t)[:, None], 1)[:, 0]
        teacher = np.take_along_axis(distributions(t, 7), sampled_ids(t)[:, None], 1)[:, 0]
        np.testing.assert_allclose(advantage, 0.5 * (teacher - student), atol=2e-4)


def test_the_task_reward_and_the_teacher_add_up():
    groups = random_groups(0)
    summed, teacher, reward = (
        distilling(kl, algorithm={"adv_estimator": name}).prepare(groups)[1].advantages
        for kl, name in ((ADVANTAGE, "grpo"), (ADVANTAGE, "none"), ({"where": "loss"}, "grpo"))
    )
    assert any(np.abs(x).max() > 0 for x in reward)
    for total, a, b in zip(summed, teacher, reward, strict=True):
        np.testing.assert_allclose(total, a + b, atol=1e-6)


def test_the_advantage_has_the_gradient_of_the_squared_log_ratio():
    """An update on fresh samples has this gradient.

    d/dx of (log pi - log pi_t)^2 / 2 is the difference times d log pi."""
    groups = random_groups(1)
    actual = gradient(distilling(ADVANTAGE), groups)
    expected = gradient(distilling({"where": "loss", "estimator": "k2", "coef": 1.0}), groups)
    for a, b in zip(actual, expected, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5 * np.abs(b).max())


@pytest.mark.parametrize("k", [1, 6, 20])
def test_values_and_gradients_over_candidates_are_those_of_torch_in_float64(k: int):
    rng = np.random.default_rng(k)
    student, teacher = rng.normal(size=(2, 5, 20)) * 2
    chosen = np.argsort(-teacher, axis=-1)[:, :k]

    def expected(logits: torch.Tensor) -> torch.Tensor:
        p = torch.softmax(logits, -1)
        q = torch.softmax(torch.tensor(teacher), -1)
        ids = torch.tensor(chosen)
        parts = [x.gather(1, ids) for x in (p, q)]
        if k < 20:  # all others are one id
            parts = [torch.cat([x, 1 - x.sum(-1, keepdim=True)], -1) for x in parts]
        return (parts[0] * (parts[0] / parts[1]).log()).sum(-1)

    def ours(logits: jax.Array) -> jax.Array:
        logs = jax.nn.log_softmax(logits)
        reference = jax.nn.log_softmax(jnp.float32(teacher))
        return top_k_kl(*(jnp.take_along_axis(x, chosen, axis=1) for x in (logs, reference)))

    logits = torch.tensor(student, requires_grad=True)
    values = expected(logits)
    values.sum().backward()
    np.testing.assert_allclose(ours(jnp.float32(student)), values.detach().numpy(), atol=1e-5)
    actual = jax.grad(lambda x: ours(x).sum())(jnp.float32(student))
    assert logits.grad is not None
    np.testing.assert_allclose(actual, logits.grad.numpy(), atol=2e-5)


def test_with_the_whole_vocabulary_the_loss_is_the_exact_kl():
    groups = random_groups(2)
    kl = {"where": "loss", "top_k": V, "coef": 0.5}
    divergences = []
    for t in trajectories_of(groups):
        student = distributions(t, 0)
        teacher = distributions(t, 7)
        divergences.append((np.exp(student) * (student - teacher)).sum(-1))
    per_token = np.concatenate(divergences)
    metrics = distilling(kl).update(groups).metrics
    assert metrics["kl_loss"] == pytest.approx(per_token.mean(), rel=1e-4)
    assert metrics["loss"] == pytest.approx(0.5 * per_token.mean(), rel=1e-4)


def test_its_gradient_is_that_of_full_passes():
    groups = random_groups(2)
    actual = gradient(distilling({"where": "loss", "top_k": V, "coef": 1.0}), groups)
    teacher = tiny_params(7)

    def loss(params: dict) -> jax.Array:
        total = jnp.float32(0)
        count = 0
        for t in trajectories_of(groups):
            ids = jnp.array([t.prompt_ids + t.response_ids])
            at = len(t.prompt_ids) - 1 + np.flatnonzero(t.response_mask)

            def logs(params: dict, ids: jax.Array = ids, at: np.ndarray = at) -> jax.Array:
                model = Decoder.from_params(TINY, params)
                return jax.nn.log_softmax(model.logits(model(ids)[0])[0][at])

            mine = logs(params)
            theirs = jax.lax.stop_gradient(logs(teacher))
            total = total + jnp.sum(jnp.exp(mine) * (mine - theirs))
            count = count + len(at)
        return total / count

    with jax.default_matmul_precision("highest"):
        expected = jax.tree.leaves(jax.jit(jax.grad(loss))(tiny_params()))
    for a, b in zip(actual, expected, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-4 * np.abs(b).max())


@pytest.mark.parametrize(
    "layout", [{"share_prefixes": True}, {"pack_length": 40, "micro_batch_size": 3}], ids=str
)
@pytest.mark.parametrize("restricted", [False, True])
def test_the_gradient_over_candidates_does_not_depend_on_the_layout(layout: dict, restricted: bool):
    groups = random_groups(0)
    groups = with_supports(groups) if restricted else groups
    kl = {"where": "loss", "top_k": 5, "coef": 1.0}
    expected = gradient(
        distilling(kl, share_prefixes=False, pack_length=32, micro_batch_size=1), groups
    )
    actual = gradient(distilling(kl, **layout), groups)
    for a, b in zip(actual, expected, strict=True):
        assert np.isfinite(b).all()
        np.testing.assert_allclose(a, b, atol=2e-5 * np.abs(b).max())


def test_each_trajectory_is_scored_by_the_first_teacher_of_its_data_source():
    groups = []
    for group, source in zip(random_groups(3), ("math/hard", "code"), strict=False):
        members = [replace(t, row={"data_source": source}) for t in group.trajectories]
        groups.append(replace(group, trajectories=tuple(members)))
    learner = distilling(ADVANTAGE, teachers=[(TINY, 7, "math*"), (WIDER, 8, "*")])
    _, experience = learner.prepare(groups)
    for advantage, t in zip(experience.advantages, trajectories_of(groups), strict=True):
        teacher = (
            distributions(t, 7)
            if t.row["data_source"] == "math/hard"
            else distributions(t, 8, WIDER)
        )
        difference = np.take_along_axis(
            teacher[:, :V] - distributions(t, 0), sampled_ids(t)[:, None], 1
        )[:, 0]
        np.testing.assert_allclose(advantage, difference, atol=2e-4)


def test_candidates_are_ids_of_the_policy_even_if_the_teacher_has_more():
    groups = random_groups(3)
    _, experience = distilling({"where": "loss", "top_k": V}, teachers=[(WIDER, 8, "*")]).prepare(
        groups
    )
    (update,) = experience.updates
    assert update.candidates is not None
    for ids, _ in update.candidates:
        np.testing.assert_array_equal(
            np.sort(ids, axis=-1), np.broadcast_to(np.arange(V), ids.shape)
        )


@pytest.mark.parametrize("kl", [ADVANTAGE, {"where": "loss", "top_k": 16, "coef": 1.0}], ids=str)
def test_a_student_learns_its_teachers_distribution(kl: dict):
    learner = distilling(kl, learning_rate=3e-3)
    rng = np.random.default_rng(0)
    contexts = jnp.arange(40)[:, None] + jnp.array([5, 9, 3])  # of three ids each

    def kl_now() -> float:
        """The exact KL to the teacher, over the whole vocabulary, after the contexts."""
        with jax.default_matmul_precision("highest"):
            logs = [
                jax.nn.log_softmax(
                    Decoder.from_params(TINY, p).logits(Decoder.from_params(TINY, p)(contexts)[0])
                )[:, -1]
                for p in (learner.params, tiny_params(7))
            ]
        return float(jnp.mean(jnp.sum(jnp.exp(logs[0]) * (logs[0] - logs[1]), axis=-1)))

    initial_kl = kl_now()
    for _ in range(30):
        model = Decoder.from_params(TINY, learner.params)
        probabilities = np.asarray(
            jax.nn.softmax(model.logits(model(contexts)[0])[:, -1]), np.float64
        )
        groups = []
        for row, (context, p) in enumerate(zip(contexts, probabilities, strict=True)):
            group_id = f"g{row}"
            members = [
                trajectory(context.tolist(), [int(id_)], group=group_id, index=i)
                for i, id_ in enumerate(rng.choice(V, 4, p=p / p.sum()))
            ]
            groups.append(Group(group_id=group_id, trajectories=tuple(members)))
        learner.update(groups)
    assert kl_now() < initial_kl * 0.7


ON_A_MESH = """
from dataclasses import replace
import numpy as np
from jax_agent_rl.config import MeshConfig
from tests.tiny import TINY
from tests.trajectories import random_groups
from tests.unit.learner.test_distillation import ADVANTAGE, distilling, gradient

student, groups = replace(TINY, vocab_size=96, num_layers=2), random_groups(0, vocabulary=96)
teachers = [(replace(student, num_layers=1, vocab_size=104), 7, "*")]
for kl in ({"where": "loss", "top_k": 5, "coef": 1.0}, ADVANTAGE):
    settings = {"student": student, "teachers": teachers, "pack_length": 48}
    expected = gradient(distilling(kl, **settings), groups)
    for axes in ({"fsdp": 2, "tensor": 2}, {"data": 2, "context": 2}):
        found = gradient(distilling(kl, **settings, mesh=MeshConfig(**axes)), groups)
        for a, b in zip(found, expected, strict=True):
            np.testing.assert_allclose(a, b, atol=3e-5 * np.abs(b).max())
        print("equal", flush=True)
"""


def test_the_gradient_does_not_depend_on_the_mesh():
    assert run_on_devices(ON_A_MESH, devices=4).count("equal") == 4
