"""Recipes that are named after a paper have its constants, and compute its loss.

CONSTANTS come from the papers and, where a paper leaves one open, from its authors' code: DAPO
section 4.1 and the script that verl's ``docs/algo/dapo.md`` names (dual clip 10); CISPO section
3.1, its largest weight from TRL's ``GRPOConfig.epsilon_high`` (5); GSPO section 5.1; Dr. GRPO,
``sail-sg/understand-r1-zero``; REINFORCE++, its table of hyperparameters and OpenRLHF's defaults;
ReMax, ``liziniu/ReMax`` (``--kl_ctl 0.05``, no ratio); GiGPO, verl-agent's ``run_webshop.sh``;
MT-GRPO, ``mt_grpo_env_trainer.py``; IGPO, its authors' ``train.sh`` and verl's defaults;
Tree-GRPO, ``train_multihopqa_tree_search.sh``; TreeRL, ``treerl-qw14b.sh`` and
``ReinforcePolicyLoss``; ARPO, ``ppo_trainer.yaml``; SimpleTIR, ``train.sh``.
Sizes and learning rates are the calculator example's and are not compared.
"""

from collections.abc import Callable
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from jax_agent_rl.config import load
from jax_agent_rl.learner.losses.aggregation import term_weights
from jax_agent_rl.learner.losses.policy import POLICY_LOSSES, Terms
from jax_agent_rl.learner.objective import objective_config

CONFIGS = Path(__file__).parents[3] / "configs"
NO_KL = {"kl.where": "none"}
CONSTANTS: dict[str, dict[str, object]] = {
    "arpo": {
        **NO_KL, "clip_ratio_low": 0.2, "clip_ratio_high": 0.2, "clip_ratio_c": 3.0,
        "loss_agg_mode": "token-mean",
    },
    "cispo": {
        **NO_KL, "policy_loss.loss_mode": "cispo", "adv_estimator": "grpo", "clip_ratio_low": 1.0,
        "clip_ratio_high": 4.0, "loss_agg_mode": "token-mean", "filter_zero_variance": True,
        "shaping.overlong_factor": 1.0,
    },
    "dapo": {
        **NO_KL, "policy_loss.loss_mode": "vanilla", "adv_estimator": "grpo", "clip_ratio_low": 0.2,
        "clip_ratio_high": 0.28, "clip_ratio_c": 10.0, "loss_agg_mode": "token-mean",
        "filter_zero_variance": True, "shaping.overlong_factor": 1.0, "entropy_coeff": 0.0,
    },
    "dr_grpo": {
        **NO_KL, "adv_estimator": "dr_grpo", "clip_ratio_low": 0.2, "clip_ratio_high": 0.2,
        "clip_ratio_c": None, "loss_agg_mode": "seq-mean-token-sum-norm",
    },
    "gigpo": {
        "gigpo.gamma": 0.95, "gigpo.step_advantage_w": 1.0, "gigpo.mode": "mean_norm",
        "gigpo.similarity": 1.0,
        "clip_ratio_low": 0.2, "clip_ratio_high": 0.2, "kl.where": "loss", "kl.estimator": "k3",
        "kl.coef": 0.01,
    },
    "gspo": {
        **NO_KL, "policy_loss.loss_mode": "gspo", "adv_estimator": "grpo", "clip_ratio_low": 3e-4,
        "clip_ratio_high": 4e-4, "loss_agg_mode": "seq-mean-token-mean",
    },
    "igpo": {
        "igpo.gamma": 1.0, "clip_ratio_low": 0.2, "clip_ratio_high": 0.2, "kl.where": "loss",
        "kl.estimator": "k3", "kl.coef": 0.001,
    },
    "mt_grpo": {
        **NO_KL, "turn_advantage_coef": 1.0, "clip_ratio_low": 0.2, "clip_ratio_high": 0.2,
        "clip_ratio_c": None, "loss_agg_mode": "token-mean",
    },
    "reinforce_plus_plus": {
        "gamma": 1.0, "clip_ratio_low": 0.2, "clip_ratio_high": 0.2, "clip_ratio_c": None,
        "kl.where": "reward", "kl.estimator": "k1", "kl.coef": 0.001,
    },
    "remax": {
        "policy_loss.loss_mode": "gpg", "loss_agg_mode": "token-mean", "kl.where": "reward",
        "kl.estimator": "k1", "kl.coef": 0.05,
    },
    "simpletir": {
        **NO_KL, "filters.void_turn": "mask", "clip_ratio_low": 0.2, "clip_ratio_high": 0.28,
        "clip_ratio_c": 3.0,
    },
    "tree_grpo": {
        "clip_ratio_low": 0.2, "clip_ratio_high": 0.2, "clip_ratio_c": 3.0, "kl.where": "loss",
        "kl.estimator": "k3", "kl.coef": 0.001,
    },
    "treerl": {
        **NO_KL, "clip_ratio_low": 0.2, "clip_ratio_high": 0.26, "clip_ratio_c": None,
        "loss_agg_mode": "seq-mean-token-mean",
    },
}  # fmt: skip


