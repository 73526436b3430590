"""Results of a diagnosis: causes with advice, findings, and the evidence of a breach.

Only rounding may separate log-probs of the same weights, so their tolerance follows from the
coarsest precision on either side. What is called float32 is less on accelerators: by default a TPU
multiplies float32 matrices in bfloat16 and an NVIDIA GPU in TF32. docs/agreement.md has the table,
with what was measured.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import jax

from jax_agent_rl.agreement.subject import Context
from jax_agent_rl.config import Config
from jax_agent_rl.errors import CheckpointError
from jax_agent_rl.learner.comparison import Comparison
from jax_agent_rl.models.tensors import TensorSample
from jax_agent_rl.observe.run_dir import DISAGREEMENT
from jax_agent_rl.utils.bounded_json import read_json_object


@dataclass(frozen=True, kw_only=True)
class Tolerance:
    """Nats: ``token`` for the largest gap of a single token, ``mean`` for the mean |gap|."""

    token: float
    mean: float

    def holds(self, comparison: Comparison) -> bool:
        """Return whether the gaps are within it; nothing compared is not a breach."""
        if not comparison.tokens:
            return True
        return comparison.largest <= self.token and comparison.mean <= self.mean


JAX_ENGINE: dict[str, Tolerance] = {
    "float32": Tolerance(token=5e-4, mean=5e-5),
    "tf32": Tolerance(token=0.1, mean=0.01),
    "float16": Tolerance(token=0.1, mean=0.01),
    "bfloat16": Tolerance(token=1.0, mean=0.06),
    "int8": Tolerance(token=2.0, mean=0.15),
    "fp8": Tolerance(token=3.0, mean=0.3),
}
"""Tolerances by precision, from fine to coarse.

The JAX engine shares the learner's functions, down to the norms.
"""

OTHER_ENGINE: dict[str, Tolerance] = {**JAX_ENGINE, "float32": Tolerance(token=1e-3, mean=1e-4)}
"""Tolerances of vLLM and of engines behind a rollout server, whose kernels add in another order."""


def coarsest(precisions: Collection[str]) -> str:
    """Return the coarsest precision.

    Unknown precisions count as bfloat16, in which most models are served.

    >>> coarsest(["float32", "int8", "bfloat16"])
    'int8'
    """
    from_fine_to_coarse = list(JAX_ENGINE)
    result = "float32"
    for precision in precisions:
        if precision not in from_fine_to_coarse:
            precision = "bfloat16"
        if from_fine_to_coarse.index(precision) > from_fine_to_coarse.index(result):
            result = precision
    return result


def product_precision(dtype: str, platform: str) -> str:
    """Return the precision in which JAX's platform of this name computes products of a dtype."""
    if dtype != "float32":
        return dtype
    if platform == "tpu":
        return "bfloat16"
    if platform in ("gpu", "cuda"):
        return "tf32"
    return dtype


def tolerance(precisions: Collection[str], *, jax_engine: bool, platform: str) -> Tolerance:
    """Return the tolerance between engines and learner.

    Args:
        precisions: the precisions of the engines and of the learner.
        jax_engine: whether the engines are this package's.
        platform: JAX's name of the learner's platform.
    """
    by_precision = JAX_ENGINE if jax_engine else OTHER_ENGINE
    return by_precision[coarsest([product_precision(p, platform) for p in precisions])]


def run_tolerance(config: Config, precisions: Sequence[str]) -> Tolerance:
    """Return the tolerance of a run whose engines have these precisions."""
    configured = config.trainer.agreement_tolerance
    if configured is not None:
        token, mean = configured
        return Tolerance(token=token, mean=mean)
    return tolerance(
        [*precisions, config.learner.compute_dtype],
        jax_engine=(
            config.rollout.backend == "jetstream"
            and config.rollout.jetstream.engine_factory is None
        ),
        platform=jax.default_backend(),
    )


