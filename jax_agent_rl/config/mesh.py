"""Device meshes of the learner and the engine, and the learner's processes."""

from __future__ import annotations

from pydantic import Field, model_validator

from jax_agent_rl.config.base import NonNegative, Positive, Section


class MeshConfig(Section):
    """Learner mesh. Its size is at most the number of devices, and exactly that with several processes."""

    data: Positive = Field(default=1, description="Data-parallel replicas.")
    fsdp: Positive = Field(default=1, description="Shards of every parameter (and of the batch).")
    expert: Positive = Field(default=1, description="Shards of every layer's experts (and of the batch).")
    context: Positive = Field(default=1, description="Shards of the tokens of every row, for long contexts.")
    tensor: Positive = Field(default=1, description="Tensor-parallel shards.")

    @property
    def devices(self) -> int:
        """Number of devices."""
        return self.data * self.fsdp * self.expert * self.context * self.tensor


class EngineMeshConfig(Section):
    """Devices of the jetstream engines of one process: ``data`` engines of ``expert`` x ``tensor`` devices each."""

    data: Positive | None = Field(
        default=None,
        description="Engines side by side, each with its own weights and KV cache; they share the requests. null: as "
        "many as the process's devices allow on TPUs and GPUs, one on CPUs.",
    )
    expert: Positive = Field(
        default=1, description="Shards of every layer's experts; other weights are split over these devices, too."
    )
    tensor: Positive | None = Field(
        default=None,
        description="Tensor-parallel shards: heads, feed-forward, vocabulary and KV cache. null: as few as have memory "
        "for the weights and the KV cache, beside the learner if it shares the devices.",
    )

    @property
    def engine_devices(self) -> int:
        """Number of devices of one engine; at least so many if ``tensor`` is null."""
        return self.expert * (self.tensor or 1)

    @property
    def devices(self) -> int:
        """Number of devices of all engines; at least so many if ``data`` or ``tensor`` are null."""
        return (self.data or 1) * self.engine_devices


class MultihostConfig(Section):
    """Several processes (hosts) with one learner, started with the same config except for ``process_id``."""

    coordinator: str | None = Field(
        default=None,
        description="host:port of process 0. auto: as JAX detects it (Cloud TPU, Slurm, Kubernetes). null: "
        "$JAX_COORDINATOR_ADDRESS; if unset, one process.",
    )
    num_processes: Positive | None = Field(default=None, description="Number of processes; null: as JAX detects it.")
    process_id: NonNegative | None = Field(
        default=None, description="Number of this process; process 0 also runs agents and tools."
    )
    timeout: Positive = Field(default=300, description="Seconds processes wait for each other at the start.")

    @model_validator(mode="after")
    def _process_id_in_range(self) -> MultihostConfig:
        number, count = self.process_id, self.num_processes
        if number is not None and count is not None and number >= count:
            raise ValueError(
                f"learner.multihost.process_id={number} is not below learner.multihost.num_processes={count}; number "
                f"the processes from 0 to {count - 1}"
            )
        return self
