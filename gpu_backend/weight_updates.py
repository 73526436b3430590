"""New weights for a running engine, verified before any token is served from them.

::

    check files (names, shapes)      wrong: refused, the old weights serve on
      ─► load in place ─► read back every tensor
      ─► drop cached prefixes, recompute the KV of frozen requests
      ─► probe: the learner's log-probs of a few sequences, reproduced by the engine
                                     wrong after loading: the engine must not serve

Imports no vLLM, so that tests need none.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from gpu_backend.settings import Platform, VllmSettings
from gpu_backend.weight_mapping import Checkpoint, Shapes, read_shapes
from jax_agent_rl.errors import ModelError, WeightUpdateError
from jax_agent_rl.models.tensors import TensorSample
from jax_agent_rl.rollout.protocol import BROADCAST, CUDA_IPC, FILES, WeightUpdate
from jax_agent_rl.utils.text import counted
from jax_agent_rl.utils.weight_transfer import LogprobProbe, check_files

logger = logging.getLogger(__name__)
_KINDS: Mapping[Platform, frozenset[str]] = {
    "cpu": frozenset({FILES, BROADCAST}),
    "cuda": frozenset({FILES, BROADCAST, CUDA_IPC}),
    "tpu": frozenset({FILES}),
    "other": frozenset({FILES, BROADCAST}),
}
"""Kinds of updates that an engine takes."""
_FIRST_IN_QUEUE = -(1 << 30)


class WeightUpdater:
    """Loads weights into one engine.

    Args:
        engine: ``AsyncLLM``.
        checkpoint: tensors of its model.
        platform: what it runs on; on TPUs only the probe shows what arrived.
        why_fixed: why its weights cannot be replaced; None if they can.
    """

    def __init__(
        self,
        engine: Any,
        checkpoint: Checkpoint,
        settings: VllmSettings,
        platform: Platform,
        *,
        why_fixed: str | None = None,
    ) -> None:
        self.engine: Any = engine
        self._checkpoint = checkpoint
        self._settings = settings
        self._tolerances = settings.tolerances(platform)
        self._why_fixed = why_fixed
        self._is_tpu = platform == "tpu"

        self.kinds: frozenset[str] = frozenset()
        if why_fixed is None:
            self.kinds = _KINDS[platform]

        # Tensor-parallel ranks hold slices, so reading back complete tensors works on a single rank
        # only; and in JAX the parameters have other forms.
        self.placements: dict[str, tuple[Any, ...]] = {}
        if settings.tensor_parallel_size == 1 and not self._is_tpu:
            for name, placement in checkpoint.placements().items():
                self.placements[name] = tuple(placement)  # as it travels to the worker
        self.last_difference: tuple[float, float] | None = None
        """(largest, mean) log-prob difference of the last probe."""

    def check(self, update: WeightUpdate, *, served: int) -> None:
        """Refuse wrong updates before the model is touched.

        Args:
            served: version of the weights that are served.

        Raises:
            WeightUpdateError: refused; nothing has changed.
        """
        if self._why_fixed is not None:
            raise WeightUpdateError(self._why_fixed)
        if update.partial and self._is_tpu:
            raise WeightUpdateError(
                "on TPUs vLLM takes whole updates only; send every tensor with partial=False"
            )
        check_update(
            update,
            self._checkpoint,
            served=served,
            kinds=self.kinds,
            max_model_len=self._settings.max_model_len,
            probe_key=None if self._is_tpu else "rollout.vllm.require_probe",
            require_probe=self._settings.require_probe or self._is_tpu,
        )

    async def load(self, update: WeightUpdate) -> None:
        """Load the weights; tokens sampled from now on carry the new version.

        Raises:
            WeightUpdateError: they did not all arrive. The model is unusable until a whole update
                succeeds.
        """
        engine = self.engine  # closing forgets it, also in the middle of an update
        if update.kind == FILES:
            await self._load_files([str(path) for path in update.payload])
        elif update.kind == BROADCAST:
            await self.transfer({"broadcast": asdict(update.payload)})
        else:
            await self._load_exported(update.payload)

        # Frozen requests lose their KV as well: it is recomputed under the new weights when they
        # continue.
        await engine.reset_prefix_cache(reset_running_requests=True)
        await engine.reset_encoder_cache()
        await engine.update_weight_version(str(update.version))

    async def _load_files(self, paths: Sequence[str]) -> None:
        """Load files, and read back every tensor where that is possible."""
        engine = self.engine
        if self._is_tpu:
            await engine.collective_rpc("replace_tpu_weights", args=(paths,))
        else:
            await self.transfer({"paths": paths})
        if not self.placements:
            return

        names_by_worker = await engine.collective_rpc(
            "weights_not_landed", args=(paths, self.placements)
        )
        missing: set[str] = set()
        missing.update(*names_by_worker)
        if missing:
            raise WeightUpdateError(
                f"{counted(len(missing), 'tensor')} did not arrive in vLLM's model, e.g."
                f" {sorted(missing)[:3]}: its loader skipped them or stores them in a way"
                " gpu_backend/weight_mapping.py does not describe"
            )

    async def _load_exported(self, arrays: Mapping[str, Any]) -> None:
        """Load arrays of this process on a GPU that the workers see."""
        import torch

        from gpu_backend import cuda_ipc

        update_info, copies = await asyncio.to_thread(cuda_ipc.export, arrays)
        await self.transfer(update_info)
        # Free the memory that was exported, and that neither side uses any more.
        del copies
        torch.cuda.ipc_collect()

    async def transfer(self, update_info: Mapping[str, Any]) -> None:
        """Run vLLM's calls of one update.

        If cancelled, they run to the end first: vLLM would refuse to start another update.
        """
        session = asyncio.ensure_future(_run_transfer(self.engine, update_info))
        try:
            await asyncio.shield(session)
        except asyncio.CancelledError:
            await asyncio.gather(session, return_exceptions=True)
            raise

    async def verify(self, probe: LogprobProbe, name: str) -> None:
        """Compare the engine's log-probs with the learner's. The engine must be running.

        Args:
            name: prefix of the probe's request ids.

        Raises:
            WeightUpdateError: they differ by more than rounding.
        """
        log_probs = []
        for number, ids in enumerate(probe.ids):
            log_probs.append(await self._measure(ids, f"{name}-{number}"))

        self.last_difference = probe.differences(log_probs)
        require_agreement(self.last_difference, self._tolerances, section="rollout.vllm")

    async def tensor_samples(self) -> Mapping[str, TensorSample]:
        """Return a sample of every served tensor; empty where complete tensors cannot be read."""
        if not self.placements:
            return {}
        (samples,) = await self.engine.collective_rpc("sample_tensors", args=(self.placements,))
        return {name: TensorSample.from_json(sample) for name, sample in samples.items()}

    async def _measure(self, ids: Sequence[int], request_id: str) -> list[float]:
        """Return the engine's log-probs of all ids but the first."""
        from vllm import SamplingParams  # pyright: ignore[reportMissingImports]

        params = SamplingParams(
            max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False, ignore_eos=True
        )
        prompt = {"prompt_token_ids": list(ids)}
        outputs = self.engine.generate(prompt, params, request_id, priority=_FIRST_IN_QUEUE)
        async for output in outputs:
            prompt_logprobs = output.prompt_logprobs

        log_probs = []
        for position in range(1, len(ids)):
            by_token = prompt_logprobs[position]
            log_probs.append(float(by_token[ids[position]].logprob))
        return log_probs


