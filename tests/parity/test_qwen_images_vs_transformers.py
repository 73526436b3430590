"""Qwen3-VL and Qwen3.5 with images against transformers, on random small models.

Two images of different sizes are in one sequence. Weights and reference values are transformers'
own.
"""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_agent_rl.jetstream.engine import EngineShapes, JaxEngine
from jax_agent_rl.jetstream.scheduler import Scheduler
from jax_agent_rl.models.decoder import Decoder
from jax_agent_rl.models.hf import hf_tensors, load_hf, save_hf
from jax_agent_rl.models.image_processor import ProcessedImage
from jax_agent_rl.models.vision_context import (
    ImageInputs,
    MultimodalContext,
    feature_index,
    layout,
    locate,
    rope_positions,
)
from jax_agent_rl.models.vision_tower import VisionTower
from jax_agent_rl.rollout.protocol import GenerateRequest
from jax_agent_rl.types import SamplingParams
from tests.config_fields import check_every_field
from tests.driven_engine import finished

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
DELTA_NET = {
    "num_hidden_layers": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    # Smaller ones make more of what rounds where a norm's input is close to 0.
    "rms_norm_eps": 1e-2,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"],
}
QUARTER = {"mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5}
PEERS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "Qwen3VL": (
        {"num_hidden_layers": 3},
        {"mrope_section": [4, 2, 2]},
        {"deepstack_visual_indexes": [0, 2]},
    ),
    "Qwen3_5": (DELTA_NET, QUARTER, {}),
    "Qwen3_5Moe": (
        DELTA_NET
        | {
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 24,
            "num_experts": 6,
            "num_experts_per_tok": 2,
        },
        QUARTER,
        {},
    ),
}
"""Fields of the decoder, of its rotary settings and of the tower, by transformers' name."""


@pytest.fixture(scope="module", params=PEERS)
def peer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    """A random model of transformers, and the folder it was saved in."""
    import transformers

    torch.manual_seed(0)
    name = request.param
    text, rope, vision = PEERS[name]
    folder = tmp_path_factory.mktemp(name)
    default_rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_interleaved": True}
    config = getattr(transformers, f"{name}Config")(
        text_config={
            "vocab_size": 89,
            "hidden_size": 48,
            "intermediate_size": 40,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "max_position_embeddings": 128,
            "eos_token_id": 2,
            "bos_token_id": 1,
            "initializer_range": 0.2,
            "rope_parameters": default_rope | rope,
            **text,
        },
        vision_config={
            "depth": 4,
            "hidden_size": 32,
            "intermediate_size": 24,
            "num_heads": 2,
            "patch_size": 4,
            "out_hidden_size": 48,
            "num_position_embeddings": 25,  # five by five, of which neither image is a multiple
            "initializer_range": 0.2,
            **vision,
        },
        image_token_id=IMAGE,
        video_token_id=81,
        vision_start_token_id=82,
        vision_end_token_id=83,
        eos_token_id=2,
        bos_token_id=1,
    )
    model = of_config(config)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if (
                "norm" in key or "bias" in key
            ):  # random too: where they start a wrong one would not show
                parameter += torch.randn_like(parameter) * 0.2
    model.save_pretrained(folder)
    return model, folder


def of_config(config):
    """A model of transformers that computes attention as written down."""
    from transformers import AutoModelForImageTextToText

    return AutoModelForImageTextToText.from_config(config, attn_implementation="eager").eval()


def theirs(model, ids: Sequence[int] = tuple(IDS.tolist())) -> torch.Tensor:
    """transformers' logits [T, V] of a sequence that begins with the one with images."""
    media = {
        "pixel_values": torch.tensor(np.concatenate(IMAGES)),
        "image_grid_thw": torch.tensor(GRIDS),
    }
    ids = torch.tensor([list(ids)])
    return model(ids, **media, mm_token_type_ids=(ids == IMAGE).int()).logits[0]


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
    model, folder = peer
    kind = type(model.config)
    weights = model.state_dict()

    def computed(raw: dict) -> np.ndarray:
        changed_model = of_config(kind.from_dict(json.loads(json.dumps(raw))))
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
    expected = dict(hf_tensors(*load_hf(tmp_path)))
    assert gradients.keys() == expected.keys()
    for name, gradient in gradients.items():
        np.testing.assert_allclose(gradient, expected[name], atol=5e-5, rtol=1e-4, err_msg=name)


def test_the_engine_says_after_images_what_transformers_says(peer):
    model, folder = peer
    config, params = load_hf(folder)
    shapes = EngineShapes(
        max_model_len=64,
        max_concurrent_decodes=1,
        kv_cache_tokens=64,
        decode_steps=4,
        prefill_buckets=(16,),  # the second chunk begins within an image
        patch_buckets=(128,),
    )
    assert IDS[15] == IDS[16] == IMAGE
    engine = JaxEngine(config, shapes, takes_images=True)
    on = Scheduler(engine, engine.load_params(params), version=1)
    images = [
        ProcessedImage(kind="image", patches=patches, grid=grid)
        for patches, grid in zip(IMAGES, GRIDS, strict=True)
    ]
    spans = locate(config.vision, IDS, {"image": GRIDS})
    positions, offset = rope_positions(config.vision, len(IDS), spans)
    assert offset
    context = MultimodalContext(
        ids=IDS, images=tuple(images), spans=tuple(spans), positions=positions, offset=offset
    )
    sampling = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    on.submit(
        GenerateRequest(request_id="a", prompt_ids=tuple(IDS.tolist()), sampling=sampling), context
    )
    output = finished(on)["a"]

    with torch.no_grad():
        logits = theirs(model, [*IDS.tolist(), *output.token_ids])[len(IDS) - 1 : -1]
    scores = torch.log_softmax(logits, -1)
    assert scores.argmax(-1).tolist() == list(output.token_ids)
    np.testing.assert_allclose(output.log_probs, scores.max(-1).values.numpy(), atol=1e-4)


def test_our_files_are_read_by_transformers(peer, tmp_path: Path):
    from transformers import AutoModelForImageTextToText

    model, folder = peer
    config, params = load_hf(folder)
    save_hf(tmp_path, config, params)
    read = AutoModelForImageTextToText.from_pretrained(tmp_path, attn_implementation="eager").eval()
    assert type(read) is type(model)
    assert load_hf(tmp_path)[0] == config
    with torch.no_grad():
        torch.testing.assert_close(theirs(read), theirs(model))