class Cause(StrEnum):
    """Why engine and learner disagree: the name used in reports, and advice.

    ``docs/agreement.md`` explains each.
    """

    advice: str

    def __new__(cls, name: str, advice: str) -> Cause:
        cause = str.__new__(cls, name)
        cause._value_ = name
        cause.advice = advice
        return cause

    TOKEN_DRIFT = (
        "token drift",
        (
            "send the engine the trajectory's ids as they are: no second tokenization, no BOS"
            " added, nothing cut off; `jax-agent-rl conformance` tests it"
        ),
    )
    PADDING = (
        "padding is attended to",
        "mask padding in the engine's attention, or send prompts unpadded",
    )
    POSITION = (
        "position offset",
        (
            "correct the positions of sampled tokens in the engine, or which token a log-prob is"
            " returned with"
        ),
    )
    TEMPERATURE = (
        "temperature",
        (
            "let the engine report log-probs after temperature (vLLM:"
            " logprobs_mode=processed_logprobs) and sample at rollout.temperature"
        ),
    )
    TRUNCATED_SUPPORT = (
        "truncated support",
        "set top_k=0, top_p=1 and min_p=0 in the engine, also in its generation_config.json",
    )
    STALE_VERSION = (
        "stale weights",
        (
            "make the engine load the weights of each update before it takes over their version;"
            " restart it to begin again from the learner's"
        ),
    )
    MISSING_TENSOR = (
        "missing tensor",
        "add the tensor to what is published, or to the names that the engine's loader knows",
    )
    MISNAMED_TENSOR = (
        "misnamed tensor",
        "correct the table that maps the learner's names to the engine's",
    )
    TRANSPOSED_TENSOR = (
        "transposed tensor",
        "transpose the tensor where weights are exported or loaded, in one of the two places",
    )
    WRONG_TENSOR = (
        "wrong tensor",
        "look at how the tensor is split, fused or converted on its way to the engine",
    )
    DTYPE = (
        "dtype",
        (
            "set in rollout.jetstream or rollout.vllm the dtype that the engine really computes in,"
            " or give it the one that is configured; a tolerance of that precision then applies"
        ),
    )
    ROTARY = (
        "rotary settings",
        "give the engine the rope_theta and rope_scaling of the model's config.json",
    )
    WINDOW = (
        "attention window",
        "give the engine the sliding_window and layer_types of the model's config.json",
    )
    EXPERTS = (
        "expert routing",
        "give the engine the num_experts_per_tok and norm_topk_prob of the model's config.json",
    )
    SETTING = (
        "model settings",
        (
            "give the engine the field of the model's config.json that is named, or correct its"
            " code of the family"
        ),
    )
    MASK = (
        "attention mask",
        (
            "correct which cached ids the engine's decode steps attend to, and which of them its"
            " cache keeps between turns"
        ),
    )
    ADAPTER = (
        "adapter scale",
        "give the engine the lora_alpha and r that the adapters were published with",
    )
    LOGITS = (
        "changed logits",
        (
            "turn off penalties, caps and forbidden ids in the engine, also in its"
            " generation_config.json, and mask ids that only pad the vocabulary"
        ),
    )
    MIXED_ANSWERS = "mixed answers", "return with each request the log-probs of its own tokens"
    STALE_PREFIX = "stale prefix cache", "empty the engine's prefix cache with every weight update"
    LEARNER = (
        "the learner's packed pass",
        (
            "set learner.share_prefixes=false and one device in learner.mesh, and report which of"
            " the two helps"
        ),
    )
    ROUNDING = (
        "rounding",
        (
            "set trainer.agreement_tolerance to a few times the compared_gap_max and"
            " compared_gap_mean of metrics.jsonl"
        ),
    )
    UNKNOWN = (
        "unknown",
        (
            "serve the same model with another engine: if that agrees, the one in use is at fault,"
            " else the model's files"
        ),
    )


OTHER_ENGINES = {
    "jetstream": "rollout.backend=vllm",
    "sglang": "rollout.backend=jetstream",
    "vllm": "rollout.backend=jetstream",
    "remote": "rollout.backend=jetstream",
}
"""By ``rollout.backend``, the setting that serves a model with another engine."""


def advice(cause: Cause, backend: str) -> str:
    """Return what to do about a cause.

    With a known ``rollout.backend``, the advice to use another engine names one.
    """
    other_engine = OTHER_ENGINES.get(backend)
    if cause is not Cause.UNKNOWN or other_engine is None:
        return cause.advice
    return cause.advice.replace("another engine", f"another engine ({other_engine})")


