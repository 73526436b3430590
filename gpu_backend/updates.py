"""New weights for a running engine, verified before any token is served from them.

::

    check files (names, shapes)      wrong: refused, the old weights serve on
      ─► load in place ─► read back every tensor ─► drop cached prefixes, recompute frozen requests' KV
      ─► probe: the learner's log-probs of a few sequences, reproduced by the engine
                                     wrong after loading: the engine holds wrong weights and must not serve

vLLM's plugin for TPUs (tpu-inference 0.32) runs a model in one of two ways. In JAX, the parameters
are an ``nnx.State`` that every step takes as its first argument, so that a new state is new
weights; the model's own loader makes it from Hugging Face tensors. As vLLM's torch model, the
parameters were fused and laid out when they were loaded, and cannot be replaced. vLLM's own
interface for weight updates does nothing there (``TPUWorker.update_weights``): trainers are
expected to write into the state.

Imports no vLLM: workers import it, and so do tests without vLLM.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from gpu_backend.settings import Platform, VllmSettings
from gpu_backend.weights import Checkpoint, Shapes, read_update
from jax_agent_rl.errors import WeightUpdateError
from jax_agent_rl.models.tensors import TensorSample
from jax_agent_rl.rollout.protocol import BROADCAST, CUDA_IPC, WeightUpdate
from jax_agent_rl.utils.weight_transfer import LogprobProbe, check_files

logger = logging.getLogger(__name__)
FILES = "safetensors"
_FIRST_IN_QUEUE = -(1 << 30)


class WeightUpdater:
    """Loads weights into one engine.

    Args:
        engine: ``AsyncLLM``.
        checkpoint: tensors of its model.
        settings: of the engine.
        platform: what it runs on; on TPUs only the probe shows what arrived.
        fixed: why its weights cannot be replaced; None if they can.
    """

    def __init__(
        self,
        engine: Any,
        checkpoint: Checkpoint,
        settings: VllmSettings,
        platform: Platform,
        *,
        fixed: str | None = None,
    ) -> None:
        self.engine: Any = engine
        self._checkpoint = checkpoint
        self._settings = settings
        self._limits = settings.tolerances(platform)
        self._fixed = fixed
        self._tpu = platform == "tpu"
        kinds = {"tpu": {FILES}, "cuda": {FILES, BROADCAST, CUDA_IPC}}.get(
            platform, {FILES, BROADCAST}
        )
        self.kinds = frozenset(kinds if fixed is None else ())
        # Tensor-parallel ranks hold slices, so reading back whole tensors works on a single rank
        # only; and in JAX the parameters have other forms.
        readable = settings.tensor_parallel_size == 1 and not self._tpu
        self.placements = (
            {n: tuple(p) for n, p in checkpoint.placements().items()} if readable else {}
        )
        self.last_difference: tuple[float, float] | None = None
        """(largest, mean) log-prob difference of the last probe."""

    def check(self, update: WeightUpdate, *, served: int) -> LogprobProbe | None:
        """Refuse wrong updates before the model is touched; return the update's probe.

        Args:
            update: the new weights.
            served: version of the weights that are served.

        Raises:
            WeightUpdateError: refused; nothing has changed.
        """
        if self._fixed is not None:
            raise WeightUpdateError(self._fixed)
        if update.kind not in self.kinds:
            raise WeightUpdateError(
                f"this vLLM backend takes weights of kind {sorted(self.kinds)}, got"
                f" kind={update.kind!r}"
            )
        if update.version <= served:
            raise WeightUpdateError(
                f"version {update.version} is not newer than {served}, which is served"
            )
        if update.partial and self._tpu:
            raise WeightUpdateError(
                "on TPUs vLLM takes whole updates only; send every tensor with partial=False"
            )
        shapes, probe = _contents(update)
        self._checkpoint.check(shapes, partial=update.partial)
        if probe is None and (self._settings.require_probe or self._tpu):
            way_out = (
                ", or set rollout.vllm.require_probe=false" if self._settings.require_probe else ""
            )
            raise WeightUpdateError(
                "the update brings no log-prob probe, so a wrong load could not be noticed; write"
                f" it with jax_agent_rl.runtime.publishers.WeightFiles{way_out}"
            )
        longest = max((len(ids) for ids in probe.ids), default=0) if probe else 0
        if longest >= self._settings.max_model_len:
            raise WeightUpdateError(
                f"the probe has a sequence of {longest} ids, which does not fit max_model_len="
                f"{self._settings.max_model_len}"
            )
        return probe

    async def load(self, update: WeightUpdate) -> None:
        """Load the weights; tokens sampled from now on carry the new version.

        Raises:
            WeightUpdateError: they did not all arrive. The model is unusable until a whole update
                succeeds.
        """
        engine = self.engine
        if update.kind == FILES:
            paths = [str(path) for path in update.payload]
            if self._tpu:
                await engine.collective_rpc("replace_tpu_weights", args=(paths,))
            else:
                await self._transfer({"paths": paths})
            if self.placements:
                by_worker = await engine.collective_rpc(
                    "weights_not_landed", args=(paths, self.placements)
                )
                if names := sorted({name for names in by_worker for name in names}):
                    raise WeightUpdateError(
                        f"{len(names)} tensors did not arrive in vLLM's model, e.g. {names[:3]}:"
                        " its loader skipped them or stores them in a way gpu_backend/weights.py"
                        " does not describe"
                    )
        elif update.kind == BROADCAST:
            await self._transfer({"broadcast": asdict(update.payload)})
        else:
            update_info, copies = await asyncio.to_thread(export_tensors, update.payload)
            await self._transfer(update_info)
            del copies
            import torch

            torch.cuda.ipc_collect()  # frees memory that was exported, and that neither side uses any more
        # Frozen requests lose their KV, too: it is recomputed under the new weights when they
        # continue.
        await engine.reset_prefix_cache(reset_running_requests=True)
        await engine.reset_encoder_cache()
        await engine.update_weight_version(str(update.version))

    async def _transfer(self, update_info: Mapping[str, Any]) -> None:
        """Run vLLM's calls of one update. Cancelled, they run to the end first: vLLM would refuse to start another."""
        session = asyncio.ensure_future(_transferred(self.engine, update_info))
        try:
            await asyncio.shield(session)
        except asyncio.CancelledError:
            await asyncio.gather(session, return_exceptions=True)
            raise

    async def verify(self, probe: LogprobProbe, name: str) -> None:
        """Compare the engine's log-probs with the learner's. The engine must be running.

        Args:
            probe: the learner's.
            name: prefix of the probe's request ids.

        Raises:
            WeightUpdateError: they differ by more than rounding.
        """
        measured = [await self._measure(ids, f"{name}-{i}") for i, ids in enumerate(probe.ids)]
        largest, mean = self.last_difference = probe.differences(measured)
        max_largest, max_mean = self._limits
        if not (largest <= max_largest and mean <= max_mean):
            raise WeightUpdateError(
                f"the engine's log-probs are not the learner's: they differ by up to {largest:.2g}"
                f" (mean {mean:.2g}), allowed are {max_largest:.2g} ({max_mean:.2g};"
                " rollout.vllm.max_logprob_difference and mean_logprob_difference). The engine"
                " holds a model nobody asked for"
            )

    async def tensor_samples(self) -> Mapping[str, TensorSample]:
        """Return a sample of every tensor as it is served; empty where tensors cannot be read back whole."""
        if not self.placements:
            return {}
        (sampled,) = await self.engine.collective_rpc("sample_tensors", args=(self.placements,))
        return {name: TensorSample.from_json(saved) for name, saved in sampled.items()}

    async def _measure(self, ids: Sequence[int], request_id: str) -> list[float]:
        from vllm import SamplingParams  # pyright: ignore[reportMissingImports]

        params = SamplingParams(
            max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False, ignore_eos=True
        )
        prompt = {"prompt_token_ids": list(ids)}
        async for output in self.engine.generate(
            prompt, params, request_id, priority=_FIRST_IN_QUEUE
        ):
            reported = output.prompt_logprobs
        return [float(reported[i][token].logprob) for i, token in enumerate(ids) if i > 0]


