"""What a vLLM engine says of the model that it serves, for a diagnosis."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gpu_backend.launch import StartedEngine
from gpu_backend.settings import VllmSettings
from jax_agent_rl.models.tensor_samples import LayerOutput, TensorSample


class InspectableEngine:
    """The part of a backend that lets others look at what it serves."""

    _updater: Any

    async def tensor_samples(self) -> Mapping[str, TensorSample]:
        """A sample of every tensor as it is served; empty where tensors cannot be read back whole."""
        if not self._updater.placements:
            return {}
        (sampled,) = await self._updater.engine.collective_rpc("sample_tensors", args=(self._updater.placements,))
        return {name: TensorSample.from_json(saved) for name, saved in sampled.items()}

    async def layer_outputs(self, token_ids: Sequence[int]) -> Sequence[LayerOutput]:
        """Nothing: nobody can look between the layers of a compiled graph."""
        return ()


def served_precision(settings: VllmSettings, started: StartedEngine | None) -> str:
    """Of weights and activations; what vLLM makes of ``dtype: auto`` is known once it has started."""
    model = getattr(started.engine, "model_config", None) if started is not None else None
    return settings.dtype if model is None else str(model.dtype).removeprefix("torch.")
