"""Comparison of an engine's weights, by name, and activations, by layer, with the learner's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

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
"""Dtypes that float32 is rounded to, by name."""
MAX_TRAINING_CHANGE = 0.05
"""Largest change of a tensor from one version to another, as a fraction of its size."""
TENSOR_SLACK = {"int8": 0.05, "fp8": 0.15}
"""Largest error of a number in 8 bits, as a fraction of the tensor's size."""


@dataclass(frozen=True)
class TensorFault:
    """One tensor that the engine does not hold as it should.

    Attributes:
        name: its published name.
        detail: what is wrong with it, in words that follow the tensor's name.
    """

    name: str
    cause: Cause
    detail: str


def sample_tensors(model: DecoderConfig, params: Params) -> dict[str, TensorSample]:
    """Sample every tensor of the learner; in a tied model, the embeddings are also the head."""
    samples = {}
    for name, array in hf_tensors(model, params):
        samples[name] = TensorSample.of(array)
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
        learner: samples of the learner's tensors, from :func:`sample_tensors`.
        precision: the configured precision of the engine's weights.
        transposed: returns a sample of the transpose of the learner's tensor of that name.
        older: functions that sample the parameters of other versions, by description.
    """
    one_sided = _one_sided_faults(engine, learner)
    common = [name for name in learner if name in engine]
    wrong = [name for name in common if not _alike(engine[name], learner[name], precision)]
    if not wrong:
        return one_sided
    return one_sided + _common_faults(wrong, common, engine, learner, precision, transposed, older)


def _one_sided_faults(engine: Samples, learner: Samples) -> list[TensorFault]:
    """Return the tensors that only one of the two has."""
    faults = []
    for name, sample in learner.items():
        if name in engine:
            continue
        if name == HEAD and _is_tied(learner, sample):
            continue  # a tied head need not be a tensor of its own
        detail = "is not among the engine's tensors"
        if name == HEAD:
            detail += ", so that it reads logits from its embeddings"
        faults.append(TensorFault(name, Cause.MISSING_TENSOR, detail))
    for name in engine:
        if name not in learner:
            faults.append(TensorFault(name, Cause.WRONG_TENSOR, "is not a tensor of the learner's"))
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
    """Return what is wrong with tensors that both have.

    Args:
        wrong: the names of the tensors that differ.
        common: the names of all that both have.
        engine, learner, precision, transposed, older: as in :func:`tensor_faults`.
    """
    rounded_to = _rounded_dtype(engine, learner, common)
    if rounded_to is not None:
        return [TensorFault(name, Cause.DTYPE, f"is rounded to {rounded_to}") for name in wrong]

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

    faults = []
    for name in wrong:
        cause, detail = _explain_tensor(name, engine[name], learner, precision, transposed)
        faults.append(TensorFault(name, cause, detail))
    return faults


def _explain_tensor(
    name: str,
    sample: TensorSample,
    learner: Samples,
    precision: str,
    transposed: Callable[[str], TensorSample | None],
) -> tuple[Cause, str]:
    """Return what is wrong with one of the engine's tensors, as a cause and in words."""
    expected = learner[name]
    if sample.shape != expected.shape:
        return Cause.WRONG_TENSOR, f"has shape {sample.shape}, the learner's {expected.shape}"
    if not sample.values.any():
        return Cause.MISSING_TENSOR, "is all zeros"

    is_constant = len(set(sample.values.tolist())) == 1
    if is_constant and len(set(expected.values.tolist())) > 1:
        value = sample.values[0]
        detail = f"is {value:g} everywhere, as it is made before it is loaded"
        return Cause.MISSING_TENSOR, detail

    transpose = transposed(name)
    if transpose is not None and _alike(sample, transpose, precision):
        return Cause.TRANSPOSED_TENSOR, "is transposed"
    for other_name, other in learner.items():
        if other_name != name and _alike(sample, other, precision):
            return Cause.MISNAMED_TENSOR, f"holds the numbers of {other_name}"
    difference = _tensor_difference(sample, expected)
    return Cause.WRONG_TENSOR, f"differs by {difference:.1%} of its size"


def _tensor_difference(sample: TensorSample, expected: TensorSample) -> float:
    """Return the RMS difference relative to the tensor's size; infinite between shapes."""
    if sample.shape != expected.shape:
        return float("inf")
    rms = np.sqrt(np.mean((sample.values - expected.values) ** 2))
    return float(rms / max(expected.rms, 1e-30))


def _rounded_dtype(engine: Samples, learner: Samples, names: Sequence[str]) -> str | None:
    """Return the dtype that every tensor was rounded to, if rounding is the only difference."""
    for name, dtype in ROUNDED.items():
        if all(np.array_equal(engine[n].values, _round(learner[n].values, dtype)) for n in names):
            return name
    return None


def _round(values: np.ndarray, dtype: Any) -> np.ndarray:
    return values.astype(dtype).astype(np.float32)


def _alike(sample: TensorSample, expected: TensorSample, precision: str) -> bool:
    """Return whether two samples differ by no more than this precision makes them."""
    if sample.shape != expected.shape:
        return False

    values = expected.values
    slack = TENSOR_SLACK.get(precision, 1e-6)
    rms_slack = max(slack, 1e-5)
    if precision in ROUNDED:
        values = _round(values, ROUNDED[precision])
        rms_slack = max(slack, 1e-2)
    size = max(expected.rms, float(np.abs(values).max(initial=0.0)), 1e-30)
    is_same_size = abs(sample.rms - expected.rms) <= rms_slack * size
    if not is_same_size:
        return False
    return bool(np.all(np.abs(sample.values - values) <= slack * size))


