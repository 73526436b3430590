"""Layers that read the keys and values of an earlier layer: which configs are refused, and that all
others are computed as they say.
"""

from __future__ import annotations

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jax_agent_rl.errors import ModelError
from jax_agent_rl.models.config import DecoderConfig, DeltaNet, GlobalAttention, LatentAttention
from tests.messages import raises
from tests.tiny import EXPERTS, GEMMA4_SMALL, LATENT, TINY, full_logits, tiny_params

HEADS = GlobalAttention(num_kv_heads=TINY.num_kv_heads, head_dim=TINY.head_dim)


def config_of(
    windowed: str,
    shared: int,
    *,
    heads: GlobalAttention | None = None,
    delta_nets: str = "",
    latent: LatentAttention | None = None,
) -> DecoderConfig:
    """A config whose layers are windowed (w) or not (f), and delta nets (d) or not."""
    delta_net = None
    if delta_nets:
        layers = tuple(letter == "d" for letter in delta_nets)
        delta_net = DeltaNet(layers=layers, key_heads=2, value_heads=4, key_dim=8, value_dim=6)
    return replace(
        TINY,
        num_layers=len(windowed),
        windowed_layers=tuple(letter == "w" for letter in windowed),
        sliding_window=4,
        global_attention=heads,
        shared_kv_layers=shared,
        delta_net=delta_net,
        latent=latent,
    )


@given(
    layers=st.lists(st.sampled_from("wf"), min_size=1, max_size=7),
    shared=st.integers(0, 8),
    heads=st.sampled_from([None, HEADS]),
)
def test_a_config_is_refused_or_each_layer_reads_the_last_one_like_itself(
    layers: list[str], shared: int, heads: GlobalAttention | None
):
    first_shared = len(layers) - shared
    own = layers[: max(first_shared, 0)]
    reading = layers[max(first_shared, 0) :]
    has_sources = first_shared > 0 and set(reading) <= set(own)
    one_source = heads is not None or len(set(reading)) < 2
    if not has_sources or not one_source:
        with raises(ModelError, key=f"shared_kv_layers={shared}"):
            config_of("".join(layers), shared, heads=heads)
        return

    config = config_of("".join(layers), shared, heads=heads)
    for layer, letter in enumerate(layers):
        expected = layer
        if layer >= first_shared:
            expected = max(i for i, other in enumerate(own) if other == letter)
        assert config.keys_source(layer) == expected
        assert config.layer_kind(expected).mixer == config.layer_kind(layer).mixer
        with_keys = "k" if config.layer_kind(layer).mixer == "attention" else "global_k"
        assert (layer in config.layers_with(with_keys)) == (layer < first_shared)
    # Only layers that are read keep their keys for others.
    sources = {config.keys_source(layer) for layer in range(first_shared, len(layers))}
    for layer in range(first_shared):
        assert (config.layer_kind(layer).keys == "source") == (layer in sources)


@given(layers=st.text(alphabet="wf", min_size=1, max_size=7), shared=st.integers(1, 8))
def test_what_a_refusal_says_to_set_is_accepted(layers: str, shared: int):
    try:
        config_of(layers, shared)
    except ModelError as error:
        message = str(error)
    else:
        return
    if "GlobalAttention" in message:
        config_of(layers, shared, heads=HEADS)
        return
    most = int(message.partition("from 0 to ")[2].partition(",")[0])
    assert most < shared
    config_of(layers, most, heads=HEADS)
    with raises(ModelError, fix=f"from 0 to {most}"):
        config_of(layers, most + 1, heads=HEADS)


def test_mixers_without_keys_and_values_take_no_part():
    with raises(ModelError, key="shared_kv_layers=1", value="latent_attention"):
        config_of("fff", 1, latent=LATENT.latent)
    for delta_nets in ("-d-", "--d"):  # a source, a layer that reads one
        with raises(ModelError, key="shared_kv_layers=1", value=("layer", "delta_net")):
            config_of("fff", 1, delta_nets=delta_nets)
    assert config_of("fff", 1, delta_nets="d--").keys_source(2) == 1


@pytest.mark.parametrize("layers", ["fwww", "wffwf"])
def test_one_mixer_computes_what_two_with_equal_heads_do(layers: str):
    """transformers computes the same for Gemma 4, whose full layers are a mixer of their own."""
    shared = 2 if layers == "fwww" else 1
    config = replace(config_of(layers, shared), qk_norm=True)
    params = tiny_params(config=config)
    apart = replace(config, global_attention=HEADS)

    stacks = {}
    for name, shape in apart.parameter_shapes()["layers"].items():
        whole = name.removeprefix("global_")
        with_name = config.layers_with(whole)
        rows = [with_name.index(layer) for layer in apart.layers_with(name)]
        stacks[name] = params["layers"][whole][jnp.array(rows)]
        assert stacks[name].shape == shape
    assert "global_q" in stacks

    ids = np.random.default_rng(0).integers(3, 97, 20).tolist()
    expected = full_logits(params | {"layers": stacks}, ids, apart)
    np.testing.assert_allclose(full_logits(params, ids, config), expected, atol=1e-5)


def test_sources_are_found_among_layers_with_experts():
    config = replace(
        GEMMA4_SMALL, experts=EXPERTS.experts, wide_shared_layers=False, per_layer_inputs=None
    )
    assert [config.keys_source(layer) for layer in range(5)] == [0, 1, 2, 2, 1]
