"""Training and evaluation sample as the configuration says."""

from jax_agent_rl.config import build
from jax_agent_rl.trainer.step import evaluation_sampling, training_sampling

MINIMAL = {"run_dir": "r", "model": {"path": "m"}, "data": {"train": "t"}}


def test_each_has_its_temperature_and_both_the_length_of_the_engines_context():
    config = build(
        MINIMAL,
        ["rollout.temperature=0.7", "rollout.eval_temperature=0.2", "rollout.max_model_len=1030"],
    )
    training = training_sampling(config)
    evaluation = evaluation_sampling(config)
    assert (training.temperature, training.max_tokens) == (0.7, 1030)
    assert (evaluation.temperature, evaluation.max_tokens) == (0.2, 1030)


def test_training_alone_samples_from_a_part_of_the_vocabulary():
    config = build(MINIMAL, ["rollout.top_p=0.9", "rollout.top_k=40", "rollout.min_p=0.05"])
    training = training_sampling(config)
    evaluation = evaluation_sampling(config)
    assert (training.top_p, training.top_k, training.min_p) == (0.9, 40, 0.05)
    assert training.restricted and not evaluation.restricted
