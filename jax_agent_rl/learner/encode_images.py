"""What the model reads of a micro-batch's pictures, inside the differentiated program: gradients reach the tower."""

from __future__ import annotations

from jax.sharding import Mesh

from jax_agent_rl.learner.optimized_params import Arrays
from jax_agent_rl.models.config import DecoderConfig, Params
from jax_agent_rl.models.vision.layout import ImageInputs, Layout
from jax_agent_rl.models.vision.tower import features


def encode_images(
    config: DecoderConfig, params: Params, batch: Arrays, *, remat: str, mesh: Mesh | None
) -> ImageInputs | None:
    """Looks at the pictures of a micro-batch (``RowPictures.micro_batch``); None if it shows none."""
    if "patches" not in batch:
        return None
    assert config.vision is not None  # a model of text is given no pictures
    layout = Layout(*(batch[f"patch_{name}"] for name in Layout._fields))
    found = features(config.vision, params["vision"], batch["patches"], layout, remat=remat, mesh=mesh)
    return ImageInputs(batch["rope_positions"], found, batch["feature_index"])
