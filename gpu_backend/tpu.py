"""vLLM on TPUs: what its plugin (tpu-inference 0.32) does differently, and how it takes new weights.

The plugin runs a model in one of two ways. In JAX, the parameters are an ``nnx.State`` that every step takes as its
first argument, so that a new state is new weights; the model's own loader makes it from Hugging Face tensors. As vLLM's
torch model, the parameters were fused and laid out when they were loaded, and cannot be replaced. vLLM's own interface
for weight updates does nothing there (``TPUWorker.update_weights``): trainers are expected to write into the state.

Imports no vLLM: workers import it, and so do tests without vLLM.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from jax_agent_rl.errors import ConfigError

if TYPE_CHECKING:
    from gpu_backend.settings import VllmSettings

logger = logging.getLogger(__name__)
IN_JAX = "Qwen2ForCausalLM, Qwen3ForCausalLM and LlamaForCausalLM"  # of our table, in tpu-inference 0.32


def check_settings(settings: VllmSettings) -> None:
    """Check that settings have an effect on TPUs.

    Raises:
        ConfigError: one would do nothing, or cannot be verified.
    """
    if settings.kv_cache_gib is not None:
        raise ConfigError(
            f"rollout.vllm.kv_cache_gib={settings.kv_cache_gib} has no effect on TPUs, where the KV cache takes what "
            "rollout.vllm.gpu_memory_utilization leaves; remove it"
        )
    if settings.sleep:
        raise ConfigError("rollout.sleep_during_update=true, but vLLM cannot sleep on TPUs; set it to false")
    if settings.adapters:
        raise ConfigError(f"rollout.adapters={dict(settings.adapters)}: vLLM serves none on TPUs; set it to {{}}")
    if settings.multi_modal:
        raise ConfigError(
            f"rollout.vllm.multi_modal={dict(settings.multi_modal)}: on TPUs vLLM reports no log-probs of prompts with "
            "images, by which new weights are proved; use rollout.backend=jetstream"
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
        "on TPUs this model runs as vLLM's torch model, whose weights cannot be replaced; serve one that tpu-inference "
        f"has in JAX ({IN_JAX}) with MODEL_IMPL_TYPE=auto, or use rollout.backend=jetstream"
    )


def replace_weights(runner: Any, tensors: Iterator[tuple[str, Any]]) -> None:
    """Replace the weights of a model that runs in JAX.

    Args:
        runner: the worker's ``TPUModelRunner``; nothing may be running.
        tensors: Hugging Face names and torch tensors, all of the model.

    Raises:
        RuntimeError: some did not arrive, or have another shape or dtype, for which programs would be recompiled. The
            model is unusable until a whole update succeeds.
    """
    import jax
    from flax import nnx

    if reason := why_not_replaceable(runner):
        raise RuntimeError(reason)
    model, before = runner.model, jax.tree.map(_described, runner.state)
    runner.state = runner.state_leaves = None  # else every old array stays until the last new one is there
    try:
        with jax.set_mesh(runner.mesh):
            _load(runner, model, tensors)
    finally:
        runner.state = nnx.split(model)[1]
        runner.refresh_state_leaves()
    old, new = _forms(before), _forms(runner.state)
    if changed := sorted(name for name in old.keys() | new.keys() if old.get(name) != new.get(name)):
        name = changed[0]
        raise RuntimeError(
            f"{len(changed)} parameters have another form, e.g. {name}: {new.get(name)}, was {old.get(name)}"
        )
    runner.state = jax.tree.map(lambda x, form: jax.device_put(x, form.sharding), runner.state, before)
    runner.refresh_state_leaves()


def _load(runner: Any, model: Any, tensors: Iterator[tuple[str, Any]]) -> None:
    """Call the model's loader, of which the plugin has two kinds."""
    if any(kind.__name__ == "LoadableWithIterator" for kind in type(model).__mro__):
        model.load_weights(tensors)
        return
    # The older kind reads the folder it was started with, unless a stream is put here, as Run:ai's streamer does.
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
