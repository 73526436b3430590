"""Comparison of an engine's weights, by published name, and activations, by layer, with the learner's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from jax_agent_rl.agreement import forward
from jax_agent_rl.agreement.report import Cause
from jax_agent_rl.models.config import DecoderConfig, Params
from jax_agent_rl.models.hf import HEAD, hf_tensors, tensor_names
from jax_agent_rl.models.tensors import LayerOutput, TensorSample

Samples = Mapping[str, TensorSample]
ROUNDED = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
MAX_TRAINING_CHANGE = 0.05
"""Largest change of a tensor from one version to another, as a part of its size."""
TENSOR_SLACK = {"int8": 0.05, "fp8": 0.15}
"""Largest error of a number in 8 bits, as a part of the tensor's size."""


@dataclass(frozen=True)
class TensorFault:
    """One tensor that the engine does not hold as it should.

    Attributes:
        name: as it is published.
        cause: what is wrong with it.
        detail: the same in words, after the tensor's name.
    """

    name: str
    cause: Cause
    detail: str


def sample_tensors(model: DecoderConfig, params: Params) -> dict[str, TensorSample]:
    """Sample every tensor of the learner, the embeddings also as the head that they are in a tied model."""
    samples = {name: TensorSample.of(array) for name, array in hf_tensors(model, params)}
    if HEAD not in samples:
        samples[HEAD] = samples[str(tensor_names(model)["embed"])]
    return samples


def tensor_faults(
    engine: Samples,
    learner: Samples,
    *,
    precision: str,
    transposed: Callable[[str], TensorSample | None],
    older: Mapping[str, Callable[[], Samples]],
) -> list[TensorFault]:
    """Return every tensor whose sample differs between engine and learner, and what it is instead.

    Args:
        engine: samples of the engine's tensors, by name.
        learner: samples of the learner's, of :func:`sample_tensors`.
        precision: of the engine's weights, as it is configured.
        transposed: a sample of the transpose of the learner's tensor of that name.
        older: samples of parameters of other versions, by what to call them.
    """
    one_sided = _one_sided_faults(engine, learner)
    common = [name for name in learner if name in engine]
    wrong = [name for name in common if not _alike(engine[name], learner[name], precision)]
    if not wrong:
        return one_sided
    return one_sided + _common_faults(wrong, common, engine, learner, precision, transposed, older)


def _one_sided_faults(engine: Samples, learner: Samples) -> list[TensorFault]:
    """Return the tensors that only one of the two has. A tied head need not be a tensor of its own."""
    faults = []
    for name, sample in learner.items():
        if name not in engine and not (name == HEAD and _is_tied(learner, sample)):
            detail = "is not among the engine's tensors"
            if name == HEAD:
                detail += ", so that it reads logits from its embeddings"
            faults.append(TensorFault(name, Cause.MISSING_TENSOR, detail))
    for name in engine:
        if name not in learner:
            faults.append(TensorFault(name, Cause.WRONG_TENSOR, "is no tensor of the learner's"))
    return faults


def _is_tied(learner: Samples, head: TensorSample) -> bool:
    return any(sample is head for name, sample in learner.items() if name != HEAD)


def _common_faults(
    wrong: Sequence[str],
    common: Sequence[str],
    engine: Samples,
    learner: Samples,
    precision: str,
    transposed: Callable[[str], TensorSample | None],
    older: Mapping[str, Callable[[], Samples]],
) -> list[TensorFault]:
    """Return what the tensors that both have, and that differ, are instead; arguments as :func:`tensor_faults`."""
    rounded = _rounded(engine, learner, common)
    if rounded:
        return [TensorFault(name, Cause.DTYPE, f"is rounded to {rounded}") for name in wrong]

    are_most_wrong = len(wrong) > len(common) // 2
    for description, make in older.items():
        samples = make()
        if all(_alike(engine[name], samples[name], precision) for name in wrong):
            cause = Cause.STALE_VERSION if are_most_wrong else Cause.MISSING_TENSOR
            return [TensorFault(name, cause, f"is still that of {description}") for name in wrong]

    largest = max(_tensor_difference(engine[name], learner[name]) for name in wrong)
    if are_most_wrong and largest < MAX_TRAINING_CHANGE:
        detail = (
            f"differs a little (at most by {largest:.1e} of its size), as weights of another"
            " version do"
        )
        return [TensorFault(name, Cause.STALE_VERSION, detail) for name in wrong]
    return [
        TensorFault(name, *_fault(name, engine[name], learner, precision, transposed))
        for name in wrong
    ]


