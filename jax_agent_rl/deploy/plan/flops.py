"""The work in a program: products and the bytes they read, counted in what JAX traces.

A compiler's own cost analysis counts the body of a loop once, whatever it runs; and it counts for one device what each
is given. Here a loop's body counts as often as it runs, recomputation counts (it is in the trace), and all devices
count together. Of what is written once for each platform, the TPU's part counts; a kernel says itself what it does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import jax
from jax.core import ShapedArray
from jax.extend import core

PLATFORM = "tpu"


@dataclass(frozen=True, kw_only=True)
class Flops:
    """Of all devices together.

    Attributes:
        flops: of matrix products and convolutions; a multiplication and an addition are two.
        bytes: operands and results of these, each read or written once: what would pass if nothing stayed in a cache
            and everything else were fused into them.
    """

    flops: float = 0.0
    bytes: float = 0.0

    def __add__(self, other: Flops) -> Flops:
        return Flops(flops=self.flops + other.flops, bytes=self.bytes + other.bytes)

    def __mul__(self, times: float) -> Flops:
        return Flops(flops=self.flops * times, bytes=self.bytes * times)


def work_of(function: Callable[..., Any], *args: Any, loops: int = 1, **kwargs: Any) -> Flops:
    """Count the work of a call; nothing is computed.

    Args:
        function: anything JAX can trace.
        *args: arrays or their shapes.
        loops: how often a loop runs whose end is found while it runs (``while``).
        **kwargs: likewise, by keyword.
    """
    return work_in(jax.make_jaxpr(function)(*args, **kwargs), loops=loops)


def work_in(traced: core.ClosedJaxpr, *, loops: int = 1) -> Flops:
    """Count the work of a traced call."""
    return _of_jaxpr(traced.jaxpr, loops)


def _of_jaxpr(jaxpr: core.Jaxpr, loops: int) -> Flops:
    return sum((_of_equation(equation, loops) for equation in jaxpr.eqns), Flops())


def _of_equation(equation: core.JaxprEqn, loops: int) -> Flops:
    name, params = equation.primitive.name, equation.params
    if name == "dot_general":
        return _moved(equation, flops=_dot_flops(equation))
    if name in ("conv_general_dilated", "ragged_dot_general", "ragged_dot"):
        return _moved(equation, flops=_contraction_flops(equation))
    if name == "scan":
        return _of_jaxpr(params["jaxpr"].jaxpr, loops) * params["length"]
    if name == "while":
        return _of_jaxpr(params["body_jaxpr"].jaxpr, loops) * loops
    if name == "pallas_call" and (said := params["cost_estimate"]) is not None:
        return Flops(flops=float(said.flops), bytes=float(said.bytes_accessed))
    if name == "cond" and (platforms := params.get("branches_platforms")):
        taken = next(at for at, names in enumerate(platforms) if names is None or PLATFORM in names)
        return _of_jaxpr(params["branches"][taken].jaxpr, loops)
    if name == "cond":
        return max((_of_jaxpr(branch.jaxpr, loops) for branch in params["branches"]), key=lambda work: work.flops)
    times = math.prod(params["mesh"].shape.values()) if name == "shard_map" else 1
    return sum((_of_jaxpr(inner, loops) for inner in _inner(params)), Flops()) * times


def _inner(params: dict[str, Any]) -> Iterator[core.Jaxpr]:
    """Yield programs within an equation's parameters: calls, custom derivatives, rematerialized parts."""
    for value in params.values():
        if isinstance(value, core.ClosedJaxpr):
            yield value.jaxpr
        elif isinstance(value, core.Jaxpr):
            yield value


def _array(variable: Any) -> ShapedArray:
    """Return the abstract array of a variable; these programs have no others."""
    return cast(ShapedArray, variable.aval)


def _moved(equation: core.JaxprEqn, *, flops: float) -> Flops:
    variables = (*equation.invars, *equation.outvars)
    return Flops(flops=flops, bytes=float(sum(_array(v).size * _array(v).dtype.itemsize for v in variables)))


def _dot_flops(equation: core.JaxprEqn) -> float:
    (contracted, _), _ = equation.params["dimension_numbers"]
    left = _array(equation.invars[0])
    return 2.0 * _array(equation.outvars[0]).size * math.prod(left.shape[axis] for axis in contracted)


def _contraction_flops(equation: core.JaxprEqn) -> float:
    """Count, for each number of the result, the kernel's numbers per output feature."""
    kernel, name = _array(equation.invars[1]), equation.primitive.name
    if name == "conv_general_dilated":
        features = kernel.shape[equation.params["dimension_numbers"].rhs_spec[0]]
        return 2.0 * _array(equation.outvars[0]).size * kernel.size / features
    return 2.0 * _array(equation.outvars[0]).size * _array(equation.invars[0]).shape[-1]  # each row meets one expert
