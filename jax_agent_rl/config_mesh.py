"""What the learner runs on: the mesh of devices, and the processes that hold them."""

from __future__ import annotations

from pydantic import Field

from jax_agent_rl.config_base import NonNegative, Positive, Section


class MeshConfig(Section):
    """Learner mesh. The product is at most the number of devices, and over several processes just that."""

    data: Positive = Field(1, description="Data-parallel replicas.")
    fsdp: Positive = Field(1, description="Shards of every parameter (and of the batch).")
    expert: Positive = Field(1, description="Shards of every layer's experts (and of the batch).")
    context: Positive = Field(1, description="Shards of the tokens of every row: long contexts.")
    tensor: Positive = Field(1, description="Tensor-parallel shards.")

    @property
    def devices(self) -> int:
        """How many it takes."""
        return self.data * self.fsdp * self.expert * self.context * self.tensor


class MultihostConfig(Section):
    """Several processes (hosts) with one learner; every one is started with the same config but its ``process_id``."""

    coordinator: str | None = Field(
        None,
        description="host:port of process 0; auto: as jax finds it (Cloud TPU, Slurm, Kubernetes). Default: "
        "$JAX_COORDINATOR_ADDRESS, and without that one process.",
    )
    num_processes: Positive | None = Field(None, description="How many; not needed where jax finds it.")
    process_id: NonNegative | None = Field(None, description="Which one this is; 0 samples, too.")
    timeout: Positive = Field(300, description="Seconds the processes wait for each other at the start.")