@dataclass(frozen=True)
class HypothesisResult:
    """The result of testing one hypothesis.

    Attributes:
        name: name of the cause, or of what was inspected.
        verdict: ``found``, ``explains``, ``ruled out`` or ``not tested``.
        detail: the evidence in words.
        left: the gap that the best attempt leaves; None without an attempt.
    """

    name: str
    verdict: str
    detail: str
    left: Comparison | None = None


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """The outcome of a diagnosis.

    Attributes:
        contexts: the examined contexts.
        gap: the gap between engine and learner in these.
        findings: results in the order of a report.
        cause: the likeliest cause.
        detail: evidence for the cause, in words.
        backend: ``rollout.backend``.
    """

    contexts: Sequence[Context]
    gap: Comparison
    findings: Sequence[HypothesisResult]
    cause: Cause
    detail: str
    backend: str = ""

    @property
    def line(self) -> str:
        """The one line to act on."""
        return f"{self.cause}: {self.detail}; {advice(self.cause, self.backend)}"

    def lines(self) -> list[str]:
        """Return the findings, a line each, then the one to act on."""
        lines = [f"  gap in the contexts examined: {_nats(self.gap)}"]
        for finding in self.findings:
            line = f"  {finding.verdict:<10}  {finding.name}: {finding.detail}"
            if finding.left is not None:
                line += f" [leaves {_nats(finding.left)}]"
            lines.append(line)
        lines.append(f"=> {self.line}")
        return lines

    def to_json(self) -> dict[str, Any]:
        return {
            "cause": str(self.cause),
            "detail": self.detail,
            "line": self.line,
            "gap": asdict(self.gap),
            "findings": [asdict(finding) for finding in self.findings],
        }


def breach_line(comparison: Comparison, tolerance: Tolerance, version: int) -> str:
    """Return what was measured between engine and learner, and what is allowed, in one line."""
    return (
        f"engine and learner disagree about the weights of version {version}: over"
        f" {comparison.tokens} tokens {comparison.mean:.1e} nats on average (allowed"
        f" {tolerance.mean:.1e}), {comparison.largest:.1e} at most (allowed {tolerance.token:.1e})"
    )


def _nats(comparison: Comparison) -> str:
    return f"{comparison.mean:.1e} on average, {comparison.largest:.1e} at most"


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """The evidence of a breach in the run folder, enough to repeat the diagnosis.

    Attributes:
        version: policy version of the weights that were compared.
        step: the step that was about to learn.
        contexts: the examined contexts.
        tolerance: the tolerance that was exceeded.
        precision: the engine's compute precision.
        tensors: samples of the engine's tensors; empty where they could not be read.
        replicas: samples of the tensors of further engines.
        diagnosis: the diagnosis made during the run, as JSON; None where the learner spans
            processes.
    """

    version: int
    step: int
    contexts: Sequence[Context]
    tolerance: Tolerance
    precision: str
    tensors: Mapping[str, TensorSample]
    diagnosis: Mapping[str, Any] | None
    replicas: Sequence[Mapping[str, TensorSample]] = ()

    def to_json(self) -> dict[str, Any]:
        return {
            "version": self.version,
            "step": self.step,
            "tolerance": asdict(self.tolerance),
            "precision": self.precision,
            "diagnosis": self.diagnosis,
            "contexts": [context.to_json() for context in self.contexts],
            "tensors": _samples_to_json(self.tensors),
            "replicas": [_samples_to_json(samples) for samples in self.replicas],
        }

    @classmethod
    def read(cls, run: Path) -> Evidence | None:
        """Read the evidence of a run; None if its engine and learner agreed.

        Raises:
            CheckpointError: the file is damaged.
        """
        file = run / DISAGREEMENT
        if not file.is_file():
            return None
        try:
            saved: dict[str, Any] = read_json_object(file)
            saved["contexts"] = [Context.from_json(context) for context in saved["contexts"]]
            saved["tensors"] = _samples_from_json(saved["tensors"])
            replicas = saved.get("replicas", ())  # files of earlier versions have none
            saved["replicas"] = [_samples_from_json(samples) for samples in replicas]
            saved["tolerance"] = Tolerance(**saved["tolerance"])
            return cls(**saved)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(
                f"{file} cannot be read ({error!r}); remove it to diagnose the trajectories"
            ) from None


def _samples_to_json(samples: Mapping[str, TensorSample]) -> dict[str, Any]:
    return {name: sample.to_json() for name, sample in samples.items()}


def _samples_from_json(saved: Mapping[str, Any]) -> dict[str, TensorSample]:
    return {name: TensorSample.from_json(sample) for name, sample in saved.items()}
