"""Padding trains nothing: neither a row's, nor the id that a model's config calls padding."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_agent_rl.config import AlgorithmConfig, LearnerConfig
from jax_agent_rl.learner.learner import Learner
from jax_agent_rl.models.config import Params
from jax_agent_rl.models.decoder import Decoder
from jax_agent_rl.models.hf import load_hf
from tests.gradients import policy_batch, policy_gradient
from tests.tiny import TINY, tiny_params
from tests.trajectories import random_groups

UNTIED = replace(TINY, tie_word_embeddings=False)
PAD = 0


def test_the_id_that_fills_rows_has_no_gradient():
    config = LearnerConfig(pack_length=64, remat="none")
    learner = Learner(
        UNTIED,
        tiny_params(config=UNTIED),
        algorithm=AlgorithmConfig(),
        config=config,
        temperature=1.0,
    )
    groups = random_groups(0)
    batch = policy_batch(learner, groups)
    assert (batch.token_ids == PAD).any(), "no row has padding"
    for group in groups:
        for trajectory in group.trajectories:
            assert PAD not in trajectory.prompt_ids + trajectory.response_ids

    gradients, _ = policy_gradient(learner, groups)
    by_id = np.abs(np.asarray(gradients["embed"])).max(axis=1)
    assert by_id[PAD] == 0
    assert np.count_nonzero(by_id) > 20


def test_an_id_is_trained_where_a_context_has_it_even_if_its_called_padding(tmp_path: Path):
    """torch leaves the embedding of ``pad_token_id`` as it is. A chat model's end of turn may be
    that id: the engine reads its embedding in every later turn.
    """
    torch = pytest.importorskip("torch")
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 60, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    torch.manual_seed(0)
    theirs = LlamaForCausalLM(
        LlamaConfig(**sizes, num_attention_heads=4, pad_token_id=PAD, initializer_range=0.2)
    )
    theirs.save_pretrained(tmp_path)
    config, params = load_hf(tmp_path)

    def gradient(params: Params, ids: np.ndarray) -> np.ndarray:
        def loss(params: Params) -> jax.Array:
            decoder = Decoder.from_params(config, params)
            return jnp.sum(jnp.sin(decoder.logits(decoder(jnp.asarray(ids))[0])))

        return np.asarray(jax.grad(loss)(params)["embed"])

    def their_gradient(ids: np.ndarray) -> np.ndarray:
        theirs.zero_grad()
        torch.sin(theirs(torch.tensor(ids)).logits).sum().backward()
        gradient = theirs.get_input_embeddings().weight.grad
        assert gradient is not None
        return gradient.numpy().copy()

    without = np.random.default_rng(0).integers(1, 60, (1, 12))
    expected = their_gradient(without)
    np.testing.assert_allclose(
        gradient(params, without), expected, atol=2e-5 * np.abs(expected).max()
    )

    with_pad = without.copy()
    with_pad[0, 5] = PAD
    left_out = their_gradient(with_pad)
    assert not left_out[PAD].any()
    theirs.get_input_embeddings().padding_idx = None
    expected = their_gradient(with_pad)
    np.testing.assert_allclose(
        gradient(params, with_pad), expected, atol=2e-5 * np.abs(expected).max()
    )
    np.testing.assert_array_equal(np.delete(left_out, PAD, 0), np.delete(expected, PAD, 0))
    assert np.abs(expected[PAD]).max() > 0.01