def _contents(update: WeightUpdate) -> tuple[Shapes, LogprobProbe | None]:
    if update.kind == FILES:
        if isinstance(update.payload, str | bytes):
            raise WeightUpdateError(
                f"payload must be a list of file paths, got {type(update.payload).__name__}"
            )
        paths = [str(path) for path in update.payload]
        check_files(paths, update.digests)
        return read_update(paths)
    if update.kind == BROADCAST:
        return {name: shape for name, (_, shape) in update.payload.tensors.items()}, update.probe
    return {name: tuple(array.shape) for name, array in update.payload.items()}, update.probe


async def _transferred(engine: Any, update_info: Mapping[str, Any]) -> None:
    """Run vLLM's weight-transfer calls of one update, for ``gpu_backend.worker.InPlaceTransferEngine``."""
    from vllm.distributed.weight_transfer.base import (
        WeightTransferInitRequest,
        WeightTransferUpdateRequest,
    )  # pyright: ignore[reportMissingImports]

    await engine.init_weight_transfer_engine(WeightTransferInitRequest(init_info={}))
    await engine.start_weight_update()
    await engine.update_weights(WeightTransferUpdateRequest(update_info=dict(update_info)))
    await engine.finish_weight_update()


def export_tensors(arrays: Mapping[str, Any]) -> tuple[dict[str, Any], list[Any]]:
    """Make arrays of this process readable by processes of the same machine, without a copy on the host.

    torch views the learner's jax arrays (DLPack) and copies them into memory of its own: only that
    can be exported.

    Args:
        arrays: on one GPU, by name; any that support DLPack.

    Returns:
        What the receiver needs (``InPlaceUpdateInfo``), and the copies, to be kept until it has
        read them.
    """
    import torch
    from torch.multiprocessing.reductions import reduce_tensor

    device = torch.cuda.current_device()
    copies = {name: torch.from_dlpack(array).clone() for name, array in arrays.items()}
    torch.cuda.synchronize(device)
    handles = {name: plain_handle(reduce_tensor(copy)[1]) for name, copy in copies.items()}
    uuid = str(torch.cuda.get_device_properties(device).uuid)
    return {"handles": handles, "device_uuid": uuid}, list(copies.values())