def check_update(
    update: WeightUpdate,
    checkpoint: Checkpoint,
    *,
    served: int,
    kinds: Collection[str],
    max_model_len: int,
    require_probe: bool,
    probe_key: str | None,
) -> None:
    """Refuse an update that does not fit the model, or that could not be verified.

    Args:
        checkpoint: tensors of the engine's model.
        served: version of the weights that are served.
        kinds: kinds of updates that the engine takes.
        require_probe: whether an update needs a probe.
        probe_key: setting that allows updates without; None: none does.

    Raises:
        WeightUpdateError: refused.
    """
    update.require_kind(kinds)
    update.require_newer(served)
    checkpoint.check(_shapes(update), partial=update.partial)
    if update.probe is None:
        if require_probe:
            choice = ""
            if probe_key is not None:
                choice = f", or set {probe_key}=false"
            raise WeightUpdateError(
                "the update brings no log-prob probe, so a wrong load could not be noticed; send"
                f" WeightUpdate.probe{choice}"
            )
        return

    longest = max(len(ids) for ids in update.probe.ids)
    if longest >= max_model_len:
        raise WeightUpdateError(
            f"the probe has a sequence of {longest} ids, which does not fit max_model_len="
            f"{max_model_len}"
        )


def require_agreement(
    difference: tuple[float, float], tolerances: tuple[float, float], *, section: str
) -> None:
    """Check that an engine's log-probs are the learner's.

    Args:
        difference: (largest, mean) difference of log-probs.
        tolerances: the allowed ones.
        section: settings of the engine, for the message.

    Raises:
        WeightUpdateError: they differ by more than rounding.
    """
    largest, mean = difference
    max_largest, max_mean = tolerances
    is_close = largest <= max_largest and mean <= max_mean  # false if one is not a number
    if not is_close:
        raise WeightUpdateError(
            f"the engine's log-probs are not the learner's: they differ by up to {largest:.2g}"
            f" (mean {mean:.2g}), allowed are {max_largest:.2g} ({max_mean:.2g};"
            f" {section}.max_logprob_difference and mean_logprob_difference). The engine holds a"
            " model nobody asked for"
        )


def _shapes(update: WeightUpdate) -> Shapes:
    """Return the shapes of an update's tensors."""
    if update.kind == FILES:
        if isinstance(update.payload, str | bytes):
            raise WeightUpdateError(
                f"payload must be a list of file paths, got {type(update.payload).__name__}"
            )
        check_files(update.payload, update.digests)
        try:
            return read_shapes(update.payload)
        except ModelError as error:
            raise WeightUpdateError(f"the update cannot be read: {error}") from error
    if update.kind == BROADCAST:
        return {name: shape for name, (_, shape) in update.payload.tensors.items()}
    return {name: tuple(array.shape) for name, array in update.payload.items()}


async def _run_transfer(engine: Any, update_info: Mapping[str, Any]) -> None:
    """Run vLLM's weight-transfer calls of one update.

    ``gpu_backend.worker.InPlaceTransferEngine`` serves them in the workers.
    """
    from vllm.distributed.weight_transfer.base import (  # pyright: ignore[reportMissingImports]
        WeightTransferInitRequest,
        WeightTransferUpdateRequest,
    )

    await engine.init_weight_transfer_engine(WeightTransferInitRequest(init_info={}))
    await engine.start_weight_update()
    await engine.update_weights(WeightTransferUpdateRequest(update_info=dict(update_info)))
    await engine.finish_weight_update()
