"""Qwen3-VL against transformers on a random small model: two images of different sizes in one
sequence, inner features of the tower in the decoder's first layers. Weights and reference values
are transformers' own.
"""

from __future__ import annotations

import copy
import functools
import json
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from jax_agent_rl.jetstream.decode_batch import make_decode_batch
from jax_agent_rl.jetstream.forward import Kernels, decode_step, engine_params, prefill_chunks
from jax_agent_rl.jetstream.kv_cache import KVCache, LayerKV
from jax_agent_rl.jetstream.mixers.table import empty_cache
from jax_agent_rl.models.decoder import Decoder
from jax_agent_rl.models.hf import hf_tensors, load_hf, save_hf
from jax_agent_rl.models.vision_context import (
    ImageInputs,
    feature_index,
    layout,
    locate,
    rope_positions,
)
from jax_agent_rl.models.vision_tower import VisionTower
from tests.config_fields import check_every_field

torch = pytest.importorskip("torch")

IMAGE = 80
TEXT = 70
GRIDS = [(1, 4, 6), (1, 12, 4)]
RNG = np.random.default_rng(0)
IDS = np.array(
    [3, *[IMAGE] * 6, *RNG.integers(0, TEXT, 5), *[IMAGE] * 12, *RNG.integers(0, TEXT, 11)],
    np.int32,
)
IMAGES = [
    RNG.standard_normal((int(np.prod(grid)), 3 * 2 * 4 * 4), dtype=np.float32) for grid in GRIDS
]


@pytest.fixture(scope="module")
def peer(tmp_path_factory: pytest.TempPathFactory):
    """A random model of transformers, and the folder it was saved in."""
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("qwen3_vl")
    rope = {
        "rope_type": "default",
        "rope_theta": 1e4,
        "mrope_section": [4, 2, 2],
        "mrope_interleaved": True,
    }
    config = Qwen3VLConfig(
        text_config={
            "vocab_size": 89,
            "hidden_size": 48,
            "intermediate_size": 40,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "max_position_embeddings": 128,
            "eos_token_id": 2,
            "bos_token_id": 1,
            "initializer_range": 0.2,
            "rope_parameters": rope,
        },
        vision_config={
            "depth": 4,
            "hidden_size": 32,
            "intermediate_size": 24,
            "num_heads": 2,
            "patch_size": 4,
            "out_hidden_size": 48,
            "num_position_embeddings": 25,  # five by five, of which neither image is a multiple
            "deepstack_visual_indexes": [0, 2],
            "initializer_range": 0.2,
        },
        image_token_id=IMAGE,
        video_token_id=81,
        vision_start_token_id=82,
        vision_end_token_id=83,
        eos_token_id=2,
        bos_token_id=1,
    )
    model = Qwen3VLForConditionalGeneration._from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if (
                "norm" in key or "bias" in key
            ):  # random too: where they start a wrong one would not show
                parameter += torch.randn_like(parameter) * 0.2
    model.save_pretrained(folder)
    return model, folder


def theirs(model) -> torch.Tensor:
    """transformers' logits [T, V] of the sequence with images."""
    media = {
        "pixel_values": torch.tensor(np.concatenate(IMAGES)),
        "image_grid_thw": torch.tensor(GRIDS),
    }
    kinds = torch.tensor(IDS[None] == IMAGE).int()
    return model(torch.tensor(IDS[None].astype(np.int64)), **media, mm_token_type_ids=kinds).logits[
        0
    ]


@functools.cache
def multimodal(vision):
    """Patches, layout and the host's part of the sequence."""
    spans = locate(vision, IDS, {"image": GRIDS})
    patches = np.full(
        (128, vision.patch_dim), 7.0, np.float32
    )  # padding must not matter, whatever it holds
    total = sum(map(len, IMAGES))
    patches[:total] = np.concatenate(IMAGES)
    positions, offset = rope_positions(vision, len(IDS), spans)
    return (
        patches,
        layout(vision, GRIDS, 128),
        positions,
        feature_index(len(IDS), spans, [0, 6]),
        offset,
    )


@functools.partial(jax.jit, static_argnums=0)
def ours(config, params) -> jax.Array:
    """Logits [T, V]."""
    patches, plan, positions, index, _ = multimodal(config.vision)
    seen = VisionTower.from_params(config.vision, params["vision"])(jnp.asarray(patches), plan)
    model = Decoder.from_params(config, params)
    images = ImageInputs(positions[None], seen[None], index[None])
    hidden = model(jnp.asarray(IDS[None]), images=images)[0]
    return model.logits(hidden)[0]