def plain_handle(rebuild_args: Sequence[Any]) -> list[Any]:
    """Return the arguments of ``rebuild_cuda_tensor`` as plain values, which reach a worker without pickle.

    Args:
        rebuild_args: class, size, stride, offset, storage class, dtype, device, and those of the
            storage.
    """
    _, size, stride, offset, _, dtype, _, *storage = rebuild_args
    return [list(size), list(stride), offset, str(dtype).removeprefix("torch."), *storage]


# --- TPUs -----------------------------------------------------------------------------------------

IN_JAX = (  # of our table, in tpu-inference 0.32
    "Qwen2ForCausalLM, Qwen3ForCausalLM and LlamaForCausalLM"
)


async def ask_workers(engine: Any) -> str | None:
    """Return why this engine's (``AsyncLLM``) weights cannot be replaced; None if they can."""
    reason = next(filter(None, await engine.collective_rpc("why_not_replaceable")), None)
    if reason is not None:
        logger.warning("weights cannot be updated: %s", reason)
    return reason


def why_not_replaceable(runner: Any) -> str | None:
    """Return why this ``TPUModelRunner``'s weights cannot be replaced; None if they can."""
    from flax import nnx

    if isinstance(runner.state, nnx.State):
        return None
    return (
        "on TPUs this model runs as vLLM's torch model, whose weights cannot be replaced; serve"
        f" one that tpu-inference has in JAX ({IN_JAX}) with MODEL_IMPL_TYPE=auto, or use"
        " rollout.backend=jetstream"
    )


def replace_weights(runner: Any, tensors: Iterator[tuple[str, Any]]) -> None:
    """Replace the weights of a model that runs in JAX.

    Args:
        runner: the worker's ``TPUModelRunner``; nothing may be running.
        tensors: Hugging Face names and torch tensors, all of the model.

    Raises:
        RuntimeError: some did not arrive, or have another shape or dtype, for which programs would
            be recompiled. The model is unusable until a whole update succeeds.
    """
    import jax
    from flax import nnx

    if reason := why_not_replaceable(runner):
        raise RuntimeError(reason)
    model, before = runner.model, jax.tree.map(_described, runner.state)
    runner.state = runner.state_leaves = (
        None  # else every old array stays until the last new one is there
    )
    try:
        with jax.set_mesh(runner.mesh):
            _load(runner, model, tensors)
    finally:
        runner.state = nnx.split(model)[1]
        runner.refresh_state_leaves()
    old, new = _forms(before), _forms(runner.state)
    if changed := sorted(
        name for name in old.keys() | new.keys() if old.get(name) != new.get(name)
    ):
        name = changed[0]
        raise RuntimeError(
            f"{len(changed)} parameters have another form, e.g. {name}: {new.get(name)}, was"
            f" {old.get(name)}"
        )
    runner.state = jax.tree.map(
        lambda x, form: jax.device_put(x, form.sharding), runner.state, before
    )
    runner.refresh_state_leaves()


def _load(runner: Any, model: Any, tensors: Iterator[tuple[str, Any]]) -> None:
    """Call the model's loader, of which the plugin has two kinds."""
    if any(kind.__name__ == "LoadableWithIterator" for kind in type(model).__mro__):
        model.load_weights(tensors)
        return
    # The older kind reads the folder it was started with, unless a stream is put here, as Run:ai's
    # streamer does.
    config = runner.vllm_config.model_config
    config.runai_model_weights_iterator = tensors
    try:
        model.load_weights(runner.rng_key)
    finally:
        del config.runai_model_weights_iterator


def _described(x: Any) -> Any:
    import jax

    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)


def _forms(state: Any) -> dict[str, tuple[Any, ...]]:
    """Return shape and dtype of every array, by its name."""
    import jax

    leaves = jax.tree_util.tree_leaves_with_path(state)
    return {jax.tree_util.keystr(path): (x.shape, str(x.dtype)) for path, x in leaves}
