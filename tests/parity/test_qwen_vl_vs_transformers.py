"""Qwen2.5-VL against transformers on a random small model: two images of different sizes and a
video in one sequence, in windows and without. Weights and reference values are transformers' own.
"""

from __future__ import annotations

import copy
import functools
import json
import re
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jax_agent_rl.jetstream.decode_batch import make_decode_batch
from jax_agent_rl.jetstream.forward import Kernels, decode_step, engine_params, prefill_chunks
from jax_agent_rl.jetstream.kv_cache import KVCache, LayerKV
from jax_agent_rl.jetstream.mixers.table import empty_cache
from jax_agent_rl.models.decoder import Decoder
from jax_agent_rl.models.hf import hf_tensors, load_hf, save_hf
from jax_agent_rl.models.image_processor import ProcessedImage
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
VIDEO = 81
TEXT = 70
GRIDS = {"image": [(1, 4, 6), (1, 12, 4)], "video": [(2, 4, 8)]}
RNG = np.random.default_rng(0)
IDS = [
    3,
    *[IMAGE] * 6,
    *RNG.integers(0, TEXT, 5),
    *[VIDEO] * 16,
    4,
    *[IMAGE] * 12,
    *RNG.integers(0, TEXT, 8),
]
IDS = np.array(IDS, np.int32)
TEXT_IDS = RNG.integers(0, TEXT, (2, 24))


def drawn(kind: str, grid: tuple[int, int, int]) -> ProcessedImage:
    patches = RNG.standard_normal((int(np.prod(grid)), 3 * 2 * 4 * 4), dtype=np.float32)
    return ProcessedImage(kind=kind, patches=patches, grid=grid)


IMAGES = {kind: [drawn(kind, grid) for grid in grids] for kind, grids in GRIDS.items()}


@pytest.fixture(scope="module")
def peer(tmp_path_factory: pytest.TempPathFactory):
    """A random model of transformers, and the folder it was saved in."""
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("qwen_vl")
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
    config = Qwen2_5_VLConfig(
        text_config={
            "vocab_size": 89,
            "hidden_size": 48,
            "intermediate_size": 40,
            "num_hidden_layers": 2,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "max_position_embeddings": 128,
            "eos_token_id": 2,
            "bos_token_id": 1,
            "initializer_range": 0.2,
            "rope_parameters": rope,
        },
        vision_config={
            "depth": 3,
            "hidden_size": 32,
            "intermediate_size": 24,
            "num_heads": 2,
            "patch_size": 4,
            "window_size": (
                16
            ),  # two by two features; the second image and the video have several windows
            "fullatt_block_indexes": [1],
            "out_hidden_size": 48,
            "tokens_per_second": 2,
            "initializer_range": 0.2,
        },
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        vision_start_token_id=82,
        vision_end_token_id=83,
        eos_token_id=2,
        bos_token_id=1,
    )
    model = Qwen2_5_VLForConditionalGeneration._from_config(
        config, attn_implementation="eager"
    ).eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if (
                "norm" in key or "ln_q" in key or "bias" in key
            ):  # random too: where they start a wrong one would not show
                parameter += torch.randn_like(parameter) * 0.2
    model.save_pretrained(folder)
    return model, folder


def theirs(model) -> torch.Tensor:
    """transformers' logits [T, V] of the sequence with images."""
    media = {
        "pixel_values": torch.tensor(np.concatenate([p.patches for p in IMAGES["image"]])),
        "image_grid_thw": torch.tensor(GRIDS["image"]),
        "pixel_values_videos": torch.tensor(IMAGES["video"][0].patches),
        "video_grid_thw": torch.tensor(GRIDS["video"]),
    }
    kinds = torch.tensor([[{IMAGE: 1, VIDEO: 2}.get(int(i), 0) for i in IDS]])
    ids = torch.tensor(IDS[None].astype(np.int64))
    return model(ids, **media, mm_token_type_ids=kinds, second_per_grid_ts=[1.0]).logits[0]