def _fault(
    name: str,
    found: TensorSample,
    learner: Samples,
    precision: str,
    transposed: Callable[[str], TensorSample | None],
) -> tuple[Cause, str]:
    wanted = learner[name]
    if found.shape != wanted.shape:
        return Cause.WRONG_TENSOR, f"has shape {found.shape}, the learner's {wanted.shape}"
    if not found.values.any():
        return Cause.MISSING_TENSOR, "is all zeros"
    if len(set(found.values.tolist())) == 1 and len(set(wanted.values.tolist())) > 1:
        return (
            Cause.MISSING_TENSOR,
            f"is {found.values[0]:g} everywhere, as it is made before it is loaded",
        )
    turned = transposed(name)
    if turned is not None and _alike(found, turned, precision):
        return Cause.TRANSPOSED_TENSOR, "is transposed"
    for other, sample in learner.items():
        if other != name and _alike(found, sample, precision):
            return Cause.MISNAMED_TENSOR, f"holds the numbers of {other}"
    return Cause.WRONG_TENSOR, f"differs by {_tensor_difference(found, wanted):.1%} of its size"


def _tensor_difference(found: TensorSample, wanted: TensorSample) -> float:
    """Return the RMS difference relative to the tensor's size; infinite between shapes."""
    if found.shape != wanted.shape:
        return float("inf")
    return float(np.sqrt(np.mean((found.values - wanted.values) ** 2)) / max(wanted.rms, 1e-30))


def _rounded(engine: Samples, learner: Samples, names: Sequence[str]) -> str | None:
    """Return the dtype that every tensor was rounded to, if rounding is the only difference."""
    for dtype, kind in ROUNDED.items():
        if all(
            np.array_equal(engine[n].values, learner[n].values.astype(kind).astype(np.float32))
            for n in names
        ):
            return dtype
    return None


def _alike(found: TensorSample, wanted: TensorSample, precision: str) -> bool:
    if found.shape != wanted.shape:
        return False
    kind = ROUNDED.get(precision)
    expected = wanted.values if kind is None else wanted.values.astype(kind).astype(np.float32)
    slack = TENSOR_SLACK.get(precision, 1e-6)
    size = max(wanted.rms, float(np.abs(expected).max(initial=0.0)), 1e-30)
    same_size = abs(found.rms - wanted.rms) <= max(slack, 1e-2 if kind else 1e-5) * size
    return same_size and bool(np.all(np.abs(found.values - expected) <= slack * size))


MAX_IDS = 512
"""Ids of the context that both run."""
LATE = 16
"""Ids after whose number a difference is not one of all positions: a wrong rotary table shows in
the first few."""
ACTIVATION_SLACK = {"float32": 1e-3, "tf32": 0.02, "float16": 0.02}
"""Largest error of a position's activations, as a part of their size; 0.1 in coarser precisions."""
ROUNDING_SLACK = 4.0
"""How many times what rounding was measured to cost at a position is rounding, too: kernels round
in other places."""


def outputs_of_layers(activations: forward.Activations, count: int) -> list[LayerOutput]:
    """Return the learner's layer outputs for the first ``count`` ids of its activations' first context."""

    def on_host(x: jax.Array) -> np.ndarray:
        return np.asarray(x.astype(jnp.float32))

    outputs = [LayerOutput(hidden=on_host(activations.embedded[0, :count]))]
    hidden_LTD = on_host(activations.hidden[:, 0, :count])
    keys_LKTh = on_host(activations.keys[:, 0, :, :count])
    values_LKTh = on_host(activations.values[:, 0, :, :count])
    for hidden_TD, keys_KTh, values_KTh in zip(hidden_LTD, keys_LKTh, values_LKTh, strict=True):
        outputs.append(
            LayerOutput(
                hidden=hidden_TD,
                keys=keys_KTh.transpose(1, 0, 2),
                values=values_KTh.transpose(1, 0, 2),
            )
        )
    return outputs


