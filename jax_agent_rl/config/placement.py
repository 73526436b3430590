"""The keys of ``rollout`` that say where the engines run. Part of :mod:`jax_agent_rl.config`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from jax_agent_rl.config.base import NonNegative, Positive, Section
from jax_agent_rl.config.conditions import WhenKey

_IN_ACTORS = WhenKey("rollout.placement", "separate", "hybrid")


class PlacementSection(Section):
    """Beside the learner, or elsewhere."""

    placement: Literal["colocated", "separate", "hybrid"] = Field(
        default="colocated",
        description="colocated: one engine on the learner's devices, in each of its processes (hosts). separate: "
        "engines in Ray actors on resources of their own. hybrid: those, and the colocated one while the learner has "
        "nothing to do.",
    )
    num_engines: Annotated[Positive, _IN_ACTORS] = Field(
        default=1, description="Engines in Ray actors (placement separate and hybrid)."
    )
    gpus_per_engine: Annotated[NonNegative, _IN_ACTORS] = Field(
        default=0, description="GPUs of each of them; 0 runs them on CPUs."
    )
    ray_address: Annotated[str | None, _IN_ACTORS] = Field(
        default=None,
        description="Of the Ray cluster they run on; null: RAY_ADDRESS, and without that one of this machine's own, "
        "which ends with the run.",
    )
    sleep_during_update: bool = Field(
        default=False,
        description="The colocated engine gives its memory (KV cache, weights) back while the learner updates; with "
        "placement colocated in trainer.mode=sync only.",
    )


def placement_problems(
    rollout: PlacementSection, *, backend: str, mode: str, deterministic: bool, devices: int
) -> Iterator[str]:
    """Every inconsistency of these keys, each with its fix.

    Args:
        backend: ``rollout.backend``.
        mode: ``trainer.mode``.
        deterministic: ``rollout.deterministic``.
        devices: that one engine is spread over.
    """
    where = rollout.placement
    if where == "colocated":
        if rollout.sleep_during_update and mode != "sync":
            yield (
                f"rollout.sleep_during_update: with rollout.placement=colocated and trainer.mode={mode} the engine "
                f"samples while the "
                "learner updates; set trainer.mode=sync, rollout.placement=hybrid, or rollout.sleep_during_update=false"
            )
    elif backend == "remote":
        yield (
            f"rollout.placement={where} is of engines that the run starts, but rollout.backend=remote runs where its "
            "servers are; remove rollout.placement, or set rollout.backend=jetstream or vllm"
        )
    elif deterministic:
        yield (
            f"rollout.deterministic shares one program with the learner, but rollout.placement={where} runs engines in "
            "other processes; set rollout.placement=colocated, or rollout.deterministic=false"
        )
    if rollout.sleep_during_update and (where == "separate" or backend == "remote"):
        yield "rollout.sleep_during_update: no engine shares the learner's devices; remove it"
    if rollout.gpus_per_engine not in (0, devices):
        key = "rollout.vllm.tensor_parallel_size" if backend == "vllm" else "rollout.jetstream.mesh"
        yield f"rollout.gpus_per_engine={rollout.gpus_per_engine}: set {devices}, which {key} needs, or 0 for CPUs"
