"""The ``learner`` section: the optimizer step, LoRA, and the devices it runs on."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from jax_agent_rl.config.base import Distinct, NonNegative, OptimizerSection, Positive, Section
from jax_agent_rl.config.conditions import WhenModelHasVision
from jax_agent_rl.config.mesh import MeshConfig, MultihostConfig

LoraTarget = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


class LoraConfig(Section):
    """Low-rank adapters in place of full training; see PEFT's ``LoraConfig`` for the fields' meaning."""

    rank: Positive = Field(default=16, description="Rank r of the adapters.")
    alpha: float = Field(default=32.0, gt=0, description="Adapters are scaled by alpha / rank.")
    targets: Annotated[tuple[LoraTarget, ...], Distinct] = Field(
        default=("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
        min_length=1,
        description="Linear layers that get adapters, by their Hugging Face names.",
    )
    quantize: Literal["none", "int8", "nf4"] = Field(
        default="none", description="Precision of the targets' frozen weights (QLoRA); needs the extra `qlora`."
    )
    seed: NonNegative = Field(default=0, description="Seed of the adapters' initial values.")


class LearnerConfig(OptimizerSection):
    """The optimizer step."""

    num_minibatches: Positive = Field(
        default=1, description="Number of mini-batches (optimizer updates) per rollout batch."
    )
    ppo_epochs: Positive = Field(default=1, description="Passes over each rollout batch.")
    pack_length: Positive = Field(
        default=1024, description="Tokens per packed row, the unit of gradient micro-batches."
    )
    micro_batch_size: Positive = Field(default=1, description="Packed rows in one forward/backward (per data shard).")
    share_prefixes: bool = Field(
        default=True, description="Compute tokens shared by several trajectories of a row once."
    )
    row_patches: Annotated[Positive | None, WhenModelHasVision()] = Field(
        default=None,
        description="Maximum number of image patches in a packed row, for vision models; null: as many as its tokens "
        "can show. Fewer save memory, but a trajectory with more ends the run.",
    )
    freeze_vision: Annotated[bool, WhenModelHasVision()] = Field(
        default=False, description="Freeze the vision tower and train the decoder alone."
    )
    remat: Literal["none", "dots", "full"] = Field(
        default="dots",
        description="What the backward pass recomputes. none: nothing. dots: all but matrix products (and attention, "
        "on CPUs). full: whole layers.",
    )
    compute_dtype: Literal["float32", "bfloat16"] = Field(
        default="float32",
        description="Precision of matrix products and activations. Parameters, gradient sums, optimizer state, "
        "log-probs and losses stay in float32.",
    )
    router_aux_loss_coef: float = Field(
        default=0.0,
        ge=0,
        description="Weight of the load-balancing loss of mixture-of-experts models. If positive, each update starts "
        "with a forward pass that counts how its tokens are routed.",
    )
    max_nonfinite_steps: Positive = Field(default=3, description="Stop after this many consecutive non-finite steps.")
    lora: LoraConfig | None = Field(
        default=None, description="Train adapters and freeze the model; null trains the whole model."
    )
    mesh: MeshConfig = Field(default_factory=MeshConfig)
    multihost: MultihostConfig = Field(default_factory=MultihostConfig)

    @model_validator(mode="after")
    def _context_shards_divide_rows(self) -> LearnerConfig:
        rest = -self.pack_length % self.mesh.context
        if rest:
            raise ValueError(
                f"learner.pack_length={self.pack_length} is not divisible by learner.mesh.context={self.mesh.context}; "
                f"set learner.pack_length={self.pack_length + rest}, or lower learner.mesh.context"
            )
        return self
