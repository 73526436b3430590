"""The work of one instruction of a compiled program, for compilers that give no time.

XLA's CUDA compiler schedules a program and says which kernels it has, not how long they take. What
they compute and read is in their text: products in fusions, and the calls of libraries (cuBLAS,
cuDNN). A fusion that takes a slice of an array reads that slice alone, as in a loop over a stack of
layers.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from jax_agent_rl.deploy.plan.hlo import Hlo, Instruction, arrays, numbers

PRODUCTS = 0.7
"""Share of a GPU's stated peak that large products reach: some 700 of an H100's 989 TFLOP/s in
bfloat16, which its power limits."""
KERNEL_LAUNCH = 2e-6
"""Seconds of a kernel of a GPU beyond its work, in a graph of kernels."""

_SLICES = frozenset(("dynamic-slice", "slice", "gather"))
_VIEWS = frozenset(("bitcast", "reshape", "get-tuple-element"))
_SIZES = re.compile(r"\b([a-z]+\d*\w*)\[([\d,]*)\]")


class Work(NamedTuple):
    """Work of one instruction on one device.

    Attributes:
        flops: operations of its products; in float32 they count double.
        bytes: what it reads and writes in the main memory.
    """

    flops: float
    bytes: float


def instruction_work(program: Hlo, instruction: Instruction, types: Mapping[str, str]) -> Work:
    """Return an instruction's work.

    Args:
        types: types of the computation's instructions, by name.
    """
    operands = [types[name] for name in instruction.operands if name in types]
    if instruction.kind == "custom-call":
        return _library_work(instruction, operands)
    if instruction.kind == "dot":
        return Work(_product_flops(instruction, types), _bytes([instruction.result, *operands]))
    if instruction.kind in _SLICES:
        return Work(0.0, 2 * _bytes([instruction.result]))
    if instruction.kind == "dynamic-update-slice":
        return Work(0.0, 2 * _bytes(operands[1:2]))
    if instruction.kind != "fusion":
        return Work(0.0, _bytes([instruction.result, *operands]))

    flops = 0.0
    size = 0.0
    for name in instruction.wrapped:
        flops += _fused_flops(program, name)
        size += _fused_bytes(program, name)
    return Work(flops, size)


def _bytes(types: Sequence[str]) -> float:
    size = 0.0
    for array_type in types:
        size += sum(array.bytes for array in arrays(array_type))
    return size


def _fused_flops(program: Hlo, name: str) -> float:
    """Return the operations of the products in a fused computation, and in those within it."""
    computation = program.computations.get(name, ())
    types = {inner.name: inner.result for inner in computation}
    flops = 0.0
    for inner in computation:
        if inner.kind == "dot":
            flops += _product_flops(inner, types)
        for called in inner.wrapped:
            flops += _fused_flops(program, called)
    return flops


def _product_flops(product: Instruction, types: Mapping[str, str]) -> float:
    """Return the operations of a ``dot``: two for each result and contracted number."""
    left = types[product.operands[0]]
    (element, left_sizes), *_ = _SIZES.findall(left)
    sizes = numbers(left_sizes)
    contracted = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", product.remainder)
    depth = math.prod(sizes[axis] for axis in numbers(contracted[1] if contracted else None))
    return 2 * _count(product.result) * depth * _slowness(element)


def _slowness(element: str) -> float:
    """Return how much longer products of a type take than those of bfloat16: as TF32 twice."""
    return 2.0 if element == "f32" else 1.0


def _count(array_type: str) -> float:
    """Return the numbers of the first array of a type."""
    match = _SIZES.search(array_type)
    if match is None:
        return 0.0
    return float(math.prod(numbers(match[2])))


def _library_work(call: Instruction, operands: Sequence[str]) -> Work:
    """Return the work of a call of cuBLAS or cuDNN, or of a Pallas kernel that states its cost."""
    size = _bytes([call.result, *operands])
    target = re.search(r'custom_call_target="([^"]*)"', call.remainder)
    name = target[1] if target else ""
    stated = call.number("flops")
    stated_bytes = call.number("bytes_accessed")
    if stated is not None and stated_bytes is not None:
        return Work(float(stated), float(stated_bytes))
    if ("cublas" in name or "matmul" in name) and len(operands) >= 2:
        # [m, k] and [k, n], or as many of them as there are results of [m, n].
        (element, sizes), *_ = _SIZES.findall(operands[0])
        result = _count(call.result)
        match = re.search(r'"lhs_contracting_dimensions":\["(\d+)"', call.remainder)
        if match is not None and result:
            depth = numbers(sizes)[int(match[1])]
            return Work(2 * result * depth * _slowness(element), size)
    return Work(0.0, size)


def _fused_bytes(program: Hlo, name: str) -> float:
    """Return the bytes that a fused computation reads of its parameters, and writes."""
    computation = program.computations.get(name, ())
    size = 0.0
    for inner in computation:
        if inner.kind == "parameter":
            size += _read_bytes(program, computation, inner)
    types = {inner.name: inner for inner in computation}
    return size + _written_bytes(computation[-1], types) if computation else size


def _read_bytes(program: Hlo, computation: Sequence[Instruction], array: Instruction) -> float:
    """Return the bytes that the users of an array read of it; at most all."""
    whole = _bytes([array.result])
    size = 0.0
    for user in computation:
        if array.name not in user.operands:
            continue
        if user.kind in _SLICES:
            size += _bytes([user.result])
        elif user.kind == "dynamic-update-slice" and user.operands[0] == array.name:
            continue  # updated in place
        elif user.kind in _VIEWS:
            size += _read_bytes(program, computation, user)
        elif user.kind == "fusion" and user.wrapped:
            size += _inner_read_bytes(program, user, array)
        else:
            return whole
    return min(size, whole)


def _inner_read_bytes(program: Hlo, fusion: Instruction, array: Instruction) -> float:
    """Return what a fusion within a fusion reads of an array."""
    inner = program.computations.get(fusion.wrapped[0], ())
    size = 0.0
    for parameter in inner:
        if parameter.kind == "parameter":
            index = int(parameter.remainder.partition(")")[0])
            if fusion.operands[index] == array.name:
                size += _read_bytes(program, inner, parameter)
    return size


def _written_bytes(result: Instruction, by_name: Mapping[str, Instruction]) -> float:
    """Return the bytes of a computation's result; of one updated in place, what is new."""
    if result.kind == "tuple":
        return sum(_written_bytes(by_name[name], by_name) for name in result.operands)
    if result.kind in _VIEWS and result.operands and result.operands[0] in by_name:
        return _written_bytes(by_name[result.operands[0]], by_name)
    if result.kind == "dynamic-update-slice":
        return _bytes([by_name[result.operands[1]].result])
    return _bytes([result.result])
