"""One program for everything an engine does, so that log-probs are bitwise reproducible.

Floating-point sums depend on the order of additions, and that order on the shapes a program was
compiled for. Elsewhere prompts are computed in chunks, slots in buckets and the learner's rows
packed, each by its own program, so log-probs differ by rounding and by how requests arrive. Here
one compiled program does all of it, stepping ``max_concurrent_decodes`` slots over all pages of the
longest context::

    prompts      fed id by id, the next one forced
    decoding     fed id by id, the next one sampled
    scoring      fed id by id, the next one forced; gives the learner's old log-probs

A slot's numbers depend on its own context alone: products [out, in] x [in, slots] sum over ``in``
in the same order for every slot, which tests confirm. Nor do they depend on the mesh: devices share
matrices by their outputs, in blocks of one shape on every mesh (``models.row_blocks``), and
key/value heads with their queries. What crosses devices is gathered, logits included, which is
exact; nothing is summed over them but numbers of which all but one are 0. So one device and any
mesh give the same bits. The learner's mesh has no influence at all: its weights are gathered for
this program.

The price is speed: prompts take a step per id, and scoring costs about as much as the rollout
(``benchmarks/deterministic.py``). Batch invariance follows He et al. 2025, "Defeating
Nondeterminism in LLM Inference".
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jax_agent_rl.errors import ConfigError
from jax_agent_rl.jetstream import programs
from jax_agent_rl.jetstream.context import EngineContext, WarmUp
from jax_agent_rl.jetstream.decode_batch import (
    DecodeBatch,
    Extension,
    Sampled,
    make_decode_batch,
    pad_decode_batch,
)
from jax_agent_rl.jetstream.forward import QUANTIZED, EngineParams, Kernels, head_of
from jax_agent_rl.jetstream.kv_cache import KVCache
from jax_agent_rl.jetstream.sharding import KEY, row_devices, row_spec, shared_axis
from jax_agent_rl.models.config import DecoderConfig
from jax_agent_rl.models.row_blocks import RowBlocks

ANY_ID = 0

# By platform. XLA hands large sums and products to a library on CPUs, together with what is next to
# them. What is large depends on the mesh; so it gets products alone, each for itself.
_COMPILER_OPTIONS: dict[str, programs.CompilerOptions] = {
    "cpu": {"xla_cpu_experimental_ynn_fusion_type": "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT"},
}

_MATRICES = (QUANTIZED | {"delta_ba"}) - {"k_b", "v_b"}
"""Matrices that are multiplied with columns [in, slots]; each head has its own of the others."""


class OneProgram:
    """Decodes, and scores given ids, with the program of the module docstring.

    Args:
        context: its model has passed :func:`check_model`.
    """

    def __init__(self, context: EngineContext) -> None:
        self._context = context

    @property
    def slots(self) -> int:
        """Slots of the program."""
        return self._context.shapes.max_concurrent_decodes

    def width(self, count: int) -> int:
        """Return the slots of the program, however few contexts there are."""
        return self.slots

    def decode(
        self, params: EngineParams, cache: KVCache, slots: DecodeBatch, steps: int, exit_after: int
    ) -> tuple[KVCache, Sampled]:
        """Decode, see :meth:`~jax_agent_rl.jetstream.engine.JaxEngine.decode`."""
        # Nothing is forced.
        forced = np.full((self._context.shapes.decode_steps, self.slots), -1, np.int32)
        limits = np.array([steps, exit_after], np.int32)
        return self._run(params, cache, slots, limits, forced)

    def force(
        self,
        params: EngineParams,
        cache: KVCache,
        extensions: Sequence[Extension],
        *,
        temperature: float,
    ) -> tuple[KVCache, list[np.ndarray]]:
        """Feed ids into the pages of at most :attr:`slots` contexts.

        Args:
            cache: donated.
            extensions: the contexts' ids and pages.
            temperature: temperature of the log-probs.

        Returns:
            The cache, and for each extension of n ids float32 [n - 1]: the log-prob of every id but
                the first.
        """
        log_probs: list[list[np.ndarray]] = [[] for _ in extensions]
        steps = self._context.shapes.decode_steps
        longest = max((len(extension.ids) for extension in extensions), default=0)
        # No number of finished slots ends a dispatch early.
        limits = np.array([steps, len(extensions) + 1], np.int32)
        for begin in range(0, longest, steps):
            remaining = []
            for extension in extensions:
                remaining.append(extension.after(min(begin, len(extension.ids))))
            slots, forced = self._forced_slots(remaining, temperature)
            cache, sampled = self._run(params, cache, slots, limits, forced)
            for slot, slot_log_probs in enumerate(log_probs):
                has_run = sampled.ids[:, slot] >= 0
                slot_log_probs.append(sampled.log_probs[has_run, slot])

        scored = []
        for extension, slot_log_probs in zip(extensions, log_probs, strict=True):
            # The last one is of the id after the context.
            scored.append(np.concatenate(slot_log_probs)[: len(extension.ids) - 1])
        return cache, scored

    def _forced_slots(
        self, extensions: Sequence[Extension], temperature: float
    ) -> tuple[DecodeBatch, np.ndarray]:
        """Return a slot for each extension, and the ids that are forced, int32 [steps, slots]."""
        steps = self._context.shapes.decode_steps
        slots = make_decode_batch(len(extensions), self._context.shapes.context_pages)
        forced = np.full((steps, self.slots), -1, np.int32)
        for slot, extension in enumerate(extensions):
            # The id after the last one is not read.
            following = [*extension.ids[1 : steps + 1], ANY_ID][:steps]
            forced[: len(following), slot] = following
            slots.pages[slot, : len(extension.pages)] = extension.pages
            slots.tokens[slot] = extension.ids[0] if len(extension.ids) else ANY_ID
            slots.positions[slot] = extension.start
            slots.remaining[slot] = len(extension.ids)
            slots.temperature[slot] = temperature
        if self._context.has_states:
            states = [extension.state for extension in extensions]
            slots = replace(slots, states=np.array(states, np.int32))
        return slots, forced

    def _run(
        self,
        params: EngineParams,
        cache: KVCache,
        slots: DecodeBatch,
        limits: np.ndarray,
        forced: np.ndarray,
    ) -> tuple[KVCache, Sampled]:
        context = self._context
        count = len(slots.tokens)
        program = functools.partial(
            _decode_in_blocks,
            context.config,
            context.shapes.decode_steps,
            context.split,
            context.kernels,
        )
        padded = pad_decode_batch(context.with_defaults(slots), self.slots - count)
        key = self._program_key(cache.count, truncated=slots.truncation is not None)
        arguments = (params, cache, padded, limits, forced)
        shardings = (context.cache_sharding, context.replicated)
        cache, out = context.call(
            key,
            program,
            (1,),
            *arguments,
            out=shardings,
            compiler_options=_COMPILER_OPTIONS.get(context.platform),
        )
        return cache, Sampled.of(np.asarray(out)[:, :, :count])

    def program_keys(self) -> set[tuple]:
        return {self._program_key(self._context.cache_pages, truncated=False)}

    def restricted_keys(self) -> set[tuple]:
        """Return the keys of the program for slots with top-p and the like."""
        return {self._program_key(self._context.cache_pages, truncated=True)}

    def _program_key(self, pages: int, *, truncated: bool) -> tuple:
        kind = "deterministic truncated" if truncated else "deterministic"
        return (kind, pages, self.slots, self._context.shapes.cache_length)

    def warm_ups(self) -> list[WarmUp]:
        shapes = self._context.shapes
        idle = make_decode_batch(self.slots, shapes.context_pages)

        def run(params: EngineParams, cache: KVCache) -> KVCache:
            cache, _ = self.decode(params, cache, idle, shapes.decode_steps, 1)
            return cache

        return [WarmUp("the one program", run)]


def check_model(model: DecoderConfig, mesh: Mesh) -> None:
    """Check that a mesh computes a model as one device does.

    Args:
        model: with the learner's number of key/value heads.

    Raises:
        ConfigError: the model is a mixture of experts, whose products group ids of all slots; or
            the devices would sum what one device sums, in another order.
    """
    if model.experts is not None:
        raise ConfigError(
            f"rollout.deterministic: a {model.family} model's experts compute the ids of all slots"
            " together, so what one gets depends on the others; set rollout.deterministic=false"
        )
    devices = mesh.shape["expert"] * mesh.shape["tensor"]
    if devices == 1:
        return

    joint = None
    if model.latent is not None:
        joint = "attention to latents multiplies all heads at once"
    elif model.qk_norm_over == "heads":
        joint = "norms of queries and keys are over all heads"
    if joint is not None:
        raise ConfigError(
            f"rollout.deterministic: in a {model.family} model {joint}, which"
            f" {KEY}.tensor={devices} would split; set {KEY}.tensor=1"
        )

    most = math.gcd(row_devices(model), model.hidden_size, model.intermediate_size)
    if most % devices:
        fitting = [count for count in range(1, most + 1) if most % count == 0]
        raise ConfigError(
            f"rollout.deterministic: {devices} devices cannot share the {model.num_kv_heads}"
            f" key/value heads, {model.hidden_size} hidden and {model.intermediate_size}"
            f" feed-forward units of this model by whole blocks; set {KEY}.tensor to one of"
            f" {fitting}"
        )


def _decode_in_blocks(
    config: DecoderConfig,
    max_steps: int,
    mesh: Mesh | None,
    kernels: Kernels,
    params: EngineParams,
    cache: KVCache,
    slots: DecodeBatch,
    limits: jax.Array,
    forced: jax.Array,
) -> tuple[KVCache, jax.Array]:
    """Run :func:`~jax_agent_rl.jetstream.programs.decode` with products in blocks."""
    count = row_devices(config)

    def in_blocks(name: str, array: jax.Array) -> Any:
        axis = shared_axis(name)
        is_multiplied = name == "lm_head" or name in _MATRICES
        if axis is None or not is_multiplied:
            return array
        blocks = math.gcd(count, array.shape[axis])
        return RowBlocks(array, axis, blocks, row_spec(name), mesh)

    layers = []
    for layer in params.layers:
        layers.append({name: in_blocks(name, array) for name, array in layer.items()})
    head = in_blocks("lm_head", head_of(params))
    params = replace(params, layers=tuple(layers), head=head)
    return programs.decode(
        config,
        max_steps,
        mesh,
        kernels,
        params,
        cache,
        slots,
        limits,
        forced,
        gathers_logits=True,
    )


class ForcedPrefill:
    """Prefills by feeding ids to the one program."""

    def __init__(self, program: OneProgram) -> None:
        self._program = program

    def extend(
        self, params: EngineParams, cache: KVCache, extensions: Sequence[Extension]
    ) -> KVCache:
        """Feed ids into pages, one by one; ``cache`` is donated."""
        for batch in batches(extensions, self._program.slots):
            cache, _ = self._program.force(params, cache, batch, temperature=1.0)
        return cache

    def program_keys(self) -> set[tuple]:
        return set()

    def warm_ups(self) -> list[WarmUp]:
        return []


def batches(items: Sequence[Any], size: int) -> list[Sequence[Any]]:
    """Split items into batches of at most ``size``, in order."""
    return [items[i : i + size] for i in range(0, len(items), size)]
