"""The delta net's functions, put together, equal the layer of transformers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_agent_rl.models.delta_net import (
    causal_conv,
    chunked_delta_rule,
    delta_tokens,
    gated_rms_norm,
)

torch = pytest.importorskip("torch")

SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "layer_types": ["linear_attention"],
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "vocab_size": 31,
    "intermediate_size": 32,
}


def delta_layer(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    """Apply a layer with the tensors of Qwen3.5 to [B, T, D]."""
    rows, count, _ = x.shape
    weight = params["conv1d.weight"][:, 0]
    state = jnp.zeros((rows, weight.shape[1] - 1, weight.shape[0]))
    mixed, _ = causal_conv(x @ params["in_proj_qkv.weight"].T, weight, state)
    q, k, v = jnp.split(mixed, [16, 32], axis=-1)
    tokens = delta_tokens(
        q.reshape(rows, count, 2, 8),
        k.reshape(rows, count, 2, 8),
        v.reshape(rows, count, 4, 16),
        x @ params["in_proj_a.weight"].T,
        x @ params["in_proj_b.weight"].T,
        decay_log=params["A_log"],
        decay_bias=params["dt_bias"],
    )
    outputs, _ = chunked_delta_rule(tokens, jnp.zeros((rows, 4, 8, 16)), chunk=16)
    gate = (x @ params["in_proj_z.weight"].T).reshape(outputs.shape)
    outputs = gated_rms_norm(outputs, gate, params["norm.weight"], eps=1e-6)
    return outputs.reshape(rows, count, -1) @ params["out_proj.weight"].T


def test_outputs_and_gradients_equal_those_of_qwen3_5():
    from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet

    torch.manual_seed(0)
    theirs = Qwen3_5GatedDeltaNet(Qwen3_5TextConfig(**SIZES), 0).float()
    for parameter in theirs.parameters():  # far from where training starts
        torch.nn.init.normal_(parameter, std=0.3)

    x = np.random.default_rng(0).standard_normal((2, 37, 32)).astype(np.float32)
    inputs = torch.tensor(x, requires_grad=True)
    expected = theirs(inputs)
    torch.sin(expected).sum().backward()

    params = {name: jnp.asarray(p.detach().numpy()) for name, p in theirs.named_parameters()}
    outputs = delta_layer(params, jnp.asarray(x))
    np.testing.assert_allclose(outputs, expected.detach(), atol=1e-5)

    gradients, d_inputs = jax.grad(
        lambda params, x: jnp.sum(jnp.sin(delta_layer(params, x))), argnums=(0, 1)
    )(params, jnp.asarray(x))
    assert len(gradients) == 9
    pairs = [(d_inputs, inputs.grad.numpy())]
    for name, parameter in theirs.named_parameters():
        pairs.append((gradients[name], parameter.grad.numpy()))
    for actual, reference in pairs:
        scale = np.abs(reference).max()
        np.testing.assert_allclose(actual / scale, reference / scale, atol=2e-5)
