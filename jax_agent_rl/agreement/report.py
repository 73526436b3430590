"""A diagnosis for people, and the evidence of a breach in the run folder: enough to repeat the diagnosis."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from jax_agent_rl.agreement.diagnosis import Diagnosis
from jax_agent_rl.agreement.subject import Context
from jax_agent_rl.agreement.tolerances import Tolerance
from jax_agent_rl.errors import CheckpointError
from jax_agent_rl.learner.comparison import Comparison
from jax_agent_rl.models.tensor_samples import TensorSample
from jax_agent_rl.observe.run_dir import DISAGREEMENT


def breach_line(comparison: Comparison, tolerance: Tolerance, version: int) -> str:
    """Return what was measured and what is allowed, in one line."""
    return (
        f"engine and learner disagree about the weights of version {version}: over {comparison.tokens} tokens "
        f"{comparison.mean:.1e} nats on average (allowed {tolerance.mean:.1e}), {comparison.largest:.1e} at most "
        f"(allowed {tolerance.token:.1e})"
    )


def table(diagnosis: Diagnosis) -> list[str]:
    """Return the findings, a line each, then the one to act on."""
    lines = [f"  gap in the contexts looked at: {_nats(diagnosis.gap)}"]
    for finding in diagnosis.findings:
        left = "" if finding.left is None else f" [leaves {_nats(finding.left)}]"
        lines.append(f"  {finding.verdict:<10}  {finding.name}: {finding.detail}{left}")
    return [*lines, f"=> {diagnosis.line}"]


def _nats(comparison: Comparison) -> str:
    return f"{comparison.mean:.1e} on average, {comparison.largest:.1e} at most"


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """The evidence of a breach in the run folder.

    Attributes:
        version: of the weights that were compared.
        step: that was about to learn.
        contexts: that were looked at.
        tolerance: that was broken.
        precision: of the engine.
        tensors: samples of the engine's tensors; empty where they could not be read.
        diagnosis: what was said then, as JSON; None where the learner spans processes.
    """

    version: int
    step: int
    contexts: Sequence[Context]
    tolerance: Tolerance
    precision: str
    tensors: Mapping[str, TensorSample]
    diagnosis: Mapping[str, Any] | None

    def to_json(self) -> dict[str, Any]:
        return {
            "version": self.version,
            "step": self.step,
            "tolerance": asdict(self.tolerance),
            "precision": self.precision,
            "diagnosis": self.diagnosis,
            "contexts": [context.to_json() for context in self.contexts],
            "tensors": {name: sample.to_json() for name, sample in self.tensors.items()},
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
            saved = json.loads(file.read_text())
            return cls(
                version=saved["version"],
                step=saved["step"],
                contexts=[Context.from_json(context) for context in saved["contexts"]],
                tolerance=Tolerance(**saved["tolerance"]),
                precision=saved["precision"],
                tensors={name: TensorSample.from_json(sample) for name, sample in saved["tensors"].items()},
                diagnosis=saved["diagnosis"],
            )
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointError(
                f"{file} cannot be read ({error!r}); remove it to diagnose the trajectories"
            ) from None


def as_json(diagnosis: Diagnosis) -> dict[str, Any]:
    """Return a diagnosis as JSON."""
    findings = [asdict(finding) for finding in diagnosis.findings]
    plain = {"cause": str(diagnosis.cause), "detail": diagnosis.detail, "line": diagnosis.line}
    return {**plain, "gap": asdict(diagnosis.gap), "findings": findings}
