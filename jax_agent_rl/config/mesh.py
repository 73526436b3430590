"""Device meshes of the learner and the engine, and the learner's processes."""

from __future__ import annotations

from pydantic import Field, model_validator

from jax_agent_rl.config.base import NonNegative, Positive, Section


class MeshConfig(Section):
    """Learner mesh. Its size is at most the number of devices, and exactly that with several processes."""

    data: Positive = Field(default=1, description="Data-parallel replicas.")
    fsdp: Positive = Field(default=1, description="Shards of every parameter (and of the batch).")
    expert: Positive = Field(default=1, description="Shards of every layer's experts (and of the batch).")
    context: Positive = Field(default=1, description="Shards of the tokens of every row: long contexts.")
    tensor: Positive = Field(default=1, description="Tensor-parallel shards.")

    @property
    def devices(self) -> int:
        """Number of devices."""
        return self.data * self.fsdp * self.expert * self.context * self.tensor


class EngineMeshConfig(Section):
    """The devices one jetstream engine is spread over."""

    expert: Positive = Field(
        default=1, description="Shards of every layer's experts; the rest is split over these, too."
    )
    tensor: Positive = Field(
        default=1, description="Tensor-parallel shards: heads, feed-forward, vocabulary and KV cache."
    )

    @property
    def devices(self) -> int:
        """Number of devices."""
        return self.expert * self.tensor


class MultihostConfig(Section):
    """Several processes (hosts) with one learner, all started with the same config except for ``process_id``."""

    coordinator: str | None = Field(
        default=None,
        description="host:port of process 0; auto: as jax finds it (Cloud TPU, Slurm, Kubernetes). Default: "
        "$JAX_COORDINATOR_ADDRESS, and without that one process.",
    )
    num_processes: Positive | None = Field(
        default=None, description="Number of processes; not needed where jax finds it."
    )
    process_id: NonNegative | None = Field(
        default=None, description="Number of this process; 0 leads: agents and tools run there."
    )
    timeout: Positive = Field(default=300, description="Seconds the processes wait for each other at the start.")

    @model_validator(mode="after")
    def _process_id_in_range(self) -> MultihostConfig:
        number, count = self.process_id, self.num_processes
        if number is not None and count is not None and number >= count:
            raise ValueError(
                f"learner.multihost.process_id={number} is not below learner.multihost.num_processes={count}; number "
                f"the processes from 0 to {count - 1}"
            )
        return self
