"""The engine's weights beside the learner's, tensor by tensor, by their published names."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from jax_agent_rl.agreement.causes import Cause
from jax_agent_rl.models.config import DecoderConfig, Params
from jax_agent_rl.models.hf import hf_tensors
from jax_agent_rl.models.tensor_samples import TensorSample

Samples = Mapping[str, TensorSample]
ROUNDED = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
LITTLE = 0.05
"""Of a tensor's size is what training changes at most from one version to another."""
SLACK = {"int8": 0.05, "fp8": 0.15}
"""How far a number in 8 bits may be off, as a part of the tensor's size."""


@dataclass(frozen=True, kw_only=True)
class TensorFault:
    """One tensor that the engine does not hold as it should.

    Attributes:
        name: as it is published.
        cause: what is wrong with it.
        detail: the same in words, as a sentence about it goes on.
    """

    name: str
    cause: Cause
    detail: str


def samples_of(model: DecoderConfig, params: Params) -> dict[str, TensorSample]:
    """A sample of every tensor of the learner."""
    return {name: TensorSample.of(array) for name, array in hf_tensors(model, params)}


def tensor_faults(
    engine: Samples,
    learner: Samples,
    *,
    precision: str,
    transposed: Callable[[str], TensorSample | None],
    older: Mapping[str, Callable[[], Samples]],
) -> list[TensorFault]:
    """Every tensor of which the engine's sample is not the learner's, and what it is instead.

    Args:
        precision: of the engine's weights, as it is configured.
        transposed: a sample of the transpose of the learner's tensor of that name.
        older: samples of parameters of other versions, by what to call them.
    """
    common = [name for name in learner if name in engine]
    wrong = [name for name in common if not _alike(engine[name], learner[name], precision)]
    if not wrong:
        return []
    if rounded := _rounded(engine, learner, common):
        return [TensorFault(name=name, cause=Cause.DTYPE, detail=f"is rounded to {rounded}") for name in wrong]
    before = {name: make() for name, make in older.items()}
    for called, samples in before.items():
        if all(_alike(engine[name], samples[name], precision) for name in wrong):
            whole = len(wrong) > len(common) // 2
            cause = Cause.STALE_VERSION if whole else Cause.MISSING_TENSOR
            detail = f"is still that of {called}"
            return [TensorFault(name=name, cause=cause, detail=detail) for name in wrong]
    if len(wrong) > len(common) // 2 and (most := max(_apart(engine[n], learner[n]) for n in wrong)) < LITTLE:
        detail = f"differs a little (at most by {most:.1e} of its size), as weights of another version do"
        return [TensorFault(name=name, cause=Cause.STALE_VERSION, detail=detail) for name in wrong]
    return [_fault(name, engine[name], learner, precision, transposed) for name in wrong]


def _fault(
    name: str,
    found: TensorSample,
    learner: Samples,
    precision: str,
    transposed: Callable[[str], TensorSample | None],
) -> TensorFault:
    def fault(cause: Cause, detail: str) -> TensorFault:
        return TensorFault(name=name, cause=cause, detail=detail)

    if found.shape != learner[name].shape:
        return fault(Cause.WRONG_TENSOR, f"has shape {found.shape}, the learner's {learner[name].shape}")
    if not found.values.any():
        return fault(Cause.MISSING_TENSOR, "is all zeros")
    if len(set(found.values.tolist())) == 1 and len(set(learner[name].values.tolist())) > 1:
        return fault(Cause.MISSING_TENSOR, f"is {found.values[0]:g} everywhere, as it is made before it is loaded")
    turned = transposed(name)
    if turned is not None and _alike(found, turned, precision):
        return fault(Cause.TRANSPOSED_TENSOR, "is transposed")
    for other, sample in learner.items():
        if other != name and sample.shape == found.shape and _alike(found, sample, precision):
            return fault(Cause.MISNAMED_TENSOR, f"holds the numbers of {other}")
    return fault(Cause.WRONG_TENSOR, f"differs by {_apart(found, learner[name]):.1%} of its size")


def _apart(found: TensorSample, wanted: TensorSample) -> float:
    """As a part of the tensor's size; infinite between shapes."""
    if found.shape != wanted.shape:
        return float("inf")
    return float(np.sqrt(np.mean((found.values - wanted.values) ** 2)) / max(wanted.rms, 1e-30))


def _rounded(engine: Samples, learner: Samples, names: Sequence[str]) -> str | None:
    """The type that every tensor was rounded to, if it was, and only that."""
    for dtype, kind in ROUNDED.items():
        if all(np.array_equal(engine[n].values, learner[n].values.astype(kind).astype(np.float32)) for n in names):
            return dtype
    return None


def _alike(found: TensorSample, wanted: TensorSample, precision: str) -> bool:
    if found.shape != wanted.shape:
        return False
    kind = ROUNDED.get(precision)
    expected = wanted.values if kind is None else wanted.values.astype(kind).astype(np.float32)
    slack = SLACK.get(precision, 1e-6)
    size = max(wanted.rms, float(np.abs(expected).max(initial=0.0)), 1e-30)
    same_size = abs(found.rms - wanted.rms) <= max(slack, 1e-2 if kind else 1e-5) * size
    return same_size and bool(np.all(np.abs(found.values - expected) <= slack * size))
