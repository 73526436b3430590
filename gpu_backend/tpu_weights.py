"""New weights for vLLM on TPUs.

vLLM's plugin for TPUs (tpu-inference 0.32) runs a model in one of two ways. In JAX, the parameters
are an ``nnx.State`` that every step takes as its first argument, so that a new state is new
weights; the model's own loader makes it from Hugging Face tensors. As vLLM's torch model, the
parameters were fused and laid out when they were loaded, and cannot be replaced. vLLM's own
interface for weight updates does nothing there (``TPUWorker.update_weights``): trainers are
expected to write into the state.

Imports no vLLM: workers import it, and so do tests without vLLM.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

from jax_agent_rl.utils.text import counted

logger = logging.getLogger(__name__)

IN_JAX = "Qwen2ForCausalLM, Qwen3ForCausalLM and LlamaForCausalLM"
"""Architectures of ``weight_mapping.FAMILIES`` that tpu-inference 0.32 has in JAX."""


async def ask_workers(engine: Any) -> str | None:
    """Return why this engine's (``AsyncLLM``) weights cannot be replaced; None if they can."""
    for reason in await engine.collective_rpc("why_not_replaceable"):
        if reason:
            logger.warning("weights cannot be updated: %s", reason)
            return reason
    return None


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

    reason = why_not_replaceable(runner)
    if reason is not None:
        raise RuntimeError(reason)
    model = runner.model
    old_structs = jax.tree.map(_as_struct, runner.state)

    # Else every old array stays until the last new one is there.
    runner.state = None
    runner.state_leaves = None
    try:
        with jax.set_mesh(runner.mesh):
            _load(runner, model, tensors)
    finally:
        _, runner.state = nnx.split(model)
        runner.refresh_state_leaves()

    old_forms = _forms(old_structs)
    new_forms = _forms(runner.state)
    changed = []
    for name in sorted(old_forms.keys() | new_forms.keys()):
        if old_forms.get(name) != new_forms.get(name):
            changed.append(name)
    if changed:
        name = changed[0]
        raise RuntimeError(
            f"{counted(len(changed), 'parameter')} of another form than before, e.g. {name}:"
            f" {new_forms.get(name)}, was {old_forms.get(name)}"
        )

    runner.state = jax.tree.map(
        lambda array, struct: jax.device_put(array, struct.sharding), runner.state, old_structs
    )
    runner.refresh_state_leaves()


def _load(runner: Any, model: Any, tensors: Iterator[tuple[str, Any]]) -> None:
    """Call the model's loader; the plugin has two kinds of loaders."""
    if any(cls.__name__ == "LoadableWithIterator" for cls in type(model).__mro__):
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


def _as_struct(array: Any) -> Any:
    import jax

    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding)


def _forms(state: Any) -> dict[str, tuple[Any, ...]]:
    """Return shape and dtype of every array, by its name."""
    import jax

    forms = {}
    for path, array in jax.tree_util.tree_leaves_with_path(state):
        forms[jax.tree_util.keystr(path)] = (array.shape, str(array.dtype))
    return forms
