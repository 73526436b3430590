"""The ``learner`` section: optimizers, LoRA, packed rows, and device meshes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from jax_agent_rl.config.base import (
    Distinct,
    Expression,
    NonNegative,
    Positive,
    Section,
    WhenKey,
    WhenModelHasVision,
)


class MeshConfig(Section):
    """Learner mesh.

    Its size is at most the number of devices, and exactly that with several processes.
    """

    data: Positive = Field(default=1, description="Data-parallel replicas.")
    fsdp: Positive = Field(default=1, description="Shards of every parameter (and of the batch).")
    expert: Positive = Field(
        default=1, description="Shards of every layer's experts (and of the batch)."
    )
    context: Positive = Field(
        default=1, description="Shards of the tokens of every row, for long contexts."
    )
    tensor: Positive = Field(default=1, description="Tensor-parallel shards.")

    @property
    def devices(self) -> int:
        """Number of devices."""
        return self.data * self.fsdp * self.expert * self.context * self.tensor


class MultihostConfig(Section):
    """Several processes (hosts) with one learner.

    They are started with the same configuration except for ``process_id``.
    """

    coordinator: str | None = Field(
        default=None,
        description=(
            "host:port of process 0. auto: as JAX detects it (Cloud TPU, Slurm, Kubernetes). null:"
            " $JAX_COORDINATOR_ADDRESS; if unset, one process."
        ),
    )
    num_processes: Positive | None = Field(
        default=None, description="Number of processes; null: as JAX detects it."
    )
    process_id: NonNegative | None = Field(
        default=None, description="Number of this process; process 0 also runs agents and tools."
    )
    timeout: Positive = Field(
        default=300, description="Seconds processes wait for each other at the start."
    )

    @property
    def is_one_process(self) -> bool:
        """Whether these settings ask for no second process."""
        return self.coordinator is None and self.num_processes in (None, 1)

    @model_validator(mode="after")
    def _process_id_in_range(self) -> MultihostConfig:
        number = self.process_id
        count = self.num_processes
        if number is not None and count is not None and number >= count:
            raise ValueError(
                f"learner.multihost.process_id={number} is not below"
                f" learner.multihost.num_processes={count}; number the processes from 0 to"
                f" {count - 1}"
            )
        return self


LoraTarget = Literal[
    "q_proj",
    "k_proj",
    "v_proj",
    "q_a_proj",
    "q_b_proj",
    "kv_a_proj_with_mqa",
    "kv_b_proj",
    "o_proj",
    "gate_proj",
    "up_proj",
    "down_proj",
    # of Gemma 4's per-layer inputs
    "per_layer_input_gate",
    "per_layer_projection",
    # of delta nets
    "in_proj_qkv",
    "in_proj_z",
    "in_proj_b",
    "in_proj_a",
    "in_proj_qkvz",
    "in_proj_ba",
    "out_proj",
]


class LoraConfig(Section):
    """Low-rank adapters in place of full training.

    The fields mean the same as in PEFT's ``LoraConfig``.
    """

    rank: Positive = Field(default=16, description="Rank r of the adapters.")
    alpha: float = Field(default=32.0, gt=0, description="Adapters are scaled by alpha / rank.")
    targets: (
        Literal["all-linear"] | Annotated[tuple[LoraTarget, ...], Distinct, Field(min_length=1)]
    ) = Field(
        default="all-linear",
        description=(
            "Linear layers that get adapters, by their Hugging Face names; all-linear: all that the"
            " model has, but for embeddings, head, routers and experts."
        ),
    )
    quantize: Literal["none", "int8", "nf4"] = Field(
        default="none",
        description="Precision of the targets' frozen weights (QLoRA); needs the extra `qlora`.",
    )
    seed: NonNegative = Field(default=0, description="Seed of the adapters' initial values.")

    def targets_text(self) -> str:
        """Return the targets for messages."""
        if self.targets == "all-linear":
            return "all-linear"
        return ", ".join(self.targets)


class OptimizerSection(Section):
    """An optimizer of optax, for the policy (``learner``) and the critic."""

    optimizer: Literal["adamw", "muon", "adafactor"] = Field(
        default="adamw",
        description=(
            "adamw; muon: orthogonalized momentum for the matrices of linear layers and adapters,"
            " at AdamW's scale of updates, and AdamW for the rest; adafactor: second moments of"
            " rows and columns only."
        ),
    )
    learning_rate: float = Field(default=1e-6, gt=0, description="Peak learning rate.")
    lr_scheduler_type: Literal["constant", "linear", "cosine", "wsd"] = Field(
        default="constant",
        description=(
            "Learning rate after the warm-up: constant, a linear or cosine decay over the remaining"
            " trainer.steps, or wsd: constant, then linear. It changes between training steps only;"
            " all updates of a step use the same rate."
        ),
    )
    lr_warmup_steps: NonNegative = Field(
        default=0,
        description=(
            "Training steps of linear warm-up; the first step has 1/lr_warmup_steps of the peak."
        ),
    )
    lr_decay_ratio: float = Field(
        default=0.1,
        gt=0,
        le=1,
        description="wsd: share of all training steps, the last ones, in which the rate decays.",
    )
    min_lr_ratio: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="linear, cosine, wsd: final share of the peak learning rate.",
    )
    weight_decay: float = Field(
        default=0.0, ge=0, description="Decoupled weight decay, times the learning rate."
    )
    no_weight_decay: tuple[Expression, ...] = Field(
        default=("norm",),
        description=(
            "Regular expressions: parameters whose path (embed, layers.q, layers.input_norm) has a"
            " match are not decayed."
        ),
    )
    adam_b1: float = Field(default=0.9, ge=0, lt=1, description="AdamW first-moment decay.")
    adam_b2: float = Field(default=0.95, ge=0, lt=1, description="AdamW second-moment decay.")
    adam_eps: float = Field(
        default=1e-8, gt=0, description="AdamW epsilon, added to the root of the second moment."
    )
    max_grad_norm: float = Field(default=1.0, gt=0, description="Global gradient-norm clip.")

    @property
    def averaging(self) -> float:
        """Decay of a moving average of the parameters; 0: none is kept."""
        return 0.0

    def problems(self, name: str) -> Iterator[str]:
        """Yield the keys of the section that are set although nothing reads them.

        Optimizers and schedules read different keys.

        Args:
            name: path of the section, ``learner`` or ``critic``.
        """
        schedule = self.lr_scheduler_type
        if schedule == "constant" and self.changed("min_lr_ratio"):
            yield (
                f"{name}.min_lr_ratio is read only with {name}.lr_scheduler_type linear, cosine or"
                f" wsd, which is {schedule!r}; remove it or change that"
            )

        if schedule != "wsd" and self.changed("lr_decay_ratio"):
            yield (
                f"{name}.lr_decay_ratio is read only with {name}.lr_scheduler_type=wsd, which is"
                f" {schedule!r}; remove it"
            )

        if not self.weight_decay and self.changed("no_weight_decay"):
            yield (
                f"{name}.no_weight_decay is read only with {name}.weight_decay > 0; set that, or"
                " remove it"
            )

        if self.optimizer == "adafactor":
            for key in ("adam_b1", "adam_b2", "adam_eps"):
                if self.changed(key):
                    yield f"{name}.{key} is not read by {name}.optimizer=adafactor; remove it"


class RowsConfig(OptimizerSection):
    """Rows, precision, adapters and devices of a learner, whatever it learns from."""

    pack_length: Positive = Field(
        default=1024,
        description=(
            "Tokens per packed row, the unit of gradient micro-batches. On a CPU, rows of 512"
            " tokens or more that are at most half full are halved."
        ),
    )
    micro_batch_size: Positive = Field(
        default=1, description="Packed rows in one forward/backward (per data shard)."
    )
    share_prefixes: bool = Field(
        default=True, description="Compute tokens shared by several sequences of a row once."
    )
    remat: Literal["none", "dots", "full"] = Field(
        default="dots",
        description=(
            "What the backward pass recomputes. none: nothing. dots: all but matrix products and"
            " attention. full: whole layers."
        ),
    )
    compute_dtype: Literal["float32", "bfloat16"] = Field(
        default="float32",
        description=(
            "Precision of matrix products and activations. Parameters, gradient sums, optimizer"
            " state, log-probs and losses stay in float32."
        ),
    )
    router_aux_loss_coef: float = Field(
        default=0.0,
        ge=0,
        description=(
            "Weight of the load-balancing loss of mixture-of-experts models. If positive, each"
            " update starts with a forward pass that counts how its tokens are routed."
        ),
    )
    max_nonfinite_steps: Positive = Field(
        default=3,
        description=(
            "Stop after this many training steps in a row in which every update of a model had a"
            " non-finite gradient and was skipped. The policy, the critic and each adapter count"
            " their own."
        ),
    )
    lora: LoraConfig | None = Field(
        default=None,
        description="Train adapters and freeze the model; null trains the whole model.",
    )
    mesh: MeshConfig = Field(default_factory=MeshConfig)

    @model_validator(mode="after")
    def _context_shards_divide_rows(self) -> Self:
        missing_tokens = -self.pack_length % self.mesh.context
        if missing_tokens:
            next_length = self.pack_length + missing_tokens
            raise ValueError(
                f"learner.pack_length={self.pack_length} is not divisible by"
                f" learner.mesh.context={self.mesh.context}; set"
                f" learner.pack_length={next_length}, or lower learner.mesh.context"
            )
        return self


class LearnerConfig(RowsConfig):
    """The optimizer step."""

    num_minibatches: Positive = Field(
        default=1, description="Number of mini-batches (optimizer updates) per rollout batch."
    )
    ppo_epochs: Positive = Field(default=1, description="Passes over each rollout batch.")
    ema_decay: Annotated[float, WhenKey("trainer.mode", "sync")] = Field(
        default=0.0,
        ge=0,
        lt=1,
        description=(
            "Decay, per optimizer update, of an exponential moving average of the trained"
            " parameters. Held-out evaluations sample from it; `export --ema` and `eval --run RUN"
            " --ema` use it. 0: none is kept. The asynchronous modes keep none: their engines"
            " sample for training while they evaluate."
        ),
    )
    row_patches: Annotated[Positive | None, WhenModelHasVision()] = Field(
        default=None,
        description=(
            "Maximum number of image patches in a packed row, for vision models; null: as many as"
            " its tokens can show. Fewer save memory, but a trajectory with more ends the run."
        ),
    )
    freeze_vision: Annotated[bool, WhenModelHasVision()] = Field(
        default=False, description="Freeze the vision tower and train the decoder alone."
    )
    multihost: MultihostConfig = Field(default_factory=MultihostConfig)

    @property
    def averaging(self) -> float:
        return self.ema_decay