@pytest.mark.parametrize("name", CONSTANTS)
def test_a_recipe_has_the_constants_of_its_paper(name: str):
    algorithm = load(CONFIGS / f"{name}.yaml").algorithm.model_dump()

    def value(path: str) -> object:
        node = algorithm
        for part in path.split("."):
            node = node[part]
        return node

    assert {path: value(path) for path in CONSTANTS[name]} == CONSTANTS[name]


def test_recipes_of_several_updates_and_of_trees_have_the_papers_numbers():
    assert load(CONFIGS / "gspo.yaml").learner.num_minibatches > 1  # 4 in the paper
    assert load(CONFIGS / "mt_grpo.yaml").learner.ppo_epochs == 2
    tree, entropy = (
        load(CONFIGS / f"{name}.yaml").rollout.strategy for name in ("tree_grpo", "arpo")
    )
    assert (tree.tree_grpo.m, tree.tree_grpo.n, tree.tree_grpo.l, tree.tree_grpo.k) == (2, 2, 1, 3)
    arpo = entropy.arpo
    assert (arpo.beam_size, arpo.branch_probability, arpo.entropy_weight, arpo.entropy_tokens) == (
        2,
        0.5,
        0.2,
        20,
    )


@pytest.mark.parametrize("name", ["dapo", "cispo"])
def test_the_overlong_buffer_is_a_fifth_of_the_budget(name: str):
    """4096 of 20480 tokens."""
    config = load(CONFIGS / f"{name}.yaml")
    assert config.algorithm.shaping.overlong_buffer == round(config.agent.max_response_length / 5)


# Ratios of .01 … 20 to either sign of advantage: below and above every clip. Three trajectories of
# unequal lengths.
LENGTHS = (5, 2, 9)
RATIO = np.array(
    [0.01, 0.7, 1.0, 1.21, 1.27, 1.5, 0.5, 20.0, 4.5, 0.05, 0.9, 1.0003, 0.9996, 1.3, 12.0, 3.2]
)
LOGPROB = -np.linspace(0.05, 2.5, 16)
ADVANTAGE = np.repeat([0.9, -1.1, -0.4], LENGTHS) * np.where(np.arange(16) % 3 == 2, -1.0, 1.0)
SEQUENCE = np.repeat(np.arange(3), LENGTHS)


def split(values: np.ndarray) -> list[np.ndarray]:
    return np.split(values, np.cumsum(LENGTHS)[:-1])


def clipped(low: float, high: float, dual: float = np.inf, ratio: np.ndarray = RATIO) -> np.ndarray:
    """PPO's surrogate per token, as every paper writes it."""
    loss = -np.minimum(ratio * ADVANTAGE, np.clip(ratio, 1 - low, 1 + high) * ADVANTAGE)
    return np.where(ADVANTAGE < 0, np.minimum(loss, -ADVANTAGE * dual), loss)


def sequence_means(values: np.ndarray) -> np.ndarray:
    return np.array([part.mean() for part in split(values)])


LOSSES: dict[str, Callable[[], float]] = {
    # TRL's _compute_loss, loss_type="cispo": clamp(ratio, max=epsilon_high) * advantage * log-prob
    # over all tokens.
    "cispo": lambda: (-np.minimum(RATIO, 5.0) * ADVANTAGE * LOGPROB).mean(),
    "dapo": lambda: clipped(0.2, 0.28, 10.0).mean(),
    "dr_grpo": lambda: sum(part.sum() for part in split(clipped(0.2, 0.2))) / 3 / 96,
    # Paper, equation 5: the sequence's geometric mean ratio is clipped.
    "gspo": (
        lambda: sequence_means(
            clipped(3e-4, 4e-4, ratio=np.repeat(np.exp(sequence_means(np.log(RATIO))), LENGTHS))
        ).mean()
    ),
    "mt_grpo": lambda: clipped(0.2, 0.2).mean(),
    "reinforce_plus_plus": lambda: clipped(0.2, 0.2).mean(),
    "remax": lambda: (-ADVANTAGE * LOGPROB).mean(),
    "arpo": lambda: clipped(0.2, 0.2, 3.0).mean(),
    "treerl": lambda: sequence_means(clipped(0.2, 0.26)).mean(),
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_recipe_computes_the_loss_of_its_paper(name: str):
    config = load(CONFIGS / f"{name}.yaml")
    settings = objective_config(config.algorithm, config.learner, temperature=1.0).loss
    row = {
        "logprob": LOGPROB,
        "old_logprob": LOGPROB - np.log(RATIO),
        "advantage": ADVANTAGE,
        "active": np.ones(16),
    }
    arrays = {key: jnp.asarray(values[None], jnp.float32) for key, values in row.items()}
    loss_inputs = Terms(
        **arrays,
        rollout_logprob=arrays["old_logprob"],
        sequence=jnp.asarray(SEQUENCE[None]),
        chosen=jnp.zeros((1, 16)),
    )
    loss = np.asarray(
        POLICY_LOSSES[settings.policy_loss.loss_mode](loss_inputs, settings).loss, np.float64
    )[0]
    active = [np.ones(length, bool) for length in LENGTHS]
    weights = np.concatenate(
        term_weights(config.algorithm.loss_agg_mode, active, config.algorithm.loss_scale_factor)
    )
    np.testing.assert_allclose((weights * loss).sum(), LOSSES[name](), rtol=3e-6)
