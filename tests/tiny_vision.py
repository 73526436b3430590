"""A random Qwen2.5-VL small enough for unit tests, and pictures for it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from jax_agent_rl.models.config import DecoderConfig, Rope, VisionConfig
from jax_agent_rl.patches import Grid, Picture
from tests.tiny import TINY

IMAGE, VIDEO = 90, 91
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
    vision_start_token_id=92,
    vision_end_token_id=93,
)
TINY_VL: DecoderConfig = replace(
    TINY, family="qwen2_5_vl", qkv_bias=True, rope=Rope(sections=(1, 1, 2)), vision=TINY_VISION
)


def drawn(seed: int, grid: Grid, kind: str = "image") -> Picture:
    """Noise, as an image processor would have scaled it."""
    shape = (int(np.prod(grid)), TINY_VISION.patch_dim)
    return Picture(kind=kind, patches=np.random.default_rng(seed).standard_normal(shape, dtype=np.float32), grid=grid)