@functools.cache
def multimodal(vision, padding: int = 0):
    """Return patches, layout and the host's part of the sequence, padded by so many windows."""
    spans = locate(vision, IDS, GRIDS)
    images = [IMAGES[span.kind][span.number] for span in spans]
    total = sum(len(image.patches) for image in images)
    padded = (-(-total // vision.window_patches) + padding) * vision.window_patches
    patches = np.full(
        (padded, vision.patch_dim), 7.0, np.float32
    )  # padding must not matter, whatever it holds
    patches[:total] = np.concatenate([image.patches for image in images])
    starts = np.cumsum([0, *(span.stop - span.start for span in spans)])[:-1]
    positions, offset = rope_positions(vision, len(IDS), spans)
    plan = layout(vision, [image.grid for image in images], padded)
    return patches, plan, positions, feature_index(len(IDS), spans, starts.tolist()), offset


def inputs(config, params, *, padding: int = 0) -> ImageInputs:
    patches, plan, positions, index, _ = multimodal(config.vision, padding)
    seen = VisionTower.from_params(config.vision, params["vision"])(jnp.asarray(patches), plan)
    return ImageInputs(positions[None], seen[None], index[None])


@functools.partial(jax.jit, static_argnames=("config", "padding", "with_images"))
def ours(config, params, ids=IDS[None], *, padding: int = 0, with_images: bool = True) -> jax.Array:
    """Logits [B, T, V] of rows."""
    images = inputs(config, params, padding=padding) if with_images else None
    model = Decoder.from_params(config, params)
    return model.logits(model(jnp.asarray(ids), images=images)[0])


def test_logits_are_equal(peer):
    model, folder = peer
    config, params = load_hf(folder)
    with torch.no_grad():
        expected = theirs(model).numpy()
    for padding in (0, 3):
        np.testing.assert_allclose(ours(config, params, padding=padding)[0], expected, atol=1e-4)


def test_every_field_of_a_config_is_honoured_refused_or_without_effect(peer):
    from transformers import Qwen2_5_VLForConditionalGeneration

    model, folder = peer
    kind = type(model.config)
    weights = model.state_dict()

    def computed(raw: dict) -> np.ndarray:
        changed = kind.from_dict(json.loads(json.dumps(raw)))
        changed_model = Qwen2_5_VLForConditionalGeneration._from_config(
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


def test_logits_of_text_are_equal(peer):
    model, folder = peer
    config, params = load_hf(folder)
    with torch.no_grad():
        expected = model(torch.tensor(TEXT_IDS)).logits.numpy()
    np.testing.assert_allclose(
        ours(config, params, TEXT_IDS, with_images=False), expected, atol=1e-4
    )


def test_every_gradient_of_tower_and_decoder_is_equal(peer, tmp_path: Path):
    model, folder = peer
    config, params = load_hf(folder)
    targets = np.where(IDS[1:] < TEXT, IDS[1:], 5)

    def loss(params):
        scores = jax.nn.log_softmax(ours(config, params, padding=1)[0, :-1])
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
        np.testing.assert_allclose(gradient, expected[name], atol=2e-5, rtol=1e-4, err_msg=name)


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
    prompt = len(IDS) - 4
    prefill = jax.jit(prefill_chunks, static_argnums=0)
    decode = jax.jit(decode_step, static_argnums=(0, 1, 2))
    slots = make_decode_batch(1, 1)
    for start in range(0, prompt, 15):  # chunks that begin and end within images
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
    assert offset and prompt % 15 == 0
    for i in range(prompt, len(IDS)):
        slots = replace(slots, tokens=IDS[[i]], positions=np.array([i]), offsets=np.array([offset]))
        scores, cache = decode(config, None, Kernels.NONE, weights, cache, slots)
        np.testing.assert_allclose(scores[:, 0], expected[i], atol=1e-4)


def test_our_files_are_read_by_transformers(peer, tmp_path: Path):
    from transformers import Qwen2_5_VLForConditionalGeneration

    model, folder = peer
    config, params = load_hf(folder)
    save_hf(tmp_path, config, params)
    read = Qwen2_5_VLForConditionalGeneration.from_pretrained(
        tmp_path, attn_implementation="eager"
    ).eval()
    assert load_hf(tmp_path)[0] == config
    with torch.no_grad():
        torch.testing.assert_close(theirs(read), theirs(model))


def test_both_layouts_of_files_are_read(peer, tmp_path: Path):
    _, folder = peer
    config, params = load_hf(folder)
    raw = json.loads((folder / "config.json").read_text())
    text = raw.pop("text_config")
    rope = text.pop("rope_parameters")
    flat = {**text, **raw, "rope_theta": rope["rope_theta"]}
    flat["rope_scaling"] = {"type": "mrope", "mrope_section": rope["mrope_section"]}
    flat["vision_config"] = {
        **raw["vision_config"],
        "in_chans": raw["vision_config"].pop("in_channels"),
    }
    (tmp_path / "config.json").write_text(json.dumps(flat))
    newer = {
        (
            re.sub(
                r"^model\.", "model.language_model.", re.sub(r"^visual\.", "model.visual.", name)
            )
            if not name.startswith("visual")
            else f"model.{name}"
        ): tensor
        for name, tensor in load_file(folder / "model.safetensors").items()
    }
    save_file(newer, tmp_path / "model.safetensors")
    again, same = load_hf(tmp_path)
    assert again == config
    jax.tree.map(np.testing.assert_array_equal, params, same)