@dataclass(frozen=True, kw_only=True)
class LayerDifference:
    """The first layer whose output differs between engine and learner.

    Attributes:
        layer: its number; -1: the embeddings.
        parts: which of its ``keys``, ``values`` and ``hidden`` differ.
        difference: the largest, as a part of the activations' size.
        begin: index of the first id whose activations differ.
    """

    layer: int
    parts: tuple[str, ...]
    difference: float
    begin: int

    @property
    def is_late(self) -> bool:
        """Whether earlier ids do not differ, as they would if the difference were one of all positions."""
        return self.begin >= LATE

    @property
    def causes(self) -> list[Cause]:
        """What it speaks for."""
        if self.layer < 0:
            return [Cause.SETTING]
        if "keys" in self.parts and "values" in self.parts:
            return [Cause.SETTING, Cause.DTYPE]
        if "keys" in self.parts and self.is_late:
            return [Cause.POSITION, Cause.ROTARY]
        if "keys" in self.parts:
            return [Cause.ROTARY, Cause.SETTING]
        if self.is_late:
            return [Cause.WINDOW, Cause.MASK, Cause.ROTARY, Cause.SETTING]
        return [Cause.SETTING, Cause.WINDOW, Cause.EXPERTS, Cause.ROTARY]

    def describe(self) -> str:
        """Return it in words."""
        if self.layer < 0:
            return f"the embeddings differ already, by {self.difference:.1%} of their size"
        before = "the embeddings agree"
        if self.layer:
            before = f"the embeddings and layers 0 to {self.layer - 1} agree"
        what = {
            (True, True): "its keys and values differ: their weights, or the norm before them",
            (
                True,
                False,
            ): (
                "its keys differ and its values do not: rotary settings, positions, or the keys'"
                " weights"
            ),
            (False, True): "its values differ and its keys do not: the values' weights",
            (
                False,
                False,
            ): (
                "its keys and values agree and its output does not: queries, window, output"
                " projection, or what follows"
            ),
        }["keys" in self.parts, "values" in self.parts]
        layer = (
            f"layer {self.layer} is the first that differs, by {self.difference:.1%} of its size"
        )
        if self.is_late:
            layer += f", from id {self.begin} on"
        return f"{before}; {layer}: {what}"


def first_difference(
    engine: Sequence[LayerOutput],
    learner: Sequence[LayerOutput],
    *,
    precision: str,
    rounded: Sequence[LayerOutput] | None = None,
) -> LayerDifference | None:
    """Return the first layer whose output differs between engine and learner; None if none does.

    Args:
        engine: outputs of the engine's layers, embeddings first.
        learner: those of the learner's.
        precision: the coarser of the two.
        rounded: those of the learner's layers in that precision, if they are known. Single
            positions can lose much more to rounding than others, so what each loses there is
            allowed a few times.
    """
    slack = ACTIVATION_SLACK.get(precision, 0.1)
    for i, (theirs, own) in enumerate(zip(engine, learner, strict=True)):
        pairs = {
            "keys": (_unrepeated(theirs.keys, own.keys), own.keys),
            "values": (_unrepeated(theirs.values, own.values), own.values),
            "hidden": (theirs.hidden, own.hidden),
        }
        differences = {}
        is_over_T = np.zeros(len(own.hidden), bool)
        for name, (a, b) in pairs.items():
            if a is None or b is None:
                continue
            difference_T = _activation_differences(a, b)
            slack_T = np.full(len(difference_T), slack)
            if rounded is not None:
                rounding_T = _activation_differences(getattr(rounded[i], name), b)
                slack_T = np.maximum(slack_T, ROUNDING_SLACK * rounding_T)
            part_is_over_T = ~(difference_T <= slack_T)
            if part_is_over_T.any():
                differences[name] = difference_T
                is_over_T |= part_is_over_T
        if differences:
            largest_T = np.max(list(differences.values()), axis=0)
            return LayerDifference(
                layer=i - 1,
                parts=tuple(differences),
                difference=float(largest_T[is_over_T].max()),
                begin=int(np.argmax(is_over_T)),
            )
    return None


def _unrepeated(x: np.ndarray | None, like: np.ndarray | None) -> np.ndarray | None:
    """Return heads [T, K, h] without an engine's repetitions."""
    return x if x is None or like is None else x[:, :: x.shape[1] // like.shape[1]]


def _activation_differences(theirs: np.ndarray, own: np.ndarray) -> np.ndarray:
    """Return the difference of each position's activations [T, ...], as a part of their size, float64 [T].

    A number in 8 bits errs in proportion to itself, so whole positions are compared, not numbers.
    Some positions are much larger than the rest, the first one above all, and some much smaller:
    each is measured by its own size, or by that of the median position if that is larger.
    """
    axes = tuple(range(1, own.ndim))
    sizes_T = np.sqrt(np.mean(np.square(own, dtype=np.float64), axis=axes))
    errors_T = np.sqrt(np.mean(np.square(np.subtract(theirs, own, dtype=np.float64)), axis=axes))
    return errors_T / np.maximum(np.maximum(sizes_T, np.median(sizes_T)), 1e-30)
