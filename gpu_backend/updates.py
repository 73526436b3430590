"""New weights for a running engine, proved before a token of theirs is served.

::

    check files (names, shapes)      wrong: refused, the old weights serve on
      ─► load in place ─► read back every tensor ─► forget cached prefixes, recompute frozen requests' KV
      ─► probe: the learner's log-probs of a few sequences, reproduced by the engine
                                     wrong from here on: the engine holds weights nobody asked for and must not serve
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from gpu_backend.settings import VllmSettings
from gpu_backend.transfer import load_from_device
from gpu_backend.weights import Checkpoint, Shapes, differences, read_update
from jax_agent_rl.errors import WeightUpdateError
from jax_agent_rl.rollout.protocol import WeightUpdate
from jax_agent_rl.utils.checksums import check_files
from jax_agent_rl.utils.weight_probe import LogprobProbe

logger = logging.getLogger(__name__)
FILES, DEVICE = "safetensors", "cuda_ipc"
_FIRST_IN_QUEUE = -(1 << 30)


class WeightUpdater:
    """Puts weights into one engine.

    Args:
        engine: ``AsyncLLM``.
        checkpoint: what its model consists of.
        cpu: it runs on the CPU build.
        cuda: it runs on CUDA.
        tpu: it runs on TPUs, where only the probe shows what arrived.
        fixed: why its weights cannot be replaced; None if they can.
    """

    def __init__(
        self,
        engine: Any,
        checkpoint: Checkpoint,
        settings: VllmSettings,
        *,
        cpu: bool,
        cuda: bool,
        tpu: bool = False,
        fixed: str | None = None,
    ) -> None:
        self.engine: Any = engine
        self._checkpoint = checkpoint
        self._settings = settings
        self._limits = settings.tolerances(cpu=cpu)
        self._fixed = fixed
        self._tpu = tpu
        self.kinds = frozenset({FILES, DEVICE} if cuda else {FILES} if fixed is None else ())
        # Tensor-parallel ranks hold slices, so reading back whole tensors works on a single rank only; and in JAX the
        # parameters have other forms.
        readable = settings.tensor_parallel_size == 1 and not tpu
        self.placements = {n: p.to_wire() for n, p in checkpoint.placements().items()} if readable else {}
        self.last_difference: tuple[float, float] | None = None
        """(largest, mean) log-prob difference of the last probe."""

    def check(self, update: WeightUpdate, *, served: int) -> LogprobProbe | None:
        """Refuses what can be seen to be wrong before the model is touched; returns the update's probe.

        Raises:
            WeightUpdateError: refused; nothing has changed.
        """
        if self._fixed is not None:
            raise WeightUpdateError(self._fixed)
        if update.kind not in self.kinds:
            raise WeightUpdateError(
                f"this vLLM backend takes weights of kind {sorted(self.kinds)}, got kind={update.kind!r}"
            )
        if update.version <= served:
            raise WeightUpdateError(f"version {update.version} is not newer than {served}, which is served")
        if update.partial and self._tpu:
            raise WeightUpdateError("on TPUs vLLM takes whole updates only; send every tensor with partial=False")
        shapes, probe = _contents(update)
        self._checkpoint.check(shapes, partial=update.partial)
        if probe is None and (self._settings.require_probe or self._tpu):
            way_out = ", or set rollout.vllm.require_probe=false" if self._settings.require_probe else ""
            raise WeightUpdateError(
                "the update brings no log-prob probe, so a wrong load could not be noticed; write it with "
                f"jax_agent_rl.learner.export.WeightFiles{way_out}"
            )
        longest = max((len(ids) for ids in probe.ids), default=0) if probe else 0
        if longest >= self._settings.max_model_len:
            raise WeightUpdateError(
                f"the probe has a sequence of {longest} ids, which does not fit max_model_len="
                f"{self._settings.max_model_len}"
            )
        return probe

    async def load(self, update: WeightUpdate) -> None:
        """Copies the weights in; tokens sampled from now on carry the new version.

        Raises:
            WeightUpdateError: they did not all arrive. The model is unusable until a whole update succeeds.
        """
        engine = self.engine
        if update.kind == FILES:
            paths = [str(path) for path in update.payload]
            await engine.collective_rpc("load_weight_files", args=(paths,))
            if self.placements:
                _all_landed(await engine.collective_rpc("weights_not_landed", args=(paths, self.placements)))
        else:
            await load_from_device(engine, update.payload)
        # Frozen requests give up their KV, too: it is recomputed under the new weights when they go on.
        await engine.reset_prefix_cache(reset_running_requests=True)
        await engine.reset_encoder_cache()
        await engine.update_weight_version(str(update.version))

    async def prove(self, probe: LogprobProbe, name: str) -> None:
        """Compares the engine's log-probs with the learner's. The engine must be running.

        Raises:
            WeightUpdateError: they differ by more than rounding.
        """
        measured = [await self._measure(ids, f"{name}-{i}") for i, ids in enumerate(probe.ids)]
        largest, mean = self.last_difference = differences(probe, measured)
        max_largest, max_mean = self._limits
        if not (largest <= max_largest and mean <= max_mean):
            raise WeightUpdateError(
                f"the engine's log-probs are not the learner's: they differ by up to {largest:.2g} (mean {mean:.2g}), "
                f"allowed are {max_largest:.2g} ({max_mean:.2g}; rollout.vllm.max_logprob_difference and "
                "mean_logprob_difference). The engine holds a model nobody asked for"
            )

    async def _measure(self, ids: Sequence[int], request_id: str) -> list[float]:
        from vllm import SamplingParams

        params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False, ignore_eos=True)
        prompt = {"prompt_token_ids": list(ids)}
        async for output in self.engine.generate(prompt, params, request_id, priority=_FIRST_IN_QUEUE):
            reported = output.prompt_logprobs
        return [float(reported[i][token].logprob) for i, token in enumerate(ids) if i > 0]


def _contents(update: WeightUpdate) -> tuple[Shapes, LogprobProbe | None]:
    if update.kind == FILES:
        if isinstance(update.payload, str | bytes):
            raise WeightUpdateError(f"payload must be a list of file paths, got {type(update.payload).__name__}")
        paths = [str(path) for path in update.payload]
        check_files(paths, update.digests)
        return read_update(paths)
    return {name: tuple(array.shape) for name, array in update.payload.tensors.items()}, update.payload.probe


def _all_landed(not_landed_by_worker: Sequence[Sequence[str]]) -> None:
    names = sorted({name for names in not_landed_by_worker for name in names})
    if names:
        raise WeightUpdateError(
            f"{len(names)} tensors did not arrive in vLLM's model, e.g. {names[:3]}: its loader skipped them or "
            "stores them in a way gpu_backend/weights.py does not describe"
        )
