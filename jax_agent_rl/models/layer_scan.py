"""A loop over a decoder's layers: one ``lax.scan`` for each run of a repeating pattern."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jax_agent_rl.models.config import DecoderConfig
from jax_agent_rl.models.layer_kinds import LayerKind, MixerName, Run, repeating_runs

SourceKeys = dict[MixerName, Any]
"""By mixer, the keys and values that later layers read as well."""
ComputeLayer = Callable[
    [Any, LayerKind, dict[str, Any], Any, Mapping[MixerName, Any]], tuple[Any, Any, SourceKeys]
]
"""From a carry, a layer's kind, its parameters by name, its values and the source keys of earlier
layers to the next carry, the layer's outputs (a tree of the same structure for all layers), and its
own keys and values if it is a source."""


def scan_layers(
    config: DecoderConfig,
    compute: ComputeLayer,
    carry: Any,
    stacks: Mapping[str, Any],
    values: Any,
) -> tuple[Any, Any]:
    """Compute all layers in order.

    Args:
        carry: what the first layer is given.
        stacks: by parameter, a tree of arrays that are stacked over ``config.layers_with(name)``.
        values: a tree of arrays [L, ...], one element for each layer.

    Returns:
        The last carry, and the outputs of all layers, [L, ...].
    """
    outputs = []
    source_keys: SourceKeys = {}
    for run in repeating_runs(config.layer_kinds):
        carry, run_outputs, run_keys = _scan_run(
            config, run, compute, carry, stacks, values, source_keys
        )
        outputs.append(run_outputs)
        source_keys |= run_keys
    if len(outputs) == 1:
        return carry, outputs[0]
    return carry, jax.tree.map(lambda *parts: jnp.concatenate(parts), *outputs)


def _scan_run(
    config: DecoderConfig,
    run: Run,
    compute: ComputeLayer,
    carry: Any,
    stacks: Mapping[str, Any],
    values: Any,
    source_keys: SourceKeys,
) -> tuple[Any, Any, SourceKeys]:
    size = len(run.pattern)
    run_stacks = {}
    pattern_layers: dict[str, list[int]] = {}  # by parameter: which of the pattern's layers have it
    for name, stack in stacks.items():
        with_name = [i for i, kind in enumerate(run.pattern) if name in config.kind_shapes(kind)]
        if not with_name:
            continue
        pattern_layers[name] = with_name
        first = bisect.bisect_left(config.layers_with(name), run.first)
        run_stacks[name] = jax.tree.map(_Slice(first, run.repeats, len(with_name)), stack)
    run_values = jax.tree.map(_Slice(run.first, run.repeats, size), values)

    def body(carry: Any, scanned: tuple[dict[str, Any], Any]) -> tuple[Any, Any]:
        pattern_stacks, pattern_values = scanned
        params: list[dict[str, Any]] = [{} for _ in run.pattern]
        for name, with_name in pattern_layers.items():
            elements = _unstacked(pattern_stacks[name], len(with_name))
            for index, element in zip(with_name, elements, strict=True):
                params[index][name] = element

        outputs = []
        pattern_keys: SourceKeys = {}
        for index, layer_values in enumerate(_unstacked(pattern_values, size)):
            carry, layer_outputs, layer_keys = compute(
                carry,
                run.pattern[index],
                params[index],
                layer_values,
                {**source_keys, **pattern_keys},
            )
            outputs.append(layer_outputs)
            pattern_keys |= layer_keys
        if size == 1:
            return carry, (outputs[0], pattern_keys)
        return carry, (jax.tree.map(lambda *parts: jnp.stack(parts), *outputs), pattern_keys)

    carry, (outputs, run_keys) = jax.lax.scan(
        body, carry, (run_stacks, run_values), length=run.repeats
    )
    if size > 1:
        outputs = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), outputs)
    # A mixer has one source, so its run does not repeat.
    return carry, outputs, jax.tree.map(lambda x: x[0], run_keys)


class _Slice:
    """Takes a run's part of a stack: [repeats, count, ...], or [repeats, ...] if count is 1."""

    def __init__(self, first: int, repeats: int, count: int) -> None:
        self._first = first
        self._repeats = repeats
        self._count = count

    def __call__(self, stack: jax.Array) -> jax.Array:
        total = self._repeats * self._count
        part = stack
        if total < len(stack):
            part = jax.lax.slice_in_dim(stack, self._first, self._first + total)
        if self._count == 1:
            return part
        return part.reshape(self._repeats, self._count, *part.shape[1:])


def _unstacked(tree: Any, count: int) -> list[Any]:
    """Return the elements of stacks that :class:`_Slice` made, without the axis of repeats."""
    if count == 1:
        return [tree]
    elements: list[list[jax.Array]] = [[] for _ in range(count)]
    leaves, structure = jax.tree.flatten(tree)
    for leaf in leaves:
        # The gradient of a split is one concatenation; that of each index would be padded by zeros.
        for element, part in zip(elements, jax.lax.split(leaf, (1,) * count), strict=True):
            element.append(jnp.squeeze(part, axis=0))
    return [jax.tree.unflatten(structure, element) for element in elements]
