"""The work of well-known models, against the parameters that their model cards state; and of a tiny
one, by hand.
"""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from jax_agent_rl.config import load
from jax_agent_rl.deploy.plan.architectures import architecture_folder
from jax_agent_rl.deploy.plan.engine_programs import EngineWork
from jax_agent_rl.deploy.plan.estimate import estimate
from jax_agent_rl.deploy.plan.model_flops import pass_flops
from jax_agent_rl.deploy.plan.topology import CHIPS
from jax_agent_rl.jetstream.forward import EngineParams
from jax_agent_rl.jetstream.kv_cache import KVCache, LayerKV
from jax_agent_rl.models.config import DecoderConfig, Experts
from jax_agent_rl.models.hf import load_config
from jax_agent_rl.runtime.engine_devices import active_parameter_count

RECIPE = Path("configs/tpu_8b.yaml")


@pytest.mark.parametrize(
    ("name", "card"), [("qwen3-8b", 6.95e9), ("qwen3-32b", 31.2e9), ("qwen2.5-1.5b", 1.31e9)]
)
def test_a_token_takes_two_operations_per_parameter_that_is_no_embedding(name: str, card: float):
    with architecture_folder(name) as folder:
        model = load_config(folder)
    assert pass_flops(model, 1, visible=0, head=False) == pytest.approx(2 * card, rel=0.005)
    head = pass_flops(model, 7, visible=0) - pass_flops(model, 7, visible=0, head=False)
    assert head == 7 * 2 * model.vocab_size * model.hidden_size


def test_of_a_mixture_the_chosen_experts_count():
    """Qwen3-30B-A3B's card: 29.9B parameters without embeddings, of which 3.3B with embeddings are
    active.
    """
    with architecture_folder("qwen3-30b-a3b") as folder:
        model = load_config(folder)
    embeddings = 2 * model.vocab_size * model.hidden_size
    active = pass_flops(model, 1, visible=0, head=False) / 2 + embeddings
    assert active == pytest.approx(3.3e9, rel=0.02)


TINY = DecoderConfig(
    vocab_size=10,
    hidden_size=4,
    intermediate_size=8,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=2,
    sliding_window=3,
    windowed_layers=(True, False),
    experts=Experts(count=4, per_token=1, intermediate_size=8, normalize=True),
)


def test_attention_counts_what_a_token_sees():
    # Scores and their mixture: 4 operations per head of 2 and position. One layer has 3 positions,
    # the other one 5.
    extra_flops = pass_flops(TINY, 6, visible=5) - pass_flops(TINY, 6, visible=0)
    assert extra_flops == 6 * 4 * (4 * 2) * (3 + 5)


def described(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16)


def test_weights_of_chosen_experts_and_visible_pages_are_read_once():
    layer = {"o": described(4, 8), "expert_up": described(4, 8, 4)}
    params = EngineParams(
        embed=described(10, 4), layers=(layer, layer), final_norm=described(4), head=None
    )
    # Two key/value heads, kept twice for four devices; 6 pages of 4 positions.
    pages = LayerKV(keys=described(6, 4, 2, 4), values=described(6, 4, 4, 2))
    work = EngineWork(TINY, params, KVCache((pages, pages))).of(("decode", None, 2, 8))
    assert work is not None
    chosen = 1 - (3 / 4) ** 2  # two tokens of one expert each, of four
    weights = 2 * 2 * (4 * 8 + chosen * 4 * 8 * 4) + 2 * 10 * 4
    visible = (
        2 * (3 + 8) * (2 * 2 * 2) * 2
    )  # slots, positions, keys and values of two heads of 2, bytes
    assert work[1] == pytest.approx(weights + visible)


def test_an_engines_heads_attend_to_whole_latents():
    with architecture_folder("deepseek-v3") as folder:
        model = load_config(folder)

    def attention(over_latents: bool) -> float:
        seen = pass_flops(model, 3, visible=5, over_latents=over_latents)
        return seen - pass_flops(model, 3, visible=0, over_latents=over_latents)

    # 61 layers of 128 heads: keys of 128 + 64 and values of 128, or 512 + 64 and 512.
    assert attention(False) == 3 * 61 * 2 * 128 * (192 + 128) * 5
    assert attention(True) == 3 * 61 * 2 * 128 * (576 + 512) * 5


def test_a_delta_nets_operations_do_not_grow_with_what_a_token_sees():
    with architecture_folder("qwen3.5-9b") as folder:
        model = load_config(folder)
    # Every fourth layer is attention: 16 heads of 256.
    extra_flops = pass_flops(model, 3, visible=5) - pass_flops(model, 3, visible=0)
    assert extra_flops == 3 * 8 * 4 * (16 * 256) * 5


def test_an_estimate_counts_key_value_heads_in_layers_that_have_some():
    with architecture_folder("qwen3.5-9b") as folder:
        model = load_config(folder)
        config = load(RECIPE, [f"model.path={folder}"])

    def gradient_bytes(model: DecoderConfig) -> float:
        return estimate(config, model, CHIPS["v5p"], engines=1).gradient_bytes

    more_heads = dataclasses.replace(model, num_kv_heads=2 * model.num_kv_heads)
    # The products of one row of 4,096 tokens are kept in bfloat16. Weights are gathered, the
    # largest of which are a delta net's.
    kept = 4096 * 2 * 8 * 2 * (4 * 256)
    assert gradient_bytes(more_heads) - gradient_bytes(model) == kept


@pytest.mark.parametrize(
    ("name", "card"),
    [
        ("qwen3-30b-a3b", 3.3e9),
        ("gemma-4-26b-a4b", 3.8e9),
        ("deepseek-v3", 37e9),
        ("kimi-k2", 32e9),
    ],
)
def test_a_token_meets_the_experts_that_it_chooses(name: str, card: float):
    with architecture_folder(name) as folder:
        model = load_config(folder)
    assert active_parameter_count(model) == pytest.approx(card, rel=0.03)
