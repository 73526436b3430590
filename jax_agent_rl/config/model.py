"""The ``model`` and ``data`` sections: what a run starts from."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, model_validator

from jax_agent_rl.config.base import Positive, Section
from jax_agent_rl.config.conditions import WhenKey, WhenModelHasVision


class ModelConfig(Section):
    """The policy."""

    path: str = Field(
        description="Folder with config.json, model.safetensors and tokenizer files, or owner/name[@revision] on the "
        "Hugging Face Hub, downloaded into its cache."
    )
    min_pixels: Annotated[Positive | None, WhenModelHasVision()] = Field(
        default=None,
        description="Fewest pixels an image or a frame is scaled to, in the engine and when ids are counted; null: as "
        "the model's processor files say. Set it together with max_pixels.",
    )
    max_pixels: Annotated[Positive | None, WhenModelHasVision()] = Field(
        default=None, description="Most pixels an image or a frame is scaled to."
    )

    @property
    def pixels(self) -> tuple[int, int] | None:
        """``(min_pixels, max_pixels)``; None leaves both to the model's processor files."""
        return None if self.min_pixels is None or self.max_pixels is None else (self.min_pixels, self.max_pixels)

    @model_validator(mode="after")
    def _bounds(self) -> Self:
        low, high = self.min_pixels, self.max_pixels
        if (low is None) != (high is None):
            raise ValueError(f"min_pixels={low}, max_pixels={high}: set both or neither")
        if low is not None and high is not None and low > high:
            raise ValueError(f"min_pixels={low} exceeds max_pixels={high}; lower it")
        return self


class DataConfig(Section):
    """Rows: JSON Lines or Parquet with `prompt`, `agent_name`, `data_source`, `reward_model.ground_truth`."""

    train: str = Field(description="Rows to train on (.jsonl or .parquet).")
    eval: str | None = Field(default=None, description="Rows to evaluate on; never trained on.")
    eval_limit: Annotated[Positive | None, WhenKey("data.eval")] = Field(
        default=None, description="Evaluate on the first this many rows."
    )