def test_logits_are_equal_with_images_and_without(peer):
    model, folder = peer
    config, params = load_hf(folder)
    text = RNG.integers(0, TEXT, (2, 24))
    with torch.no_grad():
        np.testing.assert_allclose(ours(config, params), theirs(model).numpy(), atol=1e-4)
        expected = model(torch.tensor(text)).logits.numpy()
    decoder = Decoder.from_params(config, params)
    np.testing.assert_allclose(decoder.logits(decoder(jnp.asarray(text))[0]), expected, atol=1e-4)


def test_every_field_of_a_config_is_honoured_refused_or_without_effect(peer):
    from transformers import Qwen3VLForConditionalGeneration

    model, folder = peer
    kind = type(model.config)
    weights = model.state_dict()

    def computed(raw: dict) -> np.ndarray:
        changed = kind.from_dict(json.loads(json.dumps(raw)))
        changed_model = Qwen3VLForConditionalGeneration._from_config(
            changed, attn_implementation="eager"
        ).eval()
        changed_model.load_state_dict(weights)
        with torch.no_grad():
            return theirs(changed_model).numpy()

    raw = json.loads((folder / "config.json").read_text())
    assert (
        check_every_field(raw, theirs=computed, resolved=lambda raw: kind.from_dict(raw).to_dict())
        > 20
    )


def test_every_gradient_of_tower_and_decoder_is_equal(peer, tmp_path: Path):
    model, folder = peer
    config, params = load_hf(folder)
    targets = np.where(IDS[1:] < TEXT, IDS[1:], 5)

    def loss(params):
        scores = jax.nn.log_softmax(ours(config, params)[:-1])
        return -jnp.take_along_axis(scores, targets[:, None], axis=-1).mean()

    gradients = dict(hf_tensors(config, jax.jit(jax.grad(loss))(params)))
    model = copy.deepcopy(model)
    torch.nn.functional.cross_entropy(
        theirs(model)[:-1], torch.tensor(targets.astype(np.int64))
    ).backward()
    with torch.no_grad():  # let transformers name its gradients as it does its weights
        for parameter in model.parameters():
            parameter.copy_(parameter.grad)
    model.save_pretrained(tmp_path)
    expected = load_file(tmp_path / "model.safetensors")
    assert gradients.keys() == expected.keys()
    for name, gradient in gradients.items():
        np.testing.assert_allclose(gradient, expected[name], atol=5e-5, rtol=1e-4, err_msg=name)


def placed(start: int, row: LayerKV, chunk: LayerKV) -> LayerKV:
    """A cache's row with a chunk in it."""
    return row.by_position(
        lambda axis, x, new: jax.lax.dynamic_update_slice_in_dim(x, new, start, axis), chunk
    )


def test_chunks_and_steps_give_what_transformers_gives_at_once(peer):
    model, folder = peer
    config, params = load_hf(folder)
    weights = engine_params(config, params, dtype=jnp.float32)
    patches, plan, positions, index, offset = multimodal(config.vision)
    seen = VisionTower.from_params(config.vision, weights.vision)(jnp.asarray(patches), plan)[None]
    cache = empty_cache(config, 1, 64, jnp.float32)
    prompt = 30
    prefill = jax.jit(prefill_chunks, static_argnums=0)
    decode = jax.jit(decode_step, static_argnums=(0, 1, 2))
    slots = make_decode_batch(1, 1)
    for start in range(0, prompt, 15):  # the second chunk begins within an image
        window = slice(start, start + 15)
        chunk = ImageInputs(positions[None, window], seen, index[None, window])
        layers = prefill(
            config, weights, cache, jnp.asarray(IDS[None, window]), jnp.array([start]), chunk
        )
        cache = KVCache(
            tuple(map(functools.partial(placed, start), cache.layers, [kv for _, kv, _ in layers]))
        )
    with torch.no_grad():
        expected = theirs(model).numpy()
    assert offset and IDS[15] == IMAGE
    for i in range(prompt, len(IDS)):
        slots = replace(slots, tokens=IDS[[i]], positions=np.array([i]), offsets=np.array([offset]))
        scores, cache = decode(config, None, Kernels.NONE, weights, cache, slots)
        np.testing.assert_allclose(scores[:, 0], expected[i], atol=1e-4)


def test_our_files_are_read_by_transformers(peer, tmp_path: Path):
    from transformers import Qwen3VLForConditionalGeneration

    model, folder = peer
    config, params = load_hf(folder)
    save_hf(tmp_path, config, params)
    read = Qwen3VLForConditionalGeneration.from_pretrained(
        tmp_path, attn_implementation="eager"
    ).eval()
    assert load_hf(tmp_path)[0] == config
    with torch.no_grad():
        torch.testing.assert_close(theirs(read), theirs(model))