MAX_IDS = 512
"""Ids of the context that both run."""
LATE = 16
"""First index from which on a difference is not one of all positions.

A wrong rotary table shows in the first few.
"""
ACTIVATION_SLACK = {"float32": 1e-3, "tf32": 0.02, "float16": 0.02}
"""Largest error of a position's activations, relative to their size; 0.1 in coarser precisions."""
ROUNDING_SLACK = 4.0
"""Allowed multiple of what rounding was measured to cost at a position.

The engine's kernels round in other places.
"""


def outputs_of_layers(
    model: DecoderConfig, activations: forward.Activations, count: int
) -> list[LayerOutput]:
    """Return the learner's layer outputs for the first ``count`` ids of the first context."""

    def on_host(x: jax.Array) -> np.ndarray:
        return np.asarray(x.astype(jnp.float32))

    outputs = [LayerOutput(hidden=on_host(activations.embedded[0, :count]))]
    hidden_LTD = on_host(activations.hidden[:, 0, :count])
    if activations.keys is None or activations.values is None:
        return outputs + [LayerOutput(hidden=hidden_TD) for hidden_TD in hidden_LTD]

    keys_LKTh = on_host(activations.keys[:, 0, :, :count])
    values_LKTh = on_host(activations.values[:, 0, :, :count])
    for layer, kind in enumerate(model.layer_kinds):
        keys_KTh = forward.unpadded_heads(model, kind, keys_LKTh[layer])
        values_KTh = forward.unpadded_heads(model, kind, values_LKTh[layer])
        outputs.append(
            LayerOutput(
                hidden=hidden_LTD[layer],
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
        difference: the largest difference, as a fraction of the activations' size.
        begin: index of the first id whose activations differ.
        has_keys: whether its keys and values were compared; a layer need not have any.
    """

    layer: int
    parts: tuple[str, ...]
    difference: float
    begin: int
    has_keys: bool = True

    @property
    def is_late(self) -> bool:
        """Whether the first ids agree: whatever changes all positions shows there already."""
        return self.begin >= LATE

    @property
    def causes(self) -> list[Cause]:
        """The causes that it speaks for, the likeliest first."""
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

        agreeing = "the embeddings agree"
        if self.layer:
            agreeing = f"the embeddings and layers 0 to {self.layer - 1} agree"
        layer = (
            f"layer {self.layer} is the first that differs, by {self.difference:.1%} of its size"
        )
        if self.is_late:
            layer += f", from id {self.begin} on"
        return f"{agreeing}; {layer}: {self._describe_parts()}"

    def _describe_parts(self) -> str:
        if not self.has_keys:
            return "what mixes its ids, or what follows"
        keys_differ = "keys" in self.parts
        values_differ = "values" in self.parts
        if keys_differ and values_differ:
            return "its keys and values differ: their weights, or the norm before them"
        if keys_differ:
            return (
                "its keys differ and its values do not: rotary settings, positions, or the keys'"
                " weights"
            )
        if values_differ:
            return "its values differ and its keys do not: the values' weights"
        return (
            "its keys and values agree and its output does not: queries, window, output"
            " projection, or what follows"
        )


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
        learner: outputs of the learner's layers.
        precision: the coarser precision of the two.
        rounded: outputs of the learner's layers in that precision, if they are known. Single
            positions can lose much more to rounding than others, so what each loses there is
            allowed a few times.
    """
    slack = ACTIVATION_SLACK.get(precision, 0.1)
    for i, (engine_output, learner_output) in enumerate(zip(engine, learner, strict=True)):
        pairs = {
            "keys": (
                _unrepeated(engine_output.keys, learner_output.keys),
                learner_output.keys,
            ),
            "values": (
                _unrepeated(engine_output.values, learner_output.values),
                learner_output.values,
            ),
            "hidden": (engine_output.hidden, learner_output.hidden),
        }
        differences = {}
        is_over_T = np.zeros(len(learner_output.hidden), bool)
        for name, (actual, expected) in pairs.items():
            if actual is None or expected is None:
                continue
            difference_T = _activation_differences(actual, expected)
            slack_T = np.full(len(difference_T), slack)
            if rounded is not None:
                rounding_T = _activation_differences(getattr(rounded[i], name), expected)
                slack_T = np.maximum(slack_T, ROUNDING_SLACK * rounding_T)
            part_is_over_T = ~(difference_T <= slack_T)  # a difference of NaN is over it
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
                has_keys=pairs["keys"][0] is not None and pairs["keys"][1] is not None,
            )
    return None


def _unrepeated(x: np.ndarray | None, like: np.ndarray | None) -> np.ndarray | None:
    """Return heads [T, K, h] without an engine's repetitions."""
    if x is None or like is None:
        return x
    repetitions = x.shape[1] // like.shape[1]
    return x[:, ::repetitions]


def _activation_differences(actual: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """Return the difference of each position's activations, as a fraction of their size.

    A number in 8 bits errs in proportion to itself, so whole positions are compared, not numbers.
    Some positions are much larger than the others, the first one above all, and some much smaller:
    each is measured by its own size, or by the median position's if that is larger.

    Args:
        actual: [T, ...].
        expected: [T, ...].

    Returns:
        float64 [T].
    """
    axes = tuple(range(1, expected.ndim))
    errors = np.subtract(actual, expected, dtype=np.float64)
    errors_T = np.sqrt(np.mean(np.square(errors), axis=axes))
    sizes_T = np.sqrt(np.mean(np.square(expected, dtype=np.float64), axis=axes))
    return errors_T / np.maximum(np.maximum(sizes_T, np.median(sizes_T)), 1e-30)
