"""A random Qwen2.5-VL and a Qwen3.5 small enough for unit tests, pictures for them, and the plain
way to run them.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from PIL import Image

from jax_agent_rl.models.config import DecoderConfig, DeltaNet, Params, Rope, VisionConfig
from jax_agent_rl.models.decoder import Decoder
from jax_agent_rl.models.image_processor import Grid, ImageProcessor, ProcessedImage
from jax_agent_rl.models.vision_context import (
    ImageInputs,
    MultimodalContext,
    VisionProcessor,
    feature_index,
    layout,
)
from jax_agent_rl.types import FinishReason, StopReason, TokenOutput, Trajectory, Turn
from tests.tiny import DELTA_NETS, TINY

IMAGE = 90
VIDEO = 91
START = 92
END = 93
TINY_VISION = VisionConfig(
    num_layers=2,
    hidden_size=16,
    intermediate_size=24,
    num_heads=2,
    out_size=TINY.hidden_size,
    patch_size=2,
    window_size=8,  # two by two features
    full_attention_layers=(1,),
    image_token_id=IMAGE,
    video_token_id=VIDEO,
    vision_start_token_id=START,
    vision_end_token_id=END,
)
TINY_VL: DecoderConfig = replace(
    TINY, family="qwen2_5_vl", qkv_bias=True, rope=Rope(sections=(1, 1, 2)), vision=TINY_VISION
)
TINY_QWEN3_5: DecoderConfig = replace(
    DELTA_NETS,
    family="qwen3_5",
    norm_offset=1.0,
    rms_norm_eps=1e-2,  # a smaller one makes more of what rounds where outputs are close to 0
    rope=Rope(partial_rotary=0.75, sections=(1, 1, 1), interleaved_sections=True),
    delta_net=DeltaNet(layers=(True, False), key_heads=2, value_heads=4, key_dim=8, value_dim=6),
    vision=replace(
        TINY_VISION,
        window_size=None,
        full_attention_layers=(),
        tokens_per_second=None,  # it reads no videos
        layer_norm=True,
        gated=False,
        patch_bias=True,
        position_grid=3,
    ),
)
"""A delta net, then gated attention, behind a tower without windows."""
# Every reference pass is padded to these, so that it compiles once.
LONGEST = 96
PATCHES = 128


def drawn(seed: int, grid: Grid, kind: str = "image") -> ProcessedImage:
    """Noise, as an image processor would have scaled it."""
    shape = (int(np.prod(grid)), TINY_VISION.patch_dim)
    return ProcessedImage(
        kind=kind,
        patches=np.random.default_rng(seed).standard_normal(shape, dtype=np.float32),
        grid=grid,
    )


@functools.cache
def vision_processor(vision: VisionConfig = TINY_VISION) -> VisionProcessor:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import (
        Qwen2VLImageProcessorPil as Processor,
    )

    processor = Processor(
        patch_size=2,
        merge_size=2,
        temporal_patch_size=2,
        size={"shortest_edge": 8 * 8, "longest_edge": 16 * 16},
    )
    return VisionProcessor(
        vision=vision, patcher=ImageProcessor(images=processor, videos=processor)
    )


def picture(seed: int, width: int = 8, height: int = 8) -> Image.Image:
    """Noise; of 8 x 8 pixels it takes 4 ids."""
    return Image.fromarray(
        np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    )


def placeholders(media: Mapping[str, Sequence[Any]]) -> list[int]:
    """Ids that show items, one after another, between start and end."""
    ids = []
    for kind, items in media.items():
        for item in items:
            ids += [
                START,
                *[TINY_VISION.placeholders[kind]] * vision_processor().patcher.count(kind, item),
                END,
            ]
    return ids


def seen_logprobs(
    params: Params, multimodal: MultimodalContext, config: DecoderConfig = TINY_VL
) -> np.ndarray:
    """Log-probs float64 [T, V] of one causal pass over a whole context: no cache, no packing."""
    vision = config.vision
    assert vision is not None
    patches = np.zeros((PATCHES, vision.patch_dim), np.float32)
    joined = np.concatenate([patches[:0], *(p.patches for p in multimodal.images)])
    patches[: len(joined)] = joined
    starts = np.cumsum([0, *(span.stop - span.start for span in multimodal.spans)])[:-1]
    index = np.full(LONGEST, -1, np.int32)
    index[: len(multimodal.ids)] = feature_index(
        len(multimodal.ids), multimodal.spans, starts.tolist()
    )
    positions = np.zeros((LONGEST, 3), np.int32)
    positions[: len(multimodal.ids)] = multimodal.positions
    ids = np.zeros(LONGEST, np.int32)
    ids[: len(multimodal.ids)] = multimodal.ids
    plan = layout(vision, [p.grid for p in multimodal.images], PATCHES)
    scores = np.asarray(_logits(config, params, ids, patches, plan, positions, index)).astype(
        np.float64
    )
    scores -= scores.max(-1, keepdims=True)
    return (scores - np.log(np.exp(scores).sum(-1, keepdims=True)))[: len(multimodal.ids)]


@functools.partial(jax.jit, static_argnums=0)
def _logits(
    config: DecoderConfig, params: Params, ids, patches, plan, positions, index
) -> jax.Array:
    model = Decoder.from_params(config, params)
    images = ImageInputs(positions[None], model.vision(patches, plan)[None], index[None])
    return model.logits(model(ids[None], images=images)[0])[0]


def seeing_trajectory(
    prompt: Sequence[int],
    *turns: tuple[Sequence[int], Mapping[str, Sequence[Any]]],
    index: int = 0,
    reward: float = 0.0,
    **fields: Any,
) -> Trajectory:
    """A trajectory of turns: what was sampled, and the items shown after it."""
    made_turns = [
        Turn(
            output=TokenOutput(
                token_ids=tuple(sampled),
                log_probs=(-1.0,) * len(sampled),
                policy_versions=(0,) * len(sampled),
                stop_reason=StopReason.EOS,
                context_digest="",
            ),
            appended_ids=tuple(placeholders(media)),
            appended_media={kind: tuple(items) for kind, items in media.items()},
        )
        for sampled, media in turns
    ]
    return Trajectory.from_turns(
        prompt_ids=prompt,
        turns=made_turns,
        trajectory_id=f"g-{index}",
        group_id="g",
        agent_name="tool_agent",
        finish_reason=FinishReason.ANSWER,
        reward=reward,
        **fields,
    )
